"""Plans a fleet: how many workers a trace needs to meet its objectives, with and without roles, and whether to switch
roles during the trace.

    mixed    the fewest workers without roles, which compute prompts and decode
    split    the fewest prefill workers for the TTFT, then the fewest decode workers for the time between tokens
    windows  the best split of the same workers in each part of the trace

The plan is found by replays (`replay_fleet`). A fleet meets the objective if the 99th percentiles of its times do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvloom.core import Objective

from .fleet import FleetOutcome, replay_fleet
from .traffic import Traffic

__all__ = ["FleetPlan", "Window", "plan_fleet"]

MAX_REPAIRS = 8
"""Largest number of workers that are added after the two searches for a split. Each search finds the number of workers
of one role, although the two numbers affect each other. Together they may therefore be too small.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the trace, and the number of prefill workers that is best for it (`prefill`).

    The excess of a fleet is the 99th percentile of a time, divided by the objective of this time. There is one such
    ratio for TTFT and one for the time between tokens, and the larger counts. The fleet meets the objectives if its
    excess is at most 1. `excess` is the excess with `prefill` prefill workers, and `planned_excess` the excess with the
    plan's number of prefill workers.
    """

    start: float
    end: float
    requests: int
    prefill: int
    excess: float
    planned_excess: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The smallest fleets that meet the objective. `mixed` is a fleet without roles, and `split` a fleet with
    prefill and decode workers. Each is None if no fleet of its type within the limit of workers meets the
    objective."""

    objective: Objective
    mixed: FleetOutcome | None
    split: FleetOutcome | None
    windows: tuple[Window, ...] = ()

    @property
    def answer(self) -> str:
        """The recommendation in one sentence."""
        if self.mixed is None and self.split is None:
            return "no fleet within the limit meets the objectives: allow more workers, or raise them"
        if self.split is None or (self.mixed is not None and self.mixed.workers <= self.split.workers):
            assert self.mixed is not None
            return f"use {self.mixed.workers} workers without roles"
        decode = self.split.workers - self.split.prefill
        return f"use {self.split.prefill} prefill and {decode} decode workers"

    @property
    def switches(self) -> str:
        """A sentence that recommends to switch roles during the trace, or advises against it."""
        if self.split is None or not self.windows:
            return "there is no split to switch"
        better = [one for one in self.windows if one.prefill != self.split.prefill]
        if not better:
            return "keep the roles: the split is the best in every part of the trace"
        missed = [one for one in better if one.planned_excess > 1.0 >= one.excess]
        what = ", ".join(f"{one.prefill} prefill from {one.start:,.0f} s" for one in better)
        why = f"it meets the objectives in {len(missed)} more parts" if missed else "the gain is small"
        return f"switch roles ({what}): {why}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttft_ms": self.objective.ttft_ms,
            "tbt_ms": self.objective.tbt_ms,
            "answer": self.answer,
            "switches": self.switches,
            "mixed": None if self.mixed is None else self.mixed.to_dict(),
            "split": None if self.split is None else self.split.to_dict(),
            "windows": [asdict(one) for one in self.windows],
        }


def excess_of(outcome: FleetOutcome, objective: Objective) -> tuple[float, float]:
    """Return the 99th percentiles of TTFT and of time between tokens, each divided by its objective. If an
    objective is not set, its ratio is 0.
    """
    ttft, tbt = objective.ttft_ms, objective.tbt_ms
    return (
        0.0 if ttft is None else 1e3 * outcome.p99_ttft / ttft,
        0.0 if tbt is None else 1e3 * outcome.p99_tbt / tbt,
    )


