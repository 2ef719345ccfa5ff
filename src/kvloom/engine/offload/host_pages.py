"""Copies of pages between the pool and host memory.

    pool, pages of one stride  <── Copier ──>  arena, slots of that stride  <── tier queues ──>  disk, stores, peers

The arena is the memory of the host tier. On a GPU it is pinned, and copies run on separate streams. On a CPU a
copy is done when the call returns. This module uses page ids and offsets in the arena. It does not depend on
hashes or requests.

With tensor parallelism the arena is shared memory. A page in it has the parts of all ranks side by side, and each
rank copies its own part. Tiers therefore store whole pages, and only rank 0 uses them:

    pool of rank 0: page 7 ──> |  rank 0  |  rank 1  | <── pool of rank 1: page 7
                               one page in the arena

Pages that are equal on all ranks, such as latents of MLA, are a single part. Rank 0 offloads this part, and all ranks
load it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import HASH_TOKENS, PageGroup, PoolLayout
from kvloom.engine.preflight import host_slab_bytes
from kvloom.kernels.copy import Copier, FinishedEvent
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
_MIN_CHECKED_BYTES = 32 * 1024
"""If a page has fewer bytes than this per layer, all its layers share one checksum, because a checksum per layer
would cost too much."""


def form_of(group: PageGroup, run: int, ranks: int = 1) -> Form:
    """Return the form (byte layout) of the pages of a layer group. If a block owns several pages in the group, `run` is
    the number of the page. A page contains the parts of all `ranks`, or a single part if the page is equal on all
    ranks. Pages of equal size with different layouts, or of another number of ranks, have different forms.
    """
    fields = ", ".join(f"{f.name}:{f.dtype}{list(f.shape)}" for f in group.spec.fields)
    single = group.page_stride % group.layer_bytes or group.layer_bytes < _MIN_CHECKED_BYTES
    parts = _parts(group, ranks)
    page_bytes = group.page_stride * parts
    return Form(
        dtype="+".join(dict.fromkeys(f.dtype for f in group.spec.fields)),
        order="LFHTD" if parts == 1 else "RLFHTD",
        page_bytes=page_bytes,
        run_bytes=page_bytes if single else group.layer_bytes,
        shard=f"run {run} of {group.runs}" + (f", {ranks} ranks" if ranks > 1 else ""),
        layout=_layout_text(group, run, fields),
    )


def _layout_text(group: PageGroup, run: int, fields: str) -> str:
    layers = ", ".join(group.layers[run * group.run_layers : (run + 1) * group.run_layers])
    return f"{group.spec.kind} {group.spec.visibility}, blocks of {group.block_tokens}: {layers}: {fields}"


def unit_forms(layout: PoolLayout, ranks: int = 1) -> dict[Form, UnitForm]:
    """Return a mapping: form (byte layout) of a page in the pool → form of its units. Tiers store each page as
    units.

    A unit is a page of HASH_TOKENS tokens. Its form is the form of pages in a layout with blocks of HASH_TOKENS tokens.
    Omits groups that cannot be cut into units: a block of HASH_TOKENS tokens would own another number of pages, or
    there is padding between the parts of ranks. Returns {} if `layout` already has blocks of HASH_TOKENS tokens.
    """
    if layout.block_tokens == HASH_TOKENS:
        return {}
    layers = {name: group.spec for group in layout.groups for name in group.layers}
    units = PoolLayout.build(layers, HASH_TOKENS)
    return {
        form_of(group, run, ranks): UnitForm(
            form_of(unit, run, ranks), _page_fields(unit, ranks), _page_fields(group, ranks)
        )
        for group, unit in zip(layout.groups, units.groups, strict=True)
        for run in range(group.runs)
        if group.runs == unit.runs and not _has_gaps(group, ranks) and not _has_gaps(unit, ranks)
    }


def value_forms(layout: PoolLayout, ranks: int = 1) -> dict[Form, ValueForm]:
    """Return a mapping: form (byte layout) of a page → form in which a re-encoding tier receives it. A re-encoding
    tier stores pages as int8 or fp8 values. The keys are the forms of pages in `layout`, and of their units (pages
    of HASH_TOKENS tokens).

    The tier receives tokens as plain float32 values, so the stored form does not depend on the KV dtype. Raises
    ValueError for pages whose scales are not in the page, and for pages with padding between the parts of ranks.
    """
    layers = {name: group.spec for group in layout.groups for name in group.layers}
    layouts = [layout]
    if layout.block_tokens != HASH_TOKENS:
        layouts.append(PoolLayout.build(layers, HASH_TOKENS))
    found = {}
    for group in (group for each in layouts for group in each.groups):
        if _has_gaps(group, ranks):
            raise ValueError(f"its pages of {group.name} have padding between the parts of {ranks} ranks")
        values = PageValues(_page_fields(group, ranks))
        for run in range(group.runs):
            form = form_of(group, run, ranks)
            text = form.layout if group.spec.unit == "state" else _layout_text(group, run, values.text())
            stored = replace(
                form,
                order="FLTHD" if _parts(group, ranks) == 1 else "FRLTHD",
                page_bytes=values.bytes,
                run_bytes=values.bytes,
                layout=text,
            )
            if group.spec.unit == "token":
                stored = replace(stored, dtype="fp32")
            found[form] = ValueForm(stored, values)
    return found


def _page_fields(group: PageGroup, ranks: int) -> PageFields:
    """Return the fields of a page. If there is no padding between the parts of ranks, the parts count as additional
    layers."""
    tokens, parts = group.block_tokens if group.spec.unit == "token" else 0, _parts(group, ranks)
    layers, page_bytes = group.run_layers * parts, group.page_stride * parts
    return PageFields(group.spec.fields, layers, tokens, group.layer_bytes, page_bytes)


def _parts(group: PageGroup, ranks: int) -> int:
    """Return the number of parts of a page in host memory: one for each rank. The number is 1 if the page is equal on
    all ranks, or if only rank 0 uses the page, as for a draft model."""
    is_divided = any(field.shard_axis is not None for field in group.spec.fields)
    return ranks if is_divided and group.spec.lifetime != "draft" else 1


def _has_gaps(group: PageGroup, ranks: int) -> bool:
    return _parts(group, ranks) > 1 and group.page_stride != group.page_bytes


def open_host(
    layout: PoolLayout,
    capacity: int,
    checked: bool,
    device: torch.device,
    shared: bool = False,
    ttl: float = 0,
    ranks: int = 1,
) -> tuple[HostTier, SharedMemory | None]:
    """Open a host tier, whose slab size is a multiple of the pool's slab size. For a GPU its memory is pinned. Returns
    the tier and its shared memory, or None instead of the shared memory.

    With `shared`, other processes on this host may map the memory and read it. With several `ranks`, the processes of
    the ranks may also write to it. Without `shared`, one rank uses no shared memory. If the system has no shared
    memory, one rank runs without it, and several ranks raise ValueError.
    """
    unit = host_slab_bytes(layout.slab_bytes * ranks, capacity)
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

    def offload(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64]) -> int:
        """Let all ranks copy pages to offsets in host memory, after the steps that were sent before. Does not wait.
        Return the number of the copy."""
        ...

    def load(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], is_whole: bool = False) -> int:
        """Let all ranks copy from offsets in host memory to pages. With `is_whole`, a page is one part, which every
        rank copies. Does not wait. Return the number of the copy."""
        ...

    def is_done(self, number: int) -> bool:
        """Return whether all ranks have made a copy."""
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


class HostPages:
    """Runs copies between one pool and the arena of one host tier. `rank` is the rank of this process, whose pool has
    part `rank` of every page. On rank 0 of a group, `ranks` repeats the copies on the other ranks. Otherwise `ranks` is
    None."""

    def __init__(
        self,
        layout: PoolLayout,
        buffer: torch.Tensor,
        arena: npt.NDArray[np.uint8],
        ranks: RankCopies | None = None,
        rank: int = 0,
    ) -> None:
        self.buffer = buffer
        self._arena, self._ranks, self._rank = arena, ranks, rank
        self._pool = None if buffer.is_cuda else buffer.numpy()
        self._marks: list[torch.cuda.Event] = []
        self._load_stream: torch.cuda.Stream | None = None
        if buffer.is_cuda:  # same priority as the copiers' streams, above the model's kernels
            self._load_stream = torch.cuda.Stream(buffer.device, priority=-1)  # type: ignore[no-untyped-call]
        memory = torch.from_numpy(arena)
        self._copiers: dict[int, Copier] = {}
        self._rows: dict[int, torch.Tensor] = {}
        for stride in {group.page_stride for group in layout.groups}:
            self._copiers[stride] = Copier(buffer, stride)
            count = memory.numel() // stride
            self._rows[stride] = memory[: count * stride].view(count, stride)

    @property
    def ranks(self) -> int:
        """Number of ranks whose parts a page in host memory contains. Correct only on rank 0."""
        return 1 if self._ranks is None else self._ranks.count

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

    def offload(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Event:
        """Copy pages of the pool to offsets in host memory, and return the event of the copy. Does not block on a GPU.

        On a GPU, `age` selects the work on the current stream for which the copy waits. 0 means all work, 1 the work
        before the last mark (see `mark`), and 2 the work before the second last mark. The caller must ensure that work
        after this mark did not write the pages.
        """
        own = offsets + self._rank * stride
        if self._ranks is None:
            return self._copy_out(stride, pages, own, age)
        number = self._ranks.offload(stride, pages, offsets)
        with self._failing(self._ranks):
            return RankEvent(self._copy_out(stride, pages, own, age), self._ranks, number)

    def load(
        self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64]
    ) -> LoadEvent | FinishedEvent | RankEvent:
        """Copy from offsets in host memory to pages of the pool, after the work on the current stream. Does not block
        on a GPU."""
        own = offsets + self._rank * stride
        if self._ranks is None:
            return self._copy_in(stride, pages, own)
        number = self._ranks.load(stride, pages, offsets)
        with self._failing(self._ranks):
            return RankEvent(self._copy_in(stride, pages, own), self._ranks, number)

    def is_whole(self, group: PageGroup) -> bool:
        """Return whether there are several ranks and a page of this layer group is equal on all of them. Such pages
        have one part, and are copied by `offload_whole` and `load_whole`."""
        return self.ranks > 1 and _parts(group, self.ranks) == 1

    def offload_whole(
        self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0
    ) -> torch.cuda.Event | FinishedEvent:
        """Like `offload`, for pages that have one part. Only this rank copies them."""
        return self._copy_out(stride, pages, offsets, age)

    def load_whole(
        self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64]
    ) -> LoadEvent | FinishedEvent | RankEvent:
        """Like `load`, for pages that have one part. Every rank copies this part."""
        if self._ranks is None:
            return self._copy_in(stride, pages, offsets)
        number = self._ranks.load(stride, pages, offsets, is_whole=True)
        with self._failing(self._ranks):
            return RankEvent(self._copy_in(stride, pages, offsets), self._ranks, number)

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
        self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], age: int
    ) -> torch.cuda.Event | FinishedEvent:
        if self._pool is not None:
            copy_pages(self._arena, offsets, self._pool, np.asarray(pages, np.int64) * stride, stride)
            return FinishedEvent()
        after = self._marks[:age][-1] if age and self._marks else None
        return self._copiers[stride].gather(
            pages, self._rows[stride], offsets // stride, after=after, trusted=True
        )

    def _copy_in(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64]) -> LoadEvent | FinishedEvent:
        if self._pool is not None:
            copy_pages(self._pool, np.asarray(pages, np.int64) * stride, self._arena, offsets, stride)
            return FinishedEvent()
        assert self._load_stream is not None
        start, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._load_stream.wait_stream(torch.cuda.current_stream(self.buffer.device))
        start.record(self._load_stream)
        self._copiers[stride].scatter(
            self._rows[stride], pages, offsets // stride, stream=self._load_stream, after=start
        )
        done.record(self._load_stream)
        return LoadEvent(start, done)
