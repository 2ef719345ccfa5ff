"""Inspection of a cache: counters, the integrity check and pictures. Reads only.

inspector      counters for metrics (`cache.inspect`)
check          integrity check (`cache.check`)
pool_map       the pool as a picture of bounded size
hot_prefixes   the nodes with the most hits
"""

from .check import check_integrity
from .inspector import Inspector, cache_stats
from .pool_map import PoolMap

__all__ = ["Inspector", "PoolMap", "cache_stats", "check_integrity"]
