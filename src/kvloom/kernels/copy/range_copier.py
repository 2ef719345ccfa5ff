"""Copies of several ranges of each page between the pool of a GPU and host memory. A range is, for example, some heads of a
layer, which have other neighbours in host memory than in the pool.

    pool   |…| page: | heads of layer 0 | heads of layer 1 | …              gather: pool → host
    host   |…| page: | other heads | heads of layer 0 | other heads | …     scatter: host → pool

One kernel copies all ranges of one size, of all pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import PageRange

__all__ = ["RangeCopier"]

_ALIGN = 16
_PROGRAMS = 32
"""Number of programs that saturate the link between host and device."""
Offsets = npt.NDArray[np.int64]


class RangeCopier:
    """Copies ranges of pages between a pool and pinned host memory, both as one row of bytes. A range is at `own` in a
    page of the pool, and at `whole` in a page of host memory. A call only enqueues the copy. Until the copy is done, the
    caller must not change its source or read its target. Calls of one direction run in order."""

    def __init__(self, buffer: torch.Tensor, host: torch.Tensor) -> None:
        self._buffer, self._host = buffer, host
        self._stream = torch.cuda.Stream(buffer.device, priority=-1)  # type: ignore[no-untyped-call]

    def gather(
        self,
        ranges: Sequence[PageRange],
        starts: Offsets,
        offsets: Offsets,
        after: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        """Copy ranges of the pages at `starts` in the pool to the pages at `offsets` in host memory. The copy waits
        for the work on the current stream, or for the event `after`. Return the event of the copy."""
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._buffer.device))
        else:
            self._stream.wait_event(after)
        self._copy(ranges, starts, offsets, self._stream, is_gather=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def scatter(
        self, ranges: Sequence[PageRange], starts: Offsets, offsets: Offsets, stream: torch.cuda.Stream
    ) -> None:
        """Copy ranges of the pages at `offsets` in host memory to the pages at `starts` in the pool, on `stream`."""
        self._copy(ranges, starts, offsets, stream, is_gather=False)

    def _copy(
        self,
        ranges: Sequence[PageRange],
        starts: Offsets,
        offsets: Offsets,
        stream: torch.cuda.Stream,
        is_gather: bool,
    ) -> None:
        from .triton_copy import move

        with torch.cuda.device(self._buffer.device), torch.cuda.stream(stream):
            for size in sorted({each.size for each in ranges}):
                some = [each for each in ranges if each.size == size]
                pool = np.add.outer(starts, np.array([each.own for each in some], np.int64)).ravel()
                host = np.add.outer(offsets, np.array([each.whole for each in some], np.int64)).ravel()
                if size % _ALIGN or (pool % _ALIGN).any() or (host % _ALIGN).any():
                    self._copy_each(pool.tolist(), host.tolist(), size, is_gather)
                    continue
                ids = [self._upload(places // _ALIGN) for places in (pool, host)]
                rows = [self._buffer, self._host]
                source, target = (0, 1) if is_gather else (1, 0)
                # Rows overlap: one begins every 16 bytes, so that a row can begin at each of the places.
                move(
                    rows[source],
                    rows[target],
                    ids[source],
                    ids[target],
                    len(pool),
                    size,
                    _ALIGN,
                    _ALIGN,
                    _PROGRAMS,
                )

    def _upload(self, ids: Offsets) -> torch.Tensor:
        return torch.from_numpy(ids).pin_memory().to(self._buffer.device, non_blocking=True)

    def _copy_each(self, pool: list[int], host: list[int], size: int, is_gather: bool) -> None:
        """Copy ranges that are not aligned for the kernel, one by one."""
        for at, to in zip(pool, host, strict=True):
            own, whole = self._buffer[at : at + size], self._host[to : to + size]
            (whole if is_gather else own).copy_(own if is_gather else whole, non_blocking=True)
