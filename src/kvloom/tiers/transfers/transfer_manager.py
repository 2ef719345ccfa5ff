"""The transfer manager moves pages between host memory and the other tiers. Each tier has one queue. The fastest
tier comes first.

    lookup(objects)           which objects host memory or a tier has     (bounded time)
    fetch(objects)            load objects from tiers into host memory    (earliest deadline first)
    write_to_tiers(objects)   write pages of host memory to tiers, by their write policies

The caller polls the results and never waits for a tier. `wait` sleeps until a queue has made progress. If a tier
fails, is late or hangs, its objects are misses and are counted in `fault_log`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.tiers.host import HostTier
from kvloom.tiers.registry import OpenTier
from kvloom.tiers.tier import Objects

from .circuit_breaker import FaultLog
from .queue_items import QueuedLoad, QueuedLookup
from .tier_queue import TierQueue, TierQueueConfig

__all__ = ["FetchJob", "TierLookup", "TransferConfig", "TransferManager"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Settings of the manager. If a tier does not answer a lookup within `lookup_seconds`, its objects are misses. If
    host memory is filled above the fraction `write_back_threshold`, its oldest pages are written to tiers with the
    write policy "back". `queue` has the settings of every tier queue."""

    lookup_seconds: float = 0.25
    write_back_threshold: float = 0.85
    queue: TierQueueConfig = field(default_factory=TierQueueConfig)


class TierLookup:
    """The result of a lookup of several batches of objects. Once `done` is true, `found` states for each object
    whether host memory or a tier has it. `without` contains the indexes of queues that are not asked."""

    def __init__(
        self, manager: TransferManager, objects: Sequence[Objects], without: Collection[int] = ()
    ) -> None:
        self.objects = list(objects)
        self.in_host: list[Mask] = [manager.host.lookup(o) for o in self.objects]
        self.found: list[Mask] = [mask.copy() for mask in self.in_host]
        self.queue_of: dict[bytes, int] = {}
        """Index of the queue whose tier has the key, for objects that are not in host memory."""
        self._manager = manager
        self._deadline = time.monotonic() + manager.config.lookup_seconds
        self._pending: list[tuple[int, list[npt.NDArray[np.int64]], QueuedLookup]] = []
        missing = [np.flatnonzero(~mask) for mask in self.in_host]
        if any(at.size for at in missing):
            some = [one.take(at) for one, at in zip(self.objects, missing, strict=True)]
            for number, queue in enumerate(manager.queues):
                lookup = QueuedLookup(some)
                if number not in without and queue.queue_lookup(lookup):
                    self._pending.append((number, missing, lookup))

    @property
    def done(self) -> bool:
        """Whether every queue has answered. If a queue does not answer in time, its objects are misses."""
        if not self._pending:
            return True
        late = time.monotonic() >= self._deadline
        if not late and not all(lookup.done for _, _, lookup in self._pending):
            return False
        for number, missing, lookup in self._pending:
            if not lookup.done:
                self._manager.queues[number].record_timeout("lookup")
                continue
            for i, (at, objects, stored) in enumerate(
                zip(missing, lookup.objects, lookup.found, strict=True)
            ):
                for j in np.flatnonzero(stored).tolist():
                    self.queue_of.setdefault(objects.keys[j], number)
                self.found[i][at] |= stored
        self._pending = []
        return True


