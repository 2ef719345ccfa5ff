"""What lies below host memory: found for a request that waits, and brought there.

    seek:  find (lookups, by and by) → fetch all of it, or the tail while the head is computed → host memory has it

Knows names and lanes; copies nothing into the pool, and asks nobody to wait: `lower.py` does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kvloom.core import KVCache, Match, Need, Question
from kvloom.tiers import Form, Objects
from kvloom.tiers.mover import Fetch, Mover, MoverConfig

from .arena import form_of
from .speeds import Line, meeting
from .trip import Trip

__all__ = ["Fetching", "Forms", "LowerConfig"]

Forms = dict[int, list[Form]]
"""By group, the form of each of its runs."""
GAIN = 0.1
"""Computing the head while the tail loads is worth its steps where it saves this share of loading everything."""


@dataclass(frozen=True, slots=True)
class LowerConfig:
    """`load`: "always" loads what is there, "auto" what is faster to load than to compute. A request waits for a tier as long
    as computing would take, but at least and at most so many `seconds`."""

    load: Literal["auto", "always"] = "auto"
    seconds: tuple[float, float] = (0.1, 5.0)
    mover: MoverConfig = field(default_factory=MoverConfig)


class Fetching:
    """`prefill` says what computing takes; `counts` are its owner's, where what was not worth it is counted."""

    def __init__(
        self, cache: KVCache, mover: Mover, config: LowerConfig, prefill: Line, counts: dict[str, int]
    ) -> None:
        self.cache, self.mover, self.config = cache, mover, config
        self.prefill, self._counts = prefill, counts
        self.forms: Forms = {g.index: [form_of(g, run) for run in range(g.runs)] for g in cache.layout.groups}
        self.near: Forms = {
            group: [replace(form, exact=False) for form in forms] for group, forms in self.forms.items()
        }
        """The same for requests that allow for loss: their names are apart, and so are their pages."""
        self._fetching: dict[bytes, Fetch] = {}

    def forms_of(self, trip: Trip) -> Forms:
        return self.near if trip.request.control.lossy else self.forms

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
                    trip.finding = self.mover.find([self.asked(q, trip) for q in questions])
                if not trip.finding.done:
                    return True
                trip.below.update(trip.finding.below)
                trip.prospect.answer(trip.finding.found)
                trip.finding = None
            trip.found = True
            trip.request.lacking = trip.prospect.lacking
            self._fetch(trip)
        trip.fetches = [fetch for fetch in trip.fetches if not fetch.done]
        return bool(trip.fetches)

    def asked(self, question: Question, trip: Trip) -> Objects:
        """The objects that answer a question: of a group's runs, the first."""
        return Objects(question.names, question.group, self.forms_of(trip)[question.group][0], trip.tenant)

    def _fetch(self, trip: Trip) -> None:
        """Bring what a trip found below host memory: all of it, or the tail while the head is computed."""
        assert trip.prospect is not None
        wanted, below = self._lacking(trip, 0)
        if not below:
            self._note(trip)
            return
        trip.first = self._meeting(trip)
        if trip.first:
            wanted, below = self._lacking(trip, trip.first)
        match, point = trip.prospect.match, trip.prospect.point
        if not below or trip.first >= point:
            self._counts["not_worth"] += 1
            trip.first = 0
            return
        least, most = self.config.seconds
        tokens = point - match.resume
        patience = max(least, min(most, 2 * self.prefill.seconds(tokens))) if self.prefill.known else most / 2
        self._note(trip)
        fetch = self.mover.fetch(wanted, below, time.monotonic() + patience)
        trip.fetches.append(fetch)
        self._fetching = {key: one for key, one in self._fetching.items() if not one.done}
        self._fetching.update(dict.fromkeys(below, fetch))

    def _note(self, trip: Trip) -> None:
        """Count what comes from which lane; others may be bringing it."""
        assert trip.prospect is not None
        for need in trip.prospect.needs(trip.first):
            trip.fetched.update(
                trip.below[key] for key in self._objects(need, trip)[0].keys if key in trip.below
            )

    def _meeting(self, trip: Trip) -> int:
        """Where computing from the left and loading from the right should meet; 0: load everything, and compute nothing."""
        assert trip.prospect is not None
        match, point, block = trip.prospect.match, trip.prospect.point, self.cache.block_tokens
        if trip.patient or not match.control.store or self.config.load == "always" or not self.prefill.known:
            return 0
        # Bytes of block b at b + 1, of states at 0.
        sizes = np.zeros((len(self.mover.lanes), point // block + 2), np.int64)
        for need in trip.prospect.needs():
            keys = self._objects(need, trip)[0].keys
            for b, key in zip(need.blocks, keys, strict=True):
                if key in trip.below:
                    sizes[trip.below[key], b + 1] += need.group.page_stride * need.group.runs

        def loading(first: int) -> float | None:
            rest = sizes[:, 0] + sizes[:, first // block + 1 :].sum(1)
            return self.mover.seconds({lane: int(size) for lane, size in enumerate(rest) if size})

        whole, start = loading(match.resume), -(-match.resume // block) * block
        if whole is None:
            return 0

        def computing(blocks: int) -> float:
            return self.prefill.seconds(start + blocks * block - match.resume)

        low = meeting(
            max(0, (point - start) // block), computing, lambda blocks: loading(start + blocks * block) or 0.0
        )
        return start + low * block if low and self.prefill.seconds(low * block) < (1 - GAIN) * whole else 0

    def _lacking(self, trip: Trip, first: int) -> tuple[list[Objects], dict[bytes, int]]:
        """What is below host memory of a trip's pages from `first` on, and where; what others fetch is waited for."""
        assert trip.prospect is not None
        wanted: list[Objects] = []
        below: dict[bytes, int] = {}
        for need in trip.prospect.needs(first):
            runs = self._objects(need, trip)
            for one in runs:
                for key, main in zip(one.keys, runs[0].keys, strict=True):
                    if main not in trip.below:
                        continue
                    other = self._fetching.get(key)
                    if other is None or other.done:
                        below[key] = trip.below[main]
                    elif other not in trip.fetches:
                        trip.fetches.append(other)
            wanted += runs
        return wanted, below

    def _objects(self, need: Need, trip: Trip) -> list[Objects]:
        group = need.group.index
        return [Objects(need.names, group, form, trip.tenant) for form in self.forms_of(trip)[group]]
