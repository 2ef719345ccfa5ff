r"""The base of all tiers behind a connection: threads with one connection each, batches, timeouts and reconnection.

    write -> writing threads \                          lookup, drop, stats -> the caller's thread,
    read  -> reading threads  > one job per batch                             with a separate connection

A subclass of Job defines how a batch is transferred. `store_tier.py` defines it for key-value stores, and
`peer_tier.py` for the host memory of another process.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.tiers.encoding import Compression, NoKeyError, Protect, check_protect, make_codec, read_keys
from kvloom.tiers.options import Options
from kvloom.tiers.shares import Shares
from kvloom.tiers.tier import Objects, Ranges, Tier, TierError, part_range
from kvloom.tiers.transfer import (
    Outcome,
    TierStats,
    Transfer,
    TransferCounts,
    describe_outcome,
    failed_transfer,
)
from kvloom.tiers.ttl import Expiry, check_ttl
from kvloom.tiers.workers import Tools, Workers

from .bounded_calls import StillRunningError

__all__ = ["Connection", "Job", "Link", "RemoteConfig", "RemoteTier", "StoreError", "Usage", "remote_config"]

_MAX_BACKOFF, _MAX_TIMEOUT = 10.0, 86400
_MAX_OBJECTS = 4096  # per call


class StoreError(RuntimeError):
    """Raised if the store reported an error or did not answer. The connection is not used again."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The counts of a store. `tenants` has the bytes of each tenant with a share."""

    objects: int
    bytes: int
    evicted: int
    tenants: Mapping[str, int] = field(default_factory=dict)


