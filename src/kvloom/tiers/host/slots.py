"""The state of the host tier's pages, in arrays with one slot per page. A batch needs a few array operations.

A slot represents an arena page from its allocation until the page is freed. If an object is evicted for a new object of
the same size, the new object gets the slot. `LruOrder` orders slots by last use. This module is not thread-safe. The
lock of the host tier guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST_TICK", "Index", "LruOrder", "Slots"]

Index = npt.NDArray[np.int64]
_INITIAL_SLOTS = 1024
FIRST_TICK = 1 << 62
"""Ticks of used pages count up from this number. Ticks of demoted pages count down from it."""
_STALE_LIMIT = 4096
"""Number of outdated entries that an LruOrder may have before it removes them."""
_PART_SLOTS = 256
"""Batches of slots are stored in parts of this many slots. Removing outdated slots checks one part at a time."""


class Slots:
    """Arrays indexed by slot. The values of an unallocated slot are undefined."""

    def __init__(self) -> None:
        self.offset: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        self.size: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        self.run: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        """Size of a layer run of the page in bytes, as the writer stated it."""
        self.writer: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        """The peer that wrote the page; 0 is this process."""
        self.stored_at: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        """Time at which the page was reserved, in seconds since 1970."""
        self.tick: Index = np.zeros(_INITIAL_SLOTS, np.int64)
        """Tick of the last use, or -1 for a removed page. A tick is a number that increases with every use of any
        page. A demoted page has a tick below FIRST_TICK."""
        self.account: npt.NDArray[np.int32] = np.zeros(_INITIAL_SLOTS, np.int32)
        self.refs: npt.NDArray[np.int32] = np.zeros(_INITIAL_SLOTS, np.int32)
        """Number of leases. A page with leases is neither evicted nor reused."""
        self.ready: npt.NDArray[np.bool_] = np.zeros(_INITIAL_SLOTS, np.bool_)
        """Whether the bytes of the page are complete."""
        self.dropped: npt.NDArray[np.bool_] = np.zeros(_INITIAL_SLOTS, np.bool_)
        """Whether the page was removed while it was leased. The release of its last lease frees the page."""
        self.keys: list[bytes] = [b""] * _INITIAL_SLOTS
        """Key of the slot's current or last object."""
        self.slot_at: dict[int, int] = {}
        """Slot of each arena offset."""
        self.checksums: dict[int, bytes] = {}
        """Checksums of the page, for slots that have them."""
        self._free = list(range(_INITIAL_SLOTS - 1, -1, -1))

    def allocate(self, offsets: list[int], size: int) -> list[int]:
        """Allocate and return one slot for each arena offset. The pages at these offsets have `size` bytes."""
        count = len(offsets)
        if not count:
            return []
        while len(self._free) < count:
            self._grow()
        slots = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self.offset[slots], self.size[slots] = offsets, size
        self.slot_at.update(zip(offsets, slots, strict=True))
        return slots

    def assign(self, slots: Index, keys: Iterable[bytes], account: int) -> None:
        """Assign each slot to a new object, with one reference for the lease that fills it."""
        keys_by_slot = self.keys
        for slot, key in zip(slots.tolist(), keys, strict=True):
            keys_by_slot[slot] = key
        self.account[slots], self.refs[slots] = account, 1
        self.ready[slots] = self.dropped[slots] = False
        if self.checksums:
            for slot in slots.tolist():
                self.checksums.pop(slot, None)

    def free(self, slot: int) -> None:
        del self.slot_at[int(self.offset[slot])]
        self._free.append(slot)

    def _grow(self) -> None:
        before = len(self.offset)
        for name in (
            "offset",
            "size",
            "run",
            "writer",
            "stored_at",
            "tick",
            "account",
            "refs",
            "ready",
            "dropped",
        ):
            old: npt.NDArray[Any] = getattr(self, name)
            # A new array, because a thread may still read a leased slot of the old one without the lock.
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.keys += [b""] * before
        self._free[:0] = range(2 * before - 1, before - 1, -1)


class LruOrder:
    """Slots ordered by last use, least recent first.

    Each call of `touch` adds a batch: the used slots, and the tick (number) of the use. If a slot is later used again
    or removed, its tick changes, and its entry in the old batch is skipped. `demote` adds a batch before all others.

    Adding a batch is one append. Finding the least recently used slot takes amortised O(1) time.
    """

    __slots__ = ("_batches", "_limit", "_queued", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._batches: deque[tuple[int, Index]] = deque()
        self._queued, self._limit = 0, _STALE_LIMIT

    def touch(self, slots: Index, tick: int) -> None:
        """Mark slots as used now. Each slot may occur only once. Every call needs a new tick."""
        if not slots.size:
            return
        self._slots.tick[slots] = tick
        for at in range(0, len(slots), _PART_SLOTS):
            self._batches.append((tick, slots[at : at + _PART_SLOTS]))
        self._queued += len(slots)
        if self._queued > self._limit:
            self._batches = deque((tick, live) for tick, live in self._live() if live.size)
            self._queued = sum(len(live) for _, live in self._batches)
            self._limit = 2 * self._queued + _STALE_LIMIT

    def demote(self, slots: Index, tick: int) -> None:
        """Move slots before all others. Each slot may occur only once. Every call needs a smaller tick."""
        self._slots.tick[slots] = tick
        for at in reversed(range(0, len(slots), _PART_SLOTS)):
            self._batches.appendleft((tick, slots[at : at + _PART_SLOTS]))
        self._queued += len(slots)

    def _live(self) -> Iterator[tuple[int, Index]]:
        for tick, slots in self._batches:
            yield tick, slots[self._slots.tick[slots] == tick]

    def least_recent(self) -> int | None:
        """Return the least recently used slot, or None if there is none."""
        while self._batches:
            tick, slots = self._batches[0]
            if slots.size and self._slots.tick[slots[0]] == tick:
                return int(slots[0])
            live = slots[self._slots.tick[slots] == tick]
            self._queued -= len(slots) - len(live)
            self._batches.popleft()
            if live.size:
                self._batches.appendleft((tick, live))
        return None

    def oldest(self, limit: int) -> Index:
        """Return up to `limit` slots, least recently used first."""
        found, count = list[Index](), 0
        self.least_recent()  # removes outdated entries at the front
        for _, live in self._live():
            found.append(live)
            count += len(live)
            if count >= limit:
                break
        if len(found) == 1:
            return found[0][:limit]
        return np.concatenate(found)[:limit] if found else np.zeros(0, np.int64)
