"""Brings pages to the locations that a benchmark needs: into all tiers, out of the pool, or out of host memory."""

from __future__ import annotations

import time

import numpy as np

from kvloom.engine import Engine, OffloadManager
from kvloom.tiers import Objects

__all__ = ["evict_host", "evict_pool", "wait_until_stored"]


def wait_until_stored(offload: OffloadManager, seconds: float = 120.0) -> None:
    """Wait until all pages are in host memory and on disk."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        offload.flush()
        if not offload.is_retaining_pages and not any(
            lane.pending_store_bytes for lane in offload.transfers.queues
        ):
            return
        time.sleep(0.005)


def evict_pool(engine: Engine) -> None:
    """Evict all cached pages from the pool."""
    engine.apply_copies()
    slabs = engine.cache.shrink(engine.cache.usable_slabs - 1)
    engine.apply_copies()
    engine.cache.grow(slabs.tolist())


def evict_host(engine: Engine, offload: OffloadManager, tokens: list[int]) -> None:
    """Evict a prompt's pages from host memory."""
    plan = engine.cache.loading.plan(engine.cache.match(np.array(tokens, np.int32)))
    for group in engine.layout.groups:
        for form in offload.forms[group.index]:
            offload.host.drop(Objects(plan.hashes, group.index, form))
