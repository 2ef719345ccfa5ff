"""Where pages are is decided for a measurement: all stored, out of the pool, out of host memory. For benchmarks alone."""

from __future__ import annotations

import time

import numpy as np

from kvloom.engine.engine import Engine
from kvloom.engine.lower import Lower
from kvloom.tiers import Objects

__all__ = ["empty_host", "empty_pool", "stored"]


def stored(lower: Lower, seconds: float = 120.0) -> None:
    """Wait until everything is in host memory and on disk."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        lower.take_offers()
        if not lower.holding and not any(lane.waiting_stores for lane in lower.mover.lanes):
            return
        time.sleep(0.005)


def empty_pool(engine: Engine) -> None:
    """Everything cached leaves the pool."""
    engine._copy()
    slabs = engine.cache.shrink(engine.cache.pool.slabs - 2)
    engine._copy()
    engine.cache.grow(slabs.tolist())


def empty_host(engine: Engine, lower: Lower, tokens: list[int]) -> None:
    """The prompt's pages leave host memory."""
    prospect = engine.cache.prospect(engine.cache.match(np.array(tokens, np.int32)))
    for group in engine.layout.groups:
        for form in lower.forms[group.index]:
            lower.host.drop(Objects(prospect.names, group.index, form))
