"""Tiers under an engine on a GPU: pinned host memory, copies on their own streams. In the batch-invariant mode tokens are the
same bits whatever ran beside, so a page that came back wrong would show."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvloom.engine import Engine, SamplingParams
from tests.engines import PATIENT, make_engine

from .test_batch_invariance_gpu import made

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def prompts_of(seed: str, *sizes: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 4096) for _ in range(size)] for size in sizes]


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    for steps in itertools.count():
        if not engine.busy:
            break
        engine.step()
        assert steps < 100_000
    return [request.output for request in requests]


@pytest.mark.parametrize("option", ["write=through", "write=back", "share=0"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_small_pool_with_host_memory_gives_equal_bits(family: str, option: str) -> None:
    roots = prompts_of(
        family, 1200, 700, 400, 1100, 900, 800, 1000
    )  # together more than the small pool holds
    tails = prompts_of(family + " tails", *range(20, 44))
    prompts = [[*roots[i % 7], *tail] for i, tail in enumerate(tails)]
    wanted = answers(make_engine(made(family), 1 << 30, batch_invariant=True), prompts)
    layout = make_engine(made(family), 1 << 28, batch_invariant=True).layout
    small = 3 * layout.slab_bytes_for(1400) + 8 * layout.slab_bytes
    engine = make_engine(
        made(family), small, batch_invariant=True, max_running=4, tiers=[f"host:1GiB?{option}"], offload=PATIENT
    )  # fmt: skip
    engine.prepare()
    for _ in range(3):
        assert answers(engine, prompts) == wanted
    assert engine.offload is not None
    assert engine.offload.stats.loaded_tokens
    while engine.offload.is_retaining_pages:
        engine.offload.poll()
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0
    engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_restart_on_the_same_disk_gives_equal_bits(family: str, tmp_path: Path) -> None:
    prompts = prompts_of(family, 900, 500)
    first = answers(make_engine(made(family), 1 << 30, batch_invariant=True), prompts)
    turns = [[*prompt, *answer, 7, 8] for prompt, answer in zip(prompts, first, strict=True)]
    wanted = answers(make_engine(made(family), 1 << 30, batch_invariant=True), turns)
    tiers = ["host:256MiB", f"disk:{tmp_path}:1GiB"]
    for given, expected in ((prompts, first), (turns, wanted)):
        engine = make_engine(made(family), 1 << 30, batch_invariant=True, tiers=tiers, offload=PATIENT)
        requests = [engine.add(prompt, GREEDY) for prompt in given]
        engine.run()
        assert [request.output for request in requests] == expected
        found = [request.cached_tokens for request in requests]
        engine.close()
    assert found == [(len(prompt) + 11) // 16 * 16 for prompt in prompts]
