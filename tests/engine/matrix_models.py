"""The models, prompts, adapters and drafts of the feature matrix, and the tokens that each case must give."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvloom.core import CacheControl
from kvloom.engine import Engine, Request, SamplingParams
from tests.engines import make_engine
from tests.models import audio_prompts, image_prompts, test_cross_attention as crossing
from tests.models.heads import MTP_FAMILIES, save_mtp, write_eagle
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import tiny

from .covering import Case
from .feature_matrix import MEDIA, RECURRENT
from .test_documents import blended
from .test_lora import TARGETS as LORA_TARGETS

__all__ = [
    "COPIED",
    "KV_DTYPES",
    "NEW",
    "PREFIX",
    "SHARE",
    "Prompt",
    "Wanted",
    "add",
    "model_of",
    "outputs",
    "prompts",
]

NEW = 8
KV_DTYPES = {"exact": "fp32", "int8": "int8", "fp8": "fp8"}
PREFIX = 64
DOCUMENT, SHARE = (20, PREFIX), 0.1
"""The tokens of the document in prompts, and the share of them that a request computes."""
COPIED = 39
"""Number of tokens that a request copies: all but the first 5."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with its images and audio clips."""

    tokens: list[int]
    images: list[Any] = field(default_factory=list)
    audio: list[Any] = field(default_factory=list)


@cache
def model_of(family: str) -> Any:
    if family == "gemma3":
        return image_prompts.vision_model(family)
    if family == "mllama":
        return crossing.crossing()
    if family == "qwen2_5_omni_thinker":
        return audio_prompts.audio_model(family)
    return tiny(family)


@cache
def prompts(family: str) -> list[Prompt]:
    """Return three prompts with a common prefix. Their ends repeat, so that lookups find drafts."""
    rng = random.Random(3)
    text = [rng.randrange(3, 58) for _ in range(PREFIX)]
    prefix = Prompt(text)
    if family == "gemma3":
        image = image_prompts.image_of(family, 1)
        prefix = Prompt(image_prompts.prompt_of(family, text[:20], image, text[:26]), [image])
    elif family == "mllama":
        prefix = Prompt([*text[:40], crossing.IMAGE, *text[40:]], [crossing.picture(1)])
    elif family == "qwen2_5_omni_thinker":
        image, clip = image_prompts.image_of("qwen2_5_vl", 1), audio_prompts.clip_of(family, 1)
        tokens = audio_prompts.prompt_of(family, text[:20], clip, text[20:30], image, text[30:])
        prefix = Prompt(tokens, [image], [clip])
    ends = [[5 + place, 9, 11, 9, 11, 9][: 3 + place] for place in range(3)]
    return [Prompt(prefix.tokens + end, prefix.images, prefix.audio) for end in ends]


def params(samples: str = "1", with_logprobs: bool = False) -> SamplingParams:
    """Return the parameters of one greedy answer, of three drawn ones, of three beams, or of a prefill worker."""
    more: dict[str, Any] = {"temperature": 0.0}
    if samples == "prefill":
        return SamplingParams(max_tokens=1, **more)
    if samples == "3":
        more = {"n": 3, "temperature": 1.0, "seed": 11}
    elif samples == "beams":
        more |= {"n": 3, "beam_width": 3}
    return SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0 if with_logprobs else None, **more)


def add(
    engine: Engine,
    prompt: Prompt,
    case: Case,
    samples: str,
    tenant: str = "",
    lora: str | None = None,
    **more: Any,
) -> Request:
    """Queue a prompt. Marks its document if the case reuses documents."""
    spans = (DOCUMENT,) if case["documents"] == "reused" else ()
    control = CacheControl(tenant=tenant, documents=spans)
    asked = params(samples, case.get("dtype", "exact") != "exact")
    return engine.add(
        prompt.tokens, asked, control, lora=lora, images=prompt.images, audio=prompt.audio, **more
    )  # fmt: skip


def outputs(request: Request) -> list[list[int]]:
    """Return the tokens of each sample, or of each beam, best first."""
    return [sample.output for sample in request.returned_samples]


