"""Divides one memory budget between the pools of several models: an idle model's memory serves the busy ones.

    every PERIOD:   loads of all models ──▶ plan ──▶ shrink the givers, wait for their answers ──▶ grow the takers

A pool grows only by bytes that no pool has, so the sum never exceeds the budget. A pool under pressure takes, in this order: unassigned
bytes, bytes of idle models, bytes of models above their equal share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PoolLoad", "plan_pools"]

GROWTH = 0.5
"""Share of its size by which a pool under pressure grows at once."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One model's pool. `is_busy`: it has running or waiting requests. `is_full`: it evicted pages or requests wait for room."""

    pool_bytes: int
    free_bytes: int
    min_bytes: int
    max_bytes: int
    slab_bytes: int
    is_busy: bool
    is_full: bool


def plan_pools(loads: Mapping[str, PoolLoad], budget: int) -> dict[str, int]:
    """Return new sizes of pools that change. Givers may give less; takers must wait for what givers gave.

    Unused bytes of an idle model are taken first, then its cached pages. The sum of all sizes stays within `budget`."""
    takers = {name: load for name, load in loads.items() if load.is_full and load.is_busy}
    if not takers:
        return {}
    sizes = {name: load.pool_bytes for name, load in loads.items()}
    share = budget // len(loads)
    has_poor = any(sizes[name] < share for name in takers)
    rich = [name for name in takers if has_poor and sizes[name] > share]
    wanted = {name: _growth(load) for name, load in takers.items() if name not in rich}
    missing = sum(wanted.values()) - max(0, budget - sum(sizes.values()))
    least = {name: load.min_bytes for name, load in loads.items()}
    least |= dict.fromkeys(rich, share)
    idle = [name for name, load in loads.items() if not load.is_busy]
    busy = [name for name, load in loads.items() if load.is_busy and name not in takers]
    least |= {name: max(least[name], sizes[name] - loads[name].free_bytes) for name in busy}
    for givers in (idle, busy, rich):
        for name in sorted(givers, key=lambda one: -loads[one].free_bytes):
            gives = min(max(0, missing), max(0, sizes[name] - least[name]))
            sizes[name] -= gives
            missing -= gives
    left = max(0, budget - sum(sizes.values()))
    for name in sorted(wanted, key=lambda one: sizes[one]):
        takes = min(wanted[name], left)
        sizes[name] += takes
        left -= takes
    return {
        name: size
        for name, size in sizes.items()
        if abs(size - loads[name].pool_bytes) >= loads[name].slab_bytes
    }


def _growth(load: PoolLoad) -> int:
    """Return the bytes by which a full pool wants to grow."""
    return min(load.max_bytes - load.pool_bytes, max(load.slab_bytes, int(load.pool_bytes * GROWTH)))
