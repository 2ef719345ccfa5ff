"""Unix sockets between peers on one host. The kernel identifies the other user, so no secret is needed.

    PRIVATE/peer-PORT-HOST.sock    beside a TCP port on loopback; mode 0600 in a directory of mode 0700
    any path                       the path of `kvloom share --socket`, for the users of --allow-uid

PRIVATE is a private directory of this user (secret.py). HOST identifies this boot and network namespace, because
containers have separate loopback addresses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from .secret import open_private_directory, private_directories

__all__ = [
    "UnixAddress",
    "UnixListener",
    "connect_loopback",
    "connect_unix",
    "listen_loopback",
    "listen_unix",
    "peer_uid",
]

_CREDENTIALS = struct.Struct("3i")
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")  # the last one includes loopback


class UnixAddress:
    """The path of a Unix socket, and the users that may run its server. This user and root are always allowed."""

    def __init__(self, path: str, uids: Iterable[int] = ()) -> None:
        self.path, self.uids = path, frozenset(uids)

    def __str__(self) -> str:
        return self.path


class UnixListener:
    """A Unix socket that listens at a path. `close` also removes the path."""

    def __init__(self, listening: socket.socket, name: str, directory: int | None = None) -> None:
        self.socket, self._socket_name, self._directory = listening, name, directory
        self._file = os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self._socket_name, dir_fd=self._directory, follow_symlinks=False).st_ino == self._file:
                os.unlink(self._socket_name, dir_fd=self._directory)
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def peer_uid(connected: socket.socket) -> int:
    """Return the user id at the other end of a Unix socket, as the kernel reports it."""
    _, uid, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(uid)


def listen_loopback(host: str, port: int) -> UnixListener | None:
    """Listen on a Unix socket for clients of this user, in addition to a loopback TCP port. Return None if the
    system or the directories do not allow it."""
    if host not in _LOOPBACK_HOSTS or not hasattr(socket, "SO_PEERCRED"):
        return None
    for folder in private_directories():
        try:
            directory = open_private_directory(folder, create=True)
        except OSError:
            continue
        name = _socket_name(port)
        try:
            with contextlib.suppress(
                FileNotFoundError
            ):  # this process has the TCP port now, so the process that created the socket has ended
                os.unlink(name, dir_fd=directory)
            return UnixListener(_listen(_fd_path(directory, name), 0o600), name, directory)
        except OSError:
            os.close(directory)
    return None


def connect_loopback(host: str, port: int, timeout: float) -> socket.socket | None:
    """Connect to this user's server on a loopback port through the server's Unix socket. Return None if there is
    no such socket."""
    if host not in _LOOPBACK_HOSTS or not hasattr(socket, "SO_PEERCRED"):
        return None
    for folder in private_directories():
        try:
            directory = open_private_directory(folder)
        except OSError:
            continue
        try:
            return _connect(_fd_path(directory, _socket_name(port)), timeout, frozenset())
        except OSError:
            continue
        finally:
            os.close(directory)
    return None


def listen_unix(path: Path, mode: int) -> UnixListener:
    """Listen at a path. Raises OSError if another file exists there or another process listens."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(95, "this system does not identify the user of a Unix socket: omit --socket")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(17, "it exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise FileExistsError(98, "another process listens there")
    return UnixListener(_listen(str(path), mode), str(path))


def connect_unix(address: UnixAddress, timeout: float) -> socket.socket:
    """Connect to a path. Raises OSError if no process listens, or if the process belongs to a user that is not
    allowed."""
    return _connect(address.path, timeout, address.uids)


def _listen(path: str, mode: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        _set_mode(path, mode)
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening


def _set_mode(path: str, mode: int) -> None:
    """Set the mode of a socket. If another user replaced the socket by a file, does not change that file."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise FileExistsError(17, "another file replaced the socket")
        Path(f"/proc/self/fd/{fd}").chmod(mode)
    finally:
        os.close(fd)


def _connect(path: str, timeout: float, uids: frozenset[int]) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        connected.connect(path)
        uid = peer_uid(connected)
        if uid not in (os.geteuid(), 0, *uids):
            raise PermissionError(
                1,
                f"the server belongs to user {uid}, not to user {os.geteuid()}: give ?uid={uid} to allow it",
            )
    except BaseException:
        connected.close()
        raise
    return connected


def _fd_path(directory: int, name: str) -> str:
    """Return a path to the file `name` in an open directory. The path is short enough for a socket address, which
    allows about 100 bytes."""
    return f"/proc/self/fd/{directory}/{name}"


def _socket_name(port: int) -> str:
    identity = b""
    with contextlib.suppress(OSError):
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        identity += str(Path("/proc/self/ns/net").stat().st_ino).encode()
    return f"peer-{port}-{blake2b(identity, digest_size=4).hexdigest()}.sock"
