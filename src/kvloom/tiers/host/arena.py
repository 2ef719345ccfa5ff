"""Host memory in slabs, each cut into pages of one size. A page never moves.

    |slab 0: 64 KiB pages|slab 1: 2 MiB pages|slab 2: free|…

While the arena fills, pages are allocated in ascending order, so the pages of a batch form a few long ranges. Long
ranges are fast to copy. This module does not depend on objects or eviction. It is not thread-safe. The lock of the host
tier guards it.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Arena", "copy_pages"]

_MIN_SHARED_BYTES = 4 << 20  # for smaller batches a second thread is not worth its cost
_PIECE_BYTES = 1 << 20
_MAX_WAIT_RATIO, _PAUSE_SECONDS = 0.25, 2.0


class Arena:
    """Allocates pages in `buffer`, which is memory of the caller, for example pinned memory. Without a buffer the
    arena maps memory, which the system allocates on first use.
    """

    def __init__(self, capacity: int, slab_bytes: int, buffer: Any = None) -> None:
        if slab_bytes <= 0 or slab_bytes % mmap.PAGESIZE:
            raise ValueError(f"slab_bytes={slab_bytes} is not a multiple of {mmap.PAGESIZE}")
        if capacity < slab_bytes:
            raise ValueError(f"capacity={capacity} bytes is less than one slab of {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.slabs = capacity // slab_bytes
        size = self.slabs * slab_bytes
        if buffer is None:
            try:
                buffer = mmap.mmap(-1, size)
            except OSError as error:
                raise ValueError(
                    f"the system cannot map {size:,} bytes of host memory ({error.strerror}): use a smaller capacity"
                ) from error
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # the kernel has no huge pages
                    buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer).cast("B")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.view, np.uint8)
        if len(self.bytes) < size or not self.bytes.flags.writeable:
            raise ValueError(f"the buffer must be writable and have {size} bytes; it has {len(self.bytes)}")
        self._free_slabs = list(range(self.slabs))  # a heap: the lowest slab first, so that ranges are long
        self._partial: dict[int, dict[int, None]] = {}  # page size -> slabs of this size with free pages
        self._free_pages: list[list[int]] = [[] for _ in range(self.slabs)]  # free pages by slab
        self._size = [0] * self.slabs  # page size by slab, 0 for a free slab
        self._used = [0] * self.slabs  # pages in use by slab

    def fits(self, page_bytes: int) -> bool:
        return page_bytes <= self.slab_bytes

    def allocate(self, page_bytes: int, count: int) -> list[int]:
        """Return the offsets of up to `count` free pages. Return fewer if the arena is full."""
        partial = self._partial.setdefault(page_bytes, {})
        taken: list[int] = []
        while len(taken) < count:
            if not partial:
                if not self._free_slabs:
                    break
                slab = heapq.heappop(self._free_slabs)
                self._size[slab] = page_bytes
                base = slab * self.slab_bytes
                pages = range(base, base + self.slab_bytes - page_bytes + 1, page_bytes)
                if len(pages) <= count - len(taken):  # take all free pages of the slab at once
                    self._used[slab] = len(pages)
                    taken += pages
                    continue
                self._free_pages[slab] = list(reversed(pages))
                partial[slab] = None
            slab = next(iter(partial))
            free = self._free_pages[slab]
            some = free[: -(count - len(taken)) - 1 : -1]
            del free[len(free) - len(some) :]
            if not free:
                del partial[slab]
            self._used[slab] += len(some)
            taken += some
        return taken

    def free(self, page_bytes: int, offset: int) -> None:
        """Free a page. When all pages of a slab are free, the slab can be cut into pages of another size."""
        slab = offset // self.slab_bytes
        self._used[slab] -= 1
        if self._used[slab]:
            self._free_pages[slab].append(offset)
            self._partial[page_bytes][slab] = None
        else:
            self._partial[page_bytes].pop(slab, None)
            self._free_pages[slab] = []
            self._size[slab] = 0
            heapq.heappush(self._free_slabs, slab)

    def slab_pages(self, offset: int) -> range:
        """Return the offsets of all pages in the slab of an allocated page."""
        slab = offset // self.slab_bytes
        base, size = slab * self.slab_bytes, self._size[slab]
        return range(base, base + self.slab_bytes - size + 1, size)

    def used_bytes(self) -> int:
        return sum(size * used for size, used in zip(self._size, self._used, strict=True))


def copy_pages(
    target: npt.NDArray[np.uint8],
    to: npt.NDArray[np.int64],
    source: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    size: int,
) -> None:
    """Copy `size` bytes from each offset in `at` (in `source`) to the matching offset in `to` (in `target`).
    Ranges that are contiguous on both sides are copied in one call.

    A second thread copies a part of a large batch if a core is free, because one core does not saturate memory
    bandwidth.
    """
    if not len(to):
        return
    breaks = np.flatnonzero((np.diff(to) != size) | (np.diff(at) != size)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    to_list, at_list = to.tolist(), at.tolist()
    runs = [(to_list[first], at_list[first], (last - first) * size) for first, last in pairwise(edges)]
    shared = len(to) * size >= _MIN_SHARED_BYTES and _cores() > 1
    pieces = deque(_split(runs) if shared else runs)
    with _helper.sharing(target, source, pieces) if shared else contextlib.nullcontext():
        _copy(target, source, pieces.popleft, pieces)


_CopyRange = tuple[int, int, int]  # to, at, bytes


def _split(runs: list[_CopyRange]) -> Iterator[_CopyRange]:
    for start, begin, length in runs:
        for at in range(0, length, _PIECE_BYTES):
            yield start + at, begin + at, min(_PIECE_BYTES, length - at)


def _copy(
    target: npt.NDArray[np.uint8],
    source: npt.NDArray[np.uint8],
    take: Callable[[], _CopyRange],
    pieces: deque[_CopyRange],
) -> None:
    """Copy ranges until no range is left. `take` removes the next range from `pieces`. Another thread may take
    ranges from the same list."""
    with contextlib.suppress(IndexError):
        while pieces:
            start, begin, length = take()
            target[start : start + length] = source[begin : begin + length]


class _CopyHelper:
    """A thread that helps a caller to copy ranges. The helper takes ranges from the end of the caller's list. If the
    helper is busy with another caller, the caller copies alone.

    At the end, the caller waits only for the range that the helper is copying. If this wait was long, no core was free
    for the helper. Callers then copy alone for a while.
    """

    def __init__(self) -> None:
        self._available = threading.Lock()
        self._paused_until = 0.0  # monotonic seconds
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def sharing(
        self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], pieces: deque[_CopyRange]
    ) -> Iterator[None]:
        began = time.monotonic()
        if began < self._paused_until or not self._available.acquire(blocking=False):
            yield
            return
        try:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "kvloom-copy")
            try:
                other = self._thread.submit(_copy, target, source, pieces.pop, pieces)
            except RuntimeError:  # the interpreter is shutting down
                yield
                return
            try:
                yield
            finally:
                ended = time.monotonic()
                if not other.cancel():
                    other.result()  # the helper must not access the caller's memory afterwards
                now = time.monotonic()
                if now - ended > _MAX_WAIT_RATIO * (ended - began):
                    self._paused_until = now + _PAUSE_SECONDS
        finally:
            self._available.release()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _new_helper() -> None:
    global _helper  # noqa: PLW0603  a forked process does not inherit the helper thread
    _helper = _CopyHelper()


_helper = _CopyHelper()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_helper)
