"""Hugging Face models on our pages: packed rows, chunked prefill, prefix hits and freed windows give generate()'s tokens."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvloom.core import KVCache, PoolLayout, Sequence
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.views import allocate
from kvloom.models.attention import Pages, install
from kvloom.models.batch import Batch, Stage, Work
from kvloom.models.reading import ModelError
from kvloom.models.specs import model_spec

from .test_specs import SIZES, TINY

transformers.logging.set_verbosity_error()

FAMILIES = [
    *(
        "llama",
        "qwen2",
        "qwen2 with windows",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "ministral",
        "gemma2",
        "gemma3_text",
    ),
    *("gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "mixtral", "phi3", "olmo2", "olmo3", "cohere2"),
    *("mamba", "mamba2", "jamba", "bamba", "granitemoehybrid", "qwen3_next", "falcon_h1", "nemotron_h"),
]
NEW = 12


def tiny(family: str) -> Any:
    options = {
        **SIZES,
        **TINY[family],
        "torch_dtype": "float32",
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


class Runner:
    """The smallest engine: a token budget a step, decodes first, the rest of prompts in chunks."""

    def __init__(self, model: Any, slabs: int = 200, budget: int = 9) -> None:
        config = {**model.config.to_dict(), "dtype": "float32"}
        self.layout = PoolLayout.build(model_spec(config, kv_dtype="fp32").layers)
        self.buffer = allocate(self.layout, slabs)
        self.buffer.view(torch.float32).fill_(torch.nan)
        self.cache = KVCache(self.layout, slabs=slabs)
        self.model, self.budget = model, budget
        install(model)
        self.pages = Pages(self.layout, self.buffer)
        self.stage = Stage(self.cache, "cpu", 64, 64)
        self.computed = 0

    def generate(self, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
        tokens = [list(prompt) for prompt in prompts]
        running: dict[int, Sequence] = {}
        for i, prompt in enumerate(prompts):
            running[i] = self.cache.open(self.cache.match(np.array(prompt, dtype=np.int32)))
        while live := [i for i, prompt in enumerate(prompts) if len(tokens[i]) < len(prompt) + new]:
            works, budget = [], self.budget
            for i in sorted(live, key=lambda i: len(tokens[i]) - running[i].length):
                count = min(budget, len(tokens[i]) - running[i].length)
                if running[i].boundary is not None:  # where a snapshot of states is wanted
                    count = min(count, running[i].boundary - running[i].length)
                if count:
                    works.append((i, Work(running[i], np.array(tokens[i][running[i].length :][:count]))))
                    assert not running[i].extend(count)
                    budget -= count
            self.step(tokens, works)
        for sequence in running.values():
            sequence.close()
        return tokens

    def extra(self, batch: Batch) -> dict[str, Any]:
        if "cache_params" in inspect.signature(self.model.forward).parameters:
            return {"cache_params": self.pages}
        return {
            "position_ids": batch.positions[None],
            "past_key_values": self.pages,
            "pages": self.pages,
        }

    def step(self, tokens: list[list[int]], works: list[tuple[int, Work]]) -> None:
        for batch in self.cache.take_copies():
            copy_pages(self.buffer, batch.page_stride, batch.source, batch.target)
        batch = self.stage.lay_out([work for _, work in works])
        self.pages.begin(batch)
        with torch.inference_mode():
            logits = self.model(
                input_ids=batch.tokens[None], use_cache=False, logits_to_keep=batch.last, **self.extra(batch)
            ).logits[0]  # fmt: skip
        self.computed += len(batch.tokens)
        for (i, work), row in zip(works, logits, strict=True):
            work.sequence.commit(work.tokens.astype(np.int32))
            if work.sequence.length == len(tokens[i]):
                tokens[i].append(int(row.argmax()))


def expected(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )[0].tolist()
            for prompt in prompts
        ]


def prompts_of(seed: int, sizes: tuple[int, ...] = (5, 17, 29)) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (size,), generator=gen).tolist() for size in sizes]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str) -> None:
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = prompts_of(1)
    prompts.append(prompts[2][:20] + prompts_of(2)[0])  # shares a block with the one before
    prompts.append(prompts[2] + prompts_of(3)[0])  # goes on where its prompt ended
    wanted = expected(model, prompts)
    runner = Runner(model)
    assert runner.generate(prompts[:3]) == wanted[:3]
    before = runner.computed
    assert runner.generate(prompts[3:]) == wanted[3:]
    spared = sum(map(len, prompts[3:])) + 2 * (NEW - 1) - (runner.computed - before)
    assert spared >= len(prompts[2]), f"{spared} tokens were found again"
    runner.cache.check()


def test_what_reads_images_is_refused_by_name() -> None:
    config = {**SIZES, **TINY["mllama_text_model"]}
    layout = PoolLayout.build(model_spec(config, kv_dtype="fp32").layers)
    with pytest.raises(ModelError, match=r"layers\.1\.cross.* is not supported yet"):
        Pages(layout, allocate(layout, 3))


def test_a_batch_needs_pages_and_tokens() -> None:
    layout = PoolLayout.build(model_spec(tiny("llama").config.to_dict(), kv_dtype="fp32").layers)
    cache = KVCache(layout, slabs=20)
    sequence = cache.open(cache.match(np.arange(3, 9, dtype=np.int32)))
    with pytest.raises(ValueError, match="at least one sequence"):
        Stage(cache, "cpu", 64, 64).lay_out([])
    with pytest.raises(ValueError, match="has no tokens"):
        Stage(cache, "cpu", 64, 64).lay_out([Work(sequence, np.array([], dtype=np.int64))])
    with pytest.raises(ValueError, match="extend the sequence first"):
        Stage(cache, "cpu", 64, 64).lay_out([Work(sequence, np.arange(3, 9))])
    pages = Pages(layout, allocate(layout, 20))
    with pytest.raises(RuntimeError, match="call begin"):
        pages.batch  # noqa: B018
