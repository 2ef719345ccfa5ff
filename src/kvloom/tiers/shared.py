"""Memory that another process of this user on this host can map: a host tier's arena that peers read without a copy in
between.

It has no name in any directory, so nothing is left behind however a process ends. Linux; elsewhere peers use TCP.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SharedMemory", "map_shared"]


class SharedMemory:
    """`buffer` goes to a HostTier, the whole to a PeerServer. OSError or AttributeError: this system has none."""

    def __init__(self, size: int) -> None:
        self.token = secrets.token_hex(16)
        self.size = size
        self._fd = os.memfd_create(f"kvloom-{self.token}")
        os.ftruncate(self._fd, size)
        self.buffer = mmap.mmap(self._fd, size)

    @property
    def path(self) -> str:
        """Where another process finds it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


_mapped: weakref.WeakValueDictionary[str, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def map_shared(path: str, token: str, size: int) -> npt.NDArray[np.uint8] | None:
    """Another process's shared memory, mapped once for all who ask; None where it cannot be reached from here (another
    host, user or container)."""
    with _lock:
        found = _mapped.get(token)
        if found is None:
            found = _map(path, token, size)
            if found is not None:
                _mapped[token] = found
        return found if found is None or len(found) == size else None


def _map(path: str, token: str, size: int) -> npt.NDArray[np.uint8] | None:
    try:
        if not path.startswith("/proc/") or f"/memfd:kvloom-{token} " not in f"{Path(path).readlink()} ":
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                return None
            return np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
