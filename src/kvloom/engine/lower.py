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

from kvloom.core import Arrival, KVCache, Match, PageGroup
from kvloom.tiers import HostTier, Objects
from kvloom.tiers.mover import Mover
from kvloom.tiers.opening import Place, short_names
from kvloom.tiers.peer_server import PeerServer

from .arena import HostPages
from .fetching import Fetching, LowerConfig
from .keeping import Keeping
from .request import Request
from .speeds import Line
from .trip import Trip

__all__ = ["Lower", "LowerConfig"]

log = logging.getLogger("kvloom.tiers")
MOST_FORESEEN = 64
"""Requests in the queue whose pages are looked for before their turn."""


class Lower:
    """See the module. One owner, the engine's thread, calls; `settle` makes the copies that the cache has decided."""

    def __init__(
        self,
        cache: KVCache,
        buffer: torch.Tensor,
        host: HostTier,
        places: Many[Place],
        host_write: str | None,
        settle: Callable[[], None],
        config: LowerConfig,
    ) -> None:
        self.cache, self.host = cache, host
        self.mover = Mover(host, places, config.mover)
        self.names = short_names([host.name, *(lane.tier.name for lane in self.mover.lanes)])
        """What its tiers are called where anyone may read it: host memory first, then those below."""
        self.left_out: list[tuple[str, str]] = []
        """Tiers that could not be opened, and why."""
        self._pages = HostPages(cache.layout, buffer, host)
        self._settle = settle
        self._trips: dict[Request, Trip] = {}
        self._orphans: list[Trip] = []
        self._flying: Collection[Request] = ()
        self._lands = 0.0
        self.prefill = Line()
        self.copying = Line()
        self.offered: PeerServer | None = None
        """What lets other processes read host memory, where that was asked for."""
        self.last_load = 0.0
        """Seconds of the last load, from host memory to pages in the tree."""
        self.counts: dict[str, int] = dict.fromkeys(
            ("trips", "landed_tokens", "landed_bytes", "failed_pages", "not_worth", "no_room", "hinted"),
            0,
        )
        writes = {place.write for place in places} | ({host_write} if host_write else set())
        self._fetching = Fetching(cache, self.mover, config, self.prefill, self.counts, self._trips.values)
        self.forms = self._fetching.forms
        self.lossy = any(place.lossy for place in places)
        """Whether a tier keeps pages that only requests may use that allow for loss."""
        self._keeping = Keeping(cache, self._pages, self.mover, self.forms, self._fetching.near, writes)

    @property
    def config(self) -> LowerConfig:
        return self._fetching.config

    @config.setter
    def config(self, config: LowerConfig) -> None:
        self._fetching.config = config

    # -- up -------------------------------------------------------------------------------------

    @property
    def foresees(self) -> bool:
        """Whether a request that is queued now should be looked after before its turn."""
        return bool(self.mover.lanes) and len(self._trips) < MOST_FORESEEN

    def foresee(self, request: Request, match: Match, patient: bool) -> None:
        """A request was queued, behind others if `patient`: what it needs from below host memory may come there now."""
        if self._may(request, match):
            self._keeping.know(request.control.lossy, match.root_name)
            trip = self._trips[request] = Trip(request, patient=patient)
            self._fetching.seek(trip, match)

    def hint(self, request: Request, match: Match) -> bool:
        """A request like this one may come soon: what it would need from below host memory is brought there. Whether anything
        is looked for; the request itself is nobody's, and nothing of the pool is touched."""
        if not self.foresees or not self._may(request, match):
            return False
        trip = self._trips[request] = Trip(request, hint=True, patient=True)
        if not self._fetching.seek(trip, match):
            del self._trips[request]
        return True

    @property
    def preparing(self) -> bool:
        """Whether pages are on their way that were only hinted at."""
        return any(trip.hint for trip in self._trips.values())

    @staticmethod
    def _may(request: Request, match: Match) -> bool:
        return (
            match.resume < match.limit
            and match.control.read
            and (request.looked_below is None or match.resume < request.looked_below)
            and request.finish is None
        )

    def holds(self, request: Request, match: Match) -> bool:
        """Whether a request whose turn it is should wait on: what it needs is on its way. `match` is of this moment."""
        self._keeping.know(request.control.lossy, match.root_name)
        trip = self._trips.get(request)
        if trip is None:
            if not self._may(request, match):
                return False
            question = self.cache.first_question(match)
            if question is not None and self._keeping.is_leaving(question.names):
                self._keeping.take()  # it left for someone of this very step
            if self.host.empty and not self.mover.lanes:
                return False
            if not self.mover.lanes and self._fetching.lacks(question, request):
                request.looked_below = match.resume
                return False
            trip = self._trips[request] = Trip(request)
        if trip.phase == "heads":
            self._coming(trip)
            return True  # where it goes on from is found with the next match
        if trip.phase != "jumps":
            self._fetching.seek(trip, match)
            trip.front = match.resume
            tokens = self._pace(trip)
            if tokens is not None:
                if trip.found and not trip.headed and self._copy_head(trip, match):
                    return True
                trip.phase, trip.stop = "races" if tokens else "waits", trip.front + tokens
                return not tokens
            trip.phase = "waits"
        return self._copy(trip, match) if trip.arrival is None else self._coming(trip)

    def _copy_head(self, trip: Trip, match: Match) -> bool:
        """Copy what host memory has of a prompt's head while its tail comes from below, once; whether there is any."""
        trip.headed, trip.phase = True, "heads"
        if self._copy(trip, match):
            return True
        trip.phase = "waits"
        return trip.front > match.resume  # it came at once

    def claims(self, request: Request) -> bool:
        """Whether pages of the pool are being filled for a request that waits."""
        trip = self._trips.get(request)
        return trip is not None and trip.arrival is not None

    @property
    def coming(self) -> list[tuple[Request, int]]:
        """Requests that wait for copies alone, and will run as soon as those are made; up to which token pages of the pool are
        held for them."""
        trips = [trip for trip in self._trips.values() if trip.arrival is not None or trip.due is not None]
        return [(trip.request, 0 if trip.arrival is None else trip.arrival.end) for trip in trips]

    def land(self) -> None:
        """What has come enters the tree before the turn of whom it came for: someone lacks the room, and may need it sooner."""
        for trip in list(self._trips.values()):
            if trip.arrival is not None:
                self._coming(trip)

    def lacks_room(self, request: Request) -> bool:
        """Whether a request's pages could come if there were room for them in the pool."""
        trip = self._trips.get(request)
        return trip is not None and trip.arrival is None and trip.phase == "waits"

    def stop_at(self, request: Request) -> int | None:
        """Where a request that computes its head should look again for the tail that comes from below, if that is ahead."""
        trip = self._trips.get(request)
        return trip.stop if trip is not None and request.computed < trip.stop else None

    def stands(self, request: Request) -> bool:
        """Whether a running request computes nothing now, because what its prompt lacks comes sooner. Asked once a step: how
        far it computes else is `stop_at`."""
        trip = self._trips.get(request)
        if trip is None or trip.phase != "races":
            return False
        trip.front = request.computed
        tokens = self._pace(trip)
        trip.stop = trip.front + (tokens or 0)
        return tokens == 0

    def may_jump(self, request: Request) -> bool:
        """Whether the tail of a running request's prompt has come as far as it was computed, and it should go on behind it."""
        trip = self._trips.get(request)
        if (
            trip is None
            or trip.phase != "races"
            or (self._fetching.seek(trip, None) and trip.low > request.computed)
        ):
            return False
        assert trip.prospect is not None
        point = trip.prospect.point
        if min(point - trip.low, point - request.computed) < self.cache.block_tokens:
            if not trip.strips:
                self.forget(request)  # nothing came
            return False
        if request.computed < trip.low:
            return False
        trip.phase = "jumps"
        self._fetching.let_go(trip)
        return True

    def _pace(self, trip: Trip) -> int | None:
        now = time.monotonic()
        busy = max(0.0, self._lands - now) if trip.request in self._flying else None
        return self._fetching.pace(trip, busy, now)

    def in_air(self, requests: Collection[Request], tokens: int) -> None:
        """A step was launched for so many tokens of prompts and is not over: waiting costs its requests nothing until then."""
        self._flying = requests
        self._lands = time.monotonic() + self.prefill.seconds(tokens)

    def under_way(self, request: Request, awaited: bool) -> bool:
        """Whether a request that waits aside has nothing to come back for yet. If it is `awaited` by others, who may have their
        turn before it, what has come enters the tree at once."""
        trip = self._trips.get(request)
        if trip is None:
            return False
        if trip.arrival is not None:
            return self._coming(trip) if awaited else not all(event.query() for event in trip.events)
        if trip.due is not None:
            return trip.due in self._keeping.making
        return trip.phase != "jumps" and self._pace(trip) == 0

    def began(self, request: Request) -> None:
        """A request computes now: nothing more is looked for until it has to begin again."""
        request.looked_below = request.computed
        if (trip := self._trips.get(request)) is not None and trip.phase != "races":
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Nobody waits for a request's pages any more."""
        trip = self._trips.pop(request, None)
        if trip is not None:
            self._fetching.let_go(trip)
            if trip.arrival is not None:
                self._orphans.append(trip)
                self._finish_orphans()

    def _copy(self, trip: Trip, match: Match) -> bool:
        """Copy what host memory has of a request's pages into the pool; whether that is under way."""
        prospect, due = self.cache.prospect(match), list[bytes]()
        while questions := prospect.questions():
            asked = [self._fetching.asked(question, trip.request) for question in questions]
            prospect.answer([self.host.lookup(objects) for objects in asked])
            if self._keeping.making and trip.phase != "heads":
                due += [key for objects in asked for key in objects.keys if key in self._keeping.making]
        trip.due = due[-1] if due else None
        if due:
            return True  # what left a moment ago is being copied to host memory
        tokens = prospect.point - match.resume
        if tokens <= 0 and trip.phase == "heads":
            return False
        if tokens <= 0:
            trip.request.lacking = trip.request.lacking or prospect.lacking
            return self._done(trip, match.resume)
        needs = prospect.needs()
        trip.bytes = sum(len(need.names) * need.group.page_stride * need.group.runs for need in needs)
        seconds = self.copying.seconds(trip.bytes) if self.copying.trusted else None
        if not self._fetching.worth(tokens, match.length - match.resume, seconds):
            self.counts["not_worth"] += 1
            self.copying.doubt()
            return self._done(trip, match.resume)
        trip.copied, trip.objects = time.monotonic(), sum(len(need.names) for need in needs)
        trip.resume = match.resume
        for need in needs:  # what leaves the pool for these wants places in host memory, and might get theirs
            for form in self._fetching.forms_of(trip.request)[need.group.index]:
                trip.leases.append(self.host.hold(Objects(need.names, need.group.index, form)))
        trip.arrival = arrival = self.cache.expect(prospect)
        if arrival is None:
            self._let_go(trip)
            self.counts["no_room"] += 1
            return False
        try:
            self._settle()  # pages that left for these are read, and moved ones moved, before they are written
            trip.came = np.zeros_like(arrival.fresh)
            for need in needs:
                self._fill(trip, arrival, need.group)
        except BaseException:
            self.forget(trip.request)  # or pages would land that nobody filled
            raise
        self.counts["trips"] += 1
        return self._coming(trip)

    def _fill(self, trip: Trip, arrival: Arrival, group: PageGroup) -> None:
        assert trip.came is not None
        for run, (names, pages) in enumerate(arrival.pages(group)):
            form = self._fetching.forms_of(trip.request)[group.index][run]
            lease = self.host.hold(Objects(names, group.index, form))
            trip.leases.append(lease)
            here = lease.offsets >= 0
            if here.any():
                trip.events.append(self._pages.up(group.page_stride, pages[here], lease.offsets[here]))
            if group.spec.unit == "state":
                trip.states_came &= bool(here.all())
            else:
                column = group.column + run
                trip.came[np.flatnonzero(arrival.fresh[:, column])[here], column] = True
            self.counts["failed_pages"] += int((~here).sum())

    def _coming(self, trip: Trip) -> bool:
        """Land what is there; whether some is still on its way."""
        if not all(event.query() for event in trip.events):
            return True
        assert trip.arrival is not None
        resumed = self.cache.land(trip.arrival, trip.came, trip.states_came)
        gained = max(0, resumed - trip.resume)
        now = time.monotonic()
        self.last_load = now - trip.copied
        self.copying.see(trip.bytes, trip.copying(now))
        self._let_go(trip)
        trip.tell(gained, now, self.names)
        self.counts["landed_tokens"] += gained
        self.counts["landed_bytes"] += trip.bytes if gained else 0
        trip.front = max(trip.front, resumed)
        return self._done(trip, max(trip.resume, resumed))

    def _done(self, trip: Trip, resume: int) -> bool:
        """Nothing more comes for a request, which can resume there now; should that leave before its turn, it looks again."""
        if trip.phase == "heads":  # its tail is still to come
            trip.phase = "waits"
            return False
        self._trips.pop(trip.request, None)
        trip.request.looked_below = resume
        return False

    def _let_go(self, trip: Trip) -> None:
        for lease in trip.leases:
            lease.release()
        trip.arrival, trip.leases, trip.events = None, [], []

    def _finish_orphans(self) -> None:
        waiting = []
        for trip in self._orphans:
            if all(event.query() for event in trip.events):
                assert trip.arrival is not None
                self.cache.drop(trip.arrival)
                self._let_go(trip)
            else:
                waiting.append(trip)
        self._orphans = waiting

    # -- the engine's side ----------------------------------------------------------------------

    def take_offers(self) -> None:
        """Copy what the cache offered to host memory. Called before the copies that the cache has decided are made."""
        self._keeping.take()

    def waiting(self, busy: Callable[[], bool]) -> None:
        """The engine is about to wait for its device, which is `busy`."""
        self._keeping.make_ahead(busy)

    def launching(self, moved: bool = False) -> None:
        """A step is about to be launched, or copies inside the pool were (`moved`)."""
        self._keeping.launching(moved)

    @property
    def kept_pages(self) -> int:
        """Pages that were copied to host memory."""
        return self._keeping.kept_pages

    @property
    def kept_bytes(self) -> int:
        """And their bytes."""
        return self._keeping.kept_bytes

    def poll(self) -> None:
        """Once a step: go on with what is under way."""
        if self._orphans:
            self._finish_orphans()
        self._keeping.finish()
        for trip in list(self._trips.values()):
            if not self._fetching.seek(trip, None) and trip.hint:
                self.counts["hinted"] += 1
                del self._trips[trip.request]
            elif trip.phase == "races" and trip.prospect is not None and trip.found:
                if trip.prospect.point - trip.request.computed < self.cache.block_tokens:
                    self.forget(trip.request)  # it was computed meanwhile

    @property
    def holding(self) -> bool:
        """Whether pages are held that will be free by themselves."""
        return bool(self._orphans) or self._keeping.busy or self._copying

    @property
    def _copying(self) -> bool:
        return any(trip.arrival is not None for trip in self._trips.values())

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so long; what it takes without any is told, too."""
        self.prefill.see(tokens, seconds)

    def wait(self, timeout: float) -> None:
        """Nothing else is to do: sleep until something is, `timeout` seconds at the most."""
        if self._keeping.busy or self._copying:
            time.sleep(min(timeout, 0.0002))
        else:
            self.mover.wait(timeout)

    def close(self, timeout: float = 10.0, keep: bool = True) -> None:
        """Copy down what was offered, if it is to be kept, store it, and close the tiers, within `timeout`."""
        deadline = time.monotonic() + timeout
        if keep:
            self.take_offers()
        while self._keeping.busy and time.monotonic() < deadline:
            time.sleep(0.001)
            self._keeping.finish()
        if self.offered is not None:
            self.offered.close()
        self.mover.close(max(0.1, deadline - time.monotonic()))
        self._pages.close()
