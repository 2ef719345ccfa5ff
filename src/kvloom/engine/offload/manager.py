"""The offload manager: decides which pages are offloaded, prefetched and loaded. The scheduler and the engine call it.

    scheduler   prefetch · before_admission · before_prefill · is_pending · request_started · cancel · poll · open_cold
    engine      before_step · during_step · after_step · flush · prefetch_session · close

Only `wait` and `close` block on a tier. A page that is late, missing or damaged is recomputed. The cache decides
which pages a prompt needs (`core.LoadPlan`). This module does not depend on tokens or models.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Sequence as Many
from typing import NamedTuple, Protocol

import torch

from kvloom.core import KVCache, Match, Sequence
from kvloom.engine.config import OffloadConfig
from kvloom.engine.request import Request
from kvloom.tiers import (
    DiskTier,
    Form,
    HostTier,
    OpenTier,
    PageChanges,
    SupportsChanges,
    Tier,
    UnitTier,
    short_tier_names,
)
from kvloom.tiers.peer import PeerServer
from kvloom.tiers.transfers import TransferManager

from .action import Action, Decision
from .cold_pages import ColdPages
from .hand_over import HandOver, needed_pages, peer_queue
from .host_pages import HostPages, RankCopies
from .image_store import ImageStore
from .load_job import LoadJob, Phase
from .pool_loader import CopyStart, PoolLoader
from .saved_state import SavedState
from .stats import OffloadStats
from .store import PageOffloader
from .tier_loader import TierLoader
from .time_model import TimeModel

__all__ = ["OffloadManager", "Step", "WatchedTier"]

log = logging.getLogger("kvloom.tiers")
MAX_PREFETCH_JOBS = 64
"""The pages of queued requests are prefetched only while there are fewer load jobs than this."""
IDLE_WAIT_SECONDS = 0.002
"""Longest sleep, in seconds, of a step without work."""
COPY_WAIT_SECONDS = 0.0002
"""Longest sleep, in seconds, while copies run. Copies are polled, because their end sends no signal."""
SAVE_SECONDS = 600.0
"""Time between two saves of what was learned, in seconds. See `SavedState`."""
_COMPUTE = Decision(Action.COMPUTE)


def _innermost(place: OpenTier) -> Tier:
    """Return the tier that stores the pages of the opened tier `place`, without the tiers that wrap it to convert
    pages."""
    tier: Tier = place.tier
    while (inner := getattr(tier, "inner", None)) is not None:
        tier = inner
    return tier


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


class Step(Protocol):
    """The part of a launched step that the offload manager reads."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def scheduled_requests(self) -> Collection[Request]: ...


class WatchedTier(NamedTuple):
    """A tier whose pages are published as events. `changes` records the changes of its pages. `forms` has the forms
    (byte layouts) of the pages of each layer group.
    """

    medium: str
    changes: PageChanges
    forms: dict[int, list[Form]]


