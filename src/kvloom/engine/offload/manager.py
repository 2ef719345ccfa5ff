"""What lies below the pool: pages go down when their sequences end or they must leave, and come back for who needs them.

    a sequence ends, a page leaves ──offer──> keep: a copy in host memory ──mover──> disk, stores, peers
    a request waits ──trip──> find (below) → fetch (into host memory) → copy (into reserved pages) → land (in the tree)

A trip never blocks anybody: the request waits aside, bounded in time, and whatever fails on the way is computed instead.
Whether a trip is worth it is decided from how long computing and loading took lately. Knows names, pages and places; which
pages a prompt needs is the cache's to say (`core.Prospect`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence as Many

import numpy as np
import torch

from kvloom.core import KVCache, Match, PageGroup, Reservation
from kvloom.engine.request import Request
from kvloom.tiers import HostTier, Objects
from kvloom.tiers.peer.server import PeerServer
from kvloom.tiers.registry import Place, short_names
from kvloom.tiers.transfers.transfer_manager import Mover

from .host_pages import HostPages
from .load_job import LoadJob
from .loader import OffloadConfig, TierLoader
from .store import HostStore
from .throughput import TimeModel

__all__ = ["OffloadConfig", "OffloadManager"]

log = logging.getLogger("kvloom.tiers")
MOST_FORESEEN = 64
"""Requests in the queue whose pages are looked for before their turn."""


class OffloadManager:
    """See the module. One owner, the engine's thread, calls; `settle` makes the copies that the cache has decided."""

    def __init__(
        self,
        cache: KVCache,
        buffer: torch.Tensor,
        host: HostTier,
        places: Many[Place],
        host_write: str | None,
        settle: Callable[[], None],
        config: OffloadConfig,
    ) -> None:
        self.cache, self.host = cache, host
        self.transfers = Mover(host, places, config.transfers)
        self.tier_names = short_names([host.name, *(lane.tier.name for lane in self.transfers.lanes)])
        """What its tiers are called where anyone may read it: host memory first, then those below."""
        self.unavailable: list[tuple[str, str]] = []
        """Tiers that could not be opened, and why."""
        self._pages = HostPages(cache.layout, buffer, host)
        self._apply_copies = settle
        self._jobs: dict[Request, LoadJob] = {}
        self._orphans: list[LoadJob] = []
        self._inflight_requests: Collection[Request] = ()
        self._step_ends = 0.0
        self.prefill_time = TimeModel()
        self.copy_time = TimeModel()
        self.host_server: PeerServer | None = None
        """What lets other processes read host memory, where that was asked for."""
        self.last_load = 0.0
        """Seconds of the last load, from host memory to pages in the tree."""
        self.counts: dict[str, int] = dict.fromkeys(
            ("trips", "landed_tokens", "landed_bytes", "failed_pages", "not_worth", "no_room", "hinted"),
            0,
        )
        writes = {place.write for place in places} | ({host_write} if host_write else set())
        self._loader = TierLoader(
            cache, self.transfers, config, self.prefill_time, self.counts, self._jobs.values
        )
        self.forms = self._loader.forms
        self.lossy = any(place.lossy for place in places)
        """Whether a tier keeps pages that only requests may use that allow for loss."""
        self._store = HostStore(
            cache, self._pages, self.transfers, self.forms, self._loader.lossy_forms, writes
        )

    @property
    def config(self) -> OffloadConfig:
        return self._loader.config

    @config.setter
    def config(self, config: OffloadConfig) -> None:
        self._loader.config = config

    # -- up -------------------------------------------------------------------------------------

    @property
    def can_prefetch(self) -> bool:
        """Whether a request that is queued now should be looked after before its turn."""
        return bool(self.transfers.lanes) and len(self._jobs) < MOST_FORESEEN

    def prefetch(self, request: Request, match: Match, patient: bool) -> None:
        """A request was queued, behind others if `patient`: what it needs from below host memory may come there now."""
        if self._may_load(request, match):
            self._store.note_root(request.control.lossy, match.root_hash)
            trip = self._jobs[request] = LoadJob(request, can_wait=patient)
            self._loader.advance(trip, match)

    def prefetch_session(self, request: Request, match: Match) -> bool:
        """A request like this one may come soon: what it would need from below host memory is brought there. Whether anything
        is looked for; the request itself is nobody's, and nothing of the pool is touched."""
        if not self.can_prefetch or not self._may_load(request, match):
            return False
        trip = self._jobs[request] = LoadJob(request, is_prefetch=True, can_wait=True)
        if not self._loader.advance(trip, match):
            del self._jobs[request]
        return True

    @property
    def is_prefetching(self) -> bool:
        """Whether pages are on their way that were only hinted at."""
        return any(trip.is_prefetch for trip in self._jobs.values())

    @staticmethod
    def _may_load(request: Request, match: Match) -> bool:
        return (
            match.resume < match.limit
            and match.control.read
            and (request.looked_in_tiers is None or match.resume < request.looked_in_tiers)
            and request.finish_reason is None
        )

    def should_wait(self, request: Request, match: Match) -> bool:
        """Whether a request whose turn it is should wait on: what it needs is on its way. `match` is of this moment."""
        self._store.note_root(request.control.lossy, match.root_hash)
        trip = self._jobs.get(request)
        if trip is None:
            if not self._may_load(request, match):
                return False
            question = self.cache.loading.first_query(match)
            if question is not None and self._store.is_queued(question.hashes):
                self._store.flush()  # it left for someone of this very step
            if self.host.empty and not self.transfers.lanes:
                return False
            if not self.transfers.lanes and self._loader.host_misses(question, request):
                request.looked_in_tiers = match.resume
                return False
            trip = self._jobs[request] = LoadJob(request)
        if trip.phase == "heads":
            self._poll_copy(trip)
            return True  # where it goes on from is found with the next match
        if trip.phase != "jumps":
            self._loader.advance(trip, match)
            trip.computed_to = match.resume
            tokens = self._tokens_to_compute(trip)
            if tokens is not None:
                if trip.is_planned and not trip.head_copied and self._copy_head(trip, match):
                    return True
                trip.phase, trip.compute_until = "races" if tokens else "waits", trip.computed_to + tokens
                return not tokens
            trip.phase = "waits"
        return self._copy_to_pool(trip, match) if trip.reservation is None else self._poll_copy(trip)

    def _copy_head(self, trip: LoadJob, match: Match) -> bool:
        """Copy what host memory has of a prompt's head while its tail comes from below, once; whether there is any."""
        trip.head_copied, trip.phase = True, "heads"
        if self._copy_to_pool(trip, match):
            return True
        trip.phase = "waits"
        return trip.computed_to > match.resume  # it came at once

    def is_loading(self, request: Request) -> bool:
        """Whether pages of the pool are being filled for a request that waits."""
        trip = self._jobs.get(request)
        return trip is not None and trip.reservation is not None

    @property
    def loading_requests(self) -> list[tuple[Request, int]]:
        """Requests that wait for copies alone, and will run as soon as those are made; up to which token pages of the pool are
        held for them."""
        trips = [
            trip
            for trip in self._jobs.values()
            if trip.reservation is not None or trip.awaited_key is not None
        ]
        return [(trip.request, 0 if trip.reservation is None else trip.reservation.end) for trip in trips]

    def publish_loaded(self) -> None:
        """What has come enters the tree before the turn of whom it came for: someone lacks the room, and may need it sooner."""
        for trip in list(self._jobs.values()):
            if trip.reservation is not None:
                self._poll_copy(trip)

    def is_blocked_by_pool(self, request: Request) -> bool:
        """Whether a request's pages could come if there were room for them in the pool."""
        trip = self._jobs.get(request)
        return trip is not None and trip.reservation is None and trip.phase == "waits"

    def compute_until(self, request: Request) -> int | None:
        """Where a request that computes its head should look again for the tail that comes from below, if that is ahead."""
        trip = self._jobs.get(request)
        return trip.compute_until if trip is not None and request.computed < trip.compute_until else None

    def should_pause(self, request: Request) -> bool:
        """Whether a running request computes nothing now, because what its prompt lacks comes sooner. Asked once a step: how
        far it computes else is `stop_at`."""
        trip = self._jobs.get(request)
        if trip is None or trip.phase != "races":
            return False
        trip.computed_to = request.computed
        tokens = self._tokens_to_compute(trip)
        trip.compute_until = trip.computed_to + (tokens or 0)
        return tokens == 0

    def can_skip_ahead(self, request: Request) -> bool:
        """Whether the tail of a running request's prompt has come as far as it was computed, and it should go on behind it."""
        trip = self._jobs.get(request)
        if (
            trip is None
            or trip.phase != "races"
            or (self._loader.advance(trip, None) and trip.loaded_from > request.computed)
        ):
            return False
        assert trip.plan is not None
        point = trip.plan.resume
        if min(point - trip.loaded_from, point - request.computed) < self.cache.block_tokens:
            if not trip.chunks:
                self.cancel(request)  # nothing came
            return False
        if request.computed < trip.loaded_from:
            return False
        trip.phase = "jumps"
        self._loader.cancel(trip)
        return True

    def _tokens_to_compute(self, trip: LoadJob) -> int | None:
        now = time.monotonic()
        busy = max(0.0, self._step_ends - now) if trip.request in self._inflight_requests else None
        return self._loader.tokens_to_compute(trip, busy, now)

    def step_launched(self, requests: Collection[Request], tokens: int) -> None:
        """A step was launched for so many tokens of prompts and is not over: waiting costs its requests nothing until then."""
        self._inflight_requests = requests
        self._step_ends = time.monotonic() + self.prefill_time.seconds(tokens)

    def is_pending(self, request: Request, awaited: bool) -> bool:
        """Whether a request that waits aside has nothing to come back for yet. If it is `awaited` by others, who may have their
        turn before it, what has come enters the tree at once."""
        trip = self._jobs.get(request)
        if trip is None:
            return False
        if trip.reservation is not None:
            return self._poll_copy(trip) if awaited else not all(event.query() for event in trip.events)
        if trip.awaited_key is not None:
            return trip.awaited_key in self._store.copying_keys
        return trip.phase != "jumps" and self._tokens_to_compute(trip) == 0

    def request_started(self, request: Request) -> None:
        """A request computes now: nothing more is looked for until it has to begin again."""
        request.looked_in_tiers = request.computed
        if (trip := self._jobs.get(request)) is not None and trip.phase != "races":
            self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for a request's pages any more."""
        trip = self._jobs.pop(request, None)
        if trip is not None:
            self._loader.cancel(trip)
            if trip.reservation is not None:
                self._orphans.append(trip)
                self._finish_orphans()

    def _copy_to_pool(self, trip: LoadJob, match: Match) -> bool:
        """Copy what host memory has of a request's pages into the pool; whether that is under way."""
        prospect, due = self.cache.loading.plan(match), list[bytes]()
        while questions := prospect.next_queries():
            asked = [self._loader.objects_for(question, trip.request) for question in questions]
            prospect.answer([self.host.lookup(objects) for objects in asked])
            if self._store.copying_keys and trip.phase != "heads":
                due += [key for objects in asked for key in objects.keys if key in self._store.copying_keys]
        trip.awaited_key = due[-1] if due else None
        if due:
            return True  # what left a moment ago is being copied to host memory
        tokens = prospect.resume - match.resume
        if tokens <= 0 and trip.phase == "heads":
            return False
        if tokens <= 0:
            trip.request.miss = trip.request.miss or prospect.miss
            return self._finish(trip, match.resume)
        needs = prospect.missing_pages()
        trip.bytes = sum(len(need.hashes) * need.group.page_stride * need.group.runs for need in needs)
        seconds = self.copy_time.seconds(trip.bytes) if self.copy_time.is_trusted else None
        if not self._loader.is_worth_loading(tokens, match.length - match.resume, seconds):
            self.counts["not_worth"] += 1
            self.copy_time.doubt()
            return self._finish(trip, match.resume)
        trip.copy_started, trip.objects = time.monotonic(), sum(len(need.hashes) for need in needs)
        trip.resume = match.resume
        for need in needs:  # what leaves the pool for these wants places in host memory, and might get theirs
            for form in self._loader.forms_of(trip.request)[need.group.index]:
                trip.leases.append(self.host.hold(Objects(need.hashes, need.group.index, form)))
        trip.reservation = arrival = self.cache.loading.reserve(prospect)
        if arrival is None:
            self._release(trip)
            self.counts["no_room"] += 1
            return False
        try:
            self._apply_copies()  # pages that left for these are read, and moved ones moved, before they are written
            trip.loaded = np.zeros_like(arrival.to_load)
            for need in needs:
                self._fill_pages(trip, arrival, need.group)
        except BaseException:
            self.cancel(trip.request)  # or pages would land that nobody filled
            raise
        self.counts["trips"] += 1
        return self._poll_copy(trip)

    def _fill_pages(self, trip: LoadJob, arrival: Reservation, group: PageGroup) -> None:
        assert trip.loaded is not None
        for run, (names, pages) in enumerate(arrival.pages(group)):
            form = self._loader.forms_of(trip.request)[group.index][run]
            lease = self.host.hold(Objects(names, group.index, form))
            trip.leases.append(lease)
            here = lease.offsets >= 0
            if here.any():
                trip.events.append(self._pages.load(group.page_stride, pages[here], lease.offsets[here]))
            if group.spec.unit == "state":
                trip.states_loaded &= bool(here.all())
            else:
                column = group.column + run
                trip.loaded[np.flatnonzero(arrival.to_load[:, column])[here], column] = True
            self.counts["failed_pages"] += int((~here).sum())

    def _poll_copy(self, trip: LoadJob) -> bool:
        """Land what is there; whether some is still on its way."""
        if not all(event.query() for event in trip.events):
            return True
        assert trip.reservation is not None
        resumed = self.cache.loading.publish(trip.reservation, trip.loaded, trip.states_loaded)
        gained = max(0, resumed - trip.resume)
        now = time.monotonic()
        self.last_load = now - trip.copy_started
        self.copy_time.observe(trip.bytes, trip.copy_seconds(now))
        self._release(trip)
        trip.record_on_request(gained, now, self.tier_names)
        self.counts["landed_tokens"] += gained
        self.counts["landed_bytes"] += trip.bytes if gained else 0
        trip.computed_to = max(trip.computed_to, resumed)
        return self._finish(trip, max(trip.resume, resumed))

    def _finish(self, trip: LoadJob, resume: int) -> bool:
        """Nothing more comes for a request, which can resume there now; should that leave before its turn, it looks again."""
        if trip.phase == "heads":  # its tail is still to come
            trip.phase = "waits"
            return False
        self._jobs.pop(trip.request, None)
        trip.request.looked_in_tiers = resume
        return False

    def _release(self, trip: LoadJob) -> None:
        for lease in trip.leases:
            lease.release()
        trip.reservation, trip.leases, trip.events = None, [], []

    def _finish_orphans(self) -> None:
        waiting = []
        for trip in self._orphans:
            if all(event.query() for event in trip.events):
                assert trip.reservation is not None
                self.cache.loading.cancel(trip.reservation)
                self._release(trip)
            else:
                waiting.append(trip)
        self._orphans = waiting

    # -- the engine's side ----------------------------------------------------------------------

    def flush(self) -> None:
        """Copy what the cache offered to host memory. Called before the copies that the cache has decided are made."""
        self._store.flush()

    def offload_ahead(self, busy: Callable[[], bool]) -> None:
        """The engine is about to wait for its device, which is `busy`."""
        self._store.offload_ahead(busy)

    def before_step(self, moved: bool = False) -> None:
        """A step is about to be launched, or copies inside the pool were (`moved`)."""
        self._store.before_step(moved)

    @property
    def offloaded_pages(self) -> int:
        """Pages that were copied to host memory."""
        return self._store.offloaded_pages

    @property
    def offloaded_bytes(self) -> int:
        """And their bytes."""
        return self._store.offloaded_bytes

    def poll(self) -> None:
        """Once a step: go on with what is under way."""
        if self._orphans:
            self._finish_orphans()
        self._store.poll()
        for trip in list(self._jobs.values()):
            if not self._loader.advance(trip, None) and trip.is_prefetch:
                self.counts["hinted"] += 1
                del self._jobs[trip.request]
            elif trip.phase == "races" and trip.plan is not None and trip.is_planned:
                if trip.plan.resume - trip.request.computed < self.cache.block_tokens:
                    self.cancel(trip.request)  # it was computed meanwhile

    @property
    def retained_bytes(self) -> bool:
        """Whether pages are held that will be free by themselves."""
        return bool(self._orphans) or self._store.busy or self._copying

    @property
    def _copying(self) -> bool:
        return any(trip.reservation is not None for trip in self._jobs.values())

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so long; what it takes without any is told, too."""
        self.prefill_time.observe(tokens, seconds)

    def wait(self, timeout: float) -> None:
        """Nothing else is to do: sleep until something is, `timeout` seconds at the most."""
        if self._store.busy or self._copying:
            time.sleep(min(timeout, 0.0002))
        else:
            self.transfers.wait(timeout)

    def close(self, timeout: float = 10.0, keep: bool = True) -> None:
        """Copy down what was offered, if it is to be kept, store it, and close the tiers, within `timeout`."""
        deadline = time.monotonic() + timeout
        if keep:
            self.flush()
        while self._store.busy and time.monotonic() < deadline:
            time.sleep(0.001)
            self._store.poll()
        if self.host_server is not None:
            self.host_server.close()
        self.transfers.close(max(0.1, deadline - time.monotonic()))
        self._pages.close()
