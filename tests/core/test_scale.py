"""A large pool costs what its cached blocks need, and its operations no more than a small one's."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from kvloom.core import KVCache, PoolLayout, VirtualClock

from .world import LAYOUTS

PROMPT = 8192


def filled(blocks: int, kind: str = "full", policy: str = "adaptive") -> KVCache:
    """Return a cache full of 8,192-token prompts that share nothing; eviction has begun."""
    layout = PoolLayout.build(LAYOUTS[kind])
    clock = VirtualClock()
    slabs = 1 + int(blocks * sum(g.runs / g.pages_per_slab for g in layout.of("token")))
    cache = KVCache(layout, slabs, clock=clock, max_sequences=16, max_tokens=16384, policy=policy)
    prompt = np.arange(PROMPT, dtype=np.int32)
    for i in range(blocks * 16 // PROMPT + 2):
        prompt[0] = 100_000 + i
        seq = cache.open(cache.match(prompt))
        assert seq.extend(PROMPT) == 0
        seq.commit(prompt)
        seq.close()
        clock.advance(1)
    return cache


def bytes_per_block(blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        cache = filled(blocks)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    cached = int(cache.stats()["cached_pages"])  # type: ignore[arg-type]
    assert cached > 0.99 * blocks
    assert cache.stats()["evictions"]
    # The page tables of open sequences are bounded by max_sequences, not by the pool.
    return (used - cache.block_tables.tables.nbytes) / cached


def test_a_cached_block_takes_under_200_bytes_of_bookkeeping_in_a_pool_of_100_000() -> None:
    assert bytes_per_block(100_000) < 200


@pytest.mark.slow
def test_a_cached_block_takes_under_200_bytes_of_bookkeeping_in_a_pool_of_a_million() -> None:
    assert bytes_per_block(1_000_000) < 200


def test_a_full_pool_of_a_million_blocks_is_consistent() -> None:
    cache = filled(1_000_000, policy="lru")
    cache.check()
    prompt = np.arange(PROMPT, dtype=np.int32)
    prompt[0] = 100_000 + 1_000_000 * 16 // PROMPT + 1
    assert cache.match(prompt).resume == PROMPT - 1
    prompt[0] = 100_000
    assert cache.explain(cache.match(prompt)).reason == "evicted"


@pytest.mark.parametrize("kind", ["sliding+full", "state+full"])
def test_layouts_with_several_page_sizes_fill_a_large_pool(kind: str) -> None:
    cache = filled(20_000, kind)
    cache.check()
    assert cache.stats()["evictions"]
