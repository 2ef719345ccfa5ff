"""Shared runs: found from tables, read once, merged to what plain decode gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import (
    Mask,
    Shape,
    SharedRun,
    SharedRuns,
    find_shared_runs,
    is_worth_sharing,
    visible_shared_runs,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import DecodePlan  # noqa: E402

from .batches import DEVICE, TOLERANCE, Batch, relative  # noqa: E402

FULL = Visibility("full")


def tables_of(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def found(tables: np.ndarray, settled: list[int], **options: object) -> list[SharedRun]:
    return find_shared_runs(tables, np.array(settled), 16, min_saved=16, min_run=16, **options)  # type: ignore[arg-type]


def test_runs_stand_in_levels_where_prompts_part() -> None:
    tables = tables_of([1, 2, 3, 4, 9], [1, 2, 3, 5], [1, 2, 6, 7], [8, 2, 3, 4])
    assert found(tables, [75, 60, 60, 60]) == [
        SharedRun(0, 32, (0, 1, 2), 0),
        SharedRun(32, 48, (0, 1), 1),
    ]


def test_only_written_whole_blocks_are_shared() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 3])
    assert found(tables, [40, 47]) == [SharedRun(0, 32, (0, 1), 0)]
    assert found(tables, [15, 47]) == []
    assert found(tables[:1], [40]) == []
    assert found(tables[:0], []) == []


def test_a_run_too_short_is_left_to_the_groups_below() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 5, 6, 7], [1, 5, 6, 7]]
    runs = find_shared_runs(tables_of(*rows), np.full(4, 64), 16, min_saved=48, min_run=32)
    assert sorted(runs, key=lambda run: run.members) == [
        SharedRun(0, 64, (0, 1), 0),
        SharedRun(0, 64, (2, 3), 0),
    ]


def test_windows_share_runs_whose_visible_pages_are_equal() -> None:
    runs = [SharedRun(0, 48, (0, 1, 2), 0), SharedRun(48, 80, (0, 1), 1)]
    tables = tables_of([0, 2, 3, 4, 5], [0, 0, 3, 4, 5], [0, 0, 3, 9, 9])
    first = np.array([17, 32, 47])
    assert visible_shared_runs(runs, tables, first, 16) == runs
    assert visible_shared_runs(runs, tables, np.array([81, 90, 85]), 16) == runs  # no row sees them any more
    for row, block, kept in ((1, 3, runs[:1]), (2, 2, []), (0, 1, []), (2, 1, runs)):
        other = tables.copy()
        # A visible page differs or is missing; in the last case an invisible page differs.
        other[row, block] = 0 if row == 0 else 7
        assert visible_shared_runs(runs, other, first, 16) == kept


def test_short_windows_are_read_by_each() -> None:
    assert [
        is_worth_sharing(Visibility(*span)) for span in (("full",), ("sliding", 1024), ("chunked", 8192))
    ] == [True] * 3
    assert not is_worth_sharing(Visibility("sliding", 128))


def test_depth_and_capacity_limit_shared_runs() -> None:
    tables = tables_of([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6])
    assert [run.level for run in found(tables, [48] * 4, depth=2)] == [0, 1]
    sharing = SharedRuns(4, segments=1, depth=4, device=DEVICE)
    runs = found(tables, [48] * 4)
    assert len(runs) == 3
    placed = sharing.set_runs(runs, np.arange(5))
    assert placed == runs[:1]
    assert sharing.begin.tolist() == [16, 16, 16, 16]


def agrees(plan: DecodePlan, batch: Batch, mask: Mask) -> None:
    """The plan gives what the oracle does."""
    plan.make(batch.starts, batch.lengths_)
    out = torch.full_like(batch.q, math.nan)
    _, lse = plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, out=out)
    exact, exact_lse = batch.expected(mask)
    assert relative(out, exact) < TOLERANCE[torch.float32]
    torch.testing.assert_close(lse.double().cpu(), exact_lse, atol=1e-4, rtol=1e-4)


CASES = [
    ([150, 140, 135, 40], [1, 1, 1, 1], [(128, [0, 1, 2])], FULL),
    ([150, 140, 135, 129, 40], [1, 3, 2, 1, 1], [(96, [0, 1]), (64, [0, 1, 2, 3])], FULL),
    ([150, 140, 135], [2, 1, 1], [(128, [0, 1, 2])], FULL),
    ([90, 90, 88, 90, 200, 199], [1] * 6, [(80, [0, 1, 2, 3]), (176, [4, 5])], FULL),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.few(1)
def test_shared_prefixes_give_what_plain_decode_gives(case: int) -> None:
    lengths, queries, shared, span = CASES[case]
    shape = Shape(8, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, lengths, queries, span, shared=shared, seed=case)
    settled = np.array(lengths) - np.array(queries)
    runs = find_shared_runs(batch.tables.cpu().numpy(), settled, 16, min_saved=16, min_run=16)
    assert runs
    rows, most = len(lengths) + 1, max(queries)
    sharing = SharedRuns(rows, most, segments=8, depth=3, device=DEVICE)
    sharing.set_runs(runs, batch.starts.cpu().numpy())
    plan = DecodePlan(shape, rows, most, span, DEVICE, sharing)
    sinks = torch.randn(8).to(DEVICE)
    for mask in (Mask(span), Mask(span, 4.0, sinks)):
        agrees(plan, batch, mask)
    # With nothing shared the same plan is plain decode.
    sharing.set_runs([], batch.starts.cpu().numpy())
    agrees(plan, batch, Mask(span))


WINDOWS = [
    # Positions apart, so that each member's window begins elsewhere in the run and leaves it at another step.
    ([180, 172, 165, 40], [1, 1, 1, 1], [(128, [0, 1, 2])], Visibility("sliding", 90)),
    (
        [180, 172, 165, 161, 40],
        [1, 3, 2, 1, 1],
        [(144, [0, 1]), (96, [0, 1, 2, 3])],
        Visibility("sliding", 100),
    ),
    ([130, 124, 150, 190], [1, 1, 2, 1], [(112, [0, 1, 2, 3])], Visibility("chunked", 64)),
]


@pytest.mark.parametrize("case", range(len(WINDOWS)))
@pytest.mark.slow
def test_shared_runs_in_windows_give_what_plain_decode_gives_as_they_pass(case: int) -> None:
    lengths, queries, shared, span = WINDOWS[case]
    heads = 2 if case == 0 else 1  # of K and V; the kernels do the same for each of them
    shape = Shape(4 * heads, heads, 64, 64, dtype=torch.float32)
    batch = Batch(shape, lengths, queries, shared=shared, seed=case)
    back, block = 30, shape.page_tokens
    begun = np.array(lengths) - np.array(queries) - back
    whole = batch.tables.cpu().numpy()

    def left(settled: np.ndarray) -> np.ndarray:
        """Tables without the pages that windows have passed; page 0 is full of NaN."""
        seen = span.first_visible_each(settled) // block
        return np.where(np.arange(whole.shape[1]) < seen[:, None], 0, whole)

    runs = find_shared_runs(whole, begun, block, min_saved=16, min_run=16)
    runs = visible_shared_runs(runs, left(begun), span.first_visible_each(begun), block)
    assert runs
    rows, most = len(lengths) + 1, max(queries)
    sharing = SharedRuns(rows, most, segments=8, depth=3, device=DEVICE)
    sharing.set_runs(runs, batch.starts.cpu().numpy())
    plan = DecodePlan(shape, rows, most, span, DEVICE, sharing)
    mask = Mask(span, 4.0, torch.randn(4 * heads).to(DEVICE))
    some = 0
    # One after the other, then one ahead of the rest, which no longer holds what the others see.
    for ahead in (0, 10, back):
        settled = begun + ahead
        settled[0] += (back - ahead) // 2
        batch.tables = torch.from_numpy(left(settled)).to(DEVICE)
        batch.lengths_ = torch.from_numpy(settled + queries).int().to(DEVICE)
        agrees(plan, batch, mask)
        some += int(plan.shared.totals[0]) > 0
    assert some > 1


def test_runs_of_an_earlier_step_are_ignored() -> None:
    """A step of fewer and shorter rows after a longer one, with q as large as before."""
    shape = Shape(8, 2, 64, 64, dtype=torch.float32)
    sharing = SharedRuns(4, 3, segments=4, depth=2, device=DEVICE)
    plan = DecodePlan(shape, 4, 3, device=DEVICE, sharing=sharing)
    before = Batch(shape, [150, 140, 90], [3, 3, 3], shared=[(128, [0, 1])])
    after = Batch(shape, [150, 140], [1, 2], shared=[(128, [0, 1])], seed=3)
    for batch in (before, after):
        queries = np.diff(batch.starts.cpu().numpy())
        runs = find_shared_runs(
            batch.tables.cpu().numpy(), np.array(batch.lengths) - queries, 16, min_saved=16
        )
        sharing.set_runs(runs, batch.starts.cpu().numpy())
        plan.make(batch.starts, batch.lengths_)
        count = int(batch.starts[-1])
        q = torch.zeros(9, 8, 64, device=DEVICE)
        q[:count] = batch.q
        out, lse = plan.attend(q, batch.k, batch.v, batch.tables)
        assert relative(out[:count], batch.expected(Mask(FULL))[0]) < TOLERANCE[torch.float32]
        assert not out[count:].any()
        assert lse[count:].isneginf().all()
