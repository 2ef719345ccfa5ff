"""The mover: what goes up into host memory and down from it, and when. One lane a tier, nearest tier first.

    find(objects)   which of them are in host memory or below         (lookups, answered in bounded time)
    fetch(objects)  those below come into host memory                 (promotion; nearest deadline first)
    kept(objects)   pages came into host memory from above: the tiers below get copies as their policies say

A caller polls what it got and never waits for a tier; `wait` sleeps until something was done. A failed, late or hung tier
is an answer "no", counted in `faults`. Knows names and bytes: not prompts, kinds or devices.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
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
    """A lookup may take `lookup_seconds`. Tiers that are written "back" get what is oldest in host memory when that is
    fuller than `full`."""

    lookup_seconds: float = 0.25
    write_back_threshold: float = 0.85
    queue: TierQueueConfig = field(default_factory=TierQueueConfig)


class TierLookup:
    """Where many objects are; `found` (here or below) once `done`."""

    def __init__(self, manager: TransferManager, objects: Sequence[Objects]) -> None:
        self.objects = list(objects)
        self.in_host: list[Mask] = [manager.host.lookup(o) for o in self.objects]
        self.found: list[Mask] = [mask.copy() for mask in self.in_host]
        self.queue_of: dict[bytes, int] = {}
        """key → which lane has it, of those that are not in host memory."""
        self._manager = manager
        self._deadline = time.monotonic() + manager.config.lookup_seconds
        self._pending: list[tuple[int, list[npt.NDArray[np.int64]], QueuedLookup]] = []
        missing = [np.flatnonzero(~mask) for mask in self.in_host]
        if any(at.size for at in missing):
            some = [
                Objects([o.block_hashes[i] for i in at.tolist()], o.group, o.form, o.tenant)
                for o, at in zip(self.objects, missing, strict=True)
            ]
            for number, queue in enumerate(manager.queues):
                lookup = QueuedLookup(some)
                if queue.queue_lookup(lookup):
                    self._pending.append((number, missing, lookup))

    @property
    def done(self) -> bool:
        """Whether every lane has answered; one that does not in time has nothing."""
        if not self._pending:
            return True
        late = time.monotonic() >= self._deadline
        if not late and not all(lookup.done for _, _, lookup in self._pending):
            return False
        for number, missing, lookup in self._pending:
            if not lookup.done:
                self._manager.queues[number].record_timeout("lookup")
                continue
            for place, (at, objects, here) in enumerate(
                zip(missing, lookup.objects, lookup.found, strict=True)
            ):
                for i in np.flatnonzero(here).tolist():
                    self.queue_of.setdefault(objects.keys[i], number)
                self.found[place][at] |= here
        self._pending = []
        return True


class FetchJob:
    """Objects on their way into host memory. `came[i]`: is each of `objects[i]` there now? Valid when `done`."""

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
                part = Objects([one.block_hashes[i] for i in at], one.group, one.form, one.tenant)
                self.bytes += len(part) * one.form.page_bytes
                self._loads.append((manager.queues[number], QueuedLoad(part, deadline)))
        for queue, load in self._loads:
            queue.queue_load(load)

    @property
    def done(self) -> bool:
        """Whether all has come, or will not; what is late is given up."""
        if all(load.done for _, load in self._loads):
            return True
        if time.monotonic() < self.deadline:
            return False
        self.cancel()
        return True

    @property
    def loaded(self) -> int:
        """Objects that came."""
        return sum(int(load.loaded.sum()) for _, load in self._loads)

    @property
    def requested(self) -> int:
        return sum(len(load.objects) for _, load in self._loads)

    def cancel(self) -> None:
        """Nobody waits for it any more. What has come stays in host memory."""
        for queue, load in self._loads:
            if not load.done:
                queue.cancel_load(load)


class TransferManager:
    """`host` is where everything passes; `places` the tiers below it, nearest first. One thread calls; lanes have their own."""

    def __init__(
        self, host: HostTier, places: Sequence[OpenTier], config: TransferConfig | None = None
    ) -> None:
        self.host, self.tiers, self.config = host, tuple(places), config or TransferConfig()
        self.fault_log = FaultLog()
        self._changed = threading.Event()
        self.queues = [
            TierQueue(place.tier, host, self.fault_log, self.config.queue, self._changed.set)
            for place in self.tiers
        ]
        self._dirty: list[OrderedDict[bytes, Objects]] = [OrderedDict() for _ in self.tiers]
        self._last_check = 0.0

    def lookup(self, objects: Sequence[Objects]) -> TierLookup:
        """Look many objects up, in host memory at once and below it by and by."""
        return TierLookup(self, objects)

    def fetch(self, objects: Sequence[Objects], queue_of: dict[bytes, int], deadline: float) -> FetchJob:
        """Bring objects into host memory from the lanes that `below` (of a Finding) names, until `deadline`."""
        return FetchJob(self, objects, queue_of, deadline)

    def write_to_tiers(self, objects: Objects, used: bool) -> None:
        """Objects came into host memory from above, `used` before or not: whoever below wants them gets them."""
        for place, queue, dirty in zip(self.tiers, self.queues, self._dirty, strict=True):
            if place.is_lossy and objects.form.exact:
                continue  # nobody who wants them exact would find them there
            if place.write_policy == "through" or (place.write_policy == "second-use" and used):
                queue.queue_store(objects)
            elif place.write_policy == "back":
                for name, key in zip(objects.block_hashes, objects.keys, strict=True):
                    if key not in dirty:
                        dirty[key] = Objects([name], objects.group, objects.form, objects.tenant)
        self._write_back(time.monotonic())

    def _write_back(self, now: float) -> None:
        """Where host memory is nearly full, store what came there first."""
        if not any(self._dirty) or now - self._last_check < 0.05:
            return
        self._last_check = now
        stats = self.host.stats()
        over = stats.bytes - self.config.write_back_threshold * stats.capacity
        for queue, dirty in zip(self.queues, self._dirty, strict=True):
            left = over - queue.pending_store_bytes
            while left > 0 and dirty:
                _, objects = dirty.popitem(last=False)
                queue.queue_store(objects)
                left -= objects.form.page_bytes

    def wait(self, timeout: float) -> None:
        """Sleep until a lane did something, `timeout` seconds at the most."""
        self._changed.wait(timeout)
        self._changed.clear()

    def close(self, timeout: float = 10.0) -> None:
        """Store what is still to be stored, within `timeout`, and close every tier."""
        for queue, dirty in zip(self.queues, self._dirty, strict=True):
            for objects in dirty.values():
                queue.queue_store(objects)
            dirty.clear()
        deadline = time.monotonic() + timeout
        for queue in self.queues:
            queue.close(max(0.1, deadline - time.monotonic()))
        for place in self.tiers:
            place.tier.close()
        self.host.close()
