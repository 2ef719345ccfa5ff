"""Where pages are is decided for a measurement: all stored, out of the pool, out of host memory. For benchmarks alone."""

from __future__ import annotations

import time

import numpy as np

from kvloom.engine import Engine, OffloadManager
from kvloom.tiers import Objects

__all__ = ["empty_host", "empty_pool", "stored"]


def stored(lower: OffloadManager, seconds: float = 120.0) -> None:
    """Wait until everything is in host memory and on disk."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        lower.flush()
        if not lower.is_retaining_pages and not any(lane.waiting_stores for lane in lower.transfers.lanes):
            return
        time.sleep(0.005)


def empty_pool(engine: Engine) -> None:
    """Everything cached leaves the pool."""
    engine._apply_copies()
    slabs = engine.cache.shrink(engine.cache.pool.slabs - 2)
    engine._apply_copies()
    engine.cache.grow(slabs.tolist())


def empty_host(engine: Engine, lower: OffloadManager, tokens: list[int]) -> None:
    """The prompt's pages leave host memory."""
    prospect = engine.cache.plan_load(engine.cache.match(np.array(tokens, np.int32)))
    for group in engine.layout.groups:
        for form in lower.forms[group.index]:
            lower.host.drop(Objects(prospect.hashes, group.index, form))