def plan_fleet(
    traffic: Traffic,
    blocks: int,
    objective: Objective,
    *,
    speed: float = 1.0,
    link_tokens: float = math.inf,
    limit: int = 256,
    windows: int = 4,
    progress: Callable[[str], None] = lambda text: None,
) -> FleetPlan:
    """Find the smallest fleets of at most `limit` workers with `blocks` blocks each. Replays the trace about 20
    times. If a fleet with roles meets the objective, the trace is also divided into `windows` parts of equal
    time. The function then finds the best number of prefill workers for each part. `speed` and `link_tokens`
    have the same meaning as in `replay_fleet`.

    Raises ValueError without an objective, or if prompt and output of a request exceed a pool.
    """
    if not objective:
        raise ValueError("a plan needs objectives: give --slo-ttft and --slo-tbt")
    replays: dict[tuple[int, int], FleetOutcome] = {}

    def run(workers: int, prefill: int = 0, part: Traffic = traffic) -> FleetOutcome:
        key = workers, prefill
        if part is traffic and key in replays:
            return replays[key]
        roles = f"{prefill} prefill and {workers - prefill} decode" if prefill else f"{workers}"
        progress(f"{roles} workers")
        found = replay_fleet(
            part, workers, blocks, speed=speed, prefill=prefill, link_tokens=link_tokens, objective=objective
        )
        if part is traffic:
            replays[key] = found
        return found

    def meets(outcome: FleetOutcome) -> bool:
        return max(excess_of(outcome, objective)) <= 1.0

    mixed = _fewest(lambda n: meets(run(n)), 1, limit)
    split = _plan_split(run, objective, limit, mixed)
    found = []
    if split is not None and windows > 1:
        prefill, workers = split
        for part, start, end in _parts(traffic, windows):
            tried = {p: run(workers, p, part) for p in range(prefill - 1, prefill + 2) if 0 < p < workers}
            scores = {p: max(excess_of(one, objective)) for p, one in tried.items()}
            best = min(scores, key=lambda p: (scores[p], abs(p - prefill)))
            if scores[best] > 0.9 * scores[prefill]:
                best = prefill  # the gain is not worth a switch of roles
            found.append(
                Window(start / speed, end / speed, len(part.requests), best, scores[best], scores[prefill])
            )
    progress("")
    return FleetPlan(
        objective,
        None if mixed is None else run(mixed),
        None if split is None else run(split[1], split[0]),
        tuple(found),
    )


def _plan_split(
    run: Callable[..., FleetOutcome], objective: Objective, limit: int, mixed: int | None
) -> tuple[int, int] | None:
    """Return the number of prefill workers and of all workers in the smallest split that meets the objective. Return
    None if no split with up to `limit` workers meets it."""
    most = max(2, min(limit, 2 * (mixed or limit)))
    decode = max(1, most // 2)
    prefill = _fewest(lambda p: excess_of(run(p + decode, p), objective)[0] <= 1.0, 1, most)
    if prefill is None:
        return None
    first = prefill
    fewest = _fewest(lambda d: excess_of(run(first + d, first), objective)[1] <= 1.0, 1, most)
    if fewest is None:
        return None
    decode = fewest
    for _ in range(MAX_REPAIRS):
        ttft, tbt = excess_of(run(prefill + decode, prefill), objective)
        if max(ttft, tbt) <= 1.0:
            return (prefill, prefill + decode) if prefill + decode <= limit else None
        if tbt > 1.0:
            decode += 1
        else:
            # Long queues of either kind of worker delay first tokens: add the worker that helps more.
            more = excess_of(run(prefill + 1 + decode, prefill + 1), objective)[0]
            other = excess_of(run(prefill + decode + 1, prefill), objective)[0]
            prefill, decode = (prefill + 1, decode) if more <= other else (prefill, decode + 1)
    return None


def _fewest(is_enough: Callable[[int], bool], low: int, limit: int) -> int | None:
    """Return the smallest number from `low` to `limit` for which `is_enough` returns True, or None if there is none. If
    `is_enough` is True for a number, it must be True for all larger numbers. The number of calls is O(log(result)).
    """
    high = low
    while not is_enough(high):
        if high >= limit:
            return None
        low, high = high + 1, min(limit, 2 * high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def _parts(traffic: Traffic, count: int) -> list[tuple[Traffic, float, float]]:
    """Divide the time of the traffic into `count` equal parts. Return (traffic, start, end) for each part. Start
    and end are in seconds after the first request. Parts with fewer than two requests are omitted.
    """
    begin, each = traffic.requests[0].at, max(1e-9, traffic.seconds) / count
    found = []
    for number in range(count):
        start, end = begin + number * each, begin + (number + 1) * each
        last = number == count - 1
        own = tuple(one for one in traffic.requests if start <= one.at and (one.at < end or last))
        if len(own) > 1:
            found.append((replace(traffic, requests=own), start - begin, end - begin))
    return found
