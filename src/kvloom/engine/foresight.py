"""What is done now for those who have their turn soon: what they will find stays, and is left where they can resume.

Knows who is in line, and asks the cache; it admits nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvloom.core import KVCache, Match

from .queue import Queue, parting
from .request import Request

__all__ = ["Foresight"]

MOST_FORESEEN = 256
"""Those next in line for whom pages are kept."""
SHORT = 16
"""Room is short where less than one in so many of the pool is free."""
MOST_NEXT = 16
"""Those next in line whose prompts are compared with one that begins, if resuming takes a point left for it."""
MOST_POINTS = 4
"""Points that a prompt leaves for them: with states, each ends a step."""


class Foresight:
    """For the requests of one queue; `match` finds what the cache has for one of them."""

    def __init__(self, cache: KVCache, queue: Queue, match: Callable[[Request], Match]) -> None:
        self._cache, self._queue, self._match = cache, queue, match

    def look(self) -> None:
        """Where room is short, what those in line will find stays for as long as anything else can leave."""
        pool = self._cache.room.pool
        if pool.free_slabs * SHORT >= pool.slabs:
            return
        for request in self._queue.nearest(MOST_FORESEEN):
            if request.foreseen is None and not request.unknown:
                request.foreseen = self._cache.foresee(self._match(request), request.rank)

    def forget(self, request: Request) -> None:
        """A request has what it waited for, or has ended: nothing stays for it any more."""
        if request.foreseen is not None:
            self._cache.forget(request.foreseen)
            request.foreseen = None

    def leave_points(self, request: Request) -> None:
        """A request that begins leaves resume points where those next in line will part from it. (What sees everything can
        resume anywhere.)"""
        sequence, cache = request.sequence, self._cache
        if sequence is None or not cache.tree.keeps_checkpoints or not cache.snapshots.branch:
            return
        start, block = sequence.length, cache.block_tokens
        points = Counter(parting(request, other, start, block) for other in self._queue.nearest(MOST_NEXT))
        del points[0]
        for point, _ in points.most_common(MOST_POINTS):
            cache.snapshot(sequence, point)
