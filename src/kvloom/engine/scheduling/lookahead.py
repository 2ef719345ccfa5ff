"""Lookahead: protects cached pages of queued requests, and takes checkpoints where queued requests will resume.

Reads the waiting queue and calls the cache. Does not admit requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvloom.core import KVCache, Match
from kvloom.engine.request import Request

from .waiting_queue import WaitingQueue, common_prefix

__all__ = ["Lookahead"]

MAX_PROTECTED = 256
"""Number of next requests in the queue whose pages are protected."""
SHORT_SHARE = 16
"""Pages are protected while less than 1 / SHORT_SHARE of the slabs is free."""
MAX_COMPARED = 16
"""Number of next requests in the queue that are compared with a starting request, if resuming needs a checkpoint."""
MAX_CHECKPOINTS = 4
"""Largest number of checkpoints that a prompt takes for queued requests. In models with states, each checkpoint ends
a step.
"""


class Lookahead:
    """Looks ahead in one queue. `match` finds the cached prefix of a request."""

    def __init__(self, cache: KVCache, queue: WaitingQueue, match: Callable[[Request], Match]) -> None:
        self._cache, self._queue, self._match = cache, queue, match

    def protect_queued(self) -> None:
        """If few slabs are free, let the cache evict pages of queued requests last."""
        if self._cache.free_slabs * SHORT_SHARE > self._cache.usable_slabs:
            return
        for request in self._queue.nearest(MAX_PROTECTED):
            if request.queued_prefix is None and not request.inflight_tokens:
                request.queued_prefix = self._cache.protect_queued(self._match(request), request.rank)

    def unprotect(self, request: Request) -> None:
        """End the protection of a request's pages, because it was admitted or has finished."""
        if request.queued_prefix is not None:
            self._cache.unprotect(request.queued_prefix)
            request.queued_prefix = None

    def request_checkpoints(self, request: Request) -> None:
        """Let a starting request take checkpoints at the positions where queued requests diverge from it.

        Does nothing for models without windows and states, because they can resume at any position.
        """
        sequence, cache = request.sequence, self._cache
        if sequence is None or not cache.needs_checkpoints or not cache.checkpoint_policy.branch:
            return
        start, block = sequence.length, cache.block_tokens
        positions = Counter(
            common_prefix(request, other, start, block) for other in self._queue.nearest(MAX_COMPARED)
        )
        del positions[0]
        for position, _ in positions.most_common(MAX_CHECKPOINTS):
            cache.checkpoint(sequence, position)
