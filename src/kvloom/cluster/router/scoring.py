"""Chooses the worker with the smallest expected cost for a request. The cost is in seconds:

    time to first token   backlog of the worker + prefill of the missing tokens + load of pages that are not on the GPU
    + delay of others     time that later requests wait for this prefill, in proportion to the worker's load
    + eviction            time to recompute the pages that the prefill evicts from a full pool
    + decode load         time of decode steps during the prefill, and a cost of pages that running requests occupy
    + adapter             the time to load an adapter that is not resident
    - affinity            a reduction for the last worker of the session, unless this worker is overloaded

The cost is computed from the requests that this router sent, the times of their first tokens and ends, and the events
of workers. The present time is an argument of all methods, so workers can be simulated: `kvloom replay --workers` uses
these classes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Choice", "Scorer", "ScoringOptions", "SpeedModel", "WorkerLoad"]

MAX_SESSIONS = 100_000
SCORED = 8
"""Largest number of workers whose whole cost is computed. These are the best workers by backlog and cached tokens."""
NONE = (0, 0, 0, 0)
"""Cached tokens of a worker that has no block of the prompt."""

FULL_SHARE = 0.9
"""A pool counts as full if the blocks that events report fill this share of it. Pages of partial blocks and running
answers are not in events.
"""


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """Weights of the score.

    | option             | meaning                                                                                                      |
    |--------------------|--------------------------------------------------------------------------------------------------------------|
    | `delay_weight`     | cost of delaying later requests: seconds per second of prefill, on a worker that is always busy              |
    | `eviction_weight`  | cost of evicting cached pages: multiple of the time that it takes to compute them again                      |
    | `decode_seconds`   | seconds that decode adds to each step of a prefill, if running requests fill the pool                        |
    | `step_tokens`      | number of prompt tokens in one step                                                                          |
    | `memory_seconds`   | cost of pages of running requests: 0 up to 80 % of the pool, then growing to this value at 100 %             |
    | `affinity_seconds` | seconds by which the cost of a session's last worker is reduced                                              |
    | `overload_seconds` | seconds by which a worker's backlog may exceed the smallest backlog; above this, the worker gets no affinity |
    | `foreign_seconds`  | cost of each request that another router sent to the worker                                                  |
    | `adapter_seconds`  | cost of an adapter that is not resident                                                                      |
    | `load_rates`       | tokens per second at which pages load from CPU, DISK and STORAGE                                             |
    """

    delay_weight: float = 1.0
    eviction_weight: float = 2.0
    decode_seconds: float = 0.03
    step_tokens: int = 8192
    memory_seconds: float = 5.0
    affinity_seconds: float = 0.05
    overload_seconds: float = 2.0
    foreign_seconds: float = 0.02
    adapter_seconds: float = 0.5
    load_rates: tuple[float, float, float] = (200_000.0, 25_000.0, 50_000.0)


class SpeedModel:
    """Predicts the time of a prefill: constant seconds, plus seconds per token. Learns both values from observed times
    to first token."""

    def __init__(self, seconds: float = 0.02, per_token: float = 2e-5, weight: float = 0.05) -> None:
        self.seconds, self.per_token, self._weight = seconds, per_token, weight

    def prefill(self, tokens: int) -> float:
        return self.seconds + self.per_token * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Update the model with a request that computed `tokens` prompt tokens in `seconds`. Do not call this method
        for a request that waited for another request."""
        if tokens < 64:
            self.seconds += self._weight * (min(seconds, 1.0) - self.seconds)
        else:
            found = max(seconds - self.seconds, 0.1 * seconds) / tokens
            self.per_token += self._weight * (
                min(max(found, self.per_token / 8), self.per_token * 8) - self.per_token
            )


@dataclass(slots=True)
class _Sent:
    """A request of `tokens` tokens that the router sent to a worker at time `at`. `compute` is the number of these
    tokens that the worker must compute, and `seconds` is the estimated time to compute them. `has_first` states that
    the first token has arrived.
    """

    compute: int
    tokens: int
    seconds: float
    at: float
    has_first: bool = False


