"""Plans by device: one interface, the oracle's results, and no Triton needed on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels import cpu
from kvloom.kernels.attention import Mask, Plan, ReferencePlan, Shape, decode_plan, prefill_plan

from .batches import DEVICE, TOLERANCE, Batch, relative

SHAPE = Shape(4, 2, 64, 64, dtype=torch.float32)


def plans(span: Visibility) -> list[tuple[Plan, bool]]:
    return [(decode_plan(SHAPE, 4, 3, span, DEVICE), False), (prefill_plan(SHAPE, span, DEVICE), True)]


@pytest.mark.parametrize("span", [Visibility("full"), Visibility("sliding", 20)], ids=str)
def test_plans_give_what_the_oracle_gives(span: Visibility) -> None:
    batch = Batch(SHAPE, [40, 3, 70], [3, 1, 2], span)
    exact, exact_lse = batch.expected(Mask(span))
    for plan, host in plans(span):
        starts, lengths = batch.starts, batch.lengths_
        plan.make(*(starts.tolist(), lengths.tolist()) if host else (starts, lengths))
        out = torch.full_like(batch.q, torch.nan)
        found, lse = plan.attend(batch.q, batch.k, batch.v, batch.tables, out=out)
        assert found.data_ptr() == out.data_ptr()
        assert relative(out, exact) < TOLERANCE[torch.float32]
        torch.testing.assert_close(lse.double().cpu(), exact_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="it is the CPU's way")
@pytest.mark.parametrize(
    "span", [Visibility("full"), Visibility("sliding", 20), Visibility("chunked", 32)], ids=str
)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_cpu_decode_equals_the_oracle(span: Visibility, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(SHAPE, [40, 3, 70, 1, 64], [1] * 5, span, order)
    exact, _ = batch.expected(Mask(span), 0.3)
    plan = prefill_plan(SHAPE, span, "cpu")
    plan.make(batch.starts.tolist(), batch.lengths)
    monkeypatch.setattr(ReferencePlan, "attend", None)  # nothing goes the long way
    for _ in range(2):
        found, lse = plan.attend(batch.q, batch.k, batch.v, batch.tables, Mask(span), 0.3)
        assert lse is None
        assert relative(found, exact) < TOLERANCE[torch.float32]


@pytest.mark.skipif(DEVICE == "cuda", reason="it is the CPU's way")
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)], ids=str)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("singles", [True, False])
def test_cpu_prefill_equals_the_oracle(
    heads: tuple[int, int], order: str, singles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts from their beginning and after cached tokens, single queries and an empty row among them."""
    lengths, queries = [40, 3, 70, 16, 200, 64, 300, 210], [40, 1, 20, 1, 2, 17, 200, 210]
    if not singles:
        lengths, queries = [40, 70, 200, 300, 210], [40, 20, 2, 200, 210]
        monkeypatch.setattr(cpu, "IS_BUILT", False)  # as without a compiler
    shape = Shape(*heads, 64, 64, dtype=torch.float32)
    batch = Batch(shape, lengths, queries, order=order)
    exact, _ = batch.expected(Mask(), 0.3)
    plan = prefill_plan(shape, device="cpu")
    plan.make([*batch.starts.tolist(), len(batch.q)], [*lengths, 0])
    tables = torch.cat((batch.tables, torch.zeros_like(batch.tables[:1])))
    monkeypatch.setattr(ReferencePlan, "attend", None)  # nothing goes the long way
    for _ in range(2):
        found, lse = plan.attend(batch.q, batch.k, batch.v, tables, scale=0.3)
        assert lse is None
        assert relative(found, exact) < TOLERANCE[torch.float32]


@pytest.mark.skipif(DEVICE == "cuda", reason="it is the CPU's way")
@pytest.mark.skipif(not cpu.IS_BUILT, reason="it is native, and this was built without a compiler")
@pytest.mark.parametrize(
    "span", [Visibility("full"), Visibility("sliding", 20), Visibility("chunked", 32)], ids=str
)
def test_a_cpu_takes_few_queries_one_by_one(span: Visibility, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(SHAPE, [40, 3, 70, 64], [3, 1, 33, 64], span)
    exact, _ = batch.expected(Mask(span))
    plan = prefill_plan(SHAPE, span, "cpu")
    plan.make(batch.starts.tolist(), batch.lengths)
    monkeypatch.setattr(ReferencePlan, "attend", None)
    assert relative(plan.attend(batch.q, batch.k, batch.v, batch.tables)[0], exact) < TOLERANCE[torch.float32]


@pytest.mark.skipif(DEVICE == "cuda", reason="it is the CPU's way")
def test_unsupported_calls_use_the_oracle() -> None:
    batch = Batch(SHAPE, [300], [300])
    exact, _ = batch.expected(Mask())
    plan = prefill_plan(SHAPE, device="cpu")
    plan.make(batch.starts.tolist(), batch.lengths)
    turned = batch.q.transpose(1, 2).contiguous().transpose(1, 2)  # not dense in its last dimension
    assert relative(plan.attend(turned, batch.k, batch.v, batch.tables)[0], exact) < TOLERANCE[torch.float32]
    plan.make([0, 300], [0])  # queries that see nothing
    assert not plan.attend(batch.q, batch.k, batch.v, batch.tables)[0].any()


def test_a_plan_must_be_made_first_and_for_the_span() -> None:
    batch = Batch(SHAPE, [20], [1])
    plan = ReferencePlan(SHAPE)
    with pytest.raises(ValueError, match="call make"):
        plan.attend(batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), batch.tables.cpu())
    plan.make([0, 1], [20])
    with pytest.raises(ValueError, match="the plan is for full"):
        plan.attend(
            batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), batch.tables.cpu(), Mask(Visibility("sliding", 4))
        )


def test_the_oracle_takes_any_shape() -> None:
    shape = Shape(6, 3, 24, 8, page_tokens=16, dtype=torch.float64)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 16, 3, dim, generator=gen, dtype=torch.float64) for dim in (24, 8))
    plan = decode_plan(shape, 1, device="cpu")
    plan.make([0, 1], [30])
    out, _ = plan.attend(torch.randn(1, 6, 24, dtype=torch.float64), k, v, torch.tensor([[2, 1]]))
    assert out.shape == (1, 6, 8)


def test_a_cpu_needs_no_triton() -> None:
    """Everything public imports, and the CPU's path runs, where Triton cannot be imported."""
    code = """
import sys
sys.modules["triton"] = None
import torch
import kvloom.kernels.batch_invariant, kvloom.kernels.copy, kvloom.kernels.fused, kvloom.kernels.memory
import kvloom.kernels.moe, kvloom.kernels.state, kvloom.kernels.write
from kvloom.kernels.attention import Shape, decode_plan
plan = decode_plan(Shape(2, 1, 64, 64, dtype=torch.float32), 1, device="cpu")
plan.make([0, 1], [5])
k = torch.randn(3, 16, 1, 64)
out, lse = plan.attend(torch.randn(1, 2, 64), k, k, torch.tensor([[2]], dtype=torch.int32))
assert out.isfinite().all() and lse.isfinite().all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
