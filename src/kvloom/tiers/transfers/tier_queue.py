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

from kvloom.tiers.host.host_tier import HostTier
from kvloom.tiers.tier import Objects, Ranges, Tier
from kvloom.tiers.transfer import Outcome, TierStats

from .circuit_breaker import CircuitBreaker, CircuitBreakerConfig, FaultLog
from .queue_items import QueuedLoad, QueuedLookup, TransferBatch
from .throughput import Throughput

__all__ = ["TierQueue", "TierQueueConfig"]

Mask = npt.NDArray[np.bool_]
_HARMLESS = (Outcome.OK, Outcome.MISSING, Outcome.BUSY, Outcome.FULL)


class _Ask:
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
        self, tier: Tier, host: HostTier, faults: FaultLog, config: TierQueueConfig, changed: Callable[[], None]
    ) -> None:
        self.tier, self.host, self.config = tier, host, config
        self.breaker = CircuitBreaker(config.breaker)
        self._faults, self._told = faults, changed
        self._cond = threading.Condition()
        self._stats, self._asked = tier.stats(), False
        self._lookups: deque[QueuedLookup] = deque()
        self._loads: list[tuple[float, int, TransferBatch]] = []
        self._stores: deque[TransferBatch] = deque()
        self._under_way: list[TransferBatch] = []
        self._given_up: list[TransferBatch] = []  # late, but the tier still has their places
        self._bytes = {"load": 0, "store": 0}  # under way
        self._queued = {"load": 0, "store": 0}
        self._numbers = count()
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
        with self._cond:
            self._asked = True
            self._cond.notify()
            return self._stats

    def queue_lookup(self, lookup: QueuedLookup) -> bool:
        """Queue a lookup; False where the tier is left alone now."""
        with self._cond:
            if self._closed or self.is_stuck or not self.breaker.allow_request(time.monotonic()):
                lookup.done = True
                return False
            self._lookups.append(lookup)
            self._cond.notify()
        return True

    def queue_load(self, load: QueuedLoad) -> None:
        """Queue a load, in pieces, nearest deadline first."""
        size = load.objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._cond:
            for first in range(0, len(load.objects), each):
                at = np.arange(first, min(first + each, len(load.objects)))
                part = _part(load.objects, at)
                piece = TransferBatch(part, len(at) * size, load, at)
                heapq.heappush(self._loads, (load.deadline, next(self._numbers), piece))
                self._queued["load"] += piece.size
            self._cond.notify()

    def queue_store(self, objects: Objects) -> None:
        """Queue a store of what is in host memory. Never waits: where too much is queued the oldest is given up."""
        size = objects.form.page_bytes
        each = max(1, self.config.batch_bytes // size)
        with self._cond:
            if self._closed:
                return
            for first in range(0, len(objects), each):
                part = _part(objects, np.arange(first, min(first + each, len(objects))))
                self._stores.append(TransferBatch(part, len(part) * size, None))
                self._queued["store"] += len(part) * size
            while self._queued["store"] > self.config.max_queued_bytes and len(self._stores) > 1:
                old = self._stores.popleft()
                self._queued["store"] -= old.size
                self.skipped_stores += len(old.objects)
            self._cond.notify()

    def cancel_load(self, load: QueuedLoad) -> None:
        """Nobody waits for a load any more."""
        with self._cond:
            load.is_cancelled = True
            self._cond.notify()

    def bytes_ahead(self, deadline: float) -> int:
        """Bytes of loads that come before what is asked for now with that deadline, or together with it."""
        with self._cond:
            queued = sum(piece.size for ends, _, piece in self._loads if ends <= deadline and not piece.is_cancelled)
            return self._bytes["load"] + queued

    @property
    def pending_store_bytes(self) -> int:
        """Bytes that are to be stored or are being stored."""
        return self._queued["store"] + self._bytes["store"]

    def record_timeout(self, verb: str) -> None:
        """The caller waited for a lookup in vain."""
        now = time.monotonic()
        self._faults.add(self.tier.name, verb, "late", 1, "no answer in time", now)
        self.breaker.record_failure(now)

    def close(self, timeout: float) -> None:
        """Store what is queued, as far as `timeout` allows, and end. The tier is closed by its owner."""
        deadline = time.monotonic() + timeout
        with self._cond:
            self._cond.wait_for(lambda: not self._stores and not self._bytes["store"], timeout)
            self._closed = True
            for _, _, piece in self._loads:
                assert piece.load is not None
                piece.load.is_cancelled = True
            self._cond.notify()
        self._thread.join(max(0.05, deadline - time.monotonic()))

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._cond:
                job = self._next()
                while job is None:
                    self._sweep(time.monotonic())
                    job = self._next()
                    if job is not None:
                        break
                    if self._closed:
                        return
                    self._cond.wait(self._patience())
            try:
                self._busy_since = time.monotonic()
                if isinstance(job, _Ask):
                    with suppress(Exception):  # it told something before
                        self._stats = self.tier.stats()
                elif isinstance(job, QueuedLookup):
                    self._answer(job)
                else:
                    self._start(job)
            finally:
                self._busy_since = None

    def _next(self) -> QueuedLookup | TransferBatch | _Ask | None:
        """What to do next, within the budget: a store only where no load waits."""
        if self._lookups:
            return self._lookups.popleft()
        while self._loads:
            piece = self._loads[0][2]
            assert piece.load is not None
            if not piece.load.is_cancelled and self._bytes["load"] and not self._fits(piece, self.config.max_inflight_bytes):
                return None
            heapq.heappop(self._loads)
            self._queued["load"] -= piece.size
            if not piece.load.is_cancelled:
                self._bytes["load"] += piece.size
                return piece
        if self._asked and not self._closed:
            self._asked = False
            return _Ask()
        if self._stores and not self._closed:
            piece = self._stores[0]
            if not self._bytes["store"] or self._fits(piece, self.config.max_inflight_bytes // 4):
                self._stores.popleft()
                self._queued["store"] -= piece.size
                self._bytes["store"] += piece.size
                return piece
        return None

    def _fits(self, piece: TransferBatch, budget: int) -> bool:
        return sum(self._bytes.values()) + piece.size <= budget

    def _patience(self) -> float | None:
        """Until when nothing can happen by itself."""
        if self._given_up:
            return 0.05
        ends = [self._end_of(piece) for piece in self._under_way]
        return max(0.001, min(ends) - time.monotonic()) if ends else None

    def _end_of(self, piece: TransferBatch) -> float:
        return piece.started_at + self.config.store_seconds if piece.load is None else piece.load.deadline

    def _answer(self, lookup: QueuedLookup) -> None:
        began = time.monotonic()
        try:
            found = [np.asarray(self.tier.lookup(objects), bool) for objects in lookup.objects]
        except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without this tier
            self._fault("lookup", "failed", len(lookup.objects), str(error))
        else:
            lookup.found = found
            if not any(here.any() for here in found):
                self.breaker.record_inconclusive()
            self.lookup_latency += 0.2 * (time.monotonic() - began - self.lookup_latency)
        lookup.done = True
        self._told()

    def _start(self, piece: TransferBatch) -> None:
        """Give a piece to the tier."""
        piece.started_at = time.monotonic()
        store = piece.load is None
        if store and not self.breaker.allow_request(piece.started_at):
            self._over(piece, np.zeros(len(piece.objects), bool))
            self.skipped_stores += len(piece.objects)
            return
        try:
            lease = self.host.acquire(piece.objects) if store else self.host.reserve(piece.objects)
        except ValueError as error:  # a page that host memory cannot take
            self._faults.add("host", "reserve", "failed", len(piece.objects), str(error), piece.started_at)
            self._over(piece, np.zeros(len(piece.objects), bool))
            return
        wanted = Outcome.OK if store else Outcome.PENDING
        piece.lease, piece.requested = lease, np.flatnonzero(lease.results == wanted)
        if store:
            self.skipped_stores += len(piece.objects) - len(piece.requested)
        if not len(piece.requested):
            if store:
                self.breaker.record_inconclusive()
            lease.release(False)
            self._over(piece, lease.results == Outcome.OK)
            return
        asked = piece.objects if len(piece.requested) == len(piece.objects) else _part(piece.objects, piece.requested)
        ranges = Ranges(self.host.arena, lease.offsets[piece.requested])
        try:
            transfer = self.tier.write(asked, ranges) if store else self.tier.read(asked, ranges)
        except Exception as error:  # noqa: BLE001  as above
            self._fault("write" if store else "read", "failed", len(asked), str(error))
            self._finish(piece, np.zeros(len(piece.requested), bool))
            return
        piece.transfer = transfer
        with self._cond:
            self._under_way.append(piece)
        transfer.on_released(self._wake)

    def _wake(self) -> None:
        with self._cond:
            self._cond.notify_all()  # one alone could be who waits in `close`, and the thread would sleep on

    def _sweep(self, now: float) -> None:
        """Take in what is done, give up what is late. Under the lock."""
        for piece in [p for p in self._under_way if p.transfer is not None and p.transfer.released]:
            self._under_way.remove(piece)
            self._settle(piece, now)
        for piece in [p for p in self._under_way if now >= self._end_of(p) or (p.load and p.load.is_cancelled)]:
            assert piece.transfer is not None
            self._under_way.remove(piece)
            if piece.transfer.cancel():
                self._settle(piece, now)
                continue
            if now >= self._end_of(piece):
                self._late(piece, len(piece.objects), now)
            self._given_up.append(piece)
            if piece.load is not None:
                self._count(piece, np.zeros(len(piece.objects), bool))
        for piece in [p for p in self._given_up if p.transfer is not None and p.transfer.released]:
            self._given_up.remove(piece)
            assert piece.lease is not None and piece.transfer is not None
            if piece.load is not None and piece.transfer.ok.any():
                self.throughput.record(piece.size, piece.started_at, now)
            piece.lease.release(False)
            self._free(piece)

    def _settle(self, piece: TransferBatch, now: float) -> None:
        transfer = piece.transfer
        assert transfer is not None
        results = transfer.results
        verb = "write" if piece.load is None else "read"
        for outcome in np.unique(results[results != Outcome.OK]).tolist():
            amount = int((results == outcome).sum())
            name = Outcome(outcome).name.lower()
            if outcome == Outcome.LATE and piece.load is not None:
                if not piece.load.is_cancelled:  # else it was not the tier that gave up
                    self._late(piece, amount, now)
            elif outcome in _HARMLESS:
                self._faults.add(self.tier.name, verb, name, amount, transfer.reason, now)
            else:
                self._fault(verb, name, amount, transfer.reason)
        ok = transfer.ok
        if ok.any():
            self.breaker.record_success()
            if piece.load is not None:
                self.throughput.record(piece.size, piece.started_at, now)
        elif np.isin(results, _HARMLESS).all():
            self.breaker.record_inconclusive()
        self._finish(piece, ok)

    def _finish(self, piece: TransferBatch, ok: Mask) -> None:
        """The tier is done with a piece: its places go back, and who asked hears of it."""
        assert piece.lease is not None and piece.requested is not None
        came = piece.lease.results == Outcome.OK
        came[piece.requested] = ok
        written = np.zeros(len(piece.objects), bool)
        written[piece.requested] = ok
        piece.lease.release(True if piece.load is None else written)
        self._over(piece, came)

    def _over(self, piece: TransferBatch, came: Mask) -> None:
        with self._cond:
            self._count(piece, came)
            self._free(piece)

    def _free(self, piece: TransferBatch) -> None:
        self._bytes["store" if piece.load is None else "load"] -= piece.size
        self._cond.notify_all()

    def _count(self, piece: TransferBatch, came: Mask) -> None:
        if piece.load is not None:
            assert piece.positions is not None
            piece.load.loaded[piece.positions] = came
            piece.load.remaining -= len(piece.positions)
        self._told()

    def _late(self, piece: TransferBatch, amount: int, now: float) -> None:
        """A piece did not come in time: the tier hangs, unless it did others since this one was asked for."""
        verb = "write" if piece.load is None else "read"
        if self.throughput.last_end > piece.started_at:
            self._faults.add(self.tier.name, verb, "late", amount, "it is slow", now)
        else:
            self._fault(verb, "late", amount, "it hangs")

    def _fault(self, verb: str, outcome: str, amount: int, reason: str) -> None:
        now = time.monotonic()
        self._faults.add(self.tier.name, verb, outcome, amount, reason, now)
        self.breaker.record_failure(now)


def _part(objects: Objects, at: npt.NDArray[np.int64]) -> Objects:
    return Objects([objects.block_hashes[i] for i in at.tolist()], objects.group, objects.form, objects.tenant)
