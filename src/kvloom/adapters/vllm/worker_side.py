"""The worker side: looks up pages in tiers, loads them into host memory, and copies them into vLLM's blocks.

    Lookup ──> TierLookup ──> FetchJob ──> leased pages in host memory ──> Answer
    Load   ──> copy from the leased pages into blocks ──> finished, or failed if a page is missing
    Store  ──> copy from blocks into host memory ──> queued writes to the other tiers

If a page is missing, late or damaged, the answer contains no position that needs this page, and vLLM recomputes the
tokens of the page.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloom.adapters.common import TierPages
from kvloom.tiers import Lease, Objects, Outcome
from kvloom.tiers.transfers import FetchJob, TierLookup

from .block_groups import BlockGroup, resume_positions
from .compute_time import ComputeTime
from .layer_pages import LayerPages
from .messages import Answer, Change, Load, Lookup, Step, Store
from .settings import Settings

__all__ = ["WorkerSide", "WorkerStats"]

MAX_ROUNDS = 3
"""Largest number of attempts to load the pages of a lookup. If pages fail to load, the next attempt uses a shorter
prefix.
"""
MIN_SECONDS = 0.1
"""Shortest deadline of a load, in seconds."""
IDLE_SECONDS = 0.001
"""Seconds that a step without tokens waits for tiers. Otherwise an engine that only waits for tiers would run empty
steps without a pause."""


@dataclass
class WorkerStats:
    """Counters of one worker, in pages and tokens."""

    stored_pages: int = 0
    skipped_pages: int = 0
    loaded_pages: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    refused_loads: int = 0
    """Number of loads that were not started, because recomputing was estimated to be faster."""


@dataclass
class _LookupJob:
    """One lookup of the scheduler, and the load of its pages. Block indices count from the block that contains token
    `message.start`. All lists have one entry per group. `found` states which blocks tiers have. `leases` keep the
    loaded pages in host memory. `firsts` are the indices of the first leased blocks.
    """

    message: Lookup
    objects: list[Objects]
    lookup: TierLookup
    deadline: float
    found: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    fetch: FetchJob | None = None
    target: int = 0
    """The resume position for which the job loads pages."""
    rounds: int = 0
    firsts: list[int] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)

    def release(self) -> None:
        for lease in self.leases:
            lease.release(False)
        self.leases = []


class WorkerSide:
    """Runs the steps of one worker. With `events`, it also records which pages the tiers store and remove."""

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[BlockGroup],
        layers: LayerPages,
        tiers: TierPages,
        events: bool = False,
    ) -> None:
        self._settings, self._groups, self._layers, self._tiers = settings, groups, layers, tiers
        self._compute = ComputeTime(settings.load == "auto")
        self._pending: dict[str, _LookupJob] = {}  # not answered yet
        self._leased: dict[str, _LookupJob] = {}  # answered
        self._answers: list[Answer] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._copies: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.stats = WorkerStats()
        self._watched = tiers.watch() if events else []
        self._forms = [form.fingerprint for form in layers.forms]

    def begin_step(self, step: Step) -> None:
        """Start the lookups and loads that a step lists, and release the leased pages of ended requests."""
        for request_id in step.ended:
            self.end(request_id)
        for lookup in step.lookups:
            self._start_lookup(lookup)
        for load in step.loads:
            self._load(load)

    @property
    def faults(self) -> Counter[tuple[str, str, str]]:
        """Number of pages by tier, operation and outcome, for every outcome except success."""
        return self._tiers.manager.fault_log.counts

    def begin_compute(self) -> None:
        """Record that the model starts to compute a step."""
        self._compute.begin()

    def end_step(self, step: Step) -> None:
        """Store the blocks that a step lists, after the model has computed the step."""
        self._compute.end(step.tokens)
        for store in step.stores:
            self._store(store)
        self._poll()
        if not step.tokens and self._pending:
            self._tiers.manager.wait(IDLE_SECONDS)
            self._poll()

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return two sets: the requests whose loads have ended, and the requests among them whose loads failed."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def take_changes(self) -> list[Change]:
        """Return the pages that tiers stored and removed since the last call. Pages whose byte layout differs from this
        worker's pages are left out."""
        return [
            Change(medium, change.is_stored, change.group, change.block_hash)
            for medium, changes in self._watched
            for change in changes.take()
            if change.group < len(self._forms) and change.form == self._forms[change.group]
        ]

    def end(self, request_id: str) -> None:
        """End the lookup of a request and release its leased pages."""
        job = self._pending.pop(request_id, None)
        if job is not None and job.fetch is not None:
            job.fetch.cancel()
        leased = self._leased.pop(request_id, None)
        if leased is not None:
            leased.release()

    def close(self) -> None:
        """Finish copies, write pending pages to the tiers, and close the tiers."""
        for request_id in [*self._pending, *self._leased]:
            self.end(request_id)
        until = time.monotonic() + 5
        while self._copies and time.monotonic() < until:
            self._poll()
            time.sleep(0.001)
        self._tiers.close()

    # --- lookups

    def _start_lookup(self, message: Lookup) -> None:
        self.end(message.request_id)
        objects = [
            Objects(message.hashes[group.block_tokens], group.index, form)
            for group, form in zip(self._groups, self._layers.forms, strict=True)
        ]
        seconds = self._compute.seconds(message.end - message.start)
        wait = self._settings.load_seconds
        if seconds is not None:
            wait = min(wait, max(MIN_SECONDS, 2 * seconds))
        job = _LookupJob(message, objects, self._tiers.manager.lookup(objects), time.monotonic() + wait)
        self._pending[message.request_id] = job

    def _poll(self) -> None:
        for job in list(self._pending.values()):
            self._advance(job)
        waiting = []
        for is_done, then in self._copies:
            if is_done():
                then()
            else:
                waiting.append((is_done, then))
        self._copies = waiting

    def _advance(self, job: _LookupJob) -> None:
        if job.fetch is None:
            if not job.lookup.done:
                return
            job.found = [mask.copy() for mask in job.lookup.found]
            if not self._fetch(job):
                self._answer(job, [])
                return
        assert job.fetch is not None
        if not job.fetch.done:
            return
        if self._lease(job):
            held = [self._held(job, g) for g in range(len(self._groups))]
            self._answer(job, resume_positions(self._groups, job.message.start, job.target, held))
        elif job.rounds >= MAX_ROUNDS or time.monotonic() >= job.deadline or not self._fetch(job):
            self._answer(job, [])
        else:
            self._advance(job)

    def _fetch(self, job: _LookupJob) -> bool:
        """Start to load pages into host memory: the pages of the longest prefix that tiers have. Return False if tiers
        have no prefix, or if recomputing is estimated to be faster.
        """
        start = job.message.start
        positions = resume_positions(self._groups, start, job.message.end, job.found)
        if not positions:
            return False
        job.target = positions[-1]
        job.rounds += 1
        wanted = [self._needed(job, g) for g in range(len(self._groups))]
        missing = []
        for objects in wanted:
            stored = self._tiers.host.lookup(objects)
            if not stored.all():
                missing.append(objects.take(np.flatnonzero(~stored)))
        if self._is_slower(missing, job):
            self.stats.refused_loads += 1
            return False
        job.fetch = self._tiers.manager.fetch(missing, job.lookup.queue_of, job.deadline)
        return True

    def _needed(self, job: _LookupJob, number: int) -> Objects:
        """Return the pages of group `number` that the job needs to resume at position `job.target`."""
        group, objects = self._groups[number], job.objects[number]
        first, last = self._first(job, number), (job.target - job.message.start) // group.block_tokens
        return Objects(objects.block_hashes[first:last], objects.group, objects.form)

    def _first(self, job: _LookupJob, number: int) -> int:
        """Return the index of the first block of group `number` that the job needs to resume at position
        `job.target`."""
        group = self._groups[number]
        return max(0, group.first_block(job.target) - job.message.start // group.block_tokens)

    def _is_slower(self, missing: Sequence[Objects], job: _LookupJob) -> bool:
        """Return whether loading is estimated to be slower than computing. Compares the time that each tier needs for
        its part of the `missing` pages with the time that vLLM needs to compute the tokens up to position
        `job.target`. The estimated throughput of a slower tier is raised a little, so that the tier is tried again
        later. Return False if no page is missing in host memory, or if too little was measured.
        """
        seconds = self._compute.seconds(job.target - job.message.start)
        if seconds is None or not missing:
            return False
        queues = self._tiers.manager.queues
        sizes: dict[int, int] = {}
        for objects in missing:
            for key in objects.keys:
                if key in job.lookup.queue_of:
                    number = job.lookup.queue_of[key]
                    sizes[number] = sizes.get(number, 0) + objects.form.page_bytes
        slow = False
        for number, size in sizes.items():
            queue = queues[number]
            rate = queue.throughput.bytes_per_second
            if rate and (queue.bytes_ahead(job.deadline) + size) / rate > seconds:
                queue.throughput.raise_estimate()
                slow = True
        return slow

    def _lease(self, job: _LookupJob) -> bool:
        """Lease the loaded pages of a job. If pages are missing, record the missing pages, release all leases and
        return False.
        """
        complete = True
        for number in range(len(self._groups)):
            wanted, first = self._needed(job, number), self._first(job, number)
            lease = self._tiers.host.acquire(wanted)
            job.leases.append(lease)
            ok = lease.results == Outcome.OK
            if not ok.all():
                complete = False
                job.found[number][first : first + len(wanted)] &= ok
        if not complete:
            job.release()
            return False
        job.firsts = [self._first(job, number) for number in range(len(self._groups))]
        return True

    def _held(self, job: _LookupJob, number: int) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(job.objects[number]), bool)
        first = job.firsts[number]
        held[first : first + len(job.leases[number].offsets)] = True
        return held

    def _answer(self, job: _LookupJob, positions: list[int]) -> None:
        message = job.message
        self._pending.pop(message.request_id, None)
        if positions:
            self._leased[message.request_id] = job
        self._answers.append(Answer(message.request_id, message.number, positions))

    # --- copies

    def _load(self, message: Load) -> None:
        job = self._leased.pop(message.request_id, None)
        plan = None if job is None or job.message.number != message.number else self._plan(job, message)
        if plan is None:
            if job is not None:
                job.release()
            self.stats.failed_loads += 1
            self._failed.add(message.request_id)
            self._finished.add(message.request_id)
            return
        assert job is not None
        copies = [self._layers.load(number, ids, self._tiers.arena, at) for number, ids, at in plan]

        def then() -> None:
            for number, objects in enumerate(job.objects):
                first, count = job.firsts[number], len(job.leases[number].offsets)
                used = Objects(objects.block_hashes[first : first + count], objects.group, objects.form)
                self._tiers.manager.write_to_tiers(used, used=True)
            job.release()
            self.stats.loaded_pages += sum(len(ids) for _, ids, _ in plan)
            self.stats.loaded_tokens += message.end - message.start
            self._finished.add(message.request_id)

        self._copies.append((lambda: all(is_done() for is_done in copies), then))

    def _plan(
        self, job: _LookupJob, message: Load
    ) -> list[tuple[int, list[int], npt.NDArray[np.int64]]] | None:
        """Return, for each group, its number, the blocks to fill, and the offsets of their pages in host memory. Return
        None if a page is missing."""
        plan = []
        for number, group in enumerate(self._groups):
            shift = (message.start - job.message.start) // group.block_tokens - job.firsts[number]
            offsets = job.leases[number].offsets
            ids, at = [], []
            for i, block in enumerate(message.block_ids[number]):
                if block:
                    if not 0 <= i + shift < len(offsets):
                        return None
                    ids.append(block)
                    at.append(int(offsets[i + shift]))
            if ids:
                plan.append((number, ids, np.asarray(at, np.int64)))
        return plan

    def _store(self, message: Store) -> None:
        objects = Objects(message.hashes, message.group, self._layers.forms[message.group])
        lease = self._tiers.host.reserve(objects)
        fresh = np.flatnonzero(lease.results == Outcome.PENDING)
        stored = np.flatnonzero(lease.results != Outcome.FULL)
        self.stats.skipped_pages += len(objects) - len(stored)
        self.stats.stored_pages += len(fresh)
        ids = [message.block_ids[i] for i in fresh.tolist()]
        done = self._layers.offload(message.group, ids, self._tiers.arena, lease.offsets[fresh])

        def then() -> None:
            lease.release(True)
            if stored.size:
                self._tiers.manager.write_to_tiers(objects.take(stored), used=False)

        self._copies.append((done, then))
