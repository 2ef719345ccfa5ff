"""Tiny random models of every family, what `generate()` says of them, and the smallest engine that runs them on pages."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import transformers

from kvloom.core import KVCache, PoolLayout, Sequence
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import allocate
from kvloom.models.paged import Batch, BatchBuilder, Pages, Work, install
from kvloom.models.specs import model_spec

from .tiny_families import config_of

transformers.logging.set_verbosity_error()

NEW = 12


def tiny(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(family, **changes)
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
        self.stage = BatchBuilder(self.cache, "cpu", tokens=256, rows=16)
        self.computed = 0

    def generate(self, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
        tokens = [list(prompt) for prompt in prompts]
        running = [self.cache.open(self.cache.match(np.array(prompt, dtype=np.int32))) for prompt in prompts]
        self.run(running, tokens, [len(prompt) + new for prompt in prompts])
        for sequence in running:
            sequence.close()
        return tokens

    def run(self, running: list[Sequence], tokens: list[list[int]], until: list[int]) -> None:
        """Steps until every sequence has as many tokens as it should."""
        while live := [i for i in range(len(running)) if len(tokens[i]) < until[i]]:
            works, budget = [], self.budget
            for i in sorted(live, key=lambda i: len(tokens[i]) - running[i].length):
                count = min(budget, len(tokens[i]) - running[i].length)
                if running[i].next_checkpoint is not None:  # where a snapshot of states is wanted
                    count = min(count, running[i].next_checkpoint - running[i].length)
                if count:
                    works.append((i, Work(running[i], np.array(tokens[i][running[i].length :][:count]))))
                    assert not running[i].extend(count)
                    budget -= count
            self.step(tokens, works)

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

    def extra(self, batch: Batch) -> dict[str, Any]:
        if "cache_params" in inspect.signature(self.model.forward).parameters:
            return {"cache_params": self.pages}
        return {
            "position_ids": batch.positions[None],
            "past_key_values": self.pages,
            "pages": self.pages,
        }


def expected(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens of each prompt by itself, prompt included, from transformers' own loop."""
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),  # a 0 is a token too
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
