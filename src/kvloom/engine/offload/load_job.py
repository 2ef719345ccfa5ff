"""One request's pages on their way up: what is looked for, fetched, copied, and how far that has come. Data."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvloom.core import LoadPlan, Reservation
from kvloom.engine.request import Request
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers import Lease, Objects
from kvloom.tiers.transfers.transfer_manager import Fetch, Finding

from .host_pages import LoadEvent
from .load_or_recompute import LoadOrRecompute

__all__ = ["LoadChunk", "LoadJob"]


@dataclass(slots=True, eq=False)
class LoadChunk:
    """Pages on their way into host memory that are of use together: all of a trip's from token `first` up to the strip before
    it. `lanes` counts which of them come from where; `fetches` bring them, others' among them."""

    first: int
    objects: list[Objects]
    fetches: list[Fetch]
    pages_by_tier: Counter[int]


@dataclass(slots=True, eq=False)
class LoadJob:
    """A request's pages on their way; a `hint` is of one that has not come yet, and ends in host memory. `below`: which lane has
    what is not in host memory, `fetched` how many of the needed came from each. `strips` come one after the other, the end of
    the prompt first: from token `low` on all has come. Meanwhile the request `waits`, or `races`: it computes from its `front`,
    up to `stop`, and `jumps` when it meets what has come, to go on behind it. What host memory has of its head is copied first,
    once (it `heads`, and is `headed` then). One that is `patient` has others to wait for."""

    request: Request
    is_prefetch: bool = False
    plan: LoadPlan | None = None
    lookup: Finding | None = None
    awaited_key: bytes | None = None
    """The key of a page that is on its way from the pool to host memory, for which it waits."""
    tier_of: dict[bytes, int] = field(default_factory=dict)
    fetched_by_tier: Counter[int] = field(default_factory=Counter)
    chunks: deque[LoadChunk] = field(default_factory=deque)
    is_planned: bool = False
    can_wait: bool = False
    decision: LoadOrRecompute = field(default_factory=LoadOrRecompute)
    bytes_from: np.ndarray | None = None
    """By lane and block: the bytes that come for blocks from there on."""
    deadline: float = 0.0
    loaded_from: int = 0
    computed_to: int = 0
    compute_until: int = 0
    phase: Literal["waits", "heads", "races", "jumps"] = "waits"
    head_copied: bool = False
    reservation: Reservation | None = None
    loaded: np.ndarray | None = None
    states_loaded: bool = True
    leases: list[Lease] = field(default_factory=list)
    events: list[LoadEvent | FinishedEvent] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    copy_started: float = 0.0
    bytes: int = 0
    objects: int = 0
    resume: int = 0

    @property
    def fetches(self) -> list[Fetch]:
        return [fetch for strip in self.chunks for fetch in strip.fetches]

    def copy_seconds(self, now: float) -> float:
        """Seconds that its copies took, which are made: on a device by its own clock."""
        loads = [event for event in self.events if isinstance(event, LoadEvent)]
        if not loads:
            return now - self.copy_started
        return max(load.seconds_since(loads[0]) for load in loads)

    @property
    def tenant(self) -> str:
        return self.request.control.tenant

    def record_on_request(self, tokens: int, now: float, names: list[str]) -> None:
        """Note with the request what was brought for it: of pages that came through host memory, the tiers they came from.
        `names` are the tiers', host memory's first."""
        left, request = tokens, self.request
        for number, objects in () if self.phase == "heads" else self.fetched_by_tier.items():
            share = min(left, tokens * objects // max(1, self.objects))
            if share:
                request.loads.append((names[1 + number], self.started, self.copy_started, share))
                left -= share
        if left:
            request.loads.append((names[0], self.copy_started, now, left))
        if request.cached_tokens is None or (self.phase == "jumps" and not request.preemptions):
            request.first_loads = len(request.loads)
            if request.cached_tokens is not None:  # it began with its head
                request.cached_tokens += tokens
