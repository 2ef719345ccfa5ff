# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Attention over pages by tiles of the work list: decode, draft trees and shared runs.

Each program processes one lane of the work list (`triton_work_list`), tile by tile. The result of a tile is a
running softmax over its units (`triton_units`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

from .triton_mask import first_visible, tree_position
from .triton_units import LOW_INT8, load_rows, step, step_8bit, two_parts
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
    TILE,
    TOKEN_WIDTH,
    UNITS,
    WIDTH,
    with_sink,
)

__all__ = ["attend_tiles"]


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
    """Add the tokens from position `begin` to `end` to the running softmax of a tile, one unit (BN tokens) after
    another."""
    for i in tl.range(begin, end, BN, num_stages=STAGES):
        t = i + tl.arange(0, BN)
        ok = (t >= lo) & (t < right)
        if NATIVE:
            peak, weight, acc0, acc1 = step_8bit(
                i, lo, right, t, ok, q0, q1, q_size, peak, weight, acc0, acc1, first, last, own, tree_rows,
                K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column,
                ks_page, ks_token, vs_page, vs_token, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, CHECK, K.dtype.element_ty,
            )  # fmt: skip
        else:
            peak, weight, acc0, acc1 = step(
                t, ok, lo, right, q0, q1, peak, weight, acc0, acc1, first, last, own, tree_rows,
                K, V, KS, VS, TABLE, TREES, k_page, k_token, v_page, v_token, v_column,
                ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, BOUNDS, TREE, SOFTCAP, SCALES, LATENT, TURNED, EXACT, CHECK, SMALL,
            )  # fmt: skip
    return peak, weight, acc0, acc1


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["TABLES"])
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
    """Process one lane's units for one KV head. A lane is the part of the work list that one program processes (see
    `triton_work_list`). With DIRECT, results of whole tiles are written to OUT. All other results are written to
    PART.

    With SHARED, MEMBERS lists the queries of a tile. Otherwise they are consecutive in q. SCALES is 0 for pages
    without scales, 1 for one scale per head, 2 for one scale per token and head. With PHASES, units that every
    query row sees run in a separate loop without a mask. This is faster if arithmetic is the bottleneck.
    """
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
        q0 = load_rows(Q, q_row, mine, DK0, 0, True)
        q1 = q0
        if DK1 > 0:
            q1 = load_rows(Q, q_row, mine, DK1, DK0, True)
        if HALF and not NATIVE:
            q0 = q0.to(tl.float16)
            q1 = q1.to(tl.float16)
        q_size = scale * LOG2E
        if NATIVE:
            # One scale for all query rows is enough, because the absolute error of a score matters, not its relative error.
            MOST: tl.constexpr = 127.0 if K.dtype.element_ty == tl.int8 else 256.0
            LOW: tl.constexpr = LOW_INT8 if K.dtype.element_ty == tl.int8 else 1.0
            f0 = q0.to(tl.float32)
            f1 = q1.to(tl.float32)
            size = tl.maximum(tl.max(tl.max(tl.abs(f0), 1), 0), tl.max(tl.max(tl.abs(f1), 1), 0))
            size = tl.maximum(size, 1e-30) * (1.0 / MOST)
            q_size = q_size * size * (1.0 / LOW)
            q0 = two_parts(f0 * (1.0 / size), K.dtype.element_ty)
            q0 = tl.reshape(tl.permute(q0, (1, 0, 2)), [DK0, 2 * BM]).to(K.dtype.element_ty)
            if DK1 > 0:
                q1 = two_parts(f1 * (1.0 / size), K.dtype.element_ty)
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
            if TREE:
                own = tl.load(TOKENS + token * TOKEN_WIDTH + OWN, mask=mine, other=0)
                tree_rows = token.to(tl.int64) * tree_row
                first = first_visible(tree_position(TREES, tree_rows, own, last, mine), SPAN, SIZE)
            else:
                first = first_visible(last, SPAN, SIZE)
        peak = tl.full([BM], float("-inf"), tl.float32)
        weight = tl.zeros([BN, BM] if SMALL else [BM], tl.float32)
        acc0 = tl.zeros([DV0, BM] if SMALL else [BM, DV0], tl.float32)
        acc1 = acc0
        if DV1 > 0:
            acc1 = tl.zeros([DV1, BM] if SMALL else [BM, DV1], tl.float32)
        qk_scale = scale * LOG2E
        if SCALES == 1:
            qk_scale = qk_scale * tl.load(KS + head * ks_head)
            q_size = q_size * tl.load(KS + head * ks_head)
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
        norm = tl.where(weight > 0, 1.0 / weight, 0.0)
        if NATIVE:
            norm = norm * (1.0 / LOW)
            weight = weight * (1.0 / MOST)
        log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
        if SCALES == 1:
            norm = norm * tl.load(VS + head * vs_head)
        column0 = tl.arange(0, DV0)
        if DIRECT and whole:
            if SINK:
                norm, log = with_sink(norm, log, SINKS, head * GROUP + row % GROUP, mine)
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
        # The next launch waits only for this one, so this launch must end after the previous, overlapped launch.
        wait_for_launcher()
