"""Sends and receives bytes over a connected socket, with timeouts. One call can send many pieces. Long pieces are sent
from the caller's memory, and received into it, without a copy.

The kernel enforces the timeout of a call, so a call does not have to poll the socket first.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from kvloom.tiers.encoding import receive_checked, receive_step, run_checksums, send_checked, send_step

__all__ = ["ByteStream"]

_MAX_PIECES = 512  # pieces per call; Linux allows 1024
_BUFFER_BYTES = 4 << 20  # bytes in flight on a fast network
_MIN_BYTES_PER_SECOND = 16e6  # bytes per second of the slowest supported network
_LOOPBACK_BUFFER_BYTES = (
    128 << 10
)  # on one host no bytes are in flight, and a small buffer stays in the processor's cache


class ByteStream:
    """Bytes on one socket, used by one thread at a time. Any thread may call `close`.

    `begin` starts an exchange and sets its deadline: `timeout` seconds, plus one second per 16 MB. A system
    call that began before the deadline may last up to `timeout` seconds. A call may raise TimeoutError,
    ConnectionError or another OSError. After such an error the stream is unusable."""

    def __init__(self, connected: socket.socket, timeout: float, receive_bytes: int = 0) -> None:
        """`receive_bytes` is the smallest size of the receive buffer."""
        self.socket, self._timeout = connected, timeout
        self._plain = not isinstance(connected, ssl.SSLSocket)
        self._deadline = 0.0
        self._in_use = threading.Lock()  # held while a call uses the descriptor
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = _LOOPBACK_BUFFER_BYTES if _is_same_host(connected) else _BUFFER_BYTES
        for option, buffer_bytes in ((socket.SO_RCVBUF, max(size, receive_bytes)), (socket.SO_SNDBUF, size)):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        if self._plain:
            connected.settimeout(None)
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) or (0 if timeout >= 1 else 1000))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        else:
            connected.settimeout(timeout)
        self.begin()

    def start_tls(self, context: ssl.SSLContext, server_side: bool) -> ssl.SSLSocket:
        """Encrypt the rest of the connection, and return the encrypted socket. Raises OSError if the TLS handshake
        fails."""
        with self._in_use:
            self.socket.settimeout(self._timeout)
            secured = context.wrap_socket(self.socket, server_side=server_side, do_handshake_on_connect=False)
            self.socket, self._plain = secured, False
            secured.do_handshake()
        return secured

    def begin(self, size: int = 0) -> None:
        """Start an exchange of `size` bytes, and set its deadline."""
        self._deadline = time.monotonic() + self._timeout + size / _MIN_BYTES_PER_SECOND

    def close(self) -> None:
        """Interrupt a call in another thread, then close the socket. Without the interruption, the other thread
        could continue on a new socket that has the same descriptor."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with self._in_use:
            self.socket.close()

    def wait_readable(self) -> None:
        """Wait for the next byte, without a timeout."""
        if isinstance(self.socket, ssl.SSLSocket):
            with self._in_use:
                if not self.socket.pending():
                    waiting = select.poll()
                    waiting.register(self.socket.fileno(), select.POLLIN)
                    waiting.poll()
            return
        while True:
            try:
                with self._in_use:
                    if not self.socket.recv(1, socket.MSG_PEEK):
                        raise ConnectionError("the peer closed the connection")
                return
            except BlockingIOError:
                continue

    def send(self, pieces: Sequence[Any]) -> None:
        """Send all pieces without copying them."""
        waiting = [view for piece in pieces if len(view := memoryview(piece))]
        if not self._plain:
            for view in waiting:
                self._check()
                with self._in_use:
                    self.socket.sendall(view)
            return
        first = 0
        while first < len(waiting):
            self._check()
            try:
                with self._in_use:
                    sent = self.socket.sendmsg(waiting[first : first + _MAX_PIECES])
            except BlockingIOError as error:
                raise self._late() from error
            while first < len(waiting) and sent >= len(waiting[first]):
                sent -= len(waiting[first])
                first += 1
            if sent:
                waiting[first] = waiting[first][sent:]

    def receive_some(self, into: memoryview) -> int:
        """Receive the available bytes, at least one. Return the number of bytes."""
        return self._receive(into, 0)

    def receive(self, into: memoryview) -> None:
        """Fill `into` completely."""
        done, flags = 0, socket.MSG_WAITALL if self._plain else 0
        while done < len(into):
            done += self._receive(into[done:], flags)

    def receive_checked(self, into: memoryview, run_bytes: int) -> bytes:
        """Receive bytes into `into`, whose size is a multiple of `run_bytes`. Return one checksum for each layer
        run (`run_bytes` bytes). The checksums are computed while the bytes are in the processor's cache."""
        if self._plain:
            self._check()
            try:
                with self._in_use:
                    sums = receive_checked(self.socket.fileno(), into, run_bytes, self._deadline)
            except BlockingIOError as error:
                raise self._late() from error
            if sums is not None:
                return sums
        parts = []
        for piece in _pieces(into, receive_step(run_bytes)):
            self.receive(piece)
            parts.append(run_checksums(piece, run_bytes))
        return b"".join(parts)

    def send_checked(self, data: memoryview, run_bytes: int) -> bytes:
        """Send the layer runs in `data`. Return their checksums."""
        if self._plain:
            self._check()
            try:
                with self._in_use:
                    sums = send_checked(self.socket.fileno(), data, run_bytes, self._deadline)
            except BlockingIOError as error:
                raise self._late() from error
            if sums is not None:
                return sums
        parts = []
        for piece in _pieces(data, send_step(run_bytes)):
            parts.append(run_checksums(piece, run_bytes))
            self.send([piece])
        return b"".join(parts)

    def _receive(self, into: memoryview, flags: int) -> int:
        self._check()
        try:
            with self._in_use:
                got = self.socket.recv_into(into, len(into), flags) if flags else self.socket.recv_into(into)
        except BlockingIOError as error:
            raise self._late() from error
        if not got:
            raise ConnectionError("the peer closed the connection")
        return got

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._late()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self._timeout} s")


def _pieces(data: memoryview, step: int) -> list[memoryview]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def _is_same_host(connected: socket.socket) -> bool:
    """Whether the peer is on this host."""
    if connected.family == getattr(socket, "AF_UNIX", None):
        return True
    try:
        name = connected.getpeername()
        return isinstance(name, tuple) and ip_address(name[0]).is_loopback
    except (OSError, ValueError):
        return False
