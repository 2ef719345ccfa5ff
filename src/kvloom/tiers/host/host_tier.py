"""The host tier stores pages in the memory of this process. It evicts the least recently used page first. Pages within
a tenant's guaranteed part are not evicted for other tenants.

Reads and writes copy in the calling thread and are done on return. Large copies use a second thread. If a device
copies the pages, the caller leases them with `acquire` or `reserve` until the device copies are done. The caller may
pass pinned memory as the arena's buffer. This module does not depend on devices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.tiers.encoding import Head, make_codec, run_checksums, unseal
from kvloom.tiers.page_changes import PageChanges
from kvloom.tiers.shares import Shares
from kvloom.tiers.tier import Objects, Ranges, Tier, part_range
from kvloom.tiers.transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer
from kvloom.tiers.ttl import check_ttl, expiry_cutoff, now

from .arena import Arena, copy_pages
from .host_index import HostIndex
from .lease import Lease
from .slots import Index

__all__ = ["HostConfig", "HostTier"]

_OK, _MISSING, _PENDING, _LAYOUT = (
    int(Outcome.OK),
    int(Outcome.MISSING),
    int(Outcome.PENDING),
    int(Outcome.LAYOUT),
)  # numpy is faster with Python ints
_ONE = np.int32(1)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Settings of a host tier.

    - `slab_bytes`: at least the size of the largest page. Use the slab size of the pool layout.
    - `checked`: the tier stores and verifies checksums, for memory that is not trusted. Checksums take about as much
      time as the copy.
    - `ttl`: the number of seconds after which a page is a miss. 0 means never.
    """

    capacity: int
    slab_bytes: int = 8 << 20
    checked: bool = False
    ttl: float = 0

    def __post_init__(self) -> None:
        check_ttl(self.ttl)


