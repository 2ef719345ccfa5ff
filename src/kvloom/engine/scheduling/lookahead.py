"""Lookahead: protects cached pages of queued requests, and takes checkpoints where queued and later requests will
resume.

Reads the waiting queue and calls the cache. Does not admit requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvloom.core import KVCache, Match
from kvloom.engine.request import Request

from .waiting_queue import NextBlock, WaitingQueue, common_prefix, next_block_of

__all__ = ["Lookahead"]

MAX_PROTECTED = 256
"""Number of next requests in the queue whose pages are protected."""
SHORT_SHARE = 16
"""Pages are protected while less than 1 / SHORT_SHARE of the slabs is free."""
MAX_COMPARED = 16
"""A prompt is compared with this many next requests in the queue, in models that resume only at checkpoints."""
MAX_CHECKPOINTS = 4
"""Largest number of checkpoints of one prompt that wait to be taken for queued requests. In models with states, a step
must end at each checkpoint.
"""


class Lookahead:
    """Protects pages and requests checkpoints for the next requests in one queue. `match` finds the cached prefix of a
    request.
    """

    def __init__(self, cache: KVCache, queue: WaitingQueue, match: Callable[[Request], Match]) -> None:
        self._cache, self._queue, self._match = cache, queue, match
        # Prefixes that end at the announced checkpoints, by length.
        self._announced: dict[int, set[NextBlock | None]] = {}
        # Protected requests, by the hash of the first block that was not cached, and then by `id`.
        self._protected: dict[int, dict[int, Request]] = {}

    def protect_queued(self) -> None:
        """If few slabs are free, let the cache evict pages of queued requests last."""
        if self._cache.free_slabs * SHORT_SHARE > self._cache.usable_slabs:
            return
        for request in self._queue.nearest(MAX_PROTECTED):
            if request.queued_prefix is None and not request.inflight_tokens:
                self._protect(request)

    def chunk_published(self, request: Request, start: int) -> None:
        """Protect the pages that a running prompt has just published, for queued requests that share this part of the
        prompt. The published chunk begins at `start`. Without the protection, the next allocation could evict the
        pages, because a policy may first evict pages that were used only once.
        """
        if self._protected:
            for other in [*self._protected.get(self._next_block_hash(request, start), {}).values()]:
                self.unprotect(other)
                self._protect(other)

    def _protect(self, request: Request) -> None:
        match = self._match(request)
        request.queued_prefix = self._cache.protect_queued(match, request.sort_key)
        request.next_block_hash = self._next_block_hash(request, match.matched)
        self._protected.setdefault(request.next_block_hash, {})[id(request)] = request

    def unprotect(self, request: Request) -> None:
        """End the protection of a request's pages, because it was admitted or has finished."""
        if request.queued_prefix is not None:
            self._cache.unprotect(request.queued_prefix)
            request.queued_prefix = None
            same = self._protected[request.next_block_hash]
            del same[id(request)]
            if not same:
                del self._protected[request.next_block_hash]

    def _next_block_hash(self, request: Request, start: int) -> int:
        """Return a number for the block of a request that contains token `start`. Requests that share all tokens up to
        the end of this block have the same number."""
        return hash(next_block_of(request, start, self._cache.block_tokens))

    def request_checkpoints(self, request: Request) -> None:
        """Request checkpoints of a running prompt at the positions where queued requests diverge from it. Call this
        before each chunk of the prompt, because new requests may have arrived.

        If tiers have the pages up to a later position but lack the checkpoint there, the prompt also takes a
        checkpoint at that position. A prompt with copied documents takes one before the first copy, because its later
        pages are not published. Does nothing for models without windows and states, because they can resume at
        any position.
        """
        sequence, cache = request.sequence, self._cache
        if sequence is None or not cache.needs_checkpoints or not cache.checkpoint_policy.branch:
            return
        start, block = sequence.length, cache.block_tokens
        positions = Counter(
            common_prefix(request, other, start, block) for other in self._queue.nearest(MAX_COMPARED)
        )
        if request.tier_miss is not None and request.tier_miss.matched > start:
            positions[request.tier_miss.matched] += 1
        if request.documents and (first := request.documents[0].copied_from // block * block) > start:
            positions[first] += 1
        del positions[0]  # no effect without such a position
        pending = sum(position % block == 0 for position in sequence.checkpoint_positions)
        for position, _ in positions.most_common(max(0, MAX_CHECKPOINTS - pending)):
            cache.checkpoint(sequence, position)

    def start_step(self) -> None:
        """Drop the checkpoints that were announced in the last step."""
        self._announced = {}

    def announce_checkpoint(self, request: Request) -> None:
        """Record the next checkpoint of a prompt that runs in this step. Queued requests can then wait for this
        checkpoint. Does nothing for models without states, because their requests can resume after each block.
        """
        block = self._cache.block_tokens
        position = None if request.sequence is None else request.sequence.next_checkpoint
        if position is not None and position >= block:
            prefix = next_block_of(request, position - block, block)
            self._announced.setdefault(position // block * block, set()).add(prefix)

    def awaits_checkpoint(self, request: Request, resume: int) -> bool:
        """Return whether a waiting request should wait for a checkpoint that another prompt takes in this step.

        `resume` is the position at which the request could resume now. The request should wait if it could resume at
        the checkpoint, and the checkpoint is after `resume`. Makes one comparison per announced checkpoint.
        """
        for position, prefixes in self._announced.items():
            if resume < position < len(request.tokens):
                prefix = next_block_of(request, position - 1, self._cache.block_tokens)
                if prefix is not None and prefix in prefixes:
                    return True
        return False
