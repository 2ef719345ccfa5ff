# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Triton kernels of `products.py`. One program computes each sum, in a fixed order. Sums are not split between
programs."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["product", "row_cumsum", "row_sum"]


@triton.jit(do_not_specialize=["m"])
def product(
    A, B, BIAS, OUT, OFFSETS, m, n, k, a_batch, a_m, a_k, b_batch, b_k, b_n, out_batch, out_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr, BIASED: tl.constexpr,
    EXACT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute OUT [batch, m, n] = A [batch, m, k] B [batch, k, n] + BIAS [n]. Grid: (tiles, batch).

    Each output is summed along k in steps of BK, in float32, and rounded once. TOGETHER is the number of row tiles
    that run one after another over the same columns of B, so that B stays in the L2 cache. With GROUPED, A is [m,
    k], and group i ends at row OFFSETS[i].
    """
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(n, BN)
    band = tile // (TOGETHER * across)
    if GROUPED:
        begin = tl.load(OFFSETS + tl.maximum(batch - 1, 0))
        begin = tl.where(batch > 0, begin, 0)
        m = tl.load(OFFSETS + batch) - begin
        A += begin.to(tl.int64) * a_m
        OUT += begin.to(tl.int64) * out_m
    high = tl.minimum(tl.cdiv(m, BM) - band * TOGETHER, TOGETHER)
    within = tile % (TOGETHER * across)
    if GROUPED:
        if high <= 0:
            return
        if within >= high * across:
            return
    row = ((band * TOGETHER + within % high) * BM + tl.arange(0, BM)).to(tl.int64)
    column = (within // high * BN + tl.arange(0, BN)).to(tl.int64)
    step = tl.arange(0, BK)
    a_at = A + batch * a_batch + row[:, None] * a_m + step[None, :] * a_k
    b_at = B + batch * b_batch + step[:, None] * b_k + column[None, :] * b_n
    acc = tl.zeros([BM, BN], tl.float32)
    for i in range(0, k, BK):
        there = step < k - i
        a = tl.load(a_at, mask=(row < m)[:, None] & there[None, :], other=0.0)
        b = tl.load(b_at, mask=there[:, None] & (column < n)[None, :], other=0.0)
        if EXACT:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
        a_at += BK * a_k
        b_at += BK * b_k
    if BIASED:
        acc += tl.load(BIAS + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    into = OUT + batch * out_batch + row[:, None] * out_m + column[None, :]
    tl.store(into, acc.to(OUT.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def row_sum(X, OUT, n, x_row, BLOCK: tl.constexpr):
    """Sum rows [rows, n] in float32. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        acc += tl.load(X + row * x_row + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(OUT + row, tl.sum(acc, 0))


@triton.jit
def row_cumsum(X, OUT, n, x_row, out_row, BLOCK: tl.constexpr):
    """Compute running sums of rows [rows, n] in float32. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.sum(tl.zeros([BLOCK], tl.float32), 0)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        values = tl.load(X + row * x_row + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(OUT + row * out_row + at, before + tl.cumsum(values, 0), mask=at < n)
        before += tl.sum(values, 0)
