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

MOST_TENANTS = 4096
"""Above this number of tenants, the service of tenants without waiting requests is forgotten."""


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
        self._offered: dict[str, tuple[float, int, str]] = {}
        """The entry of each tenant with waiting requests in the heap `_order`. Other entries of the heap are ignored."""
        self._most_tenants = MOST_TENANTS
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
        self._offer(tenant)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # the request was already admitted
            elif (place, tokens) in queue:
                queue.remove((place, tokens))
                self.waiting -= 1
                if not queue and self._queues.get(tenant) is queue:
                    self._withdraw(tenant)
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
        self._limit_tenants()

    def _offer(self, tenant: str) -> None:
        if tenant in self._offered:
            return
        least = min(self._service.values(), default=0.0)
        self._service.setdefault(tenant, least)
        self._count += 1
        entry = self._offered[tenant] = self._service[tenant], self._count, tenant
        heapq.heappush(self._order, entry)
        self._limit_tenants()

    def _limit_tenants(self) -> None:
        """Forget the service of tenants without waiting requests if there are many, because clients may name any number
        of tenants. Such a tenant starts again with the least service."""
        if len(self._service) > self._most_tenants:
            self._service = {name: self._service[name] for name in self._queues if name in self._service}
            self._most_tenants = max(MOST_TENANTS, 2 * len(self._service))

    def _withdraw(self, tenant: str) -> None:
        """Remove a tenant whose waiting requests were all cancelled."""
        self._queues.pop(tenant, None)
        self._offered.pop(tenant, None)
        if len(self._order) > 64 + 2 * len(self._offered):
            self._order = list(self._offered.values())
            heapq.heapify(self._order)

    def _admit(self) -> None:
        while self.running < self.places and self._order:
            entry = heapq.heappop(self._order)
            tenant = entry[2]
            if self._offered.get(tenant) is not entry:
                continue
            del self._offered[tenant]
            queue = self._queues[tenant]
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
