"""What is done now for those who have their turn soon: what they will find stays, and is left where they can resume.

Knows who is in line, and asks the cache; it admits nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvloom.core import KVCache, Match
from kvloom.engine.request import Request

from .waiting_queue import WaitingQueue, common_prefix

__all__ = ["Lookahead"]

MOST_FORESEEN = 256
"""Those next in line for whom pages are kept."""
SHORT = 16
"""Room is short where less than one in so many of the pool is free."""
MOST_NEXT = 16
"""Those next in line whose prompts are compared with one that begins, if resuming takes a point left for it."""
MOST_POINTS = 4
"""Points that a prompt leaves for them: with states, each ends a step."""


class Lookahead:
    """For the requests of one queue; `match` finds what the cache has for one of them."""

    def __init__(self, cache: KVCache, queue: WaitingQueue, match: Callable[[Request], Match]) -> None:
        self._cache, self._queue, self._match = cache, queue, match

    def protect_queued(self) -> None:
        """Where room is short, what those in line will find stays for as long as anything else can leave."""
        if self._cache.free_slabs * SHORT > self._cache.usable_slabs:
            return
        for request in self._queue.nearest(MOST_FORESEEN):
            if request.queued_prefix is None and not request.inflight_tokens:
                request.queued_prefix = self._cache.protect_queued(self._match(request), request.rank)

    def unprotect(self, request: Request) -> None:
        """A request has what it waited for, or has ended: nothing stays for it any more."""
        if request.queued_prefix is not None:
            self._cache.unprotect(request.queued_prefix)
            request.queued_prefix = None

    def request_checkpoints(self, request: Request) -> None:
        """A request that begins leaves resume points where those next in line will part from it. (What sees everything can
        resume anywhere.)"""
        sequence, cache = request.sequence, self._cache
        if sequence is None or not cache.needs_checkpoints or not cache.snapshots.branch:
            return
        start, block = sequence.length, cache.block_tokens
        points = Counter(
            common_prefix(request, other, start, block) for other in self._queue.nearest(MOST_NEXT)
        )
        del points[0]
        for point, _ in points.most_common(MOST_POINTS):
            cache.snapshot(sequence, point)
