"""The waiting queue: requests by tenant, requests that wait for pages, and requests that wait for the same
pages as another request.

Each tenant has a queue, ordered by priority and arrival (`Request.sort_key`). The tenant with the least service is
next. Service is the number of computed tokens divided by the tenant's weight. A tenant gains no advantage from a time
without waiting requests. This module does not use the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import chain, islice
from math import inf

from kvloom.core import PUBLIC_TENANT, Account
from kvloom.engine.request import Request

__all__ = ["NextBlock", "TenantQueue", "WaitingQueue", "common_prefix", "next_block_of"]

NextBlock = tuple[str, str, str, bool, int, bytes]
"""Identity of the next whole block of a request: tenant, adapter, salt, `CacheControl.lossy`, number of public tokens,
and content. The content is all tokens up to the end of the block, and the digests of their images. A block of a public
prefix has no tenant and no salt."""


UNWEIGHTED = 1 / 16
"""A tenant with weight 0 gets this fraction of the smallest other weight."""


class TenantQueue:
    """The waiting requests of one tenant in order, and the service that the tenant received.

    - `running` is the number of its running requests.
    - `service` is the number of its computed tokens divided by `weight`.
    - `short` is the number of bytes that its next request lacked in the last step.
    """

    __slots__ = ("account", "heap", "running", "service", "short", "weight")

    def __init__(self, account: Account, weight: float) -> None:
        self.account, self.weight = account, weight
        self.heap: list[tuple[tuple[int, int], Request]] = []
        self.running = self.short = 0
        self.service = 0.0

    @property
    def turn(self) -> tuple[float, float]:
        """The sort key of the tenant. The tenant with the smallest key is next."""
        return self.service, self.running / self.weight

    def head(self) -> Request | None:
        """Return the tenant's next request, and drop finished requests before it. Return None if no request waits, or
        if the last token of the next request has not arrived on the host.
        """
        while self.heap:
            request = self.heap[0][1]
            if request.finish_reason is None:
                return None if request.inflight_tokens else request
            heapq.heappop(self.heap)
        return None


class WaitingQueue:
    """The waiting requests of all tenants. A finished request stays in the queue until it would be next, and is then
    dropped. `accounts` maps the name of each declared tenant to its account (`core.Account`). All other tenants
    share the account "".
    """

    def __init__(self, accounts: Mapping[str, Account]) -> None:
        weights = [account.tenant.weight for account in accounts.values() if account.tenant.weight]
        least = UNWEIGHTED * min(weights) if weights else 1.0
        self._tenants = {
            name: TenantQueue(account, account.tenant.weight or least) for name, account in accounts.items()
        }
        self._default = self._tenants[""]
        self._active: dict[TenantQueue, None] = {}
        self._loading: list[tuple[Request, NextBlock | None]] = []
        self._behind: dict[NextBlock, list[Request]] = {}
        self._loading_blocks: set[NextBlock | None] = set()

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in no defined order. Skips requests that have ended while they waited (for
        example by an abort), but are still in the queue."""
        behind = chain.from_iterable(self._behind.values())
        queued = (request for tenant in self._active for _, request in tenant.heap)
        requests = (*queued, *(request for request, _ in self._loading), *behind)
        return (request for request in requests if request.finish_reason is None)

    @property
    def length(self) -> int:
        """Number of queued requests, including finished requests. O(tenants)."""
        return sum(len(tenant.heap) for tenant in self._active)

    @property
    def loading(self) -> int:
        """Number of requests that wait for pages from tiers."""
        return len(self._loading) + sum(map(len, self._behind.values()))

    def tenant_queue(self, request: Request) -> TenantQueue:
        """Return the queue of a request's tenant. Undeclared tenants share one queue."""
        return self._tenants.get(request.control.tenant, self._default)

    def active(self) -> list[TenantQueue]:
        """Return the tenants with waiting or running requests. O(active tenants)."""
        active = [tenant for tenant in self._active if tenant.heap or tenant.running]
        if len(active) < len(self._active):
            self._active = dict.fromkeys(active)
        return active

    def push(self, request: Request) -> None:
        """Queue a request. A tenant that had no waiting requests starts at the service level of the active tenants, so
        it gains no advantage from idle time.
        """
        tenant = self.tenant_queue(request)
        if len(self._tenants) > 1 and not tenant.heap:
            others = [other.service for other in self.active() if other is not tenant]
            level = min(others) if others else max(other.service for other in self._tenants.values())
            tenant.service = max(tenant.service, level)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queue a popped request again. Does not change the service."""
        tenant = self.tenant_queue(request)
        self._active[tenant] = None
        heapq.heappush(tenant.heap, (request.sort_key, request))

    def pop(
        self, passed: Container[TenantQueue] = (), below: tuple[float, float] = (inf, inf)
    ) -> Request | None:
        """Remove the next request from the queue and return it. Considers only tenants that are not in `passed` and
        whose `turn` is before `below`.

        Return None if these tenants have no request that can start. A request whose last sampled token has not arrived
        on the host cannot start.
        """
        tenants = [tenant for tenant in self._active if tenant not in passed and tenant.turn < below]
        ready = [tenant for tenant in tenants if tenant.head() is not None]
        return heapq.heappop(min(ready, key=_turn).heap)[1] if ready else None

    def nearest(self, most: int) -> list[Request]:
        """Return about `most` requests that will be scheduled soon. From each tenant, return up to `most` / number of
        tenants, rounded up."""
        heaps = [tenant.heap for tenant in self._active if tenant.heap]
        each = -(-most // max(1, len(heaps)))
        return [
            request for heap in heaps for _, request in islice(heap, each) if request.finish_reason is None
        ]

    def set_loading(self, request: Request, next_block: NextBlock | None) -> None:
        """Make a request wait for pages, including the pages of `next_block`."""
        self._loading.append((request, next_block))
        self._loading_blocks.add(next_block)

    def wait_behind(self, request: Request, next_block: NextBlock) -> bool:
        """If another request loads `next_block`, make this request wait until the block is loaded. Return whether
        another request loads it.
        """
        if next_block not in self._loading_blocks:
            return False
        self._behind.setdefault(next_block, []).append(request)
        return True

    def requeue_ready(self, is_pending: Callable[[Request, bool], bool]) -> set[NextBlock | None]:
        """Queue the requests whose pages have arrived, and the requests that wait for the same pages. Return the next
        blocks of the requests that still wait. `is_pending(request, has_followers)` returns whether a request must
        continue to wait. `has_followers` means that other requests wait for the same pages.
        """
        waiting, self._loading = self._loading, []
        for request, next_block in waiting:
            if request.finish_reason is None and is_pending(request, next_block in self._behind):
                self._loading.append((request, next_block))
            elif request.finish_reason is None:
                self.push(request)
        self._loading_blocks = {next_block for _, next_block in self._loading}
        for next_block in [
            next_block for next_block in self._behind if next_block not in self._loading_blocks
        ]:
            for request in self._behind.pop(next_block):
                self.push(request)
        return set(self._loading_blocks)


def _turn(tenant: TenantQueue) -> tuple[float, float]:
    return tenant.turn


def next_block_of(request: Request, start: int, block: int) -> NextBlock | None:
    """Return a key for the block of a request that contains token `start`. Return None if the block is incomplete,
    or if no other request can share it."""
    control, end = request.control, (start // block + 1) * block
    alone = request.uncached or request.computes_all
    if end > len(request.tokens) or alone or not (control.read and control.store):
        return None
    content = b"".join(item.digest for item in request.media if item.start < end)
    is_public, text = end <= control.public_tokens, request.ids(end).tobytes() + content
    if is_public:
        return PUBLIC_TENANT, control.adapter, "", control.lossy, 0, text
    return control.tenant, control.adapter, control.salt, control.lossy, control.public_tokens, text


def common_prefix(one: Request, other: Request, start: int, block: int) -> int:
    """Return the number of tokens in the prefix that both requests share, rounded down to whole blocks. `one` has
    computed its tokens before `start`. After `one` has computed this prefix, `other` can resume at the end of the
    prefix.

    Return 0 if the two requests differ in the block at `start`, or if `other` cannot use cached pages of
    `one`. Also returns 0 if `other` begins with all tokens of `one`, because the two requests then do not
    diverge.
    """
    end = (start // block + 1) * block
    if min(len(one.tokens), len(other.tokens) - 1) < end or one.tokens[end - 1] != other.tokens[end - 1]:
        return 0  # the usual case
    next_block = next_block_of(one, start, block)
    if next_block is None or next_block != next_block_of(other, start, block):
        return 0
    shared = min(len(one.tokens), len(other.tokens))
    if one.activation != other.activation:
        starts = [each.start for each in (one.activation, other.activation) if each is not None]
        shared = min(shared, *starts)
    mine, theirs = one.control, other.control
    if (mine.tenant, mine.salt, mine.public_tokens) != (theirs.tenant, theirs.salt, theirs.public_tokens):
        shared = min(shared, mine.public_tokens, theirs.public_tokens)
    same = one.ids(shared) == other.ids(shared)
    shared = shared if same.all() else int(same.argmin())
    return 0 if shared == len(one.tokens) else min(shared, len(other.tokens) - 1) // block * block
