"""Admission of requests by tenant. While all places are taken, the tenant with the least service is admitted next.

The service of a tenant is the number of its admitted prompt tokens and of its generated tokens. After idle time, the
service of a tenant is raised to the smallest service of the other tenants, so idle time gives no advantage. While
workers can take requests, no request waits.

If a tenant has fewer running requests than its share of the places, its requests are sent at once. Such requests do not
wait for the long answers of another tenant. The workers divide their steps between the tenants.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque

from kvloom.serve.auth import PRESSURE

__all__ = ["FairQueue", "QueueFullError"]

MOST_TENANTS = 4096
"""Above this number of tenants, the service of tenants without requests is forgotten."""


class QueueFullError(Exception):
    """Raised if too many requests wait."""


class FairQueue:
    """Admits requests. At most `places` requests run at the same time on all workers, and up to twice as many with
    those of tenants below their share. The caller calls `resize` when a worker is added or removed.

    At most `limit` requests wait. A tenant with waiting requests may add more only while their number is at
    most PRESSURE times the number of free places in the queue. The queue therefore always has a place for a new tenant.
    """

    def __init__(self, places: int, limit: int = 10_000) -> None:
        self.places, self.limit = places, limit
        self.running = self.waiting = 0
        self._running_of: Counter[str] = Counter()
        self._service: dict[str, float] = {}
        self._queues: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        self._order: list[tuple[float, int, str]] = []
        self._offered: dict[str, tuple[float, int, str]] = {}
        """The entry of each tenant with waiting requests in the heap `_order`. Other entries of the heap are ignored."""
        self._most_tenants = MOST_TENANTS
        self._count = 0

    async def enter(self, tenant: str, tokens: int) -> None:
        """Wait until a request of `tokens` prompt tokens may run. Raises QueueFullError if the queue is full, or if the
        tenant has most of its places."""
        if tenant not in self._queues and not self._running_of[tenant]:
            self._raise_service(tenant)
        if (self.running < self.places and not self.waiting) or (
            tenant not in self._queues and self._is_below_share(tenant)
        ):
            self._start(tenant, tokens)
            return
        queued = len(self._queues.get(tenant, ()))
        free = self.limit - self.waiting - 1
        if free < 0 or (queued and queued + 1 > PRESSURE * free):
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
                self.leave(tenant)  # the request was already admitted
            elif (place, tokens) in queue:
                queue.remove((place, tokens))
                self.waiting -= 1
                if not queue and self._queues.get(tenant) is queue:
                    self._withdraw(tenant)
            raise

    def leave(self, tenant: str) -> None:
        """Record that an admitted request has ended, so that a waiting request can run."""
        self.running -= 1
        self._running_of[tenant] -= 1
        if not self._running_of[tenant]:
            del self._running_of[tenant]
        self._admit()
        if tenant in self._queues and self._is_below_share(tenant):
            self._admit_next(tenant)

    def served(self, tenant: str, tokens: int) -> None:
        """Count generated tokens of a running request."""
        if tenant in self._service:
            self._service[tenant] += tokens

    def resize(self, places: int) -> None:
        """Change the number of requests that may run at the same time."""
        self.places = places
        self._admit()

    def _is_below_share(self, tenant: str) -> bool:
        """Return whether a tenant has fewer running requests than its equal share of the places."""
        running = self._running_of[tenant]
        tenants = len(self._running_of) + (not running)
        return self.running < 2 * self.places and running < self.places // tenants

    def _raise_service(self, tenant: str) -> None:
        """Raise the service of a tenant that was idle to the smallest service of the tenants with requests. If no
        tenant has requests, all tenants start again with equal service."""
        if not self.running and not self.waiting:
            self._service.clear()
        busy = self._running_of.keys() | self._queues.keys()
        least = min((self._service.get(one, 0.0) for one in busy), default=0.0)
        self._service[tenant] = max(self._service.get(tenant, 0.0), least)
        if len(self._service) > self._most_tenants:  # clients may name any number of tenants
            self._service = {one: self._service[one] for one in (*busy, tenant) if one in self._service}
            self._most_tenants = max(MOST_TENANTS, 2 * len(self._service))

    def _start(self, tenant: str, tokens: int) -> None:
        self.running += 1
        self._running_of[tenant] += 1
        self._service[tenant] = self._service.get(tenant, 0.0) + tokens

    def _offer(self, tenant: str) -> None:
        if tenant in self._offered:
            return
        self._count += 1
        entry = self._offered[tenant] = self._service.get(tenant, 0.0), self._count, tenant
        heapq.heappush(self._order, entry)

    def _withdraw(self, tenant: str) -> None:
        """Remove a tenant that has no waiting request."""
        del self._queues[tenant], self._offered[tenant]
        if len(self._order) > 64 + 2 * len(self._offered):
            self._order = list(self._offered.values())
            heapq.heapify(self._order)

    def _admit(self) -> None:
        while self.running < self.places and self._order:
            entry = heapq.heappop(self._order)
            service, _, tenant = entry
            if self._offered.get(tenant) is not entry:
                continue
            if service < self._service[tenant]:  # its running requests have generated tokens since
                del self._offered[tenant]
                self._offer(tenant)
            else:
                self._admit_next(tenant)

    def _admit_next(self, tenant: str) -> None:
        """Admit the next waiting request of a tenant."""
        place, tokens = self._queues[tenant].popleft()
        self.waiting -= 1
        if not place.cancelled():  # a cancelled task may not have run since, and is still in the queue
            place.set_result(None)
            self._start(tenant, tokens)
        if self._queues[tenant]:
            del self._offered[tenant]
            self._offer(tenant)
        else:
            self._withdraw(tenant)
