"""The size of an elastic pool. While requests run, slabs are mapped or unmapped until the pool has its target size.

    target ── by `Engine.resize_pool`, or by PoolRule ──▶ PoolSize.approach(), between steps ──▶ slabs mapped or unmapped

Growing takes milliseconds. Shrinking evicts cached pages, compacts the pool, and waits for the device. Slabs with
pages in use are removed later, after requests have finished. No running request is preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvloom.core import KVCache
from kvloom.kernels.memory import ElasticBuffer

__all__ = ["PoolRule", "PoolSize", "free_device_bytes"]

RETRY_SECONDS = 0.1
"""Pause in seconds between two attempts to shrink a pool, if pages in use prevent the target size."""


class PoolSize:
    """Changes the size of an elastic pool. Maps device memory for new slabs, and unmaps the memory of removed slabs.

    Before slabs are removed, their pages are moved to other slabs. The cache only queues these copies. `apply_copies`,
    a function of the caller, runs them."""

    def __init__(
        self, cache: KVCache, memory: ElasticBuffer, apply_copies: Callable[[], None], min_bytes: int
    ) -> None:
        self._cache, self._memory, self._apply_copies = cache, memory, apply_copies
        self._slab = cache.layout.slab_bytes
        self.least = max(1, min_bytes // self._slab)
        """Smallest number of usable slabs. The pool does not shrink below it."""
        self.most = memory.slabs - 1
        """Largest number of usable slabs, limited by the reserved addresses."""
        self.target = cache.usable_slabs
        """Target number of usable slabs."""
        self._next_attempt = 0.0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the usable slabs."""
        return self._cache.usable_slabs * self._slab

    @property
    def is_reached(self) -> bool:
        """Whether the pool has its target size."""
        return self.target == self._cache.usable_slabs

    def set_target(self, pool_bytes: int) -> None:
        """Set the target size, limited to the allowed sizes. The pool changes only when `approach` is called."""
        self.target = min(self.most, max(self.least, pool_bytes // self._slab))
        self._next_attempt = 0.0

    def approach(self) -> None:
        """Grow or shrink the pool towards the target. Call this method between steps. Does nothing once the target is
        reached."""
        missing = self.target - self._cache.usable_slabs
        if not missing or time.monotonic() < self._next_attempt:
            return
        if missing > 0:
            self._grow(missing)
        else:
            self._shrink(-missing)
        self._next_attempt = 0.0 if self.is_reached else time.monotonic() + RETRY_SECONDS

    def _grow(self, slabs: int) -> None:
        """Add slabs. If the device lacks memory, the target is lowered to the size that fits."""
        while slabs:
            unbacked = self._cache.unbacked_slabs(slabs)
            try:
                self._memory.map(unbacked)
            except MemoryError:
                slabs //= 2
                continue
            self._cache.grow(unbacked)
            break
        self.target = self._cache.usable_slabs

    def _shrink(self, slabs: int) -> None:
        self._apply_copies()
        removed = self._cache.shrink(slabs)
        self._apply_copies()  # moves the pages of removed slabs before their memory is unmapped
        self._memory.unmap(removed)


@dataclass(slots=True)
class PoolRule:
    """Chooses the size of a pool. If running requests evict pages, the pool grows by the fraction `GROWTH`. The pool
    shrinks if it is idle, or if other processes need memory. `keep_free` bytes of device memory stay free for other
    processes. After `idle_seconds` without a request, slabs without pages are unmapped, down to `start_bytes`."""

    start_bytes: int
    keep_free: int
    idle_seconds: float
    reason: str = "no change was necessary"
    """Why the last change of the size was decided."""
    _evictions: int = 0
    _busy_at: float | None = None
    _next: float = 0.0

    PERIOD = 0.25
    GROWTH = 0.25

    def decide(
        self,
        now: float,
        pool_bytes: int,
        free_pool_bytes: int,
        evictions: int,
        is_busy: bool,
        free_device: Callable[[], int],
    ) -> int | None:
        """Return the new size of the pool in bytes, or None for no change. Decides at most once per PERIOD seconds.
        `free_pool_bytes` are the bytes of slabs without pages. `evictions` counts all evictions so far.
        `free_device()` returns the bytes of device memory that no process uses."""
        if is_busy or self._busy_at is None:
            self._busy_at = now
        if now < self._next:
            return None
        self._next = now + self.PERIOD
        evicted, self._evictions = evictions - self._evictions, evictions
        spare = free_device() - self.keep_free
        if spare < 0:
            self.reason = f"less than {self.keep_free:,} bytes of device memory were free for other processes"
            return pool_bytes + spare
        if evicted and is_busy and spare:
            self.reason = f"running requests evicted {evicted:,} entries in {self.PERIOD} s"
            return pool_bytes + min(spare, int(pool_bytes * self.GROWTH) + 1)
        if now - self._busy_at >= self.idle_seconds and pool_bytes > self.start_bytes and free_pool_bytes:
            self.reason = f"no request arrived for {self.idle_seconds:g} s"
            return max(self.start_bytes, pool_bytes - free_pool_bytes)
        return None


def free_device_bytes(device: torch.device) -> int:
    """Return the device memory that no process uses. For a CPU, return the memory that is available without
    swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # unknown, so there is no limit
