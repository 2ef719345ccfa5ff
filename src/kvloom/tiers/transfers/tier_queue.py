"""The queue of one tier: lookups first, then loads by deadline, then stores. A budget limits the bytes in flight.

    lookups ─┐
    loads   ─┼─> thread ─> tier.read/write ─> in flight (≤ budget, stores ≤ a quarter of it) ─> released ─> settled
    stores  ─┘

Every transfer reads or writes the arena of the host tier. A tier that hangs therefore blocks host pages, but never
device pages. A load has a deadline. The pages of a cancelled load are freed when the tier releases them.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from kvloom.tiers.host import HostTier
from kvloom.tiers.tier import Objects, Ranges, Tier
from kvloom.tiers.transfer import Outcome, TierStats

from .circuit_breaker import CircuitBreaker, CircuitBreakerConfig, FaultLog
from .queue_items import QueuedLoad, QueuedLookup, TransferBatch
from .throughput import Throughput

__all__ = ["TierQueue", "TierQueueConfig"]

Mask = npt.NDArray[np.bool_]
_HARMLESS = (Outcome.OK, Outcome.MISSING, Outcome.BUSY, Outcome.FULL)


class _StatsRequest:
    """A queued call of `tier.stats()`."""


@dataclass(frozen=True, slots=True)
class TierQueueConfig:
    """Settings of the queue.

    - `max_inflight_bytes` limits the bytes in flight, and `batch_bytes` the size of a batch.
    - `store_seconds` is the time after which a store is late.
    - `max_queued_bytes` limits the bytes of queued stores. Above the limit, the oldest stores are discarded.
    """

    max_inflight_bytes: int = 256 << 20
    batch_bytes: int = 16 << 20
    max_queued_bytes: int = 4 << 30
    store_seconds: float = 30.0
    breaker: CircuitBreakerConfig = field(default_factory=CircuitBreakerConfig)


class TierQueue:
    """The queue of one tier other than host memory. Its thread calls `changed` after each completed lookup and each
    completed batch of a load or store."""

    def __init__(
        self,
        tier: Tier,
        host: HostTier,
        fault_log: FaultLog,
        config: TierQueueConfig,
        changed: Callable[[], None],
    ) -> None:
        self.tier, self.host, self.config = tier, host, config
        self.breaker = CircuitBreaker(config.breaker)
        self._fault_log, self._on_change = fault_log, changed
        self._condition = threading.Condition()
        self._stats, self._stats_requested = tier.stats(), False
        self._lookups: deque[QueuedLookup] = deque()
        self._loads: list[tuple[float, int, TransferBatch]] = []
        self._stores: deque[TransferBatch] = deque()
        self._inflight: list[TransferBatch] = []
        self._cancelled: list[TransferBatch] = []  # late batches whose pages the tier still accesses
        self._inflight_bytes = {"load": 0, "store": 0}  # bytes of batches in flight
        self._queued_bytes = {"load": 0, "store": 0}
        self._sequence = count()
        self._busy_since: float | None = None  # set while the thread is in a call of the tier
        self._closed = False
        self.skipped_stores = 0
        """Number of objects not stored, because the queue was full or host memory evicted them first."""
        self.lookup_latency = 0.001
        self.throughput = Throughput()
        """Throughput of loads."""
        self._thread = threading.Thread(target=self._run, name=f"kvloom-queue-{tier.name}", daemon=True)
        self._thread.start()

    # --- for the caller

    @property
    def is_stuck(self) -> bool:
        """Whether one call of the tier has blocked the queue's thread for longer than
        `CircuitBreakerConfig.probe_seconds`."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > self.config.breaker.probe_seconds

    def stats(self) -> TierStats:
        """Return the latest stats of the tier, and requests new stats in this queue's thread. Never waits for the
        tier."""
        with self._condition:
            self._stats_requested = True
            self._condition.notify()
            return self._stats

    def queue_lookup(self, lookup: QueuedLookup) -> bool:
        """Queue a lookup. Return False if the circuit breaker is open or the tier is stuck."""
        with self._condition:
            if self._closed or self.is_stuck or not self.breaker.allow_request(time.monotonic()):
                lookup.done = True
                return False
            self._lookups.append(lookup)
            self._condition.notify()
        return True

    def queue_load(self, load: QueuedLoad) -> None:
        """Queue a load as batches, ordered by deadline."""
        size = load.objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._condition:
            for first in range(0, len(load.objects), each):
                at = np.arange(first, min(first + each, len(load.objects)))
                part = load.objects.take(at)
                batch = TransferBatch(part, len(at) * size, load, at)
                heapq.heappush(self._loads, (load.deadline, next(self._sequence), batch))
                self._queued_bytes["load"] += batch.size
            self._condition.notify()

    def queue_store(self, objects: Objects) -> None:
        """Queue a store of objects that are in host memory. Never waits. If the queue is full, its oldest stores are
        discarded.
        """
        size = objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._condition:
            if self._closed:
                return
            for first in range(0, len(objects), each):
                part = objects.take(np.arange(first, min(first + each, len(objects))))
                self._stores.append(TransferBatch(part, len(part) * size, None))
                self._queued_bytes["store"] += len(part) * size
            while self._queued_bytes["store"] > self.config.max_queued_bytes and len(self._stores) > 1:
                old = self._stores.popleft()
                self._queued_bytes["store"] -= old.size
                self.skipped_stores += len(old.objects)
            self._condition.notify()

    def cancel_load(self, load: QueuedLoad) -> None:
        """Cancel a load. The tier may still write to the load's host memory. The queue frees this memory when the
        tier no longer uses it."""
        with self._condition:
            load.is_cancelled = True
            self._condition.notify()

    def bytes_ahead(self, deadline: float) -> int:
        """Return the bytes of loads that would delay a new load with this deadline: loads in flight, and queued loads
        with an earlier deadline."""
        with self._condition:
            queued = sum(
                batch.size for ends, _, batch in self._loads if ends <= deadline and not batch.is_cancelled
            )
            return self._inflight_bytes["load"] + queued

    @property
    def pending_store_bytes(self) -> int:
        """Bytes of queued and running stores."""
        return self._queued_bytes["store"] + self._inflight_bytes["store"]

    def record_timeout(self, verb: str) -> None:
        """Record that the tier did not answer in time. `verb` is the operation, such as lookup."""
        now = time.monotonic()
        self._fault_log.add(self.tier.name, verb, "late", 1, "no answer before the deadline", now)
        self.breaker.record_failure(now)

    def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for queued stores. Then discards the remaining stores, cancels queued loads
        and ends the thread. Does not close the tier."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._condition.wait_for(lambda: not self._stores and not self._inflight_bytes["store"], timeout)
            self._closed = True
            for _, _, batch in self._loads:
                assert batch.load is not None
                batch.load.is_cancelled = True
            self._condition.notify()
        self._thread.join(max(0.05, deadline - time.monotonic()))

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._condition:
                job = self._next()
                while job is None:
                    self._collect(time.monotonic())
                    job = self._next()
                    if job is not None:
                        break
                    if self._closed:
                        return
                    self._condition.wait(self._wait_seconds())
            try:
                self._busy_since = time.monotonic()
                if isinstance(job, _StatsRequest):
                    with suppress(Exception):  # the previous stats stay valid
                        self._stats = self.tier.stats()
                elif isinstance(job, QueuedLookup):
                    self._run_lookup(job)
                else:
                    self._start_batch(job)
            finally:
                self._busy_since = None

    def _next(self) -> QueuedLookup | TransferBatch | _StatsRequest | None:
        """Remove and return the next item to run, or None if no item may run now. A load must fit into the budget,
        unless no other load is in flight. A store must fit into a quarter of the budget, unless no other store is
        in flight. All bytes in flight count against these limits. A store runs only if no load waits. The caller
        holds the lock."""
        if self._lookups:
            return self._lookups.popleft()
        while self._loads:
            batch = self._loads[0][2]
            assert batch.load is not None
            if (
                not batch.load.is_cancelled
                and self._inflight_bytes["load"]
                and not self._fits(batch, self.config.max_inflight_bytes)
            ):
                return None
            heapq.heappop(self._loads)
            self._queued_bytes["load"] -= batch.size
            if not batch.load.is_cancelled:
                self._inflight_bytes["load"] += batch.size
                return batch
        if self._stats_requested and not self._closed:
            self._stats_requested = False
            return _StatsRequest()
        if self._stores and not self._closed:
            batch = self._stores[0]
            if not self._inflight_bytes["store"] or self._fits(batch, self.config.max_inflight_bytes // 4):
                self._stores.popleft()
                self._queued_bytes["store"] -= batch.size
                self._inflight_bytes["store"] += batch.size
                return batch
        return None

    def _fits(self, batch: TransferBatch, budget: int) -> bool:
        return sum(self._inflight_bytes.values()) + batch.size <= budget

    def _wait_seconds(self) -> float | None:
        """Return how many seconds the thread may sleep: until the next deadline, or None if there is no deadline.
        While the tier still accesses pages of cancelled batches, the thread sleeps only briefly.
        """
        if self._cancelled:
            return 0.05
        ends = [self._deadline_of(batch) for batch in self._inflight]
        return max(0.001, min(ends) - time.monotonic()) if ends else None

    def _deadline_of(self, batch: TransferBatch) -> float:
        return batch.started_at + self.config.store_seconds if batch.load is None else batch.load.deadline

    def _run_lookup(self, lookup: QueuedLookup) -> None:
        began = time.monotonic()
        try:
            found = [np.asarray(self.tier.lookup(objects), bool) for objects in lookup.objects]
        except Exception as error:  # noqa: BLE001  on any error the request continues without this tier
            self._record_fault("lookup", "failed", len(lookup.objects), str(error))
        else:
            lookup.found = found
            if not any(hits.any() for hits in found):
                self.breaker.record_inconclusive()
            self.lookup_latency += 0.2 * (time.monotonic() - began - self.lookup_latency)
        lookup.done = True
        self._on_change()

    def _start_batch(self, batch: TransferBatch) -> None:
        """Lease host pages for a batch and start its transfer. If the circuit breaker refuses a store, the store is
        skipped."""
        batch.started_at = time.monotonic()
        store = batch.load is None
        if store and not self.breaker.allow_request(batch.started_at):
            self._complete(batch, np.zeros(len(batch.objects), bool))
            self.skipped_stores += len(batch.objects)
            return
        try:
            lease = (
                self.host.acquire(batch.objects, is_use=False) if store else self.host.reserve(batch.objects)
            )
        except ValueError as error:  # the page is larger than a slab of host memory
            self._fault_log.add("host", "reserve", "failed", len(batch.objects), str(error), batch.started_at)
            self._complete(batch, np.zeros(len(batch.objects), bool))
            return
        wanted = Outcome.OK if store else Outcome.PENDING
        batch.lease, batch.requested = lease, np.flatnonzero(lease.results == wanted)
        if store:
            self.skipped_stores += len(batch.objects) - len(batch.requested)
        if not len(batch.requested):
            if store:
                self.breaker.record_inconclusive()
            lease.release(False)
            self._complete(batch, lease.results == Outcome.OK)
            return
        requested = (
            batch.objects
            if len(batch.requested) == len(batch.objects)
            else batch.objects.take(batch.requested)
        )
        ranges = Ranges(self.host.arena, lease.offsets[batch.requested])
        try:
            transfer = self.tier.write(requested, ranges) if store else self.tier.read(requested, ranges)
        except Exception as error:  # noqa: BLE001  as in _run_lookup
            self._record_fault("write" if store else "read", "failed", len(requested), str(error))
            self._finish(batch, np.zeros(len(batch.requested), bool))
            return
        batch.transfer = transfer
        with self._condition:
            self._inflight.append(batch)
        transfer.on_released(self._wake)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()  # with `notify`, `close` might wake instead of the thread

    def _collect(self, now: float) -> None:
        """Settle finished batches and cancel late batches. The caller holds the lock."""
        for batch in [p for p in self._inflight if p.transfer is not None and p.transfer.released]:
            self._inflight.remove(batch)
            self._settle_batch(batch, now)
        for batch in [
            p for p in self._inflight if now >= self._deadline_of(p) or (p.load and p.load.is_cancelled)
        ]:
            assert batch.transfer is not None
            self._inflight.remove(batch)
            if batch.transfer.cancel():
                self._settle_batch(batch, now)
                continue
            if now >= self._deadline_of(batch):
                self._record_late(batch, len(batch.objects), now)
            self._cancelled.append(batch)
            if batch.load is not None:
                self._record_loaded(batch, np.zeros(len(batch.objects), bool))
        for batch in [p for p in self._cancelled if p.transfer is not None and p.transfer.released]:
            self._cancelled.remove(batch)
            assert batch.lease is not None and batch.transfer is not None
            if batch.load is not None and batch.transfer.ok.any():
                self.throughput.record(batch.size, batch.started_at, now)
            batch.lease.release(False)
            self._free_budget(batch)

    def _settle_batch(self, batch: TransferBatch, now: float) -> None:
        transfer = batch.transfer
        assert transfer is not None
        results = transfer.results
        verb = "write" if batch.load is None else "read"
        for outcome in np.unique(results[results != Outcome.OK]).tolist():
            amount = int((results == outcome).sum())
            name = Outcome(outcome).name.lower()
            if outcome == Outcome.LATE and batch.load is not None:
                if not batch.load.is_cancelled:  # a cancelled load is not counted
                    self._record_late(batch, amount, now)
            elif outcome in _HARMLESS:
                self._fault_log.add(self.tier.name, verb, name, amount, transfer.reason, now)
            else:
                self._record_fault(verb, name, amount, transfer.reason)
        ok = transfer.ok
        if ok.any():
            self.breaker.record_success()
            if batch.load is not None:
                self.throughput.record(batch.size, batch.started_at, now)
        elif np.isin(results, _HARMLESS).all():
            self.breaker.record_inconclusive()
        self._finish(batch, ok)

    def _finish(self, batch: TransferBatch, ok: Mask) -> None:
        """Release the lease of a batch. If the batch belongs to a load, passes the result to the load. `ok` has one
        value for each object that the tier transferred: whether its transfer succeeded."""
        assert batch.lease is not None and batch.requested is not None
        loaded = batch.lease.results == Outcome.OK
        loaded[batch.requested] = ok
        written = np.zeros(len(batch.objects), bool)
        written[batch.requested] = ok
        batch.lease.release(True if batch.load is None else written)
        self._complete(batch, loaded)

    def _complete(self, batch: TransferBatch, loaded: Mask) -> None:
        with self._condition:
            self._record_loaded(batch, loaded)
            self._free_budget(batch)

    def _free_budget(self, batch: TransferBatch) -> None:
        self._inflight_bytes["store" if batch.load is None else "load"] -= batch.size
        self._condition.notify_all()

    def _record_loaded(self, batch: TransferBatch, loaded: Mask) -> None:
        if batch.load is not None:
            assert batch.positions is not None
            batch.load.loaded[batch.positions] = loaded
            batch.load.remaining -= len(batch.positions)
        self._on_change()

    def _record_late(self, batch: TransferBatch, amount: int, now: float) -> None:
        """Record a late batch. If the tier has completed other batches since this batch started, the tier counts as
        slow. Otherwise the tier counts as hung, which is a fault for the circuit breaker."""
        verb = "write" if batch.load is None else "read"
        if self.throughput.last_end > batch.started_at:
            self._fault_log.add(self.tier.name, verb, "late", amount, "the tier is slow", now)
        else:
            self._record_fault(verb, "late", amount, "the tier hangs")

    def _record_fault(self, verb: str, outcome: str, amount: int, reason: str) -> None:
        now = time.monotonic()
        self._fault_log.add(self.tier.name, verb, outcome, amount, reason, now)
        self.breaker.record_failure(now)
