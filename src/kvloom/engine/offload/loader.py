"""What lies below host memory: found for a request that waits, and brought there.

    seek:  find (lookups, by and by) → fetch it in strips, the prompt's end first → host memory has it
    pace:  how far the request should compute meanwhile

Knows names and lanes, and when what is under way should have come; copies nothing into the pool: `lower.py` does.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kvloom.core import KVCache, Match, MissingPages, TierQuery
from kvloom.engine.request import Request
from kvloom.tiers import Form, Objects
from kvloom.tiers.transfers.transfer_manager import Fetch, Mover, MoverConfig

from .host_pages import form_of
from .load_job import LoadChunk, LoadJob
from .throughput import TimeModel, meeting_point

__all__ = ["Forms", "OffloadConfig", "TierLoader"]

Forms = dict[int, list[Form]]
"""By group, the form of each of its runs."""
GAIN = 0.05
"""A tail that saves less than this share of computing everything is left where it is."""
STRIPS = 32
"""Into how many parts a prompt's pages are cut, at least, that are of use as soon as they have come."""
LEAST = 32
"""A step computes this part of a prompt, at least: smaller ones take as long."""
FULL = 0.9
"""What one prompt may have of host memory."""
SOON = 0.002
"""Seconds in which nothing can be told: threads take turns."""
LATE = 0.01
"""Seconds that a short prompt may lose, at the most, where a part of computing it is less."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """`load`: "always" loads what is there and waits for it, "auto" computes meanwhile what is computed sooner, and waits only for
    what should come sooner than that; where it does not, `loss` of what computing everything would take is the most that is
    lost. What is asked of a tier it has twice as long for as computing would take, at least and at most so many `seconds`;
    while nobody knows what computing takes, a twentieth of the most is waited, for what should come within that."""

    load: Literal["auto", "always"] = "auto"
    seconds: tuple[float, float] = (0.1, 5.0)
    loss: float = 0.04
    transfers: MoverConfig = field(default_factory=MoverConfig)


class TierLoader:
    """`prefill` says what computing takes; `counts` are its owner's, where what was not worth it is counted, and so are the
    `trips` that are under way."""

    def __init__(
        self,
        cache: KVCache,
        mover: Mover,
        config: OffloadConfig,
        prefill: TimeModel,
        counts: dict[str, int],
        trips: Callable[[], Iterable[LoadJob]],
    ) -> None:
        self.jobs = trips
        self.cache, self.transfers, self.config = cache, mover, config
        self.prefill_time, self._counts = prefill, counts
        self.forms: Forms = {g.index: [form_of(g, run) for run in range(g.runs)] for g in cache.layout.groups}
        self.lossy_forms: Forms = {
            group: [replace(form, exact=False) for form in forms] for group, forms in self.forms.items()
        }
        """The same for requests that allow for loss: their names are apart, and so are their pages."""
        self._fetching: dict[bytes, Fetch] = {}

    def forms_of(self, request: Request) -> Forms:
        return self.lossy_forms if request.control.lossy else self.forms

    def advance(self, trip: LoadJob, match: Match | None) -> bool:
        """Find below and bring into host memory; whether that is still under way."""
        if not self.transfers.lanes or trip.reservation is not None:
            return False
        if not trip.is_planned:
            if trip.plan is None:
                assert match is not None
                trip.plan = self.cache.loading.plan(match)
            while True:
                if trip.lookup is None:
                    questions = trip.plan.next_queries()
                    if not questions:
                        break
                    trip.lookup = self.transfers.find([self.objects_for(q, trip.request) for q in questions])
                if not trip.lookup.done:
                    return True
                trip.tier_of.update(trip.lookup.below)
                trip.plan.answer(trip.lookup.found)
                trip.lookup = None
            trip.is_planned = True
            self._fetching = {key: one for key, one in self._fetching.items() if not one.done}
            trip.request.miss = trip.plan.miss
            self._start(trip)
        self._collect(trip)
        return bool(trip.chunks)

    def objects_for(self, question: TierQuery, request: Request) -> Objects:
        """The objects that answer a question: of a group's runs, the first."""
        form = self.forms_of(request)[question.group][0]
        return Objects(question.hashes, question.group, form, request.control.tenant)

    def host_misses(self, question: TierQuery | None, request: Request) -> bool:
        """Whether one look says that host memory has nothing for a request: mostly so, and a prospect costs ten times that."""
        return question is not None and not any(
            key in self.transfers.host for key in self.objects_for(question, request).keys
        )

    def is_worth_loading(self, tokens: int, all_tokens: int, seconds: float | None) -> bool:
        """Whether `seconds` of loading beat computing `tokens` of the `all_tokens` that are to compute otherwise."""
        if self.config.load == "always" or seconds is None or not self.prefill_time.is_known:
            return True
        return seconds < self.prefill_time.seconds(all_tokens) - self.prefill_time.seconds(
            all_tokens - tokens
        )

    def _collect(self, trip: LoadJob) -> None:
        """Note what has come, strip by strip; behind one that did not come whole nothing is waited for."""
        assert trip.plan is not None
        while trip.chunks and all(fetch.done for fetch in trip.chunks[0].fetches):
            strip = trip.chunks.popleft()
            trip.fetched_by_tier.update(strip.pages_by_tier)
            if all(self.transfers.host.lookup(one).all() for one in strip.objects):
                trip.loaded_from = strip.first
            elif trip.loaded_from < trip.plan.resume or self.cache.layout.of("state"):
                self.cancel(trip)

    def cancel(self, trip: LoadJob) -> None:
        """Nobody waits for what is still to come."""
        others = {id(fetch) for other in self.jobs() if other is not trip for fetch in other.fetches}
        for fetch in trip.fetches:
            if id(fetch) not in others:
                fetch.cancel()
        trip.chunks.clear()

    def _start(self, trip: LoadJob) -> None:
        """Bring what a trip found below host memory: all of it, or as much of the tail as comes while the head is computed."""
        assert trip.plan is not None
        match, point, block = trip.plan.match, trip.plan.resume, self.cache.block_tokens
        trip.loaded_from, whole, top = point, match.matched // block, -(-point // block)
        needs = trip.plan.missing_pages()
        # What stands before the prompt's new part, and states, is needed at its end: it comes with the last block.
        places: dict[int, list[tuple[int, int]]] = {}
        sizes = np.zeros((len(self.transfers.lanes), top + 1), np.int64)
        for number, need in enumerate(needs):
            for i, (b, key) in enumerate(zip(need.blocks, self._objects(need, trip)[0].keys, strict=True)):
                if (lane := trip.tier_of.get(key)) is not None:
                    at = b if b >= whole else top - 1
                    places.setdefault(at, []).append((number, i))
                    sizes[lane, at] += need.group.page_stride * need.group.runs
        trip.bytes_from = sizes[:, ::-1].cumsum(1)[:, ::-1]
        if not places:
            return
        least, most = self.config.seconds
        patience = most / 2
        if self.prefill_time.is_known:
            patience = max(least, min(most, 2 * self.prefill_time.seconds(point - match.resume)))
        trip.deadline = time.monotonic() + patience
        if self.config.load == "always":
            self._request_chunk(trip, needs, [one for b in sorted(places) for one in places[b]], match.resume)
            return
        first = self._first_token(trip)
        if first >= point:
            self._counts["not_worth"] += 1
            return
        behind = trip.bytes_from.sum(0).tolist()
        each, size = min(self.transfers.config.lane.piece, behind[0] // STRIPS), 0
        some: list[tuple[int, int]] = []
        for b in range(top - 1, first // block - 1, -1):
            if some and b in places and behind[b] - size > each:
                self._request_chunk(trip, needs, some, (b + 1) * block)
                some, size = [], behind[b + 1]
            if behind[b] > FULL * self.transfers.host.capacity:
                first = (b + 1) * block  # what comes later would push out what is there
                break
            some += places.get(b, [])
        if some:
            self._request_chunk(trip, needs, some, first // block * block)

    def _first_token(self, trip: LoadJob) -> int:
        """From where on pages are asked for: well before where loading and computing should meet; the prompt's end where
        computing is so much faster that nothing is gained."""
        assert trip.plan is not None
        match, point = trip.plan.match, trip.plan.resume
        loading = self._load_seconds(trip)
        if trip.can_wait or not match.control.store or not self.prefill_time.is_known or loading is None:
            return match.resume
        comes, tokens = loading, point - match.resume
        block = self.cache.block_tokens
        met = meeting_point(
            tokens // block,
            lambda n: self.prefill_time.seconds(n * block),
            lambda n: comes(match.resume + n * block),
        )
        if tokens - met * block < GAIN * tokens:
            for lane in self.transfers.lanes:
                lane.rate.doubt()
            return point
        return match.resume + met // 2 * block

    def tokens_to_compute(self, trip: LoadJob, busy: float | None, now: float) -> int | None:
        """How many tokens a request computes from `front` on before what comes from below is looked at again; 0: it waits for
        that. None: nothing comes that it lacks. `busy`: seconds that the device still needs for its last step."""
        if trip.reservation is not None or not self.transfers.lanes:
            return None
        under_way = self.advance(trip, None)
        if self.config.load == "always":
            return 0 if under_way else None
        computing = self.prefill_time.seconds if self.prefill_time.is_known else None
        end, block = len(trip.request.tokens), self.cache.block_tokens
        if not trip.is_planned:
            return 0 if trip.decision.may_wait(0, computing, self._patience(trip), now) else end
        assert trip.plan is not None
        if trip.loaded_from <= trip.computed_to or (not under_way and trip.loaded_from >= trip.plan.resume):
            return None
        if not under_way:
            return trip.loaded_from - trip.computed_to
        loading, allowed = self._load_seconds(trip), self._patience(trip)
        if not trip.plan.match.control.store:
            # What it computes is not kept: it cannot go on behind what comes.
            sooner = (
                not computing
                or not loading
                or loading(trip.computed_to) < computing(trip.loaded_from - trip.computed_to)
            )
            if sooner and trip.decision.may_wait(trip.loaded_from, computing, allowed, now):
                return 0
            self.cancel(trip)
            return None
        least = max(block, end // LEAST)
        return trip.decision.tokens_to_compute(
            trip.computed_to, trip.loaded_from, end, block, least, computing, loading, busy, allowed, now
        )

    def _load_seconds(self, trip: LoadJob) -> Callable[[int], float] | None:
        """When everything from a token on that has not come will have; None while nobody knows how fast it comes."""
        behind, block = trip.bytes_from, self.cache.block_tokens
        assert behind is not None
        low = behind[:, -(-trip.loaded_from // block)]
        lowest = trip.chunks[-1].first // block if trip.chunks else -(-trip.loaded_from // block)
        asked = lowest if trip.chunks else 0  # what is not will never come
        waits = []  # for each lane that has some: seconds before ours, bytes a second
        for number, lane in enumerate(self.transfers.lanes):
            if behind[number, 0]:
                if not lane.rate.speed:
                    return None
                others = max(0, lane.ahead(trip.deadline) - int(behind[number, lowest] - low[number]))
                waits.append((number, lane.latency + others / lane.rate.speed, lane.rate.speed))

        def seconds(first: int) -> float:
            at = max(0, first // block)
            if at < asked:
                return math.inf
            left = [(int(behind[n, at] - low[n]), before, speed) for n, before, speed in waits]
            return max((before + size / speed for size, before, speed in left if size > 0), default=0.0)

        return seconds

    def _patience(self, trip: LoadJob) -> float:
        """Seconds that a request may lose by waiting in vain: a part of computing everything, or where that is little, twice
        what the first of its pages should take. While nobody knows what computing takes, some, unless that will not do."""
        loading = self._load_seconds(trip) if trip.chunks else None
        if not self.prefill_time.is_known:
            first = self.config.seconds[1] / 20
            return first if loading is None or loading(trip.computed_to) <= first else 0.0
        share = self.config.loss * self.prefill_time.seconds(len(trip.request.tokens) - trip.computed_to)
        if loading is None:
            return max(share, SOON)
        return max(share, SOON, min(LATE, 2 * loading(trip.chunks[0].first)))

    def _request_chunk(
        self, trip: LoadJob, needs: list[MissingPages], places: list[tuple[int, int]], first: int
    ) -> None:
        """Let pages come, each the place of one in a need: a strip of the trip. What others fetch is waited for."""
        wanted: list[Objects] = []
        below: dict[bytes, int] = {}
        fetches: list[Fetch] = []
        lanes: Counter[int] = Counter()
        for number, need in enumerate(needs):
            at = [i for n, i in places if n == number]
            if not at:
                continue
            runs = self._objects(replace(need, hashes=[need.hashes[i] for i in at]), trip)
            lanes.update(trip.tier_of[key] for key in runs[0].keys)
            for one in runs:
                for key, main in zip(one.keys, runs[0].keys, strict=True):
                    other = self._fetching.get(key)
                    if other is None or other.done:
                        below[key] = trip.tier_of[main]
                    elif other not in fetches:
                        fetches.append(other)
            wanted += runs
        if below:
            fetch = self.transfers.fetch(wanted, below, trip.deadline)
            fetches.append(fetch)
            self._fetching.update(dict.fromkeys(below, fetch))
        trip.chunks.append(LoadChunk(first, wanted, fetches, lanes))

    def _objects(self, need: MissingPages, trip: LoadJob) -> list[Objects]:
        group = need.group.index
        return [Objects(need.hashes, group, form, trip.tenant) for form in self.forms_of(trip.request)[group]]
