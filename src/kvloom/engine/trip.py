"""One request's pages on their way up: what is looked for, fetched, copied, and how far that has come. Data."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvloom.core import Arrival, Prospect
from kvloom.tiers import Lease
from kvloom.tiers.mover import Fetch, Finding

from .arena import Event
from .request import Request

__all__ = ["Trip"]


@dataclass(slots=True, eq=False)
class Trip:
    """A request's pages on their way; a `hint` is of one that has not come yet, and ends in host memory. `below`: which lane has what is not in host memory, `fetched` how many of the needed
    came from each. Where `first` is set the request
    computes meanwhile, and only what comes from that token on is on its way: the two meet; one that is `patient` has others to
    wait for anyway, and loads all."""

    request: Request
    hint: bool = False
    prospect: Prospect | None = None
    finding: Finding | None = None
    below: dict[bytes, int] = field(default_factory=dict)
    fetched: Counter[int] = field(default_factory=Counter)
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
