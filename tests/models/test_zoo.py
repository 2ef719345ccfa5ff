"""The zoo: tiny random models of every family on our pages, in a pool full of NaN, give exactly generate()'s greedy tokens.

Prompts run in chunks beside single tokens, prefixes are found again, windows are freed, sequences are forked, and requests
that find no room give up their pages and start again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.engine import Engine, SamplingParams
from kvloom.models.specs import FAMILIES
from tests.engines import make_engine

from .tiny import TINY
from .zoo import NEW, Runner, expected, prompts_of, tiny

NO_TEXT = ("mllama_text_model", "qwen2_5_vl_text")
"""Text models that transformers runs as part of one with images alone."""
FULL = [name for name, raw in TINY.items() if raw["model_type"] in FAMILIES and name not in NO_TEXT]
OWN_CACHE = ["bloom", "deepseek_v32", "falcon", "gemma3n_text", "recurrent_gemma", "zamba2"]
"""Families whose sequences run one by one, and layers that read the K and V of others."""
PLAIN = [name for name, raw in TINY.items() if raw["model_type"] not in FAMILIES]

GREEDY = SamplingParams(max_tokens=8, temperature=0)


def own_tokens(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    model.set_attn_implementation("eager")
    return expected(model, prompts, new)


def tight(model: Any, prompts: list[list[int]]) -> Engine:
    """An engine with one slab more than the least that takes each of `prompts`; its pool is full of NaN."""
    slab = make_engine(model, 1 << 26).layout.slab_bytes
    for slabs in range(2, 100):
        try:
            engine = make_engine(model, slabs * slab)
            for prompt in prompts:
                engine.add(prompt, GREEDY)
        except ValueError:
            continue
        engine = make_engine(model, (slabs + 1) * slab, token_budget=24)
        engine.buffer.view(torch.float32).fill_(torch.nan)
        return engine
    raise AssertionError("no pool of up to 100 slabs takes every prompt")


@pytest.mark.parametrize("family", [*FULL, *PLAIN, *OWN_CACHE])
@pytest.mark.few(13)
def test_chunks_beside_single_tokens_and_prefixes_found_again(family: str) -> None:
    model = tiny(family)
    prompts = prompts_of(1)
    prompts.append(prompts[2][:20] + prompts_of(2)[0])  # shares a block with the one before
    prompts.append(prompts[2] + prompts_of(3)[0])  # goes on where its prompt ended
    wanted = own_tokens(model, prompts)
    runner = Runner(model)
    assert runner.generate(prompts[:3]) == wanted[:3]
    before = runner.computed
    assert runner.generate(prompts[3:]) == wanted[3:]
    spared = sum(map(len, prompts[3:])) + 2 * (NEW - 1) - (runner.computed - before)
    assert spared >= len(prompts[2]), f"{spared} tokens were found again"
    runner.cache.check()


@pytest.mark.parametrize("family", [*FULL, *OWN_CACHE])
def test_forks_diverge_and_windows_are_freed(family: str) -> None:
    model = tiny(family)
    (prompt,) = prompts_of(4, (35,))
    runner = Runner(model, budget=16)
    sequence = runner.cache.open(runner.cache.match(prompt))
    tokens = [list(prompt)]
    runner.run([sequence], tokens, [len(prompt) + 3])
    for group in runner.layout.of("token"):
        held = runner.cache.table(group.index)[:, sequence.row, :3] != 0
        first = group.spec.visibility.first_visible(sequence.length) // runner.layout.block_tokens
        assert held[:, first:].all()
        assert not held[:, :first].any(), f"{group.name} has pages that no query will see"
    twin = sequence.fork()
    assert twin is not None
    other = (tokens[0][-1] + 1) % 61 + 3
    tokens.append([*tokens[0][:-1], other])
    starts = [list(one) for one in tokens]
    runner.run([sequence, twin], tokens, [len(prompt) + NEW] * 2)
    left = NEW - 3
    assert tokens == own_tokens(tiny(family), starts, left)
    sequence.close()
    twin.close()
    runner.cache.check()


@pytest.mark.parametrize("family", [*FULL, *OWN_CACHE])
@pytest.mark.few(7)
def test_requests_that_gave_up_their_pages_start_again(family: str) -> None:
    model = tiny(family)
    prompts = prompts_of(5, (21, 30, 26, 34, 18, 40))
    wanted = own_tokens(model, prompts, 8)
    engine = tight(model, prompts)
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 5 == 0 and engine.scheduler.running:
            # Where one slab takes several requests the smallest pool is large: each family is preempted for certain.
            engine.scheduler._preempt(engine.scheduler.running[-1])
        assert steps < 2000
    assert [request.tokens for request in requests] == wanted
    assert sum(request.preemptions for request in requests) > 1
    engine.cache.check()
