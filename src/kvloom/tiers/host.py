"""The host tier: pages in this process's memory, least recently used first to leave, of those whose share allows it.

A read or write copies in the calling thread, a large one with a second beside it, and is done when it returns. A
device copies by itself: `hold` and `reserve` lend the places in the arena for as long as its copies run.
Knows no devices: pinned memory is handed in as the arena's buffer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import Arena, copy_pages
from .checks import checksums
from .codec import Head, make_codec, unseal
from .lease import Lease
from .shares import Account, Share, Shares
from .slots import Index, Recent, Slots
from .tier import Form, Objects, Ranges, Tier, parted
from .transfer import Outcome, Tally, TierStats, Transfer, failed_transfer

__all__ = ["HostConfig", "HostTier"]

_OK, _MISSING, _PENDING = (
    int(Outcome.OK),
    int(Outcome.MISSING),
    int(Outcome.PENDING),
)  # numpy takes ints faster
_ONE = np.int32(1)
_MOST_TRIES = 4096  # pages looked at to make room for one, when many are held


@dataclass(frozen=True, slots=True)
class HostConfig:
    """`slab_bytes` is at least the largest page: take the layout's. `checked` keeps and compares checksums, for
    memory that is not trusted; it costs about as much as the copy."""

    capacity: int
    slab_bytes: int = 8 << 20
    checked: bool = False


class _Account(Account):
    """A tenant's pages: their slots by their last use."""

    __slots__ = ("index", "order")

    def __init__(self, share: Share, capacity: int, slots: Slots) -> None:
        super().__init__(share, capacity)
        self.order = Recent(slots)
        self.index = 0


