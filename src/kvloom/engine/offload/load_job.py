"""A load job: the pages of one request in transfer from tiers to the pool. This module contains only data. The
manager advances a job.

    LoadJob
      lookup     LoadLookup      which tier has which missing page
      transfer   TierTransfer    chunks of pages in transfer from tiers to host memory
      copy       PoolCopy        pages being copied from host memory into reserved pages of the pool
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvloom.core import LoadPlan, Reservation
from kvloom.engine.request import Request
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers import Lease, Objects
from kvloom.tiers.transfers import FetchJob, TierLookup

from .host_pages import LoadEvent, RankEvent
from .load_or_recompute import LoadOrRecompute

__all__ = ["LoadChunk", "LoadJob", "LoadLookup", "Phase", "PoolCopy", "TierTransfer"]


class Phase(Enum):
    """What a request does while its pages are in transfer."""

    WAITING = "waiting"
    """The request waits for its pages."""
    COPYING_HEAD = "copying head"
    """The request waits while its first pages are copied from host memory. This happens at most once."""
    COMPUTING = "computing"
    """The request runs. It computes the start of its prompt while the end loads."""
    RESUMING = "resuming"
    """The end of the prompt is in host memory. The request waits for the copy into the pool, and resumes after the
    loaded tokens."""


@dataclass(slots=True, eq=False)
class LoadLookup:
    """Records which tiers have the pages that a prompt needs and the pool lacks. `is_complete` is set when every
    tier has answered or is late.
    """

    plan: LoadPlan | None = None
    pending: TierLookup | None = None
    """The running lookup. None before its start and after its end."""
    tier_of: dict[bytes, int] = field(default_factory=dict)
    """Maps the key of each page that host memory lacks to the index of a tier that has the page."""
    is_complete: bool = False


@dataclass(slots=True, eq=False)
class LoadChunk:
    """A part of a load job whose pages are loaded together: all pages from token `first` to the start of the next
    chunk.

    `fetches` are the transfers that load these pages. If two jobs need the same page, one job starts the transfer,
    and both jobs wait for it. `pages_by_tier` has the number of pages that each tier loads, by the tier's index.
    """

    first: int
    objects: list[Objects]
    fetches: list[FetchJob]
    pages_by_tier: Counter[int]


@dataclass(slots=True, eq=False)
class TierTransfer:
    """Chunks in transfer from tiers to host memory. The end of the prompt is loaded first."""

    chunks: deque[LoadChunk] = field(default_factory=deque)
    """Chunks that have not arrived."""
    loaded_from: int = 0
    """Position from which host memory has all pages up to the end of the load plan."""
    pages_by_tier: Counter[int] = field(default_factory=Counter)
    """Number of pages that arrived, by index of the tier."""
    bytes_from: np.ndarray | None = None
    """[tier, block]: bytes to load from a tier for this block and all later blocks."""
    deadline: float = 0.0

    @property
    def fetches(self) -> list[FetchJob]:
        return [fetch for chunk in self.chunks for fetch in chunk.fetches]


@dataclass(slots=True, eq=False)
class PoolCopy:
    """Pages being copied from host memory into the pool. `resume` is the position at which the request could resume
    before the copy.
    """

    reservation: Reservation
    resume: int
    bytes: int
    pages: int
    started: float
    leases: list[Lease]
    loaded: np.ndarray
    """[block, column of the block table]: whether this page of the reservation is copied."""
    states_loaded: bool = True
    events: list[LoadEvent | FinishedEvent | RankEvent] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(event.query() for event in self.events)

    def seconds(self, now: float) -> float:
        """Return the seconds that the finished copies took. A single GPU measures them with its own clock. Otherwise
        the host's clock counts."""
        loads = [event for event in self.events if isinstance(event, LoadEvent)]
        if not loads:
            return now - self.started
        return max(load.seconds_since(loads[0]) for load in loads)

    def release_leases(self) -> None:
        """Release the leases, so that host memory can evict the copied pages again."""
        for lease in self.leases:
            lease.release()
        self.leases = []


@dataclass(slots=True, eq=False)
class LoadJob:
    """Loads the pages of one request from tiers: first into host memory, then into the pool.

            0 ──computed──> computed_to ···> compute_until ··· loaded_from <──loaded── plan.resume

    A job with `is_prefetch` belongs to no queued request, and ends when its pages are in host memory. `can_wait` means
    that other requests are scheduled before this one, so the request loses no time if it waits for pages.
    """

    request: Request
    is_prefetch: bool = False
    can_wait: bool = False
    phase: Phase = Phase.WAITING
    load_or_recompute: LoadOrRecompute = field(default_factory=LoadOrRecompute)
    computed_to: int = 0
    compute_until: int = 0
    """The position at which the manager decides again whether to load or recompute."""
    head_copied: bool = False
    awaited_key: bytes | None = None
    """Key of a page that the request needs and that is still being offloaded to host memory."""
    lookup: LoadLookup = field(default_factory=LoadLookup)
    transfer: TierTransfer = field(default_factory=TierTransfer)
    copy: PoolCopy | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def tenant(self) -> str:
        return self.request.control.tenant

    def record_on_request(self, copy: PoolCopy, tokens: int, now: float, tier_names: list[str]) -> None:
        """Add loaded tokens to `loads` of the request. The tokens are divided among tiers in proportion to the pages
        that each tier loaded. `tier_names` are the names of host memory and of the tiers, in this order.
        """
        left, request = tokens, self.request
        sources = () if self.phase is Phase.COPYING_HEAD else self.transfer.pages_by_tier.items()
        for tier, pages in sources:
            share = min(left, tokens * pages // max(1, copy.pages))
            if share:
                request.loads.append((tier_names[1 + tier], self.started, copy.started, share))
                left -= share
        if left:
            request.loads.append((tier_names[0], copy.started, now, left))
        if request.cached_tokens is None or (self.phase is Phase.RESUMING and not request.preemptions):
            request.first_loads = len(request.loads)
            if request.cached_tokens is not None and tokens:  # the request has already started to compute
                request.cached_tokens += tokens
                request.pool_miss = None  # the next start records where the longer hit ends
