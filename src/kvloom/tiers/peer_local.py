"""Peers on one host by Unix sockets: the system names the user at the other end, so no secret is needed.

    PRIVATE/peer-PORT-HOST.sock    beside a TCP port on loopback; mode 0600 in a directory of mode 0700
    any path                       where `kvloom share --socket` puts it, for users that --allow-uid names

HOST stands for this boot and network namespace: loopback of another container or host is another one. Knows no protocols.
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

from .secret import open_private, private_directories

__all__ = [
    "LocalAddress",
    "LocalListener",
    "connect_local",
    "connect_near",
    "listen_local",
    "listen_near",
    "user_of",
]

_CREDENTIALS = struct.Struct("3i")
_NEAR = ("127.0.0.1", "localhost", "0.0.0.0")  # the last serves loopback, too


class LocalAddress:
    """The path of a Unix socket, and the users that may serve there beside this one and root."""

    def __init__(self, path: str, users: Iterable[int] = ()) -> None:
        self.path, self.users = path, frozenset(users)

    def __str__(self) -> str:
        return self.path


class LocalListener:
    """A Unix socket that listens at a path until `close`, which removes the path."""

    def __init__(self, listening: socket.socket, name: str, directory: int | None = None) -> None:
        self.socket, self._name, self._directory = listening, name, directory
        self._file = os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self._name, dir_fd=self._directory, follow_symlinks=False).st_ino == self._file:
                os.unlink(self._name, dir_fd=self._directory)
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def user_of(connected: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the system tells it."""
    _, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


def listen_near(host: str, port: int) -> LocalListener | None:
    """Listens beside a TCP port on loopback, for this user; None where the system or the directories do not allow it."""
    if host not in _NEAR or not hasattr(socket, "SO_PEERCRED"):
        return None
    for folder in private_directories():
        try:
            directory = open_private(folder, create=True)
        except OSError:
            continue
        name = _name(port)
        try:
            with contextlib.suppress(FileNotFoundError):  # the port is ours now: whoever made this has ended
                os.unlink(name, dir_fd=directory)
            return LocalListener(_listen(_reached(directory, name), 0o600), name, directory)
        except OSError:
            os.close(directory)
    return None


def connect_near(host: str, port: int, timeout: float) -> socket.socket | None:
    """A connection to the server of this user that listens on a port of loopback; None where there is none by Unix socket."""
    if host not in _NEAR or not hasattr(socket, "SO_PEERCRED"):
        return None
    for folder in private_directories():
        try:
            directory = open_private(folder)
        except OSError:
            continue
        try:
            return _connect(_reached(directory, _name(port)), timeout, frozenset())
        except OSError:
            continue
        finally:
            os.close(directory)
    return None


def listen_local(path: Path, mode: int) -> LocalListener:
    """Listens at a path. OSError where something else is there, or another process listens."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(95, "this system does not name the user at the other end: leave --socket out")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(17, "it exists and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise FileExistsError(98, "another process listens there")
    return LocalListener(_listen(str(path), mode), str(path))


def connect_local(address: LocalAddress, timeout: float) -> socket.socket:
    """A connection to a path. OSError where nobody listens, or where another user does."""
    return _connect(address.path, timeout, address.users)


def _listen(path: str, mode: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        Path(path).chmod(mode)
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening


def _connect(path: str, timeout: float, users: frozenset[int]) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        connected.connect(path)
        user = user_of(connected)
        if user not in (os.geteuid(), 0, *users):
            raise PermissionError(
                1, f"user {user} serves there, not user {os.geteuid()}: give ?uid={user} if that is meant"
            )
    except BaseException:
        connected.close()
        raise
    return connected


def _reached(directory: int, name: str) -> str:
    """A path of a file in an open directory, short enough for a socket's address."""
    return f"/proc/self/fd/{directory}/{name}"


def _name(port: int) -> str:
    here = b""
    with contextlib.suppress(OSError):
        here = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        here += str(Path("/proc/self/ns/net").stat().st_ino).encode()
    return f"peer-{port}-{blake2b(here, digest_size=4).hexdigest()}.sock"
