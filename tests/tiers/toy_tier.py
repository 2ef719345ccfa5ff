"""A tier of another package: pages in a dictionary, with checksums. Imports public names of `kvloom.tiers` only."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvloom.tiers import (
    Objects,
    Options,
    Outcome,
    Ranges,
    Tier,
    TierStats,
    Transfer,
    TransferCounts,
    failed_transfer,
    part_range,
)


class ToyTier(Tier):
    """Evicts the oldest page first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.pages: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._counts, self._lock = TransferCounts(), threading.Lock()
        self._evicted, self._closed = 0, False

    @property
    def name(self) -> str:
        return "toy"

    @property
    def capacity(self) -> int:
        return self._capacity

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        with self._lock:
            return np.array([key in self.pages for key in objects.keys], np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        if self._closed:
            return failed_transfer(len(objects), self._counts, "read", Outcome.FAILED, "closed")
        transfer = Transfer(len(objects), self._counts, "read", stop - start)
        for index, (key, at) in enumerate(zip(objects.keys, into.starts.tolist(), strict=True)):
            with self._lock:
                page, checksum = self.pages.get(key, (None, 0))
                if page is not None and crc32(key + page) != checksum:
                    del self.pages[key]
            if page is None:
                transfer.settle(index, Outcome.MISSING)
            elif crc32(key + page) != checksum:
                transfer.settle(index, Outcome.CORRUPT)
            else:
                into.view[at + start : at + stop] = page[start:stop]
                transfer.settle(index, Outcome.OK)
        return transfer

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if size > self._capacity:
            raise ValueError(f"a page of {size} bytes does not fit {self._capacity} bytes")
        if self._closed:
            return failed_transfer(len(objects), self._counts, "write", Outcome.FAILED, "closed")
        transfer = Transfer(len(objects), self._counts, "write", size)
        for key, at in zip(objects.keys, source.starts.tolist(), strict=True):
            page = bytes(source.view[at : at + size])
            with self._lock:
                self.pages[key] = page, crc32(key + page)
                while self._used() > self._capacity:
                    self.pages.popitem(last=False)
                    self._evicted += 1
        transfer.settle_pending(Outcome.OK)
        return transfer

    def drop(self, objects: Objects) -> int:
        with self._lock:
            return sum(self.pages.pop(key, None) is not None for key in objects.keys)

    def stats(self) -> TierStats:
        with self._lock:
            return self._counts.stats(len(self.pages), self._used(), self._capacity, self._evicted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.pages.clear()

    def _used(self) -> int:
        return sum(len(page) for page, _ in self.pages.values())


def parse_url(url: str) -> Callable[[], ToyTier]:
    """Parse `toy:?capacity=4MiB`."""
    options = Options(url, urlsplit(url).query)
    capacity = options.size("capacity")
    options.reject_unknown()
    return lambda: ToyTier(capacity)
