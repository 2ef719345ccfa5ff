# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over pages as one work list for a persistent grid: decode, shared prefixes and prefill alike.

A segment is a run of tokens [lo, hi) of one table row and the queries that read it. It is cut into tiles (one
KV head by `BM` query rows, a row being one query head of one query token) and each tile into units of `BN`
tokens. All units of all tiles stand in one line, and every program takes an equal stretch of it:

    segment 0          segment 1                    segment 2
    |tile 0 |tile 1 |  |tile 0        |tile 1    …
    |---program 0---|---program 1---|---program 2---|        stretch = ceil(units / programs)

A tile that one program holds whole goes straight to the output; pieces of others go to `slot = tile + program`
(both grow along the line, so no two pieces meet), and a merge joins them by their log-sum-exp. The list is made
on the device from the lengths, so that a captured graph fits any lengths.

Knows no cache, no tables' owners, and nothing of which kernel a caller should choose.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

__all__ = ["attend_tiles", "merge_levels", "merge_split", "plan_rows", "plan_segments"]

# What a segment is, as int32: one sector, read at once.
ROW: tl.constexpr = tl.constexpr(0)  # table row
LO: tl.constexpr = tl.constexpr(1)  # first token
HI: tl.constexpr = tl.constexpr(2)  # end of tokens
UNITS: tl.constexpr = tl.constexpr(3)  # units of each tile
BASE: tl.constexpr = tl.constexpr(4)  # units before this segment
TILE: tl.constexpr = tl.constexpr(5)  # tiles before this segment
COUNT: tl.constexpr = tl.constexpr(6)  # query tokens
FIRST: tl.constexpr = tl.constexpr(7)  # where they begin, in q or in the list of members
WIDTH: tl.constexpr = tl.constexpr(8)

# What a query token is, as int32.
POSITION: tl.constexpr = tl.constexpr(0)
OWN: tl.constexpr = tl.constexpr(1)  # position of its sequence's first query
SEQUENCE: tl.constexpr = tl.constexpr(2)
TOKEN_WIDTH: tl.constexpr = tl.constexpr(4)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def first_visible(position, SPAN: tl.constexpr, SIZE: tl.constexpr):
    """`Span.first_visible`: 0 full, 1 sliding, 2 chunked."""
    if SPAN == 1:
        return tl.maximum(position - (SIZE - 1), 0)
    if SPAN == 2:
        return tl.maximum(position, 0) // SIZE * SIZE
    return position * 0


@triton.jit
def _begin_of(program, stretch, rest, MAIN: tl.constexpr):
    """The first unit of a program: MAIN of them take a `stretch` each, later ones what is left, `rest` units each."""
    return tl.minimum(program, MAIN) * stretch + tl.maximum(program - MAIN, 0) * rest


