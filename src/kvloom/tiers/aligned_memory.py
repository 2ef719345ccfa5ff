"""Memory that starts and ends at a multiple of the disk's block size. O_DIRECT needs such memory. Buffers that are
registered with NIXL or Mooncake also use it."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "address_of", "aligned", "aligned_bytes"]

BLOCK = 4096


def aligned(size: int) -> int:
    """Return the size rounded up to whole disk blocks."""
    return -(-size // BLOCK) * BLOCK


def aligned_bytes(size: int) -> memoryview:
    """Return zeroed memory of at least `size` bytes. Its start and its size are multiples of the disk's block
    size."""
    return memoryview(mmap.mmap(-1, max(BLOCK, aligned(size))))


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])
