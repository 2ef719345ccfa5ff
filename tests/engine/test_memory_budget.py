"""The pool's size without a configured one."""

from __future__ import annotations

import pytest
import torch

from kvloom.engine import SamplingParams
from kvloom.engine.execution import MemoryBudget, measure_budget
from kvloom.engine.execution.memory_budget import CPU_POOL
from tests.engines import make_engine
from tests.models.zoo import tiny


def test_pool_gets_the_rest_of_the_budget() -> None:
    room = MemoryBudget(total=1000 << 20, usable=900 << 20, taken=300 << 20, step=150 << 20, graphs=50 << 20)
    assert room.pool == 400 << 20
    assert str(room) == (
        "900 of 1,000 MiB are usable: 300 are taken, a step needs 150, graphs 50; 400 MiB are left for the pool"
    )


def test_cpu_pool_has_a_default_size() -> None:
    engine = make_engine(tiny("llama"))
    assert engine.memory_budget is not None
    assert engine.memory_budget.pool == CPU_POOL
    assert CPU_POOL - engine.layout.slab_bytes < engine.buffer.numel() <= CPU_POOL
    assert make_engine(tiny("llama"), 1 << 22).memory_budget is None


def test_invalid_memory_fraction_is_refused() -> None:
    model = tiny("llama")
    layout = make_engine(model, 1 << 22).layout
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match=r"memory_fraction .* must be above 0"):
            measure_budget(model, layout, wrong, 64, 8, graphs=False)


@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_gpu_pool_respects_memory_fraction() -> None:
    model = tiny("llama").to("cuda", torch.bfloat16)
    engine = make_engine(model, memory_fraction=0.5, token_budget=512, max_running=8)
    engine.prepare()
    for _ in range(8):
        engine.add(range(3, 60), SamplingParams(max_tokens=8, temperature=0))
    engine.run()
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.48 * total
    assert engine.buffer.numel() >= 0.4 * total
