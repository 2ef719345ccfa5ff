"""Upper bounds of the hit rate: an unlimited cache, and Belady's MIN for a given size.

MIN evicts the block whose next use is farthest in the future. As in every replay, all blocks of a request are inserted.
A block counts as a hit only if all blocks before it are hits. The bounds need no cache and no clock.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .traffic import Blocks, Traffic

__all__ = ["ideal_hits", "min_hits"]

_NEVER = np.iinfo(np.int64).max


def ideal_hits(traffic: Traffic) -> list[int]:
    """Return, for each request, its hits in an unlimited cache: the number of leading blocks of its prompt that earlier
    requests contained. O(blocks).
    """
    seen = np.zeros(traffic.distinct, np.bool_)
    hits = []
    for request in traffic.requests:
        hits.append(_leading(seen, request.blocks[: request.asked]))
        seen[request.blocks] = True
    return hits


def min_hits(traffic: Traffic, capacity: int) -> tuple[list[int], int]:
    """Return, for each request, the number of leading blocks of its prompt that are hits in a cache of `capacity`
    blocks with MIN. Also return the number of evicted blocks.

    If a request is longer than the cache, only its beginning is stored. Adjacent blocks of a request with the same next
    use form one entry of the eviction queue. The last blocks of an entry are evicted first. Takes O(log n) time per
    entry.
    """
    rows = [request.blocks[:capacity] for request in traffic.requests]
    wanted = _next_uses(rows)
    inside = np.zeros(traffic.distinct, np.bool_)
    hits: list[int] = []
    queue: list[tuple[int, int, int, int]] = []  # (-next use, -first, request, last): the latest first
    size = evicted = 0
    for now, (request, row) in enumerate(zip(traffic.requests, rows, strict=True)):
        there = inside[row]
        hits.append(_leading(inside, row[: request.asked]))
        size += len(row) - int(np.count_nonzero(there))
        inside[row] = True
        later = wanted[now]
        cuts = [0, *(np.flatnonzero(np.diff(later)) + 1).tolist(), len(row)]
        for first, last in pairwise(cuts):
            if last > first:
                heapq.heappush(queue, (-int(later[first]), -first, now, last))
        while size > capacity:
            use, first, owner, last = heapq.heappop(queue)
            if -use <= now:
                continue  # the blocks of this entry were used again and belong to a newer entry
            gone = min(size - capacity, last + first)
            inside[rows[owner][last - gone : last]] = False
            size -= gone
            evicted += gone
            if last - gone > -first:
                heapq.heappush(queue, (use, first, owner, last - gone))
    return hits, evicted


def _leading(inside: npt.NDArray[np.bool_], blocks: Blocks) -> int:
    there = inside[blocks]
    return len(there) if there.all() else int(there.argmin())


def _next_uses(rows: list[Blocks]) -> list[npt.NDArray[np.int64]]:
    """Return, for each block of each request, the index of the next request that contains the block. If there is none,
    the index is _NEVER."""
    lengths = [len(row) for row in rows]
    flat = np.concatenate(rows) if rows else np.empty(0, np.int32)
    owner = np.repeat(np.arange(len(rows)), lengths)
    order = np.argsort(flat, kind="stable")
    following = np.full(len(flat), _NEVER, np.int64)
    same = flat[order][1:] == flat[order][:-1]
    following[order[:-1][same]] = owner[order[1:][same]]
    return np.split(following, np.cumsum(lengths)[:-1])
