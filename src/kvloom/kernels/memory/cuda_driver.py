"""The few calls of the CUDA driver that torch does not offer: address ranges and batches of copies.

Bound by ctypes to libcuda.so.1 when first used, so importing this needs no GPU. Knows no pages: addresses and
bytes in, integers out, and a `CudaError` for every refusal.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["Addresses", "CudaDriver", "CudaError", "load_cuda_driver"]

Addresses = npt.NDArray[np.uint64]

_DEVICE, _PINNED, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_STREAM_ORDER = 1
_RDMA_SUPPORTED = 110
_BATCH_SINCE = 12080
"""The version whose signature of cuMemcpyBatchAsync is bound; later drivers still answer to it."""


class CudaError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    OUT_OF_MEMORY = 2

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed with {code}: {text}")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Allocation(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [("order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint)]


class CudaDriver:
    """libcuda. Every call raises CudaError if the driver refuses, and is as thread safe as the driver's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("cuInit", c_uint(0))
        self._batch = self._find_batch()

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name)
        self._check(name, function(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(c_int(code), byref(text))
            raise CudaError(name, code, (text.value or b"unknown").decode())

    def devices(self) -> int:
        """How many GPUs there are; those that CUDA_VISIBLE_DEVICES hides do not count. Takes no memory of theirs."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    # -- address ranges -------------------------------------------------------------------------

    def use(self, device: int) -> None:
        """Make the device's primary context current in this thread if none is: torch does so only when it
        needs one itself."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if not context.value:
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
            self._call("cuCtxSetCurrent", context)

    def granularity(self, device: int) -> int:
        """Bytes that every mapping is a multiple of (2 MiB on current devices)."""
        size = c_size_t()
        allocation = self._allocation(device)
        self._call("cuMemGetAllocationGranularity", byref(size), byref(allocation), c_int(_MINIMUM))
        return size.value

    def reserve(self, size: int, alignment: int) -> int:
        """Address space without memory."""
        address = c_uint64()
        self._call(
            "cuMemAddressReserve",
            byref(address),
            c_size_t(size),
            c_size_t(alignment),
            c_uint64(0),
            c_uint64(0),
        )
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(size))

    def create(self, size: int, device: int) -> int:
        """Memory without an address."""
        handle = c_uint64()
        allocation = self._allocation(device)
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(allocation), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Let a handle go; its memory stays for as long as it is mapped somewhere."""
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Put memory behind an address; nobody may touch it before `allow`."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))

    def allow(self, address: int, size: int, device: int) -> None:
        """The device may read and write this range, all of which is mapped."""
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Take the memory of whole mappings away; what has no handle and no other mapping is free again."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def _allocation(self, device: int) -> _Allocation:
        supported = c_int()
        self._call("cuDeviceGetAttribute", byref(supported), c_int(_RDMA_SUPPORTED), c_int(device))
        flags = _AllocationFlags(
            rdma=int(supported.value != 0)
        )  # so that a network card may read it directly
        return _Allocation(_PINNED, 0, _Location(_DEVICE, device), None, flags)

    # -- batches of copies ----------------------------------------------------------------------

    @property
    def copies_batches(self) -> bool:
        """Whether `copy_batch` exists: drivers of CUDA 12.8 and later have it."""
        return self._batch is not None

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueue copies of `sizes[i]` bytes from `sources[i]` to `targets[i]`, in no order among them.

        One call of the driver. `stream` is not the default stream and not being captured. The arrays are read
        before it returns; the memory must stay until the stream has passed.
        """
        if self._batch is None:
            raise RuntimeError("this driver has no cuMemcpyBatchAsync: it is older than CUDA 12.8")
        if not targets.size:
            return
        targets, sources, sizes = (
            np.ascontiguousarray(array, np.uint64) for array in (targets, sources, sizes)
        )
        attributes = _CopyAttributes(order=_STREAM_ORDER)
        first, failed = c_size_t(0), c_size_t(0)
        code = self._batch(
            *(c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            c_size_t(targets.size),
            byref(attributes),
            byref(first),
            c_size_t(1),
            byref(failed),
            c_void_p(stream),
        )
        self._check("cuMemcpyBatchAsync", code)

    def _find_batch(self) -> ctypes._CFunctionType | None:
        # Asked for by version: the plain symbol's arguments are not the same in every driver.
        address, status = c_void_p(), c_int()
        try:
            search = self._library.cuGetProcAddress_v2
        except AttributeError:
            return None
        code = search(b"cuMemcpyBatchAsync", byref(address), c_int(_BATCH_SINCE), c_uint64(0), byref(status))
        if code or not address.value:
            return None
        return ctypes.CFUNCTYPE(
            c_int, *([c_void_p] * 3), c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p
        )(address.value)


@cache
def load_cuda_driver() -> CudaDriver:
    """The driver of this machine, loaded once. OSError where there is none."""
    return CudaDriver(ctypes.CDLL("libcuda.so.1"))
