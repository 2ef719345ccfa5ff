"""How much longer requests that run will get: who is let in leaves them the room for it.

    room  >=  what is held, and prompts still lack  +  what all will have grown by a time  -  what those that ended before it held alone

at whatever time, from now on, somebody is expected to end.

Letting in everybody who has room now looks better than it is: when pages run out, somebody gives its own up and computes them
again. Nobody knows how long an answer will be. It is taken to be as long as answers were of late, within its limit, and one that
is longer already to go on for a while. An estimate: where it was too low, the scheduler still finds somebody to give way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache
from kvloom.engine.request import Request

__all__ = ["Admission"]

Ints = npt.NDArray[np.int64]
TYPICAL = 256
"""Tokens of an answer, before any has ended."""
MEMORY = 32
"""Answers that weigh in what is typical."""
HAVE, END, _, LEFT = range(4)
LAG = 2
"""Steps after its last in which an ended request may still hold its pages."""


class Admission:
    """What the requests on one cache will come to hold. `look` begins a step."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._typical = float(TYPICAL)
        self._courses: Ints | None = None
        self._per_slab = np.array([[cls.per_slab] for cls in cache.inspect.size_classes])
        self._block, self._states = np.zeros((2, len(self._per_slab), 1), np.int64)
        for pages, kind in ((self._block, "token"), (self._states, "state")):
            for group in cache.layout.of(kind):
                pages[cache.class_of[group.index]] += group.runs
        self._promised = self._lacked = np.zeros_like(self._block)

    def request_finished(self, request: Request) -> None:
        """Learn from an answer."""
        self._typical += (request.output_count - self._typical) / MEMORY

    def refresh(self) -> None:
        """A step begins, or somebody is coming: what is known of the others is looked up anew."""
        self._courses = None

    def fits(
        self,
        request: Request,
        found: int,
        running: Iterable[Request],
        coming: Iterable[tuple[Request, int]] = (),
    ) -> bool:
        """Whether a request that begins with `found` cached tokens fits beside what those that run will come to hold, and those
        that are `coming`, with so many tokens whose pages are held for them. Costs some 20 µs where there is room for the ends
        of all, and else 200; the first time in a step 1 µs more for each that runs."""
        if self._courses is None:
            self._courses, self._promised, self._lacked = self._part(
                [*self._all_of(running), *((one, have, 0) for one, have in coming)]
            )
        own, mine, lacked = self._part([(request, found, found)])
        held = np.array([[cls.in_use_pages] for cls in self._cache.inspect.size_classes])
        held += self._lacked + lacked + self._states
        if self._fits(held + self._promised + mine):
            return True
        courses = np.concatenate((self._courses, own), 1)
        have, ends, shared, left = courses[:, np.argsort(courses[LEFT])]
        more, kept = self._pages(have, ends), self._pages(shared, have) + self._states
        rates, alive = more / left, len(left) - np.arange(len(left))
        # When the k-th ends: the first k have grown all they will, the others as long as it, and by blocks; those before it are
        # gone, but for who ended a moment ago.
        grown = (
            more.cumsum(1) + left * (rates.sum(1, keepdims=True) - rates.cumsum(1)) + self._block * alive / 2
        )
        given = np.insert((more + kept).cumsum(1), 0, 0, axis=1)
        gone = given[:, np.searchsorted(left, left - LAG)]
        return self._fits(held + np.ceil(grown).astype(np.int64) - gone)

    def request_admitted(self, request: Request) -> None:
        """A request runs now, too, and has its first pages."""
        if self._courses is not None:
            course, promised, lacked = self._part(self._all_of([request]))
            self._courses = np.concatenate((self._courses, course), 1)
            self._promised, self._lacked = self._promised + promised, self._lacked + lacked

    def _all_of(self, running: Iterable[Request]) -> list[tuple[Request, int, int]]:
        """Requests that run, for how many tokens each has pages, and how many of those it found in the cache."""
        some = [(request, request.sequence) for request in running if request.sequence is not None]
        have = self._cache.reserved_blocks[[sequence.row for _, sequence in some]] * self._cache.block_tokens
        return [(one, n, sequence.resumed) for (one, sequence), n in zip(some, have.tolist(), strict=True)]

    def _part(self, requests: list[tuple[Request, int, int]]) -> tuple[Ints, Ints, Ints]:
        """Requests from now on, in tokens ([4, requests]): what each has pages for once its prompt is computed, where it is
        expected to end, how many of the first it found in the cache and may share, and how many it will compute one by one.
        Then the pages of each class that they will take until they end, and those that their prompts lack now."""
        rest = []
        for request, have, found in requests:
            size, end = len(request.tokens), self.end_of(request)
            rest.append((have, max(have, size), max(have, end), found, max(1, end - size)))
        first, sizes, ends, shared, left = np.array(rest, np.int64).reshape(-1, 5).T
        taken, lacked = (self._pages(*part).sum(1, keepdims=True) for part in ((sizes, ends), (first, sizes)))
        return np.stack((sizes, ends, shared, left)), taken, lacked

    def _fits(self, pages: Ints) -> bool:
        """Whether the pool holds so many pages of each class ([classes, times]) at every time."""
        slabs = (-(-pages // self._per_slab)).sum(0)
        return int(slabs.max()) <= self._cache.usable_slabs

    def end_of(self, request: Request) -> int:
        """How many tokens a request is expected to have at its end."""
        said = request.sampled_tokens
        return min(request.limit, len(request.prompt) + max(int(self._typical), said + said // 4 + 1))

    def _pages(self, first: Ints, ends: Ints) -> Ints:
        """Pages of each class ([classes, requests]) that sequences take from so many tokens on to so many. Of a window those are
        counted that it has at its widest."""
        block, total = self._cache.block_tokens, np.zeros((len(self._per_slab), len(ends)), np.int64)
        more = -(-ends // block) - -(-first // block)
        for group in self._cache.layout.of("token"):
            span, blocks = group.spec.visibility, more
            if span.windowed:
                last = np.maximum(first - 1, 0), np.maximum(ends - 1, 0)
                seen = [at // block - span.first_visible_each(at) // block for at in last]
                blocks = np.minimum(more, np.maximum(seen[1] - seen[0], 0) + 1)
            total[self._cache.class_of[group.index]] += blocks * group.runs
        return total
