"""A Transfer moves one batch of objects between two locations, with one outcome per object. `TransferCounts` counts
outcomes.

If an object fails, is late or is damaged, no exception is raised. The object gets an outcome, and the caller
recomputes it. All classes are thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["Outcome", "TierStats", "Transfer", "TransferCounts", "describe_outcome", "failed_transfer"]


_SHORT_LIST = 64


class Outcome(IntEnum):
    """The result for one object. Every value except PENDING and OK is a miss, and names its reason."""

    PENDING = 0
    OK = 1
    MISSING = 2  # not stored
    CORRUPT = 3  # the bytes differ from the bytes that were written
    SHORT = 4  # fewer bytes than were written
    VERSION = 5  # written by another version of the format
    LAYOUT = 6  # written in another form
    FULL = 7  # no space, and nothing can be evicted
    BUSY = 8  # too many bytes in flight
    FAILED = 9  # the medium reported an error, or the tier is closed; see `Transfer.reason`
    LATE = 10  # the caller stopped waiting
    LOCKED = 11  # sealed with a key that this tier lacks, or modified after the write
    UNTRUSTED = 12  # a plain page in a tier with keys


_DESCRIPTIONS = {
    Outcome.MISSING: "not stored",
    Outcome.CORRUPT: "the bytes differ from those written",
    Outcome.SHORT: "fewer bytes than written",
    Outcome.VERSION: "written by another version of the format",
    Outcome.LAYOUT: "the stored page has another form (byte layout) than the requested one",
    Outcome.LOCKED: "sealed with another key, modified since, or the tenant has no key here",
    Outcome.UNTRUSTED: "a plain page in a tier with keys, which accepts sealed pages only",
}


def describe_outcome(outcome: Outcome) -> str:
    """Return an outcome in words, for `Transfer.reason`."""
    return _DESCRIPTIONS.get(outcome, outcome.name.lower())


@dataclass(frozen=True, slots=True)
class TierStats:
    """The counts of a tier at one time.

    - `reads` and `writes` count objects by outcome since the tier was opened.
    - `tenants` has the bytes of each tenant with a share.
    - `notes` are messages for the operator.
    """

    objects: int
    bytes: int
    capacity: int
    reads: dict[str, int]
    writes: dict[str, int]
    bytes_read: int
    bytes_written: int
    evicted: int
    notes: tuple[str, ...] = ()
    tenants: Mapping[str, int] = field(default_factory=dict)


class TransferCounts:
    """Counts outcomes by operation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, verb: str, outcome: int, objects: int, size: int) -> None:
        """Count objects by operation and outcome. `verb` is read or write. Counts the bytes `size` only if the outcome
        is OK."""
        with self._lock:
            self._counts[verb, outcome] += objects
            if outcome == Outcome.OK:
                self._bytes[verb] += size

    def stats(
        self,
        objects: int,
        size: int,
        capacity: int,
        evicted: int,
        notes: tuple[str, ...] = (),
        tenants: Mapping[str, int] | None = None,
    ) -> TierStats:
        """Return the statistics of a tier: these counts and the given figures. `size` is the number of stored
        bytes."""
        with self._lock:
            by_verb = {
                verb: {Outcome(o).name.lower(): n for (v, o), n in self._counts.items() if v == verb}
                for verb in ("read", "write")
            }
            moved = dict(self._bytes)
        return TierStats(
            objects=objects,
            bytes=size,
            capacity=capacity,
            reads=by_verb["read"],
            writes=by_verb["write"],
            bytes_read=moved.get("read", 0),
            bytes_written=moved.get("write", 0),
            evicted=evicted,
            notes=notes,
            tenants=tenants or {},
        )