class HostTier(Tier):
    """A tier in host memory. Thread-safe. The lock guards bookkeeping only and is never held during a copy."""

    def __init__(self, config: HostConfig, buffer: Any = None) -> None:
        self._config = config
        self._arena = Arena(config.capacity, config.slab_bytes, buffer)
        self._codec = make_codec() if config.checked else None
        self._lock = threading.Lock()
        self.index = HostIndex(self._arena)
        self._slots = self.index.slots
        self._transfer_counts = TransferCounts()
        self._closed = False

    @property
    def name(self) -> str:
        return "host"

    @property
    def capacity(self) -> int:
        return self._arena.slabs * self._arena.slab_bytes

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        """The memory of the tier. The offsets of a Lease are positions in this array."""
        return self._arena.bytes

    @property
    def slab_bytes(self) -> int:
        """The largest page size that the tier accepts."""
        return self._arena.slab_bytes

    @property
    def is_empty(self) -> bool:
        """Whether the tier has no pages. Pages that are still loading count as stored."""
        return not self.index.entries

    def set_shares(self, shares: Shares) -> None:
        with self._lock:
            self.index.set_shares(shares)

    def set_account(self, tenant: str, limit: int, guaranteed: int) -> bool:
        """Set the share of one tenant, at any time: its limit and its guaranteed part, in bytes. Pages that the
        tenant stored before the first call stay in the common account of all tenants without a share. If too many
        tenants have a share, returns False, and the tenant still uses the common account."""
        with self._lock:
            return self.index.set_account(tenant, limit, guaranteed)

    def end_guarantee(self, tenant: str) -> None:
        """End the guaranteed part that `set_account` set. The tenant's pages remain, but can be evicted for other
        tenants."""
        with self._lock:
            self.index.end_guarantee(tenant)

    def watch(self) -> PageChanges:
        """Record changes (see `SupportsChanges`). Call this method before the first page is stored."""
        with self._lock:
            self.index.changes = PageChanges()
            return self.index.changes

    def used_by(self, tenant: str) -> int:
        with self._lock:
            return self.index.used_by(tenant)

    def limit_of(self, tenant: str) -> int:
        """Return the largest number of bytes that a tenant may use."""
        return self.index.limit_of(tenant)

    def __contains__(self, key: bytes) -> bool:
        """Whether an object is stored or loading."""
        slot = self.index.entries.get(key)
        if slot is None:
            return False
        return bool(self._slots.stored_at[slot] >= expiry_cutoff(self._config.ttl))

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        with self._lock:
            self._expire(objects.keys)
            slots = self.index.find(objects.keys)
            stored: npt.NDArray[np.bool_] = (slots >= 0) & self._slots.ready[slots]
            return stored

    def acquire(self, objects: Objects, is_use: bool = True) -> Lease:
        """Lease the pages of stored objects for reading. Release the lease when the last copy is done. With `is_use`,
        the pages become the most recently used.

        The result for an object is MISSING if it is not stored, and LAYOUT if its page has another size.
        """
        form = objects.form
        with self._lock:
            self._expire(objects.keys)
            slots, table = self.index.find(objects.keys), self._slots
            found = (slots >= 0) & table.ready[slots]
            stored = found & (table.size[slots] == form.page_bytes) & (table.run[slots] == form.run_bytes)
            slots[~stored] = -1
            leased = slots if stored.all() else slots[stored]
            if is_use:
                self.index.touch(leased)
            tick = self.index.clock
            np.add.at(self._slots.refs, leased, _ONE)  # a batch may contain an object twice
            offsets = self._slots.offset[slots]
        offsets[~stored] = -1
        results = np.where(stored, _OK, np.where(found, _LAYOUT, _MISSING)).astype(np.uint8)
        return Lease(self, objects, slots, offsets, results, tick)

    def demote(self, lease: Lease) -> None:
        """Let the leased pages be evicted before all others, because they are also in the pool. Call this method
        before the release. Skips pages that were used again after the lease began.
        """
        with self._lock:
            self.index.demote(lease.slots[lease.slots >= 0], lease.tick)

    def reserve(self, objects: Objects, writer: int = 0) -> Lease:
        """Lease pages for new objects, and evict pages if needed. The caller fills the pages whose result is
        PENDING, then releases the lease.

        The result OK means that the object is already stored or loading. FULL means that no page is free and none can
        be evicted. `writer` is the number of the peer that writes the objects, or 0 for this process. A peer may drop
        only objects that it wrote, and damaged objects.
        """
        size, keys = objects.form.page_bytes, objects.keys
        if not self._arena.fits(size):
            raise ValueError(
                f"a page of {size} bytes does not fit a slab of {self._arena.slab_bytes} bytes: raise HostConfig.slab_bytes"
            )
        with self._lock:
            self._expire(keys)
            slots = self.index.reserve(keys, size, objects.tenant, 0 if self._closed else None)
            tick = self.index.clock
            leased = slots >= 0
            fresh = slots if leased.all() else slots[leased]
            self._slots.run[fresh], self._slots.writer[fresh] = objects.form.run_bytes, writer
            self._slots.stored_at[fresh] = now()
            offsets = self._slots.offset[slots]
            results = np.full(len(keys), _PENDING, np.uint8)
            if not leased.all():
                offsets[~leased] = -1
                none = int(Outcome.FAILED if self._closed else Outcome.FULL)
                others = np.flatnonzero(~leased)
                stored = self.index.entries
                results[others] = [_OK if keys[i] in stored else none for i in others.tolist()]
        return Lease(self, objects, slots, offsets, results, tick)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        if self._closed:
            return failed_transfer(
                len(objects), self._transfer_counts, "read", Outcome.FAILED, "the host tier is closed"
            )
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        lease = self.acquire(objects)
        try:
            found = np.flatnonzero(lease.offsets >= 0)
            copy_pages(
                into.bytes, into.starts[found] + start, self.arena, lease.offsets[found] + start, stop - start
            )
            if self._codec is not None:
                self._verify(lease, objects, into, start, stop)
        finally:
            lease.release()
        for outcome in np.unique(lease.results).tolist():
            transfer.settle(np.flatnonzero(lease.results == outcome), Outcome(outcome))
        return transfer

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        transfer = Transfer(len(objects), self._transfer_counts, "write", objects.form.page_bytes)
        lease = self.reserve(objects)
        written = False
        try:
            fresh = np.flatnonzero(lease.results == Outcome.PENDING)
            size = objects.form.page_bytes
            copy_pages(self.arena, lease.offsets[fresh], source.bytes, source.starts[fresh], size)
            lease.results[fresh] = Outcome.OK
            written = True
        finally:
            lease.release(written)
        for outcome in np.unique(lease.results).tolist():
            reasons = {
                Outcome.FULL: "every evictable page of the host tier is in use, or the tenant's share is full",
                Outcome.FAILED: "the host tier is closed",
            }
            transfer.settle(
                np.flatnonzero(lease.results == outcome), Outcome(outcome), reasons.get(Outcome(outcome), "")
            )
        return transfer

    def drop(self, objects: Objects, writer: int | None = None) -> int:
        """Remove objects. If `writer` is given, removes only objects that this peer wrote. Return the number of
        removed objects."""
        with self._lock:
            dropped, table = 0, self._slots
            for key in objects.keys:
                slot = self.index.entries.get(key)
                if slot is not None and table.ready[slot] and writer in (None, int(table.writer[slot])):
                    self.index.remove(key, slot)
                    dropped += 1
            return dropped

    def drop_damaged(self, keys: Iterable[bytes], max_bytes: int) -> int:
        """Remove objects whose bytes do not match their checksums. Return the number of removed objects.

        Reads at most `max_bytes`, but at least one page. Pages without checksums are not removed.
        """
        dropped = 0
        for key in keys:
            with self._lock:
                slot = self.index.entries.get(key, -1)
                checks = self._slots.checksums.get(slot)
                if max_bytes <= 0 or checks is None or not self._slots.ready[slot]:
                    continue
                self._slots.refs[slot] += _ONE
                at, size = int(self._slots.offset[slot]), int(self._slots.size[slot])
                run = int(self._slots.run[slot])
            max_bytes -= size
            damaged = run_checksums(self._arena.view[at : at + size], run) != checks
            with self._lock:
                self._slots.refs[slot] -= _ONE
                if damaged and self.index.entries.get(key) == slot:
                    self.index.remove(key, slot)
                    dropped += 1
                elif self._slots.dropped[slot] and not self._slots.refs[slot]:
                    self.index.free(slot)
        return dropped

    def stats(self) -> TierStats:
        with self._lock:
            ready = len(self.index.entries) - self.index.loading
            return self._transfer_counts.stats(
                ready,
                self._arena.used_bytes(),
                self.capacity,
                self.index.evicted,
                tenants=self.index.used_by_tenants(),
            )

    def close(self) -> None:
        """Remove all pages. Leased pages stay readable until they are released. The memory is freed when its last
        view is deleted."""
        with self._lock:
            self._closed = True
            for key, slot in list(self.index.entries.items()):
                if self._slots.ready[slot]:
                    self.index.remove(key, slot)

    def ready_checksums(self, slots: Index) -> list[bytes]:
        """Return the checksums of those pages in `slots` that are complete, in order. Computes missing checksums."""
        return [self._page_checksums(slot) for slot in slots[self._slots.ready[slots]].tolist()]

    def set_checksums(self, slots: Index, data: bytes, size: int) -> None:
        """Set the checksums of those pages in `slots` that are not complete yet. `data` contains `size` bytes for
        each of them, in order. Raises ValueError if `data` has another length."""
        fresh = slots[~self._slots.ready[slots]].tolist()
        if len(data) != len(fresh) * size:
            raise ValueError(f"{len(data)} bytes of checksums for {len(fresh)} pages of {size} bytes each")
        for number, slot in enumerate(fresh):
            self._slots.checksums[slot] = data[number * size : (number + 1) * size]

    def release_slots(self, objects: Objects, slots: Index, written: bool | npt.NDArray[np.bool_]) -> None:
        """End the lease of slots. `written` states whether new pages are complete, as one value or as one value per
        slot. Incomplete new pages are dropped."""
        if not len(slots):  # the lease was released before
            return
        at = np.flatnonzero(slots >= 0)
        leased = slots if len(at) == len(slots) else slots[at]
        if written is True and self._codec is None and self._finish_reserved(objects, at, leased):
            return
        complete = np.broadcast_to(np.asarray(written), len(slots))[at]
        if self._codec is not None:
            for slot in leased[
                complete & ~self._slots.ready[leased]
            ].tolist():  # no other thread can use these pages yet
                self._page_checksums(slot)
        with self._lock:
            table = self._slots
            np.subtract.at(table.refs, leased, _ONE)
            coming = ~table.ready[leased]
            if coming.any():  # a lease of `reserve` has no duplicates
                self.index.loading -= int(coming.sum())
                table.ready[leased] |= complete
                lost = coming & (~complete | self._closed)
                self._record_stored(objects, at[coming & ~lost])
                for i in np.flatnonzero(lost).tolist():
                    self.index.remove(objects.keys[at[i]], int(leased[i]))
                leased = leased[~lost]
            for slot in set(leased[table.dropped[leased] & (table.refs[leased] == 0)].tolist()):
                self.index.free(slot)

    def _record_stored(self, objects: Objects, at: Index) -> None:
        """Record new pages for block events, if the tier is watched. `at` are the indexes of the stored objects in
        `objects`. The caller holds the lock."""
        if self.index.changes is not None and len(at):
            places = at.tolist()
            self.index.changes.stored(
                [objects.keys[i] for i in places], [objects.block_hashes[i] for i in places]
            )

    def _expire(self, keys: list[bytes]) -> None:
        """Remove the expired objects among `keys`. The caller holds the lock."""
        if not self._config.ttl:
            return
        cutoff, slots = expiry_cutoff(self._config.ttl), self.index.find(keys)
        is_expired = (slots >= 0) & self._slots.ready[slots] & (self._slots.stored_at[slots] < cutoff)
        for key in {keys[index] for index in np.flatnonzero(is_expired).tolist()}:
            self.index.remove(key, self.index.entries[key])
            self.index.evicted += 1

    def _finish_reserved(self, objects: Objects, at: Index, leased: Index) -> bool:
        """Mark all pages of a `reserve` lease as ready and end the lease, in a few array operations. `at` are the
        indexes of the objects, and `leased` their slots.

        If the tier is closed or a page is already ready, returns False and changes nothing. The caller then releases
        the pages one by one.
        """
        with self._lock:
            table = self._slots
            if self._closed or table.ready[leased].any():
                return False
            table.refs[leased], table.ready[leased] = 0, True
            self.index.loading -= len(leased)
            self._record_stored(objects, at)
            return True

    def _page_checksums(self, slot: int) -> bytes:
        """Return the checksums of a leased page, and computes them if needed. The page must be ready, or the caller
        must be its writer. Two threads may compute the same checksums at the same time, without harm."""
        table = self._slots
        checks = table.checksums.get(slot)
        if checks is None:
            offset, size = int(table.offset[slot]), int(table.size[slot])
            checks = run_checksums(self._arena.view[offset : offset + size], int(table.run[slot]))
            self._slots.checksums[slot] = checks
        return checks

    def _verify(self, lease: Lease, objects: Objects, into: Ranges, start: int, stop: int) -> None:
        """Compare the bytes read with the stored checksums. A page that differs is CORRUPT and is removed."""
        assert self._codec is not None
        form, pages = objects.form, into.view
        for index, (at, slot) in enumerate(zip(into.starts.tolist(), lease.slots.tolist(), strict=True)):
            if slot < 0:
                continue
            got = pages[at + start : at + stop]
            head = Head(objects.keys[index], 0, form.run_bytes, self._page_checksums(slot))
            outcome = unseal(head, got, start // form.run_bytes, got, self._codec)
            if outcome != Outcome.OK:
                lease.results[index] = outcome
                with self._lock:
                    if self.index.entries.get(objects.keys[index]) == slot:
                        self.index.remove(objects.keys[index], slot)
