"""What the host tier notes of each page it has, in arrays: one slot a page, so that a batch costs a few array operations.

A slot stands for a place in the arena from when the place is taken until it is given back; an object that takes over
another's place takes over its slot. `Recent` orders slots by their last use. Knows no names. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Index", "Recent", "Slots"]

Index = npt.NDArray[np.int64]
_FIRST = 1024
_SPARE = 4096
"""Uses that may be remembered in vain before they are looked through."""
_PART = 256
"""Slots of a batch that are looked at together: one that leaves by itself costs a look at so many."""


class Slots:
    """Arrays indexed by slot; those of a slot that nobody has mean nothing."""

    def __init__(self) -> None:
        self.offset: Index = np.zeros(_FIRST, np.int64)
        self.size: Index = np.zeros(_FIRST, np.int64)
        self.run: Index = np.zeros(_FIRST, np.int64)
        """Bytes of one layer run, as its writer gave them."""
        self.writer: Index = np.zeros(_FIRST, np.int64)
        """Which peer wrote it; 0 is this process."""
        self.tick: Index = np.zeros(_FIRST, np.int64)
        """When it was used last; -1 of one that nobody can find any more."""
        self.account: npt.NDArray[np.int32] = np.zeros(_FIRST, np.int32)
        self.held: npt.NDArray[np.int32] = np.zeros(_FIRST, np.int32)
        """Transfers under way: it can neither be evicted nor its place lent."""
        self.ready: npt.NDArray[np.bool_] = np.zeros(_FIRST, np.bool_)
        """Its bytes have come."""
        self.gone: npt.NDArray[np.bool_] = np.zeros(_FIRST, np.bool_)
        """Dropped while held: its place comes back with the last hold."""
        self.keys: list[bytes] = [b""] * _FIRST
        """Whose it is, or was last."""
        self.at: dict[int, int] = {}
        """Place in the arena → slot."""
        self.checks: dict[int, bytes] = {}
        """Checksums of its page, of the slots that have any."""
        self._free = list(range(_FIRST - 1, -1, -1))

    def take(self, offsets: list[int], size: int) -> list[int]:
        """A slot for each of these places."""
        count = len(offsets)
        if not count:
            return []
        while len(self._free) < count:
            self._grow()
        slots = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self.offset[slots], self.size[slots] = offsets, size
        self.at.update(zip(offsets, slots, strict=True))
        return slots

    def begin(self, slots: Index, keys: Iterable[bytes], account: int) -> None:
        """Each is of a new object from now on: held once, by whoever fills it."""
        noted = self.keys
        for slot, key in zip(slots.tolist(), keys, strict=True):
            noted[slot] = key
        self.account[slots], self.held[slots] = account, 1
        self.ready[slots] = self.gone[slots] = False
        if self.checks:
            for slot in slots.tolist():
                self.checks.pop(slot, None)

    def give(self, slot: int) -> None:
        del self.at[int(self.offset[slot])]
        self._free.append(slot)

    def _grow(self) -> None:
        before = len(self.offset)
        for name in ("offset", "size", "run", "writer", "tick", "account", "held", "ready", "gone"):
            old: npt.NDArray[Any] = getattr(self, name)
            # A new array: who reads a held slot without the lock may go on reading the old one.
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
        self.keys += [b""] * before
        self._free[:0] = range(2 * before - 1, before - 1, -1)


class Recent:
    """Slots by their last use, longest ago first: batches of them as they were used. A slot that was used again since, or
    left, is passed over: its tick is another one. A batch costs one append; looking costs O(1) a slot, in the long run."""

    __slots__ = ("_batches", "_limit", "_queued", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._batches: deque[tuple[int, Index]] = deque()
        self._queued, self._limit = 0, _SPARE

    def used(self, slots: Index, tick: int) -> None:
        """These (each once) are used now; no other call ever had this tick."""
        if not slots.size:
            return
        self._slots.tick[slots] = tick
        for at in range(0, len(slots), _PART):
            self._batches.append((tick, slots[at : at + _PART]))
        self._queued += len(slots)
        if self._queued > self._limit:
            self._batches = deque((tick, live) for tick, live in self._live() if live.size)
            self._queued = sum(len(live) for _, live in self._batches)
            self._limit = 2 * self._queued + _SPARE

    def _live(self) -> Iterator[tuple[int, Index]]:
        for tick, slots in self._batches:
            yield tick, slots[self._slots.tick[slots] == tick]

    def first(self) -> int | None:
        """The slot whose last use was longest ago."""
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

    def oldest(self, most: int) -> Index:
        """Up to `most` slots, that whose last use was longest ago first."""
        found, count = list[Index](), 0
        self.first()  # what is at the front and has gone is not looked at twice
        for _, live in self._live():
            found.append(live)
            count += len(live)
            if count >= most:
                break
        if len(found) == 1:
            return found[0][:most]
        return np.concatenate(found)[:most] if found else np.zeros(0, np.int64)
