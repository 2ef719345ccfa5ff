"""Inspector: counters and the pool map of a cache, for metrics and dashboards. Does not modify the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvloom.core.eviction.adaptive import Adaptive
from kvloom.core.eviction.tenants import Account
from kvloom.core.histogram import Histogram
from kvloom.core.pool.page_pool import SizeClass
from kvloom.core.prefix.pins import Pin
from kvloom.core.state import CacheState

from .pool_map import PoolMap

__all__ = ["Inspector"]


class Inspector:
    """Read access to the counters of one cache."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    @property
    def size_classes(self) -> tuple[SizeClass, ...]:
        """The size classes of the pool, with their page counts. Do not modify them."""
        return self._state.pool.classes

    @property
    def accounts(self) -> Mapping[str, Account]:
        """The accounts by tenant name. Do not modify them."""
        return self._state.accounts.accounts

    @property
    def nodes(self) -> int:
        """Number of nodes in the radix tree."""
        return self._state.tree.nodes

    @property
    def looked_up_tokens(self) -> int:
        """Number of prompt tokens of all opened sequences."""
        return self._state.counts.looked_up_tokens

    @property
    def hit_tokens(self) -> int:
        """Number of prompt tokens that were hit."""
        return self._state.counts.hit_tokens

    @property
    def moved_pages(self) -> int:
        """Number of pages that compaction has moved."""
        return self._state.compaction.moved_pages

    @property
    def cached_pages(self) -> int:
        """Number of pages that are cached and not in use."""
        return sum(c.cached_pages for c in self._state.pool.classes)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of pages in use."""
        classes = self._state.pool.classes
        return sum(c.in_use_pages * (self._state.layout.slab_bytes // c.per_slab) for c in classes)

    @property
    def misses(self) -> Counter[str]:
        """Number of opened sequences by miss reason."""
        return Counter(self._state.counts.misses)

    @property
    def evicted(self) -> Counter[str]:
        """Number of evictions by kind: blocks, window, snapshot, media."""
        return Counter(self._state.allocator.evicted)

    @property
    def evicted_bytes(self) -> int:
        """Number of bytes evicted so far."""
        return self._state.allocator.evicted_bytes

    @property
    def idle_seconds(self) -> Histogram:
        """Histogram of the seconds between the last use of an entry and its eviction."""
        return self._state.allocator.idle_seconds

    @property
    def reuse_seconds(self) -> Histogram:
        """Histogram of the seconds between a hit and the previous use of the same prefix."""
        return self._state.counts.reuse_seconds

    @property
    def policy(self) -> dict[str, float]:
        """The comparison of the adaptive policy with LRU. Empty for other policies.

        | key                | meaning                                                                     |
        |--------------------|-----------------------------------------------------------------------------|
        | `is_off`           | 1 while the policy evicts like LRU, because it lost hits against LRU        |
        | `times_off`        | how many times the policy was switched off                                  |
        | `gained_tokens`    | tokens that were hit, and would not have been hit under LRU                 |
        | `lost_tokens`      | tokens that were not hit, and would have been hit under LRU (an estimate)   |
        | `compared_tokens`  | prompt tokens looked up since the pool was first full                       |
        """
        policy = self._state.accounts.policy
        if not isinstance(policy, Adaptive):
            return {}
        shadow = policy.shadow
        return {
            "is_off": float(shadow.is_off),
            "times_off": shadow.times_off,
            "gained_tokens": shadow.gained_tokens,
            "lost_tokens": shadow.lost_tokens,
            "compared_tokens": shadow.looked_up_tokens,
        }

    def hit_pages(self) -> dict[str, int]:
        """Return the number of pages hit so far, by group name. O(groups)."""
        return self._state.counts.hit_pages()

    def unused_tokens(self) -> int:
        """Number of tokens that open sequences have reserved but not computed. O(max_sequences) in numpy."""
        tables = self._state.block_tables
        return int(tables.blocks.sum()) * self._state.block_tokens - int(tables.length.sum())

    def pins(self) -> list[Pin]:
        """Return the active pins."""
        return self._state.pins.pins()

    def pool_map(self, cells: int = 4096, branches: int = 200) -> PoolMap:
        """Return an object that makes maps of the pool. A map has at most `cells` cells (ranges of slabs), and at most
        `branches` nodes of the radix tree."""
        return PoolMap(self._state, cells, branches)
