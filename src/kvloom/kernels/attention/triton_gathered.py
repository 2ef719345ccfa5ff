# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Prefill over gathered K and V: the kernels that copy pages, compute attention by tensor descriptors, and merge
batches.

`triton_prefill` defines query rows and blocks. The host passes three int32 lists. Each item of a list has these
fields:

| list   | fields                                                                                               |
|--------|------------------------------------------------------------------------------------------------------|
| spans  | first query row, first query, number of queries, position of the first query, first token in K,      |
|        | number of tokens                                                                                     |
| copies | line of the block table, first token in the pages, number of tokens in the pages, first token in the |
|        | copy, number of tokens in the copy                                                                   |
| places | index in the batch, first token in the batch, number of queries, first packed query                  |
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mask import first_visible
from .triton_prefill import softmax_step
from .triton_units import load_rows
from .triton_work_list import LOG2E, with_sink

__all__ = ["attend_gathered", "gather_pages", "merge_parts"]

SPAN_WIDTH: tl.constexpr = tl.constexpr(6)
COPY_WIDTH: tl.constexpr = tl.constexpr(5)
PLACE_WIDTH: tl.constexpr = tl.constexpr(4)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["TABLES"])
def gather_pages(
    K, V, K_OUT, V_OUT, COPIES, TABLES, k_page, k_token, k_head, v_page, v_token, v_head, v_column, ko_token, vo_token, table_row,
    DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Copy tokens from pages to contiguous K and V, [tokens, heads, dim]. Grid: (copies, heads / EACH, 2 for K and
    V).

    Tokens without a page are set to 0. Uninitialised memory could contain NaN, and NaN times a softmax weight of 0
    is still NaN.
    """
    copy = COPIES + tl.program_id(0) * COPY_WIDTH
    table = TABLES + tl.load(copy).to(tl.int64) * table_row
    t = tl.load(copy + 1) + tl.arange(0, TOKENS)
    there = tl.arange(0, TOKENS) < tl.load(copy + 2)
    into = tl.load(copy + 3).to(tl.int64) + tl.arange(0, TOKENS)
    wanted = tl.arange(0, TOKENS) < tl.load(copy + 4)
    page = tl.load(table + t // PAGE, mask=there, other=0).to(tl.int64)
    slot = t % PAGE
    column = tl.arange(0, COLUMNS)
    for i in tl.static_range(EACH):
        head = tl.program_id(1) * EACH + i
        if tl.program_id(2) == 0:
            fits = (column < DK)[None, :]
            source = K + (page * k_page + slot * k_token)[:, None] + head * k_head + column[None, :]
            found = tl.load(source, mask=there[:, None] & fits, other=0.0)
            target = K_OUT + (into * ko_token)[:, None] + head * DK + column[None, :]
            tl.store(target, found, mask=wanted[:, None] & fits)
        else:
            fits = (column < DV)[None, :]
            source = (
                V + (page * v_page + slot * v_token)[:, None] + head * v_head + column[None, :] * v_column
            )
            found = tl.load(source, mask=there[:, None] & fits, other=0.0)
            target = V_OUT + (into * vo_token)[:, None] + head * DV + column[None, :]
            tl.store(target, found, mask=wanted[:, None] & fits)


@triton.jit
def _gathered_step(
    i, t0, k_at, v_at, q0, q1, peak, weight, acc, first, last, end, factor, K0, K1, V,
    DK0: tl.constexpr, DK1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CHECK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add one tile, the BN tokens from `i` on, to the running softmax of a block of query rows. With CHECK, scores are
    masked, because some query rows do not see every token. With LAST, the sequence may end inside the tile, so the tile
    may contain tokens of the next sequence.
    """
    scores = tl.dot(q0, K0.load([t0 + i, k_at]).T, tl.zeros([BM, BN], tl.float32))
    if DK1 > 0:
        scores = tl.dot(q1, K1.load([t0 + i, k_at + DK0]).T, scores)
    t = i + tl.arange(0, BN)
    if CHECK:
        seen = (t[None, :] <= last[:, None]) & (t < end)[None, :]
        if WINDOW:
            seen = seen & (t[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    p, fade, peak, weight = softmax_step(scores, factor, peak, weight, False, CHECK)
    weight += tl.sum(p, 1)
    values = V.load([t0 + i, v_at])
    if LAST:
        # Tokens after the end belong to another sequence or are unwritten. They may be NaN, which a weight
        # of 0 would not remove.
        values = tl.where((t < end)[:, None], values, 0.0)
    acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None])
    return peak, weight, acc


@triton.jit
def attend_gathered(
    Q, K0, K1, V, OUT, LSE, LIST, SINKS, q_token, q_head, out_token, out_head, lse_token, lse_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, FEW: tl.constexpr, SINK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute attention of blocks of query rows over K and V. Both are stored as [tokens, heads * dim] and read by
    tensor descriptors. Grid: (blocks * HEADS).

    Position 0 is the first gathered token of a sequence. With a sliding window, the first gathered token is the first
    one that the first query sees. With FEW, the window has few tiles, so one loop masks every tile.
    """
    head = tl.program_id(0) % HEADS
    block = LIST + tl.program_id(0) // HEADS * SPAN_WIDTH
    row0 = tl.load(block)
    query = tl.load(block + 1)
    queries = tl.load(block + 2)
    own = tl.load(block + 3)
    t0 = tl.load(block + 4)
    tokens = tl.load(block + 5)
    end = tokens
    row = row0 + tl.arange(0, BM)
    mine = row < queries * GROUP
    at = tl.minimum(row // GROUP, queries - 1)
    token = (query + at).to(tl.int64)
    q_head_of = (head * GROUP + row % GROUP).to(tl.int64)
    q_at = token * q_token + q_head_of * q_head
    q0 = load_rows(Q, q_at, mine, DK0, 0, False)
    q1 = q0
    if DK1 > 0:
        q1 = load_rows(Q, q_at, mine, DK1, DK0, False)
    last = own + at
    first = first_visible(last, SPAN, SIZE)
    begin = 0
    all_from = 0  # every query row of the block sees the tokens in [all_from, all_to)
    all_to = end
    if CAUSAL:
        final = own + tl.minimum((row0 + BM - 1) // GROUP, queries - 1)
        all_to = tl.maximum(tl.minimum(end, own + row0 // GROUP + 1), 0)
        end = tl.minimum(end, final + 1)
        if SPAN > 0:
            begin = first_visible(own + row0 // GROUP, SPAN, SIZE)
            all_from = first_visible(final, SPAN, SIZE)
    else:
        last = at * 0 + end
    rest = begin + (tokens - begin) // BN * BN  # the last tokens of the sequence, less than one tile
    clear_from = tl.minimum(begin + tl.cdiv(all_from - begin, BN) * BN, rest)
    clear_to = tl.maximum(begin + (all_to - begin) // BN * BN, clear_from)
    if FEW:
        clear_from = tl.minimum(end, rest)
    peak = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    factor = scale * LOG2E
    k_at = head * (DK0 + DK1)
    v_at = head * DV
    if SPAN > 0:
        for i in tl.range(begin, clear_from, BN, num_stages=STAGES):
            peak, weight, acc = _gathered_step(
                i, t0, k_at, v_at, q0, q1, peak, weight, acc, first, last, end, factor, K0, K1, V,
                DK0, DK1, BM, BN, True, True, False,
            )  # fmt: skip
    # If registers are scarce, the last tile runs separately, so that the loops before it need fewer
    # registers.
    APART: tl.constexpr = FEW or DV > 128
    if not FEW:
        for i in tl.range(clear_from, clear_to, BN, num_stages=STAGES):
            peak, weight, acc = _gathered_step(
                i, t0, k_at, v_at, q0, q1, peak, weight, acc, first, last, end, factor, K0, K1, V,
                DK0, DK1, BM, BN, False, False, False,
            )  # fmt: skip
        for i in tl.range(clear_to, tl.minimum(end, rest) if APART else end, BN, num_stages=STAGES):
            peak, weight, acc = _gathered_step(
                i, t0, k_at, v_at, q0, q1, peak, weight, acc, first, last, end, factor, K0, K1, V,
                DK0, DK1, BM, BN, SPAN > 0, True, not APART,
            )  # fmt: skip
    if APART:
        if rest < end:
            peak, weight, acc = _gathered_step(
                rest, t0, k_at, v_at, q0, q1, peak, weight, acc, first, last, end, factor, K0, K1, V,
                DK0, DK1, BM, BN, SPAN > 0, True, True,
            )  # fmt: skip
    log = tl.where(weight > 0, peak + tl.log2(weight), float("-inf"))
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    if SINK:
        norm, log = with_sink(norm, log, SINKS, q_head_of, mine)
    into = OUT + (token * out_token + q_head_of * out_head)[:, None] + tl.arange(0, DV)[None, :]
    tl.store(into, (acc * norm[:, None]).to(OUT.dtype.element_ty), mask=mine[:, None])
    tl.store(LSE + token * lse_token + q_head_of * lse_head, log / LOG2E, mask=mine)


@triton.jit(do_not_specialize=["a_batch", "al_batch", "b_batch", "bl_batch"])
def merge_parts(
    A, A_LSE, B, B_LSE, OUT, LSE, PLACES, SINKS,
    a_batch, a_token, a_head, al_batch, al_token, al_head, b_batch, b_token, b_head, bl_batch, bl_token, bl_head,
    out_token, out_head, lse_token, lse_head,
    HEADS: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BOTH: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Merge the attention results A and B over two sets of tokens, weighted by their natural log-sum-exps. Reads
    [batch, token, head] and writes packed queries [token, head]. Without BOTH, A is copied and B is not read. With
    SINK, the sinks are added to the softmax.

    Grid: (longest * HEADS / ROWS rounded up, places). `places` is the number of items in PLACES, and `longest` the
    largest number of queries of an item.
    """
    place = PLACES + tl.program_id(1) * PLACE_WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = row // HEADS
    head = row % HEADS
    mine = i < tl.load(place + 2)
    column = tl.arange(0, COLUMNS)
    fits = mine[:, None] & (column < DV)[None, :]
    batch = tl.load(place).to(tl.int64)
    at = (tl.load(place + 1) + i).to(tl.int64)
    log = tl.load(A_LSE + batch * al_batch + at * al_token + head * al_head, mask=mine, other=0.0) * LOG2E
    found = A + (batch * a_batch + at * a_token + head * a_head)[:, None] + column[None, :]
    acc = tl.load(found, mask=fits, other=0.0).to(tl.float32)
    norm = tl.full([ROWS], 1.0, tl.float32)
    if BOTH:
        log_b = (
            tl.load(B_LSE + batch * bl_batch + at * bl_token + head * bl_head, mask=mine, other=0.0) * LOG2E
        )
        found = B + (batch * b_batch + at * b_token + head * b_head)[:, None] + column[None, :]
        values = tl.load(found, mask=fits, other=0.0).to(tl.float32)
        top = tl.maximum(log, log_b)
        safe = tl.where(top == float("-inf"), 0.0, top)
        share = tl.exp2(log - safe)
        share_b = tl.exp2(log_b - safe)
        total = share + share_b
        acc = acc * share[:, None] + values * share_b[:, None]
        norm = tl.where(total > 0, 1.0 / total, 0.0)
        log = tl.where(total > 0, safe + tl.log2(total), float("-inf"))
    if SINK:
        norm, log = with_sink(norm, log, SINKS, head, mine)
    token = (tl.load(place + 3) + i).to(tl.int64)
    into = OUT + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(into, (acc * norm[:, None]).to(OUT.dtype.element_ty), mask=fits)
    tl.store(LSE + token * lse_token + head * lse_head, log / LOG2E, mask=mine)
