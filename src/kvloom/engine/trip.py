"""One request's pages on their way up: what is looked for, fetched, copied, and how far that has come. Data."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvloom.core import Arrival, Prospect
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers import Lease, Objects
from kvloom.tiers.mover import Fetch, Finding

from .arena import Loading
from .pace import Pace
from .request import Request

__all__ = ["Strip", "Trip"]


@dataclass(slots=True, eq=False)
class Strip:
    """Pages on their way into host memory that are of use together: all of a trip's from token `first` up to the strip before
    it. `lanes` counts which of them come from where; `fetches` bring them, others' among them."""

    first: int
    objects: list[Objects]
    fetches: list[Fetch]
    lanes: Counter[int]


@dataclass(slots=True, eq=False)
class Trip:
    """A request's pages on their way; a `hint` is of one that has not come yet, and ends in host memory. `below`: which lane has
    what is not in host memory, `fetched` how many of the needed came from each. `strips` come one after the other, the end of
    the prompt first: from token `low` on all has come. Meanwhile the request `waits`, or `races`: it computes from its `front`,
    up to `stop`, and `jumps` when it meets what has come, to go on behind it. What host memory has of its head is copied first,
    once (it `heads`, and is `headed` then). One that is `patient` has others to wait for."""

    request: Request
    hint: bool = False
    prospect: Prospect | None = None
    finding: Finding | None = None
    due: bytes | None = None
    """The key of a page that is on its way from the pool to host memory, for which it waits."""
    below: dict[bytes, int] = field(default_factory=dict)
    fetched: Counter[int] = field(default_factory=Counter)
    strips: deque[Strip] = field(default_factory=deque)
    found: bool = False
    patient: bool = False
    pace: Pace = field(default_factory=Pace)
    behind: np.ndarray | None = None
    """By lane and block: the bytes that come for blocks from there on."""
    deadline: float = 0.0
    low: int = 0
    front: int = 0
    stop: int = 0
    phase: Literal["waits", "heads", "races", "jumps"] = "waits"
    headed: bool = False
    arrival: Arrival | None = None
    came: np.ndarray | None = None
    states_came: bool = True
    leases: list[Lease] = field(default_factory=list)
    events: list[Loading | FinishedEvent] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    copied: float = 0.0
    bytes: int = 0
    objects: int = 0
    resume: int = 0

    @property
    def fetches(self) -> list[Fetch]:
        return [fetch for strip in self.strips for fetch in strip.fetches]

    def copying(self, now: float) -> float:
        """Seconds that its copies took, which are made: on a device by its own clock."""
        loads = [event for event in self.events if isinstance(event, Loading)]
        if not loads:
            return now - self.copied
        return max(load.seconds_since(loads[0]) for load in loads)

    @property
    def tenant(self) -> str:
        return self.request.control.tenant

    def tell(self, tokens: int, now: float, names: list[str]) -> None:
        """Note with the request what was brought for it: of pages that came through host memory, the tiers they came from.
        `names` are the tiers', host memory's first."""
        left, request = tokens, self.request
        for number, objects in () if self.phase == "heads" else self.fetched.items():
            share = min(left, tokens * objects // max(1, self.objects))
            if share:
                request.loads.append((names[1 + number], self.began, self.copied, share))
                left -= share
        if left:
            request.loads.append((names[0], self.copied, now, left))
        if request.cached_tokens is None or (self.phase == "jumps" and not request.preemptions):
            request.first_loads = len(request.loads)
            if request.cached_tokens is not None:  # it began with its head
                request.cached_tokens += tokens
