"""All system calls of a disk tier. Tests replace the class `Files` to make a call fail.

Uses O_DIRECT if the file system supports it. Reads then run at device speed, without a second copy in the page cache.
This module does not depend on file formats.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.tiers.encoding import read_checked, read_step, run_checksums
from kvloom.tiers.tier import TierError

__all__ = [
    "Files",
    "SystemFiles",
    "UntrustedFileError",
    "lock_directory",
]

log = logging.getLogger("kvloom.tiers")
_MAX_PIECES = 1024  # Linux's IOV_MAX
_LOCK_BYTES = 32  # the lock file contains the id of the process that has the lock


class Files:
    """The files of one directory. All calls use an open descriptor of the directory. If another file system is later
    mounted over the path, writes still go to this directory."""

    def __init__(self, directory: int) -> None:
        self.directory = directory

    def list_names(self) -> list[str]:
        return os.listdir(self.directory)  # noqa: PTH208  of the open descriptor, not of a path

    def size_of(self, name: str) -> int:
        return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_size

    def open(self, name: str, create: bool, direct: bool) -> int:
        """Open a regular file that belongs to this user. If `create` is set, creates a new file with mode 0600.
        Does not follow symbolic links. Raises UntrustedFileError for another file type or owner, and does not
        change such a file.
        """
        flags = os.O_CREAT | os.O_EXCL if create else 0
        flags |= getattr(os, "O_DIRECT", 0) if direct else 0
        return _open_own(name, flags, self.directory)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self.directory)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def modified_at(self, fd: int) -> int:
        """Return the time of the last write, in seconds since 1970."""
        return int(os.fstat(fd).st_mtime)

    def allocate(self, fd: int, size: int) -> None:
        """Enlarge the file to `size` bytes. Also allocates disk space if the file system can, so that a full disk is
        detected before any write."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, max(size, os.fstat(fd).st_size))

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        """Read bytes from `offset` into the buffers `into`, in order. Return the number of bytes read. At the end
        of the file, this is less than the size of the buffers."""
        done = 0
        for at in range(0, len(into), _MAX_PIECES):
            pieces = into[at : at + _MAX_PIECES]
            got = os.preadv(fd, pieces, offset + done)
            done += got
            if got < sum(map(len, pieces)):
                break
        return done

    def read_checked(self, fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes]:
        """Read bytes from `offset` into `into`, whose size is a multiple of `run_bytes`. Return the number of
        bytes read, and one checksum for each layer run (`run_bytes` bytes). At the end of the file fewer bytes are
        read. Checksums of layer runs that were not read are undefined."""
        step, done = read_step(run_bytes), 0
        sums = []
        for at in range(0, len(into), step):
            piece = into[at : at + step]
            got = self.read(fd, [piece], offset + at) if done == at else 0
            sums.append(run_checksums(piece, run_bytes))
            done += got
        return done, b"".join(sums)

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        """Write the buffers `pieces`, one after another, from `offset` on. Raises OSError if a write fails."""
        done = 0
        for at in range(0, len(pieces), _MAX_PIECES):
            some = pieces[at : at + _MAX_PIECES]
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
    """A `Files` whose `read_checked` reads bytes and computes their checksums in one native call. If the native code
    is not built, Python does the same."""

    def read_checked(self, fd: int, into: memoryview, offset: int, run_bytes: int) -> tuple[int, bytes]:
        return read_checked(fd, into, offset, run_bytes) or super().read_checked(fd, into, offset, run_bytes)


