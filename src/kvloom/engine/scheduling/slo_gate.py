"""The SLO gate decides about requests with an objective before they join the waiting queue.

    request ──▶ SloAdmission.decide ──▶ admitted: waiting queue · deferred: held here · refused: finished with "slo"

The decision considers running prompts, waiting requests that are scheduled first, decoding requests, and loads from
tiers. Requests without an objective are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvloom.core import (
    Backlog,
    Decoding,
    KVCache,
    Match,
    PromptWork,
    SloAdmission,
    StepSize,
    Verdict,
)
from kvloom.engine.offload import OffloadManager
from kvloom.engine.request import Request

from .admission import Admission
from .waiting_queue import WaitingQueue

__all__ = ["SloGate"]

RECHECK_SECONDS = 0.02
"""Time between two decisions about a deferred request, in seconds."""
LOOKUP_SECONDS = 0.05
"""Longest time that a decision waits for a lookup in tiers, in seconds."""


class SloGate:
    """Decides for one scheduler whether a request with an objective is admitted, deferred or refused. Holds deferred
    requests until they can start. `match` finds the cached prefix of a request."""

    def __init__(self, cache: KVCache, queue: WaitingQueue, match: Callable[[Request], Match]) -> None:
        self.admission = SloAdmission()
        """The estimates, and counts of admitted, deferred and refused requests."""
        self.held: list[Request] = []
        """Requests that wait, because they were deferred or because tiers have not answered."""
        self._cache, self._queue, self._match = cache, queue, match
        self._next_check = self._last_step = 0.0
        self._open: list[Request] = []  # admitted requests with an objective that have not finished

    @property
    def has_open(self) -> bool:
        """Whether an admitted request with an objective has not finished."""
        return bool(self._open)

    def observe_step(self, size: StepSize, seconds: float) -> None:
        """Update the estimates with a step that has just ended. The step had the amounts of work `size`, and took
        `seconds`."""
        self.admission.observe_step(size, seconds)
        self._last_step = self._cache.clock.now()

    def decide(
        self,
        request: Request,
        running: Sequence[Request],
        limits: tuple[int, int],
        growth: Admission | None,
        offload: OffloadManager | None,
    ) -> Verdict:
        """Decide whether a request with an objective is admitted, deferred or refused. If the request is refused, the
        reason is stored in the request. `limits` are the largest numbers of prompt tokens and of requests in a step.
        `growth` estimates the lengths of outputs. The gate holds a deferred request, and also a request whose lookup in
        tiers is not complete.
        """
        slo, now = request.slo, self._cache.clock.now()
        assert slo is not None
        waited = max(0.0, now - slo.arrived)
        own = self._own_work(request, growth, offload, waited)
        if own is None:
            self.held.append(request)
            return Verdict.DEFER
        if not running and not self._queue.length and now > self._last_step:
            self.admission.observe_idle(now - self._last_step)
            self._last_step = now
        prediction = self.admission.predict(own, self._backlog(request, running, limits, growth))
        objective = slo.objective
        if request.awaits_peer is not None:  # another worker computes the prompt
            objective = replace(objective, ttft_ms=None)
        decision = self.admission.decide(objective, prediction, own, waited, slo.is_deferred)
        if prediction is not None:
            slo.prediction = replace(prediction, ttft=waited + prediction.ttft)
        if decision.verdict is Verdict.ADMIT:
            self._open.append(request)
        elif decision.verdict is Verdict.DEFER:
            slo.is_deferred = True
            self.held.append(request)
        else:
            slo.refusal = decision
        return decision.verdict

    def due(self) -> list[Request]:
        """Return the held requests that need a new decision now. Removes them from the gate."""
        self.held = [request for request in self.held if request.finish_reason is None]
        now = self._cache.clock.now()
        if not self.held or now < self._next_check:
            return []
        self._next_check = now + RECHECK_SECONDS
        found, self.held = self.held, []
        return found

    def record_tokens(self) -> None:
        """Record the times at which requests got their first token, and at which they ended. O(open requests with an
        objective).
        """
        if not self._open:
            return
        now, left = self._cache.clock.now(), []
        for request in self._open:
            slo = request.slo
            assert slo is not None
            if not slo.first_token and request.output_count:
                slo.first_token = now
            if request.finish_reason is None:
                left.append(request)
            elif slo.first_token and slo.prediction is not None and not request.preemptions:
                slo.last_token = now
                self.admission.observe_request(
                    slo.prediction,
                    slo.first_token - slo.arrived,
                    slo.tbt(request.output_count),
                    request.output_count,
                )
        self._open = left

    def _own_work(
        self, request: Request, growth: Admission | None, offload: OffloadManager | None, waited: float
    ) -> PromptWork | None:
        """Return the work of a request's prompt: the number of tokens that neither pool nor tiers have, and the
        seconds to load the hits from tiers. Return None while tiers look up the pages, at most for LOOKUP_SECONDS.
        """
        match = self._match(request)
        size, seconds = len(request.tokens), 0.0
        tokens = max(1, size - match.resume)
        if request.awaits_peer is not None:
            tokens = 1
        elif offload is not None:
            found = offload.load_estimate(request, match)
            if found is None and waited < LOOKUP_SECONDS:
                return None
            loaded, seconds = found or (0, 0.0)
            token = self.admission.times.coefficients[1]
            if loaded * token > seconds:
                tokens = max(1, tokens - loaded)
            else:  # recomputing is faster
                seconds = 0.0
        request.missing_tokens = tokens
        return PromptWork(tokens, self._output(request, growth), size, seconds)

    def _output(self, request: Request, growth: Admission | None) -> int:
        end = request.limit if growth is None else growth.end_of(request)
        return max(1, end - len(request.tokens))

    def _backlog(
        self,
        request: Request,
        running: Sequence[Request],
        limits: tuple[int, int],
        growth: Admission | None,
    ) -> Backlog:
        prompts = [
            PromptWork(one.pending, self._output(one, growth), len(one.tokens))
            for one in running
            if one.pending > 1
        ]
        decoding = [
            Decoding(len(one.tokens), self._output(one, growth)) for one in running if one.pending <= 1
        ]
        ahead, behind = self._split_queue(request)
        now = self._cache.clock.now()
        prompts += [
            PromptWork(
                self._missing(one), self._output(one, growth), len(one.tokens), due=_seconds_left(one, now)
            )
            for one in ahead
        ]
        return Backlog(
            prompts,
            decoding,
            sum(map(self._missing, behind)),
            *limits,
            self._capacity(request, decoding, prompts[: len(prompts) - len(ahead)]),
        )

    def _split_queue(self, request: Request) -> tuple[list[Request], list[Request]]:
        """Return the waiting requests that are probably scheduled before a request, and all others.

        Requests of the same tenant come before `request` if their sort key is smaller. Let T be the number of tokens
        that these requests and `request` must compute. The first requests of another tenant come before `request`, up
        to T * (weight of the other tenant / weight of this tenant) tokens in total.
        """
        waiting = sorted((one for one in self._queue if one is not request), key=lambda one: one.sort_key)
        mine = self._queue.tenant_queue(request)
        ahead = [
            one
            for one in waiting
            if self._queue.tenant_queue(one) is mine and one.sort_key < request.sort_key
        ]
        own = self._missing(request) + sum(map(self._missing, ahead))
        taken = {mine: 0.0}
        first = []
        for one in waiting:
            tenant = self._queue.tenant_queue(one)
            if tenant is not mine and taken.setdefault(tenant, 0.0) < own * tenant.weight / mine.weight:
                taken[tenant] += self._missing(one)
                first.append(one)
        chosen = {id(one) for one in (*first, *ahead)}
        return [*first, *ahead], [one for one in waiting if id(one) not in chosen]

    def _missing(self, request: Request) -> int:
        """Return the number of tokens that a waiting request must compute, according to its first match."""
        if request.missing_tokens is None:
            request.missing_tokens = max(1, len(request.tokens) - self._match(request).resume)
        return request.missing_tokens

    def _capacity(
        self, request: Request, decoding: Sequence[Decoding], prompts: Sequence[PromptWork]
    ) -> float:
        """Return how many tokens the pool can hold for running and new requests together. Infinite for a request that
        may become long.
        """
        cache, layout = self._cache, self._cache.layout
        in_use = sum(
            one.in_use_pages * (layout.slab_bytes // one.per_slab) for one in cache.inspect.size_classes
        )
        free = cache.usable_slabs * layout.slab_bytes - in_use
        each = layout.slab_bytes_for(len(request.tokens)) / len(request.tokens)
        if request.may_be_long:
            return math.inf
        contexts = [*(one.context for one in decoding), *(one.context for one in prompts)]
        return max(0.0, free / max(each, 1e-9)) + sum(contexts)


def _seconds_left(request: Request, now: float) -> float:
    """Return the seconds until the first token of a waiting request is due, according to its TTFT objective. Return
    infinity if the request has no TTFT objective. Also return infinity if the request has a deadline. Such a request
    may wait, and its TTFT is counted only from the end of the wait."""
    slo = request.slo
    if slo is None or slo.objective.ttft_ms is None or slo.objective.deadline_ms is not None:
        return math.inf
    return slo.arrived + slo.objective.ttft_ms / 1e3 - now
