"""Offload: moves pages between the pool and the tiers. Engine and scheduler call only `OffloadManager`.

    manager.py            OffloadManager: the interface, and the phases of load jobs
    action.py             Action, Decision: what a request does next, computes or waits (returned to the scheduler)
    cold_pages.py         ColdPages: for requests longer than the pool, moves their oldest pages to host memory
    store.py              PageOffloader: offloads pages from the pool to host memory
    tier_loader.py        TierLoader: loads pages from tiers into host memory
    pool_loader.py        PoolLoader: copies pages from host memory into the pool
    load_job.py           LoadJob: the pages of one request in transfer (only data)
    load_or_recompute.py  LoadOrRecompute: how far a request computes while its pages load
    time_model.py         TimeModel: estimates seconds from a number of tokens or bytes
    saved_state.py        SavedState: keeps measured speeds and what the eviction policy learned in the folder of a
                          disk tier, for the next start
    host_pages.py         HostPages: copies between pool and host memory, on separate streams of a GPU
    unit_copies.py        UnitCopies: copies of pages for workers with another block size
    image_store.py        ImageStore: embeddings of images in tiers
    open_tiers.py         open_offload, opened_tiers: opens configured tiers
    hand_over.py          HandOver: pulls the pages that a prefill worker computes
    session_history.py    SessionHistory: tokens of past sessions, for prefetches
    stats.py              OffloadStats: counters

The figure shows the life of a load job. Words in capitals are values of `Phase`: what the request does during the job.
The head of a prompt is its start, and the tail is its end. A chunk is a group of pages that are loaded together:

    prefetch, before_admission
        │
        v
    lookup in tiers ──> chunks in transfer to host memory ──> copy into reserved pages ──> published in the prefix cache
        │                     │              │                       ^                            │
        │ no page             │ WAITING      │ COMPUTING: the        │ RESUMING: the tail is      v
        v                     │ (and once    │ request computes      │ there; the request    the job ends,
    the job ends              │ COPYING_HEAD)│ its head meanwhile ───┘ is queued again       the request resumes

If a page is late, missing or damaged, or if the pool has no free pages, the job ends early. The request computes the
remaining tokens.

The next figure shows the life of an offload:

    sequence closed, page evicted ──> batch queued ──flush──> copy to host memory ──poll──> done ──> queues of the other tiers
                                                              (page retained, or later
                                                              steps wait on the device)
"""

from kvloom.engine.config import OffloadConfig

from .action import Action, Decision
from .cold_pages import MAX_HOST_SHARE, ColdPages, ColdStart
from .host_pages import Event, HostPages, Ids, LoadEvent, RankCopies, form_of, open_host, pin_memory
from .load_job import LoadJob, Phase, PoolCopy
from .load_or_recompute import Estimates, LoadOrRecompute, Progress
from .manager import OffloadManager
from .open_tiers import open_offload, opened_tiers
from .session_history import SessionHistory
from .stats import OffloadStats
from .store import PageOffloader
from .time_model import TimeModel

__all__ = [
    "MAX_HOST_SHARE",
    "Action",
    "ColdPages",
    "ColdStart",
    "Decision",
    "Estimates",
    "Event",
    "HostPages",
    "Ids",
    "LoadEvent",
    "LoadJob",
    "LoadOrRecompute",
    "OffloadConfig",
    "OffloadManager",
    "OffloadStats",
    "PageOffloader",
    "Phase",
    "PoolCopy",
    "Progress",
    "RankCopies",
    "SessionHistory",
    "TimeModel",
    "form_of",
    "open_host",
    "open_offload",
    "opened_tiers",
    "pin_memory",
]
