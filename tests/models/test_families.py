"""Every family of transformers: it runs exactly like generate(), in three ways, or is refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvloom.engine import Engine, SamplingParams
from kvloom.models.loading import refusal
from kvloom.models.paged import install, runs_separately
from kvloom.models.specs import ModelError
from tests.engines import PATIENT, make_engine
from tools import families_table

from .tiny_families import EVERY
from .zoo import config_of, expected, prompts_of, tiny

POOL, NEW = 1 << 24, 8
IS_OLDER = Version(transformers.__version__) < Version("5.22")
NEED_NEWER = {
    *(
        "axk2",
        "deepseek_v32",
        "glm_moe_dsa",
        "hy_v4",
        "qwen4_exp",
        "qwen4_exp_text",
    ),  # store other data in 5.17
    *("big_bird", "cohere_compass_text"),  # not causal in 5.17; cannot be built from this config
}
NOT_ALONE = ("mllama_text_model", "qwen2_5_vl_text")
"""Text models that transformers builds only as parts of others."""
FAMILIES = [
    name
    for name, row in EVERY.items()
    if row["model_type"] in CONFIG_MAPPING and name not in NOT_ALONE and name not in families_table.REFUSED
]
"""The families that this version of transformers has."""


def lively(family: str) -> Any:
    """A tiny model in which no weight is zero, and all matrices matter: its tokens then depend on all that it read."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.numel() and not weight.any():
                weight.normal_(0, 0.2, generator=generator)
            elif weight.dim() > 1 and 0 < float(weight.std()) < 0.1:
                weight.mul_(0.2 / float(weight.std()))
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None  # some families need one in their configs
    return model


def tokens_of(engine: Engine, prompts: list[list[int]], logprobs: bool = False) -> Any:
    """The tokens of all prompts, and how many of them were found in the cache; or their log-probabilities, too."""
    params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=1)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    engine.cache.check()
    tokens, hits = [request.tokens for request in requests], sum(one.cached_tokens for one in requests)
    if not logprobs:
        return tokens, hits
    chosen = [
        [of_step[token].logprob for token, of_step in zip(request.output, request.logprobs, strict=True)]
        for request in requests
    ]
    return tokens, hits, torch.tensor(chosen)