class Transfer:
    """One batch in transfer. The caller polls, waits or cancels. The tier accesses the ranges and sets the outcomes.

    `done` means that every object has its outcome. `released` means that the tier no longer accesses the ranges.
    After `cancel` a transfer is done, but the medium may still use its memory. The caller must not reuse the memory
    before `released`.
    """

    __slots__ = (
        "__weakref__",
        "_accesses",
        "_cancelled",
        "_changed",
        "_object_bytes",
        "_pending",
        "_transfer_counts",
        "_verb",
        "_view",
        "_watchers",
        "reason",
        "results",
    )

    def __init__(self, count: int, counts: TransferCounts, verb: str, object_bytes: int) -> None:
        self.results: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self._view = self.results.data
        self.reason = ""
        self._pending = count
        self._accesses = 0
        self._cancelled = False
        self._changed = threading.Condition()
        self._transfer_counts, self._verb, self._object_bytes = counts, verb, object_bytes
        self._watchers: list[Callable[[], None]] = []

    # --- for the caller

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        counts = Counter(Outcome(r).name.lower() for r in self.results.tolist())
        return f"Transfer({self._verb}, {dict(counts)}{', ' + self.reason if self.reason else ''})"

    def poll(self) -> bool:
        """Return whether every outcome is set. Never waits."""
        return self._pending == 0

    @property
    def done(self) -> bool:
        """Whether every outcome is set."""
        return self._pending == 0

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """For each object, whether its outcome is OK so far."""
        return np.equal(self.results, Outcome.OK)

    @property
    def failed(self) -> bool:
        """Whether any object already has an outcome other than OK. `reason` contains the message of the medium, if
        there is one."""
        return bool((self.results > Outcome.OK).any())

    @property
    def released(self) -> bool:
        """Whether the tier no longer accesses the ranges."""
        return self._pending == 0 and self._accesses == 0

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the transfer is done. Return `done`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def wait_released(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the transfer is released. Return `released`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0 and self._accesses == 0, timeout)

    def cancel(self) -> bool:
        """Give pending objects the outcome LATE. Return `released`. While `released` is False, the tier still uses
        the ranges."""
        with self._changed:
            self._cancelled = True
        self.settle_pending(Outcome.LATE)
        return self.released

    def on_released(self, call: Callable[[], None]) -> None:
        """Run `call` once when the transfer is released. If it is already released, `call` runs at once, otherwise
        later in a thread of the tier. `call` must be short."""
        with self._changed:
            if self._pending or self._accesses:
                self._watchers.append(call)
                return
        call()

    def _notify(self) -> None:
        with self._changed:
            if self._pending or self._accesses or not self._watchers:
                return
            watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    # --- for the tier

    def begin_access(self) -> bool:
        """Begin an access of the tier to the ranges, and return True. The tier calls `end_access` when the access
        is over. If the transfer was cancelled or is done, returns False, and the tier must not access the ranges."""
        with self._changed:
            if self._cancelled or not self._pending:
                return False
            self._accesses += 1
            return True

    def end_access(self) -> None:
        """End an access of the tier to the ranges, after `begin_access`."""
        with self._changed:
            self._accesses -= 1
            self._changed.notify_all()
        self._notify()

    def settle(self, which: npt.ArrayLike, outcome: Outcome, reason: str = "") -> None:
        """Set the outcome of the pending objects among `which`. Objects that already have an outcome keep it. Raises
        ValueError for PENDING."""
        if outcome == Outcome.PENDING:
            raise ValueError("PENDING is no outcome: settle objects with another one")
        with self._changed:
            count = self._set_outcomes(which, int(outcome))
            if not count:
                return
            if reason:
                self.reason = reason
            # Counted before `done` becomes visible, so that stats include every visible outcome.
            self._transfer_counts.add(self._verb, outcome, count, count * self._object_bytes)
            self._pending -= count
            if not self._pending:
                self._changed.notify_all()
        self._notify()

    def _set_outcomes(self, which: npt.ArrayLike, outcome: int) -> int:
        """Set the outcome of those objects of `which` that are still pending, and return their number. For a short
        list, a loop is faster than numpy calls."""
        if isinstance(which, list) and len(which) <= _SHORT_LIST:
            results, count = self._view, 0
            for index in which:
                if not results[index]:
                    results[index] = outcome
                    count += 1
            return count
        index = np.atleast_1d(np.asarray(which, np.int64))
        index = index[self.results[index] == Outcome.PENDING]
        self.results[index] = outcome
        return len(index)

    def settle_pending(self, outcome: Outcome, reason: str = "") -> None:
        """Set the outcome of all objects that have none yet."""
        self.settle(np.flatnonzero(self.results == Outcome.PENDING), outcome, reason)


def failed_transfer(count: int, counts: TransferCounts, verb: str, outcome: Outcome, reason: str) -> Transfer:
    """Return a Transfer that is already done, with one outcome for all objects."""
    transfer = Transfer(count, counts, verb, 0)
    transfer.settle_pending(outcome, reason)
    return transfer
