"""HTTP connections that do not wait for ever: clients that connect and say nothing, or say it too slowly, are cut off.

What is no HTTP, or comes on one connection too many, is told in OpenAI's shape as everything else is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvloom.serve.errors import ApiError

__all__ = ["Connection", "at_most", "close_idle"]

HEAD_BYTES = 1 << 16
"""A request's head may take so much, beyond what one read from the socket brings."""


def _farewell(error: ApiError) -> bytes:
    """A whole answer after which the connection is closed, as bytes: there is no request that could be answered properly."""
    head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [b"%s: %s" % header for header in error.headers]
    return b"\r\n".join(
        [*head, b"connection: close", b"content-length: %d" % len(error.body), b"", error.body]
    )


_HEAD_TOO_LARGE = _farewell(
    ApiError(431, f"the request's head is larger than this server takes, {HEAD_BYTES:,} bytes")
)
_NO_HTTP = _farewell(ApiError(400, "this is no HTTP/1.1 request that this server understands"))
_TOO_MANY = _farewell(
    ApiError(
        503,
        "more connections are open than this server takes: close some, or raise --max-connections",
        code="too_many_connections",
        retry_after=1,
    )
)


class Connection(HttpToolsProtocol):
    """One connection. A request's scope has `kvloom.abort`, which ends it without sending what waits."""

    most = 1 << 30
    waits_since = 0.0
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since = time.monotonic()
        if len(self.connections) > self.most:
            self._leave(_TOO_MANY)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the first of another request
            self.waits_since = time.monotonic()
        began = self._in_head
        super().data_received(data)
        if not (began and self._in_head):
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._leave(_HEAD_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's way out where it cannot parse what came."""
        self._leave(_NO_HTTP)

    def _leave(self, words: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(words)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope["kvloom.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing here speaks WebSocket, and installing something would not change that: the request is answered as it is."""

    @property
    def waits(self) -> bool:
        """Whether a request's head has not come: none was sent yet, or not all of it. Between requests uvicorn counts."""
        cycle: Any = self.cycle  # None before the first request, whatever its declaration says
        return (cycle is None or bool(cycle.response_complete)) and self.timeout_keep_alive_task is None


def at_most(connections: int) -> type[Connection]:
    """Connections of which so many may be open at once."""
    return type("LimitedConnection", (Connection,), {"most": connections})


def close_idle(connections: Iterable[Any], seconds: float) -> None:
    """Cut off connections whose request did not come within so long."""
    before = time.monotonic() - seconds
    for one in list(connections):
        if isinstance(one, Connection) and one.waits and one.waits_since < before:
            one.transport.abort()
