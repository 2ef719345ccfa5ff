"""The main counters of a cache (`cache.stats`)."""

from __future__ import annotations

from kvloom.core.state import CacheState

__all__ = ["cache_stats"]


def cache_stats(state: CacheState) -> dict[str, float | int | dict[str, int]]:
    """Return the counters of the pool, the tree and lookups. O(size classes)."""
    classes = state.pool.classes
    return {
        "slabs": state.pool.slabs - 1,
        "reserved_slabs": state.pool.reserved - 1,
        "free_slabs": state.pool.free_slabs,
        "in_use_pages": sum(c.in_use_pages for c in classes),
        "cached_pages": sum(c.cached_pages for c in classes),
        "free_pages_in_occupied_slabs": sum(c.free_pages for c in classes),
        "nodes": state.tree.nodes,
        "looked_up_tokens": state.counts.looked_up_tokens,
        "hit_tokens": state.counts.hit_tokens,
        "evictions": state.allocator.evictions,
        "evicted_bytes": state.allocator.evicted_bytes,
        "moved_pages": state.compaction.moved_pages,
        "miss_reasons": dict(state.counts.misses),
    }
