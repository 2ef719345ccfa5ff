# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""Scans with one state vector per channel (Mamba-1, RG-LRU) in Triton. Channels run in parallel, and time runs in a
loop.

If there are enough sequences to fill the device, a program processes a whole sequence for a block of channels. If
there are only a few long sequences, they are also split into chunks of tokens. Each chunk is then processed twice:

    SUMMARY   every chunk from zeros             →  the chunk's last state, the sum of its time steps
    pass      along the chunks of a sequence     →  every chunk's first state, the sequence's last state
    OUTPUTS   every chunk from its first state   →  y

In batch-invariant calls, sequences are never split, and a program processes as many channels as in a decode step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import StateRows
from .triton_rows import (
    batch_invariant_kernel,
    exact_rounding,
    first_place,
    locate,
    packed,
    places,
    row_arguments,
    row_of,
    search_width,
    silu,
    softplus,
    start_page,
    stored_arguments,
)

__all__ = ["linear_scan", "mamba1_scan"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
WHOLE: tl.constexpr = tl.constexpr(0)
SUMMARY: tl.constexpr = tl.constexpr(1)
OUTPUTS: tl.constexpr = tl.constexpr(2)

CHUNK = 256
"""Number of tokens of a chunk, if sequences are split into chunks."""

# Channels per program, and warps. Arithmetic limits the speed of a whole sequence; loads in flight limit a decode step.
WALK_ELEMENTS, WALK_WARPS = 512, 1
STEP_ELEMENTS, STEP_WARPS = 1024, 2

ENOUGH = 2048
"""Number of programs that fill a device. With fewer programs, sequences of at least two chunks are split into
chunks."""


@triton.jit
def _rates(a, column, n, channels, N: tl.constexpr, LINEAR: tl.constexpr):
    """Return the rate of every channel and state element, multiplied by log2(e). The kernels compute decays as
    powers of 2."""
    real = (column < channels)[:, None] & (n < N)[None, :]
    if LINEAR:
        rates = tl.where(real, LOG2E, 0.0)
    else:
        rates = tl.load(a + column[:, None] * N + n[None, :], mask=real, other=0.0).to(tl.float32) * LOG2E
    return rates


@triton.jit
def _vector(b, offset, column, n, per_group, group_stride, real, N: tl.constexpr, GROUPED: tl.constexpr):
    """Load b or c of one token: [1, n] if all channels share it, or [channels, n] if channels are grouped."""
    if GROUPED:
        place = (column // per_group)[:, None] * group_stride + n[None, :]
        found = tl.load(b + offset + place, mask=real[:, None] & (n < N)[None, :], other=0.0)
    else:
        found = tl.load(b + offset + n, mask=n < N, other=0.0)[None, :]
    return found.to(tl.float32)


@triton.jit(do_not_specialize=["sequences"])
def scan_kernel(
    x, dt, a, b, c, d, z, dt_bias, out, states, chunk_states, chunk_steps,
    starts, read, write, fresh, stored,
    sequences, channels, per_group,
    x_stride, dt_stride, z_stride, out_stride, b_stride, b_group, c_stride, c_group, page_stride,
    N: tl.constexpr, N_UP: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, SEARCH: tl.constexpr,
    PHASE: tl.constexpr, LINEAR: tl.constexpr, GROUPED: tl.constexpr, SOFTPLUS: tl.constexpr,
    BIAS: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, FRESH: tl.constexpr,
    STORED: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if PHASE == WHOLE:
        row = place
        start, length = row_of(starts, row)
        first = 0
        last = length
        if (length == 0) & (tl.load(write + row) == 0):
            return
    else:
        row, chunk = locate(starts, sequences, place, TOKENS, SEARCH)
        start, length = row_of(starts, row)
        first = chunk * TOKENS
        last = tl.minimum(first + TOKENS, length)
        if first >= length:
            return
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = column < channels
    n = tl.arange(0, N_UP)
    inside = real[:, None] & (n < N)[None, :]
    own = column[:, None] * N + n[None, :]
    rates = _rates(a, column, n, channels, N, LINEAR)
    if BIAS:
        bias = tl.load(dt_bias + column, mask=real, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros((CHANNELS,), tl.float32)
    if SKIP:
        skip = tl.load(d + column, mask=real, other=0.0).to(tl.float32)

    if PHASE == WHOLE:
        page = start_page(read, fresh, row, FRESH)
        kept = tl.where(page > 0, N, 0)
        h = tl.load(
            states + page * page_stride + own, mask=real[:, None] & (n < kept)[None, :], other=0.0
        ).to(tl.float32)
    elif PHASE == OUTPUTS:
        h = tl.load(chunk_states + place.to(tl.int64) * channels * N + own, mask=inside, other=0.0)
    else:
        h = tl.zeros((CHANNELS, N_UP), tl.float32)
    steps = tl.zeros((CHANNELS,), tl.float32)

    target = tl.load(write + row).to(tl.int64)
    # The next token is loaded while this one is computed, because only the state depends on the order.
    token = start + first
    some = column < tl.where(first < last, channels, 0)
    step_next = tl.load(dt + token * dt_stride + column, mask=some, other=0.0)
    x_next = tl.load(x + token * x_stride + column, mask=some, other=0.0)
    for at in range(first, last):
        token = start + at
        step = step_next.to(tl.float32) + bias
        if SOFTPLUS:
            step = softplus(step)
        u = x_next.to(tl.float32)
        more = column < tl.where(at + 1 < last, channels, 0)
        step_next = tl.load(dt + (token + 1) * dt_stride + column, mask=more, other=0.0)
        x_next = tl.load(x + (token + 1) * x_stride + column, mask=more, other=0.0)
        if LINEAR:
            h = tl.exp2(step[:, None] * rates) * h + u[:, None]
        else:
            into = _vector(b, token * b_stride, column, n, per_group, b_group, real, N, GROUPED)
            h = tl.exp2(step[:, None] * rates) * h + (step * u)[:, None] * into
        if PHASE == SUMMARY:
            steps += step
        else:
            if LINEAR:
                y = tl.sum(h, 1)
            else:
                y = tl.sum(
                    h * _vector(c, token * c_stride, column, n, per_group, c_group, real, N, GROUPED), 1
                )
            if SKIP:
                y += skip * u
            if GATE:
                y *= silu(tl.load(z + token * z_stride + column, mask=real, other=0.0).to(tl.float32))
            tl.store(out + token * out_stride + column, y.to(out.dtype.element_ty), mask=real)
        if INVARIANT:
            h = h.to(states.dtype.element_ty).to(tl.float32)
        if STORED:  # then PHASE is WHOLE
            now = inside & (target > 0) & (at + 1 == tl.load(stored + row))
            tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=now)

    if PHASE == WHOLE and not STORED:
        if target > 0:
            tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=inside)
    if PHASE == SUMMARY:
        tl.store(chunk_states + place.to(tl.int64) * channels * N + own, h, mask=inside)
        tl.store(chunk_steps + place.to(tl.int64) * channels + column, steps, mask=real)


invariant_kernel = batch_invariant_kernel(scan_kernel)


@triton.jit
def pass_kernel(
    a, states, chunk_states, chunk_steps, starts, read, write, fresh, channels, page_stride,
    N: tl.constexpr, N_UP: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, LINEAR: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    """Compute the first state of every chunk. On entry, `chunk_states` has the last state of each chunk, computed
    from zeros. On return, it has the first state of each chunk. Each thread updates its own elements of the state.
    """
    row = tl.program_id(0)
    _, length = row_of(starts, row)
    place = first_place(starts, row, TOKENS).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = column < channels
    n = tl.arange(0, N_UP)
    inside = real[:, None] & (n < N)[None, :]
    own = column[:, None] * N + n[None, :]
    rates = _rates(a, column, n, channels, N, LINEAR)
    page = start_page(read, fresh, row, FRESH)
    kept = tl.where(page > 0, N, 0)
    h = tl.load(states + page * page_stride + own, mask=real[:, None] & (n < kept)[None, :], other=0.0).to(
        tl.float32
    )
    for chunk in range(tl.cdiv(length, TOKENS)):
        here = chunk_states + (place + chunk) * channels * N + own
        found = tl.load(here, mask=inside, other=0.0)
        steps = tl.load(chunk_steps + (place + chunk) * channels + column, mask=real, other=0.0)
        tl.store(here, h, mask=inside)
        h = tl.exp2(steps[:, None] * rates) * h + found
    target = tl.load(write + row).to(tl.int64)
    if target > 0:
        tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=inside)


def linear_scan(
    x: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Triton version of `state.linear_scan`."""
    return _scan(x, log_decay, None, None, None, None, None, None, False, states, rows)


def mamba1_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton version of `state.mamba1_scan`. b and c are [tokens, groups, n]."""
    return _scan(x, dt, a.contiguous(), packed(b), packed(c), d, z, dt_bias, softplus, states, rows, out)


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    x, dt = packed(x), packed(dt)
    z = None if z is None else packed(z)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    tokens, channels = x.shape
    size = 1 if a is None else a.shape[1]
    groups = 1 if b is None else b.shape[1]
    elements, warps = (
        (STEP_ELEMENTS, STEP_WARPS) if rows.steps or rows.batch_invariant else (WALK_ELEMENTS, WALK_WARPS)
    )
    width = max(16, elements // triton.next_power_of_2(size))
    width = min(width, 256, max(16, triton.next_power_of_2(channels)))
    blocks = triton.cdiv(channels, width)
    cut = (
        not rows.steps
        and not rows.batch_invariant
        and rows.longest >= 2 * CHUNK
        and rows.sequences * blocks < ENOUGH
    )
    shape = {
        "N": size,
        "N_UP": triton.next_power_of_2(size),
        "CHANNELS": width,
        "TOKENS": CHUNK,
        "LINEAR": a is None,
        **row_arguments(rows),
    }
    count = places(rows, tokens, CHUNK) if cut else 0
    scratch = torch.empty((count, channels, size + 1), dtype=torch.float32, device=x.device)
    chunk_states, chunk_steps = (
        scratch.view(-1)[: count * channels * size],
        scratch.view(-1)[count * channels * size :],
    )

    def walk(phase: tl.constexpr, programs: int) -> None:
        (invariant_kernel if rows.batch_invariant else scan_kernel)[(programs, blocks)](
            x,
            dt,
            x if a is None else a,
            x if b is None else b,
            x if c is None else c,
            x if d is None else d.contiguous(),
            x if z is None else z,
            x if dt_bias is None else dt_bias.contiguous(),
            out,
            states,
            chunk_states,
            chunk_steps,
            sequences=rows.sequences,
            channels=channels,
            per_group=channels // groups,
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            z_stride=0 if z is None else z.stride(0),
            out_stride=out.stride(0),
            b_stride=0 if b is None else b.stride(0),
            b_group=0 if b is None else b.stride(1),
            c_stride=0 if c is None else c.stride(0),
            c_group=0 if c is None else c.stride(1),
            page_stride=states.stride(0),
            SEARCH=search_width(rows),
            PHASE=phase.value,
            GROUPED=groups > 1,
            SOFTPLUS=softplus,
            BIAS=dt_bias is not None,
            SKIP=d is not None,
            GATE=z is not None,
            INVARIANT=rows.batch_invariant,
            num_warps=warps,
            **shape,
            **stored_arguments(rows),
            **(exact_rounding(x) if rows.batch_invariant else {}),
        )

    if not cut:
        walk(WHOLE, rows.sequences)
        return out
    walk(SUMMARY, count)
    pass_kernel[(rows.sequences, blocks)](
        x if a is None else a,
        states,
        chunk_states,
        chunk_steps,
        channels=channels,
        page_stride=states.stride(0),
        num_warps=WALK_WARPS,
        **shape,
    )
    walk(OUTPUTS, count)
    return out
