"""Tiers and files that fail on purpose, for tests of code that uses tiers.

`FaultyTier` makes any tier slow, failing, full or hung, or damages its medium. `FaultyFiles` replaces the system
calls of a disk tier.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk import Files
from kvloom.tiers.tier import Objects, Ranges, Tier
from kvloom.tiers.transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer
from kvloom.tiers.workers import Workers

__all__ = ["Faults", "FaultyFiles", "FaultyTier"]


@dataclass
class Faults:
    """The faults to inject. They can be changed at any time.

    - `slow`: each call takes this many seconds longer.
    - `failing`: reads and writes fail.
    - `full`: writes find the tier full.
    - `rate`: the limit of reads in bytes per second. The next `burst` bytes are not limited.
    - `hung`: calls wait for `release()`. `hung_calls` is the number of calls that wait now.
    - `flip`, `short`: reads of `FaultyFiles` flip a bit, or return fewer bytes.
    - `tamper`: `FaultyTier` calls this function with the objects before every read. It may damage the medium.
    - `calls`: the file operations of `FaultyFiles` that are slow, hang or fail. `error` is the errno of a failure.
    """

    slow: float = 0.0
    rate: float = 0.0
    burst: int = 0
    failing: bool = False
    full: bool = False
    hung: bool = False
    flip: bool = False
    short: bool = False
    tamper: Callable[[Objects], None] | None = None
    calls: frozenset[str] = frozenset({"read", "write", "sync", "open", "allocate"})
    error: int = errno.EIO
    hung_calls: int = 0
    _released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _due: float = 0.0

    def release(self) -> None:
        """Release all hung calls."""
        self.hung = False
        self._released.set()

    def delay(self) -> None:
        if self.slow:
            threading.Event().wait(self.slow)
        if self.hung:
            with self._lock:
                self.hung_calls += 1
            self._released.wait()
            with self._lock:
                self.hung_calls -= 1

    def throttle(self, size: int) -> None:
        """Wait until a medium with throughput `rate` would have read `size` bytes. The medium serves one request
        after another. The next `burst` bytes take no time. Without `rate`, returns at once."""
        if not self.rate:
            return
        with self._lock:
            at_once = min(size, self.burst)
            self.burst -= at_once
            self._due = due = max(self._due, time.monotonic()) + (size - at_once) / self.rate
        time.sleep(max(0.0, due - time.monotonic()))


class FaultyTier(Tier):
    """Wraps the tier `inner` and injects `faults`. Reads and writes run in separate threads, so a slow call does not
    block the caller."""

    def __init__(self, inner: Tier, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self._transfer_counts = TransferCounts()
        self._workers: Workers[Callable[[], None]] = Workers(4, "kvloom-faulty", lambda: lambda job: job())

    @property
    def name(self) -> str:
        return f"faulty {self.inner.name}"

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        return self.inner.lookup(objects)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        if self.faults.failing:
            return failed_transfer(len(objects), self._transfer_counts, "read", Outcome.FAILED, "injected")

        def start() -> Transfer:
            if self.faults.tamper is not None:
                self.faults.tamper(objects)
            return self.inner.read(objects, into, part)

        return self._submit("read", objects, start)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        if self.faults.failing or self.faults.full:
            outcome = Outcome.FULL if self.faults.full else Outcome.FAILED
            return failed_transfer(len(objects), self._transfer_counts, "write", outcome, "injected")
        return self._submit("write", objects, lambda: self.inner.write(objects, source))

    def _submit(self, verb: str, objects: Objects, start: Callable[[], Transfer]) -> Transfer:
        transfer = Transfer(len(objects), self._transfer_counts, verb, objects.form.page_bytes)

        def job() -> None:
            if not transfer.begin_access():
                return
            try:
                self.faults.delay()
                if verb == "read":
                    self.faults.throttle(len(objects) * objects.form.page_bytes)
                inner = start()
                inner.wait_released(60)
                for outcome in np.unique(inner.results).tolist():
                    transfer.settle(np.flatnonzero(inner.results == outcome), Outcome(outcome), inner.reason)
            except Exception as error:  # noqa: BLE001
                transfer.settle_pending(Outcome.FAILED, str(error))
            finally:
                transfer.end_access()

        self._workers.submit(job)
        return transfer

    def drop(self, objects: Objects) -> int:
        return self.inner.drop(objects)

    def stats(self) -> TierStats:
        """Return the stats of the inner tier, but with the transfer counts of this tier."""
        inner = self.inner.stats()
        return self._transfer_counts.stats(
            inner.objects, inner.bytes, inner.capacity, inner.evicted, inner.notes, inner.tenants
        )

    def close(self) -> None:
        self.faults.release()
        self._workers.close(5)
        self.inner.close()


class FaultyFiles(Files):
    """File operations that inject `faults`. Reads may also flip a bit or return fewer bytes."""

    def __init__(self, directory: int, faults: Faults) -> None:
        super().__init__(directory)
        self.faults = faults

    def _inject(self, call: str) -> None:
        if call not in self.faults.calls:
            return
        self.faults.delay()
        if self.faults.failing:
            raise OSError(self.faults.error, os.strerror(self.faults.error))
        if self.faults.full and call in ("write", "allocate"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, name: str, create: bool, direct: bool) -> int:
        self._inject("open")
        return super().open(name, create, direct)

    def allocate(self, fd: int, size: int) -> None:
        self._inject("allocate")
        super().allocate(fd, size)

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        self._inject("read")
        got = super().read(fd, into, offset)
        if self.faults.flip and got:
            into[0][len(into[0]) // 2] ^= 4
        return got // 2 if self.faults.short else got

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        self._inject("write")
        super().write(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        self._inject("sync")
        super().sync(fd)
