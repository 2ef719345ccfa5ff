"""Admission of requests by tenant. While all workers are full, the tenant with the least service is admitted next.

The service of a tenant is the number of its admitted prompt tokens. After idle time, the service of a tenant is raised
to the smallest service of the other tenants, so idle time gives no advantage. While workers can take requests, no
request waits.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque

__all__ = ["FairQueue", "QueueFullError"]


class QueueFullError(Exception):
    """Raised if too many requests wait."""


class FairQueue:
    """Admits requests. At most `places` requests run at the same time on all workers, and at most `limit` requests
    wait. The caller calls `resize` when a worker is added or removed."""

    def __init__(self, places: int, limit: int = 10_000) -> None:
        self.places, self.limit = places, limit
        self.running = self.waiting = 0
        self._service: dict[str, float] = {}
        self._queues: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._order: list[tuple[float, int, str]] = []
        self._count = 0

    async def enter(self, tenant: str, tokens: int) -> None:
        """Wait until a request of `tokens` prompt tokens may run. Raises QueueFullError if `limit` requests wait."""
        if self.running < self.places and not self.waiting:
            self._start(tenant, tokens)
            return
        if self.waiting >= self.limit:
            raise QueueFullError
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._queues.setdefault(tenant, deque())
        queue.append((place, tokens))
        self.waiting += 1
        if len(queue) == 1:
            self._offer(tenant)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # the request was already admitted
            elif (place, tokens) in queue:
                queue.remove((place, tokens))
                self.waiting -= 1
            raise

    def leave(self) -> None:
        """Record that an admitted request has ended, so that a waiting request can run."""
        self.running -= 1
        self._admit()

    def resize(self, places: int) -> None:
        """Change the number of requests that may run at the same time."""
        self.places = places
        self._admit()

    def _start(self, tenant: str, tokens: int) -> None:
        self.running += 1
        if self.running == 1:
            self._service.clear()  # no tenant waits, so all tenants start again with equal service
        least = min(self._service.values(), default=0.0)
        self._service[tenant] = max(self._service.get(tenant, least), least) + tokens

    def _offer(self, tenant: str) -> None:
        least = min(self._service.values(), default=0.0)
        self._service.setdefault(tenant, least)
        self._count += 1
        heapq.heappush(self._order, (self._service[tenant], self._count, tenant))

    def _admit(self) -> None:
        while self.running < self.places and self._order:
            _, _, tenant = heapq.heappop(self._order)
            queue = self._queues.get(tenant)
            if not queue:
                self._queues.pop(tenant, None)
                continue
            place, tokens = queue.popleft()
            self.waiting -= 1
            if not place.cancelled():  # a cancelled task may not have run since, and is still in the queue
                place.set_result(None)
                self.running += 1
                self._service[tenant] = self._service.get(tenant, 0.0) + tokens
            if queue:
                self._offer(tenant)
            else:
                del self._queues[tenant]
