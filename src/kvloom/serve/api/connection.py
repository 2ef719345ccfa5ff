"""HTTP connections with limits. Silent and slow clients are disconnected.

A client gets an error response in OpenAI's format if it sends data that is not HTTP, or if too many connections are
open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.serve.access_log import log_rejected
from kvloom.serve.errors import ApiError

__all__ = ["Connection", "close_idle", "limited_connection"]

HEAD_BYTES = 1 << 16
"""Largest size of the request line and headers of a request, in bytes. It is checked after each read from the socket, so
one read may exceed it.
"""


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
    """One HTTP connection. The scope of a request contains the function `kvloom.abort`, which closes the connection
    without sending queued data.
    """

    max_connections = 1 << 30
    waiting_since = 0.0
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
        cycle: Any = self.cycle  # None before the first request, unlike its annotation
        return (cycle is None or bool(cycle.response_complete)) and self.timeout_keep_alive_task is None


def limited_connection(connections: int) -> type[Connection]:
    """Return a Connection class with a limit of open connections."""
    return type("LimitedConnection", (Connection,), {"max_connections": connections})


def close_idle(connections: Iterable[Any], seconds: float) -> None:
    """Close connections whose request did not arrive within `seconds`."""
    before = time.monotonic() - seconds
    for one in list(connections):
        if isinstance(one, Connection) and one.is_waiting and one.waiting_since < before:
            one.transport.abort()
