"""Attention over pages in plain torch, in float32 or float64. It is the oracle: every kernel must compute the same
results.

Queries are packed. The queries of sequence i are `starts[i]` to `starts[i + 1]` of q, and belong to the last tokens
of the sequence. This module does not depend on models or the pool.

| argument | shape               | meaning                                                       |
|----------|---------------------|---------------------------------------------------------------|
| q        | [queries, heads, d] | packed queries of all sequences                               |
| k, v     | [pages, b, kv, d]   | pages of this layer, new tokens already written               |
| tables   | [sequences, blocks] | page ids, 0 where nothing is visible                          |
| starts   | [sequences + 1]     | index in q of each sequence's first query, then the number of |
|          |                     | queries; two equal neighbours mean a sequence without queries |
| lengths  | [sequences]         | number of tokens of each sequence, including its queries      |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import WHOLE
from kvloom.kernels.dtypes import accumulator_dtype

from .mask import Mask

__all__ = ["attend"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_BATCH_BYTES = 32 << 20
"""Largest number of bytes that one batch of `attend` gathers and scores. A single long sequence may need more. Its
queries are then split into pieces, so that the scores of a piece fit into half of this size."""
SMALL_PADDING_BYTES = 2 << 20
"""Sequences of different lengths form one batch while the padding is below this size in bytes. A little padding
costs less than more torch calls."""
MIN_PIECE_QUERIES = 16
"""Smallest number of queries in a piece of a long sequence."""
LOG2E = 1 / math.log(2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [queries, heads, dim of v] and the natural log-sum-exp of scores [queries, heads].

    A query that sees no token has output 0. Its log-sum-exp is the sink of the head, or minus infinity without
    sinks. `k_scale` and `v_scale` are pages of scales ([pages, b, kv]) or one scale per head ([kv]). Sequences
    of similar size are computed in one batch. The number of torch calls grows with the bytes read, not with the
    number of sequences.
    """
    bounds, counted = starts.tolist(), lengths.tolist()
    _check(q, k, v, tables, bounds, counted)
    if mask is not None and mask.part != WHOLE and mask.spans is not None:
        raise ValueError("pages with a part of the tokens do not support images")
    rows = _Rows(np.array(bounds, dtype=np.int64), np.array(counted, dtype=np.int64))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    layer = _Layer(q, k, v, tables, mask or Mask(), scale, k_scale, v_scale)
    out = lse = None
    for pieces in _batches(_cut(rows, layer), layer):
        query, real = _places(pieces)
        part, part_lse = _attend(layer, rows, pieces, query, real)
        if (
            len(part) == q.shape[0] and real.all()
        ):  # the pieces are in query order, so the result needs no reordering
            return part, part_lse
        if out is None or lse is None:
            out, lse = _empty_outputs(q, v, mask or Mask())
        kept = torch.as_tensor(np.flatnonzero(real), device=q.device)
        index = torch.as_tensor(query[real], device=q.device)
        out.index_copy_(0, index, part.index_select(0, kept))
        lse.index_copy_(0, index, part_lse.index_select(0, kept))
    return _empty_outputs(q, v, mask or Mask()) if out is None or lse is None else (out, lse)


