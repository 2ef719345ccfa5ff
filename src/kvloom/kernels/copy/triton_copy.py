# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"
"""A Triton kernel that copies rows of bytes, 16 bytes at a time, between device memory and pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["TILE_BYTES", "move"]

TILE_BYTES = 16384
"""Bytes that one program copies at a time. With 8 warps, each thread has four accesses of 16 bytes in flight."""


@triton.jit(do_not_specialize=["items", "tiles", "units", "source_stride", "target_stride"])
def _move(
    source,
    target,
    source_ids,
    target_ids,
    items,
    tiles,
    units,
    source_stride,
    target_stride,
    tile: tl.constexpr,
):
    # Strides and lengths are in units of 16 bytes. The factor of 4 words shows the compiler that accesses
    # are aligned.
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // tiles
        word = item % tiles * tile + tl.arange(0, tile)
        inside = word < units * 4
        first = row if source_ids is None else tl.load(source_ids + row)
        values = tl.load(source + first.to(tl.int64) * source_stride * 4 + word, mask=inside)
        first = row if target_ids is None else tl.load(target_ids + row)
        tl.store(target + first.to(tl.int64) * target_stride * 4 + word, values, mask=inside)


def move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    count: int,
    row_bytes: int,
    source_stride: int,
    target_stride: int,
    programs: int,
    warps: int = 8,
) -> None:
    """Copy `count` rows of `row_bytes` bytes: row `source_ids[i]` of `source` to row `target_ids[i]` of `target`.
    Without ids, row i is used. Row r begins `r * stride` bytes after the tensor's first byte.

    Addresses, strides and `row_bytes` must be multiples of 16, which this function does not check. At most `programs`
    programs run at the same time.
    """
    tiles = -(-row_bytes // TILE_BYTES)
    items = count * tiles
    if not items:
        return
    _move[(min(items, programs),)](
        _words(source),
        _words(target),
        source_ids,
        target_ids,
        items,
        tiles,
        row_bytes // 16,
        source_stride // 16,
        target_stride // 16,
        tile=TILE_BYTES // 4,
        num_warps=warps,
    )


def _words(bytes_: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor as 32-bit words. The kernel uses only the pointer."""
    return bytes_.as_strided((16,), (1,)).view(torch.int32)
