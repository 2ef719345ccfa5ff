# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""The scan of Mamba-2 in Triton. Chunks are computed as matrix products. A decode step reads and writes each state
once.

| kernel        | one program for each               | computes                                               |
|---------------|------------------------------------|--------------------------------------------------------|
| steps_kernel  | chunk and group of heads           | time steps, and log decays summed inside the chunk     |
| state_kernel  | sequence, head, block of the state | every chunk's first state, in order; the last state    |
| output_kernel | chunk and head                     | y, all chunks in parallel                              |
| decode_kernel | sequence, head, block of the state | y and the last state, token by token: short sequences, |
|               |                                    | and batch-invariant calls of any length                |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import StateRows
from .triton_rows import (
    batch_invariant_kernel,
    dot_precision,
    exact_rounding,
    first_place,
    locate,
    packed,
    places,
    product,
    row_arguments,
    row_of,
    search_width,
    silu,
    softplus,
    start_page,
    stored_arguments,
)

__all__ = ["mamba2_scan"]

CHUNK = 64

# Tuned by measurement: block of a state per program, warps, and pipeline stages.
STATE_WIDTH, STATE_SIZE, STATE_WARPS, STATE_STAGES = 64, 64, 4, 3
OUTPUT_WARPS = 4
DECODE_ELEMENTS, DECODE_WARPS = 4096, 4


@triton.jit
def _step(dt, bias, low, high, SOFTPLUS: tl.constexpr, CLAMP: tl.constexpr):
    step = dt.to(tl.float32) + bias
    if SOFTPLUS:
        step = softplus(step)
    if CLAMP:
        step = tl.minimum(tl.maximum(step, low), high)
    return step


