"""Divides one memory budget between the pools of several models. Busy models use the memory of idle models.

    every PERIOD:   loads of all models ──▶ plan ──▶ shrink some pools, wait for their answers ──▶ grow full pools

A pool grows only by bytes that no pool has, so the sum never exceeds the budget. `plan_pools` decides which pools grow
and which pools shrink.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from .engine_client import EngineClient
from .messages import EngineStats, PoolState

__all__ = ["PoolBroker", "PoolLoad", "plan_pools"]

PERIOD = 0.05
"""Seconds between two rounds (calls of `balance`). An engine that lacks pages sends its stats at the same interval."""
BUSY_SECONDS = 0.5
"""A model is idle after this many seconds without a request. A busy engine sends stats every 0.25 s, so two messages
fit into this time.
"""
ANSWER_SECONDS = 0.5
"""Longest time in seconds that a round waits for pools to shrink. Memory that is freed later is used in the next round.
"""

GROWTH = 0.5
"""A full pool grows by this fraction of its size at a time."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The state of one model's pool. `is_busy` is True if the model has had running or waiting requests recently.
    `is_full` is True if the pool evicted pages recently, or if requests wait for pages.
    """

    pool_bytes: int
    free_bytes: int
    min_bytes: int
    max_bytes: int
    slab_bytes: int
    is_busy: bool
    is_full: bool


def plan_pools(loads: Mapping[str, PoolLoad], budget: int) -> dict[str, int]:
    """Return the new sizes of the pools that change, in bytes. The sum of all sizes stays within `budget`.

    A pool grows if it is full and its model is busy. The equal share of a pool is `budget` divided by the
    number of pools. Growing pools get bytes from these sources, in this order:

    1. bytes of `budget` that no pool has
    2. bytes of pools whose model is idle, down to the smallest size of the pool
    3. free bytes of pools whose model is busy, if the pool is not full
    4. bytes of pools above their equal share, down to this share, even if their model is busy. This source is
       used only while a full pool of a busy model is below its equal share. Meanwhile, no pool above its equal
       share grows.

    A pool may shrink by less than planned. Let other pools grow only after it has shrunk.
    """
    takers = {name: load for name, load in loads.items() if load.is_full and load.is_busy}
    if not takers:
        return {}
    sizes = {name: load.pool_bytes for name, load in loads.items()}
    share = budget // len(loads)
    has_poor = any(sizes[name] < share for name in takers)
    rich = [name for name, load in loads.items() if has_poor and load.is_busy and sizes[name] > share]
    wanted = {name: _growth(load, share) for name, load in takers.items() if name not in rich}
    missing = sum(wanted.values()) - max(0, budget - sum(sizes.values()))
    least = {name: load.min_bytes for name, load in loads.items()}
    idle = [name for name, load in loads.items() if not load.is_busy]
    busy = [name for name, load in loads.items() if load.is_busy and name not in takers]
    unused = {name: max(least[name], sizes[name] - loads[name].free_bytes) for name in busy}
    shares = {name: max(least[name], share) for name in rich}
    for givers, limits in ((idle, least), (busy, unused), (rich, shares)):
        for name in sorted(givers, key=lambda one: -loads[one].free_bytes):
            gives = min(max(0, missing), max(0, sizes[name] - limits[name]))
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


def _growth(load: PoolLoad, share: int) -> int:
    """Return the number of bytes by which a full pool should grow. Below its equal share, the pool grows to this
    share at once. Above the share, the pool grows in steps."""
    wanted = max(load.slab_bytes, int(load.pool_bytes * GROWTH), share - load.pool_bytes)
    return min(load.max_bytes - load.pool_bytes, wanted)


@dataclass(slots=True)
class _Activity:
    """The counters of an engine at the last round (call of `balance`), and the last time when the engine was busy
    (`busy_at`). A change of `steps` between two rounds shows that requests have run, even if no request runs now.
    """

    steps: int = 0
    evictions: int = 0
    preemptions: int = 0
    busy_at: float = -math.inf

    def observe(self, stats: EngineStats, has_open: bool, now: float) -> tuple[bool, bool]:
        """Return whether the engine was busy within BUSY_SECONDS, and whether it lacked pages since the last round."""
        lacks_pages = stats.waiting > 0 and (not stats.free_slabs or not stats.running)
        lacks_pages = lacks_pages or stats.needs_growth
        is_full = stats.evictions > self.evictions or stats.preemptions > self.preemptions or lacks_pages
        if has_open or stats.running or stats.waiting or stats.steps != self.steps:
            self.busy_at = now
        self.steps, self.evictions, self.preemptions = stats.steps, stats.evictions, stats.preemptions
        return now - self.busy_at < BUSY_SECONDS, is_full


class PoolBroker:
    """Resizes the pools of several engines by their load, so that all pools together have at most `budget` bytes.
    `engines` returns the engines by name.
    """

    def __init__(self, budget: int, engines: Callable[[], Mapping[str, EngineClient]]) -> None:
        self.budget, self._engines = budget, engines
        self._unanswered: dict[
            EngineClient, int
        ] = {}  # new size in bytes of each pool whose engine has not answered a resize yet
        self._activity: dict[EngineClient, _Activity] = {}
        self._reserved = 0  # bytes for a model that is about to start

    async def run(self) -> None:
        """Balance the pools every PERIOD until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            await self.balance()

    async def balance(self) -> None:
        """Run one round: shrink pools, wait for their answers, then grow other pools by the bytes that became free."""
        engines = self._engines()
        self._send_shares(engines)
        self._activity = {engine: self._activity.get(engine, _Activity()) for engine in engines.values()}
        loads = {name: self._load(engine) for name, engine in engines.items()}
        planned = plan_pools(loads, self.budget - self._reserved)
        grow = {name: size for name, size in planned.items() if size > loads[name].pool_bytes}
        shrinks = [self._resize(engines[name], size) for name, size in planned.items() if name not in grow]
        if shrinks:
            await asyncio.wait(shrinks, timeout=ANSWER_SECONDS)
        for name, size in grow.items():
            now = self._size(engines[name])
            size = min(size, now + max(0, self.free_bytes))
            if size - now >= loads[name].slab_bytes and engines[name].is_ready:
                self._resize(engines[name], size)

    @property
    def free_bytes(self) -> int:
        """Return the number of bytes of the budget that are neither in a pool nor reserved. The number is negative
        while pools must still shrink to free the reserved bytes."""
        return self.budget - self._reserved - sum(self._size(engine) for engine in self._engines().values())

    async def reserve(self, seconds: float) -> int:
        """Reserve the equal share of one more model. Shrinks other pools until the share is free, and returns the
        share in bytes. Call `release` when the model has a pool.

        Raises TimeoutError if requests use the memory for longer than `seconds`.
        """
        engines = self._engines()
        share = self.budget // (len(engines) + 1)
        self._reserved = share
        try:
            async with asyncio.timeout(seconds):
                while self.free_bytes < 0:
                    for engine in engines.values():
                        if engine.is_ready and self._size(engine) > share and engine not in self._unanswered:
                            self._resize(engine, share)
                    await asyncio.sleep(PERIOD)
        except BaseException:
            self._reserved = 0
            raise
        return share

    def release(self) -> None:
        """End the reservation that `reserve` made."""
        self._reserved = 0

    def _send_shares(self, engines: Mapping[str, EngineClient]) -> None:
        """If the number of models has changed, send the new equal share to the engines."""
        share = self.budget // max(1, len(engines))
        for engine in engines.values():
            if engine.start.share_bytes != share:
                engine.start = msgspec.structs.replace(engine.start, share_bytes=share)
                if engine.is_ready and engine not in self._unanswered:
                    self._resize(engine, self._size(engine))

    def _resize(self, engine: EngineClient, size: int) -> asyncio.Task[PoolState]:
        """Make an engine resize its pool to `size` bytes, and return the task that waits for the answer. Until the
        engine has answered, `_size` returns the larger of the old and the new size.
        """
        self._unanswered[engine] = size
        task = asyncio.create_task(engine.resize_pool(size, None))
        task.add_done_callback(partial(self._answered, engine))
        return task

    def _answered(self, engine: EngineClient, task: asyncio.Task[PoolState]) -> None:
        self._unanswered.pop(engine, None)
        if not task.cancelled():
            task.exception()  # the engine died: it restarts with its last size

    def _size(self, engine: EngineClient) -> int:
        """Return the largest size that an engine's pool may have at this moment."""
        known = engine.start.settings["pool_bytes"] if engine.info is None else engine.info.pool_bytes
        return max(int(known), self._unanswered.get(engine, 0))

    def _load(self, engine: EngineClient) -> PoolLoad:
        size, info, stats = self._size(engine), engine.info, engine.stats
        if info is None or info.pool_limits is None or not engine.is_ready or engine in self._unanswered:
            return PoolLoad(size, 0, size, size, 1, is_busy=False, is_full=False)
        is_busy, is_full = self._activity[engine].observe(stats, engine.has_open, time.monotonic())
        free = stats.free_slabs * info.slab_bytes
        least, most = info.pool_limits
        return PoolLoad(size, free, min(least, size), max(most, size), info.slab_bytes, is_busy, is_full)