@dataclass(slots=True)
class WorkerLoad:
    """The requests that this router sent to one worker.

    - `capacity` is the size of the pool in tokens, or 0 if unknown.
    - `busy_until` is the time until which the worker computes its queued prompts.
    - `adapters` are the LoRA adapters that are on its device, or that a sent request uses.
    """

    capacity: int = 0
    speed: SpeedModel = field(default_factory=SpeedModel)
    busy_until: float = 0.0
    tokens: int = 0
    """Number of tokens of all requests."""
    requests: dict[object, _Sent] = field(default_factory=dict)
    waiting: int = 0
    """Number of requests that have no first token yet."""
    waiting_tokens: int = 0
    """Number of prompt tokens to compute for the waiting requests."""
    decoding_tokens: int = 0
    """Number of tokens of the requests that have a first token."""
    busy_share: float = 0.0
    """Fraction of recent time in which the worker computed prompts."""
    adapters: set[str] = field(default_factory=set)
    cached_tokens: int = 0
    """Number of tokens whose pages are in the pool, from events."""
    foreign: int = 0
    """Number of open requests that other routers sent to the worker."""
    _last_first: float = 0.0
    share_at: float = 0.0

    def backlog(self, now: float) -> float:
        """Return the expected seconds until the worker has computed its queued prompts."""
        return max(0.0, self.busy_until - now)

    def sent(self, key: object, compute: int, tokens: int, now: float) -> None:
        """Record a request of `tokens` tokens that was sent to the worker. `compute` is the number of these tokens
        that the worker must compute."""
        seconds = self.speed.prefill(compute)
        self.requests[key] = _Sent(compute, tokens, seconds, now)
        self.tokens += tokens
        self.waiting += 1
        self.waiting_tokens += compute
        self.busy_until = max(now, self.busy_until) + seconds
        self._decay(now)
        self.busy_share = min(1.0, self.busy_share + seconds / BUSY_SECONDS)

    def first_token(self, key: object, now: float) -> None:
        """Record the first token of a request. If the request did not wait for another request, its time to first token
        updates the speed model."""
        one = self.requests.get(key)
        if one is None or one.has_first:
            return
        one.has_first = True
        self.waiting -= 1
        self.waiting_tokens -= one.compute
        self.decoding_tokens += one.tokens
        if (
            self._last_first <= one.at and self.waiting == 0
        ):  # the request waited for no other request, and shared no step with one
            self.speed.observe(one.compute, now - one.at)
        self._last_first = now
        left = sum(other.seconds for other in self.requests.values() if not other.has_first)
        self.busy_until = now + left

    def grew(self, key: object, tokens: int = 1) -> None:
        """Record output tokens of a request."""
        one = self.requests.get(key)
        if one is not None:
            one.tokens += tokens
            self.tokens += tokens
            if one.has_first:
                self.decoding_tokens += tokens

    def ended(self, key: object, now: float) -> None:
        """Record the end of a request."""
        one = self.requests.pop(key, None)
        if one is None:
            return
        self.tokens -= one.tokens
        if one.has_first:
            self.decoding_tokens -= one.tokens
        else:
            self.waiting -= 1
            self.waiting_tokens -= one.compute
            self.busy_until = max(now, self.busy_until - one.seconds)

    def load_share(self, now: float) -> float:
        """Return the fraction of recent time in which the worker computed prompts, from 0 (idle) to 1 (saturated)."""
        self._decay(now)
        return self.busy_share

    def _decay(self, now: float) -> None:
        if now > self.share_at + 0.05:
            self.busy_share *= 0.5 ** ((now - self.share_at) / (BUSY_SECONDS / 2))
            self.share_at = now


BUSY_SECONDS = 30.0
"""Time in seconds over which the load of a worker is averaged."""


class Choice(NamedTuple):
    """The chosen worker.

    - `seconds` is the expected time to first token.
    - `cached` is the number of prompt tokens that the worker need not compute.
    - `on_gpu` is the number of these tokens whose pages are on its GPU.
    """

    worker: str
    seconds: float
    cached: int
    on_gpu: int


