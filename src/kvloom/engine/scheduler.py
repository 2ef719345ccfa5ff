"""Which tokens are computed next: every decode, then chunks of prompts, within a budget of tokens a step.

    waiting   in the order of rank; admitted while the budget lasts and fewer than `max_running` run
    running   holds pages; when there is no room, the one that ranks last gives its pages up and waits again

A step may be scheduled before the tokens of the one before it are known: they count, and whoever cannot get more is left
out. Preempted requests recompute: their full blocks stay cached, so that mostly they find them again. Knows no model and
no bytes; the cache answers what fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many

import numpy as np

from kvloom.core import KVCache
from kvloom.models.batch import Work

from .request import Finish, Request

__all__ = ["Scheduled", "Scheduler"]

Scheduled = tuple[Request, Work]
UNKNOWN = np.array([-1])


class Scheduler:
    """Requests on one cache: up to `token_budget` tokens of prompts a step beside one of each that decodes. Not thread safe: one owner adds, schedules and commits."""

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

    def schedule(self, places: dict[int, int] | None = None) -> list[Scheduled]:
        """The next step's work, its pages reserved; empty only where nothing is left to do, or to know first. `places`
        says where the unknown token of a request (by `id`) stands among those the step before chose."""
        places = places or {}
        picked: list[Scheduled] = []
        budget = self.token_budget
        able = [request for request in self.running if request.drawn < request.params.max_tokens]
        decodes = [request for request in able if request.pending == 1]
        decodes.sort(key=lambda request: request.rank)
        self._decode(decodes, picked, places)
        for request in sorted((r for r in able if r.pending > 1), key=lambda r: r.rank):
            if budget and request.sequence is not None:
                budget -= self._reserve(request, budget, picked, places)
        while budget and len(self.running) < self.max_running:
            waiting = self._next()
            if waiting is None:
                break
            self._admit(waiting)
            taken = self._reserve(waiting, budget, picked, places, preempt=not picked)
            budget -= taken
            if not taken:
                if self.running or picked:
                    break
                self.finish(waiting, "no_room")  # it had the pool to itself
        return picked

    def launched(self, work: Many[Scheduled]) -> None:
        """What was scheduled is on its way: tokens that are known are committed, and whoever reached the end of its
        tokens gets one that is not."""
        rows, tokens = [], []
        for request, part in work:
            request.computed += len(part.tokens)
            if part.source < 0:
                if len(part.tokens) == 1:
                    rows.append(part.sequence.row)
                    tokens.append(part.tokens[0])
                else:
                    part.sequence.commit(part.tokens.astype(np.int32))
            if not request.pending:
                request.unknown += 1
        self._commit(rows, tokens)

    def learned(self, requests: Many[Request], tokens: Many[int], after: Many[Scheduled]) -> None:
        """The tokens that a step chose: each request has its own now, and `after`, the step launched since, is committed
        as far as it computed them."""
        for request, token in zip(requests, tokens, strict=True):
            if request.finish is None:
                request.tokens.append(token)
                request.unknown -= 1
        mine = [(request, part) for request, part in after if part.source >= 0 and part.sequence.open]
        self._commit([part.sequence.row for _, part in mine], [tokens[part.source] for _, part in mine])

    def finish(self, request: Request, why: Finish) -> None:
        """End a request; what it computed stays cached."""
        request.finish = why
        request.unknown = 0
        if request.sequence is not None:
            self._let_go(request)

    def _commit(self, rows: list[int], tokens: list[int]) -> None:
        if rows:
            self.cache.commit_many(np.array(rows), np.array(tokens, dtype=np.int32))

    def _next(self) -> Request | None:
        while self._waiting:
            request = self._waiting[0][1]
            if request.unknown:
                return None  # preempted a moment ago; its last token is not known yet
            heapq.heappop(self._waiting)
            if request.finish is None:
                return request
        return None

    def _admit(self, request: Request) -> None:
        tokens = np.array(request.tokens, dtype=np.int32)
        request.sequence = self.cache.open(self.cache.match(tokens, request.control))
        request.computed = request.sequence.length
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        self.running.append(request)

    def _decode(self, requests: list[Request], picked: list[Scheduled], places: dict[int, int]) -> None:
        """Give one token each to requests that decode: all at once where there is room for all. They do not count
        against the budget: chunks of prompts keep their size, which kernels that are prepared for a size like."""
        rows = np.array([request.sequence.row for request in requests if request.sequence is not None])
        if requests and not self.cache.extend_many(rows):
            picked += [(request, self._work(request, 1, places)) for request in requests]
            return
        for request in requests:
            if request.sequence is not None:
                self._reserve(request, 1, picked, places)

    def _reserve(
        self,
        request: Request,
        budget: int,
        picked: list[Scheduled],
        places: dict[int, int],
        preempt: bool = True,
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
        picked.append((request, self._work(request, count, places)))
        return count

    def _work(self, request: Request, count: int, places: dict[int, int]) -> Work:
        assert request.sequence is not None
        if request.unknown and request.pending == 1:
            return Work(request.sequence, UNKNOWN, places[id(request)])
        return Work(request.sequence, np.array(request.tokens[request.computed : request.computed + count]))

    def _victim(self, request: Request, picked: list[Scheduled]) -> Request | None:
        """The running request that ranks last, behind `request`, and has no work in this step."""
        busy = {id(other) for other, _ in picked} | {id(request)}
        others = [r for r in self.running if id(r) not in busy and r.rank > request.rank]
        return max(others, key=lambda r: r.rank, default=None)

    def _preempt(self, request: Request) -> None:
        self._let_go(request)
        request.preemptions += 1
        heapq.heappush(self._waiting, (request.rank, request))

    def _let_go(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.close()
        request.sequence = None
        request.computed = 0
        self.running.remove(request)
