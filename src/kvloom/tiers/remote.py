"""What every tier behind a connection has: threads with a connection each, batches, bounded waits, a way back after faults.

    write -> writing threads \\                          lookup, drop, stats -> the caller's thread,
    read  -> reading threads  > one job a batch                               with a connection of their own

What a job does with its connection is its own file's matter: `values.py` for stores of keys and values, `peer.py` for
another process's host memory.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .bounded import StillRunningError
from .codec import Compression, make_codec
from .keys import NoKeyError, Protect, check_protect, read_keys
from .tier import Objects, Ranges, Tier, TierError, parted
from .transfer import Outcome, Tally, TierStats, Transfer, explain, failed_transfer
from .workers import Tools, Workers

__all__ = ["Connection", "Job", "Link", "RemoteConfig", "RemoteTier", "StoreError", "Usage"]

_MOST_BACKOFF, _MOST_TIMEOUT = 10.0, 86400
_MOST_OBJECTS = 4096  # of one call


class StoreError(RuntimeError):
    """The store said no, or said nothing; its connection is not used again."""


@dataclass(frozen=True, slots=True)
class Usage:
    objects: int
    bytes: int
    evicted: int


class Connection(Protocol):
    """Used by one thread at a time. Every call is bounded in time; whatever it raises means that the connection is gone."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]: ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Returns how many there were."""
        ...

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """`capacity` is what all who share the store may keep there, or this process alone where the store cannot count.

    `timeout` bounds each call to the store; `lookup`, `drop` and `stats` wait no longer. After a failure nobody asks the
    store for a moment, which doubles to 10 s. `keys` is a file of keys (keys.py): pages are sealed with them, by default encrypted
    (`protect`), and their names are derived with them.
    """

    capacity: int
    compression: Compression = "none"
    keys: Path | str | None = None
    protect: Protect | None = None
    readers: int = 2
    writers: int = 2
    timeout: float = 2.0
    batch_bytes: int = 8 << 20
    pending_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in ("capacity", "readers", "writers", "timeout", "batch_bytes", "pending_bytes"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")
        if not self.timeout <= _MOST_TIMEOUT:
            raise ValueError(f"timeout={self.timeout} is no number of seconds up to {_MOST_TIMEOUT}")
        check_protect(self.keys, self.protect)

    @property
    def batch(self) -> int:
        """Bytes of one call: all batches that may be under way fit the store at once."""
        return min(self.batch_bytes, self.capacity // (2 * self.writers))


class Link:
    """A connection that is made when needed, and made again after it broke; a pause between, so that a store that is
    gone costs little. Used by one thread at a time."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._store: Connection | None = None
        self._closed = False
        self._until = self._pause = 0.0
        self._why = ""

    def call(self, verb: Callable[[Any], Any]) -> Any:
        """A StoreError for whatever goes wrong, with the store's words."""
        if self._closed:
            raise StoreError("the tier is closed")
        if self._store is None and time.monotonic() < self._until:
            raise StoreError(f"{self._why} (trying again in {self._until - time.monotonic():.1f} s)")
        try:
            if self._store is None:
                self._store = self._connect()
            answer = verb(self._store)
        except Exception as error:
            self._why = str(error) or type(error).__name__
            self.drop()
            self._pause = min(_MOST_BACKOFF, max(0.1, 2 * self._pause))
            self._until = time.monotonic() + self._pause
            raise StoreError(self._why) from error
        self._pause = 0.0
        return answer

    def drop(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            try:
                store.close()
            except Exception as error:  # noqa: BLE001
                self._why = str(error)

    def close(self) -> None:
        self._closed = True
        self.drop()


class RemoteTier(Tier):
    """Safe from any thread. Raises TierError when the other side cannot be reached at the start; afterwards nothing
    raises. `jobs` are what reads and writes do; `largest` is the largest page, head included."""

    def __init__(
        self,
        name: str,
        config: RemoteConfig,
        connect: Callable[[], Connection],
        jobs: tuple[type[Job], type[Job]],
        largest: int | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._config, self._at_end = name, config, at_end
        self._read_job, self._write_job = jobs
        self._largest = largest or config.capacity // (2 * config.writers)
        self._keys = read_keys(config.keys, config.protect)
        self._make_codec = partial(make_codec, config.compression, self._keys)
        self._make_codec()  # a missing package is said now
        self._connect = connect
        self._control, self._control_lock = Link(connect), threading.Lock()
        try:
            self._usage: Usage = self._control.call(lambda store: store.usage())
        except StoreError as error:
            self._control.close()
            raise TierError(f"the tier {name} cannot be opened: {error}") from error
        self._evicted_before = self._usage.evicted
        self._tally = Tally()
        self._lock = threading.Lock()
        self._closed = False
        self._links: list[Link] = []
        self._under_way = {"read": 0, "write": 0}
        self._open: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._readers: Workers[Job] = Workers(config.readers, "kvloom-remote-read", self._worker)
        self._writers: Workers[Job] = Workers(config.writers, "kvloom-remote-write", self._worker)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        return self._config.capacity

    def _stored(self, objects: Objects) -> Objects:
        """Returns objects under the keys that the store sees. NoKeyError: their tenant has no key."""
        return objects if self._keys is None else self._keys.rename(objects)

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        nothing = [False] * len(objects)
        try:
            keys = self._stored(objects).keys
        except NoKeyError:
            return np.array(nothing, np.bool_)
        found = self._ask(lambda store: store.exists(keys), nothing) if keys else nothing
        return np.array(found, np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = parted(objects.form, part)
        try:
            objects = self._stored(objects)
        except NoKeyError as error:
            return failed_transfer(len(objects), self._tally, "read", Outcome.LOCKED, f"{self.name}: {error}")
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        return self._submit("read", transfer, objects, into, (start, stop))

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if size > self._largest:
            raise ValueError(
                f"a page of {size} bytes does not fit {self.name}, which takes {self._largest}: raise its capacity"
            )
        try:
            objects = self._stored(objects)
        except NoKeyError as error:
            reason = f"{self.name}: not stored in the clear: {error}"
            return failed_transfer(len(objects), self._tally, "write", Outcome.FAILED, reason)
        transfer = Transfer(len(objects), self._tally, "write", size)
        return self._submit("write", transfer, objects, source, (0, size))

    def drop(self, objects: Objects) -> int:
        try:
            keys = self._stored(objects).keys
        except NoKeyError:
            return 0
        return int(self._ask(lambda store: store.remove(keys), 0)) if keys else 0

    def stats(self) -> TierStats:
        """The store's own count; the last one known while it does not answer."""
        self._usage = usage = self._ask(lambda store: store.usage(), self._usage)
        evicted = max(0, usage.evicted - self._evicted_before)
        return self._tally.stats(usage.objects, usage.bytes, self.capacity, evicted)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + 2 * self._config.timeout
        for workers in (self._writers, self._readers):
            workers.close(max(0.1, deadline - time.monotonic()))
        with self._lock:
            left = list(self._open)
        for transfer in left:
            transfer.settle_rest(Outcome.FAILED, f"{self.name} was closed")
        for link in (self._control, *self._links):
            link.close()
        if self._at_end is not None:
            try:
                self._at_end()
            except Exception as error:  # noqa: BLE001  it goes with the process
                logging.getLogger(__name__).warning("%s did not end well: %s", self.name, error)

    # --- inside

    def _ask(self, verb: Callable[[Any], Any], otherwise: Any) -> Any:
        """A short question in the caller's thread. A store that does not answer costs its timeout, once in a while."""
        if self._closed or not self._control_lock.acquire(timeout=self._config.timeout):
            return otherwise
        try:
            return self._control.call(verb)
        except StoreError:
            return otherwise
        finally:
            self._control_lock.release()

    def _submit(
        self,
        verb: str,
        transfer: Transfer,
        objects: Objects,
        ranges: Ranges,
        part: tuple[int, int],
    ) -> Transfer:
        config, size = self._config, part[1] - part[0]
        kind, workers, threads = (
            (self._read_job, self._readers, config.readers)
            if verb == "read"
            else (self._write_job, self._writers, config.writers)
        )
        with self._lock:
            if not self._closed:
                room = max(0, config.pending_bytes - self._under_way[verb]) // size
                taken = min(len(objects), room)
                self._open.add(transfer)
                self._under_way[verb] += taken * size
                # A small batch is shared by all threads, too.
                step = max(1, min(config.batch // size, _MOST_OBJECTS, -(-taken // threads)))
                for at in range(0, taken, step):
                    which = list(range(at, min(at + step, taken)))
                    workers.submit(kind(self.name, verb, transfer, objects, ranges, part, which))
                transfer.settle(
                    np.arange(taken, len(objects)), Outcome.BUSY, f"too many {verb}s are under way"
                )
                return transfer
        return failed_transfer(len(objects), self._tally, verb, Outcome.FAILED, f"{self.name} is closed")

    def _worker(self) -> Callable[[Job], None]:
        tools, link = Tools(self._make_codec()), Link(self._connect)
        self._links.append(link)

        def run(job: Job) -> None:
            if job.transfer.enter():
                leave = job.transfer.leave
                try:
                    job.run(link, tools)
                except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without these pages
                    job.transfer.settle(job.which, Outcome.FAILED, f"{self.name}: {error}")
                    hung = error.__cause__
                    if isinstance(hung, StillRunningError) and hung.lent:  # it has these pages until it ends
                        leave = partial(hung.when_over, leave)
                leave()
            with self._lock:
                self._under_way[job.verb] -= len(job.which) * (job.part[1] - job.part[0])

        return run


@dataclass(slots=True)
class Job(ABC):
    """What one batch is for: objects `which` of a transfer, bytes `part` of each."""

    tier: str
    verb: str
    transfer: Transfer
    objects: Objects
    ranges: Ranges
    part: tuple[int, int]
    which: list[int]

    @abstractmethod
    def run(self, link: Link, tools: Tools) -> None:
        """Does it, and settles every object. What it raises fails those that are left."""

    def keys(self) -> list[bytes]:
        keys = self.objects.keys
        return [keys[index] for index in self.which]

    def target(self, index: int) -> memoryview:
        """Where the part of an object is, or goes."""
        at = int(self.ranges.starts[index])
        return self.ranges.view[at + self.part[0] : at + self.part[1]]

    def spans(self, which: Sequence[int]) -> list[memoryview]:
        """Where the parts of objects are, or go, in that order: neighbours in memory as one."""
        low, high = self.part
        starts = self.ranges.starts[np.asarray(which, np.int64)].tolist()
        edges: list[list[int]] = []
        for at in starts:
            if edges and edges[-1][1] == at + low:
                edges[-1][1] = at + high
            else:
                edges.append([at + low, at + high])
        view = self.ranges.view
        return [view[first:last] for first, last in edges]

    def settle(self, outcomes: dict[int, Outcome]) -> None:
        """`outcomes` by object."""
        for outcome in set(outcomes.values()):
            which = [index for index, got in outcomes.items() if got == outcome]
            quiet = outcome in (Outcome.OK, Outcome.MISSING)
            self.transfer.settle(which, outcome, "" if quiet else f"{self.tier}: {explain(outcome)}")
