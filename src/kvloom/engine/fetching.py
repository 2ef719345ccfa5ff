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

from kvloom.core import KVCache, Match, Need, Question
from kvloom.tiers import Form, Objects
from kvloom.tiers.mover import Fetch, Mover, MoverConfig

from .arena import form_of
from .request import Request
from .speeds import Line, meeting
from .trip import Strip, Trip

__all__ = ["Fetching", "Forms", "LowerConfig"]

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
class LowerConfig:
    """`load`: "always" loads what is there and waits for it, "auto" computes meanwhile what is computed sooner, and waits only for
    what should come sooner than that; where it does not, `loss` of what computing everything would take is the most that is
    lost. What is asked of a tier it has twice as long for as computing would take, at least and at most so many `seconds`;
    while nobody knows what computing takes, a twentieth of the most is waited, for what should come within that."""

    load: Literal["auto", "always"] = "auto"
    seconds: tuple[float, float] = (0.1, 5.0)
    loss: float = 0.04
    mover: MoverConfig = field(default_factory=MoverConfig)


class Fetching:
    """`prefill` says what computing takes; `counts` are its owner's, where what was not worth it is counted, and so are the
    `trips` that are under way."""

    def __init__(
        self,
        cache: KVCache,
        mover: Mover,
        config: LowerConfig,
        prefill: Line,
        counts: dict[str, int],
        trips: Callable[[], Iterable[Trip]],
    ) -> None:
        self.trips = trips
        self.cache, self.mover, self.config = cache, mover, config
        self.prefill, self._counts = prefill, counts
        self.forms: Forms = {g.index: [form_of(g, run) for run in range(g.runs)] for g in cache.layout.groups}
        self.near: Forms = {
            group: [replace(form, exact=False) for form in forms] for group, forms in self.forms.items()
        }
        """The same for requests that allow for loss: their names are apart, and so are their pages."""
        self._fetching: dict[bytes, Fetch] = {}

    def forms_of(self, request: Request) -> Forms:
        return self.near if request.control.lossy else self.forms

    def seek(self, trip: Trip, match: Match | None) -> bool:
        """Find below and bring into host memory; whether that is still under way."""
        if not self.mover.lanes or trip.arrival is not None:
            return False
        if not trip.found:
            if trip.prospect is None:
                assert match is not None
                trip.prospect = self.cache.prospect(match)
            while True:
                if trip.finding is None:
                    questions = trip.prospect.questions()
                    if not questions:
                        break
                    trip.finding = self.mover.find([self.asked(q, trip.request) for q in questions])
                if not trip.finding.done:
                    return True
                trip.below.update(trip.finding.below)
                trip.prospect.answer(trip.finding.found)
                trip.finding = None
            trip.found = True
            self._fetching = {key: one for key, one in self._fetching.items() if not one.done}
            trip.request.lacking = trip.prospect.lacking
            self._fetch(trip)
        self._take_in(trip)
        return bool(trip.strips)

    def asked(self, question: Question, request: Request) -> Objects:
        """The objects that answer a question: of a group's runs, the first."""
        form = self.forms_of(request)[question.group][0]
        return Objects(question.names, question.group, form, request.control.tenant)

    def lacks(self, question: Question | None, request: Request) -> bool:
        """Whether one look says that host memory has nothing for a request: mostly so, and a prospect costs ten times that."""
        return question is not None and not any(
            key in self.mover.host for key in self.asked(question, request).keys
        )

    def worth(self, tokens: int, all_tokens: int, seconds: float | None) -> bool:
        """Whether `seconds` of loading beat computing `tokens` of the `all_tokens` that are to compute otherwise."""
        if self.config.load == "always" or seconds is None or not self.prefill.known:
            return True
        return seconds < self.prefill.seconds(all_tokens) - self.prefill.seconds(all_tokens - tokens)

    def _take_in(self, trip: Trip) -> None:
        """Note what has come, strip by strip; behind one that did not come whole nothing is waited for."""
        assert trip.prospect is not None
        while trip.strips and all(fetch.done for fetch in trip.strips[0].fetches):
            strip = trip.strips.popleft()
            trip.fetched.update(strip.lanes)
            if all(self.mover.host.lookup(one).all() for one in strip.objects):
                trip.low = strip.first
            elif trip.low < trip.prospect.point or self.cache.layout.of("state"):
                self.let_go(trip)

    def let_go(self, trip: Trip) -> None:
        """Nobody waits for what is still to come."""
        others = {id(fetch) for other in self.trips() if other is not trip for fetch in other.fetches}
        for fetch in trip.fetches:
            if id(fetch) not in others:
                fetch.cancel()
        trip.strips.clear()

    def _fetch(self, trip: Trip) -> None:
        """Bring what a trip found below host memory: all of it, or as much of the tail as comes while the head is computed."""
        assert trip.prospect is not None
        match, point, block = trip.prospect.match, trip.prospect.point, self.cache.block_tokens
        trip.low, whole, top = point, match.matched // block, -(-point // block)
        needs = trip.prospect.needs()
        # What stands before the prompt's new part, and states, is needed at its end: it comes with the last block.
        places: dict[int, list[tuple[int, int]]] = {}
        sizes = np.zeros((len(self.mover.lanes), top + 1), np.int64)
        for number, need in enumerate(needs):
            for i, (b, key) in enumerate(zip(need.blocks, self._objects(need, trip)[0].keys, strict=True)):
                if (lane := trip.below.get(key)) is not None:
                    at = b if b >= whole else top - 1
                    places.setdefault(at, []).append((number, i))
                    sizes[lane, at] += need.group.page_stride * need.group.runs
        trip.behind = sizes[:, ::-1].cumsum(1)[:, ::-1]
        if not places:
            return
        least, most = self.config.seconds
        patience = most / 2
        if self.prefill.known:
            patience = max(least, min(most, 2 * self.prefill.seconds(point - match.resume)))
        trip.deadline = time.monotonic() + patience
        if self.config.load == "always":
            self._ask(trip, needs, [one for b in sorted(places) for one in places[b]], match.resume)
            return
        first = self._first(trip)
        if first >= point:
            self._counts["not_worth"] += 1
            return
        behind = trip.behind.sum(0).tolist()
        each, size = min(self.mover.config.lane.piece, behind[0] // STRIPS), 0
        some: list[tuple[int, int]] = []
        for b in range(top - 1, first // block - 1, -1):
            if some and b in places and behind[b] - size > each:
                self._ask(trip, needs, some, (b + 1) * block)
                some, size = [], behind[b + 1]
            if behind[b] > FULL * self.mover.host.capacity:
                first = (b + 1) * block  # what comes later would push out what is there
                break
            some += places.get(b, [])
        if some:
            self._ask(trip, needs, some, first // block * block)

    def _first(self, trip: Trip) -> int:
        """From where on pages are asked for: well before where loading and computing should meet; the prompt's end where
        computing is so much faster that nothing is gained."""
        assert trip.prospect is not None
        match, point = trip.prospect.match, trip.prospect.point
        loading = self._loading(trip)
        if trip.patient or not match.control.store or not self.prefill.known or loading is None:
            return match.resume
        comes, tokens = loading, point - match.resume
        block = self.cache.block_tokens
        met = meeting(
            tokens // block,
            lambda n: self.prefill.seconds(n * block),
            lambda n: comes(match.resume + n * block),
        )
        if tokens - met * block < GAIN * tokens:
            for lane in self.mover.lanes:
                lane.rate.doubt()
            return point
        return match.resume + met // 2 * block

    def pace(self, trip: Trip, busy: float | None, now: float) -> int | None:
        """How many tokens a request computes from `front` on before what comes from below is looked at again; 0: it waits for
        that. None: nothing comes that it lacks. `busy`: seconds that the device still needs for its last step."""
        if trip.arrival is not None or not self.mover.lanes:
            return None
        under_way = self.seek(trip, None)
        if self.config.load == "always":
            return 0 if under_way else None
        computing = self.prefill.seconds if self.prefill.known else None
        end, block = len(trip.request.tokens), self.cache.block_tokens
        if not trip.found:
            return 0 if trip.pace.bears(0, computing, self._allowed(trip), now) else end
        assert trip.prospect is not None
        if trip.low <= trip.front or (not under_way and trip.low >= trip.prospect.point):
            return None
        if not under_way:
            return trip.low - trip.front
        loading, allowed = self._loading(trip), self._allowed(trip)
        if not trip.prospect.match.control.store:
            # What it computes is not kept: it cannot go on behind what comes.
            sooner = not computing or not loading or loading(trip.front) < computing(trip.low - trip.front)
            if sooner and trip.pace.bears(trip.low, computing, allowed, now):
                return 0
            self.let_go(trip)
            return None
        least = max(block, end // LEAST)
        return trip.pace.tokens(
            trip.front, trip.low, end, block, least, computing, loading, busy, allowed, now
        )

    def _loading(self, trip: Trip) -> Callable[[int], float] | None:
        """When everything from a token on that has not come will have; None while nobody knows how fast it comes."""
        behind, block = trip.behind, self.cache.block_tokens
        assert behind is not None
        low = behind[:, -(-trip.low // block)]
        lowest = trip.strips[-1].first // block if trip.strips else -(-trip.low // block)
        asked = lowest if trip.strips else 0  # what is not will never come
        waits = []  # for each lane that has some: seconds before ours, bytes a second
        for number, lane in enumerate(self.mover.lanes):
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

    def _allowed(self, trip: Trip) -> float:
        """Seconds that a request may lose by waiting in vain: a part of computing everything, or where that is little, twice
        what the first of its pages should take. While nobody knows what computing takes, some, unless that will not do."""
        loading = self._loading(trip) if trip.strips else None
        if not self.prefill.known:
            first = self.config.seconds[1] / 20
            return first if loading is None or loading(trip.front) <= first else 0.0
        share = self.config.loss * self.prefill.seconds(len(trip.request.tokens) - trip.front)
        if loading is None:
            return max(share, SOON)
        return max(share, SOON, min(LATE, 2 * loading(trip.strips[0].first)))

    def _ask(self, trip: Trip, needs: list[Need], places: list[tuple[int, int]], first: int) -> None:
        """Let pages come, each the place of one in a need: a strip of the trip. What others fetch is waited for."""
        wanted: list[Objects] = []
        below: dict[bytes, int] = {}
        fetches: list[Fetch] = []
        lanes: Counter[int] = Counter()
        for number, need in enumerate(needs):
            at = [i for n, i in places if n == number]
            if not at:
                continue
            runs = self._objects(replace(need, names=[need.names[i] for i in at]), trip)
            lanes.update(trip.below[key] for key in runs[0].keys)
            for one in runs:
                for key, main in zip(one.keys, runs[0].keys, strict=True):
                    other = self._fetching.get(key)
                    if other is None or other.done:
                        below[key] = trip.below[main]
                    elif other not in fetches:
                        fetches.append(other)
            wanted += runs
        if below:
            fetch = self.mover.fetch(wanted, below, trip.deadline)
            fetches.append(fetch)
            self._fetching.update(dict.fromkeys(below, fetch))
        trip.strips.append(Strip(first, wanted, fetches, lanes))

    def _objects(self, need: Need, trip: Trip) -> list[Objects]:
        group = need.group.index
        return [Objects(need.names, group, form, trip.tenant) for form in self.forms_of(trip.request)[group]]
