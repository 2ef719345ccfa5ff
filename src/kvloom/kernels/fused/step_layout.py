"""A decode step laid out on the device: from one small block of numbers to the model's inputs, in one launch.

    sent [fields, rows] int32    | token | position | source | table row | length | patched | new pages … | states … | shift |
    tables [columns, sequences, blocks]    the device's block tables; a row's `patched` block gets its new pages

A row has at most one new block in a step (-1: none). `source` is the row's index among the tokens sampled before (-1:
use `token`). CPU tensors run in torch, the oracle; CUDA tensors in Triton, so that the step can be captured in a
graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ROW_FIELDS", "StepLayout", "field_count", "lay_out_step"]

ROW_FIELDS = 6
"""Fixed numbers of a row: token, position, source, table row, length, patched block."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The model's inputs of a decode step. `tables` ([columns, rows, blocks]) are valid up to each row's length.

    `slots`, `pages` ([columns, rows]) and `places` are the rows' write positions.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    places: torch.Tensor
    states: torch.Tensor
    shifts: torch.Tensor


def field_count(columns: int, states: int, shifted: bool) -> int:
    """Return how many numbers each row has in the uploaded block."""
    return ROW_FIELDS + columns + states + shifted


def lay_out_step(
    sent: torch.Tensor, tables: torch.Tensor, chosen: torch.Tensor, rows: int, block: int, states: int, shifted: bool
) -> StepLayout:  # fmt: skip
    """Return the layout of the `rows` rows in `sent`, and update `tables`. Launches work without waiting."""
    columns = tables.shape[0]
    numbers = sent[: field_count(columns, states, shifted) * rows].view(-1, rows)
    if sent.is_cuda:
        from . import triton_step_layout

        return StepLayout(
            *triton_step_layout.lay_out_step(numbers, tables, chosen, block, states, ROW_FIELDS)
        )
    token, position, source, of, _, patched = numbers[:ROW_FIELDS].long()
    some = patched >= 0
    new, rest = numbers[ROW_FIELDS : ROW_FIELDS + columns], numbers[ROW_FIELDS + columns :]
    tables[:, of[some], patched[some]] = new[:, some]
    row_tables = tables.index_select(1, of)
    pages = row_tables[:, torch.arange(rows), position // block].long()
    places = position % block
    return StepLayout(
        tokens=torch.where(source < 0, token, chosen[source.clamp(min=0)]),
        positions=position,
        lengths=numbers[4],
        tables=row_tables,
        slots=pages * block + places,
        pages=pages,
        places=places,
        states=rest[:states].long(),
        shifts=rest[states:].long(),
    )
