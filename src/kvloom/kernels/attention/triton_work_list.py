# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The work list on the device: kernels that divide segments into tiles and units, distribute them evenly, and merge
partial results.

- A segment is a token range [lo, hi) of one sequence, with the queries that read it.
- A tile is a part of a segment: `BM` query rows. A query row is one query head of one query token.
- A unit is a part of a tile: `BN` tokens. The units of all tiles are numbered consecutively.
- A lane is an equal share of these units. For each KV head, one program processes the lane:

    segment 0          segment 1                    segment 2
    |tile 0 |tile 1 |  |tile 0        |tile 1    …
    |---- lane 0 ---|---- lane 1 ---|---- lane 2 ---|        units of a lane = ceil(units / lanes)

All heads of a lane run at the same time, so the lane reads whole pages. Starting a tile takes as long as about TOLL
units, so TOLL is added to the number of units of each tile.

The result of a tile inside one lane is written to the output. If a tile is split between lanes, each partial result is
written to `slot = tile + lane`, which is different for every part. A merge joins the parts by log-sum-exp. The device
makes the list from lengths, so a captured graph works for any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait as wait_for_launcher

from .triton_mask import first_visible, stored_tokens

__all__ = [
    "merge_levels",
    "merge_split",
    "plan_rows",
    "plan_segments",
    "plan_sources",
    "plan_visible_runs",
    "with_sink",
]

# Fields of a segment (int32). They fill one memory sector, which is read at once.
ROW: tl.constexpr = tl.constexpr(0)  # line of the block table
LO: tl.constexpr = tl.constexpr(1)  # first token
HI: tl.constexpr = tl.constexpr(2)  # end of tokens
UNITS: tl.constexpr = tl.constexpr(3)  # units of each tile, including TOLL
BASE: tl.constexpr = tl.constexpr(4)  # units before this segment
TILE: tl.constexpr = tl.constexpr(5)  # tiles before this segment
COUNT: tl.constexpr = tl.constexpr(6)  # number of query tokens
FIRST: tl.constexpr = tl.constexpr(7)  # index of the first query token, in q or in the list of members
WIDTH: tl.constexpr = tl.constexpr(8)

# Fields of a query token (int32).
POSITION: tl.constexpr = tl.constexpr(
    0
)  # index of the last token that it sees, among the tokens in its pages
OWN: tl.constexpr = tl.constexpr(1)  # position of the first query of its sequence
SEQUENCE: tl.constexpr = tl.constexpr(2)
TOKEN_WIDTH: tl.constexpr = tl.constexpr(4)

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)  # smaller scales are replaced by this one


