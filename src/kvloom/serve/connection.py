"""HTTP connections that do not wait for ever: clients that connect and say nothing, or say it too slowly, are cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Connection", "close_idle"]


class Connection(HttpToolsProtocol):
    """One connection. A request's scope has `kvloom.abort`, which ends it without sending what waits."""

    waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # the first of another request
            self.waits_since = time.monotonic()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["kvloom.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

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