class OffloadManager:
    """Offloads and loads the pages of one cache. Not thread-safe: only the engine's thread may call it.

    - `places` are the tiers after host memory, fastest first.
    - `host_write` is the write policy of host memory, or None if no host tier is configured.
    - With `exclusive` and the write policy "back", host memory first evicts the pages that are also in the pool.
    - `apply_copies` runs the pending copies inside the pool.
    - `ranks` are the other ranks of a tensor-parallel group.
    """

    def __init__(
        self,
        cache: KVCache,
        buffer: torch.Tensor,
        host: HostTier,
        places: Many[OpenTier],
        host_write: str | None,
        exclusive: bool,
        apply_copies: Callable[[], None],
        config: OffloadConfig,
        unavailable: Many[tuple[str, str]] = (),
        host_server: PeerServer | None = None,
        ranks: RankCopies | None = None,
    ) -> None:
        self.cache, self.host = cache, host
        self.stats = OffloadStats()
        self.transfers = TransferManager(host, places, config.transfers)
        self.tier_names = short_tier_names([host.name, *(queue.tier.name for queue in self.transfers.queues)])
        """The names of the tiers in metrics and results, host memory first."""
        self.unavailable = list(unavailable)
        """Tiers that could not be opened, and the reasons."""
        self.host_server = host_server
        """Serves host memory to other processes, if this is configured."""
        self.has_lossy_tier = any(place.is_lossy for place in places)
        """Whether a tier stores re-encoded pages, for requests that accept them."""
        self._jobs: dict[Request, LoadJob] = {}
        self._hand_overs: dict[Request, HandOver] = {}
        # Requests whose pages are offered to other workers, and the tokens offered so far.
        self._offering: dict[Request, int] = {}
        self._inflight_requests: Collection[Request] = ()
        self._inflight_until = 0.0
        self._prefill_time = TimeModel()
        self._pages = HostPages(cache.layout, buffer, host.arena, ranks)
        self._tiers = TierLoader(
            cache,
            self.transfers,
            config,
            self._prefill_time,
            self.stats,
            self._jobs.values,
        )
        self.forms = self._tiers.forms
        writes = {place.write_policy for place in places} | ({host_write} if host_write else set())
        self._store = PageOffloader(
            cache,
            self._pages,
            self.transfers,
            self.forms,
            self._tiers.lossy_forms,
            writes,
            exclusive and host_write == "back",
            self.stats,
        )
        self._pool = PoolLoader(cache, host, self._pages, self._store, self._tiers, apply_copies, self.stats)
        self._times = {"prefill": self._prefill_time, "copy": self._pool.copy_time}
        self._saved_state: SavedState | None = None
        self._save_at = time.monotonic() + SAVE_SECONDS
        disk = next((tier for tier in map(_innermost, places) if isinstance(tier, DiskTier)), None)
        if disk is not None:
            owner = f"{cache.model}, {cache.block_bytes} bytes a block, {_device_name(buffer.device)}"
            self._saved_state = SavedState(disk.folder, owner)
            self._saved_state.load(self._times, self.transfers.queues, cache)
        self.cold: ColdPages | None = None
        """Cold pages of requests that are longer than the pool. None if no host tier is configured."""
        self.cold_refusal = ""
        """The reason why this engine has no cold pages, if the reason is not a missing host tier."""
        if host_write is not None:
            self.cold = ColdPages(
                cache, self.transfers, self._pages, self._tiers.forms_of, apply_copies, self.stats
            )

    @property
    def config(self) -> OffloadConfig:
        """How pages are loaded. May be replaced at any time."""
        return self._tiers.config

    @config.setter
    def config(self, config: OffloadConfig) -> None:
        self._tiers.config = config

    def watch_tiers(self) -> list[WatchedTier]:
        """Make host memory and disk tiers record changes of their pages, for events. Call this method before the
        first step."""
        exact = {group: list(forms) for group, forms in self.forms.items()}
        found = [WatchedTier("host", self.host.watch(), exact)]
        for queue in self.transfers.queues:
            tier = queue.tier
            changes = tier.watch() if isinstance(tier, SupportsChanges) and not tier.is_lossy else None
            if changes is not None:
                stored = tier.stored_form if isinstance(tier, UnitTier) else lambda form: form
                forms = {group: [stored(form) for form in each] for group, each in exact.items()}
                found.append(WatchedTier(tier.name.partition(":")[0], changes, forms))
        return found

    # -- the scheduler's interface ----------------------------------------------------------------

    def image_store(self, hidden: int, dtype: torch.dtype) -> ImageStore:
        """Return a store for image embeddings of `hidden` numbers each."""
        return ImageStore(self.cache, self.transfers, lambda: self.config, self.stats, hidden, dtype)

    def prefetch(self, request: Request, find_match: Callable[[Request], Match], can_wait: bool) -> None:
        """Start to load the pages of a queued request from tiers into host memory. Does not change the pool.

        If another worker computes the prompt (`awaits_peer`), starts a hand-over instead. Otherwise does nothing if
        host memory is the only tier, or if there are MAX_PREFETCH_JOBS load jobs. Takes as long as a match and a load
        plan.

        `find_match` returns the match of the request. `can_wait` means that other requests are scheduled first.
        """
        if request.offers_pages:
            self._offering[request] = 0
            self._store.copy_units()
        if request.awaits_peer is not None and self._start_hand_over(request, find_match(request)):
            return
        if not self._can_prefetch:
            return
        match = find_match(request)
        if self._may_load(request, match):
            self._store.note_root(request.control.lossy, match.root_hash)
            job = self._jobs[request] = LoadJob(request, can_wait=can_wait)
            self._tiers.advance(job, match)

    def load_estimate(self, request: Request, match: Match) -> tuple[int, float] | None:
        """Return how many tokens after `match` can be loaded from tiers, and the estimated seconds until these tokens
        are loaded. The seconds are 0 until the first load has been timed. The call looks up pages, but loads none.
        Return None if the request has a load job whose lookup in tiers is not complete. Without a load job, the call
        looks only in host memory.
        """
        if not self._may_load(request, match) or request.is_long:
            return 0, 0.0
        job = self._jobs.get(request)
        if job is not None:
            plan = job.lookup.plan
            if plan is None or not job.lookup.is_complete:
                return None
            return max(0, plan.resume - match.resume), self._tiers.seconds_left(job, match.resume)
        return self._pool.estimate(request, match)

    def before_admission(self, request: Request, match: Match) -> Decision:
        """Decide the action of the next waiting request. `match` must be current. May start or finish a load job.

        Return WAIT while pages are in transfer, NO_FREE_PAGES if the pool has no pages for them, and COMPUTE
        otherwise. The call may publish loaded pages in the cache, so the caller must match again if `cache.version`
        changed. If no tier has a page, the call takes only as long as a dictionary lookup.
        """
        self._store.note_root(request.control.lossy, match.root_hash)
        if request in self._hand_overs:
            return Decision(Action.WAIT)
        if self._must_wait(request, match):
            return Decision(Action.WAIT)
        job = self._jobs.get(request)
        if job is None:
            return _COMPUTE
        is_blocked = job.copy is None and job.phase is Phase.WAITING
        return Decision(Action.NO_FREE_PAGES if is_blocked else Action.COMPUTE, job.compute_until)

    def before_prefill(self, request: Request) -> Decision:
        """Decide the action of a running request with uncomputed prompt tokens for this step.

        While the request computes its prompt from the front, tiers load the prompt from the back. Return RESUME once
        all uncomputed tokens before the end of the load plan are loaded. Return WAIT if the tokens that are neither
        computed nor loaded can be loaded sooner than computed. Otherwise returns COMPUTE.
        """
        job = self._jobs.get(request)
        if job is None:
            return _COMPUTE
        if self._can_resume(job):
            return Decision(Action.RESUME)
        if request in self._jobs and job.phase is Phase.COMPUTING:
            job.computed_to = request.computed
            tokens = self._tokens_to_compute(job)
            job.compute_until = job.computed_to + (tokens or 0)
            if tokens == 0:
                return Decision(Action.WAIT)
        return Decision(Action.COMPUTE, job.compute_until if request in self._jobs else None)

    def is_pending(self, request: Request, has_followers: bool) -> bool:
        """Return whether a waiting request must continue to wait for its pages.

        `has_followers` means that other requests wait for the same pages. In this case, this call publishes copied
        pages in the prefix cache at once. Otherwise they are published when the request is scheduled.
        """
        if request in self._hand_overs:
            return True
        job = self._jobs.get(request)
        if job is None:
            return False
        if job.copy is not None:
            return self._finish_copy(job) if has_followers else not job.copy.is_done
        if job.awaited_key is not None:
            return job.awaited_key in self._store.copying_keys
        return job.phase is not Phase.RESUMING and self._tokens_to_compute(job) == 0

    def is_copying(self, request: Request) -> bool:
        """Return whether pages of the pool are reserved for a waiting request."""
        job = self._jobs.get(request)
        return job is not None and job.copy is not None

    def copying_requests(self) -> list[tuple[Request, int]]:
        """Return the requests that wait only for copies between pool and host memory. O(jobs).

        Return pairs: the request, and the number of tokens for which pages of the pool are reserved. The number is 0
        if the copy into the pool cannot start yet, because a needed page is still being offloaded.
        """
        return [
            (job.request, 0 if job.copy is None else job.copy.reservation.end)
            for job in self._jobs.values()
            if job.copy is not None or job.awaited_key is not None
        ]

    def publish_loaded(self) -> None:
        """Publish the pages of all finished copies now, before their requests are scheduled. The pages can then be
        evicted for another request.
        """
        for job in list(self._jobs.values()):
            if job.copy is not None:
                self._finish_copy(job)

    @property
    def is_retaining_pages(self) -> bool:
        """Whether copies in progress retain pages of the pool."""
        return self._pool.has_cancelled_copies or self._store.busy or self._is_copying

    @property
    def is_copying_to_pool(self) -> bool:
        """Whether copies into the pool are in progress, including cancelled copies. When one of these copies ends, a
        request can start, or pages become free.
        """
        return self._pool.has_cancelled_copies or any(
            job.copy is not None and not job.copy.is_done for job in self._jobs.values()
        )

    def open_cold(self, request: Request, beyond: int, open_empty: Callable[[], Sequence]) -> bool:
        """Open the sequence of a long request, so that the request resumes after its pages in host memory. Return
        whether the sequence was opened.

        A request is long if its oldest pages may be in host memory (see `cold_pages.py`). Opens nothing if the pages
        in host memory cover at most `beyond` tokens, or if the pool lacks pages. `open_empty` opens an empty
        sequence.
        """
        began = time.monotonic()
        found = None if self.cold is None else self.cold.find(request, beyond)
        if self.cold is None or found is None:
            return False
        sequence = request.sequence = open_empty()
        is_started = False
        try:
            is_started = self.cold.start(request, found)
        finally:
            if not is_started:
                sequence.close()
                request.sequence = None
        if not is_started:
            return False
        request.loads.append((self.tier_names[0], began, time.monotonic(), found.position))
        if request.cached_tokens is None:
            request.first_loads = len(request.loads)
        return True

    def request_started(self, request: Request) -> None:
        """Record that a request has started to compute. Ends its load job, unless tiers are still loading the end of
        its prompt.
        """
        request.looked_in_tiers = request.computed
        if (job := self._jobs.get(request)) is not None and job.phase is not Phase.COMPUTING:
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End the load job of a request, if there is one. Reserved pages become free when their copies are done."""
        hand_over = self._hand_overs.pop(request, None)
        if hand_over is not None:
            hand_over.cancel()
        job = self._jobs.pop(request, None)
        if job is not None:
            self._tiers.cancel(job)
            if job.copy is not None:
                self._pool.cancel(job.copy)

    def poll(self) -> None:
        """Advance all load jobs and offloads. Call this method once per step, and regularly while idle. Does not
        block. O(jobs).
        """
        self._pool.poll()
        self._store.poll()
        self._advance_hand_overs()
        for job in list(self._jobs.values()):
            if not self._tiers.advance(job, None) and job.is_prefetch:
                self.stats.prefetched_sessions += 1
                del self._jobs[job.request]
            elif job.phase is Phase.COMPUTING and job.lookup.plan is not None and job.lookup.is_complete:
                if job.lookup.plan.resume - job.request.computed < self.cache.block_tokens:
                    self.cancel(job.request)  # the request has already computed its prompt
        if time.monotonic() > self._save_at:
            self._save_state()

    def _save_state(self) -> None:
        self._save_at = time.monotonic() + SAVE_SECONDS
        if self._saved_state is not None:
            self._saved_state.save(self._times, self.transfers.queues, self.cache)

    # -- the engine's interface -------------------------------------------------------------------

    def prefetch_session(self, request: Request, match: Match) -> bool:
        """Start to load the pages of a session into host memory. Return whether a lookup started.

        `request` has the session's tokens and is never scheduled. Does not change the pool.
        """
        if not self._can_prefetch or not self._may_load(request, match):
            return False
        job = self._jobs[request] = LoadJob(request, is_prefetch=True, can_wait=True)
        if not self._tiers.advance(job, match):
            del self._jobs[request]
        return True

    @property
    def is_prefetching(self) -> bool:
        """Whether a session's pages are being prefetched. O(jobs)."""
        return any(job.is_prefetch for job in self._jobs.values())

    def flush(self) -> None:
        """Start to copy queued pages to host memory. Call this method before copies run inside the pool."""
        self._store.flush()

    def before_step(self, pages_moved: bool = False) -> None:
        """Mark the current position in the device's stream. An offload of pages that were written before the mark then
        waits only for the work before the mark. Call this method before a step, and after copies inside the pool
        (`pages_moved`)."""
        self._store.before_step(pages_moved)

    def during_step(self, is_busy: Callable[[], bool]) -> None:
        """Evict and offload pages while `is_busy()` returns True. The host has time for this work while the device is
        busy.
        """
        self._store.offload_ahead(is_busy)

    def after_step(
        self, started: float, finished: Step | None, inflight: Step | None, is_waiting: bool
    ) -> None:
        """Start queued offloads. If a step has `finished`, record the time since `started` as the time of this step.
        `inflight` is the step that runs now.

        If the engine has no step to run or to finish, but requests wait for pages (`is_waiting`) or a prefetch is in
        progress, sleep. The sleep ends when a page may have arrived, or when a copy may have released its pages.
        """
        self._offer_pages()
        self.flush()  # do not wait for the next step, which may start much later
        if finished is not None:
            self.observe_prefill(finished.prompt_tokens, time.perf_counter() - started)
        elif inflight is None and (is_waiting or self.is_prefetching):
            self.wait(IDLE_WAIT_SECONDS)
        self._inflight_requests = () if inflight is None else inflight.scheduled_requests
        tokens = 0 if inflight is None else inflight.prompt_tokens
        self._inflight_until = time.monotonic() + self._prefill_time.seconds(tokens)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a step with `tokens` prompt tokens took `seconds`. Call it for steps without prompt tokens, too."""
        self._prefill_time.observe(tokens, seconds)

    @property
    def last_load_seconds(self) -> float:
        """Seconds of the last load, from host memory to published pages."""
        return self._pool.last_load_seconds

    def wait(self, timeout: float) -> None:
        """Sleep until a transfer or a copy may be done, at most `timeout` seconds."""
        if self._store.busy or self._is_copying:
            time.sleep(min(timeout, COPY_WAIT_SECONDS))
        else:
            self.transfers.wait(timeout)

    def close(self, timeout: float = 10.0, keep: bool = True) -> None:
        """Offload queued pages (unless `keep` is False), store them in the tiers, and close the tiers. Takes at
        most `timeout` seconds. If the device or a rank fails, the tiers are closed without the queued pages.
        """
        deadline = time.monotonic() + timeout
        if keep:
            try:
                self.flush()
            except RuntimeError as error:
                log.warning("the last pages are not offloaded, because a copy failed: %s", error)
        while self._store.busy and time.monotonic() < deadline and not self._pages.has_failed:
            time.sleep(0.001)
            self._store.poll()
        self._save_state()
        if self.host_server is not None:
            self.host_server.close()
        self.transfers.close(max(0.1, deadline - time.monotonic()))
        self._store.close()
        self._pages.close()

    # -- hand-over between prefill and decode workers ------------------------------------------------

    def _offer_pages(self) -> None:
        """Offload the pages of finished prompt chunks, because other workers wait for them. O(requests that offer
        pages).
        """
        for request, offered in list(self._offering.items()):
            if request.finish_reason is not None or offered >= len(request.prompt):
                del self._offering[request]  # a closed sequence has offloaded its last pages
            elif request.sequence is not None and request.computed > offered:
                self.cache.loading.offload_published(request.sequence, again=not offered)
                self._offering[request] = request.computed

    def _start_hand_over(self, request: Request, match: Match) -> bool:
        """Start to pull the pages of a request from the prefill worker that computes them. Return False if that worker
        is not configured as a tier, or if this worker already has all pages.
        """
        assert request.awaits_peer is not None
        peer = peer_queue(self.transfers, request.awaits_peer)
        if peer is None or not self._may_load(request, match):
            return False
        plan = self.cache.loading.plan(match)
        needed = needed_pages(self.cache.layout, plan)
        if not any(needed):
            return False
        self._store.note_root(request.control.lossy, match.root_hash)
        self._hand_overs[request] = HandOver(
            self.transfers,
            self._tiers.forms_of(request),
            request.control.tenant,
            frozenset(plan.hashes[: match.public // plan.block]),
            needed,
            peer,
            self.config.hand_over_seconds,
            time.monotonic(),
        )
        return True

    def _advance_hand_overs(self) -> None:
        now = time.monotonic()
        for request, hand_over in list(self._hand_overs.items()):
            if not hand_over.advance(now):
                del self._hand_overs[request]
                self.stats.handed_over_pages += hand_over.pages
                self.stats.hand_overs += hand_over.is_complete
                self.stats.cut_hand_overs += not hand_over.is_complete

    # -- load jobs --------------------------------------------------------------------------------

    @property
    def _can_prefetch(self) -> bool:
        return bool(self.transfers.queues) and len(self._jobs) < MAX_PREFETCH_JOBS

    def _may_load(self, request: Request, match: Match) -> bool:
        """Return whether to look in tiers for the pages of a prompt after `match`.

        A request that has already looked in tiers looks again only if its cached prefix has become shorter since then.
        """
        return (
            match.resume < match.limit
            and match.control.read
            and self.config.load != "never"
            and (request.looked_in_tiers is None or match.resume < request.looked_in_tiers)
            and request.finish_reason is None
        )

    def _must_wait(self, request: Request, match: Match) -> bool:
        """Advance the load job of a waiting request, and return whether the request must wait. If there is no job and
        tiers may have pages, create one.
        """
        job = self._jobs.get(request) or self._new_job(request, match)
        if job is None:
            return False
        if job.phase is Phase.COPYING_HEAD:
            self._finish_copy(job)
            return True  # the next match shows where the request resumes
        if job.phase is not Phase.RESUMING:
            self._tiers.advance(job, match)
            job.computed_to = match.resume
            tokens = self._tokens_to_compute(job)
            if tokens is not None:
                if job.lookup.is_complete and not job.head_copied and self._copy_head(job, match):
                    return True
                job.phase = Phase.COMPUTING if tokens else Phase.WAITING
                job.compute_until = job.computed_to + tokens
                return not tokens
            job.phase = Phase.WAITING
        return self._copy_to_pool(job, match) if job.copy is None else self._finish_copy(job)

    def _new_job(self, request: Request, match: Match) -> LoadJob | None:
        """Create the load job of a waiting request. Return None if tiers cannot have any pages for the request."""
        if not self._may_load(request, match):
            return None
        query = self.cache.loading.first_query(match)
        if query is not None and self._store.is_queued(query.hashes):
            self._store.flush()  # the request may need pages that this step evicted
        if not self.transfers.queues:
            if self.host.is_empty:
                return None
            if self._tiers.host_misses(query, request):
                request.looked_in_tiers = match.resume
                return None
        job = self._jobs[request] = LoadJob(request)
        return job

    def _can_resume(self, job: LoadJob) -> bool:
        """Return whether a running request can resume after its loaded tokens, because it has computed all tokens
        before them. If so, cancel the remaining transfers.
        """
        request, transfer = job.request, job.transfer
        if job.phase is not Phase.COMPUTING or (
            self._tiers.advance(job, None) and transfer.loaded_from > request.computed
        ):
            return False
        assert job.lookup.plan is not None
        resume = job.lookup.plan.resume
        if min(resume - transfer.loaded_from, resume - request.computed) < self.cache.block_tokens:
            if not transfer.chunks:
                self.cancel(request)  # no page arrived
            return False
        if request.computed < transfer.loaded_from:
            return False
        job.phase = Phase.RESUMING
        self._tiers.cancel(job)
        return True

    def _tokens_to_compute(self, job: LoadJob) -> int | None:
        now = time.monotonic()
        is_inflight = job.request in self._inflight_requests
        return self._tiers.tokens_to_compute(
            job, max(0.0, self._inflight_until - now) if is_inflight else None, now
        )

    def _copy_head(self, job: LoadJob, match: Match) -> bool:
        """Copy the start of a prompt from host memory to the pool while tiers load its end. Return whether a copy
        started or has already finished.
        """
        job.head_copied, job.phase = True, Phase.COPYING_HEAD
        if self._copy_to_pool(job, match):
            return True
        job.phase = Phase.WAITING
        return job.computed_to > match.resume  # the copy is already done

    def _copy_to_pool(self, job: LoadJob, match: Match) -> bool:
        """Start to copy the pages of a request from host memory into the pool. Return whether the request waits."""
        try:
            outcome = self._pool.start(job, match)
        except BaseException:
            if job.copy is not None:
                self.cancel(job.request)  # or pages without data would be published
            raise
        if outcome is CopyStart.COPYING:
            return self._finish_copy(job)
        if outcome in (CopyStart.NO_PAGES, CopyStart.NOT_WORTH):
            self._end_job(job, match.resume)
        return outcome is CopyStart.OFFLOADING

    def _finish_copy(self, job: LoadJob) -> bool:
        """Publish the pages of a job if their copies are done. Return whether copies are still in progress."""
        resume = self._pool.finish(job, self.tier_names)
        if resume is None:
            return True
        self._end_job(job, resume)
        return False

    def _end_job(self, job: LoadJob, resume: int) -> None:
        """End a job whose request can resume at `resume`. A job that has copied only the start of the prompt
        continues instead.

        After the end, the request looks in tiers again only if its cached prefix becomes shorter than `resume`.
        """
        if job.phase is Phase.COPYING_HEAD:  # the end of the prompt is still loading
            job.phase = Phase.WAITING
            return
        self._jobs.pop(job.request, None)
        job.request.looked_in_tiers = resume

    @property
    def _is_copying(self) -> bool:
        return any(job.copy is not None for job in self._jobs.values())
