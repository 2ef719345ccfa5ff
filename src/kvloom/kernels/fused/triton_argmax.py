"""Triton kernels of `argmax.py`. The first kernel finds the largest value of each part of a tensor row. The second
kernel finds the part with the largest value."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["row_argmax"]

TILE = 2048
MOST_PARTS = 64
PROGRAMS = 1024
"""Number of programs that is large enough to keep the memory of an H200 busy."""


@triton.jit(do_not_specialize=["tiles"])
def _parts_kernel(rows, values, places, s_row, columns, tiles, TILE: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    line = rows + row.to(tl.int64) * s_row
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    place = part * tiles * TILE + lane
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, tl.cdiv(columns, TILE))):
        at = tile * TILE + lane
        value = tl.load(line + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        place = tl.where(value > best, at, place)  # the first of equal values
        best = tl.maximum(best, value)
    top = tl.max(best, 0)
    where = tl.min(tl.where(best == top, place, 2147483647), 0)
    tl.store(values + row * PARTS + part, top)
    tl.store(places + row * PARTS + part, where)


@triton.jit(do_not_specialize=["parts"])
def _best_kernel(values, places, out, parts, columns, PARTS: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, PARTS)
    value = tl.load(values + row * PARTS + lane, mask=lane < parts, other=float("-inf"))
    place = tl.load(places + row * PARTS + lane, mask=lane < parts, other=2147483647)
    where = tl.min(tl.where(value == tl.max(value, 0), place, 2147483647), 0)
    tl.store(out + row, tl.minimum(where, columns - 1).to(tl.int64))  # if every value is NaN, any valid index


def row_argmax(rows: torch.Tensor) -> torch.Tensor:
    count, columns = rows.shape
    whole = triton.cdiv(columns, TILE)
    tiles = triton.cdiv(whole, max(1, min(MOST_PARTS, PROGRAMS // count, whole)))
    parts = triton.cdiv(whole, tiles)
    values = torch.empty((count, MOST_PARTS), dtype=torch.float32, device=rows.device)
    places = torch.empty((count, MOST_PARTS), dtype=torch.int32, device=rows.device)
    out = torch.empty(count, dtype=torch.int64, device=rows.device)
    _parts_kernel[(count, parts)](
        rows, values, places, rows.stride(0), columns, tiles, TILE=TILE, PARTS=MOST_PARTS, num_warps=4
    )
    _best_kernel[(count,)](values, places, out, parts, columns, PARTS=MOST_PARTS, num_warps=1)
    return out
