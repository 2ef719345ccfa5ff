"""Bytes over a connected socket: many pieces in one call, long ones straight into the caller's memory, in bounded time.

The system itself keeps the time of a call, so that none of them needs a second one to wait. Knows no protocols.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from .checks import checksums, receive_checked, receive_step, send_checked, send_step

__all__ = ["Bytestream"]

_MOST_PIECES = 512  # of one call; Linux takes 1024
_BUFFER_BYTES = 4 << 20  # what a fast network keeps under way
_SLOWEST = 16e6  # bytes a second that are waited for
_NEAR_BYTES = (
    128 << 10
)  # on one host nothing is under way, and what waits in a small buffer the processor still has


class Bytestream:
    """For one thread at a time. An exchange begins with `begin` and has `timeout` seconds, and as many more as its bytes take
    on a slow network, within one timeout more. Raises TimeoutError, ConnectionError or another OSError: it is of no further use then."""

    def __init__(self, connected: socket.socket, timeout: float, receive_bytes: int = 0) -> None:
        """`receive_bytes` is what may wait here to be received, where that is not for this file to choose."""
        self.socket, self._timeout = connected, timeout
        self._plain = not isinstance(connected, ssl.SSLSocket)
        self._deadline = 0.0
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = _NEAR_BYTES if _near(connected) else _BUFFER_BYTES
        for option, room in ((socket.SO_RCVBUF, max(size, receive_bytes)), (socket.SO_SNDBUF, size)):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, option, room)
        if self._plain:
            connected.settimeout(None)
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) or (0 if timeout >= 1 else 1000))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            connected.settimeout(timeout)
        self.begin()

    def begin(self, size: int = 0) -> None:
        """`size` bytes are to come or to go."""
        self._deadline = time.monotonic() + self._timeout + size / _SLOWEST

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
        self.socket.close()

    def wait_readable(self) -> None:
        """Waits for the next byte, for as long as it takes."""
        while True:
            try:
                if not self.socket.recv(1, socket.MSG_PEEK):
                    raise ConnectionError("the other side has gone")
                return
            except BlockingIOError:
                continue

    def send(self, pieces: Sequence[Any]) -> None:
        """All of the pieces, from where they are."""
        waiting = [view for piece in pieces if len(view := memoryview(piece))]
        if not self._plain:
            for view in waiting:
                self._check()
                self.socket.sendall(view)
            return
        first = 0
        while first < len(waiting):
            self._check()
            try:
                sent = self.socket.sendmsg(waiting[first : first + _MOST_PIECES])
            except BlockingIOError as error:
                raise self._late() from error
            while first < len(waiting) and sent >= len(waiting[first]):
                sent -= len(waiting[first])
                first += 1
            if sent:
                waiting[first] = waiting[first][sent:]

    def receive_some(self, into: memoryview) -> int:
        """What there is, one byte at least."""
        return self._receive(into, 0)

    def receive(self, into: memoryview) -> None:
        """Exactly as many bytes as there is room for."""
        done, flags = 0, socket.MSG_WAITALL if self._plain else 0
        while done < len(into):
            done += self._receive(into[done:], flags)

    def receive_checked(self, into: memoryview, run_bytes: int) -> bytes:
        """As `receive`, whole runs; their checksums, each taken while the processor still has it."""
        if self._plain:
            self._check()
            try:
                sums = receive_checked(self.socket.fileno(), into, run_bytes, self._deadline)
            except BlockingIOError as error:
                raise self._late() from error
            if sums is not None:
                return sums
        parts = []
        for piece in _pieces(into, receive_step(run_bytes)):
            self.receive(piece)
            parts.append(checksums(piece, run_bytes))
        return b"".join(parts)

    def send_checked(self, data: memoryview, run_bytes: int) -> bytes:
        """As `send`, whole runs; their checksums."""
        if self._plain:
            self._check()
            try:
                sums = send_checked(self.socket.fileno(), data, run_bytes, self._deadline)
            except BlockingIOError as error:
                raise self._late() from error
            if sums is not None:
                return sums
        parts = []
        for piece in _pieces(data, send_step(run_bytes)):
            parts.append(checksums(piece, run_bytes))
            self.send([piece])
        return b"".join(parts)

    def _receive(self, into: memoryview, flags: int) -> int:
        self._check()
        try:
            got = self.socket.recv_into(into, len(into), flags) if flags else self.socket.recv_into(into)
        except BlockingIOError as error:
            raise self._late() from error
        if not got:
            raise ConnectionError("the other side closed the connection")
        return got

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._late()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self._timeout} s")


def _pieces(data: memoryview, step: int) -> list[memoryview]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def _near(connected: socket.socket) -> bool:
    """Whether the other side is on this host."""
    if connected.family == getattr(socket, "AF_UNIX", None):
        return True
    try:
        name = connected.getpeername()
        return isinstance(name, tuple) and ip_address(name[0]).is_loopback
    except (OSError, ValueError):
        return False