class Wanted:
    """Adapters, drafts and expected tokens of each family. Each is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, ...], list[list[list[int]]]] = {}

    def adapter(self, family: str) -> Path:
        """Return the folder of a LoRA adapter."""
        folder = self._folder / "adapters" / family
        targets = LORA_TARGETS.get(family, ("q_proj", "o_proj"))
        below: tuple[str, ...] = ("model.language_model",) if family in MEDIA else ("",)
        if family == "mllama":  # adapters may not target its layers of cross attention
            below = tuple(f"model.language_model.layers.{layer}." for layer in (0, 2, 4))
        return folder if folder.exists() else write_adapter(folder, model_of(family), targets, below=below)

    def draft(self, family: str) -> str:
        """Return the setting of a draft model. It is the model itself, or a Llama if the model has recurrent layers."""
        family = "llama" if family in RECURRENT else family
        folder = self._folder / "drafts" / family
        if not folder.exists():
            model_of(family).save_pretrained(folder)
        return f"draft={folder}"

    def head(self, family: str) -> tuple[Any, str]:
        """Return a model with a draft head, and the setting of the head. The weights are those of `model_of`."""
        if family in MTP_FAMILIES:
            return _model_with_head(family, self._folder / "heads" / family), "mtp"
        folder = self._folder / "heads" / family
        if not folder.exists():
            write_eagle(folder, model_of(family).get_output_embeddings().weight.detach(), alike=False)
        return model_of(family), f"eagle={folder}"

    def checkpoint(self, case: Case) -> str:
        """Return a folder with the model of a case."""
        family = case["family"]
        if case["speculate"] == "head" and family in MTP_FAMILIES:
            self.head(family)
            return str(self._folder / "heads" / family)
        folder = self._folder / "models" / family
        if not folder.exists():
            model_of(family).save_pretrained(folder)
        return str(folder)

    def tokens(self, case: Case) -> list[list[list[int]]]:
        """Return the tokens by prompt and sample: those of `generate()` for greedy answers in an exact dtype, and those
        of a plain engine for others."""
        key = tuple(case[name] for name in ("family", "dtype", "lora", "samples", "documents"))
        if key not in self._known:
            self._known[key] = self._computed(*key)
        return self._known[key]

    def logprob_error(self, case: Case, prompt: Prompt, sample: Request) -> float:
        """Return the mean difference between the log-probabilities that a sample reports for its tokens, and those that a
        plain engine with the same dtype computes for the same tokens."""
        model = model_of(case["family"])
        if case["lora"] != "none":
            model = merged(model, self.adapter(case["family"]))
        engine = make_engine(deepcopy(model), 1 << 22, KV_DTYPES[case["dtype"]])
        forced = engine.add(
            prompt.tokens + sample.output,
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            images=prompt.images,
            audio=prompt.audio,
        )
        engine.run()
        engine.close()
        found = [(forced.prompt_logprobs[place - NEW], sample.logprobs[place]) for place in range(NEW)]
        errors = [
            abs(right[token].logprob - reported[token].logprob)
            for token, (right, reported) in zip(sample.output, found, strict=True)
            if right is not None
        ]
        assert len(errors) == NEW
        return sum(errors) / NEW

    def _computed(
        self, family: str, dtype: str, lora: str, samples: str, documents: str
    ) -> list[list[list[int]]]:
        model, asked = model_of(family), prompts(family)
        if lora != "none":
            model = merged(model, self.adapter(family))
        if dtype == "exact" and samples == "1":
            if documents == "reused":
                spans = (DOCUMENT,)
                return [[blended(deepcopy(model), one.tokens, spans, SHARE, NEW)[-NEW:]] for one in asked]
            return [[generated(family, model, one)] for one in asked]
        share = SHARE if documents == "reused" else None
        engine = make_engine(deepcopy(model), 1 << 22, KV_DTYPES[dtype], reuse_documents=share)
        requests = [add(engine, one, {"documents": documents}, samples) for one in asked]
        engine.run()
        found = [outputs(request) for request in requests]
        engine.close()
        return found


def generated(family: str, model: Any, prompt: Prompt) -> list[int]:
    """Return the greedy tokens of transformers' `generate()`."""
    if family == "gemma3":
        return image_prompts.expected(family, model, prompt.tokens, prompt.images, NEW)[-NEW:]
    if family == "mllama":
        model = crossing.causal(deepcopy(model))  # tokens before an image do not see it
        return crossing.expected(model, prompt.tokens, prompt.images, NEW)[-NEW:]
    if family == "qwen2_5_omni_thinker":
        return audio_prompts.expected(family, model, prompt.tokens, prompt.images + prompt.audio, NEW)[-NEW:]
    return greedy(model, prompt.tokens, NEW)


@cache
def _model_with_head(family: str, folder: Path) -> Any:
    return save_mtp(folder, family, alike=False)
