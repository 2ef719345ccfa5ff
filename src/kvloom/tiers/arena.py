"""Memory in slabs, each lent to one page size and cut into its pages. Page-granular: a page never moves.

    |slab 0: 64 KiB pages|slab 1: 2 MiB pages|slab 2: free|…

Pages come out in ascending order while the arena fills, so that a batch is a few long runs. Knows no objects and no
eviction: who is to leave is the tier's choice. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Arena", "copy_pages"]


class Arena:
    """`buffer` is memory that the caller brings (pinned, say); without one it is mapped here, and comes with use."""

    def __init__(self, capacity: int, slab_bytes: int, buffer: Any = None) -> None:
        if slab_bytes <= 0 or slab_bytes % mmap.PAGESIZE:
            raise ValueError(f"slab_bytes={slab_bytes} is not a multiple of {mmap.PAGESIZE}")
        if capacity < slab_bytes:
            raise ValueError(f"capacity={capacity} bytes is less than one slab of {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.slabs = capacity // slab_bytes
        size = self.slabs * slab_bytes
        if buffer is None:
            buffer = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them: smaller pages do
                    buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer).cast("B")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.view, np.uint8)
        if len(self.bytes) < size or not self.bytes.flags.writeable:
            raise ValueError(f"the buffer must be writable and hold {size} bytes; it has {len(self.bytes)}")
        self._free_slabs = list(range(self.slabs))  # a heap: the lowest first, so that runs are long
        self._partial: dict[int, dict[int, None]] = {}  # page size -> slabs lent to it that have free pages
        self._free: list[list[int]] = [[] for _ in range(self.slabs)]  # a slab's free pages
        self._size = [0] * self.slabs  # the page size a slab is lent to, 0 for none
        self._used = [0] * self.slabs  # its pages in use

    def fits(self, page_bytes: int) -> bool:
        return page_bytes <= self.slab_bytes

    def take(self, page_bytes: int, count: int) -> list[int]:
        """The offsets of up to `count` free pages; fewer when there are no more."""
        partial = self._partial.setdefault(page_bytes, {})
        taken: list[int] = []
        while len(taken) < count:
            if not partial:
                if not self._free_slabs:
                    break
                slab = heapq.heappop(self._free_slabs)
                self._size[slab] = page_bytes
                base = slab * self.slab_bytes
                self._free[slab] = list(range(base, base + self.slab_bytes - page_bytes + 1, page_bytes))[
                    ::-1
                ]
                partial[slab] = None
            slab = next(iter(partial))
            free = self._free[slab]
            some = free[: -(count - len(taken)) - 1 : -1]
            del free[len(free) - len(some) :]
            if not free:
                del partial[slab]
            self._used[slab] += len(some)
            taken += some
        return taken

    def give(self, page_bytes: int, offset: int) -> None:
        """A page comes back. A slab whose last page comes back can be lent to any size again."""
        slab = offset // self.slab_bytes
        self._used[slab] -= 1
        if self._used[slab]:
            self._free[slab].append(offset)
            self._partial[page_bytes][slab] = None
        else:
            self._partial[page_bytes].pop(slab, None)
            self._free[slab] = []
            self._size[slab] = 0
            heapq.heappush(self._free_slabs, slab)

    def used_bytes(self) -> int:
        return sum(size * used for size, used in zip(self._size, self._used, strict=True))


def copy_pages(
    target: npt.NDArray[np.uint8],
    to: npt.NDArray[np.int64],
    source: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    size: int,
) -> None:
    """Copies `size` bytes from each of `at` to each of `to`: one copy for every run that is contiguous in both."""
    if not len(to):
        return
    breaks = np.flatnonzero((np.diff(to) != size) | (np.diff(at) != size)) + 1
    edges = [0, *breaks.tolist(), len(to)]
    to_list, at_list = to.tolist(), at.tolist()
    for first, last in pairwise(edges):
        length, start, begin = (last - first) * size, to_list[first], at_list[first]
        target[start : start + length] = source[begin : begin + length]
