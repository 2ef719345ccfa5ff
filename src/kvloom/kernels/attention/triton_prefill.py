# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Prefill over pages: the kernels that compute attention of blocks of query rows and merge split blocks.

A query row is one query head of one query token. The query rows of a sequence for one KV head are ordered by token
(index = token * GROUP + head in group). A block is BM consecutive query rows. The tokens that a long block sees are
split into pieces, which different programs compute. A slot is the index of a piece's partial result in a buffer.
The host passes blocks and joins as int32 lists.

| list   | fields                                                                                                    |
|--------|-----------------------------------------------------------------------------------------------------------|
| blocks | line of the block table, first token, end of the tokens, first query row, first query, number of queries, |
|        | position of the first query, slot                                                                         |
| joins  | first slot, number of pieces, first query row, first query, number of queries                             |
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mask import first_visible, stored_tokens
from .triton_units import load_pages, load_rows, load_sizes, load_values, product
from .triton_work_list import LOG2E, SMALLEST, with_sink

__all__ = ["attend_blocks", "join_blocks", "page_step", "softmax_step"]

BLOCK_WIDTH: tl.constexpr = tl.constexpr(8)
JOIN_WIDTH: tl.constexpr = tl.constexpr(5)


@triton.jit
def softmax_step(scores, factor, peak, weight, SCALED: tl.constexpr, CHECK: tl.constexpr):
    """Compute one step of a running softmax in powers of two. Return four values: the weights of the new scores, the
    factor for the old sums, the new largest score (peak) and the new sum of weights.

    With SCALED, the scores are already multiplied by the positive `factor`. Otherwise this function multiplies them.
    """
    if SCALED:
        top = tl.maximum(peak, tl.max(scores, 1))
    else:
        top = tl.maximum(peak, tl.max(scores, 1) * factor)
    safe = top
    if CHECK:
        safe = tl.where(top == float("-inf"), 0.0, top)
    if SCALED:
        p = tl.exp2(scores - safe[:, None])
    else:
        p = tl.exp2(scores * factor - safe[:, None])
    fade = tl.exp2(peak - safe)
    return p, fade, top, weight * fade


