"""A step of single tokens in one launch: what the oracle works out, and tables that follow."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.fused import step_layout as singles

pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.fused import triton_step_layout

from .batches import DEVICE

SEQUENCES, BLOCKS, BLOCK = 9, 300, 16


def launched(
    numbers: torch.Tensor, tables: torch.Tensor, chosen: torch.Tensor, states: int
) -> singles.StepLayout:
    found = triton_step_layout.lay_out_step(
        numbers.to(DEVICE), tables, chosen.to(DEVICE), BLOCK, states, singles.ROW_FIELDS
    )
    return singles.StepLayout(*found)


@pytest.mark.parametrize(("columns", "states", "shifted"), [(1, 0, False), (3, 2, True), (0, 1, False)])
def test_the_kernel_works_out_what_the_oracle_does(columns: int, states: int, shifted: bool) -> None:
    gen = torch.Generator().manual_seed(columns)

    def drawn(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=gen, dtype=torch.int32)

    rows, count = 7, 5
    numbers = torch.zeros(singles.field_count(columns, states, shifted), rows, dtype=torch.int32)
    numbers[2], numbers[3], numbers[5] = -1, SEQUENCES - 1, -1  # two padding rows
    lengths = torch.tensor([1, 16, 17, 2500, 4800], dtype=torch.int32)
    numbers[0, :count], numbers[1, :count], numbers[4, :count] = drawn(99, count), lengths - 1, lengths
    numbers[2, :count] = drawn(8, count) - 1
    numbers[3, :count] = torch.randperm(SEQUENCES - 1, generator=gen)[:count].int()
    numbers[5, :count] = torch.tensor([0, -1, 1, 100, 299])
    numbers[6:, :count] = drawn(1000, len(numbers) - 6, count) + 1
    tables = drawn(1000, columns, SEQUENCES, BLOCKS)
    tables[:, -1] = 0
    chosen = torch.arange(8) + 1000
    changed, sent = tables.clone(), numbers.reshape(-1)
    wanted = singles.lay_out_step(sent, changed, chosen, rows, BLOCK, states, shifted)
    there = tables.to(DEVICE)
    found = launched(numbers, there, chosen, states)
    assert torch.equal(there.cpu(), changed)
    for name in ("tokens", "positions", "lengths", "slots", "pages", "places", "states", "shifts"):
        ours, theirs = getattr(found, name).cpu(), getattr(wanted, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    for row, length in enumerate(wanted.lengths.tolist()):
        used = -(-length // BLOCK)
        assert torch.equal(found.tables[:, row, :used].cpu(), wanted.tables[:, row, :used])


def test_padding_rows_have_only_page_0_in_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a graph is captured its step runs once, with padding rows and arbitrary shared runs."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, 1 << 20, **how))
    numbers = torch.zeros(singles.field_count(2, 0, False), 4, dtype=torch.int32)
    numbers[2], numbers[3], numbers[5] = -1, SEQUENCES - 1, -1
    tables = torch.zeros(2, SEQUENCES, BLOCKS, dtype=torch.int32)
    chosen = torch.zeros(4, dtype=torch.int64)
    found = launched(numbers, tables.to(DEVICE), chosen, 0)
    assert not found.tables.any()
