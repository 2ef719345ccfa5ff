"""The server's side of the dashboard: one picture for all viewers, made at most once an interval, and the past minutes.

    viewers ──▶ state() ──▶ the picture at hand, or one Look at the engine that all of them wait for
    every 2 s   a sample of counters, whether anyone looks or not: who opens the page sees what was before

Knows no HTTP. The engine may be busy in a long step, loading or dead: then the last picture stays, and its age is told.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec

from kvloom.serve.api.server_context import Service
from kvloom.serve.errors import ApiError

from .history import History

__all__ = ["Watch"]

INTERVAL = 1.0
PATIENCE = 2.0
"""How long viewers wait for a new picture before they get the old one."""
SAMPLE_SECONDS = 2.0
SAMPLES = 300
_encode = msgspec.json.Encoder().encode


class Watch:
    """What one server's viewers see."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._history = History(service, deque(maxlen=SAMPLES), SAMPLE_SECONDS)
        self._picture: bytes | None = None
        self._made = 0.0
        self._told: tuple[float, bytes] = (0.0, b"")
        self._look: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Take samples for ever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._history.sample(time.time())

    async def state(self) -> bytes:
        """Everything, as JSON. At most one look at the engine an interval, however many ask."""
        now = time.monotonic()
        if now - self._told[0] < INTERVAL and self._told[1]:
            return self._told[1]
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._take())
        await asyncio.wait({self._look}, timeout=PATIENCE)
        if time.monotonic() - self._told[0] >= INTERVAL or not self._told[1]:
            self._told = time.monotonic(), _encode(self._everything())
        return self._told[1]

    async def _take(self) -> None:
        try:
            self._picture = await self._service.link.look(60.0)
            self._made = time.time()
        except (ApiError, TimeoutError):  # none now: the state says so
            pass
        self._told = time.monotonic(), _encode(self._everything())

    def _everything(self) -> dict[str, Any]:
        service, link = self._service, self._service.link
        facts = link.facts
        status = "draining" if service.gate.shut else "ok" if link.ready else "loading"
        return {
            "now": time.time(),
            "interval": INTERVAL,
            "server": {
                "status": status,
                "model": service.model,
                "since": service.created,
                "restarts": link.restarts,
                "open_requests": service.gate.requests,
                "device": None if facts is None else facts.device,
                "dtype": None if facts is None else facts.dtype,
                "pool_bytes": None if facts is None else facts.pool_bytes,
                "bytes_per_token": None if facts is None else facts.bytes_per_token,
            },
            "engine_at": self._made or None,
            "engine": None if self._picture is None else msgspec.Raw(self._picture),
            "history": self._history.told(),
        }
