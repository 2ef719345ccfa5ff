"""HTTP connections with limits. Silent and slow clients are disconnected.

A client gets an error response in OpenAI's format if it sends data that is not HTTP, or if too many connections are
open. A server that stops still answers the clients that had connected.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.serve.access_log import log_rejected
from kvloom.serve.errors import ApiError

__all__ = [
    "Connection",
    "GracefulServer",
    "limited_connection",
    "limited_socket",
    "raise_file_limit",
    "watch_connections",
]

HEAD_BYTES = 1 << 16
"""Largest size of the request line and headers of a request, in bytes. The size is checked after each read from the
socket, so the last read may exceed the limit.
"""

SEND_BUFFER_BYTES = 1 << 17
"""Size of the kernel's send buffer for one client. A larger buffer would hide that a client reads slowly."""

READ_RATE = 1 << 10
"""Smallest number of bytes per second that a client must read, while more data waits for it than the transport's limit
(64 KiB)."""

FIRST_REQUEST_SECONDS = 1.0
"""Seconds in which a client that has connected to a stopping server may still send its request."""


def _final_response(error: ApiError) -> bytes:
    """Return an HTTP response with an error, for a connection that has sent no valid request. The response closes the
    connection.
    """
    head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [b"%s: %s" % header for header in error.headers]
    return b"\r\n".join(
        [*head, b"connection: close", b"content-length: %d" % len(error.body), b"", error.body]
    )


_HEAD_TOO_LARGE = ApiError(431, f"request head exceeds the limit of {HEAD_BYTES:,} bytes")
_NOT_HTTP = ApiError(400, "not a valid HTTP/1.1 request")
_TOO_MANY = ApiError(
    503,
    "too many open connections: close some, or raise --max-connections",
    code="too_many_connections",
    retry_after=1,
)


class Connection(HttpToolsProtocol):
    """One HTTP connection. The scope of a request contains two functions. `kvloom.abort` closes the connection without
    sending queued data. `kvloom.must_wait` returns whether sending now waits until the client has read earlier data.
    """

    max_connections = 1 << 30
    waiting_since = 0.0
    _unread_since, _unread_bytes = math.inf, 0
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since = time.monotonic()
        if len(self.connections) > self.max_connections:
            self._close_with(_TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # start of the next request
            self.waiting_since = time.monotonic()
        began = self._in_head
        super().data_received(data)
        if not (began and self._in_head):
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._close_with(_HEAD_TOO_LARGE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since, self._unread_bytes = time.monotonic(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = math.inf

    def reads_slowly(self, seconds: float) -> bool:
        """Return whether much data waits for the client, and the client has read slower than READ_RATE for at least
        `seconds`. If the client was faster, a new measurement starts.
        """
        now, waiting = time.monotonic(), self.transport.get_write_buffer_size()
        if now - self._unread_since < seconds:
            return False
        if self._unread_bytes - waiting < READ_RATE * (now - self._unread_since):
            return True
        self._unread_since, self._unread_bytes = now, waiting
        return False

    def send_400_response(self, msg: str) -> None:
        """Send an error response. uvicorn calls this method for data that it cannot parse."""
        self._close_with(_NOT_HTTP)

    def _close_with(self, error: ApiError) -> None:
        if not self.transport.is_closing():
            log_rejected(error)
            self.transport.write(_final_response(error))
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope["kvloom.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["kvloom.must_wait"] = self._must_wait  # type: ignore[typeddict-unknown-key]

    def _must_wait(self) -> bool:
        return self.flow.write_paused

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Suppress uvicorn's advice to install a WebSocket library, because the server has no WebSocket endpoint."""

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the request line and headers of a request. This is False between two
        requests, where uvicorn's own timeout applies.
        """
        cycle: Any = self.cycle  # None before the first request, although uvicorn's annotation excludes None
        return (cycle is None or bool(cycle.response_complete)) and self.timeout_keep_alive_task is None


def limited_connection(connections: int) -> type[Connection]:
    """Return a Connection class with a limit of open connections."""
    return type("LimitedConnection", (Connection,), {"max_connections": connections})


async def watch_connections(server: uvicorn.Server, request_seconds: float, read_seconds: float) -> None:
    """Close connections of `server` whose request head does not arrive within `request_seconds`, and connections whose
    client reads slowly for `read_seconds` (see `Connection.reads_slowly`). Runs until it is cancelled.
    """
    while True:
        await asyncio.sleep(min(5.0, request_seconds / 2, read_seconds / 2))
        before = time.monotonic() - request_seconds
        for one in list(server.server_state.connections):
            if not isinstance(one, Connection):
                continue
            if (one.is_waiting and one.waiting_since < before) or one.reads_slowly(read_seconds):
                one.transport.abort()


def limited_socket(family: int, kind: int, protocol: int, read_seconds: float) -> socket.socket:
    """Return a socket for a server. Its connections have a small send buffer. If a client does not read for
    `read_seconds`, the kernel closes its connection."""
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = min(int(1e3 * read_seconds), (1 << 31) - 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return made


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum for this user, because each connection is one file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class GracefulServer(uvicorn.Server):
    """A uvicorn server that loses no request when it stops. A plain uvicorn server resets two kinds of connections:
    those that it has not accepted yet, and those whose first request has not arrived.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer the clients that have connected, and close all connections."""
        # Copies keep the queues of connections that are not accepted yet.
        listeners = [one.dup() for one in sockets or ()]
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        accepted = [connection for listener in listeners for connection in _accept_all(listener)]
        waits = [asyncio.create_task(self._connect(one)) for one in accepted]
        end = time.monotonic() + FIRST_REQUEST_SECONDS
        if waits:
            await asyncio.wait(waits, timeout=FIRST_REQUEST_SECONDS)
        while time.monotonic() < end:  # uvicorn reports no event for the start of a request
            if not any(map(_has_no_request, self.server_state.connections)):
                break
            await asyncio.sleep(0.01)
        await super().shutdown()

    async def _connect(self, accepted: socket.socket) -> None:
        """Serve an accepted connection."""
        config = self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        with suppress(OSError):  # the client has gone
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(protocol, accepted, ssl=config.ssl)


def _accept_all(listener: socket.socket) -> Iterable[socket.socket]:
    """Accept the connections that wait at a listening socket, then close the listening socket."""
    with listener:
        listener.setblocking(False)
        while True:
            try:
                yield listener.accept()[0]
            except BlockingIOError:
                return
            except OSError:  # this client has gone; others may wait
                continue


def _has_no_request(connection: Any) -> bool:
    """Whether a connection is open, but the headers of its first request have not arrived."""
    return connection.cycle is None and not connection.transport.is_closing()
