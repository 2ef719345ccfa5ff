"""The CUDA driver calls that torch does not offer: address ranges and batches of copies.

The first call loads libcuda.so.1 by ctypes, so importing this module needs no GPU. A failed call raises
`CudaError`.
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
"""The CUDA version that defines the signature of cuMemcpyBatchAsync used here. Later drivers still support it."""


class CudaError(RuntimeError):
    """Raised if a driver call fails. `code` is the CUresult of the call."""

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
    """The CUDA driver (libcuda). Every method raises CudaError on failure. Methods are thread-safe where the driver
    call is thread-safe."""

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
        """Return the number of GPUs visible under CUDA_VISIBLE_DEVICES. Allocates no device memory."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    # -- address ranges -------------------------------------------------------------------------

    def use(self, device: int) -> None:
        """Make the primary context of the device current in this thread, unless a context is already current.
        Driver calls need a current context, and torch sets it only at its first CUDA call in a thread."""
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if not context.value:
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
            self._call("cuCtxSetCurrent", context)

    def granularity(self, device: int) -> int:
        """Return the granularity of mappings in bytes (2 MiB on current devices)."""
        size = c_size_t()
        allocation = self._allocation(device)
        self._call("cuMemGetAllocationGranularity", byref(size), byref(allocation), c_int(_MINIMUM))
        return size.value

    def reserve(self, size: int, alignment: int) -> int:
        """Reserve address space without memory. Return the first address."""
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
        """Allocate memory without an address. Return its handle."""
        handle = c_uint64()
        allocation = self._allocation(device)
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(allocation), c_uint64(0))
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle. The memory is freed once it also has no mapping."""
        self._call("cuMemRelease", c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory to an address. The range must not be accessed before `allow`."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))

    def allow(self, address: int, size: int, device: int) -> None:
        """Allow the device to read and write this mapped range."""
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole mappings. The memory is freed if it has neither a handle nor another mapping."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def _allocation(self, device: int) -> _Allocation:
        supported = c_int()
        self._call("cuDeviceGetAttribute", byref(supported), c_int(_RDMA_SUPPORTED), c_int(device))
        flags = _AllocationFlags(
            rdma=int(supported.value != 0)
        )  # so that a network card can read the memory directly
        return _Allocation(_PINNED, 0, _Location(_DEVICE, device), None, flags)

    # -- batches of copies ----------------------------------------------------------------------

    @property
    def copies_batches(self) -> bool:
        """Return whether `copy_batch` is available. It needs a CUDA driver of version 12.8 or later."""
        return self._batch is not None

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Enqueue copies of `sizes[i]` bytes from `sources[i]` to `targets[i]` in one driver call. Their order is
        undefined.

        `stream` must not be the default stream and must not be captured. The call reads the arrays before it returns.
        The copied memory must stay valid until the copies are done.
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
        # The function is looked up by version, because the arguments of the plain symbol differ between
        # drivers.
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
    """Return the driver of this machine. The first call loads it. Raises OSError if there is no driver."""
    return CudaDriver(ctypes.CDLL("libcuda.so.1"))