class HostTier(Tier):
    """Safe from any thread; the lock is held for bookkeeping only, never for a copy."""

    def __init__(self, config: HostConfig, buffer: Any = None) -> None:
        self._config = config
        self._arena = Arena(config.capacity, config.slab_bytes, buffer)
        self._codec = make_codec() if config.checked else None
        self._lock = threading.Lock()
        self._entries: dict[bytes, int] = {}  # key → slot
        self._slots = Slots()
        self._keys: dict[int, bytes] = {}  # place in the arena → key of who has it, or had it last
        self._others = _Account(Share(), self.capacity, self._slots)
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
            self._accounts = {
                tenant: _Account(share, self.capacity, self._slots) for tenant, share in shares.items()
            }
            self._others = self._accounts.get("", self._others)
            self._all = list({id(a): a for a in (self._others, *self._accounts.values())}.values())
            for index, account in enumerate(self._all):
                account.index = index

    def kept_for(self, tenant: str) -> int:
        with self._lock:
            return self._accounts.get(tenant, self._others).used

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        with self._lock:
            slots = self._find(objects)
            there: npt.NDArray[np.bool_] = (slots >= 0) & self._slots.ready[slots]
            return there

    def hold(self, objects: Objects) -> Lease:
        """The places of objects that are there, held. Release it when the last copy from them has passed."""
        with self._lock:
            slots = self._find(objects)
            there = (slots >= 0) & self._slots.ready[slots]
            slots[~there] = -1
            held = slots if there.all() else slots[there]
            self._use(held)
            np.add.at(self._slots.held, held, _ONE)  # an object may be in the batch twice
            offsets = self._slots.offset[slots]
        offsets[~there] = -1
        return Lease(self, objects, slots, offsets, np.where(there, _OK, _MISSING).astype(np.uint8))

    def reserve(self, objects: Objects) -> Lease:
        """Places for objects that are not there, evicting as needed: fill those whose result is PENDING, then
        release. OK: it is there already, or on its way. FULL: all that may leave for them is held."""
        size, keys = objects.form.page_bytes, objects.keys
        if not self._arena.fits(size):
            raise ValueError(
                f"a page of {size} bytes does not fit a slab of {self._arena.slab_bytes}: raise HostConfig.slab_bytes"
            )
        with self._lock:
            table = self._entries
            account = self._accounts.get(objects.tenant, self._others)
            fresh = keys if table.keys().isdisjoint(keys) else [key for key in keys if key not in table]
            if len(fresh) < len(keys):  # used now, so the last to leave for the others
                self._use(np.array([table[key] for key in keys if key in table], np.int64))
            once = dict.fromkeys(fresh)
            given = [] if self._closed else self._places(size, account, len(once))
            slots = self._enter(keys, once, given, account)
            held = slots >= 0
            offsets = self._slots.offset[slots]
            results = np.full(len(keys), _PENDING, np.uint8)
            if not held.all():
                offsets[~held] = -1
                none = int(Outcome.FAILED if self._closed else Outcome.FULL)
                others = np.flatnonzero(~held)
                results[others] = [_OK if keys[i] in table else none for i in others.tolist()]
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

    def drop(self, objects: Objects) -> int:
        with self._lock:
            dropped = 0
            for key in objects.keys:
                slot = self._entries.get(key)
                if slot is not None and self._slots.ready[slot]:
                    self._forget(key, slot)
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
            for key, slot in list(self._entries.items()):
                if self._slots.ready[slot]:
                    self._forget(key, slot)

    # --- under the lock

    def _find(self, objects: Objects) -> Index:
        """The slots of objects, -1 for those that are not there."""
        get = self._entries.get
        return np.array([get(key, -1) for key in objects.keys], np.int64)

    def _use(self, slots: Index) -> None:
        """These are the most recently used now."""
        if len(set(found := slots.tolist())) < len(found):
            slots = np.array(list(dict.fromkeys(found)), np.int64)
        accounts = self._all if slots.size else []
        owners = self._slots.account[slots] if len(accounts) > 1 else None
        for account in accounts:
            theirs = slots if owners is None else slots[owners == account.index]
            if theirs.size:
                self._ticks += 1
                account.order.used(theirs, self._ticks)

    def _enter(
        self, keys: list[bytes], fresh: dict[bytes, None], given: list[int], account: _Account
    ) -> Index:
        """The first of the `fresh` keys have these slots from now on. The slot that each of `keys` is to be filled in:
        -1 for one that was there, has no place, or is in the batch a second time."""
        entered = fresh if len(given) == len(fresh) else list(islice(fresh, len(given)))
        self._entries.update(zip(entered, given, strict=True))
        slots = np.array(given, np.int64)
        self._slots.begin(slots, account.index)
        self._keys.update(zip(self._slots.offset[slots].tolist(), entered, strict=True))
        self._ticks += 1
        account.order.used(slots, self._ticks)
        self._coming += len(given)
        if len(given) == len(keys):
            return slots
        left = dict(zip(entered, given, strict=True))
        return np.array([left.pop(key, -1) for key in keys], np.int64)

    def _places(self, size: int, account: _Account, count: int) -> list[int]:
        """Slots for `count` pages of `account`, as many as there can be: free ones, then those of who leaves."""
        slots: list[int] = []
        while (lacking := count - len(slots)) > 0:
            within = max(0, account.most - account.used) // size
            more = self._slots.take(self._arena.take(size, min(lacking, within)), size)
            more = more or self._take_over(size, account, lacking) or self._make_room(size, account)
            if not more:
                break
            account.used += size * len(more)
            slots += more
        return slots

    def _take_over(self, size: int, account: _Account, most: int) -> list[int]:
        """Mostly a place simply changes hands: up to `most` of those that are next to leave, have this size and are not
        held. Those before them that are held are in use now, so not the least recently used."""
        source = self._victim(account, size)
        if source is None:
            return []
        turn = self._ticks + 1
        if not self._alone(account, size):  # until it is another's turn, or one of the two is at its limit
            firsts = [other.order.first() for other in self._losers(account) if other is not source]
            turn = min((int(self._slots.tick[slot]) for slot in firsts if slot is not None), default=turn)
            most = min(most, (account.most - account.used) // size)
            if source is not account:
                most = min(most, -(-(source.used - source.sure) // size))
        for reach in (most, max(most, _MOST_TRIES)):  # further where all of the first are held
            oldest = source.order.oldest(reach)
            other = np.flatnonzero((self._slots.tick[oldest] >= turn) | (self._slots.size[oldest] != size))
            if other.size:
                oldest = oldest[: other[0]]
            idle = np.flatnonzero(self._slots.held[oldest] == 0)[:most]
            if idle.size:
                break
        if idle.size and idle[-1] >= idle.size:
            passed = oldest[: idle[-1]]
            self._use(passed[self._slots.held[passed] > 0])
        slots = oldest[idle]
        for offset in self._slots.offset[slots].tolist():
            del self._entries[self._keys[offset]]
        self._slots.tick[slots] = -1
        source.used -= size * len(slots)
        self._evicted += len(slots)
        taken: list[int] = slots.tolist()
        return taken

    def _make_room(self, size: int, account: _Account) -> list[int]:
        """The slot of a page where none is free and the next to leave is held or of another size: then the whole slab
        that it lies in leaves. Whose share is full loses pages of its own. None where none may leave."""
        tries = min(len(self._entries), _MOST_TRIES)
        if self._alone(account, size) and self._slots.held[account.order.oldest(tries)].all():
            return []  # without looking at one after the other
        for _ in range(tries):
            source = self._victim(account, size)
            own = account.used + size > account.most
            if source is None:
                return []
            if not own and (taken := self._arena.take(size, 1)):
                return self._slots.take(taken, size)
            slot = source.order.first()
            assert slot is not None
            offset = int(self._slots.offset[slot])
            alone = own or self._slots.size[slot] == size
            places = {offset: self._keys[offset]} if alone else self._in_slab(offset)
            if not all(self._may_leave(place, other, account) for place, other in places.items()):
                self._use(np.array([slot]))  # in use now, so not the least recently used
                continue
            for other in places.values():
                self._forget(other, self._entries[other])
                self._evicted += 1
        return self._slots.take(self._arena.take(size, int(account.used + size <= account.most)), size)

    def _in_slab(self, offset: int) -> dict[int, bytes]:
        """Who has the places of the slab that this one is in."""
        return {place: self._keys[place] for place in self._arena.beside(offset) if place in self._keys}

    def _victim(self, account: _Account, size: int) -> _Account | None:
        """Whose page leaves next for one of `size` bytes of `account`: its own where its share is full, else the least
        recently used of its own and of those above what is sure to be theirs. O(accounts)."""
        if self._alone(account, size):
            return account if size <= account.most and account.order.first() is not None else None
        best = None
        for one in self._losers(account):
            slot = one.order.first()
            if slot is not None:
                tick = int(self._slots.tick[slot])
                if best is None or tick < best[0]:
                    best = tick, one
        return best[1] if best else None

    def _losers(self, account: _Account) -> list[_Account]:
        """Whose pages may leave for one of `account`, while that is within its share."""
        return [one for one in self._all if one is account or one.spares]

    def _alone(self, account: _Account, size: int) -> bool:
        """Whether only pages of its own may leave for a page of `account`."""
        return len(self._all) == 1 or account.used + size > account.most

    def _may_leave(self, offset: int, key: bytes, account: _Account) -> bool:
        """Nobody holds this page, and its owner spares it or has to; one that was dropped while held is under no key, or
        its key is elsewhere now."""
        slot = self._entries.get(key)
        if slot is None or self._slots.offset[slot] != offset or self._slots.held[slot]:
            return False
        owner = self._all[self._slots.account[slot]]
        return owner is account or owner.spares or account.used + int(self._slots.size[slot]) <= account.sure

    def _forget(self, key: bytes, slot: int) -> None:
        del self._entries[key]
        self._slots.tick[slot] = -1
        if self._slots.held[slot]:
            self._slots.gone[slot] = True
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        offset, size = int(self._slots.offset[slot]), int(self._slots.size[slot])
        self._all[self._slots.account[slot]].used -= size
        del self._keys[offset]
        self._arena.give(size, offset)
        self._slots.give(slot)

    def _release(self, objects: Objects, slots: Index, written: bool | npt.NDArray[np.bool_]) -> None:
        at = np.flatnonzero(slots >= 0)
        held, came = slots[at], np.broadcast_to(np.asarray(written), len(slots))[at]
        if self._codec is not None:
            for slot in held[came & ~self._slots.ready[held]].tolist():  # ours alone until then
                self._checks(slot, objects.form)
        with self._lock:
            noted = self._slots
            np.subtract.at(noted.held, held, _ONE)
            coming = ~noted.ready[held]
            if coming.any():  # of a `reserve`, then: none is there twice
                self._coming -= int(coming.sum())
                noted.ready[held] |= came
                lost = coming & (~came | self._closed)
                for i in np.flatnonzero(lost).tolist():
                    self._forget(objects.keys[at[i]], int(held[i]))
                held = held[~lost]
            for slot in set(held[noted.gone[held] & (noted.held[held] == 0)].tolist()):
                self._free(slot)

    def _checks(self, slot: int, form: Form) -> bytes:
        """Of a page that is held, and ready or its filler's. Two threads may both make them: they are the same."""
        checks = self._slots.checks.get(slot)
        if checks is None:
            offset = int(self._slots.offset[slot])
            checks = checksums(self._arena.view[offset : offset + form.page_bytes], form.run_bytes)
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
            head = Head(objects.keys[index], 0, form.run_bytes, self._checks(slot, form))
            outcome = unseal(head, got, start // form.run_bytes, got, self._codec)
            if outcome != Outcome.OK:
                lease.results[index] = outcome
                with self._lock:
                    if self._entries.get(objects.keys[index]) == slot:
                        self._forget(objects.keys[index], slot)
