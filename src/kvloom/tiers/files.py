"""The calls a disk tier makes to the operating system, in one place, so that tests can make any of them go wrong.

O_DIRECT where the file system has it: no second copy in the page cache, and reads at the device's own speed.
Knows no formats.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checks import checksums, read_checked, read_step
from .tier import TierError

__all__ = ["BLOCK", "Files", "NotOursError", "SystemFiles", "aligned", "aligned_bytes", "lock_directory"]

log = logging.getLogger("kvloom.tiers")
BLOCK = 4096
_MOST_PIECES = 1024  # Linux's IOV_MAX
_LOCK_BYTES = 32  # a lock holds one process id


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
        """Opens a regular file of this user; `create` makes a new one with mode 0600. Follows no symbolic link. NotOursError, and
        the file keeps its bytes, where it is of another kind or owner."""
        flags = os.O_CREAT | os.O_EXCL if create else 0
        flags |= getattr(os, "O_DIRECT", 0) if direct else 0
        return _open_own(name, flags, self.directory)

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


class NotOursError(OSError):
    """A file in a tier's directory that this user did not create as a plain file. The tier neither reads nor changes it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(errno.EPERM, f"{name!r} {why}")


def _owners_of(directory: int) -> frozenset[int]:
    """Users whose files a tier accepts in a directory: this user; for root the directory's owner, too."""
    us = os.geteuid()
    return frozenset((us,) if us else (us, os.fstat(directory).st_uid))


def _open_own(name: str, flags: int, directory: int) -> int:
    """Opens a regular file for reading and writing and verifies it before any byte changes."""
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOursError(name, "is a symbolic link: remove it, or give another directory") from None
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise NotOursError(name, "is no regular file: remove it, or give another directory") from None
        raise
    found, why = os.fstat(fd), ""
    if not stat.S_ISREG(found.st_mode):
        why = "is no regular file"
    elif found.st_uid not in _owners_of(directory):
        why = f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    elif found.st_nlink > 1:
        why = f"has {found.st_nlink} hard links, and a tier's file has one"
    if why:
        os.close(fd)
        raise NotOursError(name, f"{why}: remove it, or give another directory")
    os.set_blocking(fd, True)
    return fd


def _make_directory(path: Path) -> None:
    """Creates a directory and its missing parents, each with mode 0700: pages reveal prompts."""
    missing = []
    for parent in (path, *path.parents):
        if parent.exists():
            break
        missing.append(parent)
    for parent in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            parent.mkdir(mode=0o700)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _check_directory(path: Path, directory: int) -> None:
    """Raises TierError where another user can exchange the tier's files; logs a warning where one might."""
    us, link, found = os.geteuid(), path.lstat(), os.fstat(directory)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (us, 0):
        raise TierError(
            f"the disk tier does not use {path}: user {link.st_uid} made this symbolic link, not user {us}. "
            "Give the directory itself"
        )
    others = bool(found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if others and found.st_uid != us:
        raise TierError(
            f"the disk tier does not use {path}: it belongs to user {found.st_uid}, and every user may exchange its files "
            f"(mode {stat.S_IMODE(found.st_mode):o}). Give a directory inside it, like {path / 'kv'}: kvloom creates that for this user"
        )
    if others:
        log.warning("every user may exchange files of the disk tier %s: run chmod 700 %s", path, path)
    elif found.st_uid not in (us, 0):
        log.warning("the disk tier's directory %s belongs to user %d, not to user %d", path, found.st_uid, us)


def lock_directory(path: Path) -> tuple[int, int]:
    """Makes and locks a directory for one process: its descriptor, and the lock's. The lock goes with the process,
    however that ends."""
    try:
        _make_directory(path)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why = "it is no directory" if isinstance(error, FileExistsError) else error.strerror
        raise TierError(
            f"the disk tier cannot use {path}: {why}. Give a directory that this user may write"
        ) from error
    try:
        return directory, _lock(path, directory)
    except BaseException:
        os.close(directory)
        raise


def _lock(path: Path, directory: int) -> int:
    """Locks a verified directory; returns the lock's descriptor."""
    _check_directory(path, directory)
    try:
        lock = _open_own("lock", os.O_CREAT, directory)
    except NotOursError as error:
        raise TierError(f"the disk tier does not use {path}: {error.strerror}") from error
    except OSError as error:
        raise TierError(
            f"the disk tier cannot write in {path}: {error.strerror}. Give a directory that this user may write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise TierError(
            f"{path} is in use by process {owner}: a disk tier's directory has one process. Give another directory"
        ) from error
    before = os.pread(lock, _LOCK_BYTES + 1, 0)
    if len(before) > _LOCK_BYTES or before.strip(b"0123456789\n\0"):
        os.close(lock)
        raise TierError(
            f"the disk tier does not use {path}: its file 'lock' is no lock of a disk tier. Give another directory"
        )
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds, only its owner is not written down
    return lock
