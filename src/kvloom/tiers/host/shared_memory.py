"""Memory that other processes of this user on this host can map. Peers map the arena of a host tier in this way, and
copy pages without socket traffic.

The memory has no name in any directory, so nothing remains when the process ends. Such memory exists only on Linux. On
other systems peers use TCP.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SharedMemory", "map_shared_memory"]

_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python does not define
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class SharedMemory:
    """A block of shared memory. Pass `buffer` to a HostTier and the object itself to a PeerServer. With
    `read_only`, other processes cannot write to the memory. Raises OSError or AttributeError if the system does not
    support shared memory.
    """

    def __init__(self, size: int, read_only: bool = False) -> None:
        self.token = secrets.token_hex(16)
        self.size = size
        self._fd = os.memfd_create(f"kvloom-{self.token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)  # an open descriptor keeps the memory allocated
        os.ftruncate(self._fd, size)
        self.buffer = mmap.mmap(self._fd, size)
        # If a peer could truncate the memory, every process that maps it would crash.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _FIXED)
        if read_only:  # mappings that exist already stay writable
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    @property
    def path(self) -> str:
        """The path at which other processes can open the memory while this process runs."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"


_mapped: weakref.WeakValueDictionary[str, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def map_shared_memory(path: str, token: str, size: int) -> npt.NDArray[np.uint8] | None:
    """Return the shared memory of another process as an array. `token` identifies the memory, which is mapped only
    once per process. Return None if the memory cannot be mapped, for example because it belongs to another host, user
    or container."""
    with _lock:
        found = _mapped.get(token)
        if found is None:
            found = _map(path, token, size)
            if found is not None:
                _mapped[token] = found
        return found if found is None or len(found) == size else None


def _map(path: str, token: str, size: int) -> npt.NDArray[np.uint8] | None:
    try:
        if not re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", path) or not re.fullmatch(r"[0-9a-f]{32}", token):
            return None
        if not str(Path(path).readlink()).startswith(f"/memfd:kvloom-{token} "):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED != _FIXED or os.fstat(fd).st_size != size:
                return None
            try:
                mapped = mmap.mmap(fd, size)
            except PermissionError:  # the owner allows only reading
                mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None
