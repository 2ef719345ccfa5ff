"""Faults of the simulation: files, a key-value store and device copies that are slow or fail. `FaultRates` has the
probability of each fault. Every call is a point at which another thread may run.

| fault                                                     | effect                                                   |
|-----------------------------------------------------------|----------------------------------------------------------|
| disk_fail, disk_full                                      | a file operation fails with EIO or ENOSPC                |
| disk_flip, disk_short, disk_torn                          | a read flips a bit or is short; a write stops half-way   |
| disk_slow, disk_hang                                      | a file operation takes up to 0.2 s, or up to 40 s        |
| store_fail, store_lost, store_full, store_flip            | the store raises, forgets, refuses, or returns other bytes |
| store_stale                                               | the store returns the value of another key               |
| store_slow, store_hang                                    | a call takes up to 0.5 s, or up to its timeout           |
| step_fail                                                 | a model step fails after some of its sequences           |
| copy_fail                                                 | a copy inside the pool fails                             |
| offload_fail, load_fail                                   | a copy between pool and host memory cannot start         |
| step_slow                                                 | a model step takes up to 2 s                             |
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core import PageGroup
from kvloom.engine.offload import HostPages, Ids
from kvloom.tiers import Outcome
from kvloom.tiers.disk import Files
from kvloom.tiers.remote import Destination, Store, StoreError, Usage, ValueRange

from .virtual_threads import VirtualThreads

__all__ = ["DeviceCopies", "FaultRates", "SimulatedFiles", "SimulatedStore"]

NAMES = (
    *("disk_fail", "disk_full", "disk_flip", "disk_short", "disk_torn", "disk_slow", "disk_hang"),
    *("store_fail", "store_lost", "store_full", "store_flip", "store_stale", "store_slow", "store_hang"),
    *("step_fail", "copy_fail", "offload_fail", "load_fail", "step_slow"),
)


class FaultRates:
    """The probability of each fault, and how often each fault was injected."""

    def __init__(self, threads: VirtualThreads) -> None:
        self.threads = threads
        self.rates: dict[str, float] = {}
        self.injected: dict[str, int] = {}

    def happens(self, name: str) -> bool:
        """Return whether to inject a fault now, and count it."""
        rate = self.rates.get(name, 0.0)
        if not rate or self.threads.is_closed or self.threads.random.random() >= rate:
            return False
        self.injected[name] = self.injected.get(name, 0) + 1
        return True

    def delay(self, usual: float, medium: str, longest: float) -> None:
        """Sleep as long as a call of a medium takes."""
        if self.threads.is_closed:
            return
        seconds = usual * self.threads.random.random()
        if self.happens(f"{medium}_slow"):
            seconds = (0.2 if medium == "disk" else 0.5) * self.threads.random.random()
        if self.happens(f"{medium}_hang"):
            seconds = longest * self.threads.random.random()
        self.threads.sleep(seconds)


class SimulatedFiles(Files):
    """Files of a directory in memory (tmpfs), with injected faults."""

    def __init__(self, directory: int, faults: FaultRates) -> None:
        super().__init__(directory)
        self._faults, self.open_files = faults, set[int]()

    def _call(self, writes: bool = False) -> None:
        self._faults.delay(0.0003, "disk", 40.0)
        if self._faults.happens("disk_fail"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if writes and self._faults.happens("disk_full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, name: str, create: bool, direct: bool) -> int:
        self._call(writes=create)
        fd = super().open(name, create, False)
        self.open_files.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_files.discard(fd)
        super().close(fd)

    def remove(self, name: str) -> None:
        self._call()
        super().remove(name)

    def allocate(self, fd: int, size: int) -> None:
        self._call(writes=True)
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._call()
        super().truncate(fd, size)

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        self._call()
        got = super().read(fd, into, offset)
        if got and self._faults.happens("disk_flip"):
            piece = into[self._faults.threads.random.randrange(len(into))]
            if len(piece):
                piece[self._faults.threads.random.randrange(len(piece))] ^= 4
        if self._faults.happens("disk_short"):
            return got // 2
        return got

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        self._call(writes=True)
        if self._faults.happens("disk_torn"):
            whole = b"".join(map(bytes, pieces))
            super().write(fd, [whole[: self._faults.threads.random.randrange(len(whole) + 1)]], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        self._call()

    def sync_directory(self) -> None:
        self._call()


class SimulatedStore(Store):
    """One connection to a key-value store in a dictionary, with injected faults."""

    def __init__(self, values: dict[bytes, bytes], faults: FaultRates) -> None:
        self._values, self._faults = values, faults
        self._call()

    def _call(self) -> None:
        self._faults.delay(0.002, "store", 2.0)
        if self._faults.happens("store_fail"):
            raise StoreError("injected")

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._call()
        return [key in self._values for key in keys]

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        lengths, random = [], self._faults.threads.random
        for number, wanted in enumerate(ranges):
            self._call()
            value = self._values.get(wanted.key, b"")
            if self._values and self._faults.happens("store_stale"):
                value = self._values[random.choice(sorted(self._values))]
            if self._faults.happens("store_lost"):
                value = b""
            value = value[wanted.start : wanted.stop or len(value)]
            if value and self._faults.happens("store_flip"):
                at = random.randrange(len(value))
                value = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
            lengths.append(len(value) or -1)
            at = 0
            for piece in (destination(number, len(value)) or ()) if value else ():
                piece[:] = value[at : at + len(piece)]
                at += len(piece)
                if self._faults.happens("store_fail"):
                    raise StoreError("injected in the middle of a value")
        return lengths

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        outcomes = []
        for key, pieces in items:
            self._call()
            if self._faults.happens("store_full"):
                outcomes.append(Outcome.FULL)
                continue
            self._values[key] = b"".join(bytes(piece) for piece in pieces)
            outcomes.append(Outcome.OK)
        self._call()  # the answer may be lost after the values were stored
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        self._call()
        return sum(self._values.pop(key, None) is not None for key in keys)

    def usage(self) -> Usage:
        return Usage(len(self._values), sum(map(len, self._values.values())), 0)

    def close(self) -> None:
        return


class _CopyEvent:
    """The end of a copy on the simulated device. The bytes move when the copy ends, not when it is started."""

    def __init__(self, copies: DeviceCopies, job: tuple[Any, ...]) -> None:
        self._copies, self.job = copies, job
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self._copies.finish(self)

    def wait(self, stream: object = None) -> None:
        self._copies.finish(self)


class DeviceCopies(HostPages):
    """Copies between pool and host memory as on a GPU: they run beside the engine, and their bytes are read and
    written some time after the call. Copies in one direction run in order."""

    faults: FaultRates
    delay = 0.0
    """Longest duration of a copy in seconds. 0 means that a copy is done when the call returns."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pending: dict[str, list[_CopyEvent]] = {"offload": [], "load": []}

    def wait(self, event: Any) -> None:
        event.wait()

    def offload(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Any:
        if self.faults.happens("offload_fail"):
            raise RuntimeError("CUDA out of memory (injected)")
        return self._start("offload", group, pages, offsets)

    def load(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> Any:
        if self.faults.happens("load_fail"):
            raise RuntimeError("CUDA out of memory (injected)")
        return self._start("load", group, pages, offsets)

    def _start(self, verb: str, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> _CopyEvent:
        event = _CopyEvent(self, (verb, group, np.array(pages), np.array(offsets)))
        self._pending[verb].append(event)
        if not self.delay:
            self.finish(event)
            return event
        threads = self.faults.threads
        seconds = self.delay * threads.random.random()

        def run() -> None:
            threads.sleep(seconds)
            self.finish(event)

        threads.start(run, "device copy")
        return event

    def finish(self, event: _CopyEvent) -> None:
        """Move the bytes of a copy, and of all copies before it in the same direction."""
        pending = self._pending[event.job[0]]
        while not event.is_done:
            first = pending.pop(0)
            verb, group, pages, offsets = first.job
            move = super().offload if verb == "offload" else super().load
            move(group, pages, offsets)
            first.is_done = True
