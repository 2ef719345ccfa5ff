"""The work lists of prefill, and the choice of a backend. This module works on host arrays. It launches nothing and
does not import Triton.

| backend     | reads                           | supports                                                   |
|-------------|---------------------------------|------------------------------------------------------------|
| pages       | pages in place                  | everything                                                 |
| descriptors | a contiguous copy per sequence  | half precision; windows, chunks, sinks; any mix of lengths |
| cudnn       | a contiguous copy per sequence, | half precision; sinks. Runs torch's cuDNN operator, which  |
|             | in batches of equal size        | is the fastest for large batches                           |

- To gather is to copy tokens from pages to contiguous memory. If the layer has a window, only the tokens that some
  query of the step sees are gathered.
- If no sequence of a step is longer than the window, attention is treated as full.
- cuDNN takes 40 milliseconds on the host to plan a new size. It is therefore used only for round sizes (see
  `cudnn_batches`). The chunks of a prompt often have the same round size, so such a plan is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import WHOLE, ContextPart, Visibility

from .shape import Shape

__all__ = [
    "Backend",
    "BlockTile",
    "CudnnBatch",
    "QueryRows",
    "block_list",
    "choose_backend",
    "choose_gathered_tile",
    "choose_tile",
    "copy_list",
    "cudnn_batches",
    "span_list",
]

Backend = Literal["pages", "descriptors", "cudnn"]
Ints = npt.NDArray[np.int64]
Lists = npt.NDArray[np.int32]

HALF_DTYPES = (torch.bfloat16, torch.float16)
GATHERED_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Head dimensions (keys, values) that the kernels over gathered tokens support."""
MIN_CUDNN_TILES = 512
"""Smallest number of tiles (128 queries of one head) in each cuDNN batch. With fewer tiles, some multiprocessors
would be idle."""
MIN_CUDNN_PAIRS = 1 << 26
"""Smallest number of query-key pairs, over all heads, that is worth a cuDNN plan for a new size."""
MAX_CUDNN_BATCHES = 4
"""Largest number of cuDNN batches in a step. With more batches, one launch over all gathered sequences is faster."""
MIN_GATHERED_PAIRS = 1 << 26
"""Pages are gathered only for at least this many query-key pairs, over all heads. With fewer pairs, the extra
launches cost more than they save."""
MIN_GATHERED_PAIRS_WIDE = 1 << 24
"""Used instead of MIN_GATHERED_PAIRS for heads of more than 128 dims, which are slower over pages."""
MANY_VISIBLE_TOKENS = 2048
"""For heads of up to 64 dims, descriptors are faster than cuDNN if queries see at least this many tokens on
average."""
NARROW_WINDOW = 128
"""Windows of at most this many tokens are narrow. In a narrow window, heads of up to 64 dims use tiles with fewer
tokens."""
MIN_GATHERED_QUERIES = 64
"""Sequences with fewer queries are computed over pages, because gathering would cost more than their attention."""
COPY_TOKENS = 64
MIN_PIECE_UNITS = 4
"""Smallest number of units in one piece of a split block. A unit is the number of tokens that the kernel reads at a
time."""
SMALL_ROWS = 16
"""A sequence with at most this many query rows per KV head gets small tiles, even if other sequences get large tiles.
A query row is one query head of one query token."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The sequences of a step, on the host.

    - `starts` has the index in q of each sequence's first query.
    - `lengths` is the number of tokens of each sequence, including its queries.
    - `context_lengths` is the number of tokens before the queries.
    """

    starts: Ints
    lengths: Ints

    @classmethod
    def from_lists(cls, starts: Sequence[int] | Ints, lengths: Sequence[int] | Ints) -> QueryRows:
        rows = cls(np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64))
        if rows.starts.ndim != 1 or rows.starts.shape[0] != rows.lengths.shape[0] + 1:
            raise ValueError(
                f"{rows.starts.shape[0]} starts for {rows.lengths.shape[0]} lengths: give one more start than lengths"
            )
        if rows.starts[0] != 0 or (np.diff(rows.starts) < 0).any():
            raise ValueError(f"starts must begin with 0 and never fall, got {rows.starts[:8].tolist()}…")
        return rows

    @property
    def queries(self) -> Ints:
        return np.diff(self.starts)

    @property
    def context_lengths(self) -> Ints:
        return self.lengths - self.queries

    def count_pairs(self, span: Visibility, chosen: Ints | slice = slice(None)) -> int:
        """Return the number of query-key pairs of the `chosen` sequences, for one head. A pair is a query and a
        token that the query sees."""
        lengths, context_lengths = self.lengths[chosen], np.maximum(self.context_lengths[chosen], 0)
        return int((_count_visible_pairs(span, lengths) - _count_visible_pairs(span, context_lengths)).sum())

    def mean_visible(self, span: Visibility, chosen: Ints | slice = slice(None)) -> float:
        """Return the mean number of tokens that a query of the `chosen` sequences sees."""
        return self.count_pairs(span, chosen) / max(1, int(self.queries[chosen].sum()))

    def sees_all_context(self, span: Visibility) -> bool:
        """Return whether every query sees all earlier tokens. This is true for full attention, or if no sequence is
        longer than the window.
        """
        last = self.lengths[self.queries > 0]
        return not bool((span.first_visible_each(np.maximum(last - 1, 0)) > 0).any())