class Scorer:
    """Chooses workers. The caller reports sent requests, first tokens and ends to `loads`."""

    def __init__(self, options: ScoringOptions | None = None) -> None:
        self.options = options or ScoringOptions()
        self.loads: dict[str, WorkerLoad] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose(
        self,
        prompt_tokens: int,
        lengths: Mapping[str, Sequence[int]],
        candidates: Iterable[str],
        now: float,
        session: str | None = None,
        adapter: str | None = None,
    ) -> Choice | None:
        """Return the candidate with the smallest cost, or None if there are no candidates. `lengths` has, for each
        worker, the number of its cached prompt tokens by medium (`FleetIndex.lengths`).

        Workers are first ranked by backlog and cached tokens. The whole cost is then computed for the first SCORED
        workers and for the last worker of the session. A worker is skipped if a lower bound of its cost is already
        above the smallest cost so far. Takes about 0.3 µs per candidate, and 2 µs for each whole cost.
        """
        names = [*candidates]
        if not names:
            return None
        loads = [self.loads[name] for name in names]
        have = [lengths.get(name, NONE) for name in names]
        rough = [
            (load.busy_until if load.busy_until > now else now) - load.speed.per_token * cached[-1]
            for load, cached in zip(loads, have, strict=True)
        ]
        ranked = sorted(range(len(names)), key=rough.__getitem__)[:SCORED]
        home = None if session is None else self._sessions.get(session)
        if home in names:
            ranked.append(names.index(home))
        choice, best_cost = None, math.inf
        for at in ranked:
            name, load = names[at], loads[at]
            discount = 0.0 if name != home else self._affinity(load, loads, now)
            # A lower bound: without the other parts of the cost.
            least = rough[at] - now + load.speed.prefill(prompt_tokens)
            if least - discount >= best_cost:
                continue
            cost, seconds, cached, on_gpu = self._cost(load, prompt_tokens, have[at], now)
            if adapter is not None and adapter not in load.adapters:
                cost += self.options.adapter_seconds
            if cost - discount < best_cost:
                choice, best_cost = Choice(name, seconds, cached, on_gpu), cost - discount
        assert choice is not None
        if session is not None:
            self._sessions[session] = choice.worker
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    def _affinity(self, load: WorkerLoad, loads: list[WorkerLoad], now: float) -> float:
        """Return the seconds by which the cost of a session's last worker is reduced, or 0 if this worker is
        overloaded."""
        least = max(now, min([one.busy_until for one in loads]))
        is_overloaded = load.busy_until - least > self.options.overload_seconds
        return 0.0 if is_overloaded else self.options.affinity_seconds

    def _cost(
        self, load: WorkerLoad, prompt_tokens: int, have: Sequence[int], now: float
    ) -> tuple[float, float, int, int]:
        """Return four values: the cost of a worker in seconds, its expected time to first token in seconds, the number
        of its cached prompt tokens, and how many of these are on the GPU. The cost excludes session affinity and the
        time to load an adapter.
        """
        options, limit = self.options, prompt_tokens - 1
        on_gpu, cached = have[0], have[-1]
        if cached > limit:
            on_gpu, cached = min(on_gpu, limit), limit
        reading = 0.0
        if cached > on_gpu:
            for rate, near, far in zip(options.load_rates, have, have[1:], strict=False):
                reading += (min(far, limit) - min(near, limit)) / rate
            if (
                load.speed.per_token * (cached - on_gpu) < reading
            ):  # the worker recomputes tokens if this is faster than loading
                cached, reading = on_gpu, 0.0
        new = prompt_tokens - cached
        speed = load.speed
        compute = speed.seconds + speed.per_token * new
        seconds = compute + reading + load.foreign * options.foreign_seconds
        if load.busy_until > now:
            seconds += load.busy_until - now
        full = evicted = 0.0
        if load.capacity:
            steps = 1.0 + (new + load.waiting_tokens) / options.step_tokens
            seconds += options.decode_seconds * steps * min(1.0, load.decoding_tokens / load.capacity)
            evicted = load.cached_tokens + new - FULL_SHARE * load.capacity
            full = (load.tokens + prompt_tokens - on_gpu) / load.capacity - 0.8
        cost = (
            seconds
            + options.delay_weight
            * (load.busy_share if now - load.share_at < 0.05 else load.load_share(now))
            * compute
        )
        if evicted > 0.0:
            cost += options.eviction_weight * speed.per_token * min(evicted, new)
        if full > 0.0:
            cost += options.memory_seconds * full / 0.2
        return cost, seconds, cached, on_gpu
