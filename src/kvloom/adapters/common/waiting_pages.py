"""Pages in tiers, for an engine whose own threads call these functions and wait for the results.

    lookup(batches)        which pages are in host memory or in a tier
    load(objects, copy)    load pages into host memory, then call `copy`, which copies them to the engine
    store(objects, copy)   call `copy`, which fills pages of host memory, then queue writes to the other tiers

Every call ends within a time limit. A page that is missing, late or damaged is a miss. The transfer manager counts and
logs faults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers import Objects, Outcome

from .tier_pages import TierPages

__all__ = ["PageCounts", "WaitingPages"]

Mask = npt.NDArray[np.bool_]
Copy = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], None]
"""A function that copies pages between the engine and the arena (the memory of the host tier). Its arguments are the
indices of the objects to copy, and the offsets of these objects in the arena.
"""

POLL_SECONDS = 0.002
BATCH_PART = 4
"""A batch uses at most 1 / BATCH_PART of host memory, so that its pages do not evict each other."""


@dataclass
class PageCounts:
    """Numbers of pages since the start of the process."""

    stored: int = 0
    skipped: int = 0
    """Pages that were not stored, because host memory was full."""
    loaded: int = 0
    missed: int = 0
    """Pages that a load did not find, or that did not arrive in time."""


class WaitingPages:
    """Lookups, loads and stores over the tiers of one process. Thread-safe. `seconds` is the longest time of a load,
    and the longest time that a store waits for slow tiers.
    """

    def __init__(self, tiers: TierPages, seconds: float) -> None:
        self.tiers, self.counts = tiers, PageCounts()
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the counts, and the manager's list of pages to write back

    def lookup(self, batches: Sequence[Objects]) -> list[Mask]:
        """Return, for each batch, which of its objects are in host memory or in a tier."""
        lookup = self.tiers.manager.lookup(batches)
        self._wait(lambda: lookup.done)
        return lookup.found

    def load(self, objects: Objects, copy: Copy, deadline: float | None = None) -> Mask:
        """Load objects into host memory, then call `copy` for all objects that are there. Return, for each object,
        whether it was copied. The load ends at `deadline` (a time of `time.monotonic`) or, if `deadline` is None, after
        the `seconds` of the constructor.
        """
        if deadline is None:
            deadline = time.monotonic() + self._seconds
        copied = np.zeros(len(objects), bool)
        for first, batch in self._split(objects):
            self._fetch(batch, deadline)
            lease = self.tiers.host.acquire(batch)
            try:
                there = np.flatnonzero(lease.results == Outcome.OK)
                copy(first + there, lease.offsets[there])
            finally:
                lease.release(False)
            copied[first + there] = True
            self._write(batch.take(there), used=True)
        with self._lock:
            self.counts.loaded += int(copied.sum())
            self.counts.missed += int((~copied).sum())
        return copied

    def store(self, objects: Objects, copy: Copy) -> Mask:
        """Store objects in host memory, and queue writes to the other tiers. `copy` must write the bytes of objects
        that host memory does not have yet. Return, for each object, whether host memory has it. If the other tiers are
        slower than the caller, the call first waits a limited time for them.
        """
        deadline = time.monotonic() + self._seconds
        stored, fresh_pages = np.zeros(len(objects), bool), 0
        for first, batch in self._split(objects):
            size = len(batch) * batch.form.page_bytes
            while self._is_behind(size) and time.monotonic() < deadline:
                self.tiers.manager.wait(POLL_SECONDS)
            lease = self.tiers.host.reserve(batch)
            written = False
            try:
                fresh = np.flatnonzero(lease.results == Outcome.PENDING)
                copy(first + fresh, lease.offsets[fresh])
                written = True
            finally:
                lease.release(written)
            kept = np.flatnonzero((lease.results == Outcome.PENDING) | (lease.results == Outcome.OK))
            stored[first + kept] = True
            fresh_pages += len(fresh)
            self._write(batch.take(kept), used=False)
        with self._lock:
            self.counts.stored += fresh_pages
            self.counts.skipped += int((~stored).sum())
        return stored

    def record_fault(self, name: str, verb: str, pages: int, reason: str) -> None:
        """Count and log an error outside the tiers that made `pages` pages misses."""
        self.tiers.manager.fault_log.add(name, verb, "failed", pages, reason, time.monotonic())

    def close(self) -> None:
        """Write pending pages to the tiers, in bounded time, and close the tiers."""
        self.tiers.close()

    def _split(self, objects: Objects) -> Iterator[tuple[int, Objects]]:
        """Split objects into batches, so that each batch uses at most 1 / BATCH_PART of host memory. Yield each
        batch with the index of its first object."""
        each = max(1, self.tiers.host.capacity // BATCH_PART // objects.form.page_bytes)
        if len(objects) <= each:
            yield 0, objects
            return
        for first in range(0, len(objects), each):
            yield first, objects.take(np.arange(first, min(first + each, len(objects))))

    def _fetch(self, objects: Objects, deadline: float) -> None:
        """Load the objects that are not in host memory, until the deadline."""
        lookup = self.tiers.manager.lookup([objects])
        self._wait(lambda: lookup.done)
        missing = objects.take(np.flatnonzero(~lookup.in_host[0]))
        fetch = self.tiers.manager.fetch([missing], lookup.queue_of, deadline)
        self._wait(lambda: fetch.done)

    def _is_behind(self, size: int) -> bool:
        """Return whether `size` more bytes in host memory could evict pages that still wait to be written to a tier.
        Tiers that have failed or are stuck do not count.
        """
        limit = self.tiers.host.capacity * 3 // 4 - size
        return any(
            queue.pending_store_bytes > limit and queue.breaker.is_closed and not queue.is_stuck
            for queue in self.tiers.manager.queues
        )

    def _write(self, objects: Objects, used: bool) -> None:
        if len(objects):
            with self._lock:
                self.tiers.manager.write_to_tiers(objects, used)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()` returns True. Several threads may wait, and a wake-up may reach only one of them.
        Therefore each thread calls `is_done` at least every POLL_SECONDS.
        """
        while not is_done():
            self.tiers.manager.wait(POLL_SECONDS)
