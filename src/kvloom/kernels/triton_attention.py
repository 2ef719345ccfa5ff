# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over pages by tiles of the work list: decode, shared prefixes and short prefill alike.

One program walks its stretch of the line (`triton_worklist.py`), tile after tile, unit after unit, with a running
softmax. Knows no cache, no tables' owners, and nothing of which kernel a caller should choose.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

from .triton_worklist import (
    BASE,
    COUNT,
    FIRST,
    HI,
    LO,
    LOG2E,
    OWN,
    POSITION,
    ROW,
    SMALLEST,
    TILE,
    TOKEN_WIDTH,
    UNITS,
    WIDTH,
    first_visible,
)

__all__ = ["attend_tiles"]

MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it rounds half to even
LOW_INT8: tl.constexpr = tl.constexpr(254.0)
LOW_FP8: tl.constexpr = tl.constexpr(16.0)


@triton.jit
def _load_rows(base, offsets, ok, WIDTH_: tl.constexpr, START: tl.constexpr, CHECK: tl.constexpr):
    """[rows, WIDTH_] of columns from START on."""
    column = START + tl.arange(0, WIDTH_)
    if CHECK:
        return tl.load(base + offsets[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    else:
        return tl.load(base + offsets[:, None] + column[None, :])


@triton.jit
def _load_turned(base, offsets, ok, v_column, WIDTH_: tl.constexpr, START: tl.constexpr, CHECK: tl.constexpr):
    """[WIDTH_, tokens] of values whose tokens are dense in memory. No mask is laid over the load, so that runs of
    tokens go as one; what was not written and may be no number is put aside after it."""
    column = START + tl.arange(0, WIDTH_)
    turned = tl.load(base + column[:, None] * v_column + offsets[None, :])
    if CHECK and turned.dtype != tl.int8:
        turned = tl.where(ok[None, :], turned, tl.zeros([1, 1], turned.dtype))
    return turned


@triton.jit
def _load_values(
    base, offsets, ok, v_column, WIDTH_: tl.constexpr, START: tl.constexpr, TURNED: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values of a unit, [WIDTH_, tokens] where SMALL, else [tokens, WIDTH_]. TURNED: tokens are dense in memory."""
    if TURNED:
        turned = _load_turned(base, offsets, ok, v_column, WIDTH_, START, CHECK).to(DTYPE)
        return turned if SMALL else tl.trans(turned)
    else:
        values = _load_rows(base, offsets, ok, WIDTH_, START, CHECK).to(DTYPE)
        return tl.trans(values) if SMALL else values


@triton.jit
def _seen(
    t, ok, first, last, own, tree_rows, TREES, BOUNDS: tl.constexpr, TREE: tl.constexpr, SMALL: tl.constexpr
):
    """Which of the unit's tokens each row sees, [tokens, rows] where SMALL, else [rows, tokens]."""
    t = t[:, None] if SMALL else t[None, :]
    seen = ok[:, None] if SMALL else ok[None, :]
    end = last[None, :] if SMALL else last[:, None]
    if BOUNDS == 1 or BOUNDS == 3:
        if TREE:
            among = t - (own[None, :] if SMALL else own[:, None])
            rows = tree_rows[None, :] if SMALL else tree_rows[:, None]
            drawn = tl.load(TREES + rows + among, mask=seen & (among >= 0) & (end >= 0), other=0)
            seen = seen & ((among < 0) | (drawn != 0)) & (end >= 0)
        else:
            seen = seen & (t <= end)
    if BOUNDS >= 2:
        seen = seen & (t >= (first[None, :] if SMALL else first[:, None]))
    return seen


@triton.jit
def _product(left, right, acc, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(left, right, acc, input_precision="ieee")
    else:
        return tl.dot(left, right, acc)


@triton.jit
def _step(
    t, ok, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
    K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    qk_scale, softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """One unit: `BN` tokens at `t` against the tile's rows. `ok` are the tokens that exist; `BOUNDS` says which
    of the rows' own bounds to look at (1 last token, 2 first token); without CHECK every row sees every token.

    Few rows (SMALL) stand in columns, scores being [tokens, rows]: tokens then fill the tall side that tensor cores
    want, and K and V go to them from shared memory without passing registers.
    """
    if CHECK:
        page = tl.load(TABLE + t // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        page = tl.load(TABLE + t // PAGE).to(tl.int64)
    slot = t % PAGE
    k_at = page * k_page + slot * k_token
    k0 = _load_rows(K, k_at, ok, DK0, 0, CHECK)
    if SMALL:
        scores = _product(k0.to(q0.dtype), q0, tl.zeros([BN, BM], tl.float32), EXACT)
    else:
        scores = _product(q0, tl.trans(k0.to(q0.dtype)), tl.zeros([BM, BN], tl.float32), EXACT)
    if DK1 > 0:
        k1 = _load_rows(K, k_at, ok, DK1, DK0, CHECK)
        if SMALL:
            scores = _product(k1.to(q1.dtype), q1, scores, EXACT)
        else:
            scores = _product(q1, tl.trans(k1.to(q1.dtype)), scores, EXACT)
    AXIS: tl.constexpr = 0 if SMALL else 1
    if SCALES == 2:
        k_size = tl.load(KS + page * ks_page + slot * ks_token, mask=ok, other=1.0) * qk_scale
        scores = scores * tl.expand_dims(k_size, 1 - AXIS)
    else:
        scores = scores * qk_scale
    if SOFTCAP:
        # tanh by the logistic function; scores are in units of log2(e).
        scores = (2.0 * tl.sigmoid(scores * (2.0 / (softcap * LOG2E))) - 1.0) * (softcap * LOG2E)
    if CHECK:
        scores = tl.where(
            _seen(t, ok, first, last, own, tree_rows, TREES, BOUNDS, TREE, SMALL), scores, float("-inf")
        )
    if SCALES == 2:
        # Sizes of values enter the exponent, so that weights stay within [0, 1] whatever the sizes.
        v_size = tl.load(VS + page * vs_page + slot * vs_token, mask=ok, other=1.0)
        v_size = tl.log2(tl.maximum(v_size, SMALLEST))
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
        # Summed over tokens when all units are done: no exchange between warps for it here.
        weight = weight * fade[None, :] + share
    else:
        weight = weight * fade + tl.sum(share, 1)
    p = p.to(q0.dtype)
    fade = tl.expand_dims(fade, AXIS)
    if LATENT:
        if SMALL:
            acc0 = _product(tl.trans(k0.to(q0.dtype)), p, acc0 * fade, EXACT)
        else:
            acc0 = _product(p, k0.to(q0.dtype), acc0 * fade, EXACT)
    else:
        v_at = page * v_page + slot * v_token
        if TURNED:
            # A unit begins with a page, so tokens stand in runs of 16.
            v_at = tl.max_contiguous(tl.multiple_of(v_at, 16), 16)
        v0 = _load_values(V, v_at, ok, v_column, DV0, 0, TURNED, CHECK, SMALL, q0.dtype)
        if SMALL:
            acc0 = _product(v0, p, acc0 * fade, EXACT)
        else:
            acc0 = _product(p, v0, acc0 * fade, EXACT)
        if DV1 > 0:
            v1 = _load_values(V, v_at, ok, v_column, DV1, DV0, TURNED, CHECK, SMALL, q0.dtype)
            if SMALL:
                acc1 = _product(v1, p, acc1 * fade, EXACT)
            else:
                acc1 = _product(p, v1, acc1 * fade, EXACT)
    return top, weight, acc0, acc1


@triton.jit
def _two_parts(x, DTYPE: tl.constexpr):
    """`x` of at most MOST in 8 bits twice: x = high + low / LOW, which leaves no more error than 16 bits do."""
    if DTYPE == tl.int8:
        high = (x + MAGIC) - MAGIC
        low = ((x - high) * LOW_INT8 + MAGIC) - MAGIC
    else:
        high = x.to(DTYPE).to(tl.float32)
        low = (x - high) * LOW_FP8
    return tl.join(high, low)


@triton.jit
def _one_part(x, DTYPE: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """What products with both parts ([A, 2 * B], side by side) come to."""
    high, low = tl.split(tl.reshape(x, [A, B, 2]))
    LOW: tl.constexpr = LOW_INT8 if DTYPE == tl.int8 else LOW_FP8
    return high.to(tl.float32) + low.to(tl.float32) * (1.0 / LOW)


@triton.jit
def _load_unit(
    V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, WIDTH_: tl.constexpr, START: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[WIDTH_, tokens] of a unit's values whose tokens are dense in memory. Short pages are read one by one, so that
    threads follow the bytes of a page and not the tokens across pages."""
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
def _step_8bit(
    begin, right, t, ok, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
    K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, CHECK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`_step` for few rows over pages of 8 bits whose tokens are dense in V: K and V go to the tensor cores as they
    are, and queries and weights come in two parts of 8 bits each, side by side, so that nothing is lost by it."""
    if CHECK:
        page = tl.load(TABLE + t // PAGE, mask=ok, other=0).to(tl.int64)
    else:
        page = tl.load(TABLE + t // PAGE).to(tl.int64)
    slot = t % PAGE
    k_at = page * k_page + slot * k_token
    scores = _one_part(tl.dot(_load_rows(K, k_at, ok, DK0, 0, CHECK), q0), DTYPE, BN, BM)
    if DK1 > 0:
        scores += _one_part(tl.dot(_load_rows(K, k_at, ok, DK1, DK0, CHECK), q1), DTYPE, BN, BM)
    scores = scores * q_size[None, :]
    if SCALES == 2:
        k_size = tl.load(KS + page * ks_page + slot * ks_token, mask=ok, other=1.0)
        scores = scores * k_size[:, None]
    if SOFTCAP:
        scores = (2.0 * tl.sigmoid(scores * (2.0 / (softcap * LOG2E))) - 1.0) * (softcap * LOG2E)
    if CHECK:
        scores = tl.where(
            _seen(t, ok, first, last, own, tree_rows, TREES, BOUNDS, TREE, True), scores, float("-inf")
        )
    if SCALES == 2:
        v_size = tl.load(VS + page * vs_page + slot * vs_token, mask=ok, other=1.0)
        v_size = tl.log2(tl.maximum(v_size, SMALLEST))
        scores = scores + v_size[:, None]
    top = tl.maximum(peak, tl.max(scores, 0))
    safe = top
    if CHECK:
        safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    p = tl.exp2(scores - safe[None, :])
    if SCALES == 2:
        weight = weight * fade[None, :] + p * tl.exp2(-v_size)[:, None]
    else:
        weight = weight * fade[None, :] + p
    MOST: tl.constexpr = 127.0 if DTYPE == tl.int8 else 256.0
    parts = tl.reshape(_two_parts(p * MOST, DTYPE), [BN, 2 * BM]).to(DTYPE)
    v0 = _load_unit(V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, DV0, 0, PAGE, BN, CHECK)
    acc0 = acc0 * fade[None, :] + _one_part(tl.dot(v0, parts), DTYPE, DV0, BM) * (1.0 / MOST)
    if DV1 > 0:
        v1 = _load_unit(
            V, TABLE, begin, t, page, ok, right, v_page, v_token, v_column, DV1, DV0, PAGE, BN, CHECK
        )
        acc1 = acc1 * fade[None, :] + _one_part(tl.dot(v1, parts), DTYPE, DV1, BM) * (1.0 / MOST)
    return top, weight, acc0, acc1


@triton.jit
def _run(
    begin, end, lo, right, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
    K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    qk_scale, softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Units from `begin` to `end`, one after the other."""
    for i in tl.range(begin, end, BN, num_stages=STAGES):
        t = i + tl.arange(0, BN)
        ok = (t >= lo) & (t < right)
        if NATIVE:
            peak, weight, acc0, acc1 = _step_8bit(
                i, right, t, ok, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
                K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column,
                ks_page, ks_token, vs_page, vs_token, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, CHECK, K.dtype.element_ty,
            )  # fmt: skip
        else:
            peak, weight, acc0, acc1 = _step(
                t, ok, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
                K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column,
                ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, CHECK, SMALL,
            )  # fmt: skip
    return peak, weight, acc0, acc1


@triton.jit
def attend_tiles(
    Q, K, V, KS, VS, OUT, LSE, PART, PART_LSE, SEGMENTS, FIRSTS, TOTALS, MEMBERS, TOKENS, TABLES, SINKS, TREES,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, v_column,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, out_token, out_head, lse_token, table_row, tree_row,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr,
    SHARED: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
    SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, DIRECT: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr,
    PHASES: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, SMALL: tl.constexpr,
    BESIDE: tl.constexpr, NATIVE: tl.constexpr, TOLL: tl.constexpr,
):  # fmt: skip
    """One head's part of a lane's stretch. `SHARED`: the queries are listed in MEMBERS, else they follow one another
    in q. `SCALES`: 0 none, 1 one a head, 2 one a token and head. `DIRECT`: whole tiles go to OUT. `PHASES`: units
    that every row sees whole go unmasked (worth it where arithmetic is the limit)."""
    if OVERLAP:
        launch_dependents()
    head = tl.program_id(0) % HEADS
    lane = tl.program_id(0) // HEADS
    stretch = tl.load(TOTALS + 1)
    unit = lane * stretch
    end = tl.minimum(unit + stretch, tl.load(TOTALS))
    at = tl.load(FIRSTS + lane)
    while unit < end:
        segment = SEGMENTS + at * WIDTH
        lo = tl.load(segment + LO)
        hi = tl.load(segment + HI)
        units = tl.load(segment + UNITS)
        base = tl.load(segment + BASE)
        count = tl.load(segment + COUNT)
        begin = tl.load(segment + FIRST)
        table = TABLES + tl.load(segment + ROW).to(tl.int64) * table_row
        tile = (unit - base) // units
        here = unit - base - tile * units
        stop = tl.minimum(units, here + end - unit)
        row = tile * BM + tl.arange(0, BM)
        mine = row < count * GROUP
        if SHARED:
            token = tl.load(MEMBERS + begin + row // GROUP, mask=mine, other=0)
        else:
            token = begin + tl.minimum(row // GROUP, count - 1)
        q_row = token.to(tl.int64) * q_token + (head * GROUP + row % GROUP) * q_head
        q0 = _load_rows(Q, q_row, mine, DK0, 0, True)
        q1 = q0
        if DK1 > 0:
            q1 = _load_rows(Q, q_row, mine, DK1, DK0, True)
        if HALF and not NATIVE:
            q0 = q0.to(tl.float16)
            q1 = q1.to(tl.float16)
        q_size = tl.full([BM], 1.0, tl.float32)
        if NATIVE:
            MOST: tl.constexpr = 127.0 if K.dtype.element_ty == tl.int8 else 256.0
            f0 = q0.to(tl.float32)
            f1 = q1.to(tl.float32)
            q_size = tl.maximum(tl.maximum(tl.max(tl.abs(f0), 1), tl.max(tl.abs(f1), 1)), 1e-30) * (
                1.0 / MOST
            )
            q0 = _two_parts(f0 * (1.0 / q_size)[:, None], K.dtype.element_ty)
            q0 = tl.reshape(tl.permute(q0, (1, 0, 2)), [DK0, 2 * BM]).to(K.dtype.element_ty)
            if DK1 > 0:
                q1 = _two_parts(f1 * (1.0 / q_size)[:, None], K.dtype.element_ty)
                q1 = tl.reshape(tl.permute(q1, (1, 0, 2)), [DK1, 2 * BM]).to(K.dtype.element_ty)
        elif SMALL:
            q0 = tl.trans(q0)
            q1 = tl.trans(q1)
        last = tl.zeros([BM], tl.int32)
        own = last
        first = last
        tree_rows = q_row
        if BOUNDS > 0:
            last = tl.load(TOKENS + token * TOKEN_WIDTH + POSITION, mask=mine, other=-1)
            first = first_visible(last, SPAN, SIZE)
            if TREE:
                own = tl.load(TOKENS + token * TOKEN_WIDTH + OWN, mask=mine, other=0)
                tree_rows = token.to(tl.int64) * tree_row
        peak = tl.full([BM], float("-inf"), tl.float32)
        weight = tl.zeros([BN, BM] if SMALL else [BM], tl.float32)
        acc0 = tl.zeros([DV0, BM] if SMALL else [BM, DV0], tl.float32)
        acc1 = acc0
        if DV1 > 0:
            acc1 = tl.zeros([DV1, BM] if SMALL else [BM, DV1], tl.float32)
        qk_scale = scale * LOG2E
        if SCALES == 1:
            qk_scale = qk_scale * tl.load(KS + head * ks_head)
        q_size = q_size * qk_scale
        k_base = K + head.to(tl.int64) * k_head
        v_base = V + head.to(tl.int64) * v_head
        ks_base = KS + head * ks_head
        vs_base = VS + head * vs_head
        origin = lo // PAGE * PAGE
        left = origin + tl.maximum(here - TOLL, 0) * BN
        right = tl.minimum(origin + tl.maximum(stop - TOLL, 0) * BN, hi)
        clear_from = right
        clear_to = right
        if PHASES:
            seen_from = lo
            seen_to = right
            if BOUNDS == 1 or BOUNDS == 3:
                seen_to = tl.minimum(
                    seen_to, tl.min(tl.where(mine, own if TREE else last + 1, 2147483647), 0)
                )
            if BOUNDS >= 2:
                seen_from = tl.maximum(seen_from, tl.max(first, 0))
            clear_from = tl.maximum(left, origin + tl.cdiv(tl.maximum(seen_from - origin, 0), BN) * BN)
            clear_from = tl.minimum(clear_from, right)
            clear_to = tl.maximum(origin + tl.maximum(seen_to - origin, 0) // BN * BN, clear_from)
        peak, weight, acc0, acc1 = _run(
            left, clear_from, lo, right, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
            k_base, v_base, ks_base, vs_base, table, TREES,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True,
            SMALL, NATIVE, STAGES,
        )  # fmt: skip
        if PHASES:
            peak, weight, acc0, acc1 = _run(
                clear_from, clear_to, lo, right, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
                k_base, v_base, ks_base, vs_base, table, TREES,
                k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, 0, False, SOFTCAP, SCALES, LATENT, TURNED, EXACT, False,
                SMALL, NATIVE, STAGES,
            )  # fmt: skip
            peak, weight, acc0, acc1 = _run(
                clear_to, right, lo, right, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
                k_base, v_base, ks_base, vs_base, table, TREES,
                k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True,
                SMALL, NATIVE, STAGES,
            )  # fmt: skip
        if SMALL:
            weight = tl.sum(weight, 0)
            acc0 = tl.trans(acc0)
            acc1 = tl.trans(acc1)
        whole = (here == 0) & (stop == units)
        log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
        norm = tl.where(weight > 0, 1.0 / weight, 0.0)
        if SCALES == 1:
            norm = norm * tl.load(VS + head * vs_head)
        column0 = tl.arange(0, DV0)
        if DIRECT and whole:
            if SINK:
                sink = (
                    tl.load(SINKS + head * GROUP + row % GROUP, mask=mine, other=0.0).to(tl.float32) * LOG2E
                )
                top = tl.maximum(log, sink)
                safe = tl.where(top == float("-inf"), 0.0, top)
                both = tl.where(
                    top == float("-inf"), top, top + tl.log2(tl.exp2(log - safe) + tl.exp2(sink - safe))
                )
                norm = norm * tl.where(top == float("-inf"), 0.0, tl.exp2(log - both))
                log = both
            into = token.to(tl.int64) * out_token + (head * GROUP + row % GROUP) * out_head
            tl.store(
                OUT + into[:, None] + column0[None, :], (acc0 * norm[:, None]).to(OUT.dtype.element_ty),
                mask=mine[:, None],
            )  # fmt: skip
            if DV1 > 0:
                column1 = DV0 + tl.arange(0, DV1)
                tl.store(
                    OUT + into[:, None] + column1[None, :], (acc1 * norm[:, None]).to(OUT.dtype.element_ty),
                    mask=mine[:, None],
                )  # fmt: skip
            tl.store(LSE + token * lse_token + head * GROUP + row % GROUP, log / LOG2E, mask=mine)
        else:
            slot = tl.load(segment + TILE) + tile + lane
            place = (slot.to(tl.int64) * HEADS + head) * BM + tl.arange(0, BM)
            tl.store(
                PART + place[:, None] * (DV0 + DV1) + column0[None, :],
                acc0 * norm[:, None],
                mask=mine[:, None],
            )
            if DV1 > 0:
                column1 = DV0 + tl.arange(0, DV1)
                tl.store(
                    PART + place[:, None] * (DV0 + DV1) + column1[None, :],
                    acc1 * norm[:, None],
                    mask=mine[:, None],
                )
            tl.store(PART_LSE + place, log, mask=mine)
        unit += stop - here
        at += (unit == base + units * tl.cdiv(count * GROUP, BM)).to(tl.int32)
    if BESIDE:
        # Who waits for this launch must find the one it ran beside ended, too.
        wait_for_launcher()
