"""Admission: decides whether a request fits into the pool, given the projected growth of running requests.

    slabs of the pool  >=    pages in use, and pages that prompts still lack
                           + pages that all requests will have added at time t
                           - pages of the requests that finish before time t

This must hold for every t at which a request is expected to finish.

A check of free pages alone would admit too many requests: pages would run out later, and a request would be preempted
and recomputed. The length of an output is estimated from recent outputs, within the request's limit. If the estimate is
too low, the scheduler preempts.
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
"""Assumed number of output tokens, until the first request has finished."""
MEMORY = 32
"""Number of recent outputs that the estimate uses."""
HAVE, END, _, LEFT = range(4)
LONG_SHARE = 4
"""The projection assumes that a long request (see `offload/cold_pages.py`) uses at most 1 / LONG_SHARE of the pool,
because its other pages can become cold.
"""
LAG = 2
"""The pages of a finished request count as in use for this many more steps, because in-flight steps may still use them.
"""


class Admission:
    """Projects the pages of the requests on one cache. Call `refresh` at the start of a step."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._typical = float(TYPICAL)
        self._projections: Ints | None = None
        self._per_slab = np.array([[cls.per_slab] for cls in cache.inspect.size_classes])
        self._block, self._states = np.zeros((2, len(self._per_slab), 1), np.int64)
        for pages, kind in ((self._block, "token"), (self._states, "state")):
            for group in cache.layout.of(kind):
                pages[cache.class_of[group.index]] += group.runs
        self._full = np.zeros_like(self._block)
        full = [group for group in cache.layout.of("token") if not group.spec.visibility.windowed]
        for group in full:
            self._full[cache.class_of[group.index]] += group.runs
        self._full_bytes = sum(group.page_stride * group.runs for group in full)
        self._promised = self._lacked = np.zeros_like(self._block)
        self._excess = 0  # blocks of long requests that can become cold

    @property
    def resident_tokens(self) -> int:
        """Number of tokens for which admission reserves full-attention pages for one long request. Pages of older
        tokens are in host memory."""
        part = self._cache.usable_slabs * self._cache.layout.slab_bytes // LONG_SHARE
        return max(2, part // max(1, self._full_bytes)) * self._cache.block_tokens

    def request_finished(self, request: Request) -> None:
        """Update the estimated output length with the length of a finished output."""
        self._typical += (request.output_count - self._typical) / MEMORY

    def refresh(self) -> None:
        """Forget the projected pages of this step, so that the next call of `fits` computes them again. Call this at
        the start of a step, and when a request starts to load.
        """
        self._projections = None

    def fits(
        self,
        request: Request,
        cached: int,
        running: Iterable[Request],
        loading: Iterable[tuple[Request, int]] = (),
    ) -> bool:
        """Return whether a request with `cached` tokens fits into the pool together with the running and the
        `loading` requests.

        `loading` contains requests that wait for copies into the pool, each with the number of tokens for which it
        has reserved pages.

        Takes about 20 µs if all requests fit at their full lengths, else 200 µs. The first call of a step takes 1 µs
        more per running request.
        """
        if self._projections is None:
            running = list(running)
            self._excess = self._blocks_beyond(running)
            self._projections, self._promised, self._lacked = self._projected(
                [*self._pages_of(running), *((one, have, 0) for one, have in loading)]
            )
        own, mine, lacked = self._projected([(request, cached, cached)])
        needed = np.array([[cls.in_use_pages] for cls in self._cache.inspect.size_classes])
        needed += self._lacked + lacked + self._states - self._full * self._excess
        if self._fits(needed + self._promised + mine):
            return True
        projections = np.concatenate((self._projections, own), 1)
        have, ends, shared, left = projections[:, np.argsort(projections[LEFT])]
        more, kept = self._pages(have, ends), self._pages(shared, have) + self._states
        rates, alive = more / left, len(left) - np.arange(len(left))
        # Column k is the time at which the k-th request finishes. The first k requests then have all their tokens, and
        # the other requests have grown until this time. Requests that finished more than LAG steps before have released
        # their pages.
        grown = (
            more.cumsum(1) + left * (rates.sum(1, keepdims=True) - rates.cumsum(1)) + self._block * alive / 2
        )
        given = np.insert((more + kept).cumsum(1), 0, 0, axis=1)
        gone = given[:, np.searchsorted(left, left - LAG)]
        return self._fits(needed + np.ceil(grown).astype(np.int64) - gone)

    def request_admitted(self, request: Request) -> None:
        """Add an admitted request and its first pages to the projection."""
        if self._projections is not None:
            projection, promised, lacked = self._projected(self._pages_of([request]))
            self._projections = np.concatenate((self._projections, projection), 1)
            self._promised, self._lacked = self._promised + promised, self._lacked + lacked

    def _pages_of(self, running: Iterable[Request]) -> list[tuple[Request, int, int]]:
        """Return (request, number of tokens with pages, number of cached tokens) for each running request."""
        some = [(request, request.sequence) for request in running if request.sequence is not None]
        blocks = self._cache.reserved_blocks[[sequence.row for _, sequence in some]].tolist()
        have = [
            (n - sequence.cold_blocks) * self._cache.block_tokens
            for (_, sequence), n in zip(some, blocks, strict=True)
        ]
        return [(one, n, min(n, sequence.resumed)) for (one, sequence), n in zip(some, have, strict=True)]

    def _blocks_beyond(self, running: Iterable[Request]) -> int:
        """Return how many blocks of `running` requests can become cold (move from the pool to host memory). Only
        requests that are long or may become long count, with all their blocks in the pool except the last
        `resident_tokens` tokens.
        """
        most = self.resident_tokens // self._cache.block_tokens
        return sum(
            max(0, r.sequence.length // self._cache.block_tokens - r.sequence.cold_blocks - most)
            for r in running
            if r.may_be_long and r.sequence is not None
        )

    def _projected(self, requests: list[tuple[Request, int, int]]) -> tuple[Ints, Ints, Ints]:
        """Return the projected growth of `requests` as three arrays. Each request is given as (request, tokens with
        pages, cached tokens), as in `_pages_of`.

        | array         | contents                                                                                  |
        |---------------|-------------------------------------------------------------------------------------------|
        | [4, requests] | four rows: tokens after prefill, expected final tokens, cached tokens, tokens left to decode |
        | [classes, 1]  | pages of each size class that all requests add from the end of the prompt to their final length |
        | [classes, 1]  | pages of each size class that the prompts of all requests still lack                      |

        Other requests may share the pages of cached tokens, so these pages are not assumed to become free when the
        request finishes.
        """
        rest = []
        for request, have, found in requests:
            size, end = len(request.tokens), self.end_of(request)
            rest_tokens = max(1, end - size)
            if request.may_be_long:
                size, end, have = (min(n, self.resident_tokens) for n in (size, end, have))
            rest.append((have, max(have, size), max(have, end), min(have, found), rest_tokens))
        first, sizes, ends, shared, left = np.array(rest, np.int64).reshape(-1, 5).T
        taken, lacked = (self._pages(*part).sum(1, keepdims=True) for part in ((sizes, ends), (first, sizes)))
        return np.stack((sizes, ends, shared, left)), taken, lacked

    def _fits(self, pages: Ints) -> bool:
        """Return whether the pool has enough slabs at several future times. `pages` [classes, times] is the number of
        pages of each size class that are needed at each time.
        """
        slabs = (-(-pages // self._per_slab)).sum(0)
        return int(slabs.max()) <= self._cache.usable_slabs

    def end_of(self, request: Request) -> int:
        """Return the expected final length of a request in tokens."""
        sampled = request.sampled_tokens
        return min(request.limit, len(request.prompt) + max(int(self._typical), sampled + sampled // 4 + 1))

    def _pages(self, first: Ints, ends: Ints) -> Ints:
        """Return the number of pages of each size class ([classes, requests]) that requests add while they grow from
        `first` to `ends` tokens. In a windowed group, old pages are released while new pages are added. Such a group
        adds as many blocks as its visible range grows, plus one, but at most the number of new blocks.
        """
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