@triton.jit
def with_sink(norm, log, SINKS, head, mine):
    """Add attention sinks to the softmax of a tile of query rows. A sink is a learned logit of a head, without a value,
    so it only increases the sum of softmax weights.

    - `SINKS` points to one sink per head.
    - `head` is the head of each row, and `mine` masks the rows that the tile really has.
    - `norm` is 1 / (sum of weights), by which the caller multiplies its weighted sum of values.
    - `log` is the base-2 logarithm of the sum of weights.

    Return the new `norm` and `log`.
    """
    sink = tl.load(SINKS + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
    top = tl.maximum(log, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    both = tl.where(top == float("-inf"), top, top + tl.log2(tl.exp2(log - safe) + tl.exp2(sink - safe)))
    return norm * tl.where(top == float("-inf"), 0.0, tl.exp2(log - both)), both


@triton.jit
def _lay_out(
    segments, places, firsts, totals, at, ok, row, lo, hi, count, first,
    LANES: tl.constexpr, LEAST: tl.constexpr, TOLL: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the segments that have work to the work list, in order.

    The outputs are:

    - `segments`: the work list.
    - `places`: the index of each segment in the work list, or -1 for a segment without work.
    - `firsts`: the first segment of each lane.
    - `totals`: three numbers. The units of all segments, the units of one lane, and the number of segments with
      queries but no keys.
    """
    some = ok & (hi > lo) & (count > 0)
    units = tl.where(some, tl.cdiv(hi - lo // PAGE * PAGE, BN) + TOLL, 0)
    tiles = tl.where(some, tl.cdiv(count * GROUP, BM), 0)
    work = units * tiles
    end = tl.cumsum(work, 0)
    total = tl.sum(work, 0)
    stretch = tl.maximum(tl.cdiv(total, LANES), LEAST)
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
    tl.store(totals + 2, tl.sum((ok & (count > 0) & ((hi > lo) == 0)).to(tl.int32), 0))
    for begin in range(0, LANES, STEP):
        lane = begin + tl.arange(0, STEP)
        passed = (end[None, :] <= (lane * stretch)[:, None]) & some[None, :]
        tl.store(firsts + lane, tl.sum(passed.to(tl.int32), 1), mask=lane < LANES)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["starts", "lengths"])
def plan_rows(
    starts, lengths, begin, segments, places, firsts, totals, tokens, sequences,
    LANES: tl.constexpr, LEAST: tl.constexpr, TOLL: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, ROOM: tl.constexpr, BEGIN: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Make the work list with one segment per sequence: the tokens that the queries of the sequence see. With BEGIN,
    the segment of a sequence starts at token `begin[sequence]` or later. Shared segments have the tokens before it.
    Also writes the fields of each query token to `tokens`. One program runs this kernel, once per step.

    If blocks are divided between RANKS ranks, segments and positions count only the tokens of this rank (see
    `stored_tokens`)."""
    at = tl.arange(0, CAPACITY)
    ok = at < sequences
    first = tl.load(starts + at, mask=ok, other=0)
    count = tl.minimum(tl.load(starts + at + 1, mask=ok, other=0) - first, QUERIES)
    length = tl.load(lengths + at, mask=ok, other=0)
    own = length - count
    lo = first_visible(tl.maximum(own, 0), SPAN, SIZE)
    if BEGIN:
        lo = tl.maximum(lo, tl.load(begin + at, mask=ok, other=0))
    _lay_out(
        segments, places, firsts, totals, at, ok, at, lo, stored_tokens(length, PAGE, RANK, RANKS), count, first,
        LANES, LEAST, TOLL, GROUP, PAGE, BM, BN, STEP,
    )  # fmt: skip
    for i in range(QUERIES):
        mine = ok & (i < count) & (first + i < ROOM)
        token = tokens + (first + i) * TOKEN_WIDTH
        tl.store(token + POSITION, stored_tokens(own + i + 1, PAGE, RANK, RANKS) - 1, mask=mine)
        tl.store(token + OWN, own, mask=mine)
        tl.store(token + SEQUENCE, at, mask=mine)


@triton.jit
def plan_visible_runs(
    given, number, members, tokens, seen, SPAN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Shorten the segments in `given` to the tokens that the windows of their members see, and write them to `seen`. A
    member is a query that reads the segment. A shortened segment starts at the first token that any member sees.

    The shortened segment uses the block table of the member that sees this token. Only this block table still has all
    pages of the segment. One program runs for each segment.
    """
    at = tl.program_id(0)
    if at < tl.load(number):
        source = given + at * 5
        count = tl.load(source + 3)
        first = tl.load(source + 4)
        position = tl.full([BLOCK], 2147483647, tl.int32)
        token = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, count, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            each = tl.load(members + first + i, mask=i < count, other=0)
            there = tl.load(tokens + each * TOKEN_WIDTH + POSITION, mask=i < count, other=2147483647)
            token = tl.where(there < position, each, token)
            position = tl.minimum(position, there)
        least = tl.min(position, 0)
        furthest = tl.max(tl.where(position == least, token, 0), 0)
        into = seen + at * 5
        tl.store(into, tl.load(tokens + furthest * TOKEN_WIDTH + SEQUENCE))
        tl.store(into + 1, tl.maximum(tl.load(source + 1), first_visible(least, SPAN, SIZE)))
        tl.store(into + 2, tl.load(source + 2))
        tl.store(into + 3, count)
        tl.store(into + 4, first)


@triton.jit
def plan_segments(
    given, number, segments, places, firsts, totals,
    LANES: tl.constexpr, LEAST: tl.constexpr, TOLL: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAPACITY: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Make the work list of the segments in `given` [capacity, 5]. Its columns are: line of the block table, first
    token, end of tokens, number of queries, first query. `number` points to the number of segments, in device
    memory.

    The outputs are `segments` (the work list), `places`, `firsts` and `totals`, as in `_lay_out`.
    """
    at = tl.arange(0, CAPACITY)
    ok = at < tl.load(number)
    source = given + at * 5
    _lay_out(
        segments, places, firsts, totals, at, ok,
        tl.load(source, mask=ok, other=0), tl.load(source + 1, mask=ok, other=0),
        tl.load(source + 2, mask=ok, other=0), tl.load(source + 3, mask=ok, other=0),
        tl.load(source + 4, mask=ok, other=0),
        LANES, LEAST, TOLL, GROUP, PAGE, BM, BN, STEP,
    )  # fmt: skip


@triton.jit
def _join(
    PART, PART_LSE, units, base, tiles, stretch, row, head, peak, weight, acc, column, fits,
    HEADS: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add all partial results of one query row to a running softmax. Every lane that reads tokens of the row's tile
    has written one partial result."""
    tile = row // BM
    begin = base + tile * units
    last = (begin + units - 1) // stretch
    for i in range(begin // stretch, last + 1, CHUNK):
        lane = i + tl.arange(0, CHUNK)
        ok = lane <= last
        piece = ((tiles + tile + lane).to(tl.int64) * HEADS + head) * BM + row % BM
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
    OUT, LSE, SINKS, token, head, peak, weight, acc, column, fits, out_token, out_head, lse_token, SINK: tl.constexpr
):  # fmt: skip
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        safe = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(peak - safe)
        weight = weight * fade + tl.exp2(sink - safe)
        acc = acc * fade
        peak = top
    norm = tl.where(weight > 0, 1.0 / weight, 0.0)
    log = tl.where(weight > 0, (peak + tl.log2(weight)) / LOG2E, float("-inf"))
    into = OUT + token.to(tl.int64) * out_token + head * out_head
    tl.store(into + column, (acc * norm).to(OUT.dtype.element_ty), mask=fits)
    tl.store(LSE + token * lse_token + head, log)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["STARTS"])
def merge_split(
    OUT, LSE, PART, PART_LSE, SEGMENTS, PLACES, FIRSTS, TOTALS, STARTS, SINKS, sequences,
    out_token, out_head, lse_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    SINK: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of split tiles (tiles whose tokens several lanes read). There is one program for each
    combination of a boundary between lanes, a KV head and a query row of a tile. A sequence that sees no token gets
    zeros.

    A tile may cross several boundaries. Only the program of the first boundary merges the tile. The programs of the
    other boundaries return. Programs are small, so that all of them fit on the device while the previous launch still
    runs.
    """
    cut = tl.program_id(0) + 1
    head = tl.program_id(1)
    place = tl.program_id(2)
    column = tl.arange(0, COLUMNS)
    fits = column < DV
    nothing = tl.zeros([COLUMNS], tl.float32)
    zero = tl.sum(nothing, 0)
    none = zero + float("-inf")
    if tl.load(TOTALS + 2) > 0:
        for s in range(tl.program_id(0), sequences, LANES):
            if tl.load(PLACES + s) < 0:
                first = tl.load(STARTS + s)
                for i in range(tl.load(STARTS + s + 1) - first):
                    for row in range(place, GROUP, tl.num_programs(2)):
                        _finish(
                            OUT, LSE, SINKS, first + i, head * GROUP + row, none, zero, nothing, column, fits,
                            out_token, out_head, lse_token, SINK,
                        )  # fmt: skip
    stretch = tl.load(TOTALS + 1)
    unit = cut * stretch
    if cut < LANES and unit < tl.load(TOTALS):
        segment = SEGMENTS + tl.load(FIRSTS + cut) * WIDTH
        units = tl.load(segment + UNITS)
        base = tl.load(segment + BASE)
        count = tl.load(segment + COUNT)
        tile = (unit - base) // units
        begin = base + tile * units
        row = tile * BM + place
        if begin < unit and begin >= unit - stretch and row < count * GROUP:
            token = tl.load(segment + FIRST) + row // GROUP
            tiles = tl.load(segment + TILE)
            if OVERLAP:
                wait_for_launcher()
            peak, weight, acc = _join(
                PART, PART_LSE, units, base, tiles, stretch, row, head, none, zero, nothing, column, fits,
                HEADS, DV, BM, CHUNK,
            )  # fmt: skip
            _finish(
                OUT, LSE, SINKS, token, head * GROUP + row % GROUP, peak, weight, acc, column, fits,
                out_token, out_head, lse_token, SINK,
            )  # fmt: skip
    if OVERLAP:
        # Wait even if there is nothing to merge, because the next launch assumes that the previous one has ended.
        wait_for_launcher()


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["STARTS"])
def plan_sources(
    SEGMENTS, PLACES, S_SEGMENTS, S_PLACES, LEVELS, TOKENS, STARTS, SOURCES, sequences, rows, count,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the segments (token ranges of the work list) that contain results of each query token: first its own
    segment, then its shared segments. Writes SOURCES [tokens, 1 + depth, 4]. Each segment has four numbers:

    - its units, or 0 if there is no segment,
    - the units before it,
    - the tiles before it,
    - the index of the token in the segment.

    LEVELS ([depth, sequences, 2]) has two numbers for each level and sequence: the shared segment (-1 for none), and
    the index of the sequence's first query in this segment.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = token < count
    s = tl.load(TOKENS + token * TOKEN_WIDTH + SEQUENCE, mask=ok, other=0)
    # Tokens after the last token of this step are from an earlier step. They get no source.
    known = ok & (s < rows)
    i = token - tl.load(STARTS + s, mask=known, other=0)
    known = known & (i >= 0) & (token < tl.load(STARTS + s + 1, mask=known, other=0))
    place = tl.load(PLACES + s, mask=known, other=-1)
    into = SOURCES + token * (1 + DEPTH) * 4
    _source(into, SEGMENTS + place * WIDTH, i, ok, place >= 0)
    for level in range(DEPTH):
        named = LEVELS + (level * sequences + s) * 2
        shared = tl.load(named, mask=known, other=-1)
        some = ok & (shared >= 0)
        place = tl.load(S_PLACES + shared, mask=some, other=-1)
        i_shared = i + tl.load(named + 1, mask=some, other=0)
        _source(into + (1 + level) * 4, S_SEGMENTS + place * WIDTH, i_shared, ok, some & (place >= 0))


@triton.jit
def _source(into, segment, i, ok, some):
    tl.store(into, tl.load(segment + UNITS, mask=some, other=0), mask=ok)
    tl.store(into + 1, tl.load(segment + BASE, mask=some, other=0), mask=ok)
    tl.store(into + 2, tl.load(segment + TILE, mask=some, other=0), mask=ok)
    tl.store(into + 3, i, mask=ok)


@triton.jit
def merge_levels(
    OUT, LSE, PART, PART_LSE, TOTALS, S_PART, S_PART_LSE, S_TOTALS, SOURCES, SINKS, out_token, out_head, lse_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    S_BM: tl.constexpr, DEPTH: tl.constexpr, SINK: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the results of each query token and head. A query token has results in its own segment (token range of
    the work list), and in every shared segment that it reads."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    fits = column < DV
    source = SOURCES + token * (1 + DEPTH) * 4
    stretch = tl.load(TOTALS + 1)
    s_stretch = tl.load(S_TOTALS + 1)
    acc = tl.zeros([COLUMNS], tl.float32)
    weight = tl.sum(acc, 0)
    peak = weight + float("-inf")
    if OVERLAP:
        wait_for_launcher()
    for level in tl.static_range(1 + DEPTH):
        units = tl.load(source + level * 4)
        base = tl.load(source + level * 4 + 1)
        tiles = tl.load(source + level * 4 + 2)
        row = tl.load(source + level * 4 + 3) * GROUP + head % GROUP
        if units > 0:
            if level == 0:
                peak, weight, acc = _join(
                    PART, PART_LSE, units, base, tiles, stretch, row, head // GROUP, peak, weight, acc, column, fits,
                    HEADS, DV, BM, CHUNK,
                )  # fmt: skip
            else:
                peak, weight, acc = _join(
                    S_PART, S_PART_LSE, units, base, tiles, s_stretch, row, head // GROUP, peak, weight, acc,
                    column, fits, HEADS, DV, S_BM, CHUNK,
                )  # fmt: skip
    _finish(
        OUT, LSE, SINKS, token, head, peak, weight, acc, column, fits, out_token, out_head, lse_token, SINK
    )