class FetchJob:
    """A load of objects from tiers into host memory. Objects without a queue in `queue_of` are skipped. `loaded` is
    valid once `done` is set."""

    def __init__(
        self,
        manager: TransferManager,
        objects: Sequence[Objects],
        queue_of: dict[bytes, int],
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self._loads: list[tuple[TierQueue, QueuedLoad]] = []
        self.bytes = 0
        for one in objects:
            by_queue: dict[int, list[int]] = {}
            for i, key in enumerate(one.keys):
                if key in queue_of:
                    by_queue.setdefault(queue_of[key], []).append(i)
            for number, at in by_queue.items():
                part = one.take(at)
                self.bytes += len(part) * one.form.page_bytes
                self._loads.append((manager.queues[number], QueuedLoad(part, deadline)))
        for queue, load in self._loads:
            queue.queue_load(load)

    @property
    def done(self) -> bool:
        """Whether all loads have ended. Cancels loads that are late."""
        if all(load.done for _, load in self._loads):
            return True
        if time.monotonic() < self.deadline:
            return False
        self.cancel()
        return True

    @property
    def loaded(self) -> int:
        """Number of loaded objects."""
        return sum(int(load.loaded.sum()) for _, load in self._loads)

    @property
    def requested(self) -> int:
        """Number of requested objects."""
        return sum(len(load.objects) for _, load in self._loads)

    def cancel(self) -> None:
        """Cancel the loads that still run. Objects that are already loaded stay in host memory."""
        for queue, load in self._loads:
            if not load.done:
                queue.cancel_load(load)


class TransferManager:
    """Moves pages between the host tier `host` and the other `tiers`, which are ordered from fastest to slowest.
    One thread calls the manager, and each queue has its own thread.
    """

    def __init__(
        self, host: HostTier, tiers: Sequence[OpenTier], config: TransferConfig | None = None
    ) -> None:
        self.host, self.tiers, self.config = host, tuple(tiers), config or TransferConfig()
        self.fault_log = FaultLog()
        self._changed = threading.Event()
        self.queues = [
            TierQueue(opened.tier, host, self.fault_log, self.config.queue, self._changed.set)
            for opened in self.tiers
        ]
        self._dirty: list[OrderedDict[bytes, Objects]] = [OrderedDict() for _ in self.tiers]
        self._last_check = 0.0

    def lookup(self, objects: Sequence[Objects], without: Collection[int] = ()) -> TierLookup:
        """Look up objects in host memory and in all tiers, except the tiers of the queues in `without`. Host memory
        answers at once. The other tiers answer asynchronously."""
        return TierLookup(self, objects, without)

    def fetch(self, objects: Sequence[Objects], queue_of: dict[bytes, int], deadline: float) -> FetchJob:
        """Start to load objects into host memory. `queue_of`, from a TierLookup, maps the key of each object to the
        queue of a tier that has it. Loads that have not ended at `deadline` are cancelled."""
        return FetchJob(self, objects, queue_of, deadline)

    def write_to_tiers(self, objects: Objects, used: bool) -> None:
        """Queue writes of objects from host memory to the other tiers, by the write policy of each tier. `used`
        states whether a sequence has reused the objects ("second-use")."""
        for opened, queue, dirty in zip(self.tiers, self.queues, self._dirty, strict=True):
            if opened.is_lossy and objects.form.exact:
                continue  # a lossy tier never serves exact pages
            if opened.write_policy == "through" or (opened.write_policy == "second-use" and used):
                queue.queue_store(objects)
            elif opened.write_policy == "back":
                for name, key in zip(objects.block_hashes, objects.keys, strict=True):
                    if key not in dirty:
                        dirty[key] = Objects([name], objects.group, objects.form, objects.tenant)
        self._write_back(time.monotonic())

    def _write_back(self, now: float) -> None:
        """If host memory is filled above `write_back_threshold`, queues writes of its oldest pages to tiers with the
        write policy "back"."""
        if not any(self._dirty) or now - self._last_check < 0.05:
            return
        self._last_check = now
        stats = self.host.stats()
        excess = stats.bytes - self.config.write_back_threshold * stats.capacity
        for queue, dirty in zip(self.queues, self._dirty, strict=True):
            remaining = excess - queue.pending_store_bytes
            while remaining > 0 and dirty:
                _, objects = dirty.popitem(last=False)
                queue.queue_store(objects)
                remaining -= objects.form.page_bytes

    def wait(self, timeout: float) -> None:
        """Sleep until a queue has made progress, at most `timeout` seconds."""
        self._changed.wait(timeout)
        self._changed.clear()

    def close(self, timeout: float = 10.0) -> None:
        """Finish pending writes within `timeout` and close every tier."""
        for queue, dirty in zip(self.queues, self._dirty, strict=True):
            for objects in dirty.values():
                queue.queue_store(objects)
            dirty.clear()
        deadline = time.monotonic() + timeout
        for queue in self.queues:
            queue.close(max(0.1, deadline - time.monotonic()))
        for opened in self.tiers:
            opened.tier.close()
        self.host.close()
