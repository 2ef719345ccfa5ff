"""Triton kernels of `interface.py`: the two grouped products of low-rank terms.

    shrink   low[split, place] = a[slot] @ x[token]      over one split: a range of the inputs
    expand   out[token] += b[slot] @ low[place]          low is the sum of all splits

Tokens are sorted by slot, and `place` is the index of a token in this order. A tile has M places. A program
handles the adapters of its tile one after the other. The tokens of an adapter are adjacent, so few tiles have several
adapters. The work is at most one product per tile, plus one per adapter of the step. The program of a tile without
adapters returns at once. Grids depend only on the number of tokens.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .stacked_weights import COLUMNS, AdapterRows, LowRankWeights

__all__ = ["add_low_rank"]

SPLITS = (8, 1)
"""Number of splits of the first product: the first value in steps of up to FEW_TOKENS tokens, the second in larger
steps. With several splits, a few tokens use many multiprocessors."""
DEPTH = 64
"""Inputs that the first product sums at a time."""
FEW_TOKENS = 128
"""Steps of up to this many tokens use small tiles and several splits."""
TILES = (16, 64)
"""Number of places of a tile: the first value in steps of up to FEW_TOKENS tokens, the second in larger steps."""
MOST_LOW = 64
"""Largest number of rows of `a` that one program of the first product computes."""


@triton.jit(do_not_specialize=["count"])
def _shrink_kernel(
    x, a, low, order, slots, count, inputs, width, x_stride, a_slot, a_row,
    M: tl.constexpr, R: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the first product (`shrink`). Grid: (tile, block of rows of a, split)."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tile * M + tl.arange(0, M)
    there = place < count
    mine = tl.load(slots + place, mask=there, other=0)
    last = tl.load(slots + tl.minimum(tile * M + M, count) - 1)
    if last > 0:
        first = tl.maximum(tl.load(slots + tile * M), 1)
        token = tl.load(order + place, mask=there, other=0)
        r = block * R + tl.arange(0, R)
        total = tl.zeros((M, R), tl.float32)
        for slot in range(first, last + 1):
            chosen = mine == slot
            if tl.max(chosen.to(tl.int32), 0) > 0:
                start = a + tl.cast(slot - 1, tl.int64) * a_slot
                for at in range(0, SPLIT, K):
                    k = split * SPLIT + at + tl.arange(0, K)
                    inside = k < inputs
                    part = tl.load(
                        x + token[:, None].to(tl.int64) * x_stride + k[None, :],
                        mask=chosen[:, None] & inside[None, :],
                        other=0.0,
                    )
                    weight = tl.load(
                        start + r[:, None].to(tl.int64) * a_row + k[None, :],
                        mask=(r < width)[:, None] & inside[None, :],
                        other=0.0,
                    )
                    total += tl.dot(part, tl.trans(weight), input_precision="ieee")
        to = low + (split * count + place[:, None]).to(tl.int64) * width + r[None, :]
        tl.store(to, total, mask=there[:, None] & (r < width)[None, :])


@triton.jit(do_not_specialize=["count", "shift"])
def _expand_kernel(
    out, b, low, order, slots, blocks, count, width, shift, out_stride, b_slot, b_row,
    M: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute the second product (`expand`). Grid: (tile, block of columns). R of the RANK dimensions are summed at
    a time."""
    tile, block = tl.program_id(0), tl.program_id(1)
    place = tile * M + tl.arange(0, M)
    there = place < count
    mine = tl.load(slots + place, mask=there, other=0)
    last = tl.load(slots + tl.minimum(tile * M + M, count) - 1)
    if last > 0:
        first = tl.maximum(tl.load(slots + tile * M), 1)
        token = tl.load(order + place, mask=there, other=0)
        column = tl.load(blocks + block * 3) + tl.arange(0, N)
        inside = column < tl.load(blocks + block * 3 + 1)
        start_of_part = tl.load(blocks + block * 3 + 2) * RANK
        adapted = there & (mine > 0)
        total = tl.zeros((M, N), tl.float32)
        for slot in range(first, last + 1):
            chosen = mine == slot
            if tl.max(chosen.to(tl.int32), 0) > 0:
                start = b + tl.cast(slot - 1, tl.int64) * b_slot
                for first_dim in range(0, RANK, R):
                    r = first_dim + tl.arange(0, R)
                    own = tl.zeros((M, R), tl.float32)
                    for split in range(SPLITS):
                        of = low + (split * count + place[:, None]).to(tl.int64) * width
                        own += tl.load(of + (start_of_part + r)[None, :], mask=chosen[:, None], other=0.0)
                    weight = tl.load(
                        start + column[:, None].to(tl.int64) * b_row + r[None, :],
                        mask=inside[:, None],
                        other=0.0,
                    )
                    part = own.to(b.dtype.element_ty)
                    total += tl.dot(part, tl.trans(weight), input_precision="ieee")
        to = out + token[:, None].to(tl.int64) * out_stride + (column - shift)[None, :]
        where = adapted[:, None] & inside[None, :]
        before = tl.load(to, mask=where, other=0.0).to(tl.float32)
        tl.store(to, (before + total).to(out.dtype.element_ty), mask=where)


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: LowRankWeights,
    rows: AdapterRows,
    part: int | None = None,
    invariant: bool = False,
) -> None:
    """The CUDA version of `interface.add_low_rank`. `out` is [tokens, outputs], with adjacent columns. With
    `invariant`, every step uses the same tiles."""
    order, slots, blocks = rows.order, rows.slots, weights.blocks
    if order is None or slots is None or blocks is None:
        raise ValueError("the rows of the step are on the host: make them with AdapterRows.sorted_by_slot")
    if x.stride(-1) != 1:
        x = x.contiguous()
    count, (width, inputs), rank = len(x), weights.a.shape[1:], weights.rank
    shift = 0
    if part is not None:
        of = weights.columns[part]
        shift = of.start
        before = sum(-(-size // COLUMNS) for size in weights.outputs[:part])
        blocks = blocks[before : before + -(-weights.outputs[part] // COLUMNS)]
    small = invariant or count <= FEW_TOKENS
    tile, splits = (TILES[0], SPLITS[0]) if small else (TILES[1], SPLITS[1])
    each = -(-inputs // (splits * DEPTH)) * DEPTH
    low = torch.empty((splits, count, width), dtype=torch.float32, device=x.device)
    tiles, rows_of_a = -(-count // tile), min(rank, MOST_LOW)
    _shrink_kernel[tiles, -(-width // rows_of_a), splits](
        x, weights.a, low, order, slots, count, inputs, width, x.stride(0), weights.a.stride(0), weights.a.stride(1),
        M=tile, R=rows_of_a, K=DEPTH, SPLIT=each,
    )  # fmt: skip
    _expand_kernel[tiles, len(blocks)](
        out, weights.b, low, order, slots, blocks, count, width, shift, out.stride(0), weights.b.stride(0),
        weights.b.stride(1), M=tile, N=COLUMNS, RANK=rank, R=rows_of_a, SPLITS=splits,
    )  # fmt: skip
