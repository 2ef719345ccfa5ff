"""HTTP connections that do not wait for ever: clients that connect and say nothing, or say it too slowly, are cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError

__all__ = ["Connection", "close_idle"]

HEAD_BYTES = 1 << 16
"""A request's head may take so much, beyond what one read from the socket brings."""
_TOLD = ApiError(431, f"the request's head is larger than this server takes, {HEAD_BYTES:,} bytes").body
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(_TOLD), _TOLD)
)


class Connection(HttpToolsProtocol):
    """One connection. A request's scope has `kvloom.abort`, which ends it without sending what waits."""

    waits_since = 0.0
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the first of another request
            self.waits_since = time.monotonic()
        began = self._in_head
        super().data_received(data)
        if not (began and self._in_head):
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LARGE)
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


def close_idle(connections: Iterable[Any], seconds: float) -> None:
    """Cut off connections whose request did not come within so long."""
    before = time.monotonic() - seconds
    for one in list(connections):
        if isinstance(one, Connection) and one.waits and one.waits_since < before:
            one.transport.abort()
