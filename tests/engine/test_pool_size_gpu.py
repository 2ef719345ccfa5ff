"""An elastic pool on a GPU: equal bits while it grows and shrinks under CUDA graphs and tiers; memory returns to the device."""

from __future__ import annotations

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.engines import make_engine

from .test_batch_invariance_gpu import made
from .test_offload_gpu import GREEDY, answers, prompts_of


@pytest.mark.parametrize("tiers", [(), ("host:1GiB",)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_resizing_gives_equal_bits(family: str, tiers: tuple[str, ...]) -> None:
    rng = random.Random(family)
    prompts = prompts_of(family, *(rng.randint(50, 900) for _ in range(16)))
    wanted = answers(make_engine(made(family), 1 << 30, batch_invariant=True), prompts)
    sizes = {"pool_bytes": 1 << 29, "max_pool_bytes": 1 << 30, "min_pool_bytes": 1 << 27}
    engine = make_engine(made(family), batch_invariant=True, tiers=tiers, **sizes)
    engine.prepare()
    seen = set()
    for _ in range(3):
        requests = [engine.add(prompt, GREEDY) for prompt in prompts]
        steps = 0
        while engine.busy:
            if steps % 5 == 0:
                engine.resize_pool(rng.randint(1 << 27, 1 << 30))
            engine.step()
            seen.add(engine.cache.usable_slabs)
            steps += 1
        assert [request.output for request in requests] == wanted
    assert len(seen) > 5
    engine.close()


@pytest.mark.alone
def test_a_smaller_pool_returns_memory_to_the_device() -> None:
    engine = make_engine(made("llama"), 1 << 30, max_pool_bytes=2 << 30, min_pool_bytes=1 << 27)
    answers(engine, prompts_of("few", 400, 300))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    engine.resize_pool(1 << 28)
    given = torch.cuda.mem_get_info()[0] - before
    assert given > 0.7 * (3 << 28)
    engine.resize_pool(2 << 30)
    assert before - torch.cuda.mem_get_info()[0] > 0.9 * (1 << 30)
    answers(engine, prompts_of("few", 400, 300))
    engine.close()
