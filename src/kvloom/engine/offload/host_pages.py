"""Copies of pages between the pool and host memory.

    pool, pages of one stride  <── Copier ──>  arena, slots of that stride  <── tier queues ──>  disk, stores, peers

The arena is the memory of the host tier. On a GPU it is pinned, and copies run on separate streams. On a CPU a
copy is done when the call returns. This module uses page ids and offsets in the arena. It does not depend on
hashes or requests.

With several ranks the arena is shared memory. A page in the arena is a page of the whole model, as on one rank. Each
rank copies its heads and channels (tensor parallelism) or its tokens (context parallelism). Tiers store whole pages, so
engines with any number of ranks share them:

    one page in the arena   | layer 0: heads 0-3 | layer 0: heads 4-7 | layer 1: heads 0-3 | layer 1: heads 4-7 | …
    copied by                 rank 0               rank 1               rank 0               rank 1

If several ranks have the same bytes, the first of them offloads these bytes, and all of them load these bytes. Examples
are latents of MLA with tensor parallelism, and windows and states with context parallelism.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import HASH_TOKENS, WHOLE, LayerSpec, PageGroup, PageRange, PoolLayout, TensorPart
from kvloom.engine.preflight import host_slab_bytes
from kvloom.kernels.copy import Copier, FinishedEvent, RangeCopier
from kvloom.tiers import Form, HostConfig, HostTier, PageFields, PageValues, UnitForm, ValueForm
from kvloom.tiers.host import SharedMemory, copy_pages

__all__ = [
    "Event",
    "HostPages",
    "Ids",
    "LoadEvent",
    "RankCopies",
    "RankEvent",
    "form_of",
    "open_host",
    "pin_memory",
    "unit_forms",
    "value_forms",
]

Ids = npt.NDArray[np.integer[Any]]
_SLAB_BYTES = 8 << 20
_POLL_SECONDS = 0.0005
_MIN_RUN = 4
"""A run of fewer ranges is copied range by range."""
_MIN_CHECKED_BYTES = 32 * 1024
"""If a page has fewer bytes than this per layer, all its layers share one checksum, because one checksum per layer
would take too much time."""


def form_of(group: PageGroup, run: int) -> Form:
    """Return the form (byte layout) of the pages of a layer group. If a block owns several pages in the group, `run`
    is the number of the page. On several ranks, pass a group of `PoolLayout.whole`. Pages of equal size with different
    layouts have different forms.
    """
    fields = ", ".join(f"{f.name}:{f.dtype}{list(f.shape)}" for f in group.spec.fields)
    single = group.page_stride % group.layer_bytes or group.layer_bytes < _MIN_CHECKED_BYTES
    return Form(
        dtype="+".join(dict.fromkeys(f.dtype for f in group.spec.fields)),
        order="LFHTD",
        page_bytes=group.page_stride,
        run_bytes=group.page_stride if single else group.layer_bytes,
        shard=f"run {run} of {group.runs}",
        layout=_layout_text(group, run, fields),
    )


def _layout_text(group: PageGroup, run: int, fields: str) -> str:
    layers = ", ".join(group.layers[run * group.run_layers : (run + 1) * group.run_layers])
    return f"{group.spec.kind} {group.spec.visibility}, blocks of {group.page_tokens}: {layers}: {fields}"


def unit_forms(layout: PoolLayout) -> dict[Form, UnitForm]:
    """Return a mapping: form (byte layout) of a page in host memory → form of its units. Tiers store each page as
    units. `layout` is the layout of whole pages (`PoolLayout.whole`).

    A unit is a page of HASH_TOKENS tokens. Its form is the form of pages in a layout with blocks of HASH_TOKENS
    tokens. Omits a group if its blocks own another number of pages in that layout. Return {} if `layout` already has
    blocks of HASH_TOKENS tokens.
    """
    if layout.block_tokens == HASH_TOKENS:
        return {}
    units = PoolLayout.build(_layers(layout), HASH_TOKENS)
    return {
        form_of(group, run): UnitForm(form_of(unit, run), _page_fields(unit), _page_fields(group))
        for group, unit in zip(layout.groups, units.groups, strict=True)
        for run in range(group.runs)
        if group.runs == unit.runs
    }


def value_forms(layout: PoolLayout) -> dict[Form, ValueForm]:
    """Return a mapping: form (byte layout) of a page → form in which a re-encoding tier receives it. A re-encoding
    tier stores pages as int8 or fp8 values. The keys are the forms of pages in `layout`, and of their units (pages
    of HASH_TOKENS tokens). `layout` is the layout of whole pages (`PoolLayout.whole`).

    The tier receives tokens as plain float32 values, so the stored form does not depend on the KV dtype. Raises
    ValueError for pages whose scales are not in the page.
    """
    layouts = [layout]
    if layout.block_tokens != HASH_TOKENS:
        layouts.append(PoolLayout.build(_layers(layout), HASH_TOKENS))
    found = {}
    for group in (group for each in layouts for group in each.groups):
        values = PageValues(_page_fields(group))
        for run in range(group.runs):
            form = form_of(group, run)
            text = form.layout if group.spec.unit == "state" else _layout_text(group, run, values.text())
            stored = replace(
                form,
                order="FLTHD",
                page_bytes=values.bytes,
                run_bytes=values.bytes,
                layout=text,
            )
            if group.spec.unit == "token":
                stored = replace(stored, dtype="fp32")
            found[form] = ValueForm(stored, values)
    return found


def _layers(layout: PoolLayout) -> dict[str, LayerSpec]:
    return {name: group.spec for group in layout.groups for name in group.layers}


def _page_fields(group: PageGroup, run: int = 0) -> PageFields:
    """Return the fields of page `run` of a block. The last page may have fewer layers than the others."""
    tokens = group.page_tokens if group.spec.unit == "token" else 0
    layers = min(group.run_layers, len(group.layers) - run * group.run_layers)
    return PageFields(group.spec.fields, layers, tokens, group.layer_bytes, group.page_stride)


def open_host(
    layout: PoolLayout,
    capacity: int,
    checked: bool,
    device: torch.device,
    shared: bool = False,
    ttl: float = 0,
    ranks: int = 1,
) -> tuple[HostTier, SharedMemory | None]:
    """Open a host tier for the pages of `layout` (`PoolLayout.whole`). Its slab size is a multiple of the layout's slab
    size. For a GPU its memory is pinned. Return the tier, and its shared memory or None.

    - With `shared`, other processes on this host may map the memory and read it.
    - With several `ranks`, the memory is always shared, and the processes of the ranks may also write to it.
    - If the system has no shared memory, one rank runs without it, and several ranks raise ValueError.
    """
    unit = host_slab_bytes(layout.slab_bytes, capacity)
    slab = unit * max(1, min(_SLAB_BYTES, capacity // 32) // unit)
    memory = None
    if shared or ranks > 1:
        try:
            memory = SharedMemory(capacity // slab * slab, read_only=ranks == 1)
        except (OSError, AttributeError) as error:
            if ranks > 1:
                raise ValueError(
                    f"tiers on {ranks} ranks need {capacity:,} bytes of shared memory, which the system does not "
                    f"give ({error}): use a smaller host tier, or Linux"
                ) from error
    tier = HostTier(HostConfig(capacity, slab, checked, ttl), None if memory is None else memory.buffer)
    if device.type == "cuda":
        pin_memory(tier.arena)
        address = int(tier.arena.ctypes.data)
        # Unpins the memory of a tier that is never closed.
        _pinned[address] = weakref.finalize(tier, _unpin, address)
        _pinned[address].atexit = False
    return tier, memory


def pin_memory(arena: npt.NDArray[np.uint8]) -> None:
    """Pin memory, so that a GPU can copy to and from it. Raises ValueError if the system cannot pin it."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(int(arena.ctypes.data), arena.nbytes, 0))
    if code:
        raise ValueError(
            f"the system cannot pin {arena.nbytes:,} bytes of host memory (CUDA error {code}); configure a smaller host tier"
        )


