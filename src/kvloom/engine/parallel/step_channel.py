"""Messages in shared memory, from rank 0 to all other ranks. Each message is written once.

    | number of messages read, by rank | slot 0 | slot 1 | slot 2 | slot 3 |     message k is in slot k % 4

A socket to each rank carries the length of each message, which wakes the rank. A slot is reused when every
rank has read it. The memory has no name, and is freed with the last process that uses it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

__all__ = ["StepChannel", "create_memory"]

SLOTS = 4
SLOT_BYTES = 256 << 20
"""Largest size of a message in bytes. Parts of a slot that no message has used take no memory."""
HEADER_BYTES = 4096
SIZE = HEADER_BYTES + SLOTS * SLOT_BYTES
SPINS = 100
"""Number of checks without a pause, before `write` sleeps between checks."""


def create_memory() -> int:
    """Return the file descriptor of new shared memory."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("kvloom-steps")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, SIZE)
    return fd


class StepChannel:
    """One end of the shared memory: rank 0 writes, each other rank reads."""

    def __init__(self, fd: int, ranks: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)
        self._read = np.frombuffer(self._memory, np.int64, ranks)
        self._count = 0

    def write(self, message: bytes, seconds: float, check: Callable[[], None]) -> None:
        """Write a message to the next slot. If a rank has not read the previous message in this slot, wait up to
        `seconds` for the rank, and call `check` meanwhile. Raises TimeoutError after this time, and ValueError for a
        message that exceeds a slot."""
        if len(message) > SLOT_BYTES:
            raise ValueError(f"a step message of {len(message):,} bytes exceeds {SLOT_BYTES:,} bytes")
        began, waits = time.monotonic(), 0
        while int(self._read[1:].min()) <= self._count - SLOTS:
            waits += 1
            if waits > SPINS:
                check()
                if time.monotonic() - began > seconds:
                    raise TimeoutError(f"a rank has not read a step for {seconds:g} s")
                time.sleep(0.0005)
        at = HEADER_BYTES + self._count % SLOTS * SLOT_BYTES
        self._memory[at : at + len(message)] = message
        self._count += 1

    def read(self, length: int, rank: int) -> bytes:
        """Return the next message, which has `length` bytes, and record that `rank` has read its slot. Call this method
        after `length` has arrived over the socket."""
        at = HEADER_BYTES + self._count % SLOTS * SLOT_BYTES
        message = self._memory[at : at + length]
        self._count += 1
        self._read[rank] = self._count
        return message

    def close(self) -> None:
        """Unmap the memory."""
        del self._read
        self._memory.close()
