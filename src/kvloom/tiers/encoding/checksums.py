"""Checksums of a page's runs, xxh3 of 64 bits: alone, or while a page is copied, read, sent or received.

Native where the package was built with a compiler: one call a page, and other threads run meanwhile. Else by the package
xxhash, run by run. Both give the same. Knows no formats.
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

_SHORTEST_RUN = 241  # that the native loops take
_COPY_BYTES = 256 << 10
_READ_BYTES = 256 << 10
_SEND_BYTES, _RECEIVE_BYTES = 512 << 10, 256 << 10  # the best of 64 KiB to 1 MiB
_BLOCK = 4096

_xxh3: Callable[[Any], int] | None = None


def checksum(data: memoryview | bytes) -> int:
    """xxh3, 64 bits: as fast as memory here, where zlib's crc32 does a quarter of it."""
    global _xxh3  # noqa: PLW0603  found on first use, so that a tier without checksums needs no package
    if _xxh3 is None:
        try:
            found: Callable[[Any], int] = import_module("xxhash").xxh3_64_intdigest
        except ImportError as error:
            raise TierError("the package 'xxhash' is missing: pip install 'kvloom[tiers]'") from error
        _xxh3 = found
    return _xxh3(data)


def run_checksums(page: memoryview, run_bytes: int) -> bytes:
    """The checksums of a page's runs, as they stand in a head. The page is whole runs."""
    if _native is not None and run_bytes >= _SHORTEST_RUN:
        found: bytes = _native.checksums(page, run_bytes)
        return found
    ends = range(run_bytes, len(page) + 1, run_bytes)
    return struct.pack(f"<{len(ends)}Q", *(checksum(page[end - run_bytes : end]) for end in ends))


def copy_checked(into: memoryview, page: memoryview, run_bytes: int, of_target: bool) -> bytes:
    """Copies a page's runs; their checksums, of `into` if `arrived`, else of `page`. Costs little more than the copy: each
    piece is taken while the processor still has it."""
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
    """Fills `into`, whole runs, from `offset` of a file; how many bytes came, and the checksums of the runs (of those that
    did not come, any). None where the native loops do not serve. OSError as the system says."""
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    result: tuple[int, bytes] = _native.read(fd, into, offset, run_bytes, read_step(run_bytes))
    return result


def send_checked(fd: int, data: memoryview, run_bytes: int, until: float) -> bytes | None:
    """Sends whole runs on a connected socket; their checksums. None where the native loops do not serve: nothing was sent. OSError
    as the system says; BlockingIOError also after `until`, in monotonic seconds."""
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    sums: bytes = _native.send(fd, data, run_bytes, send_step(run_bytes), until)
    return sums


def receive_checked(fd: int, into: memoryview, run_bytes: int, until: float) -> bytes | None:
    """Fills whole runs from a connected socket; their checksums. As `send_checked`; ConnectionError where fewer come."""
    if _native is None or run_bytes < _SHORTEST_RUN:
        return None
    sums: bytes = _native.receive(fd, into, run_bytes, receive_step(run_bytes), until)
    return sums


def send_step(run_bytes: int) -> int:
    """What to check and then send at once: whole runs, so few that the processor still has them."""
    return max(run_bytes, _SEND_BYTES // run_bytes * run_bytes)


def receive_step(run_bytes: int) -> int:
    """What to receive and then check at once, likewise."""
    return max(run_bytes, _RECEIVE_BYTES // run_bytes * run_bytes)


def read_step(run_bytes: int) -> int:
    """What to read at once: whole runs and blocks, a quarter of a megabyte unless a run is longer. Several threads keep a disk
    busy with that, and what has just come is checked before the processor has lost it."""
    whole = lcm(run_bytes, _BLOCK)
    return max(whole, _READ_BYTES // whole * whole)