class UntrustedFileError(OSError):
    """Raised for a file in a tier's directory that is not a regular file of this user. The tier neither reads nor
    changes such a file."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(errno.EPERM, f"{name!r} {why}")


def _owners_of(directory: int) -> frozenset[int]:
    """Return the user ids whose files a tier accepts in a directory: this user and, if this user is root, the owner
    of the directory."""
    us = os.geteuid()
    return frozenset((us,) if us else (us, os.fstat(directory).st_uid))


def _belongs_to(owner: int) -> str:
    return f"belongs to user {owner}, not to user {os.geteuid()}"


def _open_own(name: str, flags: int, directory: int) -> int:
    """Open a regular file for reading and writing. Verifies the file's type and owner before any byte changes."""
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFileError(
                name, "is a symbolic link: remove it, or use another directory"
            ) from None
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise UntrustedFileError(
                name, "is not a regular file: remove it, or use another directory"
            ) from None
        if error.errno == errno.EACCES:
            owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
            if owner not in _owners_of(directory):
                raise UntrustedFileError(
                    name, f"{_belongs_to(owner)}: remove it, or use another directory"
                ) from None
        raise
    found, why = os.fstat(fd), ""
    if not stat.S_ISREG(found.st_mode):
        why = "is not a regular file"
    elif found.st_uid not in _owners_of(directory):
        why = _belongs_to(found.st_uid)
    elif found.st_nlink > 1:
        why = f"has {found.st_nlink} hard links instead of one"
    if why:
        os.close(fd)
        raise UntrustedFileError(name, f"{why}: remove it, or use another directory")
    os.set_blocking(fd, True)
    return fd


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each with mode 0700, because pages reveal prompts."""
    missing = []
    for parent in (path, *path.parents):
        if parent.exists():
            break
        missing.append(parent)
    for parent in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process created it
            parent.mkdir(mode=0o700)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _check_directory(path: Path, directory: int) -> None:
    """Check whether another user may replace the files of a tier in this directory. Every user may replace files if
    every user may write to the directory and the directory has no sticky bit.

    Raises TierError if `path` is a symbolic link that another user, except root, created. Also raises TierError
    if another user owns the directory and every user may replace files in it.

    Logs a warning if this user owns the directory and every user may replace files in it. Also logs a warning
    if another user except root owns the directory.
    """
    us, link, found = os.geteuid(), path.lstat(), os.fstat(directory)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (us, 0):
        raise TierError(
            f"the disk tier refuses {path}: user {link.st_uid} created this symbolic link, not user {us}. "
            "Use the directory itself"
        )
    others = bool(found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if others and found.st_uid != us:
        raise TierError(
            f"the disk tier refuses {path}: it belongs to user {found.st_uid}, and every user may replace its files "
            f"(mode {stat.S_IMODE(found.st_mode):o}). Use a directory inside it, like {path / 'kv'}: kvloom creates it for this user"
        )
    if others:
        log.warning("every user may replace files of the disk tier %s: run chmod 700 %s", path, path)
    elif found.st_uid not in (us, 0):
        log.warning("the disk tier's directory %s belongs to user %d, not to user %d", path, found.st_uid, us)


def lock_directory(path: Path) -> tuple[int, int]:
    """Create a directory if it is missing, and locks it for this process. Return the descriptors of the directory and
    of the lock.

    The lock ends with the process, even after a crash.
    """
    try:
        _make_directory(path)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise TierError(
            f"the disk tier cannot use {path}: {why}. Use a directory that this user may write to"
        ) from error
    try:
        return directory, _lock(path, directory)
    except BaseException:
        os.close(directory)
        raise


def _lock(path: Path, directory: int) -> int:
    """Check and locks a directory. Return the descriptor of the lock. Raises TierError if the directory is unsafe or
    another process uses it."""
    _check_directory(path, directory)
    try:
        lock = _open_own("lock", os.O_CREAT, directory)
    except UntrustedFileError as error:
        raise TierError(f"the disk tier refuses {path}: {error.strerror}") from error
    except OSError as error:
        raise TierError(
            f"the disk tier cannot write to {path}: {error.strerror}. Use a directory that this user may write to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise TierError(
            f"{path} is in use by process {owner}: one process may use a disk tier's directory. Use another directory"
        ) from error
    before = os.pread(lock, _LOCK_BYTES + 1, 0)
    if len(before) > _LOCK_BYTES or before.strip(b"0123456789\n\0"):
        os.close(lock)
        raise TierError(
            f"the disk tier refuses {path}: its file 'lock' is not the lock of a disk tier. Use another directory"
        )
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        pass  # the disk is full: the lock is taken, but the file does not contain the process id
    return lock