@triton.jit
def page_step(
    t, lo, hi, q0, q1, peak, weight, acc0, acc1, last, first, image,
    K, V, KS, VS, TABLE, IDS, own, query, k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token,
    qk_scale, softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, IMAGES: tl.constexpr, SOFTCAP: tl.constexpr, SCALES: tl.constexpr,
    LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Add the tokens from `t` to `t + BN` that are in [lo, hi) to the running softmax of a block. TABLE is the
    sequence's line of the block table. Without CHECK, every query row sees every token, so nothing is masked."""
    ok = (t >= lo) & (t < hi)
    page = load_pages(TABLE, t, ok, lo, hi, PAGE, TURNED, CHECK)
    slot = t % PAGE
    k_at = page * k_page + slot * k_token
    k0 = load_rows(K, k_at, ok, DK0, 0, CHECK).to(q0.dtype)
    scores = product(q0, tl.trans(k0), tl.zeros([BM, BN], tl.float32), EXACT)
    if DK1 > 0:
        k1 = load_rows(K, k_at, ok, DK1, DK0, CHECK).to(q0.dtype)
        scores = product(q1, tl.trans(k1), scores, EXACT)
    if SCALES == 2:
        k_size = load_sizes(KS, page, slot, ks_page, ks_token, ok, CHECK) * qk_scale
        scores = scores * k_size[None, :]
    elif SOFTCAP:
        scores = scores * qk_scale
    if SOFTCAP:
        # tanh computed from the logistic function; scores are in units of log2(e).
        scores = (2.0 * tl.sigmoid(scores * (2.0 / (softcap * LOG2E))) - 1.0) * (softcap * LOG2E)
    if CHECK:
        seen = t[None, :] <= last[:, None]
        if IMAGES:
            inside = ok & (t >= own)
            other = tl.load(IDS + query + (t - own), mask=inside, other=-1)
            seen = seen | ((other[None, :] == image[:, None]) & (other >= 0)[None, :] & (last >= 0)[:, None])
        if WINDOW:
            seen = seen & (t[None, :] >= first[:, None])
        scores = tl.where(seen & ok[None, :], scores, float("-inf"))
    if SCALES == 2:
        # The exponent includes the scales of the values, so weights stay within [0, 1] for any scale.
        v_size = tl.maximum(load_sizes(VS, page, slot, vs_page, vs_token, ok, CHECK), SMALLEST)
        scores = scores + tl.log2(v_size)[None, :]
    p, fade, peak, weight = softmax_step(scores, qk_scale, peak, weight, SOFTCAP or SCALES == 2, CHECK)
    if SCALES == 2:
        weight += tl.sum(p * (1.0 / v_size)[None, :], 1)
    else:
        weight += tl.sum(p, 1)
    p = p.to(q0.dtype)
    if LATENT:
        acc0 = product(p, k0, acc0 * fade[:, None], EXACT)
    else:
        v_at = page * v_page + slot * v_token
        if TURNED:
            v_at = tl.max_contiguous(tl.multiple_of(v_at, 16), 16)  # `t` is a multiple of 16 tokens
        acc0 = product(
            p,
            load_values(V, v_at, ok, v_column, DV0, 0, TURNED, CHECK, False, q0.dtype),
            acc0 * fade[:, None],
            EXACT,
        )
        if DV1 > 0:
            v1 = load_values(V, v_at, ok, v_column, DV1, DV0, TURNED, CHECK, False, q0.dtype)
            acc1 = product(p, v1, acc1 * fade[:, None], EXACT)
    return peak, weight, acc0, acc1


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["TABLES"])
def attend_blocks(
    Q, K, V, KS, VS, OUT, LSE, PART, PART_LSE, BLOCKS, TABLES, SINKS, IDS,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, v_column,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, out_token, out_head, lse_token, lse_head, table_row,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, IMAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr, SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr,
    EXACT: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one block, or of one piece of a split block, for one KV head. Grid: (blocks * HEADS).
    The result of a piece is written to its slot in PART and PART_LSE. If the blocks of sequences are divided between
    RANKS ranks, tokens are counted as in `stored_tokens`. Positions of queries still count all tokens."""
    head = tl.program_id(0) % HEADS
    block = BLOCKS + tl.program_id(0) // HEADS * BLOCK_WIDTH
    table = TABLES + tl.load(block).to(tl.int64) * table_row
    lo = tl.load(block + 1)
    hi = tl.load(block + 2)
    row0 = tl.load(block + 3)
    query = tl.load(block + 4)
    queries = tl.load(block + 5)
    own = tl.load(block + 6)
    slot = tl.load(block + 7)
    row = row0 + tl.arange(0, BM)
    mine = row < queries * GROUP
    at = tl.minimum(
        row // GROUP, queries - 1
    )  # query rows past the end repeat the last token and are not stored
    token = (query + at).to(tl.int64)
    last = stored_tokens(own + at + 1, PAGE, RANK, RANKS) - 1
    first = first_visible(last, SPAN, SIZE)
    q_head_of = (head * GROUP + row % GROUP).to(tl.int64)
    q_at = token * q_token + q_head_of * q_head
    q0 = load_rows(Q, q_at, mine, DK0, 0, False)
    q1 = q0
    if DK1 > 0:
        q1 = load_rows(Q, q_at, mine, DK1, DK0, False)
    if HALF:
        q0 = q0.to(tl.float16)
        q1 = q1.to(tl.float16)
    image = last
    if IMAGES:
        image = tl.load(IDS + token)
    peak = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc0 = tl.zeros([BM, DV0], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([BM, DV1], tl.float32)
    qk_scale = scale * LOG2E
    if SCALES == 1:
        qk_scale = qk_scale * tl.load(KS + head * ks_head)
    k_base = K + head.to(tl.int64) * k_head
    v_base = V + head.to(tl.int64) * v_head
    ks_base = KS + head * ks_head
    vs_base = VS + head * vs_head
    left = lo // 16 * 16
    clear_from = left
    if SPAN > 0:
        all_from = tl.maximum(
            lo, first_visible(own + tl.minimum((row0 + BM - 1) // GROUP, queries - 1), SPAN, SIZE)
        )
        clear_from = tl.minimum(left + tl.cdiv(all_from - left, BN) * BN, hi)
    all_to = tl.minimum(stored_tokens(own + row0 // GROUP + 1, PAGE, RANK, RANKS), hi)
    clear_to = tl.maximum(left + tl.maximum(all_to - left, 0) // BN * BN, clear_from)
    if SPAN > 0:
        for i in tl.range(left, clear_from, BN, num_stages=STAGES):
            t = i + tl.arange(0, BN)
            peak, weight, acc0, acc1 = page_step(
                t, lo, hi, q0, q1, peak, weight, acc0, acc1, last, first, image,
                k_base, v_base, ks_base, vs_base, table, IDS, own, query,
                k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
                DK0, DK1, DV0, DV1, PAGE, BM, BN, SPAN > 0, IMAGES, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True,
            )  # fmt: skip
    for i in tl.range(clear_from, clear_to, BN, num_stages=STAGES):
        t = i + tl.arange(0, BN)
        peak, weight, acc0, acc1 = page_step(
            t, lo, hi, q0, q1, peak, weight, acc0, acc1, last, first, image,
            k_base, v_base, ks_base, vs_base, table, IDS, own, query,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, False, False, SOFTCAP, SCALES, LATENT, TURNED, EXACT, False,
        )  # fmt: skip
    for i in tl.range(clear_to, hi, BN, num_stages=STAGES):
        t = i + tl.arange(0, BN)
        peak, weight, acc0, acc1 = page_step(
            t, lo, hi, q0, q1, peak, weight, acc0, acc1, last, first, image,
            k_base, v_base, ks_base, vs_base, table, IDS, own, query,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, SPAN > 0, IMAGES, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True,
        )  # fmt: skip
    log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    if SCALES == 1:
        norm = norm * tl.load(VS + head * vs_head)
    column0 = tl.arange(0, DV0)
    column1 = DV0 + tl.arange(0, DV1 if DV1 > 0 else 1)
    if slot < 0:
        if SINK:
            norm, log = with_sink(norm, log, SINKS, q_head_of, mine)
        into = OUT + (token * out_token + q_head_of * out_head)[:, None]
        tl.store(into + column0[None, :], (acc0 * norm[:, None]).to(OUT.dtype.element_ty), mask=mine[:, None])
        if DV1 > 0:
            tl.store(
                into + column1[None, :], (acc1 * norm[:, None]).to(OUT.dtype.element_ty), mask=mine[:, None]
            )
        tl.store(LSE + token * lse_token + q_head_of * lse_head, log / LOG2E, mask=mine)
    else:
        place = (slot * HEADS + head).to(tl.int64) * BM + tl.arange(0, BM)
        piece = PART + place[:, None] * (DV0 + DV1)
        tl.store(piece + column0[None, :], acc0 * norm[:, None], mask=mine[:, None])
        if DV1 > 0:
            tl.store(piece + column1[None, :], acc1 * norm[:, None], mask=mine[:, None])
        tl.store(PART_LSE + place, log, mask=mine)


@triton.jit(do_not_specialize=["BM"])
def join_blocks(
    OUT, LSE, PART, PART_LSE, JOINS, SINKS, out_token, out_head, lse_token, lse_head, BM,
    GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of split blocks, as listed in JOINS. Grid: (KV heads, joins, BM / ROWS)."""
    head = tl.program_id(0)
    join = JOINS + tl.program_id(1) * JOIN_WIDTH
    slot = tl.load(join)
    pieces = tl.load(join + 1)
    queries = tl.load(join + 4)
    place = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = tl.load(join + 2) + place
    mine = row < queries * GROUP
    column = tl.arange(0, COLUMNS)
    fits = mine[:, None] & (column < DV)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for piece in range(pieces):
        part = ((slot + piece) * tl.num_programs(0) + head).to(tl.int64) * BM + place
        log = tl.load(PART_LSE + part, mask=mine, other=float("-inf"))
        values = tl.load(PART + part[:, None] * DV + column[None, :], mask=fits, other=0.0)
        top = tl.maximum(peak, log)
        safe = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(peak - safe)
        share = tl.exp2(log - safe)
        acc = acc * fade[:, None] + values * share[:, None]
        weight = weight * fade + share
        peak = top
    log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    q_head_of = (head * GROUP + row % GROUP).to(tl.int64)
    if SINK:
        norm, log = with_sink(norm, log, SINKS, q_head_of, mine)
    token = (tl.load(join + 3) + row // GROUP).to(tl.int64)
    into = OUT + (token * out_token + q_head_of * out_head)[:, None] + column[None, :]
    tl.store(into, (acc * norm[:, None]).to(OUT.dtype.element_ty), mask=fits)
    tl.store(LSE + token * lse_token + q_head_of * lse_head, log / LOG2E, mask=mine)
