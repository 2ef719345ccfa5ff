"""Checksums (64-bit xxh3) of the layer runs of a page. A layer run is the data of one layer, or the whole page. The
checksums can be computed alone, or during a copy, a read, a send or a receive.

If the package was built with a compiler, native code handles a whole page in one call, without the interpreter lock.
Otherwise the package xxhash computes the same results, one layer run at a time. This module does not depend on formats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from importlib import import_module
from math import lcm
from types import ModuleType
from typing import Any

from kvloom.tiers.tier import TierError

_native: ModuleType | None
try:
    from kvloom.tiers import _native
except ImportError:
    _native = None

__all__ = [
    "checksum",
    "copy_checked",
    "read_checked",
    "read_step",
    "receive_checked",
    "receive_step",
    "run_checksums",
    "send_checked",
    "send_step",
]

_SHORTEST_RUN = 241  # shortest layer run, in bytes, that the native loops support
_COPY_BYTES = 256 << 10
_READ_BYTES = 256 << 10
_SEND_BYTES, _RECEIVE_BYTES = 512 << 10, 256 << 10  # the fastest of 64 KiB to 1 MiB
_BLOCK = 4096

_xxh3: Callable[[Any], int] | None = None


def checksum(data: memoryview | bytes) -> int:
    """Return the 64-bit xxh3 checksum. This takes as long as a memory copy, and a fourth of the time of zlib's
    crc32."""
    if _native is not None:
        value: int = _native.checksum(data)
        return value
    global _xxh3  # noqa: PLW0603  imported on first use: a tier without checksums does not need the package
    if _xxh3 is None:
        try:
            found: Callable[[Any], int] = import_module("xxhash").xxh3_64_intdigest
        except ImportError as error:
            raise TierError(
                "there are no checksums: kvloom was built without a compiler, and the package 'xxhash' is missing: "
                "pip install 'kvloom[tiers]'"
            ) from error
        _xxh3 = found
    return _xxh3(data)


def run_checksums(page: memoryview, run_bytes: int) -> bytes:
    """Return the checksums of a page's layer runs, packed as in the header of a stored page. The size of the page
    must be a multiple of `run_bytes`."""
    if _native is not None and run_bytes >= _SHORTEST_RUN:
        found: bytes = _native.checksums(page, run_bytes)
        return found
    ends = range(run_bytes, len(page) + 1, run_bytes)
    return struct.pack(f"<{len(ends)}Q", *(checksum(page[end - run_bytes : end]) for end in ends))


def copy_checked(into: memoryview, page: memoryview, run_bytes: int, of_target: bool) -> bytes:
    """Copy the layer runs of a page to `into` and return their checksums. With `of_target`, the checksums are
    computed from `into` after the copy, else from `page`.

    Takes little more time than a copy, because the copied bytes are still in the processor's cache.
    """
    if _native is not None and run_bytes >= _SHORTEST_RUN:
        found: bytes = _native.copy(into, page, run_bytes, of_target)
        return found
    sums = []
    step = max(run_bytes, _COPY_BYTES // run_bytes * run_bytes)
    for at in range(0, len(page), step):
        into[at : at + step] = page[at : at + step]
        sums.append(run_checksums((into if of_target else page)[at : at + step], run_bytes))
    return b"".join(sums)


def read_checked(fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes] | None:
    """Read bytes from `offset` of a file into `into`, whose size is a multiple of `run_bytes`. Return the number
    of bytes read, and one checksum for each layer run (`run_bytes` bytes).

    Checksums of layer runs that were not read are undefined. Return None if the native code does not support
    `run_bytes`. Raises OSError if the read fails.
    """
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    result: tuple[int, bytes] = _native.read(fd, into, offset, run_bytes, read_step(run_bytes))
    return result


def send_checked(fd: int, data: memoryview, run_bytes: int, until: float) -> bytes | None:
    """Send the layer runs in `data` on a connected socket and return their checksums. If the native code does not
    support `run_bytes`, sends nothing and returns None. Raises OSError if sending fails. Raises BlockingIOError if
    sending has not ended at the time `until` (monotonic seconds)."""
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    sums: bytes = _native.send(fd, data, run_bytes, send_step(run_bytes), until)
    return sums


def receive_checked(fd: int, into: memoryview, run_bytes: int, until: float) -> bytes | None:
    """Receive layer runs from a connected socket into `into` and return their checksums. `until` limits the time as
    in `send_checked`, and the same cases return None or raise an error. Raises ConnectionError at the end of the
    stream.
    """
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    sums: bytes = _native.receive(fd, into, run_bytes, receive_step(run_bytes), until)
    return sums


def send_step(run_bytes: int) -> int:
    """Return the number of bytes to checksum and send at a time. These are whole layer runs that fit into the
    processor's cache."""
    return max(run_bytes, _SEND_BYTES // run_bytes * run_bytes)


def receive_step(run_bytes: int) -> int:
    """Return the number of bytes to receive and checksum at a time. These are whole layer runs that fit into the
    processor's cache.
    """
    return max(run_bytes, _RECEIVE_BYTES // run_bytes * run_bytes)


def read_step(run_bytes: int) -> int:
    """Return the number of bytes of one disk read, in whole layer runs and whole disk blocks. The size is about
    256 KiB, or more if a layer run is longer. With reads of this size, several threads saturate a disk. The bytes
    are still in the processor's cache when they are verified."""
    whole = lcm(run_bytes, _BLOCK)
    return max(whole, _READ_BYTES // whole * whole)
