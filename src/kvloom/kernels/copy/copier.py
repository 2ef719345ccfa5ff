"""Copies of whole pages: inside the pool, and between the pool and rows of host memory.

    pool   |page 0|page 1|page 2|…   page p begins at byte p * page_stride      gather: pool → host
    host   |row 0|row 1|…            row r begins at byte r * host.stride(0)    scatter: host → pool

Pages move between pool and host by one of three methods. All write the same bytes:

| method | how                                                     | uses            | for pages that are |
|--------|---------------------------------------------------------|-----------------|--------------------|
| batch  | one driver call; one copy per range of adjacent pages   | copy engines    | large              |
| staged | to the host: a kernel packs pages into a device buffer, | copy engines,   | small, in          |
|        | then the buffer is copied; to the pool: the reverse     | short kernels   | consecutive rows   |
| kernel | a kernel reads or writes host memory directly           | a few           | small, in any rows |
|        |                                                         | multiprocessors |                    |

The pages of a CPU pool are copied at once by indexing. This module does not depend on block tables or tiers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvloom.kernels.memory import Addresses, load_cuda_driver

__all__ = ["Copier", "FinishedEvent", "Ids", "Method", "copy_pages", "merge_adjacent"]

Ids: TypeAlias = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]
Method = Literal["batch", "staged", "kernel"]

_ALIGN = 16
_BATCH_BYTES = 512 * 1024
"""Pages of at least this size in bytes are copied by the batch method, if the driver supports it."""
_STAGE_BYTES = 16 * 1024 * 1024
"""Size in bytes of each of the two staging buffers per direction. Smaller buffers would not reach the speed of the
link."""
_LINK_PROGRAMS = 32
"""Number of programs that saturate the link between host and device. More programs would only take multiprocessors
from the model."""
_PROGRAMS_PER_SM = 8


def copy_pages(
    buffer: torch.Tensor, page_stride: int, source: Ids, target: Ids, page_bytes: int | None = None
) -> None:
    """Copy page `source[i]` to page `target[i]` inside the pool, in one call on the current stream.

    A page may be a target only once, and must not be both source and target. Ids on the host are checked. Ids on
    the device are not checked, so that the call does not wait and can be captured in a graph. Bytes of a page after
    `page_bytes` are unchanged.
    """
    page_bytes = page_stride if page_bytes is None else page_bytes
    pages = _pages(buffer, page_stride, page_bytes)
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source pages for {len(target)} target pages")
    if _on_host(source):
        source = _checked(source, pages.shape[0], "source page")
    if _on_host(target):
        target = _checked(target, pages.shape[0], "target page", once=True)
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        both = set(source.tolist()).intersection(target.tolist())
        if both:
            raise ValueError(
                f"page {min(both)} is both source and target: put the copies that depend on others in a later call"
            )
    if not buffer.is_cuda:
        pages[torch.as_tensor(target).long()] = pages[torch.as_tensor(source).long()]
        return
    from .triton_copy import move

    with torch.cuda.device(buffer.device):
        programs = _multiprocessors(buffer.device) * _PROGRAMS_PER_SM
        from_, to = _upload(source, buffer.device), _upload(target, buffer.device)
        move(buffer, buffer, from_, to, len(source), page_bytes, page_stride, page_stride, programs)


class FinishedEvent:
    """The event of a copy that is already complete. It never waits."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        pass


