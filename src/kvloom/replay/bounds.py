"""What no cache can beat: everything kept for ever, and Belady's MIN for a given size.

MIN sees the future: it lets go what is wanted again last. Both insert whole requests and count a block
as hit only if all before it are, as every policy's replay does. They need no cache and no clock.
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
    """For each request, the leading blocks of its prompt that some request before it had. O(blocks)."""
    seen = np.zeros(traffic.distinct, np.bool_)
    hits = []
    for request in traffic.requests:
        hits.append(_leading(seen, request.blocks[: request.asked]))
        seen[request.blocks] = True
    return hits


def min_hits(traffic: Traffic, capacity: int) -> tuple[list[int], int]:
    """The leading blocks that a cache of `capacity` blocks would have for each request if it knew the
    future, and how many blocks leave it. Of a request longer than the cache only as much as fits stays.

    The blocks of one request that are wanted next by one later request leave together, deepest first, so
    that the cost is O(log n) for each of those runs, not for each block.
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
                continue  # its blocks were used again and stand in a newer run
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
    """For each block of each request, the number of the next request that has it."""
    lengths = [len(row) for row in rows]
    flat = np.concatenate(rows) if rows else np.empty(0, np.int32)
    owner = np.repeat(np.arange(len(rows)), lengths)
    order = np.argsort(flat, kind="stable")
    following = np.full(len(flat), _NEVER, np.int64)
    same = flat[order][1:] == flat[order][:-1]
    following[order[:-1][same]] = owner[order[1:][same]]
    return np.split(following, np.cumsum(lengths)[:-1])
