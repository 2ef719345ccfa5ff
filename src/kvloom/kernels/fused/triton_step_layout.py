"""Triton kernel of `step_layout.py`. Each program handles one request in one block table: it adds the new page id
and copies the request's line of the block table.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["lay_out_step"]


@triton.jit(do_not_specialize=["rows"])
def _row_kernel(
    numbers, tables, chosen, tokens, positions, row_tables, slots, pages, places, more, rows, sequences, blocks,
    FIXED: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    position = tl.load(numbers + rows + row)
    if column == 0:
        token = tl.load(numbers + row).to(tl.int64)
        source = tl.load(numbers + 2 * rows + row)
        if source >= 0:
            token = tl.load(chosen + source)
        tl.store(tokens + row, token)
        tl.store(positions + row, position.to(tl.int64))
        tl.store(places + row, (position % BLOCK).to(tl.int64))
        for i in tl.static_range(REST):
            value = tl.load(numbers + (FIXED + COLUMNS + i) * rows + row)
            tl.store(more + i * rows + row, value.to(tl.int64))
    if COLUMNS > 0:
        of = tl.load(numbers + 3 * rows + row)
        length = tl.load(numbers + 4 * rows + row)
        patched = tl.load(numbers + 5 * rows + row)
        new = tl.load(numbers + (FIXED + column) * rows + row)
        mine = tables + (column * sequences + of).to(tl.int64) * blocks
        into = row_tables + (column * rows + row).to(tl.int64) * blocks
        for first in range(0, tl.cdiv(length, BLOCK), CHUNK):
            at = first + tl.arange(0, CHUNK)
            there = at < tl.cdiv(length, BLOCK)
            ids = tl.load(mine + at, mask=there, other=0)
            tl.store(into + at, tl.where(at == patched, new, ids), mask=there)
        here = tl.load(mine + position // BLOCK)
        page = tl.where(position // BLOCK == patched, new, here).to(tl.int64)
        if patched >= 0:
            tl.store(mine + patched, new)
        tl.store(pages + column * rows + row, page)
        tl.store(slots + column * rows + row, page * BLOCK + position % BLOCK)


def lay_out_step(
    numbers: torch.Tensor, tables: torch.Tensor, chosen: torch.Tensor, block: int, states: int, fixed: int
) -> tuple[torch.Tensor, ...]:
    """Launch the kernel for the upload `numbers` [fields, requests]. `fixed` is the number of fields before the
    new pages (ROW_FIELDS). Return the tensors of `StepLayout`."""
    columns, sequences, blocks = tables.shape
    fields, rows = numbers.shape
    rest = fields - fixed - columns

    def longs(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=numbers.device)

    tokens, positions, places = longs(rows), longs(rows), longs(rows)
    slots, pages, more = longs(columns, rows), longs(columns, rows), longs(rest, rows)
    # A call outside a capture is a warm-up. All its requests may be padding, but cascade attention still reads their
    # tables.
    captured = numbers.is_cuda and torch.cuda.is_current_stream_capturing()
    made = torch.empty if captured else torch.zeros
    row_tables = made((columns, rows, blocks), dtype=torch.int32, device=numbers.device)
    _row_kernel[(rows, max(1, columns))](
        numbers, tables, chosen, tokens, positions, row_tables, slots, pages, places, more, rows, sequences, blocks,
        FIXED=fixed, COLUMNS=columns, REST=rest, BLOCK=block, CHUNK=128, num_warps=1,
    )  # fmt: skip
    return tokens, positions, numbers[4], row_tables, slots, pages, places, more[:states], more[states:]