@triton.jit(do_not_specialize=["sequences", "tokens"])
def steps_kernel(
    dt, a, dt_bias, steps, cum, starts, sequences, tokens, heads, dt_stride, low, high,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, SEARCH: tl.constexpr, DT: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Compute the time step of every token, and the log decays summed from the start of its chunk. `steps` and
    `cum` are [heads, tokens], so that a chunk of one head is contiguous."""
    row, chunk = locate(starts, sequences, tl.program_id(1), TOKENS, SEARCH)
    start, length = row_of(starts, row)
    if chunk * TOKENS >= length:
        return
    at = chunk * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = (at < length)[:, None] & (head < heads)[None, :]
    if DT:
        step = tl.load(dt + (start + at)[:, None] * dt_stride + head[None, :], mask=inside, other=0.0)
        bias = tl.zeros((1, HEADS), tl.float32)
        if BIAS:
            bias += tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
        step = tl.where(inside, _step(step, bias, low, high, SOFTPLUS, CLAMP), 0.0)
    else:
        step = inside.to(tl.float32)
    decay = step * tl.load(a + head, mask=head < heads, other=0.0).to(tl.float32)[None, :]
    where = head.to(tl.int64)[None, :] * tokens + (start + at)[:, None]
    tl.store(steps + where, step, mask=inside)
    tl.store(cum + where, tl.cumsum(decay, 0), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def state_kernel(
    x, b, steps, cum, states, chunk_states, starts, read, write, fresh,
    tokens, heads, per_group, x_stride, x_head, b_stride, b_group, page_stride,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, WIDTH_UP: tl.constexpr, SIZE_UP: tl.constexpr,
    TOKENS: tl.constexpr, DOT: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(SIZE, SIZE_UP)
    p = tl.program_id(0) // across * WIDTH_UP + tl.arange(0, WIDTH_UP)
    n = tl.program_id(0) % across * SIZE_UP + tl.arange(0, SIZE_UP)
    head = tl.program_id(1)
    row = tl.program_id(2)
    start, length = row_of(starts, row)
    target = tl.load(write + row).to(tl.int64)
    if (length == 0) & (target == 0):
        return
    place = first_place(starts, row, TOKENS).to(tl.int64)
    inside = (p < WIDTH)[:, None] & (n < SIZE)[None, :]
    own = head * WIDTH * SIZE + p[:, None] * SIZE + n[None, :]
    page = start_page(read, fresh, row, FRESH)
    kept = tl.where(page > 0, SIZE, 0)
    h = tl.load(
        states + page * page_stride + own, mask=(p < WIDTH)[:, None] & (n < kept)[None, :], other=0.0
    ).to(tl.float32)
    x += head * x_head
    b += head // per_group * b_group
    steps += head.to(tl.int64) * tokens
    cum += head.to(tl.int64) * tokens
    for chunk in range(tl.cdiv(length, TOKENS)):
        at = chunk * TOKENS + tl.arange(0, TOKENS)
        token = start + at
        real = at < length
        tl.store(
            chunk_states + (place + chunk) * heads * WIDTH * SIZE + own,
            h.to(chunk_states.dtype.element_ty),
            mask=inside,
        )
        inputs = tl.load(
            x + token[:, None] * x_stride + p[None, :], mask=real[:, None] & (p < WIDTH)[None, :], other=0.0
        )
        into = tl.load(
            b + token[:, None] * b_stride + n[None, :], mask=real[:, None] & (n < SIZE)[None, :], other=0.0
        )
        step = tl.load(steps + token, mask=real, other=0.0)
        decay = tl.load(cum + token, mask=real, other=0.0)
        end = tl.load(cum + start + tl.minimum(chunk * TOKENS + TOKENS, length) - 1)
        into = into.to(tl.float32) * (tl.exp(end - decay) * step)[:, None]
        h = h * tl.exp(end) + product(tl.trans(inputs), into, DOT)
    if target > 0:
        tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens"])
def output_kernel(
    x, b, c, d, z, steps, cum, out, chunk_states, starts,
    sequences, tokens, heads, per_group,
    x_stride, x_head, z_stride, z_head, b_stride, b_group, c_stride, c_group,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, WIDTH_UP: tl.constexpr, SIZE_UP: tl.constexpr,
    TOKENS: tl.constexpr, SEARCH: tl.constexpr, DOT: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    row, chunk = locate(starts, sequences, place, TOKENS, SEARCH)
    start, length = row_of(starts, row)
    if chunk * TOKENS >= length:
        return
    across = tl.cdiv(WIDTH, WIDTH_UP)
    head = tl.program_id(0) // across
    p = tl.program_id(0) % across * WIDTH_UP + tl.arange(0, WIDTH_UP)
    at = chunk * TOKENS + tl.arange(0, TOKENS)
    token = start + at
    real = at < length
    step = tl.load(steps + head.to(tl.int64) * tokens + token, mask=real, other=0.0)
    decay = tl.load(cum + head.to(tl.int64) * tokens + token, mask=real, other=0.0)
    group = head // per_group
    h = chunk_states + (place.to(tl.int64) * heads + head) * WIDTH * SIZE
    pairs = tl.zeros((TOKENS, TOKENS), tl.float32)
    y = tl.zeros((TOKENS, WIDTH_UP), tl.float32)
    for first in range(0, SIZE, SIZE_UP):
        n = first + tl.arange(0, SIZE_UP)
        inside = real[:, None] & (n < SIZE)[None, :]
        into = tl.load(b + token[:, None] * b_stride + group * b_group + n[None, :], mask=inside, other=0.0)
        seen = tl.load(c + token[:, None] * c_stride + group * c_group + n[None, :], mask=inside, other=0.0)
        old = tl.load(
            h + p[:, None] * SIZE + n[None, :], mask=(p < WIDTH)[:, None] & (n < SIZE)[None, :], other=0.0
        )
        pairs += product(seen, tl.trans(into), DOT)
        y += product(seen, tl.trans(old), DOT)
    y *= tl.exp(decay)[:, None]
    i = tl.arange(0, TOKENS)
    earlier = (i[:, None] >= i[None, :]) & real[:, None]
    gap = tl.where(earlier, decay[:, None] - decay[None, :], float("-inf"))
    pairs *= tl.exp(gap) * step[None, :]
    inside = real[:, None] & (p < WIDTH)[None, :]
    inputs = tl.load(x + token[:, None] * x_stride + head * x_head + p[None, :], mask=inside, other=0.0)
    y += product(pairs, inputs, DOT)
    if SKIP:
        y += tl.load(d + head).to(tl.float32) * inputs.to(tl.float32)
    if GATE:
        gate = tl.load(z + token[:, None] * z_stride + head * z_head + p[None, :], mask=inside, other=0.0)
        y *= silu(gate.to(tl.float32))
    tl.store(
        out + (token[:, None] * heads + head) * WIDTH + p[None, :], y.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _token(
    x, b, c, dt, token, some, width, size, p, n, x_stride, b_stride, c_stride, dt_stride, DT: tl.constexpr
):
    """Load the inputs of one token: elements `p` of x (below `width`), and elements `n` of b and c (below `size`).
    Return x, b, c and the time step. Without DT, the time step is 1. With DT, the time step is loaded, and is 0 if
    there is no token (`some` is false).
    """
    inputs = tl.load(x + token * x_stride + p, mask=p < width, other=0.0)
    into = tl.load(b + token * b_stride + n, mask=n < size, other=0.0)
    seen = tl.load(c + token * c_stride + n, mask=n < size, other=0.0)
    step = 1.0
    if DT:
        step = tl.load(dt + token * dt_stride, mask=some, other=0.0).to(tl.float32)
    return inputs, into, seen, step


@triton.jit
def decode_kernel(
    x, dt, a, b, c, d, z, dt_bias, out, states, starts, read, write, fresh, stored,
    heads, per_group, x_stride, x_head, z_stride, z_head, dt_stride, b_stride, b_group, c_stride, c_group,
    page_stride, low, high,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, WIDTH_UP: tl.constexpr, SIZE_UP: tl.constexpr, DT: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, CLAMP: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    FRESH: tl.constexpr, STORED: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * WIDTH_UP + tl.arange(0, WIDTH_UP)
    n = tl.arange(0, SIZE_UP)
    head = tl.program_id(1)
    row = tl.program_id(2)
    start, length = row_of(starts, row)
    target = tl.load(write + row).to(tl.int64)
    if (length == 0) & (target == 0):
        return
    inside = (p < WIDTH)[:, None] & (n < SIZE)[None, :]
    own = head * WIDTH * SIZE + p[:, None] * SIZE + n[None, :]
    page = start_page(read, fresh, row, FRESH)
    kept = tl.where(page > 0, SIZE, 0)
    h = tl.load(
        states + page * page_stride + own, mask=(p < WIDTH)[:, None] & (n < kept)[None, :], other=0.0
    ).to(tl.float32)
    rate = tl.load(a + head).to(tl.float32)
    group = head // per_group
    x += head * x_head
    dt += head
    b += group * b_group
    c += group * c_group
    if INVARIANT:  # sequences may be long, so the next token is loaded while this token is computed
        some = length > 0
        width, size = tl.where(some, WIDTH, 0), tl.where(some, SIZE, 0)
        x_next, b_next, c_next, step_next = _token(
            x, b, c, dt, start, some, width, size, p, n, x_stride, b_stride, c_stride, dt_stride, DT
        )
    last = length
    if STORED:
        last = tl.load(stored + row).to(tl.int32)
    for at in range(length):
        token = start + at
        if INVARIANT:
            inputs, into, seen, step = x_next, b_next, c_next, step_next
            some = at + 1 < length
            width, size = tl.where(some, WIDTH, 0), tl.where(some, SIZE, 0)
            x_next, b_next, c_next, step_next = _token(
                x, b, c, dt, token + 1, some, width, size, p, n, x_stride, b_stride, c_stride, dt_stride, DT
            )
        else:
            inputs, into, seen, step = _token(
                x, b, c, dt, token, True, WIDTH, SIZE, p, n, x_stride, b_stride, c_stride, dt_stride, DT
            )
        inputs = inputs.to(tl.float32)
        if DT:
            bias = 0.0
            if BIAS:
                bias = tl.load(dt_bias + head).to(tl.float32)
            step = _step(step, bias, low, high, SOFTPLUS, CLAMP)
        h = h * tl.exp(step * rate) + (inputs * step)[:, None] * into.to(tl.float32)[None, :]
        y = tl.sum(h * seen.to(tl.float32)[None, :], 1)
        if SKIP:
            y += tl.load(d + head).to(tl.float32) * inputs
        if GATE:
            gate = tl.load(z + token * z_stride + head * z_head + p, mask=p < WIDTH, other=0.0)
            y *= silu(gate.to(tl.float32))
        tl.store(out + (token * heads + head) * WIDTH + p, y.to(out.dtype.element_ty), mask=p < WIDTH)
        if INVARIANT:
            h = h.to(states.dtype.element_ty).to(tl.float32)
        if STORED:
            now = inside & (target > 0) & (at + 1 == last)
            tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=now)
    if not STORED:
        if target > 0:
            tl.store(states + target * page_stride + own, h.to(states.dtype.element_ty), mask=inside)


invariant_kernel = batch_invariant_kernel(decode_kernel)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    limits: tuple[float, float],
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton version of `state.mamba2_scan`."""
    x, b, c = packed(x), packed(b), packed(c)
    z = None if z is None else packed(z)
    dt = None if dt is None else packed(dt)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    (tokens, heads, width), (_, groups, size) = x.shape, b.shape
    low, high = limits
    how = {
        "DT": dt is not None,
        "BIAS": dt_bias is not None,
        "SOFTPLUS": softplus,
        "CLAMP": limits != (0.0, float("inf")),
    }
    dt_stride = 0 if dt is None else dt.stride(0)
    steps_in = x if dt is None else dt
    bias_in = x if dt_bias is None else dt_bias.contiguous()
    skip, gate = x if d is None else d.contiguous(), x if z is None else z
    gate_strides = (0, 0) if z is None else (z.stride(0), z.stride(1))
    rates = a.contiguous()
    known = row_arguments(rows)
    strides = {
        "per_group": heads // groups,
        "x_stride": x.stride(0),
        "x_head": x.stride(1),
        "b_stride": b.stride(0),
        "b_group": b.stride(1),
    }
    if rows.steps or rows.batch_invariant:
        size_up = triton.next_power_of_2(size)
        width_up = max(1, min(triton.next_power_of_2(width), DECODE_ELEMENTS // size_up))
        kernel = invariant_kernel if rows.batch_invariant else decode_kernel
        kernel[(triton.cdiv(width, width_up), heads, rows.sequences)](
            x, steps_in, rates, b, c, skip, gate, bias_in, out, states,
            heads=heads, z_stride=gate_strides[0], z_head=gate_strides[1], dt_stride=dt_stride,
            c_stride=c.stride(0), c_group=c.stride(1), page_stride=states.stride(0), low=low, high=high,
            WIDTH=width, SIZE=size, WIDTH_UP=width_up, SIZE_UP=size_up, SKIP=d is not None, GATE=z is not None,
            INVARIANT=rows.batch_invariant, num_warps=DECODE_WARPS, **how, **strides, **known, **stored_arguments(rows), **(exact_rounding(x) if rows.batch_invariant else {}),
        )  # fmt: skip
        return out
    count, search = places(rows, tokens, CHUNK), search_width(rows)
    dot = dot_precision(x.dtype)
    steps, cum = torch.empty((2, heads, tokens), dtype=torch.float32, device=x.device)
    chunk_states = torch.empty(
        (count, heads, width, size),
        dtype=torch.bfloat16 if dot == "bf16" else torch.float32,
        device=x.device,
    )
    steps_kernel[(triton.cdiv(heads, 16), count)](
        steps_in, rates, bias_in, steps, cum, known["starts"],
        sequences=rows.sequences, tokens=tokens, heads=heads, dt_stride=dt_stride, low=low, high=high,
        TOKENS=CHUNK, HEADS=16, SEARCH=search, num_warps=4, **how,
    )  # fmt: skip
    # Operands in float32 need at least twice the registers, so they get more warps.
    more = 1 if dot == "bf16" else 2
    width_up = min(STATE_WIDTH, max(16, triton.next_power_of_2(width)))
    size_up = min(STATE_SIZE, max(16, triton.next_power_of_2(size)))
    blocks = triton.cdiv(width, width_up) * triton.cdiv(size, size_up)
    state_kernel[(blocks, heads, rows.sequences)](
        x, b, steps, cum, states, chunk_states,
        tokens=tokens, heads=heads, page_stride=states.stride(0),
        WIDTH=width, SIZE=size, WIDTH_UP=width_up, SIZE_UP=size_up, TOKENS=CHUNK, DOT=dot,
        num_warps=STATE_WARPS * more, num_stages=STATE_STAGES if more == 1 else 2, **strides, **known,
    )  # fmt: skip
    size_up = min(128 // more, max(16, triton.next_power_of_2(size)))
    output_kernel[(heads * triton.cdiv(width, width_up), count)](
        x, b, c, skip, gate, steps, cum, out, chunk_states, known["starts"],
        sequences=rows.sequences, tokens=tokens, heads=heads, z_stride=gate_strides[0], z_head=gate_strides[1],
        c_stride=c.stride(0), c_group=c.stride(1),
        WIDTH=width, SIZE=size, WIDTH_UP=width_up, SIZE_UP=size_up, TOKENS=CHUNK, SEARCH=search, DOT=dot,
        SKIP=d is not None, GATE=z is not None, num_warps=OUTPUT_WARPS * more, num_stages=2, **strides,
    )  # fmt: skip
    return out
