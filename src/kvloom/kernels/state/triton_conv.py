# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""The causal convolution in Triton, with one program for each chunk of a sequence and block of channels.

Only the program of a sequence's first chunk accesses the page of the sequence. It reads the old inputs, then writes
the newest inputs, which it takes from x. Chunks can therefore run in parallel in one call that reads and writes the
page. One thread sums an output over the taps in a fixed order. Batch-invariant calls therefore need no loop over
tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import ColumnRuns, StateRows
from .triton_rows import (
    exact_rounding,
    locate,
    packed,
    places,
    row_arguments,
    row_of,
    search_width,
    silu,
    start_page,
    stored_arguments,
)

__all__ = ["causal_conv"]


@triton.jit(do_not_specialize=["sequences"])
def conv_kernel(
    x,
    weight,
    bias,
    out,
    states,
    starts,
    read,
    write,
    fresh,
    stored,
    runs,
    sequences,
    channels,
    x_stride,
    out_stride,
    page_stride,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_UP: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEARCH: tl.constexpr,
    RUN: tl.constexpr,
    STEPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    FRESH: tl.constexpr,
    STORED: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    if STEPS:
        row = tl.program_id(0)
        chunk = 0
    else:
        row, chunk = locate(starts, sequences, tl.program_id(0), TOKENS, SEARCH)
    start, length = row_of(starts, row)
    target = tl.load(write + row).to(tl.int64)
    if (chunk * TOKENS >= length) & ((chunk > 0) | (target == 0)):
        return
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = column < channels
    x_column = column
    if RUN:
        begin = tl.program_id(1) * CHANNELS
        x_column = tl.multiple_of(tl.load(runs + begin // RUN), 16) + begin % RUN + tl.arange(0, CHANNELS)
    page = start_page(read, fresh, row, FRESH)
    old = states + page * page_stride + column * COLUMNS
    # The first chunk reads inputs before this index (counted from the start of the sequence) from the page, if there is a page.
    oldest = tl.where((page > 0) & (chunk == 0), 0, -COLUMNS - TAPS)
    at = chunk * TOKENS + tl.arange(0, TOKENS)
    if BIAS:
        acc = tl.zeros((TOKENS, CHANNELS), tl.float32) + tl.load(bias + column, mask=real, other=0.0)[None, :]
    else:
        acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        source = at - (TAPS - 1 - tap)
        inside = (source >= 0) & (source < length)
        value = tl.load(
            x + (start + source)[:, None] * x_stride + x_column[None, :],
            mask=inside[:, None] & real[None, :],
            other=0.0,
        ).to(tl.float32)
        if INVARIANT and tap < TAPS - 1:
            # Summed in the order of the taps. Inputs are rounded to the page's dtype, so page and x give
            # equal bits.
            stored = tl.load(
                old[None, :] + (source + COLUMNS)[:, None],
                mask=(source < oldest)[:, None] & real[None, :],
                other=0.0,
            ).to(tl.float32)
            value = tl.where((source < 0)[:, None], stored, value.to(states.dtype.element_ty).to(tl.float32))
        factor = tl.load(weight + column * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        acc += value * factor[None, :]
    if not INVARIANT:
        if chunk == 0:
            for tap in tl.static_range(TAPS - 1):
                before = at - (TAPS - 1 - tap)
                value = tl.load(
                    old[None, :] + (before + COLUMNS)[:, None],
                    mask=(before < oldest)[:, None] & real[None, :],
                    other=0.0,
                ).to(tl.float32)
                factor = tl.load(weight + column * TAPS + tap, mask=real, other=0.0).to(tl.float32)
                acc += value * factor[None, :]
    if SILU:
        acc = silu(acc)
    tl.store(
        out + (start + at)[:, None] * out_stride + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=(at < length)[:, None] & real[None, :],
    )
    if (chunk == 0) & (target > 0):
        # Column c of the new state is the input at end - COLUMNS + c. A negative index is an old column.
        place = tl.arange(0, COLUMNS_UP)
        end = length
        if STORED:
            end = tl.load(stored + row).to(tl.int32)
        origin = end - COLUMNS + place
        kept = (place < COLUMNS)[None, :] & real[:, None]
        new = tl.load(
            x + (start + origin)[None, :] * x_stride + x_column[:, None],
            mask=kept & (origin >= 0)[None, :],
            other=0.0,
        ).to(tl.float32)
        shifted = tl.load(
            old[:, None] + (origin + COLUMNS)[None, :], mask=kept & (origin < oldest)[None, :], other=0.0
        ).to(tl.float32)
        # All threads must read these columns before any thread overwrites them.
        tl.debug_barrier()
        tl.store(
            states + target * page_stride + column[:, None] * COLUMNS + place[None, :],
            (new + shifted).to(states.dtype.element_ty),
            mask=kept,
        )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: torch.Tensor,
    rows: StateRows,
    runs: ColumnRuns | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton version of `state.causal_conv`."""
    x, channels = packed(x), len(weight)
    out = x.new_empty(len(x), channels) if out is None else out
    tokens = triton.next_power_of_2(max(rows.longest, 1)) if rows.steps else 16
    width = min(256 if rows.steps else 128, max(16, triton.next_power_of_2(channels)))
    if runs is not None:
        width = min(width, runs.size)
    programs = rows.sequences if rows.steps else places(rows, x.shape[0], tokens)
    conv_kernel[(programs, triton.cdiv(channels, width))](
        x,
        weight.contiguous(),
        x if bias is None else bias.contiguous(),
        out,
        states,
        runs=x if runs is None else runs.first,
        sequences=rows.sequences,
        channels=channels,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        page_stride=states.stride(0),
        TAPS=weight.shape[1],
        COLUMNS=states.shape[2],
        COLUMNS_UP=triton.next_power_of_2(states.shape[2]),
        TOKENS=tokens,
        CHANNELS=width,
        SEARCH=search_width(rows),
        RUN=0 if runs is None else runs.size,
        STEPS=rows.steps,
        BIAS=bias is not None,
        SILU=silu,
        INVARIANT=rows.batch_invariant,
        num_warps=4,
        **row_arguments(rows),
        **stored_arguments(rows),
        **(exact_rounding(x) if rows.batch_invariant else {}),
    )
    return out
