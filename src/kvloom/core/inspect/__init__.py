"""Inspection of a cache: counters, the integrity check and the pool map. Does not modify the cache.

inspector      counters for metrics, and the other names of this folder (`cache.inspect`)
stats          the main counters (`cache.stats`)
check          integrity check (`cache.check`)
pool_map       the state of all pages, summarised in a limited number of cells
hot_prefixes   the nodes with the most hits
"""

from .check import check_integrity
from .inspector import Inspector
from .pool_map import PoolMap
from .stats import cache_stats

__all__ = ["Inspector", "PoolMap", "cache_stats", "check_integrity"]