class Copier:
    """Copies pages of one size between a pool and host memory, each batch in one call.

    The first `page_bytes` bytes of every page are copied. To copy only some consecutive layers of a page, pass their
    offset in the page and their size: `Copier(buffer[offset:], page_stride, size)`.

    On CUDA a call only enqueues the copy and returns an event. `query()` polls the event, `synchronize()` blocks, and
    `wait(stream)` makes a stream wait. A copy starts after all work queued on the current stream, or after the event
    `after`.

    Until the event completes, the caller must keep `host`, pool and copier alive. The caller must not access the copied
    rows of `host` or the pages of a scatter, and must not overwrite the pages of a gather.

    Gathers and scatters use separate streams and overlap. Calls of one direction run in order, and only one thread at
    a time may make them. The first staged copy of a direction allocates 32 MiB of device memory.
    """

    def __init__(self, buffer: torch.Tensor, page_stride: int, page_bytes: int | None = None) -> None:
        self.page_stride = page_stride
        self.page_bytes = page_stride if page_bytes is None else page_bytes
        self._pages = _pages(buffer, page_stride, self.page_bytes)
        self._out = _StagedLane(buffer.device) if buffer.is_cuda else None
        self._in = _StagedLane(buffer.device) if buffer.is_cuda else None
        self._checked_host: weakref.ref[torch.Tensor] | None = None

    def gather(
        self,
        pages: Ids,
        host: torch.Tensor,
        rows: Ids | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        after: torch.cuda.Event | None = None,
        method: Method | None = None,
        trusted: bool = False,
    ) -> torch.cuda.Event | FinishedEvent:
        """Copy page `pages[i]` to row `rows[i]` of `host`, or to row i without `rows`. `host` is [rows, page_bytes]
        uint8, pinned on CUDA. Return the event of the copy. `trusted` skips the check that the rows are distinct."""
        source = _ByteRows(self._pages, _checked(pages, len(self._pages), "page"))
        target = _ByteRows(host, self._host_rows(host, rows, len(source.ids), once=not trusted))
        if self._out is None:
            host[torch.from_numpy(target.ids)] = self._pages[torch.from_numpy(source.ids)]
            return FinishedEvent()
        return self._copy(self._out, source, target, stream, after, self._choose(method, rows))

    def scatter(
        self,
        host: torch.Tensor,
        pages: Ids,
        rows: Ids | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        after: torch.cuda.Event | None = None,
        method: Method | None = None,
    ) -> torch.cuda.Event | FinishedEvent:
        """Copy row `rows[i]` of `host`, or row i without `rows`, to page `pages[i]`. Return the event of the copy."""
        target = _ByteRows(self._pages, _checked(pages, len(self._pages), "page", once=True))
        source = _ByteRows(host, self._host_rows(host, rows, len(target.ids)))
        if self._in is None:
            self._pages[torch.from_numpy(target.ids)] = host[torch.from_numpy(source.ids)]
            return FinishedEvent()
        return self._copy(self._in, source, target, stream, after, self._choose(method, rows))

    def _choose(self, method: Method | None, rows: Ids | None) -> Method:
        if method not in (None, "batch", "staged", "kernel"):
            raise ValueError(f"method {method!r} is none of batch, staged, kernel")
        if method is None and self.page_bytes < _BATCH_BYTES:
            return "staged" if rows is None else "kernel"
        batches = load_cuda_driver().copies_batches
        if method == "batch" and not batches:
            raise ValueError("method 'batch' needs a driver of CUDA 12.8 or later: use staged or kernel")
        return method or ("batch" if batches else "staged")

    def _copy(
        self,
        lane: _StagedLane,
        source: _ByteRows,
        target: _ByteRows,
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
        method: Method,
    ) -> torch.cuda.Event:
        stream = stream or lane.stream
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self._pages.device))
        else:
            stream.wait_event(after)
        if method == "batch":
            runs = merge_adjacent(target.addresses(), source.addresses(), self.page_bytes)
            load_cuda_driver().copy_batch(*runs, stream.cuda_stream)
        elif method == "kernel":
            with torch.cuda.stream(stream):
                device = self._pages.device
                ids = _upload(source.ids, device), _upload(target.ids, device)
                _move(source.rows, target.rows, *ids, _LINK_PROGRAMS)
        elif source.rows is self._pages:
            lane.gather(source, target, stream)
        else:
            lane.scatter(source, target, stream)
        event = _new_event()
        event.record(stream)
        return event

    def _host_rows(
        self, host: torch.Tensor, rows: Ids | None, count: int, once: bool = False
    ) -> npt.NDArray[np.int64]:
        """Check `host`, and return the `count` row numbers of `host` that are copied. With `once`, raises an error if
        a row number occurs twice."""
        if (
            self._checked_host is None or self._checked_host() is not host
        ):  # asked once per memory, because the driver's answer takes as long as many copies
            self._check_host(host)
            self._checked_host = weakref.ref(host)
        if rows is None and len(host) != count:
            raise ValueError(f"host memory has {len(host)} rows for {count} pages: cut it or give `rows`")
        found = np.arange(count) if rows is None else _checked(rows, len(host), "host row", once)
        if len(found) != count:
            raise ValueError(f"{len(found)} host rows for {count} pages")
        return found

    def _check_host(self, host: torch.Tensor) -> None:
        if host.dtype != torch.uint8 or host.dim() != 2 or host.shape[1] != self.page_bytes:
            raise ValueError(
                f"host memory is [rows, {self.page_bytes}] uint8 for these pages, got {host.dtype} {tuple(host.shape)}"
            )
        if host.device.type != "cpu":
            raise ValueError(f"host memory is on {host.device}: inside the device use copy_pages")
        if len(host) and (host.stride(1) != 1 or (len(host) > 1 and host.stride(0) < self.page_bytes)):
            raise ValueError(f"host memory with strides {host.stride()} is not rows of bytes side by side")
        if self._pages.is_cuda and len(host):
            if not host.is_pinned():
                raise ValueError("host memory is not pinned: allocate it with pin_memory=True")
            if host.data_ptr() % _ALIGN or host.stride(0) % _ALIGN:
                raise ValueError(
                    f"host rows begin at {host.data_ptr():#x} and every {host.stride(0)} bytes: both need to be "
                    f"multiples of {_ALIGN}"
                )


