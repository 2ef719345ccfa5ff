"""A thread that takes one job of each tenant in turn. No tenant waits for all jobs of another tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["FairThread"]

Result = TypeVar("Result")


class FairThread:
    """Runs one function at a time, for one tenant after another. A waiting tenant waits for at most one
    function of every other tenant."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turns: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_busy = False

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` when it is the tenant's turn, and return its result."""
        loop = asyncio.get_running_loop()
        if self._is_busy:
            turn: asyncio.Future[None] = loop.create_future()
            self._turns.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._is_busy = True
        try:
            return await loop.run_in_executor(self._pool, work)
        finally:
            self._next()

    def _next(self) -> None:
        """Start the next function, for the waiting tenant that was served least recently."""
        self._is_busy = False
        while self._turns:
            tenant, turns = self._turns.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if turn.done():
                    continue  # the waiting request was cancelled
                if turns:
                    self._turns[tenant] = turns
                self._is_busy = True
                turn.set_result(None)
                return
