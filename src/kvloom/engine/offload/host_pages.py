"""Pages between the pool and host memory: where each page size lies in the host tier's arena, and how it is copied.

    pool, pages of one stride  <── Copier ──>  arena, rows of that stride  <── lanes ──>  disk, stores, peers

On a GPU the arena is pinned and copies run on streams of their own; on a CPU they are done when the call returns.
Knows page ids and places in the arena; not what the pages are.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import PageGroup, PoolLayout
from kvloom.kernels.copy import Copier, FinishedEvent
from kvloom.tiers import Form, HostConfig, HostTier
from kvloom.tiers.host.arena import copy_pages
from kvloom.tiers.host.shared_memory import SharedMemory

__all__ = ["Event", "HostPages", "LoadEvent", "form_of", "open_host"]

Event = torch.cuda.Event | FinishedEvent
Ids = npt.NDArray[np.integer[Any]]
_SLAB = 8 << 20
_CHECKED_RUN = 32 * 1024
"""Layers below this size are checked together: a checksum each would cost more than it is worth."""


def form_of(group: PageGroup, run: int) -> Form:
    """How the bytes of a group's pages lie. Whatever differs between two layouts that could be mistaken is in it."""
    layers = group.layers[run * group.run_layers : (run + 1) * group.run_layers]
    fields = ", ".join(f"{f.name}:{f.dtype}{list(f.shape)}" for f in group.spec.fields)
    single = group.page_stride % group.layer_bytes or group.layer_bytes < _CHECKED_RUN
    return Form(
        dtype="+".join(dict.fromkeys(f.dtype for f in group.spec.fields)),
        order="LFHTD",
        page_bytes=group.page_stride,
        run_bytes=group.page_stride if single else group.layer_bytes,
        shard=f"run {run} of {group.runs}",
        layout=f"{group.spec.kind} {group.spec.visibility}, blocks of {group.block_tokens}: {', '.join(layers)}: {fields}",
    )


def open_host(
    layout: PoolLayout, capacity: int, checked: bool, device: torch.device, shared: bool = False
) -> tuple[HostTier, SharedMemory | None]:
    """A host tier whose slabs are cut as the pool's are; pinned where a GPU copies from it. `shared` lets other processes of
    this host map it to read it, where the system can do that: then its memory comes with it."""
    unit = math.lcm(layout.slab_bytes, mmap.PAGESIZE)
    if capacity < unit:
        raise ValueError(f"a host tier of {capacity:,} bytes is too small: its unit is {unit:,}")
    slab = unit * max(1, min(_SLAB, capacity // 32) // unit)
    memory = None
    if shared:
        with contextlib.suppress(OSError, AttributeError):
            memory = SharedMemory(capacity // slab * slab, read_only=True)
    tier = HostTier(HostConfig(capacity, slab, checked), None if memory is None else memory.buffer)
    if device.type == "cuda":
        arena = tier.arena
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(int(arena.ctypes.data), arena.nbytes, 0)
        if int(code):
            raise ValueError(
                f"the system does not pin {capacity:,} bytes of host memory (CUDA error {int(code)}): ask for less"
            )
        address = int(arena.ctypes.data)
        _pinned[address] = weakref.finalize(
            tier, _unpin, address
        )  # before its memory goes, if nobody closes it
        _pinned[address].atexit = False
    return tier, memory


_pinned: dict[int, weakref.finalize[[int], HostTier]] = {}


def _unpin(address: int) -> None:
    """Memory that goes while it is pinned could not be pinned again."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """A copy to the device, between two moments of its stream."""

    begun: torch.cuda.Event
    done: torch.cuda.Event

    def query(self) -> bool:
        return self.done.query()  # type: ignore[no-untyped-call, no-any-return]

    def seconds_since(self, first: LoadEvent) -> float:
        """Of a copy that is done: how long after the first one's beginning it was. Waiting for a step in flight, and until
        somebody looks, is not in it."""
        return first.begun.elapsed_time(self.done) / 1e3  # type: ignore[no-any-return]


class HostPages:
    """Copies between one pool and one host tier."""

    def __init__(self, layout: PoolLayout, buffer: torch.Tensor, host: HostTier) -> None:
        self.buffer = buffer
        self._arena = host.arena
        self._pool = None if buffer.is_cuda else buffer.numpy()
        self._marks: list[torch.cuda.Event] = []
        self._up: torch.cuda.Stream | None = None
        if buffer.is_cuda:  # ahead of the model's kernels, like the copiers' own
            self._up = torch.cuda.Stream(buffer.device, priority=-1)  # type: ignore[no-untyped-call]
        arena = torch.from_numpy(host.arena)
        self._copiers: dict[int, Copier] = {}
        self._rows: dict[int, torch.Tensor] = {}
        for stride in {group.page_stride for group in layout.groups}:
            self._copiers[stride] = Copier(buffer, stride)
            count = arena.numel() // stride
            self._rows[stride] = arena[: count * stride].view(count, stride)

    def close(self) -> None:
        """No copy is made any more; pinned memory is ordinary again."""
        unpin = _pinned.pop(int(self._arena.ctypes.data), None)
        if unpin is not None:
            unpin()

    def wait(self, event: Event) -> None:
        """What is launched from now on begins after `event`, on the device."""
        event.wait(torch.cuda.current_stream(self.buffer.device))

    def mark(self, moved: bool = False) -> None:
        """What copies of old pages begin after, from now on: what the current stream has been told so far. `moved`: pages of any
        age were written since the mark before, which is no mark any more."""
        if self._pool is None:
            event = self._marks.pop() if len(self._marks) == 2 else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.buffer.device))
            self._marks = [event] if moved else [event, *self._marks]

    def offload(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Event:
        """Pages to places in the arena; begins after what the current stream has still to do, or had at the last mark (`age` 1) or
        the one before it (2), if there was one."""
        if self._pool is not None:
            copy_pages(self._arena, offsets, self._pool, np.asarray(pages, np.int64) * stride, stride)
            return FinishedEvent()
        after = self._marks[:age][-1] if age and self._marks else None
        return self._copiers[stride].gather(
            pages, self._rows[stride], offsets // stride, after=after, trusted=True
        )

    def load(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64]) -> LoadEvent | FinishedEvent:
        """Places in the arena to pages; begins after what the current stream has still to do."""
        if self._pool is not None:
            copy_pages(self._pool, np.asarray(pages, np.int64) * stride, self._arena, offsets, stride)
            return FinishedEvent()
        assert self._up is not None
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._up.wait_stream(torch.cuda.current_stream(self.buffer.device))
        begun.record(self._up)
        self._copiers[stride].scatter(
            self._rows[stride], pages, offsets // stride, stream=self._up, after=begun
        )
        done.record(self._up)
        return LoadEvent(begun, done)