_pinned: dict[int, weakref.finalize[[int], HostTier]] = {}


def _unpin(address: int) -> None:
    """Unpin memory. Call this before the memory is freed, or the system cannot pin the same addresses again."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """Two CUDA events: at the start and at the end of a copy to the device. They time the copy by the device's
    clock."""

    start: torch.cuda.Event
    done: torch.cuda.Event

    def query(self) -> bool:
        return self.done.query()  # type: ignore[no-untyped-call, no-any-return]

    def synchronize(self) -> None:
        self.done.synchronize()

    def seconds_since(self, first: LoadEvent) -> float:
        """Return the seconds from the start of the `first` copy to the end of this copy, by the device's clock.
        Excludes the wait for an in-flight step, and the time until the host polls.
        """
        return first.start.elapsed_time(self.done) / 1e3  # type: ignore[no-any-return]


class RankCopies(Protocol):
    """Repeats copies between pool and host memory on the other ranks of a tensor-parallel group."""

    @property
    def count(self) -> int:
        """Number of ranks, with rank 0."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether a rank has stopped, so that copies may never end."""
        ...

    def share(self, memory: SharedMemory) -> None:
        """Let all ranks map the arena (the memory of the host tier), and wait until they have done so."""
        ...

    def offload(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> int:
        """Let all ranks copy pages of a layer group to offsets in the arena, after the steps that were sent before. Does
        not wait. Return the number of the copy."""
        ...

    def load(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> int:
        """Let all ranks copy from offsets in the arena to pages. Otherwise like `offload`."""
        ...

    def is_done(self, number: int) -> bool:
        """Return whether all ranks have made the copy with this number."""
        ...

    def check(self) -> None:
        """Raise RankError if a rank has stopped, or takes too long for a copy."""
        ...

    def fail(self, reason: str) -> None:
        """Stop the group: rank 0 has failed to make a copy that the other ranks have made."""
        ...


@dataclass(frozen=True, slots=True)
class RankEvent:
    """The end of a copy on all ranks. `own` is the event of rank 0, and `number` is the number of the copy on the other
    ranks."""

    own: torch.cuda.Event | FinishedEvent | LoadEvent
    ranks: RankCopies
    number: int

    def query(self) -> bool:
        return bool(self.own.query()) and self.ranks.is_done(self.number)

    def synchronize(self) -> None:
        """Wait until all ranks have copied. Raises RankError if a rank has stopped, or takes too long."""
        self.own.synchronize()
        while not self.ranks.is_done(self.number):
            self.ranks.check()
            time.sleep(_POLL_SECONDS)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` wait for the copy of rank 0. Every other rank makes its own stream wait."""
        if not isinstance(self.own, LoadEvent):
            self.own.wait(stream)


Event = torch.cuda.Event | FinishedEvent | RankEvent


class RangeRun(NamedTuple):
    """Several ranges of equal size and distance. The fields are the size and number of the ranges, the first range, and
    the distance between ranges. The last two exist twice: for the page of a rank, and for the whole page.
    """

    size: int
    number: int
    own: int
    own_step: int
    whole: int
    whole_step: int


class HostPages:
    """Runs copies between one pool and the arena of one host tier. `part` is the part of every page that the pool has.
    `ranks` repeats the copies on the other ranks. Only rank 0 of several ranks has `ranks`. Otherwise it is None.
    """

    def __init__(
        self,
        layout: PoolLayout,
        buffer: torch.Tensor,
        arena: npt.NDArray[np.uint8],
        ranks: RankCopies | None = None,
        part: TensorPart | None = None,
    ) -> None:
        self.buffer = buffer
        self._arena, self._ranks = arena, ranks
        self._pool = None if buffer.is_cuda else buffer.numpy()
        self._marks: list[torch.cuda.Event] = []
        self._load_stream: torch.cuda.Stream | None = None
        if buffer.is_cuda:  # same priority as the copiers' streams, above the model's kernels
            self._load_stream = torch.cuda.Stream(buffer.device, priority=-1)  # type: ignore[no-untyped-call]
        self._memory = torch.from_numpy(arena)
        self._copiers: dict[int, Copier] = {}
        self._rows: dict[int, torch.Tensor] = {}
        self._fields = [
            [_page_fields(group, run) for run in range(group.runs)] for group in layout.whole().groups
        ]
        part = part or TensorPart(0, 1 if ranks is None else ranks.count // layout.part.count)
        self._ranges: list[list[PageRange]] | None = None
        self._runs: dict[tuple[int, bool], list[RangeRun]] = {}
        self._range_copier: RangeCopier | None = None
        if part.count > 1 or layout.part != WHOLE:
            pairs = zip(layout.groups, layout.whole().groups, strict=True)
            self._ranges = [part.ranges(*pair, layout.part) for pair in pairs]
            if buffer.is_cuda:
                self._range_copier = RangeCopier(buffer, self._memory)
            return
        for stride in {group.page_stride for group in layout.groups}:
            self._copiers[stride] = Copier(buffer, stride)
            count = self._memory.numel() // stride
            self._rows[stride] = self._memory[: count * stride].view(count, stride)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has stopped, so that copies may never end."""
        return self._ranks is not None and self._ranks.has_failed

    def close(self) -> None:
        """Unpin host memory. No copy may start afterwards."""
        unpin = _pinned.pop(int(self._arena.ctypes.data), None)
        if unpin is not None:
            unpin()

    def wait(self, event: Event) -> None:
        """Make later work on the device's current stream wait for the copy of `event`. Does nothing on a CPU, where the
        copy is already done. The other ranks need no wait, because they make copies and steps in the order of rank
        0."""
        if self._pool is not None:
            return
        event.wait(torch.cuda.current_stream(self.buffer.device))

    def mark(self, moved: bool = False) -> None:
        """Set a mark at the present end of the current stream. A later `offload` can then wait for the work before the
        mark only. The last two marks are stored. `moved` means that copies inside the pool have written pages since the
        previous mark. The earlier marks are then dropped.
        """
        if self._pool is None:
            event = self._marks.pop() if len(self._marks) == 2 else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.buffer.device))
            self._marks = [event] if moved else [event, *self._marks]

    def offload(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Event:
        """Copy pages of a layer group to offsets in the arena, and return the event of the copy. Does not block on a
        GPU. On several ranks, every rank copies its part. If pages are equal on all ranks, only rank 0 copies them.

        On a GPU, the copy waits for work on the current stream, which `age` selects: 0 is all work, 1 the work before
        the last mark (see `mark`), 2 the work before the second last mark. The caller must ensure that work after
        this mark did not write the pages.
        """
        if self._ranks is None or (group.parts == 1 and group.spec.whole() == group.spec):
            return self._copy_out(group, pages, offsets, age)
        number = self._ranks.offload(group, pages, offsets)
        with self._failing(self._ranks):
            return RankEvent(self._copy_out(group, pages, offsets, age), self._ranks, number)

    def clear_unwritten(
        self, group: PageGroup, run: int, offsets: npt.NDArray[np.int64], tokens: Ids
    ) -> None:
        """In pages of the arena, set unwritten bytes to 0: padding, and all tokens after the first `tokens` of each
        page. In the pool, these bytes are from earlier owners of the page, which may be other tenants. `run` is the
        number of the pages in their blocks, and `offsets` are their offsets in the arena.

        Call this method after a copy to the arena is done, before others may read the pages.
        """
        fields = self._fields[group.index][run]
        for start, stop in fields.padding:
            for offset in offsets.tolist():
                self._arena[offset + start : offset + stop] = 0
        for index in np.flatnonzero(tokens < fields.tokens).tolist():
            page = self._arena[offsets[index] : offsets[index] + fields.page_bytes]
            fields.clear_from(page, int(tokens[index]))

    def load(
        self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]
    ) -> LoadEvent | FinishedEvent | RankEvent:
        """Copy from offsets in the arena to pages of a layer group, after the work on the current stream. Does not block
        on a GPU. On several ranks, every rank copies its part."""
        if self._ranks is None:
            return self._copy_in(group, pages, offsets)
        number = self._ranks.load(group, pages, offsets)
        with self._failing(self._ranks):
            return RankEvent(self._copy_in(group, pages, offsets), self._ranks, number)

    @staticmethod
    @contextlib.contextmanager
    def _failing(ranks: RankCopies) -> Iterator[None]:
        """A context for a copy on rank 0. If the copy fails, stop the group, because the other ranks have made the same
        copy."""
        try:
            yield
        except BaseException as error:
            ranks.fail(f"a copy of pages failed on rank 0 ({type(error).__name__})")
            raise

    def _copy_out(
        self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64], age: int
    ) -> torch.cuda.Event | FinishedEvent:
        stride = group.page_stride
        starts = np.asarray(pages, np.int64) * stride
        if self._pool is not None:
            for run in self._runs_of(group, only_first=True):
                to, at = offsets + run.whole, starts + run.own
                _copy_run(self._arena, to, run.whole_step, self._pool, at, run.own_step, run)
            return FinishedEvent()
        after = self._marks[:age][-1] if age and self._marks else None
        if self._range_copier is not None:
            ranges = [each for each in self._ranges_of(group) if each.is_first]
            return self._range_copier.gather(ranges, starts, offsets, after)
        return self._copiers[stride].gather(
            pages, self._rows[stride], offsets // stride, after=after, trusted=True
        )

    def _copy_in(
        self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]
    ) -> LoadEvent | FinishedEvent:
        stride = group.page_stride
        starts = np.asarray(pages, np.int64) * stride
        if self._pool is not None:
            for run in self._runs_of(group, only_first=False):
                to, at = starts + run.own, offsets + run.whole
                _copy_run(self._pool, to, run.own_step, self._arena, at, run.whole_step, run)
            return FinishedEvent()
        assert self._load_stream is not None
        start, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._load_stream.wait_stream(torch.cuda.current_stream(self.buffer.device))
        start.record(self._load_stream)
        if self._range_copier is not None:
            self._range_copier.scatter(self._ranges_of(group), starts, offsets, self._load_stream)
        else:
            self._copiers[stride].scatter(
                self._rows[stride], pages, offsets // stride, stream=self._load_stream, after=start
            )
        done.record(self._load_stream)
        return LoadEvent(start, done)

    def _ranges_of(self, group: PageGroup) -> list[PageRange]:
        """Return the ranges of a page that this rank copies. On one rank, the range is the page with its padding."""
        if self._ranges is None:
            return [PageRange(0, 0, group.page_stride, True)]
        return self._ranges[group.index]

    def _runs_of(self, group: PageGroup, only_first: bool) -> list[RangeRun]:
        """Return the ranges of a page that this rank copies, as runs. With `only_first`, omit ranges that a lower rank
        has, too."""
        key = group.index, only_first
        if key not in self._runs:
            ranges = self._ranges_of(group)
            self._runs[key] = _find_runs([each for each in ranges if each.is_first or not only_first])
        return self._runs[key]


def _find_runs(ranges: list[PageRange]) -> list[RangeRun]:
    """Return ranges as runs. Joins ranges of equal size whose distances are equal."""
    found: list[RangeRun] = []
    for each in ranges:
        last = found[-1] if found else None
        if last is not None and last.size == each.size:
            own, whole = (each.own - last.own) // last.number, (each.whole - last.whole) // last.number
            is_next = (
                each.own == last.own + own * last.number and each.whole == last.whole + whole * last.number
            )
            if is_next and (last.number == 1 or (own, whole) == (last.own_step, last.whole_step)):
                found[-1] = last._replace(number=last.number + 1, own_step=own, whole_step=whole)
                continue
        found.append(RangeRun(each.size, 1, each.own, 0, each.whole, 0))
    return found


def _copy_run(
    target: npt.NDArray[np.uint8],
    to: npt.NDArray[np.int64],
    to_step: int,
    source: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    at_step: int,
    run: RangeRun,
) -> None:
    """Copy a run of ranges of some pages. `to` and `at` are the offsets of the first range of each page. `to_step` and
    `at_step` are the distances between ranges.
    """
    if run.number < _MIN_RUN:
        for index in range(run.number):
            copy_pages(target, to + index * to_step, source, at + index * at_step, run.size)
        return
    numbers = np.concatenate((to, at, (to_step, at_step, run.size)))
    width = next(width for width in (8, 4, 2, 1) if not (numbers % width).any())
    shape, kind = (run.number, run.size // width), np.dtype(f"u{width}")
    for first, second in zip(to.tolist(), at.tolist(), strict=True):
        lines = np.ndarray(shape, kind, target.data, first, (to_step, width))
        lines[:] = np.ndarray(shape, kind, source.data, second, (at_step, width))