@dataclass(frozen=True, slots=True)
class _ByteRows:
    """One side of a copy. `rows` is a matrix of bytes, and `ids` are the numbers of the rows to copy."""

    rows: torch.Tensor
    ids: npt.NDArray[np.int64]

    def addresses(self) -> npt.NDArray[np.uint64]:
        places = self.ids * self.rows.stride(0)
        places += self.rows.data_ptr()
        return places.view(np.uint64)


class _StagedLane:
    """The two streams and the two staging buffers for copies in one direction (gather or scatter). One buffer is
    filled while the other is emptied."""

    def __init__(self, device: torch.device) -> None:
        # The priority is higher than that of the model's kernels: a copy needs few multiprocessors but must
        # start at once.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._packer = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def gather(self, source: _ByteRows, target: _ByteRows, stream: torch.cuda.Stream) -> None:
        """Pack the pages into a staging buffer on one stream, and copy the buffer to the host on the other stream."""
        self._packer.wait_stream(stream)
        with torch.cuda.stream(self._packer):
            # Upload all ids at once, because a copy from pageable memory waits for all earlier work of the stream.
            ids = _upload(source.ids, self._device)
        for part, stage, free in self._parts(len(source.ids), source.rows.shape[1]):
            with torch.cuda.stream(self._packer):
                self._packer.wait_event(free)
                _move(source.rows, stage, ids[part], None)
            stream.wait_stream(self._packer)
            with torch.cuda.stream(stream):
                for at, row, count in _contiguous_ranges(target.ids[part], target.rows):
                    target.rows[row : row + count].copy_(stage[at : at + count], non_blocking=True)
                free.record(stream)

    def scatter(self, source: _ByteRows, target: _ByteRows, stream: torch.cuda.Stream) -> None:
        """Copy rows from the host to a staging buffer on one stream, and unpack them into pages on the other
        stream."""
        self._packer.wait_stream(stream)
        with torch.cuda.stream(self._packer):
            ids = _upload(target.ids, self._device)
        for part, stage, free in self._parts(len(target.ids), target.rows.shape[1]):
            with torch.cuda.stream(stream):
                stream.wait_event(free)
                for at, row, count in _contiguous_ranges(source.ids[part], source.rows):
                    stage[at : at + count].copy_(source.rows[row : row + count], non_blocking=True)
            self._packer.wait_stream(stream)
            with torch.cuda.stream(self._packer):
                _move(stage, target.rows, None, ids[part])
                free.record(self._packer)
        stream.wait_stream(self._packer)

    def _parts(self, count: int, row_bytes: int) -> Iterator[tuple[slice, torch.Tensor, torch.cuda.Event]]:
        """Split `count` rows into parts that fit into a staging buffer. Yield three values for each part: its rows,
        its buffer [rows, row_bytes], and an event. The event completes after the previous use of the buffer."""
        if not self._slots:
            with torch.cuda.stream(self._packer):
                for _ in range(2):
                    buffer = torch.empty(max(_STAGE_BYTES, row_bytes), dtype=torch.uint8, device=self._device)
                    self._slots.append((buffer, _new_event()))
                    self._slots[-1][1].record(self._packer)
        each = self._slots[0][0].numel() // row_bytes
        for first in range(0, count, each):
            buffer, free = self._slots[self._turn]
            self._turn ^= 1
            yield slice(first, first + each), buffer[: each * row_bytes].view(each, row_bytes), free


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    programs: int | None = None,
) -> None:
    """Copy row `source_ids[i]` of `source` to row `target_ids[i]` of `target`, with a kernel on the current stream.
    The ids are on the device. Without ids, row i is used. The kernel has at most `programs` programs at a time, by
    default one per multiprocessor."""
    from .triton_copy import move

    device = source.device if source.is_cuda else target.device
    count = max(0 if ids is None else len(ids) for ids in (source_ids, target_ids))
    strides = source.stride(0), target.stride(0)
    programs = programs or _multiprocessors(device)
    move(source, target, source_ids, target_ids, count, source.shape[1], *strides, programs)