@triton.jit
def _program_of(unit, stretch, rest, MAIN: tl.constexpr):
    late = tl.maximum(unit - MAIN * stretch, 0)
    return tl.where(unit < MAIN * stretch, unit // stretch, MAIN + late // rest)


@triton.jit
def _lay_out(
    segments, places, firsts, totals, at, ok, row, lo, hi, count, first,
    PROGRAMS: tl.constexpr, MAIN: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Put the segments that have work in line (`places`: where each stands, -1 for none), and say in which of them
    each program's stretch begins."""
    some = ok & (hi > lo) & (count > 0)
    units = tl.where(some, tl.cdiv(hi - lo // PAGE * PAGE, BN), 0)
    tiles = tl.where(some, HEADS * tl.cdiv(count * GROUP, BM), 0)
    work = units * tiles
    end = tl.cumsum(work, 0)
    total = tl.sum(work, 0)
    stretch = tl.maximum(tl.cdiv(total * SHARE // 100, MAIN), LEAST)
    rest = LEAST
    if PROGRAMS > MAIN:
        rest = tl.maximum(tl.cdiv(tl.maximum(total - MAIN * stretch, 0), PROGRAMS - MAIN), LEAST)
    place = tl.cumsum(some.to(tl.int32), 0) - 1
    tl.store(places + at, tl.where(some, place, -1), mask=ok)
    into = segments + place * WIDTH
    tl.store(into + ROW, row, mask=some)
    tl.store(into + LO, lo, mask=some)
    tl.store(into + HI, hi, mask=some)
    tl.store(into + UNITS, units, mask=some)
    tl.store(into + BASE, end - work, mask=some)
    tl.store(into + TILE, tl.cumsum(tiles, 0) - tiles, mask=some)
    tl.store(into + COUNT, count, mask=some)
    tl.store(into + FIRST, first, mask=some)
    tl.store(totals, total)
    tl.store(totals + 1, stretch)
    tl.store(totals + 2, rest)
    for begin in range(0, PROGRAMS, STEP):
        program = begin + tl.arange(0, STEP)
        passed = (end[None, :] <= _begin_of(program, stretch, rest, MAIN)[:, None]) & some[None, :]
        tl.store(firsts + program, tl.sum(passed.to(tl.int32), 1), mask=program < PROGRAMS)


@triton.jit
def plan_rows(
    starts, lengths, begin, segments, places, firsts, totals, tokens, sequences,
    PROGRAMS: tl.constexpr, MAIN: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr,
    BEGIN: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One segment a sequence: the tokens its queries see, from `begin` on where shared segments hold the rest.
    Run by one program, once a step."""
    at = tl.arange(0, CAPACITY)
    ok = at < sequences
    first = tl.load(starts + at, mask=ok, other=0)
    count = tl.load(starts + at + 1, mask=ok, other=0) - first
    length = tl.load(lengths + at, mask=ok, other=0)
    own = length - count
    lo = first_visible(tl.maximum(own, 0), SPAN, SIZE)
    if BEGIN:
        lo = tl.maximum(lo, tl.load(begin + at, mask=ok, other=0))
    _lay_out(
        segments, places, firsts, totals, at, ok, at, lo, length, count, first,
        PROGRAMS, MAIN, SHARE, LEAST, HEADS, GROUP, PAGE, BM, BN, STEP,
    )  # fmt: skip
    for i in range(QUERIES):
        mine = ok & (i < count)
        token = tokens + (first + i) * TOKEN_WIDTH
        tl.store(token + POSITION, own + i, mask=mine)
        tl.store(token + OWN, own, mask=mine)
        tl.store(token + SEQUENCE, at, mask=mine)


@triton.jit
def plan_segments(
    given, number, segments, places, firsts, totals,
    PROGRAMS: tl.constexpr, MAIN: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Segments as given ([capacity, 5]: row, lo, hi, count, first), `number` of them (on the device)."""
    at = tl.arange(0, CAPACITY)
    ok = at < tl.load(number)
    source = given + at * 5
    _lay_out(
        segments, places, firsts, totals, at, ok,
        tl.load(source, mask=ok, other=0), tl.load(source + 1, mask=ok, other=0),
        tl.load(source + 2, mask=ok, other=0), tl.load(source + 3, mask=ok, other=0),
        tl.load(source + 4, mask=ok, other=0),
        PROGRAMS, MAIN, SHARE, LEAST, HEADS, GROUP, PAGE, BM, BN, STEP,
    )  # fmt: skip


@triton.jit
def _load_rows(base, offsets, ok, WIDTH_: tl.constexpr, START: tl.constexpr, CHECK: tl.constexpr):
    """[rows, WIDTH_] of columns from START on."""
    column = START + tl.arange(0, WIDTH_)
    if CHECK:
        return tl.load(base + offsets[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    return tl.load(base + offsets[:, None] + column[None, :])


@triton.jit
def _load_values(
    base, offsets, ok, v_column, WIDTH_: tl.constexpr, START: tl.constexpr, TURNED: tl.constexpr, CHECK: tl.constexpr,
    SMALL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values of a unit, [WIDTH_, tokens] where SMALL, else [tokens, WIDTH_]. TURNED: tokens are dense in memory; there
    no mask is laid over the load (runs of tokens go as one), and what was not written is put aside after it."""
    if TURNED:
        column = START + tl.arange(0, WIDTH_)
        turned = tl.load(base + column[:, None] * v_column + offsets[None, :]).to(DTYPE)
        if CHECK:
            turned = tl.where(ok[None, :], turned, 0.0)
        return turned if SMALL else tl.trans(turned)
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
        scores = scores + tl.expand_dims(tl.log2(v_size), 1 - AXIS)
    top = tl.maximum(peak, tl.max(scores, AXIS))
    safe = top
    if CHECK:
        safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    p = tl.exp2(scores - tl.expand_dims(safe, AXIS))
    if SCALES == 2:
        weight = weight * fade + tl.sum(p * tl.expand_dims(1.0 / v_size, 1 - AXIS), AXIS)
    else:
        weight = weight * fade + tl.sum(p, AXIS)
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
    MAIN: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Each program's stretch of the line. `SHARED`: the queries are listed in MEMBERS, else they follow one another
    in q. `SCALES`: 0 none, 1 one a head, 2 one a token and head. `DIRECT`: whole tiles go to OUT. `PHASES`: units
    that every row sees whole go unmasked (worth it where arithmetic is the limit)."""
    if OVERLAP:
        launch_dependents()
    program = tl.program_id(0)
    total = tl.load(TOTALS)
    stretch = tl.load(TOTALS + 1)
    rest = tl.load(TOTALS + 2)
    unit = _begin_of(program, stretch, rest, MAIN)
    end = tl.minimum(_begin_of(program + 1, stretch, rest, MAIN), total)
    at = tl.load(FIRSTS + program)
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
        row_tiles = tl.cdiv(count * GROUP, BM)
        head = tile // row_tiles
        row = (tile - head * row_tiles) * BM + tl.arange(0, BM)
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
        if HALF:
            q0 = q0.to(tl.float16)
            q1 = q1.to(tl.float16)
        if SMALL:
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
        weight = tl.zeros([BM], tl.float32)
        acc0 = tl.zeros([DV0, BM] if SMALL else [BM, DV0], tl.float32)
        acc1 = acc0
        if DV1 > 0:
            acc1 = tl.zeros([DV1, BM] if SMALL else [BM, DV1], tl.float32)
        qk_scale = scale * LOG2E
        if SCALES == 1:
            qk_scale = qk_scale * tl.load(KS + head * ks_head)
        k_base = K + head.to(tl.int64) * k_head
        v_base = V + head.to(tl.int64) * v_head
        ks_base = KS + head * ks_head
        vs_base = VS + head * vs_head
        origin = lo // PAGE * PAGE
        left = origin + here * BN
        right = tl.minimum(origin + stop * BN, hi)
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
        for i in tl.range(left, clear_from, BN, num_stages=STAGES):
            t = i + tl.arange(0, BN)
            peak, weight, acc0, acc1 = _step(
                t, (t >= lo) & (t < right), q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
                k_base, v_base, ks_base, vs_base, table, TREES,
                k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True, SMALL,
            )  # fmt: skip
        if PHASES:
            for i in tl.range(clear_from, clear_to, BN, num_stages=STAGES):
                t = i + tl.arange(0, BN)
                peak, weight, acc0, acc1 = _step(
                    t, t >= 0, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
                    k_base, v_base, ks_base, vs_base, table, TREES,
                    k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                    DK0, DK1, DV0, DV1, PAGE, BM, BN, 0, False, SOFTCAP, SCALES, LATENT, TURNED, EXACT, False, SMALL,
                )  # fmt: skip
            for i in tl.range(clear_to, right, BN, num_stages=STAGES):
                t = i + tl.arange(0, BN)
                peak, weight, acc0, acc1 = _step(
                    t, (t >= lo) & (t < right), q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
                    k_base, v_base, ks_base, vs_base, table, TREES,
                    k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                    DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True, SMALL,
                )  # fmt: skip
        if SMALL:
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
                both = top + tl.log2(tl.exp2(log - top) + tl.exp2(sink - top))
                norm = norm * tl.exp2(log - both)
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
            slot = tl.load(segment + TILE) + tile + program
            place = slot.to(tl.int64) * BM + tl.arange(0, BM)
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
        at += (unit == base + units * row_tiles * HEADS).to(tl.int32)
    if BESIDE:
        # Who waits for this launch must find the one it ran beside ended, too.
        wait_for_launcher()


@triton.jit
def _join(
    PART, PART_LSE, segment, TOTALS, tile, place, peak, weight, acc, column, fits, DV: tl.constexpr,
    BM: tl.constexpr, MAIN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add the pieces of one row (`place` of `tile`) to a running softmax."""
    units = tl.load(segment + UNITS)
    begin = tl.load(segment + BASE) + tile * units
    tile0 = tl.load(segment + TILE) + tile
    stretch = tl.load(TOTALS + 1)
    rest = tl.load(TOTALS + 2)
    last = _program_of(begin + units - 1, stretch, rest, MAIN)
    for i in range(_program_of(begin, stretch, rest, MAIN), last + 1, CHUNK):
        program = i + tl.arange(0, CHUNK)
        ok = program <= last
        piece = (tile0 + program).to(tl.int64) * BM + place
        log = tl.load(PART_LSE + piece, mask=ok, other=float("-inf"))
        values = tl.load(
            PART + piece[:, None] * DV + column[None, :], mask=ok[:, None] & fits[None, :], other=0.0
        )
        top = tl.maximum(peak, tl.max(log, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(log - safe)
        fade = tl.exp2(peak - safe)
        acc = acc * fade + tl.sum(values * share[:, None], 0)
        weight = weight * fade + tl.sum(share, 0)
        peak = top
    return peak, weight, acc


@triton.jit
def _finish(
    OUT,
    LSE,
    SINKS,
    token,
    head,
    peak,
    weight,
    acc,
    column,
    fits,
    out_token,
    out_head,
    lse_token,
    SINK: tl.constexpr,
):
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        fade = tl.exp2(peak - top)
        weight = weight * fade + tl.exp2(sink - top)
        acc = acc * fade
        peak = top
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    log = tl.where(weight > 0, (peak + tl.log2(weight)) / LOG2E, float("-inf"))
    into = OUT + token.to(tl.int64) * out_token + head * out_head
    tl.store(into + column, (acc * norm).to(OUT.dtype.element_ty), mask=fits)
    tl.store(LSE + token * lse_token + head, log)


@triton.jit
def merge_split(
    OUT, LSE, PART, PART_LSE, SEGMENTS, PLACES, FIRSTS, TOTALS, STARTS, SINKS, sequences,
    out_token, out_head, lse_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    SINK: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr, MAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the tiles that were cut, one program for each cut and row: the first cut of a tile does it, others
    leave at once. Sequences that saw nothing get zeros."""
    cut = tl.program_id(0) + 1
    place = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    fits = column < DV
    nothing = tl.zeros([COLUMNS], tl.float32)
    zero = tl.sum(nothing, 0)
    none = zero + float("-inf")
    for s in range(tl.program_id(0), sequences, PROGRAMS):
        if tl.load(PLACES + s) < 0:
            first = tl.load(STARTS + s)
            for i in range(tl.load(STARTS + s + 1) - first):
                for head in range(place, GROUP * HEADS, tl.num_programs(1)):
                    _finish(
                        OUT, LSE, SINKS, first + i, head, none, zero, nothing, column, fits,
                        out_token, out_head, lse_token, SINK,
                    )  # fmt: skip
    stretch = tl.load(TOTALS + 1)
    rest = tl.load(TOTALS + 2)
    unit = _begin_of(cut, stretch, rest, MAIN)
    if cut < PROGRAMS and unit < tl.load(TOTALS):
        segment = SEGMENTS + tl.load(FIRSTS + cut) * WIDTH
        units = tl.load(segment + UNITS)
        base = tl.load(segment + BASE)
        count = tl.load(segment + COUNT)
        tile = (unit - base) // units
        begin = base + tile * units
        row_tiles = tl.cdiv(count * GROUP, BM)
        head = tile // row_tiles
        row = (tile - head * row_tiles) * BM + place
        if begin < unit and begin >= _begin_of(cut - 1, stretch, rest, MAIN) and row < count * GROUP:
            token = tl.load(segment + FIRST) + row // GROUP
            if OVERLAP:
                wait_for_launcher()
            peak, weight, acc = _join(
                PART,
                PART_LSE,
                segment,
                TOTALS,
                tile,
                place,
                none,
                zero,
                nothing,
                column,
                fits,
                DV,
                BM,
                MAIN,
                CHUNK,
            )
            _finish(
                OUT, LSE, SINKS, token, head * GROUP + row % GROUP, peak, weight, acc, column, fits,
                out_token, out_head, lse_token, SINK,
            )  # fmt: skip


@triton.jit
def merge_levels(
    OUT, LSE, PART, PART_LSE, SEGMENTS, TOTALS, S_PART, S_PART_LSE, S_SEGMENTS, S_TOTALS, PLACES, S_PLACES, LEVELS,
    TOKENS, STARTS, SINKS, sequences, out_token, out_head, lse_token,
    GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, S_BM: tl.constexpr,
    DEPTH: tl.constexpr, SINK: tl.constexpr, CHUNK: tl.constexpr, MAIN: tl.constexpr, S_MAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join, for each query token and head, its own pieces and those of every shared segment above it. LEVELS
    ([depth, sequences, 2]) names the segment (-1: none) and the place of the sequence's first query in it."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    fits = column < DV
    s = tl.load(TOKENS + token * TOKEN_WIDTH + SEQUENCE)
    i = token - tl.load(STARTS + s)
    acc = tl.zeros([COLUMNS], tl.float32)
    weight = tl.sum(acc, 0)
    peak = weight + float("-inf")
    place = tl.load(PLACES + s)
    if OVERLAP:
        wait_for_launcher()
    if place >= 0:
        segment = SEGMENTS + place * WIDTH
        row = i * GROUP + head % GROUP
        tile = head // GROUP * tl.cdiv(tl.load(segment + COUNT) * GROUP, BM) + row // BM
        peak, weight, acc = _join(
            PART,
            PART_LSE,
            segment,
            TOTALS,
            tile,
            row % BM,
            peak,
            weight,
            acc,
            column,
            fits,
            DV,
            BM,
            MAIN,
            CHUNK,
        )
    for level in range(DEPTH):
        shared = tl.load(LEVELS + (level * sequences + s) * 2)
        if shared >= 0:
            segment = S_SEGMENTS + tl.load(S_PLACES + shared) * WIDTH
            row = (tl.load(LEVELS + (level * sequences + s) * 2 + 1) + i) * GROUP + head % GROUP
            tile = head // GROUP * tl.cdiv(tl.load(segment + COUNT) * GROUP, S_BM) + row // S_BM
            peak, weight, acc = _join(
                S_PART, S_PART_LSE, segment, S_TOTALS, tile, row % S_BM, peak, weight, acc,
                column, fits, DV, S_BM, S_MAIN, CHUNK,
            )  # fmt: skip
    _finish(
        OUT, LSE, SINKS, token, head, peak, weight, acc, column, fits, out_token, out_head, lse_token, SINK
    )
