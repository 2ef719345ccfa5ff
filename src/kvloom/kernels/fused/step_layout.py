"""Builds the model inputs of a decode step on the device, in one launch. The host uploads only a few numbers per
request.

    sent     [fields, requests] int32
             | token | position | source | table row | length | patched | new pages … | states … | shift |
    tables   [columns, sequences, blocks]: the block tables on the device, one column per page of a block

- `source` is the index of the request in the previous step. The input token is the token that the previous step sampled
  for the request, which may not be on the host yet. If `source` is -1, the input token is `token`.
- `table row` is the line of the request in each block table.
- `patched` is the number of the request's new block, or -1. A request gets at most one new block per step.
- `new pages` are the page ids of this block, which the launch writes to `tables`.
- `states` are the request's state pages.
- `shift` is the shift of rotary positions by images. Only some models need it.

CPU tensors run in torch (the oracle). CUDA tensors run in Triton, so that a graph can capture the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ROW_FIELDS", "StepLayout", "field_count", "lay_out_step"]

ROW_FIELDS = 6
"""Number of fixed fields of each request in the upload: token, position, source, table row, length, patched block."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The model inputs of a decode step. `rows` in the shapes is the number of requests, and `columns` the number of
    block tables. `tables` ([columns, rows, blocks]) are the block tables of the requests. They are valid up to the
    length of each request.

    The new token of a request is written to one slot per block table. `slots` [columns, rows] are the slot numbers.
    A slot number is page * block tokens + offset. The same slots are also given as `pages` [columns, rows] and
    offsets `places` [rows].
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
    """Return the number of int32 fields of each request in the upload. `columns` is the number of block tables, and
    `states` the number of state pages. With `shifted`, there is a field for the shift of rotary positions."""
    return ROW_FIELDS + columns + states + shifted


def lay_out_step(
    sent: torch.Tensor, tables: torch.Tensor, chosen: torch.Tensor, rows: int, block: int, states: int, shifted: bool
) -> StepLayout:  # fmt: skip
    """Build the model inputs of `rows` requests from the upload `sent`, and write new page ids to `tables`. `chosen`
    are the tokens that the previous step sampled. A block has `block` tokens. With `shifted`, `sent` has the field
    `shift`. Launches the work and does not wait."""
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
