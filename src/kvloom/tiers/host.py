"""The host tier: pages in this process's memory, least recently used first to leave, of those whose share allows it.

A read or write copies in the calling thread, a large one with a second beside it, and is done when it returns. A
device copies by itself: `hold` and `reserve` lend the places in the arena for as long as its copies run.
Knows no devices: pinned memory is handed in as the arena's buffer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import Arena, copy_pages
from .checks import checksums
from .codec import Head, make_codec, unseal
from .shares import Account, Share, Shares
from .tier import Objects, Ranges, Tier, parted
from .transfer import Outcome, Tally, TierStats, Transfer, failed_transfer

__all__ = ["HostConfig", "HostTier", "Lease"]

_OK, _MISSING, _PENDING = (
    int(Outcome.OK),
    int(Outcome.MISSING),
    int(Outcome.PENDING),
)  # numpy takes ints faster
_MOST_TRIES = 4096  # pages looked at to make room for one, when many are held


@dataclass(frozen=True, slots=True)
class HostConfig:
    """`slab_bytes` is at least the largest page: take the layout's. `checked` keeps and compares checksums, for
    memory that is not trusted; it costs about as much as the copy."""

    capacity: int
    slab_bytes: int = 8 << 20
    checked: bool = False


class _Account(Account):
    """A tenant's pages, least recently used first."""

    __slots__ = ("order",)

    def __init__(self, share: Share, capacity: int) -> None:
        super().__init__(share, capacity)
        self.order: OrderedDict[bytes, _Entry] = OrderedDict()


class _Entry:
    __slots__ = ("account", "checks", "gone", "held", "offset", "ready", "size", "tick")

    def __init__(self, offset: int, size: int, account: _Account, tick: int) -> None:
        self.offset, self.size, self.account = offset, size, account
        self.tick = tick  # when it was used last: what orders pages of different accounts
        self.held = 1  # transfers under way: it can neither be evicted nor its page lent
        self.ready = False  # its bytes have come
        self.gone = False  # dropped while held: its page comes back with the last hold
        self.checks = b""


class Lease:
    """Places in the arena, held until `release`. `offsets` is -1 where there is none; `results` says why."""

    __slots__ = ("_entries", "_objects", "_tier", "offsets", "results")

    def __init__(
        self, tier: HostTier, objects: Objects, entries: list[_Entry | None], results: list[int]
    ) -> None:
        self._tier, self._objects, self._entries = tier, objects, entries
        self.offsets = np.array([-1 if e is None else e.offset for e in entries], np.int64)
        self.results = np.array(results, np.uint8)

    def release(self, written: bool | npt.NDArray[np.bool_] = True) -> None:
        """Lets go. After `reserve`, `written` says that the bytes are there, of all or of each; without them the places
        are free again. Twice is harmless."""
        entries, self._entries = self._entries, []
        came = np.broadcast_to(np.asarray(written), len(entries)).tolist()
        self._tier._release(self._objects, entries, came)

    def checks(self) -> list[bytes]:
        """The checksums of the held pages that are ready, in order; made now where the tier has none. For whoever
        copies them to where bytes may be damaged."""
        return [
            self._tier._checks(entry, self._objects.form.run_bytes)
            for entry in self._entries
            if entry is not None and entry.ready
        ]

    def keep_checks(self, data: bytes) -> None:
        """After `reserve`: the checksums of the pages that are being filled, one page after the other, from whoever
        fills them. A ValueError if they are not as many as there are pages."""
        fresh = [entry for entry in self._entries if entry is not None and not entry.ready]
        size = 8 * self._objects.form.runs
        if len(data) != len(fresh) * size:
            raise ValueError(f"{len(data)} bytes of checksums for {len(fresh)} pages of {size}")
        for number, entry in enumerate(fresh):
            entry.checks = data[number * size : (number + 1) * size]


