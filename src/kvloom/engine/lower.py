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
from collections import Counter
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from kvloom.core import Arrival, KVCache, Match, Need, PageGroup, Prospect, Question
from kvloom.tiers import Form, HostTier, Lease, Objects, TierError
from kvloom.tiers.mover import Fetch, Finding, Mover, MoverConfig
from kvloom.tiers.opening import Place, check_tiers, host_capacity, open_place, shown
from kvloom.tiers.shares import shares_of

from .arena import Event, HostPages, form_of, open_host
from .keeping import Keeping
from .request import Request
from .speeds import Line

__all__ = ["Lower", "LowerConfig", "open_lower"]

log = logging.getLogger("kvloom.tiers")
STAGING = {False: 256 << 20, True: 4 << 30}
"""Host memory that pages pass through where no host tier was asked for, without and with a GPU."""
GAIN = 0.1
"""Computing the head while the tail loads is worth its steps where it saves this share of loading everything."""
MOST_FORESEEN = 64
"""Requests in the queue whose pages are looked for before their turn."""


@dataclass(frozen=True, slots=True)
class LowerConfig:
    """`load`: "always" loads what is there, "auto" what is faster to load than to compute. A request waits for a tier as long
    as computing would take, but at least and at most so many `seconds`."""

    load: Literal["auto", "always"] = "auto"
    seconds: tuple[float, float] = (0.1, 5.0)
    mover: MoverConfig = field(default_factory=MoverConfig)


@dataclass(slots=True, eq=False)
class _Trip:
    """A request's pages on their way. `below`: which lane has what is not in host memory. Where `first` is set the request
    computes meanwhile, and only what comes from that token on is on its way: the two meet; one that is `patient` has others to
    wait for anyway, and loads all."""

    request: Request
    prospect: Prospect | None = None
    finding: Finding | None = None
    below: dict[bytes, int] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    found: bool = False
    patient: bool = False
    first: int = 0
    arrival: Arrival | None = None
    came: np.ndarray | None = None
    states_came: bool = True
    leases: list[Lease] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    copied: float = 0.0
    bytes: int = 0
    objects: int = 0
    resume: int = 0

    @property
    def tenant(self) -> str:
        return self.request.control.tenant


def open_lower(
    texts: Many[str | Place],
    cache: KVCache,
    buffer: torch.Tensor,
    settle: Callable[[], None],
    config: LowerConfig | None = None,
) -> Lower:
    """The tiers that texts name (`host:64GiB`, `disk:/path:1TiB`, …), under one cache. A text that makes no sense is refused;
    a tier that cannot be opened is left out, and said to be."""
    layout, device = cache.layout, buffer.device
    check_tiers(text for text in texts if isinstance(text, str))
    hosts = [text for text in texts if isinstance(text, str) and text.startswith("host:")]
    write: str | None = None
    capacity, checked = STAGING[device.type == "cuda"], False
    if hosts:
        plain, write = _taken_write(hosts[0])
        capacity, checked = host_capacity(plain)
    host = open_host(layout, capacity, checked, device)
    tenants = (account.tenant for account in cache.accounts.accounts.values())
    shares = shares_of(tenants, (cache.pool.slabs - 1) * layout.slab_bytes)
    if hosts:  # what pages only pass through is shared by whoever needs it
        host.share_out(shares)
    places: list[Place] = []
    left_out: list[tuple[str, str]] = []
    try:
        for text in texts:
            if isinstance(text, Place):
                places.append(text)
            elif text not in hosts:
                try:
                    places.append(open_place(text, shares))
                except TierError as error:
                    left_out.append((shown(text), str(error)))
                    log.warning("tier %s is left out, serving goes on without it: %s", *left_out[-1])
    except BaseException:
        for place in places:
            place.tier.close()
        host.close()
        raise
    lower = Lower(cache, buffer, host, places, write, settle, config or LowerConfig())
    lower.left_out = left_out
    return lower


def _taken_write(text: str) -> tuple[str, str]:
    """A host tier's text without its `write` option, and that option."""
    place = open_place("host:16MiB" + ("?" + text.partition("?")[2] if "?" in text else ""))
    place.tier.close()
    head, _, query = text.partition("?")
    rest = "&".join(part for part in query.split("&") if part and not part.startswith("write="))
    return head + ("?" + rest if rest else ""), place.write


