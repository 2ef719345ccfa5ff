"""The host tier: pages in this process's memory, least recently used first to leave, of those whose share allows it.

A read or write copies in the calling thread, a large one with a second beside it, and is done when it returns. A
device copies by itself: `hold` and `reserve` lend the places in the arena for as long as its copies run.
Knows no devices: pinned memory is handed in as the arena's buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import Arena, copy_pages
from .checks import checksums
from .codec import Head, make_codec, unseal
from .lease import Lease
from .residents import Residents
from .shares import Shares
from .slots import Index
from .tier import Objects, Ranges, Tier, parted
from .transfer import Outcome, Tally, TierStats, Transfer, failed_transfer

__all__ = ["HostConfig", "HostTier"]

_OK, _MISSING, _PENDING, _LAYOUT = (
    int(Outcome.OK),
    int(Outcome.MISSING),
    int(Outcome.PENDING),
    int(Outcome.LAYOUT),
)  # numpy takes ints faster
_ONE = np.int32(1)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """`slab_bytes` is at least the largest page: take the layout's. `checked` keeps and compares checksums, for
    memory that is not trusted; it costs about as much as the copy."""

    capacity: int
    slab_bytes: int = 8 << 20
    checked: bool = False


class HostTier(Tier):
    """Safe from any thread; the lock is held for bookkeeping only, never for a copy."""

    def __init__(self, config: HostConfig, buffer: Any = None) -> None:
        self._config = config
        self._arena = Arena(config.capacity, config.slab_bytes, buffer)
        self._codec = make_codec() if config.checked else None
        self._lock = threading.Lock()
        self._residents = Residents(self._arena)
        self._slots = self._residents.slots
        self._tally = Tally()
        self._closed = False

    @property
    def name(self) -> str:
        return "host"

    @property
    def capacity(self) -> int:
        return self._arena.slabs * self._arena.slab_bytes

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        """All its memory; a Lease's offsets are into it."""
        return self._arena.bytes

    @property
    def slab_bytes(self) -> int:
        """The largest page it takes."""
        return self._arena.slab_bytes

    @property
    def empty(self) -> bool:
        """Whether it has nothing, and nothing is on its way there."""
        return not self._residents.entries

    def share_out(self, shares: Shares) -> None:
        with self._lock:
            self._residents.share_out(shares)

    def kept_for(self, tenant: str) -> int:
        with self._lock:
            return self._residents.kept_for(tenant)

    def __contains__(self, key: bytes) -> bool:
        """Whether an object is there, or on its way there."""
        return key in self._residents.entries

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        with self._lock:
            slots = self._residents.find(objects.keys)
            there: npt.NDArray[np.bool_] = (slots >= 0) & self._slots.ready[slots]
            return there

    def hold(self, objects: Objects) -> Lease:
        """The places of objects that are there, held. Release it when the last copy from them has passed. LAYOUT: the stored page has
        another size than the form says."""
        form = objects.form
        with self._lock:
            slots, noted = self._residents.find(objects.keys), self._slots
            found = (slots >= 0) & noted.ready[slots]
            there = found & (noted.size[slots] == form.page_bytes) & (noted.run[slots] == form.run_bytes)
            slots[~there] = -1
            held = slots if there.all() else slots[there]
            self._residents.use(held)
            np.add.at(self._slots.held, held, _ONE)  # an object may be in the batch twice
            offsets = self._slots.offset[slots]
        offsets[~there] = -1
        results = np.where(there, _OK, np.where(found, _LAYOUT, _MISSING)).astype(np.uint8)
        return Lease(self, objects, slots, offsets, results)

    def reserve(self, objects: Objects, writer: int = 0) -> Lease:
        """Places for objects that are not there, evicting as needed: fill those whose result is PENDING, then
        release. OK: it is there already, or on its way. FULL: all that may leave for them is held, or came with them.
        `writer` is the peer that may drop them."""
        size, keys = objects.form.page_bytes, objects.keys
        if not self._arena.fits(size):
            raise ValueError(
                f"a page of {size} bytes does not fit a slab of {self._arena.slab_bytes}: raise HostConfig.slab_bytes"
            )
        with self._lock:
            slots = self._residents.admit(keys, size, objects.tenant, 0 if self._closed else None)
            held = slots >= 0
            fresh = slots if held.all() else slots[held]
            self._slots.run[fresh], self._slots.writer[fresh] = objects.form.run_bytes, writer
            offsets = self._slots.offset[slots]
            results = np.full(len(keys), _PENDING, np.uint8)
            if not held.all():
                offsets[~held] = -1
                none = int(Outcome.FAILED if self._closed else Outcome.FULL)
                others = np.flatnonzero(~held)
                there = self._residents.entries
                results[others] = [_OK if keys[i] in there else none for i in others.tolist()]
        return Lease(self, objects, slots, offsets, results)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = parted(objects.form, part)
        if self._closed:
            return failed_transfer(
                len(objects), self._tally, "read", Outcome.FAILED, "the host tier is closed"
            )
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        lease = self.hold(objects)
        try:
            found = np.flatnonzero(lease.offsets >= 0)
            copy_pages(
                into.bytes, into.starts[found] + start, self.arena, lease.offsets[found] + start, stop - start
            )
            if self._codec is not None:
                self._compare(lease, objects, into, start, stop)
        finally:
            lease.release()
        for outcome in np.unique(lease.results).tolist():
            transfer.settle(np.flatnonzero(lease.results == outcome), Outcome(outcome))
        return transfer

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        transfer = Transfer(len(objects), self._tally, "write", objects.form.page_bytes)
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
            why = {
                Outcome.FULL: "every page that could leave the host tier is held, or the tenant's share holds none",
                Outcome.FAILED: "the host tier is closed",
            }
            transfer.settle(
                np.flatnonzero(lease.results == outcome), Outcome(outcome), why.get(Outcome(outcome), "")
            )
        return transfer

    def drop(self, objects: Objects, writer: int | None = None) -> int:
        """Drops objects; with `writer` only those that this peer wrote."""
        with self._lock:
            dropped, noted = 0, self._slots
            for key in objects.keys:
                slot = self._residents.entries.get(key)
                if slot is not None and noted.ready[slot] and writer in (None, int(noted.writer[slot])):
                    self._residents.forget(key, slot)
                    dropped += 1
            return dropped

    def drop_damaged(self, keys: Iterable[bytes], most_bytes: int) -> int:
        """Drops objects whose bytes differ from their checksums; returns how many. Reads `most_bytes` at most, and at least one
        page. A page without checksums stays."""
        dropped = 0
        for key in keys:
            with self._lock:
                slot = self._residents.entries.get(key, -1)
                checks = self._slots.checks.get(slot)
                if most_bytes <= 0 or checks is None or not self._slots.ready[slot]:
                    continue
                self._slots.held[slot] += _ONE
                at, size = int(self._slots.offset[slot]), int(self._slots.size[slot])
                run = int(self._slots.run[slot])
            most_bytes -= size
            damaged = checksums(self._arena.view[at : at + size], run) != checks
            with self._lock:
                self._slots.held[slot] -= _ONE
                if damaged and self._residents.entries.get(key) == slot:
                    self._residents.forget(key, slot)
                    dropped += 1
                elif self._slots.gone[slot] and not self._slots.held[slot]:
                    self._residents.free(slot)
        return dropped

    def stats(self) -> TierStats:
        with self._lock:
            ready = len(self._residents.entries) - self._residents.coming
            return self._tally.stats(ready, self._arena.used_bytes(), self.capacity, self._residents.evicted)

    def close(self) -> None:
        """What is held stays readable by its holders until they let go; the memory goes with the last view."""
        with self._lock:
            self._closed = True
            for key, slot in list(self._residents.entries.items()):
                if self._slots.ready[slot]:
                    self._residents.forget(key, slot)

    def _release(self, objects: Objects, slots: Index, written: bool | npt.NDArray[np.bool_]) -> None:
        if not len(slots):  # it was released before
            return
        at = np.flatnonzero(slots >= 0)
        held = slots if len(at) == len(slots) else slots[at]
        if written is True and self._codec is None and self._came(held):
            return
        came = np.broadcast_to(np.asarray(written), len(slots))[at]
        if self._codec is not None:
            for slot in held[came & ~self._slots.ready[held]].tolist():  # ours alone until then
                self._checks(slot)
        with self._lock:
            noted = self._slots
            np.subtract.at(noted.held, held, _ONE)
            coming = ~noted.ready[held]
            if coming.any():  # of a `reserve`, then: none is there twice
                self._residents.coming -= int(coming.sum())
                noted.ready[held] |= came
                lost = coming & (~came | self._closed)
                for i in np.flatnonzero(lost).tolist():
                    self._residents.forget(objects.keys[at[i]], int(held[i]))
                held = held[~lost]
            for slot in set(held[noted.gone[held] & (noted.held[held] == 0)].tolist()):
                self._residents.free(slot)

    def _came(self, held: Index) -> bool:
        """The bytes of all that a `reserve` gave are there: the usual end of one, done if it is that. Nobody else has them yet, and
        none is there twice."""
        with self._lock:
            noted = self._slots
            if self._closed or noted.ready[held].any():
                return False
            noted.held[held], noted.ready[held] = 0, True
            self._residents.coming -= len(held)
            return True

    def _checks(self, slot: int) -> bytes:
        """Of a page that is held, and ready or its filler's. Two threads may both make them: they are the same."""
        noted = self._slots
        checks = noted.checks.get(slot)
        if checks is None:
            offset, size = int(noted.offset[slot]), int(noted.size[slot])
            checks = checksums(self._arena.view[offset : offset + size], int(noted.run[slot]))
            self._slots.checks[slot] = checks
        return checks

    def _compare(self, lease: Lease, objects: Objects, into: Ranges, start: int, stop: int) -> None:
        """Compares what was read with the checksums kept; what differs is corrupt, and dropped."""
        assert self._codec is not None
        form, pages = objects.form, into.view
        for index, (at, slot) in enumerate(zip(into.starts.tolist(), lease._slots.tolist(), strict=True)):
            if slot < 0:
                continue
            got = pages[at + start : at + stop]
            head = Head(objects.keys[index], 0, form.run_bytes, self._checks(slot))
            outcome = unseal(head, got, start // form.run_bytes, got, self._codec)
            if outcome != Outcome.OK:
                lease.results[index] = outcome
                with self._lock:
                    if self._residents.entries.get(objects.keys[index]) == slot:
                        self._residents.forget(objects.keys[index], slot)
