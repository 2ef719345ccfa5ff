"""Pages on their way down: what the cache offers is copied to host memory, and the tiers below hear of it.

    offer (the cache)  →  take: reserve places in the arena, copy  →  finish: the copies are made, the mover is told

Nothing waits for a copy. While a stream still reads a page, the page is held, or, where it leaves the pool, later steps wait
on the device. Copies of what leaves begin beside the step in flight, but for pages that it may have written. Knows pages and
names; what is offered, and when, is the cache's (`core.Parcel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache, OffloadBatch
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers import Lease, Objects, Outcome
from kvloom.tiers.transfers.transfer_manager import Mover

from .host_pages import Event, HostPages
from .loader import Forms

__all__ = ["HostStore"]

Moment = tuple[int, int, int]
_PENDING = int(Outcome.PENDING)
_DONE: Event = FinishedEvent()
MOST_ROOTS = 4096
"""Roots of lossy names that are remembered before those that have gone are looked for."""


@dataclass(slots=True)
class _PendingOffload:
    """Pages being copied to host memory: where, and what is still to be told of them."""

    event: Event
    lease: Lease
    objects: Objects
    fresh: npt.NDArray[np.bool_] | None
    """Which of them came now; None: all."""
    used: bool
    lent: OffloadBatch | None = None

    @property
    def keys(self) -> list[bytes]:
        """Of those that came now."""
        keys = self.objects.keys
        return keys if self.fresh is None else [keys[i] for i in np.flatnonzero(self.fresh).tolist()]


class HostStore:
    """`writes` are the policies of all tiers together: what any of them wants passes through host memory."""

    def __init__(
        self,
        cache: KVCache,
        pages: HostPages,
        mover: Mover,
        forms: Forms,
        near: Forms,
        writes: AbstractSet[str],
    ) -> None:
        self.cache, self.transfers = cache, mover
        self.offloaded_pages = self.offloaded_bytes = 0
        self._pages, self._writes = pages, writes
        self._groups = {numbering: cache.layout.of(numbering) for numbering in ("token", "state")}
        self._forms, self._near = forms, near
        self._lossy: set[bytes] = set()
        self._queued: dict[tuple[object, ...], list[OffloadBatch]] = {}
        self._queued_hashes: set[bytes] = set()
        self._moment: Moment | None = None
        self._pending: list[_PendingOffload] = []
        self.copying_keys: set[bytes] = set()
        """The keys of what is being copied to host memory."""
        cache.loading.set_listener(self._on_offload, on_close=bool(writes & {"through", "second-use"}))

    def note_root(self, lossy: bool, root: bytes) -> None:
        """Whether what is named from `root` on is of requests that allow for loss. Told before any of them computes."""
        if lossy:
            if len(self._lossy) > MOST_ROOTS:
                self._lossy &= self.cache.roots  # of the others nothing is cached any more
            self._lossy.add(root)

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._pending)

    def _on_offload(self, parcel: OffloadBatch) -> None:
        wanted = "through" in self._writes or (parcel.was_hit and "second-use" in self._writes)
        if wanted or (parcel.evicted and "back" in self._writes):
            lossy = parcel.root in self._lossy
            key = self._age(parcel), parcel.numbering, parcel.tenant, parcel.evicted, parcel.was_hit, lossy
            self._queued.setdefault(key, []).append(parcel)
            self._queued_hashes.update(parcel.hashes)
            self._moment = self._moment or self._now()

    def before_step(self, moved: bool = False) -> None:
        """A step is about to be launched, or copies inside the pool were (`moved`): what is in the tree now is written by what the
        stream has been told so far."""
        self._pages.mark(moved)
        self.cache.loading.mark_step(moved)

    def _age(self, parcel: OffloadBatch) -> int:
        """By which mark pages that leave were written: 1 by what the stream had been told at the last one, 2 at the one before, 0 if
        by neither. They were if they were in the tree then: a step's pages enter it after its launch, pages from below once
        they have come, and copies inside the pool are followed by a mark. In the tree a page is not written again, but for
        places of a partial block behind the tokens that it is offered for."""
        return parcel.age if parcel.evicted else 0

    def _now(self) -> Moment:
        """What changes whenever pages left, moved or gave way to others."""
        return self.cache.loading.page_changes()

    def offload_ahead(self, busy: Callable[[], bool]) -> None:
        """While the device is `busy`, and whoever asks would wait for it: where pages are copied when they leave, let some leave
        before they must."""
        if "back" in self._writes:
            while busy() and self.cache.loading.evict_ahead():
                self.flush()

    def is_queued(self, names: Iterable[bytes]) -> bool:
        """Whether pages of some of these names were offered, and nobody has taken them yet."""
        return not self._queued_hashes.isdisjoint(names)

    def flush(self) -> None:
        """Copy what was offered. Called before the copies that the cache has decided are made: until then bytes are where
        the parcels say."""
        if self._queued:
            offers, calm = self._queued, self._moment == self._now()
            self._queued, self._moment, self._queued_hashes = {}, None, set()
            alikes = [alike[0] if len(alike) == 1 else _joined(alike) for alike in offers.values()]
            for parcel in sorted(alikes, key=self._age, reverse=True):  # they would wait behind the others
                self._offload(parcel, calm)
        self.poll()

    def _offload(self, parcel: OffloadBatch, calm: bool) -> None:
        forms = self._near if parcel.root in self._lossy else self._forms
        for group in self._groups[parcel.numbering]:
            for run, form in enumerate(forms[group.index]):
                column = group.column + run
                pages, own, names = parcel.pages[:, column], parcel.rows[:, column], parcel.hashes
                if not pages.all():
                    at = np.flatnonzero(pages)
                    if not at.size:
                        continue
                    pages, own, names = pages[at], own[at], [names[i] for i in at.tolist()]
                objects = Objects(names, group.index, form, parcel.tenant)
                lease = self.transfers.host.reserve(objects)
                here = lease.results == _PENDING
                fresh = None if here.all() else here
                some, places = (
                    (pages, lease.offsets) if fresh is None else (pages[fresh], lease.offsets[fresh])
                )
                event = _DONE
                try:
                    if some.size:
                        event = self._pages.offload(group.page_stride, some, places, self._age(parcel))
                except BaseException:
                    lease.release(False)
                    raise
                down = _PendingOffload(event, lease, objects, fresh, parcel.was_hit)
                self._pending.append(down)
                self.copying_keys.update(down.keys)
                if event.query():
                    continue
                if parcel.evicted or not calm or (pages != own).any():
                    self._pages.wait(
                        event
                    )  # the pages may be someone else's by now: later steps wait on the device
                else:
                    rows = np.zeros_like(parcel.rows)
                    rows[:, column] = parcel.rows[:, column]
                    down.lent = parcel._replace(rows=rows)
                    self.cache.loading.retain_batch(down.lent)

    def poll(self) -> None:
        """Tell of the copies that are made."""
        if not self._pending:
            return
        waiting = []
        for down in self._pending:
            if down.event.query():
                self._finish(down)
            else:
                waiting.append(down)
        self._pending = waiting

    def _finish(self, down: _PendingOffload) -> None:
        down.lease.release(True)
        self.copying_keys.difference_update(down.keys)
        if down.lent is not None:
            self.cache.loading.release_batch(down.lent)
        objects, fresh = down.objects, down.fresh
        kept = len(objects) if fresh is None else int(fresh.sum())
        self.offloaded_pages += kept
        self.offloaded_bytes += kept * objects.form.page_bytes
        if not self.transfers.lanes:
            return
        again = down.used and "second-use" in self._writes
        if fresh is not None and not again:  # what was in host memory before was told of before
            names = [objects.names[i] for i in np.flatnonzero(fresh).tolist()]
            objects = Objects(names, objects.group, objects.form, objects.tenant)
        if len(objects):
            self.transfers.kept(objects, down.used)


def _joined(parcels: list[OffloadBatch]) -> OffloadBatch:
    """Parcels that differ in their pages alone as one: its copies are fewer."""
    rows = at = np.concatenate([parcel.rows for parcel in parcels])
    if any(parcel.pages is not parcel.rows for parcel in parcels):
        at = np.concatenate([parcel.pages for parcel in parcels])
    return parcels[0]._replace(
        hashes=list(chain.from_iterable(parcel.hashes for parcel in parcels)),
        rows=rows,
        pages=at,
    )
