"""Shared runs: found from tables, read once, merged to what plain decode gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvloom.core import Span
from kvloom.kernels.reference import Mask
from kvloom.kernels.shapes import Shape
from kvloom.kernels.sharing import SharedRun, Sharing, find_shared

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.decode import DecodePlan  # noqa: E402

from .batches import DEVICE, TOLERANCE, Batch, relative  # noqa: E402

FULL = Span("full")


def tables_of(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def found(tables: np.ndarray, settled: list[int], **options: object) -> list[SharedRun]:
    return find_shared(tables, np.array(settled), 16, least_saved=16, least_run=16, **options)  # type: ignore[arg-type]


def test_runs_stand_in_levels_where_prompts_part() -> None:
    tables = tables_of([1, 2, 3, 4, 9], [1, 2, 3, 5], [1, 2, 6, 7], [8, 2, 3, 4])
    assert found(tables, [75, 60, 60, 60]) == [
        SharedRun(0, 32, (0, 1, 2), 0),
        SharedRun(32, 48, (0, 1), 1),
    ]


def test_only_settled_whole_blocks_are_shared() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 3])
    assert found(tables, [40, 47]) == [SharedRun(0, 32, (0, 1), 0)]
    assert found(tables, [15, 47]) == []
    assert found(tables[:1], [40]) == []
    assert found(tables[:0], []) == []


def test_a_run_too_short_is_left_to_the_groups_below() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 5, 6, 7], [1, 5, 6, 7]]
    runs = find_shared(tables_of(*rows), np.full(4, 64), 16, least_saved=48, least_run=32)
    assert sorted(runs, key=lambda run: run.members) == [
        SharedRun(0, 64, (0, 1), 0),
        SharedRun(0, 64, (2, 3), 0),
    ]


def test_windows_do_not_share() -> None:
    """A page leaves one member's window before another's, while the run is read through one member's table."""
    with pytest.raises(ValueError, match="give windows a plan without sharing"):
        DecodePlan(
            Shape(4, 2, 64, 64), 2, span=Span("sliding", 40), device=DEVICE, sharing=Sharing(2, device=DEVICE)
        )


def test_depth_and_room_limit_what_is_shared() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6])
    assert [run.level for run in found(tables, [48] * 4, depth=2)] == [0, 1]
    sharing = Sharing(4, segments=1, depth=4, device=DEVICE)
    runs = found(tables, [48] * 4)
    assert len(runs) == 3
    placed = sharing.set(runs, np.arange(5))
    assert placed == runs[:1]
    assert sharing.begin.tolist() == [16, 16, 16, 16]


CASES = [
    ([150, 140, 135, 40], [1, 1, 1, 1], [(128, [0, 1, 2])], FULL),
    ([150, 140, 135, 129, 40], [1, 3, 2, 1, 1], [(96, [0, 1]), (64, [0, 1, 2, 3])], FULL),
    ([90, 90, 88, 90, 200, 199], [1] * 6, [(80, [0, 1, 2, 3]), (176, [4, 5])], FULL),
    ([150, 140, 135], [2, 1, 1], [(128, [0, 1, 2])], FULL),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_shared_prefixes_give_what_plain_decode_gives(case: int) -> None:
    lengths, queries, shared, span = CASES[case]
    shape = Shape(8, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, lengths, queries, span, shared=shared, seed=case)
    settled = np.array(lengths) - np.array(queries)
    runs = find_shared(batch.tables.cpu().numpy(), settled, 16, least_saved=16, least_run=16)
    assert runs
    rows, most = len(lengths) + 1, max(queries)
    sharing = Sharing(rows, most, segments=8, depth=3, device=DEVICE)
    sharing.set(runs, batch.starts.cpu().numpy())
    plan = DecodePlan(shape, rows, most, span, DEVICE, sharing)
    sinks = torch.randn(8).to(DEVICE)
    for mask in (Mask(span), Mask(span, 4.0, sinks)):
        plan.make(batch.starts, batch.lengths_)
        out = torch.full_like(batch.q, math.nan)
        _, lse = plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, out=out)
        exact, exact_lse = batch.expected(mask)
        assert relative(out, exact) < TOLERANCE[torch.float32]
        torch.testing.assert_close(lse.double().cpu(), exact_lse, atol=1e-4, rtol=1e-4)
    # With nothing shared the same plan is plain decode.
    sharing.set([], batch.starts.cpu().numpy())
    plan.make(batch.starts, batch.lengths_)
    out = torch.full_like(batch.q, math.nan)
    plan.attend(batch.q, batch.k, batch.v, batch.tables, Mask(span), out=out)
    assert relative(out, batch.expected(Mask(span))[0]) < TOLERANCE[torch.float32]


def test_what_an_earlier_step_left_is_nobodys() -> None:
    """A step of fewer and shorter rows after a longer one, with q as large as before."""
    shape = Shape(8, 2, 64, 64, dtype=torch.float32)
    sharing = Sharing(6, 3, segments=4, depth=2, device=DEVICE)
    plan = DecodePlan(shape, 6, 3, device=DEVICE, sharing=sharing)
    before = Batch(shape, [150, 140, 135, 40, 90], [3, 3, 3, 3, 3], shared=[(128, [0, 1, 2])])
    after = Batch(shape, [150, 140], [1, 2], shared=[(128, [0, 1])], seed=3)
    for batch in (before, after):
        queries = np.diff(batch.starts.cpu().numpy())
        runs = find_shared(batch.tables.cpu().numpy(), np.array(batch.lengths) - queries, 16, least_saved=16)
        sharing.set(runs, batch.starts.cpu().numpy())
        plan.make(batch.starts, batch.lengths_)
        count = int(batch.starts[-1])
        q = torch.zeros(15, 8, 64, device=DEVICE)
        q[:count] = batch.q
        out, lse = plan.attend(q, batch.k, batch.v, batch.tables)
        assert relative(out[:count], batch.expected(Mask(FULL))[0]) < TOLERANCE[torch.float32]
        assert not out[count:].any()
        assert lse[count:].isneginf().all()
