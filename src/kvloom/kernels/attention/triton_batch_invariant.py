# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Batch-invariant attention kernels. The sums of a sequence, and the order of their terms, depend only on that
sequence.

Every call uses the same tile size. Tokens are divided into pieces of PIECE tokens. A piece is read BN tokens at a
time and summed separately. The sum is then added to the sum of the earlier pieces:

    tokens   |— piece 0 —|— piece 1 —|— piece 2 …      prompts: one program adds all pieces of a block
                                                        decode: one program per piece, `join_pieces` adds them

Prompts and decode both use `_fold` for this addition, so they compute identical bits. Tokens that a query does not
see add zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mask import first_visible
from .triton_prefill import page_step
from .triton_units import load_rows
from .triton_work_list import LOG2E, with_sink

__all__ = [
    "attend_by_piece",
    "attend_pieces",
    "join_pieces",
    "plan_pieces",
]

ITEM_WIDTH: tl.constexpr = tl.constexpr(
    5
)  # line of the block table, first query row of the block, first query, number of queries, position of the first query


@triton.jit
def _fold(peak, weight, acc0, acc1, top1, weight1, part0, part1, DV1: tl.constexpr):
    """Add the softmax of one piece to the running softmax of the earlier pieces. Multiply-adds are explicit, so that
    the compiler cannot change the rounding."""
    top = tl.maximum(peak, top1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(peak - safe)
    share = tl.exp2(top1 - safe)
    weight = tl.fma(weight, fade, weight1 * share)
    acc0 = tl.fma(acc0, fade[:, None], part0 * share[:, None])
    if DV1 > 0:
        acc1 = tl.fma(acc1, fade[:, None], part1 * share[:, None])
    return top, weight, acc0, acc1


@triton.jit
def _piece(
    piece, lo, hi, q0, q1, last, first, image, K, V, KS, VS, TABLE, IDS, own, query,
    k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
    DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr, IMAGES: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the softmax over those tokens of one piece that are in [lo, hi). Return three values for each query
    row: the largest score (peak), the sum of weights and the weighted sum of values."""
    peak = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc0 = tl.zeros([BM, DV0], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([BM, DV1], tl.float32)
    begin = tl.maximum(piece * PIECE, lo // BN * BN)
    for i in tl.range(begin, tl.minimum((piece + 1) * PIECE, hi), BN, num_stages=STAGES):
        t = i + tl.arange(0, BN)
        peak, weight, acc0, acc1 = page_step(
            t, lo, hi, q0, q1, peak, weight, acc0, acc1, last, first, image,
            K, V, KS, VS, TABLE, IDS, own, query,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, SPAN > 0, IMAGES, SOFTCAP, SCALES, LATENT, TURNED, EXACT, True,
        )  # fmt: skip
    return peak, weight, acc0, acc1


@triton.jit
def _finish(
    OUT, LSE, SINKS, VS, head_scale, token, head, mine, peak, weight, acc0, acc1, out_token, out_head, lse_token, lse_head,
    DV0: tl.constexpr, DV1: tl.constexpr, SINK: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write the results of a program's query rows to OUT and LSE. `mine` masks the rows that exist. If values have one
    scale per head, VS + `head_scale` is the address of the scale."""
    log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    if SCALES == 1:
        norm = norm * tl.load(VS + head_scale)
    if SINK:
        norm, log = with_sink(norm, log, SINKS, head, mine)
    column0 = tl.arange(0, DV0)
    into = OUT + (token * out_token + head * out_head)[:, None]
    tl.store(into + column0[None, :], (acc0 * norm[:, None]).to(OUT.dtype.element_ty), mask=mine[:, None])
    if DV1 > 0:
        column1 = DV0 + tl.arange(0, DV1)
        tl.store(into + column1[None, :], (acc1 * norm[:, None]).to(OUT.dtype.element_ty), mask=mine[:, None])
    tl.store(LSE + token * lse_token + head * lse_head, log / LOG2E, mask=mine)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["TABLES"])
def attend_by_piece(
    Q, K, V, KS, VS, OUT, LSE, ITEMS, TABLES, SINKS, IDS,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, v_column,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, out_token, out_head, lse_token, lse_head, table_row,
    scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr,
    SIZE: tl.constexpr, IMAGES: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr, SCALES: tl.constexpr,
    LATENT: tl.constexpr, TURNED: tl.constexpr, EXACT: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute attention of one block of BM query rows of one KV head, over pieces of PIECE tokens, one after
    another. Grid: (items * HEADS)."""
    kv_head = tl.program_id(0) % HEADS
    item = ITEMS + tl.program_id(0) // HEADS * ITEM_WIDTH
    table = TABLES + tl.load(item).to(tl.int64) * table_row
    row0 = tl.load(item + 1)
    query = tl.load(item + 2)
    queries = tl.load(item + 3)
    own = tl.load(item + 4)
    row = row0 + tl.arange(0, BM)
    mine = row < queries * GROUP
    at = tl.minimum(
        row // GROUP, queries - 1
    )  # query rows past the end repeat the last token and are not stored
    token = (query + at).to(tl.int64)
    last = own + at
    first = first_visible(last, SPAN, SIZE)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    q_at = token * q_token + head * q_head
    q0 = load_rows(Q, q_at, mine, DK0, 0, False)
    q1 = q0
    if DK1 > 0:
        q1 = load_rows(Q, q_at, mine, DK1, DK0, False)
    if HALF:
        q0 = q0.to(tl.float16)
        q1 = q1.to(tl.float16)
    image = last
    hi = own + tl.minimum((row0 + BM - 1) // GROUP, queries - 1) + 1
    if IMAGES:
        image = tl.load(IDS + token)
        hi = (
            own + queries
        )  # an image may end after the block's last token, but not after the step's last token
    lo = first_visible(own + row0 // GROUP, SPAN, SIZE)
    qk_scale = scale * LOG2E
    if SCALES == 1:
        qk_scale = qk_scale * tl.load(KS + kv_head * ks_head)
    peak = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc0 = tl.zeros([BM, DV0], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([BM, DV1], tl.float32)
    for piece in range(lo // PIECE, tl.cdiv(hi, PIECE)):
        top1, weight1, part0, part1 = _piece(
            piece, lo, hi, q0, q1, last, first, image,
            K + kv_head.to(tl.int64) * k_head, V + kv_head.to(tl.int64) * v_head, KS + kv_head * ks_head,
            VS + kv_head * vs_head, table, IDS, own, query,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, PIECE, SPAN, IMAGES, SOFTCAP, SCALES, LATENT, TURNED, EXACT, STAGES,
        )  # fmt: skip
        peak, weight, acc0, acc1 = _fold(peak, weight, acc0, acc1, top1, weight1, part0, part1, DV1)
    _finish(
        OUT, LSE, SINKS, VS, kv_head * vs_head, token, head, mine, peak, weight, acc0, acc1,
        out_token, out_head, lse_token, lse_head, DV0, DV1, SINK, SCALES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["LENGTHS"])
def plan_pieces(
    LENGTHS, ENDS, rows, PIECE: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr
):
    """Count the pieces (PIECE tokens each) of every sequence, and write the running sum of the counts to ENDS
    [CAPACITY]. Every sequence has one query. One program runs this kernel."""
    at = tl.arange(0, CAPACITY)
    length = tl.load(LENGTHS + at, mask=at < rows, other=0)
    first = first_visible(tl.maximum(length - 1, 0), SPAN, SIZE) // PIECE
    pieces = tl.where(length > 0, tl.cdiv(length, PIECE) - first, 0)
    tl.store(ENDS + at, tl.cumsum(pieces, 0))


@triton.jit(do_not_specialize=["table_row", "rows"], do_not_specialize_on_alignment=["TABLES", "LENGTHS"])
def attend_pieces(
    Q, K, V, KS, VS, PARTS, SUMS, ENDS, LENGTHS, TABLES, rows,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, v_column,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, table_row, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV0: tl.constexpr,
    DV1: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr,
    SIZE: tl.constexpr, SOFTCAP: tl.constexpr, SCALES: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr,
    EXACT: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Compute attention of sequences with one query, separately for each piece of PIECE tokens. Grid: (lanes,
    HEADS, blocks of BM query heads of a KV head). A lane processes several pieces.

    Writes the results of a piece to PARTS [pieces, query heads, dim] and SUMS [pieces, query heads, 2: peak,
    weight].
    """
    kv_head = tl.program_id(1)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    mine = row < GROUP
    head = (kv_head * GROUP + tl.minimum(row, GROUP - 1)).to(tl.int64)
    total = tl.load(ENDS + rows - 1)
    qk_scale = scale * LOG2E
    if SCALES == 1:
        qk_scale = qk_scale * tl.load(KS + kv_head * ks_head)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        sequence = total * 0
        beyond = sequence + rows
        for _ in range(ROUNDS):  # binary search for the first sequence whose pieces end after this piece
            middle = (sequence + beyond) // 2
            passed = tl.load(ENDS + tl.minimum(middle, rows - 1)) <= item
            sequence = tl.where(passed, middle + 1, sequence)
            beyond = tl.where(passed, beyond, middle)
        before = tl.load(ENDS + tl.maximum(sequence - 1, 0))
        before = tl.where(sequence > 0, before, 0)
        hi = tl.load(LENGTHS + sequence)
        lo = first_visible(hi - 1, SPAN, SIZE)
        last = row * 0 + hi - 1
        first = row * 0 + lo
        q_at = sequence.to(tl.int64) * q_token + head * q_head
        q0 = load_rows(Q, q_at, mine, DK0, 0, False)
        q1 = q0
        if DK1 > 0:
            q1 = load_rows(Q, q_at, mine, DK1, DK0, False)
        if HALF:
            q0 = q0.to(tl.float16)
            q1 = q1.to(tl.float16)
        top, weight, part0, part1 = _piece(
            lo // PIECE + item - before, lo, hi, q0, q1, last, first, last,
            K + kv_head.to(tl.int64) * k_head, V + kv_head.to(tl.int64) * v_head, KS + kv_head * ks_head,
            VS + kv_head * vs_head, TABLES + sequence.to(tl.int64) * table_row, LENGTHS, hi - 1, sequence,
            k_page, k_token, v_page, v_token, v_column, ks_page, ks_token, vs_page, vs_token, qk_scale, softcap,
            DK0, DK1, DV0, DV1, PAGE, BM, BN, PIECE, SPAN, False, SOFTCAP, SCALES, LATENT, TURNED, EXACT, STAGES,
        )  # fmt: skip
        place = (total * 0 + item).to(tl.int64) * (HEADS * GROUP) + head
        column0 = tl.arange(0, DV0)
        tl.store(PARTS + place[:, None] * (DV0 + DV1) + column0[None, :], part0, mask=mine[:, None])
        if DV1 > 0:
            column1 = DV0 + tl.arange(0, DV1)
            tl.store(PARTS + place[:, None] * (DV0 + DV1) + column1[None, :], part1, mask=mine[:, None])
        tl.store(SUMS + place * 2, top, mask=mine)
        tl.store(SUMS + place * 2 + 1, weight, mask=mine)


@triton.jit
def join_pieces(
    OUT, LSE, PARTS, SUMS, ENDS, SINKS, VS, vs_head, out_token, out_head, lse_token, lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, SINK: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Add the sums of each sequence's pieces in order, and write the results to OUT and LSE. Grid: (sequences,
    query heads). A sequence that sees no token gets zeros."""
    sequence = tl.program_id(0)
    head = tl.program_id(1) + tl.zeros([1], tl.int64)
    before = tl.load(ENDS + tl.maximum(sequence - 1, 0))
    before = tl.where(sequence > 0, before, 0)
    peak = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    acc0 = tl.zeros([1, DV0], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([1, DV1], tl.float32)
    column0 = tl.arange(0, DV0)
    column1 = DV0 + tl.arange(0, DV1 if DV1 > 0 else 1)
    for item in range(before, tl.load(ENDS + sequence)):
        place = (head * 0 + item) * (HEADS * GROUP) + head
        part0 = tl.load(PARTS + place[:, None] * (DV0 + DV1) + column0[None, :])
        part1 = part0
        if DV1 > 0:
            part1 = tl.load(PARTS + place[:, None] * (DV0 + DV1) + column1[None, :])
        top1 = tl.load(SUMS + place * 2)
        weight1 = tl.load(SUMS + place * 2 + 1)
        peak, weight, acc0, acc1 = _fold(peak, weight, acc0, acc1, top1, weight1, part0, part1, DV1)
    _finish(
        OUT, LSE, SINKS, VS, head // GROUP * vs_head, sequence + head * 0, head, head >= 0, peak, weight, acc0, acc1,
        out_token, out_head, lse_token, lse_head, DV0, DV1, SINK, SCALES,
    )  # fmt: skip
