"""Which tokens are computed next: decodes first, then chunks of prompts, within a budget of tokens a step.

    waiting   in the order of rank; admitted while the budget lasts and fewer than `max_running` run
    running   holds pages; when there is no room, the one that ranks last gives its pages up and waits again

Preempted requests recompute: their full blocks stay cached, so that mostly they find them again. Knows no model and no
bytes; the cache answers what fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many

import numpy as np

from kvloom.core import KVCache
from kvloom.models.batch import Work

from .request import Finish, Request

__all__ = ["Scheduler"]


class Scheduler:
    """Requests on one cache. Not thread safe: one owner adds, schedules and commits."""

    def __init__(self, cache: KVCache, token_budget: int = 2048, max_running: int = 256) -> None:
        if token_budget < 1 or max_running < 1:
            raise ValueError(f"token_budget {token_budget} and max_running {max_running} must be at least 1")
        self.cache, self.token_budget, self.max_running = cache, token_budget, max_running
        self.running: list[Request] = []
        self._waiting: list[tuple[tuple[int, int], Request]] = []

    @property
    def waiting(self) -> int:
        return sum(request.finish is None for _, request in self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError where it could never run, with the numbers."""
        longest = len(request.prompt) + request.params.max_tokens
        layout = self.cache.layout
        needed, there = layout.slab_bytes_for(longest), self.cache.stats()["slabs"]
        assert isinstance(there, int)
        if needed > there * layout.slab_bytes:
            raise ValueError(
                f"{len(request.prompt)} prompt tokens and up to {request.params.max_tokens} new ones need "
                f"{needed:,} bytes of cache, but the pool has {there * layout.slab_bytes:,}"
            )
        heapq.heappush(self._waiting, (request.rank, request))

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free at once."""
        if request.finish is None:
            self.finish(request, "cancelled")

    def schedule(self) -> list[tuple[Request, Work]]:
        """The next step's work, its pages reserved; empty only where nothing is left to do."""
        picked: list[tuple[Request, Work]] = []
        budget = self.token_budget
        for request in sorted(self.running, key=lambda r: (r.pending > 1, r.rank)):
            if budget and request.sequence is not None:
                budget -= self._reserve(request, budget, picked)
        while budget and len(self.running) < self.max_running:
            waiting = self._next()
            if waiting is None:
                break
            self._admit(waiting)
            taken = self._reserve(waiting, budget, picked, preempt=not picked)
            budget -= taken
            if not taken:
                if self.running or picked:
                    break
                self.finish(waiting, "no_room")  # it had the pool to itself
        return picked

    def commit(self, work: Many[tuple[Request, Work]]) -> None:
        """What was scheduled is computed."""
        for request, part in work:
            if request.sequence is not None:
                request.sequence.commit(part.tokens.astype(np.int32))

    def finish(self, request: Request, why: Finish) -> None:
        """End a request; what it computed stays cached."""
        request.finish = why
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
            self.running.remove(request)

    def _next(self) -> Request | None:
        while self._waiting:
            request = heapq.heappop(self._waiting)[1]
            if request.finish is None:
                return request
        return None

    def _admit(self, request: Request) -> None:
        tokens = np.array(request.tokens, dtype=np.int32)
        request.sequence = self.cache.open(self.cache.match(tokens, request.control))
        if request.cached_tokens is None:
            request.cached_tokens = request.sequence.length
        self.running.append(request)

    def _reserve(
        self, request: Request, budget: int, picked: list[tuple[Request, Work]], preempt: bool = True
    ) -> int:
        """Reserve pages for as many of a request's tokens as the budget allows; how many it got. Where there is no room
        those that rank behind it give theirs up, and if that does not do, it waits."""
        sequence = request.sequence
        assert sequence is not None
        count = min(request.pending, budget)
        if sequence.boundary is not None:
            count = min(count, sequence.boundary - sequence.length)
        while sequence.extend(count):
            victim = self._victim(request, picked) if preempt else None
            if victim is None:
                if count == 1 or not picked:
                    self._preempt(request)
                    return 0
                count = (count + 1) // 2  # a shorter chunk may fit beside what is already picked
            else:
                self._preempt(victim)
        tokens = np.array(request.tokens[sequence.length : sequence.length + count])
        picked.append((request, Work(sequence, tokens)))
        return count

    def _victim(self, request: Request, picked: list[tuple[Request, Work]]) -> Request | None:
        """The running request that ranks last, behind `request`, and has no work in this step."""
        busy = {id(other) for other, _ in picked} | {id(request)}
        others = [r for r in self.running if id(r) not in busy and r.rank > request.rank]
        return max(others, key=lambda r: r.rank, default=None)

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.close()
        request.sequence = None
        request.preemptions += 1
        self.running.remove(request)
        heapq.heappush(self._waiting, (request.rank, request))