@dataclass(frozen=True, slots=True)
class _Layer:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    mask: Mask
    scale: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class _Scratch(threading.local):
    """Buffers that each thread reuses between calls. On a CPU, allocating memory costs more than filling it.

    The results of `attend` must not share memory with these buffers. Buffers above MAX_BATCH_BYTES are not reused.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def empty(
        self, name: str, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if like.device.type != "cpu" or size > MAX_BATCH_BYTES:
            return like.new_empty(shape, dtype=dtype)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # an inference tensor cannot be used outside inference mode
                buffer = self.buffers[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer[:size].view(dtype).view(shape)


_SCRATCH = _Scratch()


class _Rows:
    """The sequences of a call, as arrays with one value per sequence. `begins` is the index in q of the first query,
    and `queries` the number of queries. `context_lengths` is the number of tokens before the queries, and `lengths`
    the number of all tokens."""

    __slots__ = ("begins", "context_lengths", "lengths", "queries")

    def __init__(self, starts: Ints, lengths: Ints) -> None:
        self.begins, self.lengths = starts[:-1], lengths
        self.queries = starts[1:] - starts[:-1]
        self.context_lengths = lengths - self.queries


class _Pieces(NamedTuple):
    """The sequences of a call, split into pieces. Each array has one value per piece.

    - `row` is the index of the sequence.
    - `queries` is the number of queries, which are consecutive.
    - `query` is the index in q of the first query, and `position` its position in the sequence.
    - `block` is the first block of the sequence that the piece reads, and `blocks` the number of blocks.
    """

    row: Ints
    query: Ints
    queries: Ints
    position: Ints
    block: Ints
    blocks: Ints


def _cut(rows: _Rows, layer: _Layer) -> _Pieces:
    """Split every sequence with queries into pieces. A sequence is one piece if its scores fit into half of
    MAX_BATCH_BYTES, or if it has at most MIN_PIECE_QUERIES queries."""
    row = ((rows.queries > 0) & (rows.lengths > 0)).nonzero()[0]
    count, position, query = rows.queries[row], rows.context_lengths[row], rows.begins[row]
    most = (
        MAX_BATCH_BYTES // 2 // (rows.lengths[row] * layer.q.shape[1] * accumulator_dtype(layer.q).itemsize)
    )
    most = np.maximum(most, MIN_PIECE_QUERIES)
    if (count > most).any():
        times = -(-count // most)
        row, count, most = row.repeat(times), count.repeat(times), most.repeat(times)
        offset = np.concatenate([np.arange(n) for n in times]) * most
        count = np.minimum(count - offset, most)
        position, query = rows.context_lengths[row] + offset, rows.begins[row] + offset
    # A query of a tree or image may see later queries. Otherwise a piece sees no token after its last
    # query.
    free = layer.mask.trees is None and layer.mask.spans is None
    end = position + count if free else rows.lengths[row]
    block_tokens = layer.k.shape[1] * layer.mask.part.count
    # In a tree, the position of a query may be smaller than its slot (its index in the sequence).
    least = position if layer.mask.trees is None else rows.context_lengths[row]
    block = layer.mask.span.first_visible_each(np.maximum(least, 0)) // block_tokens
    return _Pieces(row, query, count, position, block, -(-end // block_tokens) - block)


def _batches(pieces: _Pieces, layer: _Layer) -> Iterator[_Pieces]:
    """Yield groups of pieces of similar size. The largest number of queries in a group is less than twice the smallest.
    If pieces of very different lengths would need much padding, they are put into different groups."""
    sizes = np.ceil(np.log2(pieces.queries))
    order = np.lexsort((-pieces.blocks, sizes))
    q, k, v = layer.q, layer.k, layer.v
    gathered, scored = k.shape[2] * (k.shape[3] + v.shape[3]), q.shape[1]
    begin, longest, size, queries, padding = 0, 0, -1.0, 0, 0
    columns = (column[order].tolist() for column in (sizes, pieces.blocks, pieces.queries))
    for at, (its_size, blocks, its_queries) in enumerate(zip(*columns, strict=True)):
        queries, padding = max(queries, its_queries), padding + longest - blocks
        block_bytes = k.shape[1] * accumulator_dtype(q).itemsize * (gathered + queries * scored)
        full = (at - begin + 1) * longest * block_bytes > MAX_BATCH_BYTES
        if its_size != size or full or (blocks * 2 < longest and padding * block_bytes > SMALL_PADDING_BYTES):
            if at > begin:
                yield _select(pieces, order[begin:at])
            begin, longest, size, queries, padding = at, blocks, its_size, its_queries, 0
    if len(order):
        yield _select(pieces, order[begin:])


def _select(pieces: _Pieces, chosen: npt.NDArray[np.intp]) -> _Pieces:
    """Return the pieces with the indices `chosen`, sorted by index, so that their outputs are in the order of the
    queries.
    """
    chosen = np.sort(chosen)
    return _Pieces(*(column[chosen] for column in pieces))


def _places(pieces: _Pieces) -> tuple[Ints, Bools]:
    """Return two arrays [pieces, queries of the longest piece]. The first has the index in q of every query. The
    second is True for a query and False for padding."""
    step = np.arange(pieces.queries.max())
    real = step < pieces.queries[:, None]
    return np.where(real, pieces.query[:, None] + step, 0), real


def _attend(
    layer: _Layer, rows: _Rows, pieces: _Pieces, query: Ints, real: Bools
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one batch of n pieces, padded to c queries and t tokens. Return outputs [n * c, heads, dim] and
    log-sum-exps [n * c, heads]. `query` and `real` are the results of `_places`."""
    q, k, v, mask = layer.q, layer.k, layer.v, layer.mask
    n, c = query.shape
    kv, group, device = k.shape[2], q.shape[1] // k.shape[2], q.device
    seen = _visible(mask, rows, pieces, query, real, k.shape[1])
    t = seen.shape[2]
    ids = _page_ids(layer.tables, pieces)
    keys = _gather("keys", k, ids, q).view(n, t, kv, -1)
    shared = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype
    values = keys[..., : v.shape[3]] if shared else _gather("values", v, ids, q).view(n, t, kv, -1)
    k_scale, v_scale = _scales(layer.k_scale, ids, keys), _scales(layer.v_scale, ids, keys)
    # Tokens that no query sees may be unwritten, and their values NaN. Set them to zero, so that the result
    # stays finite.
    unseen = torch.as_tensor(np.flatnonzero(~seen.any(1)), device=device)
    for tokens in (keys,) if shared else (keys, values):
        tokens.flatten(0, 1).index_fill_(0, unseen, 0.0)
    for paged in (k_scale, v_scale):
        if paged is not None and paged.shape[3] == t:
            paged.view(kv, n * t).index_fill_(1, unseen, 0.0)

    asked = q if real.size == len(q) and real.all() else q[torch.as_tensor(query, device=device).flatten()]
    # Weights are computed as powers of two, because exp of masked scores is slow on a CPU, and exp2 is fast.
    scale = layer.scale * (LOG2E if mask.softcap is None else 1 / mask.softcap)
    grouped = (asked.to(keys.dtype) * scale).view(n, c, kv, group, -1).permute(2, 0, 1, 3, 4)
    grouped = grouped.reshape(kv, n, c * group, -1)
    scores = _SCRATCH.empty("scores", (kv, n, c * group, t), keys, keys.dtype)
    _multiply(grouped, keys.permute(2, 0, 3, 1), scores)
    if k_scale is not None:
        scores.mul_(k_scale)
    if mask.softcap is not None:
        scores.tanh_().mul_(mask.softcap * LOG2E)
    by_query = scores.view(kv, n, c, group, t)
    hidden = torch.as_tensor(~seen, device=device).view(n, c, 1, t)
    by_query.add_(keys.new_zeros(n, c, 1, t).masked_fill_(hidden, -math.inf))
    top = by_query.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    sinks = None if mask.sinks is None else (mask.sinks.to(scores.dtype) * LOG2E).view(kv, 1, 1, group, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = by_query.sub_(top).exp2_().sum(-1, keepdim=True)
    if sinks is not None:
        total += torch.exp2(sinks - top)
    if v_scale is not None:
        scores.mul_(v_scale)
    mixed = keys.new_empty(kv, n, c * group, v.shape[3])
    _multiply(scores, values.permute(2, 0, 1, 3), mixed)
    # The largest score has weight 1, so a total below 1 means that a query sees no token.
    out = (
        mixed.view(kv, n, c, group, -1)
        .div_(total.clamp_min(1.0))
        .permute(1, 2, 0, 3, 4)
        .reshape(n * c, q.shape[1], -1)
    )
    lse = total.log2_().add_(top).mul_(1 / LOG2E).permute(1, 2, 0, 3, 4).reshape(n * c, q.shape[1])
    return out.to(q.dtype), lse


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply the matrices of each KV head, head by head. All tensors are [kv, n, …]. One product over all heads
    would have to copy the matrices, because gathered heads are interleaved in memory."""
    for a, b, target in zip(left.unbind(), right.unbind(), out.unbind(), strict=True):
        torch.bmm(a, b, out=target)


def _visible(mask: Mask, rows: _Rows, pieces: _Pieces, query: Ints, real: Bools, page_tokens: int) -> Bools:
    """Return which tokens each query sees, as a mask [n pieces, c queries, t tokens]. The first of the t tokens is the
    first token of the piece's first page."""
    position = np.where(real, pieces.position[:, None] + np.arange(real.shape[1]), -1)[:, :, None]
    token = (pieces.block * page_tokens)[:, None, None] + np.arange(pieces.blocks.max() * page_tokens)
    if mask.part != WHOLE:
        token = mask.part.positions(token, page_tokens)
    seen: Bools = token <= position
    if mask.trees is not None or mask.spans is not None:
        own = (
            token - rows.context_lengths[pieces.row][:, None, None]
        )  # index of the token among the queries of its sequence
        inside = (own >= 0) & (own < rows.queries[pieces.row][:, None, None]) & (position >= 0)
        if mask.trees is not None:
            trees = mask.trees.cpu().numpy().astype(np.int64)
            context = rows.context_lengths[pieces.row][:, None, None]
            drawn = trees[query[:, :, None], np.clip(own, 0, trees.shape[1] - 1)]
            seen = np.where(inside, drawn > 0, seen & (own < 0))
            token = np.where(inside & (drawn > 0), context + drawn - 1, token)
            at = np.clip(position - context, 0, trees.shape[1] - 1)[:, :, 0]
            position = np.where(position < 0, -1, context + trees[query, at][:, :, None] - 1)
        if mask.spans is not None:
            spans = mask.spans.cpu().numpy()
            place = np.clip(own + rows.begins[pieces.row][:, None, None], 0, len(spans) - 1)
            image = spans[query][:, :, None]
            seen |= inside & (image >= 0) & (spans[place] == image)
    if mask.span.has_holes:
        seen &= mask.span.sees_each(np.maximum(position, 0), token)
    elif mask.span.windowed:
        seen &= token >= mask.span.first_visible_each(np.maximum(position, 0))
    return seen


def _page_ids(tables: torch.Tensor, pieces: _Pieces) -> torch.Tensor:
    """Return the page ids of the blocks of all pieces, concatenated. A shorter piece repeats its last page, so that
    all pieces have equally many ids."""
    column = pieces.block[:, None] + np.minimum(np.arange(pieces.blocks.max()), pieces.blocks[:, None] - 1)
    ids = tables.cpu().numpy()[pieces.row[:, None], column]
    return torch.as_tensor(ids, device=tables.device).flatten()


def _gather(name: str, pages: torch.Tensor, ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of the pages `ids` in the accumulator's dtype. fp8 pages are copied as bytes first, because torch
    cannot index fp8 on all devices. `name` selects the scratch buffer of the copy.
    """
    kept = torch.uint8 if pages.dtype == torch.float8_e4m3fn else pages.dtype
    shape, dtype = (len(ids), *pages.shape[1:]), accumulator_dtype(like)
    found = _SCRATCH.empty(name if kept == dtype else "raw", shape, pages, kept)
    torch.index_select(pages if kept == pages.dtype else pages.view(kept), 0, ids, out=found)
    return (
        found if kept == dtype else _SCRATCH.empty(name, shape, pages, dtype).copy_(found.view(pages.dtype))
    )


def _scales(scales: torch.Tensor | None, ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Return the scales of the pages `ids` as [kv, n, 1, t], for n pieces of t tokens. `like` are the gathered keys of
    the pieces. Scales per head are returned as [kv, 1, 1, 1], and a single scale as [1, 1, 1, 1]."""
    if scales is None:
        return None
    if scales.dim() < 3:
        return scales.to(like.dtype).view(-1, 1, 1, 1)
    n, t, kv = like.shape[:3]
    found = scales.index_select(0, ids).to(like.dtype).view(n, t, kv)
    return found.permute(2, 0, 1).contiguous().view(kv, n, 1, t)


def _empty_outputs(q: torch.Tensor, v: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of queries that see no token: zeros, and the log-sum-exp of the sinks (minus infinity without
    sinks)."""
    lse = torch.full(q.shape[:2], -math.inf, dtype=accumulator_dtype(q), device=q.device)
    if mask.sinks is not None:
        lse[:] = mask.sinks.to(lse.dtype)
    return q.new_zeros((*q.shape[:2], v.shape[-1])), lse


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: list[int],
    lengths: list[int],
) -> None:
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k, v need 3, 4, 4 dimensions, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[2] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if len(starts) != len(lengths) + 1 or tables.shape[0] != len(lengths):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts, {tables.shape[0]} table rows")
    if starts[-1] != q.shape[0]:
        raise ValueError(f"starts end at {starts[-1]}, but there are {q.shape[0]} queries")