class Connection(Protocol):
    """A connection to a store, used by one thread at a time. Every call has a timeout. After any exception the
    connection is unusable.
    """

    def exists(self, keys: Sequence[bytes]) -> list[bool]: ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove the values of these keys from the store. Return the number of removed values."""
        ...

    def usage(self) -> Usage: ...

    def used_by(self, tenant: str) -> int:
        """Return the bytes of a tenant with a share."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings of a remote tier.

    - `capacity`: the largest number of bytes that all clients together may store. If the store does not count
      bytes, the limit applies only to this process.
    - `timeout`: the largest duration in seconds of each call to the store, and therefore of `lookup`, `drop`
      and `stats`. After a failure, a connection pauses before the next attempt. Each further failure doubles
      the pause, up to 10 s.
    - `keys`: a file with the encryption keys of tenants (encryption.py). A tenant's key encrypts or authenticates its
      pages, as `protect` selects. The keys under which pages are stored are also derived from the tenant's key.
    - `readers`, `writers`: the number of reading and writing threads. Each thread has its own connection.
    - `batch_bytes`: the largest number of bytes per call to the store.
    - `pending_bytes`: the largest number of bytes in queued and running reads. Writes have a separate limit of
      the same size. Objects beyond the limit get the outcome BUSY.
    - `ttl`: the number of seconds after which a page is a miss. 0 means never. In Redis, each use of a page
      restarts this time.
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
    ttl: float = 0

    def __post_init__(self) -> None:
        for name in ("capacity", "readers", "writers", "timeout", "batch_bytes", "pending_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not self.timeout <= _MAX_TIMEOUT:
            raise ValueError(f"timeout={self.timeout} is not a number of seconds up to {_MAX_TIMEOUT}")
        check_protect(self.keys, self.protect)
        check_ttl(self.ttl)

    @property
    def effective_batch_bytes(self) -> int:
        """Largest number of bytes per call to the store: `batch_bytes`, or less if the capacity is small. The batches
        of all writers together then use at most half of the capacity."""
        return min(self.batch_bytes, self.capacity // (2 * self.writers))


def remote_config(options: Options) -> RemoteConfig:
    """Read the options of a store from a URL. Raises ValueError for an invalid or unknown option."""
    defaults = RemoteConfig(capacity=options.size("capacity"))
    config = replace(
        defaults,
        compression=options.compression(),
        keys=options.optional_text("keys"),
        protect=options.optional_text("protect"),
        readers=options.integer("readers", defaults.readers),
        writers=options.integer("writers", defaults.writers),
        timeout=options.seconds("timeout", defaults.timeout),
        pending_bytes=options.size("pending", defaults.pending_bytes),
        ttl=options.ttl(),
    )
    options.reject_unknown()
    return config


class Link:
    """A connection that is opened when needed and reopened after a failure, with a pause between attempts. Used by
    one thread at a time.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._store: Connection | None = None
        self._closed = False
        self._retry_at = self._pause = 0.0
        self._reason = ""

    def call(self, verb: Callable[[Any], Any]) -> Any:
        """Call `verb` with the connection and return the result. Any failure raises StoreError with the store's
        message."""
        if self._closed:
            raise StoreError("the tier is closed")
        if self._store is None and time.monotonic() < self._retry_at:
            raise StoreError(f"{self._reason} (retry in {self._retry_at - time.monotonic():.1f} s)")
        try:
            if self._store is None:
                self._store = self._connect()
            answer = verb(self._store)
        except Exception as error:
            self._reason = str(error) or type(error).__name__
            self.disconnect()
            self._pause = min(_MAX_BACKOFF, max(0.1, 2 * self._pause))
            self._retry_at = time.monotonic() + self._pause
            raise StoreError(self._reason) from error
        self._pause = 0.0
        return answer

    def disconnect(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            try:
                store.close()
            except Exception as error:  # noqa: BLE001
                self._reason = str(error)

    def close(self) -> None:
        self._closed = True
        self.disconnect()


class RemoteTier(Tier):
    """A tier behind a connection. Thread-safe. The constructor raises TierError if the store cannot be reached. Later
    faults of the store raise no exception.

    - `connect`: opens one connection.
    - `jobs`: the job classes of reads and writes.
    - `on_shares`: called when the shares of tenants are set.
    - `max_page_bytes`: the largest page size that the tier accepts.
    - `on_close`: called when the tier is closed.
    - `expiry`: decides which pages have expired.
    """

    def __init__(
        self,
        name: str,
        config: RemoteConfig,
        connect: Callable[[], Connection],
        jobs: tuple[type[Job], type[Job]],
        on_shares: Callable[[Shares], None],
        max_page_bytes: int | None = None,
        on_close: Callable[[], None] | None = None,
        expiry: Expiry | None = None,
    ) -> None:
        self._name, self._config, self._on_close = name, config, on_close
        self._read_job, self._write_job = jobs
        self._expiry, self._on_shares = expiry, on_shares
        self._max_page_bytes = max_page_bytes or config.capacity // (2 * config.writers)
        self._keys = read_keys(config.keys, config.protect)
        self._make_codec = partial(make_codec, config.compression, self._keys)
        self._make_codec()  # raises now if a package is missing
        self._connect = connect
        self._control, self._control_lock = Link(connect), threading.Lock()
        try:
            self._usage: Usage = self._control.call(lambda store: store.usage())
        except StoreError as error:
            self._control.close()
            raise TierError(f"the tier {name} cannot be opened: {error}") from error
        self._evicted_before = self._usage.evicted
        self._transfer_counts = TransferCounts()
        self._lock = threading.Lock()
        self._closed, self._reachable = False, True
        self._links: list[Link] = []
        self._inflight_bytes = {"read": 0, "write": 0}
        self._open_transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._readers: Workers[Job] = Workers(config.readers, "kvloom-remote-read", self._worker)
        self._writers: Workers[Job] = Workers(config.writers, "kvloom-remote-write", self._worker)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        return self._config.capacity

    def set_shares(self, shares: Shares) -> None:
        """Divide the capacity between tenants. If the store counts the bytes of each tenant, the shares apply to the
        pages of all its clients. Otherwise the shares apply only to the pages that this process stores."""
        self._on_shares(shares)

    def used_by(self, tenant: str) -> int:
        return int(self._call_control(lambda store: store.used_by(tenant), 0))

    def _with_stored_keys(self, objects: Objects) -> Objects:
        """Return the objects with their keys in the store. If the tier has a key file, these keys are derived from
        `Objects.keys` and the tenant's encryption key. Raises NoKeyError if the file has no key for the tenant.
        """
        return objects if self._keys is None else self._keys.with_stored_keys(objects)

    @property
    def is_reachable(self) -> bool:
        return self._reachable

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        nothing = [False] * len(objects)
        try:
            keys = self._with_stored_keys(objects).keys
        except NoKeyError:
            return np.array(nothing, np.bool_)
        found = self._call_control(lambda store: store.exists(keys), nothing) if keys else nothing
        return np.array(found, np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        try:
            objects = self._with_stored_keys(objects)
        except NoKeyError as error:
            return failed_transfer(
                len(objects), self._transfer_counts, "read", Outcome.LOCKED, f"{self.name}: {error}"
            )
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        return self._submit("read", transfer, objects, into, (start, stop))

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if size > self._max_page_bytes:
            raise ValueError(
                f"a page of {size} bytes does not fit {self.name}, which accepts {self._max_page_bytes} bytes: raise its capacity"
            )
        try:
            objects = self._with_stored_keys(objects)
        except NoKeyError as error:
            reason = f"{self.name}: not stored in the clear: {error}"
            return failed_transfer(len(objects), self._transfer_counts, "write", Outcome.FAILED, reason)
        transfer = Transfer(len(objects), self._transfer_counts, "write", size)
        return self._submit("write", transfer, objects, source, (0, size))

    def drop(self, objects: Objects) -> int:
        try:
            keys = self._with_stored_keys(objects).keys
        except NoKeyError:
            return 0
        return int(self._call_control(lambda store: store.remove(keys), 0)) if keys else 0

    def stats(self) -> TierStats:
        """Return the store's counts, or the last known counts while the store does not answer."""
        self._usage = usage = self._call_control(lambda store: store.usage(), self._usage)
        evicted = max(0, usage.evicted - self._evicted_before)
        return self._transfer_counts.stats(
            usage.objects, usage.bytes, self.capacity, evicted, tenants=usage.tenants
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + 2 * self._config.timeout
        for workers in (self._writers, self._readers):
            workers.close(max(0.1, deadline - time.monotonic()))
        with self._lock:
            pending = list(self._open_transfers)
        for transfer in pending:
            transfer.settle_pending(Outcome.FAILED, f"{self.name} was closed")
        for link in (self._control, *self._links):
            link.close()
        if self._on_close is not None:
            try:
                self._on_close()
            except Exception as error:  # noqa: BLE001  the process releases it
                logging.getLogger(__name__).warning("%s could not be closed cleanly: %s", self.name, error)

    # --- inside

    def _call_control(self, verb: Callable[[Any], Any], default: Any) -> Any:
        """Call `verb` with the control connection, in the caller's thread. Return `default` if the tier is closed,
        or if the call fails or does not end in time."""
        if self._closed or not self._control_lock.acquire(timeout=self._config.timeout):
            return default
        try:
            result = self._control.call(verb)
            self._reachable = True
            return result
        except StoreError:
            self._reachable = False
            return default
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
                free_objects = max(0, config.pending_bytes - self._inflight_bytes[verb]) // size
                taken = min(len(objects), free_objects)
                self._open_transfers.add(transfer)
                self._inflight_bytes[verb] += taken * size
                # Even a small batch is divided among all threads.
                step = max(1, min(config.effective_batch_bytes // size, _MAX_OBJECTS, -(-taken // threads)))
                for at in range(0, taken, step):
                    which = list(range(at, min(at + step, taken)))
                    workers.submit(kind(self.name, verb, transfer, objects, ranges, part, which))
                transfer.settle(
                    np.arange(taken, len(objects)), Outcome.BUSY, f"too many {verb}s are in flight"
                )
                return transfer
        return failed_transfer(
            len(objects), self._transfer_counts, verb, Outcome.FAILED, f"{self.name} is closed"
        )

    def _worker(self) -> Callable[[Job], None]:
        tools, link = Tools(self._make_codec(), self._expiry), Link(self._connect)
        self._links.append(link)

        def run(job: Job) -> None:
            if job.transfer.begin_access():
                leave = job.transfer.end_access
                try:
                    job.run(link, tools)
                except Exception as error:  # noqa: BLE001  on any error the request continues without these pages
                    job.transfer.settle(job.which, Outcome.FAILED, f"{self.name}: {error}")
                    hung = error.__cause__
                    if (
                        isinstance(hung, StillRunningError) and hung.uses_caller_memory
                    ):  # the hung call still accesses these pages
                        leave = partial(hung.on_finished, leave)
                leave()
            with self._lock:
                self._inflight_bytes[job.verb] -= len(job.which) * (job.part[1] - job.part[0])

        return run


@dataclass(slots=True)
class Job(ABC):
    """One batch of a transfer. It transfers the byte range `part` of the objects with the indexes `which`. `tier` is
    the name of the tier, and `verb` is read or write."""

    tier: str
    verb: str
    transfer: Transfer
    objects: Objects
    ranges: Ranges
    part: tuple[int, int]
    which: list[int]

    @abstractmethod
    def run(self, link: Link, tools: Tools) -> None:
        """Run the batch and set the outcome of every object. If an exception occurs, objects without an outcome
        fail.
        """

    def keys(self) -> list[bytes]:
        keys = self.objects.keys
        return [keys[index] for index in self.which]

    def target(self, index: int) -> memoryview:
        """Return the caller's memory for the byte range `part` of one object."""
        at = int(self.ranges.starts[index])
        return self.ranges.view[at + self.part[0] : at + self.part[1]]

    def spans(self, which: Sequence[int]) -> list[memoryview]:
        """Return the caller's memory for the byte range `part` of several objects, in order. Ranges that are adjacent
        in memory are merged."""
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
        """Set the outcomes of objects of this batch, given by their indexes."""
        for outcome in set(outcomes.values()):
            which = [index for index, got in outcomes.items() if got == outcome]
            quiet = outcome in (Outcome.OK, Outcome.MISSING)
            self.transfer.settle(which, outcome, "" if quiet else f"{self.tier}: {describe_outcome(outcome)}")