def reference(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens that generate() gives, and the log-probabilities of the new ones."""
    tokens, logprobs = [], []
    for prompt in prompts:
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(found.sequences[0].tolist())
        of_steps = torch.cat(found.logits).log_softmax(-1)
        logprobs.append(of_steps.gather(1, found.sequences[0, len(prompt) :, None])[:, 0])
    return tokens, torch.stack(logprobs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(3)
def test_tokens_are_generates_whole_in_chunks_and_from_disk(family: str, tmp_path: Path) -> None:
    if IS_OLDER and family in NEED_NEWER:
        pytest.skip(f"transformers {transformers.__version__} is too old for {family}")
    assert refusal(config_of(family)) is None
    model = lively(family)
    prompts = prompts_of(1, (5, 40, 29))
    wanted, logprobs = reference(model, prompts)

    def same(engine: Engine) -> int:
        tokens, hits, found = tokens_of(engine, prompts, logprobs=True)
        assert tokens == wanted
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-3)
        engine.close()
        return hits

    kept = {"tiers": [f"disk:{tmp_path}:64MiB"], "offload": PATIENT}
    assert same(make_engine(model, POOL, **kept)) == 0
    assert same(make_engine(model, POOL, **kept)) >= 32  # found on disk
    same(make_engine(model, POOL, token_budget=9))


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash"])
def test_attention_sinks_of_each_head_are_those_of_the_model(family: str) -> None:
    model = lively(family)
    prompts = prompts_of(1, (5, 40, 29))
    _, without = reference(model, prompts)
    sinks = [weight for name, weight in model.named_parameters() if "sink" in name]
    assert sinks
    for weight in sinks:
        weight.data = torch.linspace(-1, 4, weight.numel()).view(weight.shape)
    wanted, logprobs = reference(model, prompts)
    assert (logprobs - without).abs().max() > 0.01
    for budget in (64, 9):
        tokens, _, found = tokens_of(make_engine(model, POOL, token_budget=budget), prompts, logprobs=True)
        assert tokens == wanted
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-3)


def test_openai_gpt_keeps_its_own_attention_for_other_callers() -> None:
    """kvloom's attention with a cache is installed only while it computes."""
    model = lively("openai-gpt")
    prompts = prompts_of(1, (5, 40))
    wanted, _ = reference(model, prompts)
    engine = make_engine(model, POOL)
    tokens_of(engine, prompts)
    assert not any("_attn" in vars(block.attn) for block in model.transformer.h)
    assert tokens_of(engine, prompts)[0] == wanted


@pytest.mark.skipif(IS_OLDER, reason="the rows are those of transformers 5.22")
def test_every_family_of_transformers_has_a_row() -> None:
    of_rows = {row["model_type"] for row in EVERY.values()}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - of_rows - set(families_table.REFUSED) == set()


@pytest.mark.skipif(IS_OLDER, reason="the table is of transformers 5.22")
@pytest.mark.slow
def test_the_table_in_the_documents_is_current() -> None:
    text = families_table.FILE.read_text(encoding="utf-8")
    rows, counts = families_table.table()
    assert rows in text, "run: .venv/bin/python tools/families_table.py"
    assert counts in re.sub(r"\s+", " ", text), "run: .venv/bin/python tools/families_table.py"


@pytest.mark.parametrize("family", sorted(families_table.REFUSED))
@pytest.mark.few(2)
def test_a_family_that_cannot_run_is_refused_with_its_reason(family: str) -> None:
    if family not in EVERY:
        pytest.skip("transformers cannot build its config without a checkpoint")
    assert families_table.REFUSED[family] in str(refusal(config_of(family)))


@pytest.mark.parametrize("family", ["bloom", "deepseek_v32", "falcon", "gpt_neo", "minimax_m3_vl_text"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.few(1)
def test_quantised_pages_of_models_with_their_own_cache(family: str, kv_dtype: str) -> None:
    """Tokens of a prompt that is computed whole are exact. Later tokens read quantised K and V, and stay close."""
    model = lively(family)
    prompts = prompts_of(1, (5, 40, 29))
    wanted = expected(model, prompts, 1)
    engine = make_engine(model, POOL, kv_dtype=kv_dtype)
    assert runs_separately(model)
    found, _ = tokens_of(engine, prompts)
    assert [tokens[: len(prompt) + 1] for tokens, prompt in zip(found, prompts, strict=True)] == wanted
    again, hits = tokens_of(engine, prompts)
    assert hits >= 32
    assert sum(map(len, again)) == sum(map(len, found))


def test_drafts_of_a_model_with_its_own_cache_are_verified() -> None:
    model = lively("bloom")
    prompts = [prompt * 3 for prompt in prompts_of(2, (6, 9))]
    wanted = expected(model, prompts, NEW)
    engine = make_engine(model, POOL, speculate="ngram")
    assert tokens_of(engine, prompts)[0] == wanted


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("bloom", {"speculate": "mtp"}, "a head needs the hidden states of a whole step"),
        ("zamba2", {"speculate": "ngram"}, "cannot take back drafts"),
    ],
)
def test_what_a_model_with_its_own_cache_cannot_do_is_refused(
    family: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_engine(lively(family), POOL, **settings)


def test_modeling_code_that_cannot_resume_a_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bloom import modeling_bloom

    model = lively("bloom")
    with monkeypatch.context() as patch:
        patch.setattr(modeling_bloom, "create_causal_mask", lambda *_, **__: None)  # tokens see later ones
        with pytest.raises(ModelError, match="computes other logits if a prompt is split"):
            install(model)
    assert not runs_separately(model)
    install(model)
    assert runs_separately(model)
