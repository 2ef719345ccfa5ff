# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention of few query rows over pages, for short sequences. `triton_work_list` defines segments, tiles, units
and lanes. One loop processes all units of a lane.

With short sequences, starting and ending tiles takes most of the time. This kernel loads the queries with every
unit, so the loads of the next tile overlap the end of the current tile. It supports segments of one tile and pages
with 16-bit or 32-bit values, but no shared runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

from .triton_mask import first_visible, tree_position
from .triton_units import INTERPRETED, load_rows, step
from .triton_work_list import (
    BASE,
    COUNT,
    FIRST,
    HI,
    LO,
    LOG2E,
    OWN,
    POSITION,
    ROW,
    TOKEN_WIDTH,
    WIDTH,
    with_sink,
)

__all__ = ["READ_AHEAD", "attend_single_tiles"]

READ_AHEAD = 8
"""Number of segments that the loop reads after the last segment and ignores. A loop may have at most this many
pipeline stages."""


@triton.jit
def _peek(pointer):
    """Read one int32 of the work list. The addresses of the next round of the loop depend on this value. In a pipelined
    loop, Triton must therefore not move this read to an earlier round. On a GPU, the read is inline assembly, which
    Triton does not move."""
    if INTERPRETED:
        return tl.load(pointer)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _store_here(pointers, values, ok):
    """Store `values` directly from registers to `pointers`, one value per store. `ok` marks the values to store.

    A tile stores few values at its end. A normal store would pass them through shared memory, which needs barriers, and
    takes memory from the buffers of the loop.
    """
    if INTERPRETED:
        tl.store(pointers, values, mask=ok)
    elif values.dtype == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r", [pointers.to(tl.int64), values, ok.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,h,r", [pointers.to(tl.int64), values.to(tl.int16, bitcast=True), ok.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _store_columns(into, values, mine, SIZE: tl.constexpr):
    """Store `values` [SIZE, rows]. `into` has the address of each query row. Only the query rows marked in `mine`
    are stored."""
    column = tl.arange(0, SIZE)
    _store_here(into[None, :] + column[:, None], values, mine[None, :] & (column >= 0)[:, None])


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["TABLES"])
def attend_single_tiles(
    Q, K, V, OUT, LSE, PART, PART_LSE, SEGMENTS, FIRSTS, TOTALS, TOKENS, TABLES, SINKS, TREES,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, v_column,
    out_token, out_head, lse_token, table_row, tree_row, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr,
    SINGLE: tl.constexpr, BOUNDS: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
    TURNED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Process one lane's units for one KV head. A lane is the part of the work list that one program processes (see
    `triton_work_list`). `SINGLE` states that every segment has one query.

    Results of whole tiles are written to OUT. Results of parts of split tiles are written to PART, as in
    `attend_tiles`.
    """
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()  # only the start of this launch overlaps the previous kernel
    head = tl.program_id(0) % HEADS
    lane = tl.program_id(0) // HEADS
    stretch = tl.load(TOTALS + 1)
    start = lane * stretch
    end = tl.minimum(start + stretch, tl.load(TOTALS))
    at = tl.load(FIRSTS + lane)
    rows = tl.arange(0, BM)
    heads = head * GROUP + rows % GROUP
    k_base = K + head.to(tl.int64) * k_head
    v_base = V + head.to(tl.int64) * v_head
    peak = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BN, BM], tl.float32)
    acc0 = tl.zeros([DV0, BM], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([DV1, BM], tl.float32)
    segment = SEGMENTS + at * WIDTH
    lo = tl.load(segment + LO)
    hi = tl.load(segment + HI)
    begin = tl.load(segment + FIRST)
    row = tl.load(segment + ROW)
    base = tl.load(segment + BASE)
    i = lo // PAGE * PAGE + (start - base) * BN
    whole = base >= start
    for unit in tl.range(start, end, num_stages=STAGES):
        table = TABLES + row.to(tl.int64) * table_row
        if SINGLE:
            token = begin + rows * 0
            mine = rows < GROUP
        else:
            count = _peek(SEGMENTS + at * WIDTH + COUNT)
            token = begin + tl.minimum(rows // GROUP, count - 1)
            mine = rows < count * GROUP
        t = i + tl.arange(0, BN)
        ok = (t >= lo) & (t < hi)
        q_row = token.to(tl.int64) * q_token + heads * q_head
        q0 = tl.trans(load_rows(Q, q_row, mine, DK0, 0, True))
        q1 = q0
        if DK1 > 0:
            q1 = tl.trans(load_rows(Q, q_row, mine, DK1, DK0, True))
        last = tl.zeros([BM], tl.int32)
        own = last
        first = last
        tree_rows = q_row
        if BOUNDS > 0:
            last = tl.load(TOKENS + token * TOKEN_WIDTH + POSITION, mask=mine, other=-1)
            if TREE:
                own = tl.load(TOKENS + token * TOKEN_WIDTH + OWN, mask=mine, other=0)
                tree_rows = token.to(tl.int64) * tree_row
                first = first_visible(tree_position(TREES, tree_rows, own, last, mine), SPAN, WINDOW)
            else:
                first = first_visible(last, SPAN, WINDOW)
        peak, weight, acc0, acc1 = step(
            t, ok, lo, hi, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
            k_base, v_base, Q, Q, table, TREES, k_page, k_token, v_page, v_token, v_column, 0, 0, 0, 0,
            scale * LOG2E, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, 0, False, TURNED, EXACT, True, True,
        )  # fmt: skip
        ended = i + BN >= hi
        if ended | (unit == end - 1):
            sums = tl.sum(weight, 0)
            log = tl.where(sums > 0, peak + tl.log2(sums), float("-inf"))
            norm = tl.where(sums > 0, 1.0 / sums, 0.0)
            if ended & whole:
                if SINK:
                    norm, log = with_sink(norm, log, SINKS, heads, mine)
                into = OUT + (token.to(tl.int64) * out_token + heads * out_head)
                _store_columns(into, (acc0 * norm[None, :]).to(OUT.dtype.element_ty), mine, DV0)
                if DV1 > 0:
                    _store_columns(into + DV0, (acc1 * norm[None, :]).to(OUT.dtype.element_ty), mine, DV1)
                _store_columns(LSE + (token * lse_token + heads), (log / LOG2E)[None, :], mine, 1)
            else:
                place = ((at + lane).to(tl.int64) * HEADS + head) * BM + rows
                _store_columns(PART + place * (DV0 + DV1), acc0 * norm[None, :], mine, DV0)
                if DV1 > 0:
                    _store_columns(PART + place * (DV0 + DV1) + DV0, acc1 * norm[None, :], mine, DV1)
                _store_columns(PART_LSE + place, log[None, :], mine, 1)
            peak = tl.full([BM], float("-inf"), tl.float32)
            weight = tl.zeros([BN, BM], tl.float32)
            acc0 = tl.zeros([DV0, BM], tl.float32)
            acc1 = acc0
            if DV1 > 0:
                acc1 = tl.zeros([DV1, BM], tl.float32)
        at += ended.to(tl.int32)
        whole = whole | ended
        segment = SEGMENTS + at * WIDTH
        lo = _peek(segment + LO)
        hi = _peek(segment + HI)
        begin = _peek(segment + FIRST)
        row = _peek(segment + ROW)
        i = tl.where(ended, lo // PAGE * PAGE, i + BN)