def _short(names: Many[str]) -> list[str]:
    """Tiers' names without their paths and addresses: disk, disk 2, redis."""
    kinds = [name.partition(":")[0] for name in names]
    before = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    return [f"{kind} {count + 1}" if count else kind for kind, count in zip(kinds, before, strict=True)]


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
        self.cache, self.host, self.config = cache, host, config
        self.mover = Mover(host, places, config.mover)
        self.names = _short([host.name, *(lane.tier.name for lane in self.mover.lanes)])
        """What its tiers are called where anyone may read it: host memory first, then those below."""
        self.left_out: list[tuple[str, str]] = []
        """Tiers that could not be opened, and why."""
        self._pages = HostPages(cache.layout, buffer, host)
        self._settle = settle
        self.forms: dict[int, list[Form]] = {
            g.index: [form_of(g, run) for run in range(g.runs)] for g in cache.layout.groups
        }
        self._trips: dict[Request, _Trip] = {}
        self._orphans: list[_Trip] = []
        self._fetching: dict[bytes, Fetch] = {}
        self.prefill = Line()
        self.copying = Line()
        self.last_load = 0.0
        """Seconds of the last load, from host memory to pages in the tree."""
        self.counts: dict[str, int] = dict.fromkeys(
            ("trips", "landed_tokens", "landed_bytes", "failed_pages", "not_worth", "no_room"),
            0,
        )
        writes = {place.write for place in places} | ({host_write} if host_write else set())
        self._keeping = Keeping(cache, self._pages, self.mover, self.forms, writes)

    # -- up -------------------------------------------------------------------------------------

    @property
    def foresees(self) -> bool:
        """Whether a request that is queued now should be looked after before its turn."""
        return bool(self.mover.lanes) and len(self._trips) < MOST_FORESEEN

    def foresee(self, request: Request, match: Match, patient: bool) -> None:
        """A request was queued, behind others if `patient`: what it needs from below host memory may come there now."""
        if self._may(request, match):
            trip = self._trips[request] = _Trip(request, patient=patient)
            self._seek(trip, match)

    @staticmethod
    def _may(request: Request, match: Match) -> bool:
        return (
            match.resume < match.limit
            and match.control.read
            and not request.looked_below
            and request.finish is None
        )

    def holds(self, request: Request, match: Match) -> bool:
        """Whether a request whose turn it is should wait on: what it needs is on its way. `match` is of this moment."""
        trip = self._trips.get(request)
        if trip is None:
            if not self._may(request, match):
                return False
            trip = self._trips[request] = _Trip(request)
        if self._seek(trip, match):
            return not trip.first
        if trip.first > match.matched:
            return False  # its tail is here; it computes its head first
        return self._copy(trip, match) if trip.arrival is None else self._coming(trip)

    def lacks_room(self, request: Request) -> bool:
        """Whether a request's pages could come if there were room for them in the pool."""
        trip = self._trips.get(request)
        return trip is not None and trip.arrival is None and not trip.first

    def stop_at(self, request: Request) -> int | None:
        """Where a request that computes its head meets the tail that comes from below, if that is ahead."""
        trip = self._trips.get(request)
        return trip.first if trip is not None and request.computed < trip.first else None

    def may_jump(self, request: Request) -> bool:
        """Whether the tail of a running request's prompt has come, and it should go on behind it."""
        trip = self._trips.get(request)
        if trip is None or not trip.first or trip.prospect is None or self._seek(trip, None):
            return False
        ahead = trip.prospect.point - request.computed
        if ahead < self.cache.block_tokens:
            self.forget(request)
        return ahead >= self.cache.block_tokens and request.computed >= trip.first

    def under_way(self, request: Request) -> bool:
        """Whether a request that waits aside has nothing to come back for yet."""
        trip = self._trips.get(request)
        if trip is None:
            return False
        if trip.arrival is not None:
            return not all(event.query() for event in trip.events)
        return self._seek(trip, None)

    def began(self, request: Request) -> None:
        """A request computes now: nothing more is looked for until it has to begin again."""
        request.looked_below = True
        if (trip := self._trips.get(request)) is not None and not trip.first:
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Nobody waits for a request's pages any more."""
        trip = self._trips.pop(request, None)
        if trip is not None:
            others = [fetch for other in self._trips.values() for fetch in other.fetches]
            for fetch in trip.fetches:
                if fetch not in others:
                    fetch.cancel()
            if trip.arrival is not None:
                self._orphans.append(trip)
                self._finish_orphans()

    def _seek(self, trip: _Trip, match: Match | None) -> bool:
        """Find below and bring into host memory; whether that is still under way."""
        if not self.mover.lanes or trip.arrival is not None:
            return False
        if not trip.found:
            if trip.prospect is None:
                assert match is not None
                trip.prospect = self.cache.prospect(match)
            while True:
                if trip.finding is None:
                    questions = trip.prospect.questions()
                    if not questions:
                        break
                    trip.finding = self.mover.find([self._asked(q, trip.tenant) for q in questions])
                if not trip.finding.done:
                    return True
                trip.below.update(trip.finding.below)
                trip.prospect.answer(trip.finding.found)
                trip.finding = None
            trip.found = True
            self._fetch(trip)
        trip.fetches = [fetch for fetch in trip.fetches if not fetch.done]
        return bool(trip.fetches)

    def _asked(self, question: Question, tenant: str) -> Objects:
        return Objects(question.names, question.group, self.forms[question.group][0], tenant)

    def _fetch(self, trip: _Trip) -> None:
        """Bring what a trip found below host memory: all of it, or the tail while the head is computed."""
        assert trip.prospect is not None
        wanted, below = self._lacking(trip, 0)
        if not below:
            return
        trip.first = self._meeting(trip)
        if trip.first:
            wanted, below = self._lacking(trip, trip.first)
        match, point = trip.prospect.match, trip.prospect.point
        if not below or trip.first >= point:
            self.counts["not_worth"] += 1
            trip.first = 0
            return
        least, most = self.config.seconds
        tokens = point - match.resume
        patience = max(least, min(most, 2 * self.prefill.seconds(tokens))) if self.prefill.known else most / 2
        fetch = self.mover.fetch(wanted, below, time.monotonic() + patience)
        trip.fetches.append(fetch)
        self._fetching = {key: one for key, one in self._fetching.items() if not one.done}
        self._fetching.update(dict.fromkeys(below, fetch))

    def _meeting(self, trip: _Trip) -> int:
        """Where computing from the left and loading from the right should meet; 0: load everything, and compute nothing."""
        assert trip.prospect is not None
        match, point, block = trip.prospect.match, trip.prospect.point, self.cache.block_tokens
        if trip.patient or not match.control.store or self.config.load == "always" or not self.prefill.known:
            return 0
        # Bytes of block b at b + 1, of states at 0.
        sizes = np.zeros((len(self.mover.lanes), point // block + 2), np.int64)
        for need in trip.prospect.needs():
            keys = self._objects(need, trip.tenant)[0].keys
            for b, key in zip(need.blocks, keys, strict=True):
                if key in trip.below:
                    sizes[trip.below[key], b + 1] += need.group.page_stride * need.group.runs

        def loading(first: int) -> float | None:
            rest = sizes[:, 0] + sizes[:, first // block + 1 :].sum(1)
            return self.mover.seconds({lane: int(size) for lane, size in enumerate(rest) if size})

        whole, start = loading(match.resume), -(-match.resume // block) * block
        if whole is None:
            return 0
        low, high = 0, max(0, (point - start) // block)
        while low < high:  # the first block at which computing up to it takes as long as loading the rest
            middle = (low + high) // 2
            first = start + middle * block
            if self.prefill.seconds(first - match.resume) >= (loading(first) or 0.0):
                high = middle
            else:
                low = middle + 1
        return start + low * block if low and self.prefill.seconds(low * block) < (1 - GAIN) * whole else 0

    def _lacking(self, trip: _Trip, first: int) -> tuple[list[Objects], dict[bytes, int]]:
        """What is below host memory of a trip's pages from `first` on, and where; what others fetch is waited for."""
        assert trip.prospect is not None
        wanted: list[Objects] = []
        below: dict[bytes, int] = {}
        for need in trip.prospect.needs(first):
            runs = self._objects(need, trip.tenant)
            for one in runs:
                for key, main in zip(one.keys, runs[0].keys, strict=True):
                    if main not in trip.below:
                        continue
                    other = self._fetching.get(key)
                    if other is None or other.done:
                        below[key] = trip.below[main]
                    elif other not in trip.fetches:
                        trip.fetches.append(other)
            wanted += runs
        return wanted, below

    def _objects(self, need: Need, tenant: str) -> list[Objects]:
        group = need.group.index
        return [Objects(need.names, group, form, tenant) for form in self.forms[group]]

    def _worth(self, tokens: int, all_tokens: int, seconds: float | None) -> bool:
        """Whether `seconds` of loading beat computing `tokens` of the `all_tokens` that are to compute otherwise."""
        if self.config.load == "always" or seconds is None or not self.prefill.known:
            return True
        return seconds < self.prefill.seconds(all_tokens) - self.prefill.seconds(all_tokens - tokens)

    def _copy(self, trip: _Trip, match: Match) -> bool:
        """Copy what host memory has of a request's pages into the pool; whether that is under way."""
        prospect = self.cache.prospect(match)
        while questions := prospect.questions():
            prospect.answer([self.host.lookup(self._asked(question, trip.tenant)) for question in questions])
        tokens = prospect.point - match.resume
        if tokens <= 0:
            return self._done(trip)
        needs = prospect.needs()
        trip.bytes = sum(len(need.names) * need.group.page_stride * need.group.runs for need in needs)
        if not self._worth(tokens, match.length - match.resume, self.copying.seconds(trip.bytes)):
            self.counts["not_worth"] += 1
            return self._done(trip)
        trip.copied, trip.objects = time.monotonic(), sum(len(need.names) for need in needs)
        trip.resume = match.resume
        trip.arrival = arrival = self.cache.expect(prospect)
        if arrival is None:
            self.counts["no_room"] += 1
            return False
        self._settle()  # pages that left for these are read, and moved ones moved, before they are written
        trip.came = np.zeros_like(arrival.fresh)
        for need in needs:
            self._fill(trip, arrival, need.group)
        self.counts["trips"] += 1
        return self._coming(trip)

    def _fill(self, trip: _Trip, arrival: Arrival, group: PageGroup) -> None:
        assert trip.came is not None
        for run, (names, pages) in enumerate(arrival.pages(group)):
            lease = self.host.hold(Objects(names, group.index, self.forms[group.index][run]))
            here = lease.offsets >= 0
            if here.any():
                trip.events.append(self._pages.up(group.page_stride, pages[here], lease.offsets[here]))
            if group.spec.unit == "state":
                trip.states_came &= bool(here.all())
            else:
                column = group.column + run
                trip.came[np.flatnonzero(arrival.fresh[:, column])[here], column] = True
            self.counts["failed_pages"] += int((~here).sum())
            trip.leases.append(lease)

    def _coming(self, trip: _Trip) -> bool:
        """Land what is there; whether some is still on its way."""
        if not all(event.query() for event in trip.events):
            return True
        assert trip.arrival is not None
        resumed = self.cache.land(trip.arrival, trip.came, trip.states_came)
        gained = max(0, resumed - trip.resume)
        self._let_go(trip)
        now = time.monotonic()
        self.last_load = now - trip.copied
        self.copying.see(trip.bytes, now - trip.copied)
        self._tell(trip, gained, now)
        self.counts["landed_tokens"] += gained
        self.counts["landed_bytes"] += trip.bytes if gained else 0
        return self._done(trip)

    def _tell(self, trip: _Trip, tokens: int, now: float) -> None:
        """Note with a request what was brought for it: of pages that came through host memory, the tiers they came from."""
        left, request = tokens, trip.request
        for number, objects in Counter(trip.below.values()).items():
            share = min(left, tokens * objects // max(1, trip.objects))
            if share:
                request.loads.append((self.names[1 + number], trip.began, trip.copied, share))
                left -= share
        if left:
            request.loads.append((self.names[0], trip.copied, now, left))
        if request.cached_tokens is None or (trip.first and not request.preemptions):
            request.first_loads = len(request.loads)
            if request.cached_tokens is not None:  # it began with its head
                request.cached_tokens += tokens

    def _done(self, trip: _Trip) -> bool:
        self._trips.pop(trip.request, None)
        trip.request.looked_below = True
        return False

    def _let_go(self, trip: _Trip) -> None:
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
            self._seek(trip, None)

    @property
    def holding(self) -> bool:
        """Whether pages are held that will be free by themselves."""
        return bool(self._orphans) or self._keeping.busy or self._copying

    @property
    def _copying(self) -> bool:
        return any(trip.arrival is not None for trip in self._trips.values())

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so long."""
        if tokens:
            self.prefill.see(tokens, seconds)

    def wait(self, timeout: float) -> None:
        """Nothing else is to do: sleep until something is, `timeout` seconds at the most."""
        if self._keeping.busy or self._copying:
            time.sleep(min(timeout, 0.0002))
        else:
            self.mover.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Copy down what was offered, store it, and close the tiers, within `timeout`."""
        deadline = time.monotonic() + timeout
        self.take_offers()
        while self._keeping.busy and time.monotonic() < deadline:
            time.sleep(0.001)
            self._keeping.finish()
        self.mover.close(max(0.1, deadline - time.monotonic()))
        self._pages.close()
