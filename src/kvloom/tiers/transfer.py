"""A Transfer: a batch of objects on its way, with one outcome an object; and the counts a tier keeps of them.

A failed, late or damaged object is an outcome, never an exception: whoever asked computes it again.
Knows no medium. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["Outcome", "Tally", "TierStats", "Transfer", "explain", "failed_transfer"]


_SHORT = 64


class Outcome(IntEnum):
    """What became of one object. Everything but OK is a miss with a reason."""

    PENDING = 0
    OK = 1
    MISSING = 2  # not there
    CORRUPT = 3  # bytes that are not those that were written
    SHORT = 4  # fewer bytes than were written
    VERSION = 5  # written by another version of the format
    LAYOUT = 6  # written in another form
    FULL = 7  # no room, and none can be made
    BUSY = 8  # too much under way already
    FAILED = 9  # the medium said no, or the tier is closed; `Transfer.reason` has its words
    LATE = 10  # the caller stopped waiting
    LOCKED = 11  # sealed with a key that this tier does not have, or changed since
    UNTRUSTED = 12  # a plain page in a tier with keys


_WORDS = {
    Outcome.MISSING: "not there",
    Outcome.CORRUPT: "bytes that are not those that were written",
    Outcome.SHORT: "fewer bytes than were written",
    Outcome.VERSION: "written by another version of the format",
    Outcome.LAYOUT: "an object's head disagrees with its form",
    Outcome.LOCKED: "sealed with another key, or changed since, or the tenant has none here",
    Outcome.UNTRUSTED: "a plain page in a tier with keys, which trusts sealed pages only",
}


def explain(outcome: Outcome) -> str:
    """What was wrong with an object, for a Transfer's reason."""
    return _WORDS.get(outcome, outcome.name.lower())


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier at one moment. `reads` and `writes` count objects by outcome, since it was opened."""

    objects: int
    bytes: int
    capacity: int
    reads: dict[str, int]
    writes: dict[str, int]
    bytes_read: int
    bytes_written: int
    evicted: int
    notes: tuple[str, ...] = ()


class Tally:
    """Counts outcomes by verb. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, verb: str, outcome: int, objects: int, size: int) -> None:
        with self._lock:
            self._counts[verb, outcome] += objects
            if outcome == Outcome.OK:
                self._bytes[verb] += size

    def stats(
        self, objects: int, size: int, capacity: int, evicted: int, notes: tuple[str, ...] = ()
    ) -> TierStats:
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
        )


class Transfer:
    """One batch on its way. The caller polls, waits or cancels; the tier enters, settles and leaves.

    `done`: every object has its outcome. `quiet`: the tier will not touch the ranges any more. They differ only
    after `cancel`, while the medium is still busy with memory it was given: such pages must not be reused yet.
    """

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_changed",
        "_inside",
        "_left",
        "_object_bytes",
        "_tally",
        "_verb",
        "_view",
        "_watchers",
        "reason",
        "results",
    )

    def __init__(self, count: int, tally: Tally, verb: str, object_bytes: int) -> None:
        self.results: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self._view = self.results.data
        self.reason = ""
        self._left = count
        self._inside = 0
        self._cancelled = False
        self._changed = threading.Condition()
        self._tally, self._verb, self._object_bytes = tally, verb, object_bytes
        self._watchers: list[Callable[[], None]] = []

    # --- the caller's side

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        counts = Counter(Outcome(r).name.lower() for r in self.results.tolist())
        return f"Transfer({self._verb}, {dict(counts)}{', ' + self.reason if self.reason else ''})"

    def poll(self) -> bool:
        """Is every outcome known? Never waits."""
        return self._left == 0

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Objects that are all right so far."""
        return np.equal(self.results, Outcome.OK)

    @property
    def failed(self) -> bool:
        """Has any object an outcome other than OK? `reason` has the medium's words, if it had any."""
        return bool((self.results > Outcome.OK).any())

    @property
    def quiet(self) -> bool:
        return self._left == 0 and self._inside == 0

    def wait(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for `done`, and says whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout)

    def wait_quiet(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for `quiet`, and says whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0 and self._inside == 0, timeout)

    def cancel(self) -> bool:
        """What is still pending becomes LATE; returns `quiet`. While False, the ranges are still in use."""
        with self._changed:
            self._cancelled = True
        self.settle_rest(Outcome.LATE)
        return self.quiet

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Has `call()` called once when it is `quiet`: at once, or from the tier's thread, so it must be short."""
        with self._changed:
            if self._left or self._inside:
                self._watchers.append(call)
                return
        call()

    def _tell(self) -> None:
        with self._changed:
            if self._left or self._inside or not self._watchers:
                return
            watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    # --- the tier's side

    def enter(self) -> bool:
        """The tier is about to touch ranges. False: it must not, the caller has gone, or every outcome is told already."""
        with self._changed:
            if self._cancelled or not self._left:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
        self._tell()

    def settle(self, which: npt.ArrayLike, outcome: Outcome, reason: str = "") -> None:
        """Gives pending objects their outcome; those that have one keep it."""
        with self._changed:
            count = self._mark(which, int(outcome))
            if not count:
                return
            if reason:
                self.reason = reason
            # Counted before anyone can see `done`, so that stats never lag behind an answer.
            self._tally.add(self._verb, outcome, count, count * self._object_bytes)
            self._left -= count
            if not self._left:
                self._changed.notify_all()
        self._tell()

    def _mark(self, which: npt.ArrayLike, outcome: int) -> int:
        """How many were pending. A short list is gone through: numpy's calls cost more, most of all between two reads."""
        if isinstance(which, list) and len(which) <= _SHORT:
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

    def settle_rest(self, outcome: Outcome, reason: str = "") -> None:
        self.settle(np.flatnonzero(self.results == Outcome.PENDING), outcome, reason)


def failed_transfer(count: int, tally: Tally, verb: str, outcome: Outcome, reason: str) -> Transfer:
    """A Transfer that is over before it began."""
    transfer = Transfer(count, tally, verb, 0)
    transfer.settle_rest(outcome, reason)
    return transfer