@dataclass(frozen=True, slots=True)
class BlockTile:
    """The size and launch parameters of a block. A block has `rows` query rows, and reads `tokens` tokens at a time.
    `programs_per_processor` programs run on a multiprocessor, with `warps` warps and `stages` pipeline stages each.
    `registers` limits the registers of a thread."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs_per_processor: int = 2
    registers: int | None = None


def choose_tile(shape: Shape, rows: int, dtype: torch.dtype = torch.bfloat16) -> BlockTile:
    """Return the tile for attention over pages, for sequences with `rows` query rows per KV head."""
    wide = max(shape.k_dim, shape.v_dim)
    if dtype == torch.float32:  # multiplied from registers, without tensor cores
        return BlockTile(16, 16, 4, 2, 2)
    if wide > 256:
        return BlockTile(16 if rows <= SMALL_ROWS else 64, 32, 8, 2, 1)
    if rows <= SMALL_ROWS:
        return BlockTile(16, 64 if wide <= 128 else 32, 4, 3, 4)
    if wide > 128:
        return BlockTile(64, 32, 4, 3, 2)
    return BlockTile(128, 64, 4, 3, 2)


def choose_gathered_tile(k_dim: int, span: Visibility, seen: float = 0.0) -> BlockTile:
    """Return the tile for attention over gathered tokens. `seen` is the mean number of tokens that a query sees.

    Heads of more than 128 dims need 8 warps, because the registers of 4 warps are too few for the outputs of a
    block. A tile usually reads 64 tokens at a time. For heads of up to 64 dims, it reads 128 tokens if queries see
    many tokens, and 32 tokens in a narrow window.
    """
    if k_dim <= 64 and span.windowed and span.size <= NARROW_WINDOW:
        return BlockTile(64, 32, 4, 3, 3)
    if k_dim <= 64 and seen >= MANY_VISIBLE_TOKENS:
        return BlockTile(64, 128, 4, 2, 3, 168)
    if k_dim <= 128:
        return BlockTile(64, 64, 4, 3, 2)
    return BlockTile(128, 64, 8, 3 if k_dim <= 192 else 2, 1)


def choose_backend(
    shape: Shape,
    rows: QueryRows,
    chosen: Ints,
    dtype: torch.dtype,
    span: Visibility,
    plain: bool,
    cudnn: bool,
) -> Backend:
    """Return the backend for the `chosen` sequences, which have many queries. All other sequences run over pages.

    - `span` is the visibility rule of the layer, or full if no sequence is longer than the window.
    - `plain` means that there is no softcap, no image and no scale.
    - `cudnn` states whether cuDNN is available.
    """
    gathers = (
        plain
        and (shape.k_dim, shape.v_dim) in GATHERED_DIMS
        and dtype in HALF_DTYPES
        and shape.dtype == dtype
    )
    if not gathers or not len(chosen):
        return "pages"
    pairs = rows.count_pairs(span, chosen) * shape.heads
    many = shape.k_dim <= 64 and rows.mean_visible(span, chosen) >= MANY_VISIBLE_TOKENS
    if cudnn and not span.windowed and pairs >= MIN_CUDNN_PAIRS and not many:
        groups = cudnn_batches(rows, chosen)
        tiles = [len(group.rows) * shape.heads * -(-group.queries // 128) for group in groups]
        if 0 < len(groups) <= MAX_CUDNN_BATCHES and min(tiles) >= MIN_CUDNN_TILES:
            return "cudnn"
    return (
        "descriptors"
        if pairs >= (MIN_GATHERED_PAIRS_WIDE if shape.k_dim > 128 else MIN_GATHERED_PAIRS)
        else "pages"
    )


def block_list(
    rows: QueryRows,
    chosen: Ints,
    group: int,
    heads: int,
    span: Visibility,
    tile: BlockTile,
    programs: int,
    reach: Ints | None,
    part: ContextPart = WHOLE,
    page_tokens: int = 1,
) -> tuple[Lists, Lists, int]:
    """Return three values for the kernels over pages: the blocks of the `chosen` sequences, longest first; the list of
    merges of split blocks; and the number of slots for partial results. A block is a group of query rows.

    Long blocks are split until about `programs` programs can run at the same time. `heads` is the number of KV heads,
    and `group` the number of query heads per KV head. `reach` contains, for each query of an image, the last token of
    the image. `part` is the part of each block that pages of `page_tokens` tokens contain. The blocks then count only
    the tokens of this part.
    """
    queries, context_lengths = rows.queries[chosen], rows.context_lengths[chosen]
    times = -(-queries * group // tile.rows)
    row = chosen.repeat(times)
    row0 = _index_within(times) * tile.rows
    count, own = queries.repeat(times), context_lengths.repeat(times)
    begin, end = row0 // group, np.minimum((row0 + tile.rows - 1) // group, count - 1)
    hi = own + end + 1
    if reach is not None and len(row):
        first = rows.starts[row]
        bounds = np.stack((first + begin, first + end + 1), 1).ravel()
        hi = np.maximum(hi, np.maximum.reduceat(np.append(reach, -1), bounds)[::2] + 1)
    hi = np.clip(hi, 0, rows.lengths[row])
    if part != WHOLE:
        hi = part.stored(hi, page_tokens)
    lo = np.minimum(span.first_visible_each(np.maximum(own + begin, 0)), hi)
    units = -(-(hi - lo // 16 * 16) // tile.tokens)
    limit = max(MIN_PIECE_UNITS, int(-(-units.sum() * heads // programs)))
    # a block that is only slightly too long is not split
    per = -(-units // np.maximum((units + limit // 2) // limit, 1))
    pieces = np.maximum(-(-units // np.maximum(per, 1)), 1)
    slots = np.where(pieces > 1, np.cumsum(np.where(pieces > 1, pieces, 0)) - pieces, -1)
    joins = np.stack((slots, pieces, row0, rows.starts[row], count), 1)[pieces > 1]
    piece = _index_within(pieces)
    of = np.arange(len(row)).repeat(pieces)
    origin = (lo // 16 * 16)[of]
    step = (per * tile.tokens)[of]
    p_lo = np.maximum(lo[of], origin + piece * step)
    p_hi = np.minimum(hi[of], origin + (piece + 1) * step)
    slot = np.where(slots[of] < 0, -1, slots[of] + piece)
    items = np.stack((row[of], p_lo, p_hi, row0[of], rows.starts[row][of], count[of], own[of], slot), 1)
    order = np.argsort(p_lo - p_hi, kind="stable")
    return items[order].astype(np.int32), joins.astype(np.int32), int((slot >= 0).sum())


def span_list(
    queries: Ints,
    firsts: Ints,
    context_lengths: Ints,
    bases: Ints,
    tokens: Ints,
    group: int,
    rows: int,
    causal: bool,
    span: Visibility,
) -> Lists:
    """Return the list of blocks (groups of query rows) for `attend_gathered`, longest blocks first.

    Each array has one value per sequence:

    - `queries`: the number of queries.
    - `firsts`: the index in q of the first query.
    - `bases`: the index of the sequence's first token in the gathered K and V.
    - `tokens`: the number of gathered tokens.
    - `context_lengths`: how many of the gathered tokens precede the queries.

    `rows` is the number of query rows of a block, and `group` the number of query heads per KV head.
    """
    times = -(-queries * group // rows)
    row0 = _index_within(times) * rows
    columns = (row0, *(x.repeat(times) for x in (firsts, queries, context_lengths, bases, tokens)))
    items = np.stack(columns, 1)
    seen = items[:, 5]
    if causal:
        at = np.maximum(items[:, 3] + row0 // group, 0)
        seen = at - span.first_visible_each(at)
    return items[np.argsort(-seen, kind="stable")].astype(np.int32)


def copy_list(table_rows: Ints, begins: Ints, ends: Ints, into: Ints, sizes: Ints) -> Lists:
    """Return the copy list for `gather_pages`. Every array has one value per copy. A copy reads the tokens
    [begins, ends) of the sequence in row `table_rows` of the block table. It writes `sizes` tokens to the
    target, from token `into` on. If it reads fewer tokens than it writes, zeros fill the rest."""
    times = -(-sizes // COPY_TOKENS)
    offset = _index_within(times) * COPY_TOKENS
    there = np.clip((ends - begins).repeat(times) - offset, 0, COPY_TOKENS)
    wanted = np.minimum(sizes.repeat(times) - offset, COPY_TOKENS)
    columns = (
        table_rows.repeat(times),
        begins.repeat(times) + offset,
        there,
        into.repeat(times) + offset,
        wanted,
    )
    return np.stack(columns, 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CudnnBatch:
    """One cuDNN batch: consecutive sequences of the step (`rows`) with the same number of context tokens
    (`context`) and the same number of `queries`."""

    rows: Ints
    context: int
    queries: int


def cudnn_batches(rows: QueryRows, chosen: Ints) -> list[CudnnBatch]:
    """Group neighbouring sequences among `chosen` with equal numbers of queries and context tokens into batches. Return
    an empty list if any of these numbers is not round. `_even_size` returns a unit for each number. A number is round
    if it is a multiple of its unit."""
    queries, context_lengths = rows.queries[chosen], rows.context_lengths[chosen]
    if (context_lengths % _even_size(context_lengths, 16)).any() or (queries % _even_size(queries, 32)).any():
        return []
    follows = (
        (np.diff(rows.starts[chosen]) == queries[:-1])
        & (np.diff(queries) == 0)
        & (np.diff(context_lengths) == 0)
    )
    parts = np.split(np.arange(len(chosen)), np.flatnonzero(~follows) + 1)
    return [CudnnBatch(chosen[at], int(context_lengths[at[0]]), int(queries[at[0]])) for at in parts]


def _even_size(tokens: Ints, parts: int) -> Ints:
    """Return the unit of round sizes for `tokens` tokens. Let p be the largest power of two that is at most
    `tokens`. The unit is p / `parts`, but at least 128."""
    exponents = np.log2(np.maximum(tokens, 1)).astype(np.int64)  # exact for powers of two up to 2**52
    return np.asarray(np.maximum((1 << exponents) // parts, 128), dtype=np.int64)


def _index_within(times: Ints) -> Ints:
    """Return the numbers 0 to n - 1 for each value n of `times`, concatenated."""
    found: Ints = np.arange(times.sum()) - (np.cumsum(times) - times).repeat(times)
    return found


def _count_visible_pairs(span: Visibility, tokens: Ints) -> Ints:
    """Return the number of query-key pairs of a sequence with `tokens` tokens, if every token is a query."""
    if span.kind == "chunked":
        rest = tokens % span.size
        return tokens // span.size * (span.size * (span.size + 1) // 2) + rest * (rest + 1) // 2
    rising = np.minimum(tokens, span.size) if span.windowed else tokens
    return rising * (rising + 1) // 2 + (tokens - rising) * span.size
