# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""The gated delta rule in Triton. Chunks are computed as matrix products. A decode step reads and writes each state
once.

Inside a chunk, D is the decay between two tokens, and e is the decay since the start of the chunk. S is the state at
the start of the chunk. The corrected values u solve a unit lower triangular system:

    u = T (beta v) - T (beta e k) S        T = (1 + strictly lower(beta k kᵀ D))⁻¹

T (beta v) and T (beta e k) do not need the state, so all chunks compute them in parallel. Only the products with S
run in order.

| kernel        | one program for each             | computes                                                 |
|---------------|----------------------------------|----------------------------------------------------------|
| solve_kernel  | chunk and value head             | T (beta v), T (beta e k), decays summed inside the chunk |
| state_kernel  | sequence, head, range of the     | every chunk's first state and u, in order; the           |
|               | state's columns                  | sequence's last state                                    |
| output_kernel | chunk, head, range of columns    | y, all chunks in parallel                                |
| decode_kernel | sequence, head, range of columns | y and the last state, token by token                     |

With one decay per channel (Kimi) a chunk is not a plain matrix product, so such calls run token by token.
Batch-invariant calls also run token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import DeltaGates, StateRows
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
    softplus,
    start_page,
    stored_arguments,
)

__all__ = ["delta_rule"]

CHUNK = 64

LARGEST_KEY_BYTES = 512
"""Largest size of a key in bytes. Tiles of larger keys do not fit into shared memory, so calls with larger keys run
token by token.
"""

# Tuned by measurement: columns of a state per program, warps, and pipeline stages.
LEAST_LONG_KEY = (
    64  # with shorter keys, or other dtypes than bf16, Triton 3.6 computes wrong inverses in 4 warps
)
STATE_COLUMNS, STATE_WARPS, STATE_STAGES = 32, 4, 3
OUTPUT_COLUMNS, OUTPUT_WARPS = 64, 4
DECODE_ELEMENTS, DECODE_WARPS = 4096, 4

NO_DECAY: tl.constexpr = tl.constexpr(0)
HEAD_DECAY: tl.constexpr = tl.constexpr(1)
CHANNEL_DECAY: tl.constexpr = tl.constexpr(2)


@triton.jit
def _over_length(x):
    """Return 1 / (Euclidean length) of each row vector of the tile `x`."""
    wide = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _decay(g, a_log, dt_bias, head):
    """Return the log decay of a head from inputs `g` of its gate."""
    bias = tl.load(dt_bias + head).to(tl.float32)
    return -tl.exp(tl.load(a_log + head).to(tl.float32)) * softplus(g + bias)


@triton.jit
def _strength(beta, kind: tl.constexpr):
    """Return beta from inputs of its gate, rounded to the dtype `kind`."""
    return (1.0 / (1.0 + tl.exp(-beta))).to(kind).to(tl.float32)


