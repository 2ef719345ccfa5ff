# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""One unit of attention: adds BN tokens of a sequence to the running softmax of a tile's query rows.

`step` supports 16-bit and 32-bit values. It also supports 8-bit values, which it converts to 16 bits in registers.
`step_8bit` supports 8-bit values that the tensor cores read directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_work_list import LOG2E, SMALLEST

__all__ = [
    "INTERPRETED",
    "LOW_INT8",
    "load_pages",
    "load_rows",
    "load_sizes",
    "load_values",
    "product",
    "step",
    "step_8bit",
    "two_parts",
]

MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds half to even
LOW_INT8: tl.constexpr = tl.constexpr(254.0)
LOW_FP8: tl.constexpr = tl.constexpr(16.0)
LOG2_127: tl.constexpr = tl.constexpr(6.988684686772166)
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _log2(x):
    """Return the base-2 logarithm of normal numbers, with an error of 2^-22. This takes one instruction instead of
    the twenty of `tl.log2`."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_pages(TABLE, t, ok, lo, hi, PAGE: tl.constexpr, RUNS: tl.constexpr, CHECK: tl.constexpr):
    """Return the page id of each token position in `t`, read from the block table TABLE. Without CHECK, every position
    gets its page id.

    With CHECK, positions outside [lo, hi) get page 0. `ok` marks the positions inside. With RUNS, positions are tested
    in groups of 16. A page has a multiple of 16 tokens, so a group is inside one page. If any position of a group is
    inside [lo, hi), the whole group gets its page id. The later load of values needs this, because it uses the address
    of the group's first token.
    """
    if CHECK:
        if RUNS:
            run = t // 16 * 16
            ok = (run + 16 > lo) & (run < hi)
        return tl.load(TABLE + t // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        return tl.load(TABLE + t // PAGE).to(tl.int64)


@triton.jit
def load_sizes(S, page, slot, page_stride, token_stride, ok, CHECK: tl.constexpr):
    """Return the scale of each token of a unit (BN tokens). With CHECK, tokens that `ok` does not mark get the scale
    1."""
    if CHECK:
        return tl.load(S + page * page_stride + slot * token_stride, mask=ok, other=1.0)
    else:
        return tl.load(S + page * page_stride + slot * token_stride)


@triton.jit
def load_rows(base, offsets, ok, WIDTH_: tl.constexpr, START: tl.constexpr, CHECK: tl.constexpr):
    """Load a tile [rows, WIDTH_] from the array at address `base`, from column START on. `offsets` has the position of
    each tile row in the array. With CHECK, rows that `ok` does not mark are zeros."""
    column = START + tl.arange(0, WIDTH_)
    if CHECK:
        return tl.load(base + offsets[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    else:
        return tl.load(base + offsets[:, None] + column[None, :])


@triton.jit
def _load_turned(base, offsets, ok, v_column, WIDTH_: tl.constexpr, START: tl.constexpr, CHECK: tl.constexpr):
    """Load values [WIDTH_, tokens] whose token dimension is dense in memory. The load has no mask, so that adjacent
    tokens are loaded together. Tokens that `ok` does not mark may be NaN. With CHECK, they are set to 0 afterwards."""
    column = START + tl.arange(0, WIDTH_)
    turned = tl.load(base + column[:, None] * v_column + offsets[None, :])
    if CHECK and turned.dtype != tl.int8:
        turned = tl.where(ok[None, :], turned, tl.zeros([1, 1], turned.dtype))
    return turned


@triton.jit
def load_values(
    base, offsets, ok, v_column, WIDTH_: tl.constexpr, START: tl.constexpr, TURNED: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the values of a unit (BN tokens): [WIDTH_, tokens] if SMALL, else [tokens, WIDTH_]. TURNED states that
    the token dimension is dense in memory.
    """
    if TURNED:
        turned = _load_turned(base, offsets, ok, v_column, WIDTH_, START, CHECK).to(DTYPE)
        return turned if SMALL else tl.trans(turned)
    else:
        values = load_rows(base, offsets, ok, WIDTH_, START, CHECK).to(DTYPE)
        return tl.trans(values) if SMALL else values