def _pages(buffer: torch.Tensor, page_stride: int, page_bytes: int) -> torch.Tensor:
    """Return the pool as [pages, page_bytes]. The last page may be shorter than `page_stride`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"the pool is one contiguous row of uint8, got {buffer.dtype} {tuple(buffer.shape)}")
    if not 0 < page_bytes <= page_stride:
        raise ValueError(
            f"pages of {page_bytes} bytes every {page_stride} bytes: give 1 to {page_stride} bytes"
        )
    if page_stride % _ALIGN or page_bytes % _ALIGN or (buffer.is_cuda and buffer.data_ptr() % _ALIGN):
        raise ValueError(
            f"pages of {page_bytes} bytes every {page_stride} bytes from {buffer.data_ptr():#x}: all need to be "
            f"multiples of {_ALIGN}"
        )
    count = max(0, (buffer.numel() - page_bytes) // page_stride + 1)
    return buffer.as_strided((count, page_bytes), (page_stride, 1))


def _on_host(ids: Ids) -> bool:
    return not (isinstance(ids, torch.Tensor) and ids.is_cuda)


def _checked(ids: Ids, limit: int, what: str, once: bool = False) -> npt.NDArray[np.int64]:
    """Return the ids as an array. Raises an error if an id is not in [0, limit). With `once`, also raises an error
    if two ids are equal."""
    if not _on_host(ids):
        raise ValueError(
            f"{what} ids are on the device: give them on the host, where their addresses are computed"
        )
    array = np.asarray(ids, np.int64)
    if array.ndim != 1:
        raise ValueError(f"{what} ids have shape {array.shape}: give one row of ids")
    # One comparison finds both errors: a negative id, read as an unsigned number, is above every limit.
    if array.size and np.maximum.reduce(array.view(np.uint64)) >= limit:
        wrong = array[(array < 0) | (array >= limit)][0]
        raise ValueError(f"{what} {wrong} is not among the {limit} that exist")
    if once and len(set(array.tolist())) != array.size:
        values, counts = np.unique(array, return_counts=True)
        raise ValueError(f"{what} {values[counts > 1][0]} is written twice: give every target once")
    return array


def _contiguous_ranges(rows: npt.NDArray[np.int64], host: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the contiguous ranges of the row numbers `rows` as (index in `rows`, first row, number of rows)."""
    if not host.is_contiguous():
        return [(at, row, 1) for at, row in enumerate(rows.tolist())]
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = np.concatenate(([0], cuts)).tolist()
    ends = [*firsts[1:], len(rows)]
    return [(first, int(rows[first]), end - first) for first, end in zip(firsts, ends, strict=True)]


def merge_adjacent(
    targets: Addresses, sources: Addresses, size: int
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge copies of `size` bytes if their sources and their targets are both adjacent. Return targets, sources
    and sizes.

    Each copy costs the driver and the copy engine a fixed time, so few long copies are faster than many short
    copies.
    """
    if not len(targets):
        return targets, sources, targets
    step = np.uint64(size)
    apart = targets[1:] - targets[:-1] != step
    apart |= sources[1:] - sources[:-1] != step
    cuts = np.flatnonzero(apart)
    edges = np.empty(len(cuts) + 2, np.int64)
    edges[0], edges[-1] = 0, len(targets)
    np.add(cuts, 1, out=edges[1:-1])
    firsts = edges[:-1]
    return targets[firsts], sources[firsts], ((edges[1:] - firsts) * size).view(np.uint64)


def _upload(ids: Ids, device: torch.device) -> torch.Tensor:
    """Copy ids to the device without waiting. The ids are first copied to pinned memory, which torch frees after the
    copy."""
    if isinstance(ids, torch.Tensor) and ids.is_cuda:
        return ids.to(torch.int32)
    return torch.from_numpy(np.asarray(ids, np.int32)).pin_memory().to(device, non_blocking=True)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
