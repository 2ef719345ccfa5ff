"""Offloads pages: copies offload batches from the pool to host memory, and passes the pages to the other tiers.

    the cache emits a batch → queued → flush: reserve host memory, start copies → poll: copies done, tiers get the pages

The host never waits for a copy. A page that is still cached is retained while the copy reads it. For a page that is
already evicted, later steps wait on the device until the page is copied. Copies of evicted pages run at the same time
as the in-flight step, unless that step may have written the page. The cache decides which pages are offloaded, and
when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache, OffloadBatch
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers import Lease, Objects, Outcome
from kvloom.tiers.transfers import TransferManager

from .host_pages import Event, HostPages, unit_forms
from .stats import OffloadStats
from .tier_loader import Forms
from .unit_copies import UnitCopies

__all__ = ["PageOffloader"]

PoolVersion = tuple[int, int, int]
_PENDING = int(Outcome.PENDING)
_DONE: Event = FinishedEvent()
MAX_LOSSY_ROOTS = 4096
"""Largest number of recorded root hashes whose requests accept lossy pages. Beyond this number, root hashes without
cached pages are dropped.
"""


@dataclass(slots=True)
class _PendingOffload:
    """A batch of pages that is being copied from the pool to host memory."""

    event: Event
    lease: Lease
    objects: Objects
    new: npt.NDArray[np.bool_] | None
    """Marks the pages that this copy adds to host memory. None means all pages."""
    was_hit: bool
    evicted: bool
    clear: Callable[[], None]
    """Clears the bytes of the copied pages that their owner has not written."""
    retained: OffloadBatch | None = None

    @property
    def new_keys(self) -> list[bytes]:
        keys = self.objects.keys
        return keys if self.new is None else [keys[i] for i in np.flatnonzero(self.new).tolist()]


class PageOffloader:
    """Offloads the pages of one cache to host memory, from where the other tiers get them. `writes` contains the write
    policies of all tiers. A page is copied to host memory as soon as one of these policies requires it. With
    `exclusive`, host memory first evicts the pages that are also in the pool. These pages are offloaded again if the
    pool evicts them.
    """

    def __init__(
        self,
        cache: KVCache,
        pages: HostPages,
        transfers: TransferManager,
        forms: Forms,
        lossy_forms: Forms,
        writes: AbstractSet[str],
        exclusive: bool = False,
        stats: OffloadStats | None = None,
    ) -> None:
        self.cache, self.transfers = cache, transfers
        self.stats = stats if stats is not None else OffloadStats()
        self._pages, self._writes, self._exclusive = pages, writes, exclusive
        self._groups = {unit: cache.layout.of(unit) for unit in ("token", "state")}
        self._forms, self._lossy_forms = forms, lossy_forms
        self._lossy_roots: set[bytes] = set()
        self._queued: dict[tuple[object, ...], list[OffloadBatch]] = {}
        self._queued_hashes: set[bytes] = set()
        self._queued_at: PoolVersion | None = None
        self._pending: list[_PendingOffload] = []
        self._units: UnitCopies | None = None
        self.copying_keys: set[bytes] = set()
        """Keys of pages that are being copied to host memory."""
        cache.loading.set_listener(self._on_offload, on_close=bool(writes & {"through", "second-use"}))

    def note_root(self, lossy: bool, root: bytes) -> None:
        """If `lossy`, record that requests with the root hash `root` accept lossy pages: pages that a tier has
        re-encoded to int8 or fp8. Call this method before these requests compute.
        """
        if lossy:
            if len(self._lossy_roots) > MAX_LOSSY_ROOTS:
                self._lossy_roots &= self.cache.roots
            self._lossy_roots.add(root)

    def copy_units(self) -> None:
        """From now on, also store offloaded pages as units (pages of HASH_TOKENS tokens), for workers with another
        block size. Does nothing if this worker's own blocks have HASH_TOKENS tokens.
        """
        forms = unit_forms(self.cache.layout.whole()) if self._units is None else {}
        if forms:
            self._units = UnitCopies(self.transfers.host, forms)

    def close(self) -> None:
        """Wait for the running copies into units (see `copy_units`), and start no more. If units are stored, this call
        also closes host memory."""
        if self._units is not None:
            self._units.close()

    @property
    def busy(self) -> bool:
        """Whether copies from the pool to host memory are in progress."""
        return bool(self._pending)

    def is_queued(self, hashes: Iterable[bytes]) -> bool:
        """Return whether any of these pages is queued for a copy that has not started."""
        return not self._queued_hashes.isdisjoint(hashes)

    def before_step(self, moved: bool = False) -> None:
        """Mark the present end of the device's stream. All pages that are cached now were written by work before this
        mark.

        Call this method before a step, and after copies inside the pool (`moved`).
        """
        self._pages.mark(moved)
        self.cache.loading.mark_step(moved)

    def offload_ahead(self, is_busy: Callable[[], bool]) -> None:
        """Evict and offload pages while `is_busy()` returns True, so that the pool does not run out of free pages
        later.
        """
        if "back" in self._writes:
            while is_busy() and self.cache.loading.evict_ahead():
                self.flush()

    def demote_copies(self, leases: Iterable[Lease]) -> None:
        """Let host memory evict these pages first, because the pool has them. Does nothing without `exclusive`."""
        if self._exclusive:
            for lease in leases:
                self.transfers.host.demote(lease)

    def flush(self) -> None:
        """Start the copies of all queued batches. Call this method before copies inside the pool, because they may
        overwrite the pages.
        """
        if self._queued:
            queued, is_unchanged = self._queued, self._queued_at == self._pool_version()
            self._queued, self._queued_at, self._queued_hashes = {}, None, set()
            batches = [alike[0] if len(alike) == 1 else _joined(alike) for alike in queued.values()]
            for batch in sorted(
                batches, key=self._age, reverse=True
            ):  # old pages must not wait for steps that wrote newer pages
                self._offload(batch, is_unchanged)
        self.poll()

    def poll(self) -> None:
        """Finish the copies that are done. Does not block."""
        if self._units is not None:
            self._units.poll()
        if not self._pending:
            return
        pending = []
        for offload in self._pending:
            if offload.event.query():
                self._finish(offload)
            else:
                pending.append(offload)
        self._pending = pending

    def _on_offload(self, batch: OffloadBatch) -> None:
        """Queue a batch that the cache emits, if the write policy of any tier needs its pages."""
        wanted = "through" in self._writes or (batch.was_hit and "second-use" in self._writes)
        if wanted or (batch.evicted and "back" in self._writes):
            lossy = batch.root in self._lossy_roots
            key = self._age(batch), batch.numbering, batch.tenant, batch.evicted, batch.was_hit, lossy
            self._queued.setdefault(key, []).append(batch)
            self._queued_hashes.update(batch.hashes)
            self._queued_at = self._queued_at or self._pool_version()

    def _age(self, batch: OffloadBatch) -> int:
        """Return the argument `age` of `HostPages.offload` for a batch. The copy waits for the work that `age`
        selects: 1 is the work before the last mark, 2 the work before the second last mark, 0 all work.

        Pages that stay cached get 0. Evicted pages need not wait for all work. A mark that is set after a page has
        entered the radix tree is enough, because such a mark comes after the write of the page:

        - A page enters the tree after the launch of the step or copy that writes it.
        - A mark is also set after copies inside the pool.
        - Later work writes only to the unused part of a partial block.
        """
        return batch.age if batch.evicted else 0

    def _pool_version(self) -> PoolVersion:
        """Return a value that changes whenever a page is evicted, moved or replaced."""
        return self.cache.loading.page_changes()

    def _offload(self, batch: OffloadBatch, is_unchanged: bool) -> None:
        """Start the copies of a batch. `is_unchanged` means that none of its pages was evicted or moved since the batch
        was queued.
        """
        forms = self._lossy_forms if batch.root in self._lossy_roots else self._forms
        for group in self._groups[batch.numbering]:
            for run, form in enumerate(forms[group.index]):
                column = group.column + run
                pages, own, hashes = batch.pages[:, column], batch.rows[:, column], batch.hashes
                tokens = batch.tokens
                if not pages.all():
                    at = np.flatnonzero(pages)
                    if not at.size:
                        continue
                    pages, own, hashes = pages[at], own[at], [hashes[i] for i in at.tolist()]
                    tokens = tokens[at]
                objects = Objects(hashes, group.index, form, batch.tenant)
                lease = self.transfers.host.reserve(objects)
                is_new = lease.results == _PENDING
                new = None if is_new.all() else is_new
                sources, offsets = pages, lease.offsets
                if new is not None:
                    sources, offsets, tokens = sources[new], offsets[new], tokens[new]
                event: Event = _DONE
                try:
                    if sources.size:
                        event = self._pages.offload(group, sources, offsets, self._age(batch))
                except BaseException:
                    lease.release(False)
                    raise
                clear = partial(self._pages.clear_unwritten, group, run, offsets, tokens)
                offload = _PendingOffload(event, lease, objects, new, batch.was_hit, batch.evicted, clear)
                self._pending.append(offload)
                self.copying_keys.update(offload.new_keys)
                if event.query():
                    continue
                if batch.evicted or not is_unchanged or (pages != own).any():
                    # Another sequence may own the pages now, so later steps wait on the device.
                    self._pages.wait(event)
                else:
                    rows = np.zeros_like(batch.rows)
                    rows[:, column] = batch.rows[:, column]
                    offload.retained = batch._replace(rows=rows)
                    self.cache.loading.retain_batch(offload.retained)

    def _finish(self, offload: _PendingOffload) -> None:
        """Finish a copy to host memory: release its pages, count it, and pass its pages to the other tiers."""
        if not offload.evicted:
            self.demote_copies([offload.lease])
        offload.clear()
        offload.lease.release(True)
        self.copying_keys.difference_update(offload.new_keys)
        if offload.retained is not None:
            self.cache.loading.release_batch(offload.retained)
        objects, new = offload.objects, offload.new
        if self._units is not None:
            self._units.copy(objects)
        count = len(objects) if new is None else int(new.sum())
        self.stats.offloaded_pages += count
        self.stats.offloaded_bytes += count * objects.form.page_bytes
        if not self.transfers.queues:
            return
        is_second_use = offload.was_hit and "second-use" in self._writes
        if new is not None and not is_second_use:  # the other tiers already have the remaining pages
            objects = objects.take(np.flatnonzero(new))
        if len(objects):
            self.transfers.write_to_tiers(objects, offload.was_hit)


def _joined(batches: list[OffloadBatch]) -> OffloadBatch:
    """Merge batches that differ only in hashes and pages, to reduce the number of copies."""
    rows = pages = np.concatenate([batch.rows for batch in batches])
    if any(batch.pages is not batch.rows for batch in batches):
        pages = np.concatenate([batch.pages for batch in batches])
    return batches[0]._replace(
        hashes=list(chain.from_iterable(batch.hashes for batch in batches)),
        rows=rows,
        pages=pages,
        tokens=np.concatenate([batch.tokens for batch in batches]),
    )
