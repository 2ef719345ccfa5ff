"""One tier's queue between host memory and the tier: lookups, then loads by deadline, then stores, within a budget.

    lookups ─┐
    loads   ─┼─> thread ─> tier.read/write ─> under way (≤ budget bytes, stores ≤ a quarter) ─> quiet ─> told
    stores  ─┘

Bytes come from and go to the host tier's arena and nowhere else, so that a tier that hangs holds pages of host memory, and
never one of the device's. A load has a deadline; whoever gave up lets its place go when the tier is quiet.
Knows names and bytes; not what they are for.
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
    """The job of asking the tier what it has."""


@dataclass(frozen=True, slots=True)
class TierQueueConfig:
    """`budget` bytes may be under way at once; one piece has `piece` bytes at most. A store may take `store_seconds`, and
    `queued` bytes of them may wait: beyond that the oldest are given up."""

    max_inflight_bytes: int = 256 << 20
    batch_bytes: int = 16 << 20
    max_queued_bytes: int = 4 << 30
    store_seconds: float = 30.0
    breaker: CircuitBreakerConfig = field(default_factory=CircuitBreakerConfig)


class TierQueue:
    """One tier below host memory. `changed` is called, from any thread, when something was done."""

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
        self._cancelled: list[TransferBatch] = []  # late, but the tier still has their places
        self._inflight_bytes = {"load": 0, "store": 0}  # under way
        self._queued_bytes = {"load": 0, "store": 0}
        self._sequence = count()
        self._busy_since: float | None = None  # the thread is inside a call of the tier
        self._closed = False
        self.skipped_stores = 0
        """Objects that were not stored: too many waited, or they had left host memory by then."""
        self.lookup_latency = 0.001
        self.throughput = Throughput()
        """Of loads."""
        self._thread = threading.Thread(target=self._run, name=f"kvloom-lane-{tier.name}", daemon=True)
        self._thread.start()

    # -- the caller's side ----------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """Whether the tier has kept its thread for longer than anyone would wait."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > self.config.breaker.probe_seconds

    def stats(self) -> TierStats:
        """What the tier told of itself last. It is asked anew in this lane's thread: one that hangs holds up nobody else."""
        with self._condition:
            self._stats_requested = True
            self._condition.notify()
            return self._stats

    def queue_lookup(self, lookup: QueuedLookup) -> bool:
        """Queue a lookup; False where the tier is left alone now."""
        with self._condition:
            if self._closed or self.is_stuck or not self.breaker.allow_request(time.monotonic()):
                lookup.done = True
                return False
            self._lookups.append(lookup)
            self._condition.notify()
        return True

    def queue_load(self, load: QueuedLoad) -> None:
        """Queue a load, in pieces, nearest deadline first."""
        size = load.objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._condition:
            for first in range(0, len(load.objects), each):
                at = np.arange(first, min(first + each, len(load.objects)))
                part = _subset(load.objects, at)
                batch = TransferBatch(part, len(at) * size, load, at)
                heapq.heappush(self._loads, (load.deadline, next(self._sequence), batch))
                self._queued_bytes["load"] += batch.size
            self._condition.notify()

    def queue_store(self, objects: Objects) -> None:
        """Queue a store of what is in host memory. Never waits: where too much is queued the oldest is given up."""
        size = objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._condition:
            if self._closed:
                return
            for first in range(0, len(objects), each):
                part = _subset(objects, np.arange(first, min(first + each, len(objects))))
                self._stores.append(TransferBatch(part, len(part) * size, None))
                self._queued_bytes["store"] += len(part) * size
            while self._queued_bytes["store"] > self.config.max_queued_bytes and len(self._stores) > 1:
                old = self._stores.popleft()
                self._queued_bytes["store"] -= old.size
                self.skipped_stores += len(old.objects)
            self._condition.notify()

    def cancel_load(self, load: QueuedLoad) -> None:
        """Nobody waits for a load any more."""
        with self._condition:
            load.is_cancelled = True
            self._condition.notify()

    def bytes_ahead(self, deadline: float) -> int:
        """Bytes of loads that come before what is asked for now with that deadline, or together with it."""
        with self._condition:
            queued = sum(
                batch.size for ends, _, batch in self._loads if ends <= deadline and not batch.is_cancelled
            )
            return self._inflight_bytes["load"] + queued

    @property
    def pending_store_bytes(self) -> int:
        """Bytes that are to be stored or are being stored."""
        return self._queued_bytes["store"] + self._inflight_bytes["store"]

    def record_timeout(self, verb: str) -> None:
        """The caller waited for a lookup in vain."""
        now = time.monotonic()
        self._fault_log.add(self.tier.name, verb, "late", 1, "no answer in time", now)
        self.breaker.record_failure(now)

    def close(self, timeout: float) -> None:
        """Store what is queued, as far as `timeout` allows, and end. The tier is closed by its owner."""
        deadline = time.monotonic() + timeout
        with self._condition:
            self._condition.wait_for(lambda: not self._stores and not self._inflight_bytes["store"], timeout)
            self._closed = True
            for _, _, batch in self._loads:
                assert batch.load is not None
                batch.load.is_cancelled = True
            self._condition.notify()
        self._thread.join(max(0.05, deadline - time.monotonic()))

    # -- the thread -----------------------------------------------------------------------------

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
                    with suppress(Exception):  # it told something before
                        self._stats = self.tier.stats()
                elif isinstance(job, QueuedLookup):
                    self._run_lookup(job)
                else:
                    self._start_batch(job)
            finally:
                self._busy_since = None

    def _next(self) -> QueuedLookup | TransferBatch | _StatsRequest | None:
        """What to do next, within the budget: a store only where no load waits."""
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
        """Until when nothing can happen by itself."""
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
        except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without this tier
            self._record_fault("lookup", "failed", len(lookup.objects), str(error))
        else:
            lookup.found = found
            if not any(here.any() for here in found):
                self.breaker.record_inconclusive()
            self.lookup_latency += 0.2 * (time.monotonic() - began - self.lookup_latency)
        lookup.done = True
        self._on_change()

    def _start_batch(self, batch: TransferBatch) -> None:
        """Give a piece to the tier."""
        batch.started_at = time.monotonic()
        store = batch.load is None
        if store and not self.breaker.allow_request(batch.started_at):
            self._complete(batch, np.zeros(len(batch.objects), bool))
            self.skipped_stores += len(batch.objects)
            return
        try:
            lease = self.host.acquire(batch.objects) if store else self.host.reserve(batch.objects)
        except ValueError as error:  # a page that host memory cannot take
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
        asked = (
            batch.objects
            if len(batch.requested) == len(batch.objects)
            else _subset(batch.objects, batch.requested)
        )
        ranges = Ranges(self.host.arena, lease.offsets[batch.requested])
        try:
            transfer = self.tier.write(asked, ranges) if store else self.tier.read(asked, ranges)
        except Exception as error:  # noqa: BLE001  as above
            self._record_fault("write" if store else "read", "failed", len(asked), str(error))
            self._finish(batch, np.zeros(len(batch.requested), bool))
            return
        batch.transfer = transfer
        with self._condition:
            self._inflight.append(batch)
        transfer.on_released(self._wake)

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()  # one alone could be who waits in `close`, and the thread would sleep on

    def _collect(self, now: float) -> None:
        """Take in what is done, give up what is late. Under the lock."""
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
                if not batch.load.is_cancelled:  # else it was not the tier that gave up
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
        """The tier is done with a piece: its places go back, and who asked hears of it."""
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
        """A piece did not come in time: the tier hangs, unless it did others since this one was asked for."""
        verb = "write" if batch.load is None else "read"
        if self.throughput.last_end > batch.started_at:
            self._fault_log.add(self.tier.name, verb, "late", amount, "it is slow", now)
        else:
            self._record_fault(verb, "late", amount, "it hangs")

    def _record_fault(self, verb: str, outcome: str, amount: int, reason: str) -> None:
        now = time.monotonic()
        self._fault_log.add(self.tier.name, verb, outcome, amount, reason, now)
        self.breaker.record_failure(now)


def _subset(objects: Objects, at: npt.NDArray[np.int64]) -> Objects:
    return Objects(
        [objects.block_hashes[i] for i in at.tolist()], objects.group, objects.form, objects.tenant
    )
