"""Pool memory that grows and shrinks while serving. Every slab has an address, but only mapped slabs have memory.

    addresses  |slab 0|slab 1|slab 2|slab 3|…    reserved once, so that pages and captured graphs stay valid
    memory     |######|######|      |######|     mapped and unmapped slab by slab

On CUDA the driver reserves an address range, and each slab is one allocation. On a CPU the range is an anonymous
mapping, which gets memory at the first write. The page pool decides which slabs are in use.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import PoolLayout

from .cuda_driver import CudaDriver, CudaError, load_cuda_driver

__all__ = ["ElasticBuffer", "elastic_buffer", "granularity"]

Flags = npt.NDArray[np.bool_]

# Linux's value. Only later Python versions have a name for it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def granularity(device: torch.device | str = "cpu") -> int:
    """Return the granularity of slab sizes in bytes, for `PoolLayout.build`. A slab size must be a multiple of it."""
    device = _indexed(torch.device(device))
    if device.type == "cuda":
        return load_cuda_driver().granularity(device.index)
    return mmap.PAGESIZE


def elastic_buffer(
    layout: PoolLayout, slabs: int, device: torch.device | str = "cpu", mapped: int = 1
) -> ElasticBuffer:
    """Return an elastic pool for `layout` with addresses for `slabs` slabs, of which the first `mapped` have memory.
    `layer_views(buffer.tensor, layout)` then returns the layer views of all slabs."""
    return ElasticBuffer(layout.slab_bytes, slabs, device, mapped)


class ElasticBuffer:
    """Reserves addresses for `slabs` slabs, and maps memory to the first `mapped` of them. `tensor` is a
    one-dimensional uint8 tensor over all slabs. Not thread-safe: one thread must map and unmap.

    - Only mapped slabs may be accessed. On a GPU, access to an unmapped slab faults and destroys the CUDA context of
      the process. On a CPU, such an access reads zeros.
    - Memory is uninitialised.
    - Slab 0 always has memory, because padding refers to page 0.
    - Views keep the addresses alive. `close` frees everything at once and invalidates all views.
    """

    def __init__(
        self, slab_bytes: int, slabs: int, device: torch.device | str = "cpu", mapped: int = 1
    ) -> None:
        device = _indexed(torch.device(device))
        step = granularity(device)
        if slab_bytes <= 0 or slab_bytes % step:
            raise ValueError(
                f"a slab of {slab_bytes} bytes cannot be mapped on {device}: it must be a multiple of {step}; "
                f"build the layout with granularity={step}"
            )
        if not 1 <= mapped <= slabs:
            raise ValueError(f"{mapped} of {slabs} slabs mapped: give 1 to {slabs}")
        self.slab_bytes = slab_bytes
        self.slabs = slabs
        self.device = device
        self._mapped: Flags = np.zeros(slabs, np.bool_)
        self._backing: _Backing = (
            _CudaRange(load_cuda_driver(), device, slab_bytes, self._mapped)
            if device.type == "cuda"
            else _HostRange(slab_bytes, slabs)
        )
        self._tensor: torch.Tensor | None = None
        self._closed = False
        try:
            self.map(range(mapped))
            # Only after slab 0 is mapped: torch asks the driver for the device of this address.
            self._tensor = self._backing.view()
        except BaseException:
            self.close()
            raise

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise ValueError("this buffer is closed")
        return self._tensor

    @property
    def mapped_slabs(self) -> int:
        return int(self._mapped.sum())

    @property
    def mapped_bytes(self) -> int:
        return self.mapped_slabs * self.slab_bytes

    def is_mapped(self, slab: int) -> bool:
        return bool(self._mapped[slab])

    def map(self, slabs: Iterable[int]) -> None:
        """Map memory to these slabs. Its contents are undefined. If there is not enough memory, raises MemoryError
        and maps none of them. Return without waiting for the device, and does not affect running kernels. Makes a few
        driver calls per slab."""
        wanted = self._chosen(slabs)
        if self._mapped[wanted].any():
            raise ValueError(f"slab {wanted[self._mapped[wanted]][0]} is mapped already")
        self._backing.map(wanted)
        self._mapped[wanted] = True

    def unmap(self, slabs: Iterable[int], after: torch.cuda.Event | None = None) -> None:
        """Free the memory of these slabs. Their addresses stay reserved.

        Waits first for the event `after`, which must follow every access to the slabs on any stream. Without
        `after`, waits for the whole device. Before the call, the caller must unregister the memory from network
        cards.
        """
        chosen = self._chosen(slabs)
        if not self._mapped[chosen].all():
            raise ValueError(f"slab {chosen[~self._mapped[chosen]][0]} is not mapped")
        if (chosen == 0).any():
            raise ValueError("slab 0 stays mapped: padding points at its page 0")
        if not chosen.size:
            return
        if after is not None:
            after.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._backing.unmap(chosen)
        self._mapped[chosen] = False

    def close(self) -> None:
        """Wait for the device, then free memory and addresses. A second call has no effect."""
        self._tensor = None
        self._closed = True
        self._backing.close()
        self._mapped[:] = False

    def __enter__(self) -> ElasticBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chosen(self, slabs: Iterable[int]) -> npt.NDArray[np.int64]:
        if self._closed:
            raise ValueError("this buffer is closed")
        chosen = np.unique(np.fromiter(slabs, np.int64))
        if chosen.size and not 0 <= chosen[0] <= chosen[-1] < self.slabs:
            wrong = chosen[0] if chosen[0] < 0 else chosen[-1]
            raise ValueError(f"slab {wrong} is outside the reservation of {self.slabs} slabs: reserve more")
        return chosen


class _Backing(Protocol):
    """Maps memory to addresses. The caller passes sorted, valid slab numbers."""

    def view(self) -> torch.Tensor: ...
    def map(self, slabs: npt.NDArray[np.int64]) -> None: ...
    def unmap(self, slabs: npt.NDArray[np.int64]) -> None: ...
    def close(self) -> None: ...


class _HostRange:
    """Private anonymous memory. The operating system allocates a memory page when the page is first written."""

    def __init__(self, slab_bytes: int, slabs: int) -> None:
        self._slab_bytes = slab_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._memory = mmap.mmap(-1, slab_bytes * slabs, flags=flags)
        except OSError as error:
            raise MemoryError(f"no addresses for {slabs} slabs of {slab_bytes} bytes: {error}") from error

    def view(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def map(self, slabs: npt.NDArray[np.int64]) -> None:
        pass

    def unmap(self, slabs: npt.NDArray[np.int64]) -> None:
        for first, count in _contiguous_ranges(slabs):
            self._memory.madvise(mmap.MADV_DONTNEED, first * self._slab_bytes, count * self._slab_bytes)

    def close(self) -> None:
        # The mapping is freed with the last tensor that views it. Freeing it here would leave dangling
        # views.
        self._memory.madvise(mmap.MADV_DONTNEED)


class _CudaRange:
    """A reserved range of device addresses. Torch keeps the range alive while `view` exists.

    A handle is released as soon as it is mapped. The mapping alone keeps the memory, and unmapping frees it.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, slab_bytes: int, mapped: Flags) -> None:
        self._driver = driver
        self._device = device
        self._slab_bytes = slab_bytes
        self._size = slab_bytes * mapped.size
        driver.use(device.index)
        try:
            self._address = driver.reserve(self._size, driver.granularity(device.index))
        except CudaError as error:
            raise MemoryError(
                f"no addresses for {mapped.size} slabs of {slab_bytes} bytes: {error}"
            ) from error
        # Not at exit: the driver may be unloaded already, and it frees the memory of the process itself.
        self._free = weakref.finalize(self, _free, driver, device, self._address, slab_bytes, mapped)
        self._free.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def view(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device)

    def map(self, slabs: npt.NDArray[np.int64]) -> None:
        self._driver.use(self._device.index)
        done: list[int] = []
        try:
            for slab in slabs.tolist():
                self._map_one(slab)
                done.append(slab)
            for first, count in _contiguous_ranges(slabs):
                self._driver.allow(*self._bytes(first, count), self._device.index)
        except BaseException as error:
            self.unmap(np.array(done, np.int64))
            if isinstance(error, CudaError) and error.code == CudaError.OUT_OF_MEMORY:
                free, total = torch.cuda.mem_get_info(self._device)
                raise MemoryError(
                    f"no memory on {self._device} for {slabs.size} slabs of {self._slab_bytes} bytes: {free} of "
                    f"{total} bytes are free, enough for {free // self._slab_bytes}; map fewer or free some first"
                ) from error
            raise

    def _map_one(self, slab: int) -> None:
        try:
            handle = self._driver.create(self._slab_bytes, self._device.index)
        except CudaError as error:
            if error.code != CudaError.OUT_OF_MEMORY:
                raise
            torch.cuda.empty_cache()  # freeing torch's cached memory may be enough
            handle = self._driver.create(self._slab_bytes, self._device.index)
        try:
            self._driver.map(*self._bytes(slab, 1), handle)
        finally:
            self._driver.release(handle)

    def unmap(self, slabs: npt.NDArray[np.int64]) -> None:
        self._driver.use(self._device.index)
        for first, count in _contiguous_ranges(slabs):
            self._driver.unmap(*self._bytes(first, count))

    def close(self) -> None:
        self._free()

    def _bytes(self, slab: int, count: int) -> tuple[int, int]:
        return self._address + slab * self._slab_bytes, count * self._slab_bytes


def _free(driver: CudaDriver, device: torch.device, address: int, slab_bytes: int, mapped: Flags) -> None:
    driver.use(device.index)
    torch.cuda.synchronize(device)
    for first, count in _contiguous_ranges(np.flatnonzero(mapped)):
        driver.unmap(address + first * slab_bytes, count * slab_bytes)
    driver.free(address, slab_bytes * mapped.size)


def _contiguous_ranges(slabs: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the contiguous ranges of the sorted slab numbers, as (first slab, number of slabs)."""
    if slabs.size:
        for run in np.split(slabs, np.flatnonzero(np.diff(slabs) != 1) + 1):
            yield int(run[0]), run.size


def _indexed(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"elastic memory exists for cpu and cuda, not for {device}: use views.allocate")
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
