"""The calls a disk tier makes to the operating system, in one place, so that tests can make any of them go wrong.

O_DIRECT where the file system has it: no second copy in the page cache, and reads at the device's own speed.
Knows no formats.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.tiers.encoding.checksums import checksums, read_checked, read_step
from kvloom.tiers.tier import TierError

__all__ = ["BLOCK", "Files", "SystemFiles", "aligned", "aligned_bytes", "lock_directory"]

BLOCK = 4096
_MOST_PIECES = 1024  # Linux's IOV_MAX


def aligned(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def aligned_bytes(size: int) -> memoryview:
    """Whole blocks of zeroed memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, max(BLOCK, aligned(size))))


class Files:
    """Files of one directory, held open: if something else is mounted over its path, nothing is written there."""

    def __init__(self, directory: int) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        return os.listdir(self.directory)  # noqa: PTH208  of the directory held open, not of a path

    def size_of(self, name: str) -> int:
        return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_size

    def open(self, name: str, create: bool, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= getattr(os, "O_DIRECT", 0) if direct else 0
        return os.open(name, flags, 0o600, dir_fd=self.directory)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.directory)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def allocate(self, fd: int, size: int) -> None:
        """Room on the disk now, so that a full one is known before anything is written."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        """Fills the pieces in order; fewer bytes at the end of the file."""
        done = 0
        for at in range(0, len(into), _MOST_PIECES):
            pieces = into[at : at + _MOST_PIECES]
            got = os.preadv(fd, pieces, offset + done)
            done += got
            if got < sum(map(len, pieces)):
                break
        return done

    def read_checked(self, fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes]:
        """Fills one piece of whole runs, some at a time; how many bytes came, and the checksums of the runs. Those of runs
        that did not come mean nothing."""
        step, done = read_step(run_bytes), 0
        sums = []
        for at in range(0, len(into), step):
            piece = into[at : at + step]
            got = self.read(fd, [piece], offset + at) if done == at else 0
            sums.append(checksums(piece, run_bytes))
            done += got
        return done, b"".join(sums)

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        """All of it, or an OSError."""
        done = 0
        for at in range(0, len(pieces), _MOST_PIECES):
            some = pieces[at : at + _MOST_PIECES]
            size = sum(map(len, some))
            put = os.pwritev(fd, some, offset + done)
            if put < size:
                raise OSError(errno.ENOSPC, f"only {put} of {size} bytes were written")
            done += put

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self) -> None:
        os.fsync(self.directory)


class SystemFiles(Files):
    """Files whose pages are read and checked in one call, where there is one."""

    def read_checked(self, fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes]:
        return read_checked(fd, into, offset, run_bytes) or super().read_checked(fd, into, offset, run_bytes)


def lock_directory(path: Path) -> tuple[int, int]:
    """Makes and locks a directory for one process: its descriptor, and the lock's. The lock goes with the process,
    however that ends."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts can be told from pages
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why = "it is no directory" if isinstance(error, FileExistsError) else error.strerror
        raise TierError(
            f"the disk tier cannot use {path}: {why}. Give a directory that this user may write"
        ) from error
    try:
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError as error:
        os.close(directory)
        raise TierError(
            f"the disk tier cannot write in {path}: {error.strerror}. Give a directory that this user may write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        os.close(directory)
        raise TierError(
            f"{path} is in use by process {owner}: a disk tier's directory has one process. Give another directory"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds, only its owner is not written down
    return directory, lock