class HostTier(Tier):
    """Safe from any thread; the lock is held for bookkeeping only, never for a copy."""

    def __init__(self, config: HostConfig, buffer: Any = None) -> None:
        self._config = config
        self._arena = Arena(config.capacity, config.slab_bytes, buffer)
        self._codec = make_codec() if config.checked else None
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._in_slab: list[dict[int, bytes]] = [{} for _ in range(self._arena.slabs)]
        self._others = _Account(Share(), self.capacity)
        self._accounts: dict[str, _Account] = {}
        self._all = [self._others]
        self._ticks = 0
        self._tally = Tally()
        self._coming = 0  # entries whose bytes have not come
        self._evicted = 0
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

    def share_out(self, shares: Shares) -> None:
        with self._lock:
            if self._entries or self._accounts:
                raise ValueError("shares are given once, before anything is kept here")
            self._accounts = {tenant: _Account(share, self.capacity) for tenant, share in shares.items()}
            self._others = self._accounts.get("", self._others)
            self._all = list({id(a): a for a in (self._others, *self._accounts.values())}.values())

    def kept_for(self, tenant: str) -> int:
        with self._lock:
            return self._accounts.get(tenant, self._others).used

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        with self._lock:
            get = self._entries.get
            return np.array([(e := get(key)) is not None and e.ready for key in objects.keys], np.bool_)

    def hold(self, objects: Objects) -> Lease:
        """The places of objects that are there, held. Release it when the last copy from them has passed."""
        entries: list[_Entry | None] = []
        results: list[int] = []
        with self._lock:
            table, self._ticks = self._entries, self._ticks + 1
            tick = self._ticks
            for key in objects.keys:
                entry = table.get(key)
                if entry is None or not entry.ready:
                    entries.append(None)
                    results.append(_MISSING)
                    continue
                entry.account.order.move_to_end(key)
                entry.tick = tick
                entry.held += 1
                entries.append(entry)
                results.append(_OK)
        return Lease(self, objects, entries, results)

    def reserve(self, objects: Objects) -> Lease:
        """Places for objects that are not there, evicting as needed: fill those whose result is PENDING, then
        release. OK: it is there already, or on its way. FULL: all that may leave for them is held."""
        size = objects.form.page_bytes
        if not self._arena.fits(size):
            raise ValueError(
                f"a page of {size} bytes does not fit a slab of {self._arena.slab_bytes}: raise HostConfig.slab_bytes"
            )
        entries: list[_Entry | None] = []
        results: list[int] = []
        with self._lock:
            table, slab_bytes, self._ticks = self._entries, self._arena.slab_bytes, self._ticks + 1
            account, tick = self._accounts.get(objects.tenant, self._others), self._ticks
            fresh = 0 if self._closed else sum(key not in table for key in objects.keys)
            within = max(0, account.most - account.used) // size
            free = self._arena.take(size, min(fresh, within))[::-1]
            for key in objects.keys:
                if (there := table.get(key)) is not None:
                    there.account.order.move_to_end(key)
                    there.tick = tick
                    entries.append(None)
                    results.append(_OK)
                    continue
                offset = -1 if self._closed else free.pop() if free else self._make_room(size, account)
                if offset < 0:
                    entries.append(None)
                    results.append(int(Outcome.FAILED if self._closed else Outcome.FULL))
                    continue
                table[key] = account.order[key] = entry = _Entry(offset, size, account, tick)
                account.used += size
                self._coming += 1
                self._in_slab[offset // slab_bytes][offset] = key
                entries.append(entry)
                results.append(_PENDING)
            for offset in free:  # an object that was in the batch twice
                self._arena.give(size, offset)
        return Lease(self, objects, entries, results)

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

    def drop(self, objects: Objects) -> int:
        with self._lock:
            dropped = 0
            for key in objects.keys:
                entry = self._entries.get(key)
                if entry is not None and entry.ready:
                    self._forget(key, entry)
                    dropped += 1
            return dropped

    def stats(self) -> TierStats:
        with self._lock:
            ready = len(self._entries) - self._coming
            return self._tally.stats(ready, self._arena.used_bytes(), self.capacity, self._evicted)

    def close(self) -> None:
        """What is held stays readable by its holders until they let go; the memory goes with the last view."""
        with self._lock:
            self._closed = True
            for key, entry in list(self._entries.items()):
                if entry.ready:
                    self._forget(key, entry)

    # --- under the lock

    def _make_room(self, size: int, account: _Account) -> int:
        """A page where none is free: that of the least recently used object that may leave, if it has this size; else the
        whole slab that object lies in leaves. Whose share is full loses pages of its own. -1 where none may leave."""
        source = self._victim(account, size)
        if source is None:
            return -1
        key, entry = next(iter(source.order.items()))
        if entry.size == size and not entry.held:  # mostly its place simply changes hands
            del self._entries[key], source.order[key]
            del self._in_slab[entry.offset // self._arena.slab_bytes][entry.offset]
            source.used -= size
            self._evicted += 1
            return entry.offset
        for _ in range(min(len(self._entries), _MOST_TRIES)):
            source = self._victim(account, size)
            own = account.used + size > account.most
            if source is None:
                return -1
            if not own and (taken := self._arena.take(size, 1)):
                return taken[0]
            key, entry = next(iter(source.order.items()))
            alone = own or entry.size == size
            places = {entry.offset: key} if alone else self._in_slab[entry.offset // self._arena.slab_bytes]
            if not all(self._may_leave(offset, other, account) for offset, other in places.items()):
                source.order.move_to_end(key)  # in use now, so not the least recently used
                entry.tick = self._ticks
                continue
            for other in list(places.values()):
                self._forget(other, self._entries[other])
                self._evicted += 1
        taken = self._arena.take(size, 1) if account.used + size <= account.most else []
        return taken[0] if taken else -1

    def _victim(self, account: _Account, size: int) -> _Account | None:
        """Whose page leaves next for one of `size` bytes of `account`: its own where its share is full, else the least
        recently used of its own and of those above what is sure to be theirs. O(accounts)."""
        if len(self._all) == 1 or account.used + size > account.most:
            return account if account.order and size <= account.most else None
        best = None
        for one in self._all:
            if one.order and (one is account or one.spares):
                tick = next(iter(one.order.values())).tick
                if best is None or tick < best[0]:
                    best = tick, one
        return best[1] if best else None

    def _may_leave(self, offset: int, key: bytes, account: _Account) -> bool:
        """Nobody holds this page, and its owner spares it or has to; one that was dropped while held is under no key, or
        its key is elsewhere now."""
        entry = self._entries.get(key)
        if entry is None or entry.offset != offset or entry.held:
            return False
        return entry.account is account or entry.account.spares or account.used + entry.size <= account.sure

    def _forget(self, key: bytes, entry: _Entry) -> None:
        del self._entries[key], entry.account.order[key]
        if entry.held:
            entry.gone = True
        else:
            self._free(entry)

    def _free(self, entry: _Entry) -> None:
        entry.account.used -= entry.size
        del self._in_slab[entry.offset // self._arena.slab_bytes][entry.offset]
        self._arena.give(entry.size, entry.offset)

    def _release(self, objects: Objects, entries: list[_Entry | None], came: list[bool]) -> None:
        if self._codec is not None:
            form, arena = objects.form, self._arena.view
            for entry, written in zip(entries, came, strict=True):
                if (
                    entry is not None and written and not entry.ready and not entry.checks
                ):  # ours alone until then
                    entry.checks = checksums(arena[entry.offset : entry.offset + entry.size], form.run_bytes)
        with self._lock:
            for key, entry, written in zip(objects.keys, entries, came, strict=False):
                if entry is None:
                    continue
                entry.held -= 1
                if not entry.ready:
                    self._coming -= 1
                    entry.ready = written
                    if not written or self._closed:
                        self._forget(key, entry)
                        continue
                if entry.gone and not entry.held:
                    self._free(entry)

    def _checks(self, entry: _Entry, run_bytes: int) -> bytes:
        """Of a page that is held and ready. Two threads may both make them: they are the same."""
        if not entry.checks:
            page = self._arena.view[entry.offset : entry.offset + entry.size]
            entry.checks = checksums(page, run_bytes)
        return entry.checks

    def _compare(self, lease: Lease, objects: Objects, into: Ranges, start: int, stop: int) -> None:
        """Compares what was read with the checksums kept; what differs is corrupt, and dropped."""
        assert self._codec is not None
        form, pages = objects.form, into.view
        for index, (at, entry) in enumerate(zip(into.starts.tolist(), lease._entries, strict=True)):
            if entry is None:
                continue
            got = pages[at + start : at + stop]
            head = Head(objects.keys[index], 0, form.run_bytes, entry.checks)
            outcome = unseal(head, got, start // form.run_bytes, got, self._codec)
            if outcome != Outcome.OK:
                lease.results[index] = outcome
                with self._lock:
                    if self._entries.get(objects.keys[index]) is entry:
                        self._forget(objects.keys[index], entry)