@triton.jit
def _seen(
    t, ok, first, last, own, tree_rows, TREES, BOUNDS: tl.constexpr, TREE: tl.constexpr, SMALL: tl.constexpr
):
    """Return which tokens of a unit (BN tokens) each query row sees, as a mask [tokens, rows] if SMALL, else [rows,
    tokens]. `first` and `last` are the first and last visible token of each row. With TREE, `own` is the position of
    the first query of each row's sequence, and TREES + `tree_rows` is the row's mask over the queries of the sequence.
    """
    t = t[:, None] if SMALL else t[None, :]
    seen = ok[:, None] if SMALL else ok[None, :]
    end = last[None, :] if SMALL else last[:, None]
    if BOUNDS == 1 or BOUNDS == 3:
        if TREE:
            among = t - (own[None, :] if SMALL else own[:, None])
            rows = tree_rows[None, :] if SMALL else tree_rows[:, None]
            drawn = tl.load(TREES + rows + among, mask=seen & (among >= 0) & (end >= 0), other=0)
            seen = seen & ((among < 0) | (drawn != 0)) & (end >= 0)
            t = tl.where(among < 0, t, t - among + drawn.to(tl.int32) - 1)  # positions, not slots
        else:
            seen = seen & (t <= end)
    if BOUNDS >= 2:
        seen = seen & (t >= (first[None, :] if SMALL else first[:, None]))
    return seen


