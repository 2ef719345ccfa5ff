"""An asyncio event loop with a virtual clock. If no task can run, the clock jumps to the next timer.

The loop has no sockets. A connection to a host and port is made by the function that `connect` is set to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .virtual_threads import DeadlockError

__all__ = ["VirtualLoop"]

Connect = Callable[[Any, str, int], Awaitable[Any]]


class _Clock:
    """The loop's selector. Instead of waiting for sockets, it moves the clock."""

    def __init__(self) -> None:
        self.time = 0.0
        self.turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        self.turns += 1
        if timeout is None:
            raise DeadlockError("all tasks wait, and no timer is set")
        self.time += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose `time` is virtual. Its tasks run in the same order in every run."""

    connect: Connect

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual time in seconds. It starts at 0."""
        return self._selector.time

    @property
    def turns(self) -> int:
        """Number of turns of the loop."""
        return self._selector.turns

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect a new protocol to the stand-in at `host` and `port`. Return the transport and the protocol."""
        protocol = protocol_factory()
        return await self.connect(protocol, host, port), protocol

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
