# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""Common parts of the recurrent kernels: finding a program's row, its pages, and small functions.

A long call has one program per chunk of each row, but the host does not read how many chunks there are. Row s has its
chunks from index `starts[s] // CHUNK + s` on. These indices are distinct and at most `tokens // CHUNK + sequences`,
and a program finds its row by counting. So the grid depends only on sizes, and a captured graph works for any
lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .rows import StateRows

__all__ = [
    "batch_invariant_kernel",
    "dot_precision",
    "exact_rounding",
    "first_place",
    "locate",
    "packed",
    "places",
    "product",
    "row_arguments",
    "row_of",
    "search_width",
    "silu",
    "softplus",
    "start_page",
]

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies the raw bits of bfloat16, so values rounded to it are converted back there."""


@triton.jit
def row_of(starts, row):
    """Return a row's first token (int64: offsets of packed tokens may exceed 2^31) and its length."""
    start = tl.load(starts + row).to(tl.int64)
    return start, (tl.load(starts + row + 1) - start).to(tl.int32)


@triton.jit
def locate(starts, sequences, place, CHUNK: tl.constexpr, SEARCH: tl.constexpr):
    """Return the row, and its chunk, at index `place`. A chunk past the row's end has nothing to do."""
    index = tl.arange(0, SEARCH)
    begins = tl.load(starts + index, mask=index < sequences, other=0).to(tl.int32)
    before = (begins // CHUNK + index <= place) & (index < sequences)
    row = tl.sum(before.to(tl.int32), 0) - 1
    return row, place - (tl.load(starts + row).to(tl.int32) // CHUNK + row)


@triton.jit
def first_place(starts, row, CHUNK: tl.constexpr):
    """Return the index of a row's first chunk."""
    return tl.load(starts + row).to(tl.int32) // CHUNK + row


@triton.jit
def start_page(read, fresh, row, FRESH: tl.constexpr):
    """Return the page of a row's first state; 0 if it begins from zeros."""
    page = tl.load(read + row).to(tl.int64)
    if FRESH:
        page = tl.where(tl.load(fresh + row) != 0, 0, page)
    return page


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) in float32, by its series where 1 + exp(x) would lose small values."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.33333334)), tl.log(1.0 + e)))


@triton.jit
def product(left, right, DOT: tl.constexpr):
    """Return a matrix product with sums in float32; its factors are rounded by the rule of `dot_precision`."""
    if DOT == "bf16":
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
    else:
        left, right = left.to(tl.float32), right.to(tl.float32)
    # A single return: Triton compiles code after a return in a branch anyway.
    return tl.dot(left, right, input_precision=None if DOT == "bf16" else DOT)


def dot_precision(dtype: torch.dtype) -> str:
    """Return how factors are multiplied. bf16 inputs are multiplied as bf16.

    fp16 inputs are multiplied as tf32, which represents them exactly, and also states that exceed fp16. float32
    inputs are multiplied as they are, because three passes of tf32 read past shared memory in Triton 3.6."""
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(dtype, "ieee")


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with its last dimension contiguous: itself, or a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def places(rows: StateRows, tokens: int, chunk: int) -> int:
    """Return an upper bound of the number of chunks of a call, known without reading lengths."""
    return tokens // chunk + rows.sequences


def search_width(rows: StateRows) -> int:
    """Return how many starts a program reads to find its row. There are few widths, so that few kernels are compiled."""
    return max(64, int(triton.next_power_of_2(rows.sequences)))


def row_arguments(rows: StateRows) -> dict[str, object]:
    """Return the arguments that describe rows to a kernel. Their types never change, so that the kernel is compiled once."""
    if rows.batch_invariant:
        read = rows.read if rows.fresh is None else rows.read.masked_fill(rows.fresh != 0, 0)
        read, write = (part.to(torch.int64).contiguous() for part in (read, rows.write))
        starts = rows.starts.to(torch.int32).contiguous()
        return {"starts": starts, "read": read, "write": write, "fresh": read, "FRESH": False}
    fresh = rows.read if rows.fresh is None else rows.fresh
    return {
        "starts": rows.starts.contiguous(),
        "read": rows.read.contiguous(),
        "write": rows.write.contiguous(),
        "fresh": (fresh.view(torch.uint8) if fresh.dtype == torch.bool else fresh).contiguous(),
        "FRESH": rows.fresh is not None,
    }


def batch_invariant_kernel(kernel: Any) -> Any:
    """Return the kernel for batch-invariant rows, compiled once for a layer, whatever a call's sizes and alignment.

    A size of 1 or an aligned address could change the order of a tile's sum. The pages' addresses never change."""
    varying = [
        name
        for name in kernel.arg_names
        if name not in ("states", "page_stride") and not name.isupper()  # capitals: constants of the kernel
    ]
    return triton.jit(kernel.fn, do_not_specialize=varying, do_not_specialize_on_alignment=varying)


def exact_rounding(x: torch.Tensor) -> dict[str, bool]:
    """Return launch options that disable fused multiply-add, so that the compiler cannot change rounding."""
    return {"enable_fp_fusion": False} if x.is_cuda else {}
