"""Copies the pages of a load job from host memory into reserved pages of the pool, and publishes them in the prefix
cache.

    start    load plan → lease pages in host memory → reserve pages of the pool → copies
    finish   copies done → pages enter the prefix cache
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import numpy as np

from kvloom.core import KVCache, Match, PageGroup
from kvloom.engine.request import Request
from kvloom.tiers import HostTier, Objects

from .host_pages import HostPages
from .load_job import LoadJob, Phase, PoolCopy
from .stats import OffloadStats
from .store import PageOffloader
from .tier_loader import TierLoader
from .time_model import TimeModel

__all__ = ["CopyStart", "PoolLoader"]


class CopyStart(Enum):
    """The result of an attempt to copy pages of a request from host memory into the pool."""

    COPYING = "copying"
    NO_PAGES = "no pages"
    """Host memory has no page that the request needs."""
    OFFLOADING = "offloading"
    """A page that the request needs is still being offloaded."""
    NOT_WORTH = "not worth loading"
    NO_FREE_PAGES = "no free pages"


class PoolLoader:
    """Copies from one host tier into one pool. `apply_copies` runs the pending copies inside the pool."""

    def __init__(
        self,
        cache: KVCache,
        host: HostTier,
        pages: HostPages,
        store: PageOffloader,
        tiers: TierLoader,
        apply_copies: Callable[[], None],
        stats: OffloadStats,
    ) -> None:
        self.cache, self.host, self.pages = cache, host, pages
        self.copy_time = TimeModel()
        self.last_load_seconds = 0.0
        """Seconds of the last load, from host memory to published pages."""
        self._store, self._tiers, self._apply_copies, self._stats = store, tiers, apply_copies, stats
        self._cancelled: list[PoolCopy] = []

    def estimate(self, request: Request, match: Match) -> tuple[int, float]:
        """Return the number of tokens after `match` that host memory has, and the seconds to copy them. The seconds
        are 0 if no copy was measured."""
        if self.host.is_empty or self._tiers.host_misses(self.cache.loading.first_query(match), request):
            return 0, 0.0
        plan = self.cache.loading.plan(match)
        while queries := plan.next_queries():
            plan.answer([self.host.lookup(self._tiers.objects_for(query, request)) for query in queries])
        missing = plan.missing_pages() if plan.resume > match.resume else []
        size = sum(len(pages.hashes) * self._tiers.block_bytes(pages.group) for pages in missing)
        return plan.resume - match.resume, self.copy_time.seconds(size)

    def start(self, job: LoadJob, match: Match) -> CopyStart:
        """Reserve pages of the pool for those pages of a request that host memory has, and start the copies.
        Return the result of this attempt.

        `job.copy` is set as soon as pages are reserved. If the call raises after that, the caller must cancel the
        copy.
        """
        plan, request, is_head = self.cache.loading.plan(match), job.request, job.phase is Phase.COPYING_HEAD
        offloading: list[bytes] = []
        while queries := plan.next_queries():
            asked = [self._tiers.objects_for(query, request) for query in queries]
            plan.answer([self.host.lookup(objects) for objects in asked])
            if self._store.copying_keys and not is_head:
                copying = self._store.copying_keys
                offloading += [key for objects in asked for key in objects.keys if key in copying]
        job.awaited_key = offloading[-1] if offloading else None
        if offloading:
            return CopyStart.OFFLOADING
        tokens = plan.resume - match.resume
        if tokens <= 0:
            if not is_head:
                request.tier_miss = request.tier_miss or plan.miss
            return CopyStart.NO_PAGES
        missing = plan.missing_pages()
        size = sum(len(pages.hashes) * self._tiers.block_bytes(pages.group) for pages in missing)
        seconds = self.copy_time.seconds(size) if self.copy_time.is_trusted else None
        if not self._tiers.is_worth_loading(request, tokens, match.length - match.resume, seconds):
            self._stats.not_worth_loading += 1
            self.copy_time.doubt()
            return CopyStart.NOT_WORTH
        started, count = time.monotonic(), sum(len(pages.hashes) for pages in missing)
        leases = []
        # Lease first: the reservation may evict pages to host memory, which must not replace these pages there.
        for pages in missing:
            for form in self._tiers.forms_of(request)[pages.group.index]:
                leases.append(self.host.acquire(Objects(pages.hashes, pages.group.index, form)))
        reservation = self.cache.loading.reserve(plan)
        if reservation is None:
            for lease in leases:
                lease.release()
            self._stats.no_free_pages += 1
            return CopyStart.NO_FREE_PAGES
        loaded = np.zeros_like(reservation.to_load)
        job.copy = PoolCopy(reservation, match.resume, size, count, started, leases, loaded)
        # Pending offloads and moves must read their pages first, because the new copies overwrite these pages.
        self._apply_copies()
        for pages in missing:
            self._copy_group(job, job.copy, pages.group)
        self._stats.load_jobs += 1
        return CopyStart.COPYING

    def finish(self, job: LoadJob, tier_names: list[str]) -> int | None:
        """Publish the pages of a job if their copies are done. Return the position at which the request can resume,
        or None while copies run."""
        copy = job.copy
        assert copy is not None
        if not copy.is_done:
            return None
        resume = self.cache.loading.publish(copy.reservation, copy.loaded, copy.states_loaded)
        tokens = max(0, resume - copy.resume)
        now = time.monotonic()
        self.last_load_seconds = now - copy.started
        self.copy_time.observe(copy.bytes, copy.seconds(now))
        self._store.demote_copies(copy.leases)
        copy.release_leases()
        job.copy = None
        job.record_on_request(copy, tokens, now, tier_names)
        self._stats.loaded_tokens += tokens
        self._stats.loaded_bytes += copy.bytes if tokens else 0
        job.computed_to = max(job.computed_to, resume)
        return max(copy.resume, resume)

    def cancel(self, copy: PoolCopy) -> None:
        """Free the reserved pages of a copy, at once or when its copies are done."""
        self._cancelled.append(copy)
        self.poll()

    def poll(self) -> None:
        """Free the reserved pages of cancelled copies that are done. Does not block."""
        if not self._cancelled:
            return
        pending = []
        for copy in self._cancelled:
            if copy.is_done:
                self.cache.loading.cancel(copy.reservation)
                copy.release_leases()
            else:
                pending.append(copy)
        self._cancelled = pending

    @property
    def has_cancelled_copies(self) -> bool:
        """Whether pages are still reserved for cancelled copies."""
        return bool(self._cancelled)

    def _copy_group(self, job: LoadJob, copy: PoolCopy, group: PageGroup) -> None:
        """Start the copies of one layer group. Pages that host memory has evicted are counted and recomputed."""
        for run, (hashes, pages) in enumerate(copy.reservation.pages(group)):
            form = self._tiers.forms_of(job.request)[group.index][run]
            lease = self.host.acquire(Objects(hashes, group.index, form))
            copy.leases.append(lease)
            here = lease.offsets >= 0
            if here.any():
                copy.events.append(self.pages.load(group, pages[here], lease.offsets[here]))
            if group.spec.unit == "state":
                copy.states_loaded &= bool(here.all())
            else:
                column = group.column + run
                copy.loaded[np.flatnonzero(copy.reservation.to_load[:, column])[here], column] = True
            self._stats.failed_pages += int((~here).sum())