@triton.jit
def product(left, right, acc, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(left, right, acc, input_precision="ieee")
    else:
        return tl.dot(left, right, acc)


@triton.jit
def step(
    t, ok, lo, hi, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
    K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    qk_scale, softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """Process one unit: add the `BN` tokens at `t` to the running softmax of the tile's query rows. `ok` marks the
    tokens in [lo, hi).

    - BOUNDS is a bit mask of the limits to check for each query row: 1 for the last visible token, 2 for the first.
    - Without CHECK, every query row sees every token.
    - SMALL means few query rows. Scores are then [tokens, rows]. The tokens fill the longer dimension of a
      tensor-core instruction, and the instruction reads K and V from shared memory, not from registers.
    """
    page = load_pages(TABLE, t, ok, lo, hi, PAGE, TURNED, CHECK)
    slot = t % PAGE
    k_at = page * k_page + slot * k_token
    k0 = load_rows(K, k_at, ok, DK0, 0, CHECK)
    if SMALL:
        scores = product(k0.to(q0.dtype), q0, tl.zeros([BN, BM], tl.float32), EXACT)
    else:
        scores = product(q0, tl.trans(k0.to(q0.dtype)), tl.zeros([BM, BN], tl.float32), EXACT)
    if DK1 > 0:
        k1 = load_rows(K, k_at, ok, DK1, DK0, CHECK)
        if SMALL:
            scores = product(k1.to(q1.dtype), q1, scores, EXACT)
        else:
            scores = product(q1, tl.trans(k1.to(q1.dtype)), scores, EXACT)
    AXIS: tl.constexpr = 0 if SMALL else 1
    if SCALES == 2:
        k_size = load_sizes(KS, page, slot, ks_page, ks_token, ok, CHECK) * qk_scale
        scores = scores * tl.expand_dims(k_size, 1 - AXIS)
    else:
        scores = scores * qk_scale
    if SOFTCAP:
        # tanh computed from the logistic function; scores are in units of log2(e).
        scores = (2.0 * tl.sigmoid(scores * (2.0 / (softcap * LOG2E))) - 1.0) * (softcap * LOG2E)
    if CHECK:
        scores = tl.where(
            _seen(t, ok, first, last, own, tree_rows, TREES, BOUNDS, TREE, SMALL), scores, float("-inf")
        )
    if SCALES == 2:
        # The exponent includes the scales of the values, so weights stay within [0, 1] for any scale.
        v_size = load_sizes(VS, page, slot, vs_page, vs_token, ok, CHECK)
        v_size = _log2(tl.maximum(v_size, SMALLEST))
        scores = scores + tl.expand_dims(v_size, 1 - AXIS)
    top = tl.maximum(peak, tl.max(scores, AXIS))
    safe = top
    if CHECK:
        safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    p = tl.exp2(scores - tl.expand_dims(safe, AXIS))
    share = p
    if SCALES == 2:
        share = p * tl.expand_dims(tl.exp2(-v_size), 1 - AXIS)
    if SMALL:
        # The sum over tokens is computed after the last unit, so that warps exchange no data here.
        weight = weight * fade[None, :] + share
    else:
        weight = weight * fade + tl.sum(share, 1)
    p = p.to(q0.dtype)
    fade = tl.expand_dims(fade, AXIS)
    if LATENT:
        if SMALL:
            acc0 = product(tl.trans(k0.to(q0.dtype)), p, acc0 * fade, EXACT)
        else:
            acc0 = product(p, k0.to(q0.dtype), acc0 * fade, EXACT)
    else:
        v_at = page * v_page + slot * v_token
        if TURNED:
            # A unit begins at a page boundary, so 16 adjacent tokens share a page.
            v_at = tl.max_contiguous(tl.multiple_of(v_at, 16), 16)
        v0 = load_values(V, v_at, ok, v_column, DV0, 0, TURNED, CHECK, SMALL, q0.dtype)
        if SMALL:
            acc0 = product(v0, p, acc0 * fade, EXACT)
        else:
            acc0 = product(p, v0, acc0 * fade, EXACT)
        if DV1 > 0:
            v1 = load_values(V, v_at, ok, v_column, DV1, DV0, TURNED, CHECK, SMALL, q0.dtype)
            if SMALL:
                acc1 = product(v1, p, acc1 * fade, EXACT)
            else:
                acc1 = product(p, v1, acc1 * fade, EXACT)
    return top, weight, acc0, acc1


@triton.jit
def two_parts(x, DTYPE: tl.constexpr):
    """Split `x` into a high and a low part, so that x = high + low / LOW. Return both parts as [..., 2]. The caller
    converts each part to DTYPE, which has 8 bits. The error of both parts together is at most the error of a 16-bit
    value.

    LOW is LOW_INT8 for int8 and LOW_FP8 for fp8. The absolute value of `x` must be at most 127 for int8, and at most
    256 for fp8."""
    if DTYPE == tl.int8:
        # Adding this constant last leaves the integer in the lowest bits of the sum, which saves a
        # conversion.
        high = x + MAGIC
        low = (x - (high - MAGIC)) * LOW_INT8 + MAGIC
        return tl.join(high.to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True))
    else:
        near = x.to(DTYPE).to(tl.float32)
        return tl.join(near, (x - near) * LOW_FP8)


@triton.jit
def _one_part(x, DTYPE: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Undo the split of `two_parts` after a matrix product. `x` [A, 2 * B] has two products for each result: one with
    the high part, and one with the low part. Return the product with the unsplit operand, [A, B] in float32.

    In int8, the result is the integer high * LOW_INT8 + low, which is LOW_INT8 times the product. With sums of at most
    256 products, this integer is below 2^31."""
    high, low = tl.split(tl.reshape(x, [A, B, 2]))
    if DTYPE == tl.int8:
        return (high * 254 + low).to(tl.float32)
    else:
        return high + low * (1.0 / LOW_FP8)


@triton.jit
def _load_unit(
    V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, WIDTH_: tl.constexpr, START: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Load the values of a unit (BN tokens), [WIDTH_, tokens]. Their token dimension is dense in memory. Pages of
    fewer than 64 tokens are read one by one, so that adjacent threads read adjacent bytes."""
    if PAGE < 64:
        block = begin // PAGE + tl.arange(0, BN // PAGE)
        each = tl.load(TABLE + block, mask=block * PAGE < right, other=0).to(tl.int64)
        inside = (START + tl.arange(0, WIDTH_))[:, None] * v_column + tl.arange(0, PAGE)[None, :] * v_token
        values = tl.load(V + (each * v_page)[:, None, None] + inside[None, :, :])
        values = tl.reshape(tl.permute(values, (1, 0, 2)), [WIDTH_, BN])
        if CHECK and values.dtype != tl.int8:
            values = tl.where(ok[None, :], values, tl.zeros([1, 1], values.dtype))
        return values
    else:
        v_at = tl.max_contiguous(tl.multiple_of(page * v_page + t % PAGE * v_token, 16), 16)
        return _load_turned(V, v_at, ok, v_column, WIDTH_, START, CHECK)


@triton.jit
def step_8bit(
    begin, lo, right, t, ok, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
    K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, CHECK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Process one unit of 8-bit pages for few query rows. The token dimension of V is dense. The tensor cores read K
    and V directly.

    Queries and weights are split into two 8-bit parts each, so they are as exact as 16-bit values (see `two_parts`).
    `q_size` scales the products of queries and keys. The sums are not yet scaled back: `weight` is 127 times too large
    for int8, and 256 times for fp8. `acc0` and `acc1`, the weighted sums of values, are 127 * LOW_INT8 times too large
    for int8, and 256 times for fp8.
    """
    page = load_pages(TABLE, t, ok, lo, right, PAGE, PAGE >= 64, CHECK)
    slot = t % PAGE
    k_at = page * k_page + slot * k_token
    scores = _one_part(tl.dot(load_rows(K, k_at, ok, DK0, 0, CHECK), q0), DTYPE, BN, BM)
    if DK1 > 0:
        scores += _one_part(tl.dot(load_rows(K, k_at, ok, DK1, DK0, CHECK), q1), DTYPE, BN, BM)
    if SCALES == 2:
        k_size = load_sizes(KS, page, slot, ks_page, ks_token, ok, CHECK) * q_size
        scores = scores * k_size[:, None]
    else:
        scores = scores * q_size
    if SOFTCAP:
        scores = (2.0 * tl.sigmoid(scores * (2.0 / (softcap * LOG2E))) - 1.0) * (softcap * LOG2E)
    if CHECK:
        scores = tl.where(
            _seen(t, ok, first, last, own, tree_rows, TREES, BOUNDS, TREE, True), scores, float("-inf")
        )
    if SCALES == 2:
        v_size = load_sizes(VS, page, slot, vs_page, vs_token, ok, CHECK)
        v_size = _log2(tl.maximum(v_size, SMALLEST))
        scores = scores + v_size[:, None]
    top = tl.maximum(peak, tl.max(scores, 0))
    safe = top
    if CHECK:
        safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    # Weights are multiplied by MOST, the range of their 8-bit parts.
    p = tl.exp2(scores - (safe - (LOG2_127 if DTYPE == tl.int8 else 8.0))[None, :])
    if SCALES == 2:
        weight = weight * fade[None, :] + p * tl.exp2(-v_size)[:, None]
    else:
        weight = weight * fade[None, :] + p
    parts = tl.reshape(two_parts(p, DTYPE), [BN, 2 * BM]).to(DTYPE)
    v0 = _load_unit(V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, DV0, 0, PAGE, BN, CHECK)
    acc0 = acc0 * fade[None, :] + _one_part(tl.dot(v0, parts), DTYPE, DV0, BM)
    if DV1 > 0:
        v1 = _load_unit(
            V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, DV1, DV0, PAGE, BN, CHECK
        )
        acc1 = acc1 * fade[None, :] + _one_part(tl.dot(v1, parts), DTYPE, DV1, BM)
    return top, weight, acc0, acc1
