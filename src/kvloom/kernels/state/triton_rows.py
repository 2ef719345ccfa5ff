# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""Common parts of the recurrent kernels: small functions, and the search for the sequence and pages of a program.

A call in chunks has one program per chunk of each sequence. The host does not read the lengths of sequences, so it does
not have the number of chunks. It launches `tokens // CHUNK + sequences` programs, which is always enough.

A place is the index of a chunk in this launch grid. The chunks of sequence s start at place `starts[s] // CHUNK + s`,
so places are distinct. A program finds its sequence by comparing its place with all starts. The grid depends only on
sizes, so a captured graph works for any lengths.
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
    "stored_arguments",
]

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels. The interpreter cannot multiply bfloat16 correctly, because it
uses the raw bits. Rounded values are therefore converted back to float32."""


@triton.jit
def row_of(starts, row):
    """Return the index of the first token of a sequence, and the sequence's number of tokens. `row` is the number of
    the sequence. The index is int64, because offsets of packed tokens may exceed 2^31."""
    start = tl.load(starts + row).to(tl.int64)
    return start, (tl.load(starts + row + 1) - start).to(tl.int32)


@triton.jit
def locate(starts, sequences, place, CHUNK: tl.constexpr, SEARCH: tl.constexpr):
    """Return the sequence of the chunk at `place`, and the number of this chunk in the sequence. `place` is the
    index of the chunk in the launch grid. A chunk after the end of the sequence is empty."""
    index = tl.arange(0, SEARCH)
    begins = tl.load(starts + index, mask=index < sequences, other=0).to(tl.int32)
    before = (begins // CHUNK + index <= place) & (index < sequences)
    row = tl.sum(before.to(tl.int32), 0) - 1
    return row, place - (tl.load(starts + row).to(tl.int32) // CHUNK + row)


@triton.jit
def first_place(starts, row, CHUNK: tl.constexpr):
    """Return the place of a sequence's first chunk. A place is the index of a chunk in the launch grid. `row` is
    the number of the sequence."""
    return tl.load(starts + row).to(tl.int32) // CHUNK + row


@triton.jit
def start_page(read, fresh, row, FRESH: tl.constexpr):
    """Return the page of a sequence's first state, or 0 if the sequence starts from zeros. `row` is the number of
    the sequence."""
    page = tl.load(read + row).to(tl.int64)
    if FRESH:
        page = tl.where(tl.load(fresh + row) != 0, 0, page)
    return page


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) in float32. A series is used where 1 + exp(x) would lose small values."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * 0.33333334)), tl.log(1.0 + e)))


@triton.jit
def product(left, right, DOT: tl.constexpr):
    """Return a matrix product with sums in float32. `DOT` is the precision that `dot_precision` returns."""
    if DOT == "bf16":
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        if INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
    else:
        left, right = left.to(tl.float32), right.to(tl.float32)
    # A single return, because Triton compiles code after a return in a branch anyway.
    return tl.dot(left, right, input_precision=None if DOT == "bf16" else DOT)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix products for inputs of a dtype: bf16, tf32 or ieee. bf16 inputs are multiplied
    as bf16.

    fp16 inputs are multiplied as tf32, because states may exceed the range of fp16. tf32 represents fp16 values
    exactly. For float32 inputs the precision is ieee (full precision), because three passes of tf32 read past
    shared memory in Triton 3.6.
    """
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(dtype, "ieee")


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def places(rows: StateRows, tokens: int, chunk: int) -> int:
    """Return an upper bound of the number of chunks in a call, for the launch grid. Reads no lengths from the
    device."""
    return tokens // chunk + rows.sequences


def search_width(rows: StateRows) -> int:
    """Return how many entries of `starts` a program reads to find its sequence. The result is one of a few numbers,
    so that few kernels are compiled.
    """
    return max(64, int(triton.next_power_of_2(rows.sequences)))


def row_arguments(rows: StateRows) -> dict[str, object]:
    """Return the kernel arguments that describe the sequences. Their types are always the same, so the kernel is
    compiled only once."""
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


def stored_arguments(rows: StateRows) -> dict[str, object]:
    """Return the kernel arguments `stored` and STORED: after how many tokens of a sequence the kernel stores the
    state. Without `StateRows.stored`, the kernel stores the state after the last token."""
    stored = rows.starts if rows.stored is None else rows.stored
    return {"stored": stored.contiguous(), "STORED": rows.stored is not None}


def batch_invariant_kernel(kernel: Any) -> Any:
    """Return a version of the kernel for batch-invariant calls. This version is compiled once per layer, for all sizes
    and alignments of a call.

    Triton normally compiles special versions for a size of 1 and for aligned addresses. These versions could sum in
    another order. Arguments that describe the pages (addresses, strides) may still be specialised,
    because they are the same in every call of a layer.
    """
    varying = [
        name
        for name in kernel.arg_names
        if name not in ("states", "page_stride")
        and not name.isupper()  # constants of the kernel have capital letters
    ]
    return triton.jit(kernel.fn, do_not_specialize=varying, do_not_specialize_on_alignment=varying)


def exact_rounding(x: torch.Tensor) -> dict[str, bool]:
    """Return launch options that disable fused multiply-add, so that the compiler cannot change rounding."""
    return {"enable_fp_fusion": False} if x.is_cuda else {}