@triton.jit
def _inverse(below, TOKENS: tl.constexpr, SOLVE: tl.constexpr):
    """Return (1 + below)⁻¹ for a strictly lower triangular tile. Inverts diagonal blocks of size 2 first, and doubles
    their size in each round.

    This method is as stable as substitution. The power series of `below` would be unstable if keys are similar to each
    other.
    """
    i = tl.arange(0, TOKENS)[:, None]
    j = tl.arange(0, TOKENS)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), below, 0.0)
    half = 2
    while half < TOKENS:
        corner = (i // (2 * half) == j // (2 * half)) & (i // half > j // half)
        inverse -= product(product(inverse, tl.where(corner, below, 0.0), SOLVE), inverse, SOLVE)
        half *= 2
    return inverse


@triton.jit
def _inverse_of_64(below, SOLVE: tl.constexpr):
    """Return the result of `_inverse` for a tile of 64 tokens. Up to size 16, the diagonal blocks are one batch of
    small products, which is faster than products of the whole tile."""
    own = (tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(below, (4, 16, 4, 16)), 0.0), 2)
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    small = tl.where(r == c, 1.0, 0.0) - tl.where((r // 2 == c // 2) & (r > c), diagonal, 0.0)
    for step in tl.static_range(1, 4):
        corner = (r // (2 << step) == c // (2 << step)) & (r // (1 << step) > c // (1 << step))
        small -= product(product(small, tl.where(corner, diagonal, 0.0), SOLVE), small, SOLVE)
    inverse = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), (64, 64))
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    corner_16 = (i // 32 == j // 32) & (i // 16 > j // 16)
    inverse -= product(product(inverse, tl.where(corner_16, below, 0.0), SOLVE), inverse, SOLVE)
    corner_32 = i // 32 > j // 32
    inverse -= product(product(inverse, tl.where(corner_32, below, 0.0), SOLVE), inverse, SOLVE)
    return inverse


@triton.jit(do_not_specialize=["sequences", "tokens"])
def solve_kernel(
    k, v, g, beta, a_log, dt_bias, u, w, cum, sizes, starts,
    sequences, tokens, heads, per_key, k_stride, k_head, v_stride, v_head, g_stride, g_group, beta_stride, beta_group,
    DK: tl.constexpr, DV: tl.constexpr, DK_UP: tl.constexpr, DV_UP: tl.constexpr, TOKENS: tl.constexpr,
    SEARCH: tl.constexpr, DOT: tl.constexpr, SOLVE: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr,
    GATES: tl.constexpr, NORMALISE: tl.constexpr, LONG_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute u = T (beta v), w = T (beta e k) and the summed decays `cum` of one chunk and value head. The module
    docstring defines T and e.

    `cum` and `sizes` (inverse lengths of keys) are [heads, tokens]. u and w are [tokens, heads, d].
    """
    row, chunk = locate(starts, sequences, tl.program_id(1), TOKENS, SEARCH)
    start, length = row_of(starts, row)
    if chunk * TOKENS >= length:
        return
    head = tl.program_id(0)
    at = chunk * TOKENS + tl.arange(0, TOKENS)
    token = start + at
    real = at < length
    column = tl.arange(0, DK_UP)
    inside = real[:, None] & (column < DK)[None, :]
    key = tl.load(
        k + token[:, None] * k_stride + head // per_key * k_head + column[None, :], mask=inside, other=0.0
    )
    strength = real.to(tl.float32)
    if BETA:
        beta += head // per_key * beta_group + head % per_key
        strength = tl.load(beta + token * beta_stride, mask=real, other=0.0).to(tl.float32)
        if GATES:
            strength = tl.where(real, _strength(strength, beta.dtype.element_ty), 0.0)
    decay = tl.zeros((TOKENS,), tl.float32)
    if DECAY == HEAD_DECAY:
        g += head // per_key * g_group + head % per_key
        decay = tl.load(g + token * g_stride, mask=real, other=0.0).to(tl.float32)
        if GATES:
            decay = tl.where(real, _decay(decay, a_log, dt_bias, head), 0.0)
        decay = tl.cumsum(decay, 0)
    mine = head.to(tl.int64) * tokens + token
    tl.store(cum + mine, decay, mask=real)
    i = tl.arange(0, TOKENS)
    gap = tl.where(i[:, None] > i[None, :], decay[:, None] - decay[None, :], float("-inf"))
    below = product(key, tl.trans(key), DOT) * tl.exp(gap) * strength[:, None]
    weight = strength * tl.exp(decay)
    if NORMALISE:
        size = _over_length(key)
        tl.store(sizes + mine, size, mask=real)
        below *= size[:, None] * size[None, :]
        weight *= size
    if LONG_KEYS and TOKENS == 64:
        inverse = _inverse_of_64(below, SOLVE)
    else:
        inverse = _inverse(below, TOKENS, SOLVE)
    tl.store(
        w + (token[:, None] * heads + head) * DK + column[None, :],
        product(inverse * weight[None, :], key, DOT).to(w.dtype.element_ty),
        mask=inside,
    )
    inverse *= strength[None, :]
    for first in range(0, DV, DV_UP):
        out_column = first + tl.arange(0, DV_UP)
        out_inside = real[:, None] & (out_column < DV)[None, :]
        value = tl.load(
            v + token[:, None] * v_stride + head * v_head + out_column[None, :], mask=out_inside, other=0.0
        )
        tl.store(
            u + (token[:, None] * heads + head) * DV + out_column[None, :],
            product(inverse, value, DOT).to(u.dtype.element_ty),
            mask=out_inside,
        )


@triton.jit(do_not_specialize=["tokens"])
def state_kernel(
    k, u, w, cum, sizes, states, chunk_states, starts, read, write, fresh,
    tokens, heads, per_key, k_stride, k_head, page_stride,
    DK: tl.constexpr, DV: tl.constexpr, DK_UP: tl.constexpr, DV_UP: tl.constexpr, TOKENS: tl.constexpr,
    DOT: tl.constexpr, NORMALISE: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Compute the state at the start of every chunk (to `chunk_states`), and the state after the sequence's last
    token (to `states`). Chunks run in order. On entry, `u` has T (beta v) from `solve_kernel`. On return, `u` has
    the corrected values of the module docstring: T (beta v) - w S, where S is the state at the start of the chunk."""
    column = tl.program_id(0) * DV_UP + tl.arange(0, DV_UP)
    head = tl.program_id(1)
    row = tl.program_id(2)
    start, length = row_of(starts, row)
    target = tl.load(write + row).to(tl.int64)
    if (length == 0) & (target == 0):
        return
    place = first_place(starts, row, TOKENS).to(tl.int64)
    line = tl.arange(0, DK_UP)
    inside = (line < DK)[:, None] & (column < DV)[None, :]
    own = head * DK * DV + line[:, None] * DV + column[None, :]
    page = start_page(read, fresh, row, FRESH)
    kept = tl.where(page > 0, DV, 0)
    s = tl.load(
        states + page * page_stride + own, mask=(line < DK)[:, None] & (column < kept)[None, :], other=0.0
    ).to(tl.float32)
    k += head // per_key * k_head
    cum += head.to(tl.int64) * tokens
    sizes += head.to(tl.int64) * tokens
    for chunk in range(tl.cdiv(length, TOKENS)):
        at = chunk * TOKENS + tl.arange(0, TOKENS)
        token = start + at
        real = at < length
        tl.store(
            chunk_states + (place + chunk) * heads * DK * DV + own,
            s.to(chunk_states.dtype.element_ty),
            mask=inside,
        )
        across = real[:, None] & (line < DK)[None, :]
        weight = tl.load(w + (token[:, None] * heads + head) * DK + line[None, :], mask=across, other=0.0)
        key = tl.load(k + token[:, None] * k_stride + line[None, :], mask=across, other=0.0)
        mine = real[:, None] & (column < DV)[None, :]
        here = u + (token[:, None] * heads + head) * DV + column[None, :]
        correction = tl.load(here, mask=mine, other=0.0).to(tl.float32) - product(weight, s, DOT)
        tl.store(here, correction.to(u.dtype.element_ty), mask=mine)
        end = tl.load(cum + start + tl.minimum(chunk * TOKENS + TOKENS, length) - 1)
        left = tl.exp(end - tl.load(cum + token, mask=real, other=0.0))
        if NORMALISE:
            left *= tl.load(sizes + token, mask=real, other=0.0)
        s = s * tl.exp(end) + product(tl.trans(key), correction * left[:, None], DOT)
    if target > 0:
        tl.store(states + target * page_stride + own, s.to(states.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens"])
def output_kernel(
    q, k, u, cum, sizes, out, chunk_states, starts,
    scale, sequences, tokens, heads, per_key, q_stride, q_head, k_stride, k_head,
    DK: tl.constexpr, DV: tl.constexpr, DK_UP: tl.constexpr, DV_UP: tl.constexpr, TOKENS: tl.constexpr,
    SEARCH: tl.constexpr, DOT: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(1)
    row, chunk = locate(starts, sequences, place, TOKENS, SEARCH)
    start, length = row_of(starts, row)
    if chunk * TOKENS >= length:
        return
    across = tl.cdiv(DV, DV_UP)
    head = tl.program_id(0) // across
    column = tl.program_id(0) % across * DV_UP + tl.arange(0, DV_UP)
    line = tl.arange(0, DK_UP)
    at = chunk * TOKENS + tl.arange(0, TOKENS)
    token = start + at
    real = at < length
    shared = head // per_key
    wide = real[:, None] & (line < DK)[None, :]
    query = tl.load(q + token[:, None] * q_stride + shared * q_head + line[None, :], mask=wide, other=0.0)
    key = tl.load(k + token[:, None] * k_stride + shared * k_head + line[None, :], mask=wide, other=0.0)
    s = tl.load(
        chunk_states + (place.to(tl.int64) * heads + head) * DK * DV + line[:, None] * DV + column[None, :],
        mask=(line < DK)[:, None] & (column < DV)[None, :],
        other=0.0,
    )
    mine = head.to(tl.int64) * tokens + token
    decay = tl.load(cum + mine, mask=real, other=0.0)
    i = tl.arange(0, TOKENS)
    earlier = (i[:, None] >= i[None, :]) & real[:, None]
    pairs = product(query, tl.trans(key), DOT)
    pairs *= tl.exp(tl.where(earlier, decay[:, None] - decay[None, :], float("-inf")))
    y = product(query, s, DOT) * tl.exp(decay)[:, None]
    inside = real[:, None] & (column < DV)[None, :]
    correction = tl.load(u + (token[:, None] * heads + head) * DV + column[None, :], mask=inside, other=0.0)
    if NORMALISE:
        pairs *= tl.load(sizes + mine, mask=real, other=0.0)[None, :]
        y = (y + product(pairs, correction, DOT)) * (_over_length(query) * scale)[:, None]
    else:
        y = (y + product(pairs, correction, DOT)) * scale
    tl.store(
        out + (token[:, None] * heads + head) * DV + column[None, :], y.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _token(
    q, k, v, g, beta, a_log, dt_bias, head, token, some, lines, columns, line, column,
    q_stride, k_stride, v_stride, g_stride, beta_stride,
    DECAY: tl.constexpr, BETA: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Load the inputs of one token. Return query, key, value, decay (0 without DECAY) and beta (1 without BETA).

    - `line` are the elements of query and key to load. Elements from index `lines` on are 0.
    - `column` are the elements of the value to load. Elements from index `columns` on are 0.
    - If `some` is false, there is no token, and loads of beta or of a decay per head return 0.
    """
    query = tl.load(q + token * q_stride + line, mask=line < lines, other=0.0)
    key = tl.load(k + token * k_stride + line, mask=line < lines, other=0.0)
    value = tl.load(v + token * v_stride + column, mask=column < columns, other=0.0)
    decay = 0.0
    if DECAY == HEAD_DECAY:
        decay = tl.load(g + token * g_stride, mask=some, other=0.0).to(tl.float32)
        if GATES:
            decay = _decay(decay, a_log, dt_bias, head)
    if DECAY == CHANNEL_DECAY:
        decay = tl.load(g + token * g_stride + line, mask=line < lines, other=0.0).to(tl.float32)
    strength = 1.0
    if BETA:
        strength = tl.load(beta + token * beta_stride, mask=some, other=0.0).to(tl.float32)
        if GATES:
            strength = _strength(strength, beta.dtype.element_ty)
    return query, key, value, decay, strength


@triton.jit
def decode_kernel(
    q, k, v, g, beta, a_log, dt_bias, out, states, starts, read, write, fresh, stored,
    scale, heads, per_key, q_stride, q_head, k_stride, k_head, v_stride, v_head, g_stride, g_group, g_head,
    beta_stride, beta_group, page_stride,
    DK: tl.constexpr, DV: tl.constexpr, DK_UP: tl.constexpr, DV_UP: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, GATES: tl.constexpr, NORMALISE: tl.constexpr, FRESH: tl.constexpr, STORED: tl.constexpr,
    INVARIANT: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * DV_UP + tl.arange(0, DV_UP)
    head = tl.program_id(1)
    row = tl.program_id(2)
    start, length = row_of(starts, row)
    target = tl.load(write + row).to(tl.int64)
    if (length == 0) & (target == 0):
        return
    line = tl.arange(0, DK_UP)
    inside = (line < DK)[:, None] & (column < DV)[None, :]
    own = head * DK * DV + line[:, None] * DV + column[None, :]
    page = start_page(read, fresh, row, FRESH)
    kept = tl.where(page > 0, DV, 0)
    s = tl.load(
        states + page * page_stride + own, mask=(line < DK)[:, None] & (column < kept)[None, :], other=0.0
    ).to(tl.float32)
    q += head // per_key * q_head
    k += head // per_key * k_head
    v += head * v_head
    g += head // per_key * g_group + head % per_key * g_head
    beta += head // per_key * beta_group + head % per_key
    if INVARIANT:  # sequences may be long, so the next token is loaded while this token is computed
        some = length > 0
        lines, columns = tl.where(some, DK, 0), tl.where(some, DV, 0)
        q_next, k_next, v_next, decay_next, strength_next = _token(
            q, k, v, g, beta, a_log, dt_bias, head, start, some, lines, columns, line, column,
            q_stride, k_stride, v_stride, g_stride, beta_stride, DECAY, BETA, GATES,
        )  # fmt: skip
    last = length
    if STORED:
        last = tl.load(stored + row).to(tl.int32)
    for at in range(length):
        token = start + at
        if INVARIANT:
            query, key, value, decay, strength = q_next, k_next, v_next, decay_next, strength_next
            some = at + 1 < length
            lines, columns = tl.where(some, DK, 0), tl.where(some, DV, 0)
            q_next, k_next, v_next, decay_next, strength_next = _token(
                q, k, v, g, beta, a_log, dt_bias, head, token + 1, some, lines, columns, line, column,
                q_stride, k_stride, v_stride, g_stride, beta_stride, DECAY, BETA, GATES,
            )  # fmt: skip
        else:
            query, key, value, decay, strength = _token(
                q, k, v, g, beta, a_log, dt_bias, head, token, True, DK, DV, line, column,
                q_stride, k_stride, v_stride, g_stride, beta_stride, DECAY, BETA, GATES,
            )  # fmt: skip
        query, key = query.to(tl.float32), key.to(tl.float32)
        if NORMALISE:
            query *= 1.0 / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
            key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        if DECAY == HEAD_DECAY:
            s *= tl.exp(decay)
        if DECAY == CHANNEL_DECAY:
            s *= tl.exp(decay)[:, None]
        correction = value.to(tl.float32) - tl.sum(s * key[:, None], 0)
        if BETA:
            correction *= strength
        s += key[:, None] * correction[None, :]
        y = tl.sum(s * (query * scale)[:, None], 0)
        tl.store(out + (token * heads + head) * DV + column, y.to(out.dtype.element_ty), mask=column < DV)
        if INVARIANT:
            s = s.to(states.dtype.element_ty).to(tl.float32)
        if STORED:
            now = inside & (target > 0) & (at + 1 == last)
            tl.store(states + target * page_stride + own, s.to(states.dtype.element_ty), mask=now)
    if not STORED:
        if target > 0:
            tl.store(states + target * page_stride + own, s.to(states.dtype.element_ty), mask=inside)


invariant_kernel = batch_invariant_kernel(decode_kernel)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float,
    normalise: bool,
    states: torch.Tensor,
    rows: StateRows,
    gates: DeltaGates | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton version of `state.delta_rule`."""
    q, k, v = packed(q), packed(k), packed(v)
    g = None if g is None else packed(g)
    beta = None if beta is None else packed(beta)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    (tokens, key_heads, dk), (_, heads, dv) = k.shape, v.shape
    known = row_arguments(rows)
    sizes_of = {"DK": dk, "DV": dv, "DK_UP": max(16, triton.next_power_of_2(dk)), "NORMALISE": normalise}
    strides = {"heads": heads, "per_key": heads // key_heads, "k_stride": k.stride(0), "k_head": k.stride(1)}
    by_channel = g is not None and gates is None and g.dim() == 3
    decay = (NO_DECAY if g is None else CHANNEL_DECAY if by_channel else HEAD_DECAY).value
    g_in, beta_in = v if g is None else g, v if beta is None else beta
    g_head = g_in.stride(1) if by_channel else 1
    gated = {
        "g": g_in,
        "beta": beta_in,
        "a_log": v if gates is None else gates.a_log,
        "dt_bias": v if gates is None else gates.dt_bias,
        "g_stride": g_in.stride(0),
        "g_group": heads // key_heads * g_head if gates is None else g_in.stride(1),
        "beta_stride": beta_in.stride(0),
        "beta_group": heads // key_heads if gates is None else beta_in.stride(1),
        "DECAY": decay,
        "BETA": beta is not None,
        "GATES": gates is not None,
    }
    dot = dot_precision(v.dtype)
    # Operands in float32 need at least twice the registers, so they get more warps.
    kept, more = (torch.bfloat16, 1) if dot == "bf16" else (torch.float32, 2)
    large = sizes_of["DK_UP"] * kept.itemsize > LARGEST_KEY_BYTES
    if rows.steps or rows.batch_invariant or decay == CHANNEL_DECAY.value or large:
        width = max(1, min(triton.next_power_of_2(dv), DECODE_ELEMENTS // sizes_of["DK_UP"]))
        kernel = invariant_kernel if rows.batch_invariant else decode_kernel
        kernel[(triton.cdiv(dv, width), heads, rows.sequences)](
            q=q, k=k, v=v, out=out, states=states, scale=scale, q_stride=q.stride(0), q_head=q.stride(1), v_stride=v.stride(0), v_head=v.stride(1),
            g_head=g_head, page_stride=states.stride(0), DV_UP=width, INVARIANT=rows.batch_invariant,
            num_warps=DECODE_WARPS, **sizes_of, **strides, **gated, **known, **stored_arguments(rows), **(exact_rounding(v) if rows.batch_invariant else {}),
        )  # fmt: skip
        return out
    count, search = places(rows, tokens, CHUNK), search_width(rows)
    u = torch.empty((tokens, heads, dv), dtype=kept, device=v.device)
    w = torch.empty((tokens, heads, dk), dtype=kept, device=v.device)
    chunk_states = torch.empty((count, heads, dk, dv), dtype=kept, device=v.device)
    cum, sizes = torch.empty((2, heads, tokens), dtype=torch.float32, device=v.device)
    long_keys = dot == "bf16" and sizes_of["DK_UP"] >= LEAST_LONG_KEY
    columns = max(16, triton.next_power_of_2(dv))
    wide, narrow = min(OUTPUT_COLUMNS, columns), min(STATE_COLUMNS, columns)
    solve_kernel[(heads, count)](
        k=k, v=v, u=u, w=w, cum=cum, sizes=sizes, starts=known["starts"],
        sequences=rows.sequences, tokens=tokens, v_stride=v.stride(0), v_head=v.stride(1),
        DV_UP=wide, TOKENS=CHUNK, SEARCH=search, DOT=dot, SOLVE="tf32" if more == 1 else "ieee",
        LONG_KEYS=long_keys, num_warps=4 if long_keys else 8, num_stages=2, **sizes_of, **strides, **gated,
    )  # fmt: skip
    state_kernel[(triton.cdiv(dv, narrow), heads, rows.sequences)](
        k, u, w, cum, sizes, states, chunk_states,
        tokens=tokens, page_stride=states.stride(0), DV_UP=narrow, TOKENS=CHUNK, DOT=dot,
        num_warps=STATE_WARPS * more, num_stages=STATE_STAGES if sizes_of["DK_UP"] * more <= 128 else 2,
        **sizes_of, **strides, **known,
    )  # fmt: skip
    output_kernel[(heads * triton.cdiv(dv, wide), count)](
        q, k, u, cum, sizes, out, chunk_states, known["starts"],
        scale=scale, sequences=rows.sequences, tokens=tokens, q_stride=q.stride(0), q_head=q.stride(1),
        DV_UP=wide, TOKENS=CHUNK, SEARCH=search, DOT=dot, num_warps=OUTPUT_WARPS * more, num_stages=2,
        **sizes_of, **strides,
    )  # fmt: skip
    return out
