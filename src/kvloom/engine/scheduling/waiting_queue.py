"""Who waits: in line by rank, aside until pages have come from below, or behind someone aside for the same pages. Knows no cache
and no pages.

Each tenant's account has a line of its own, and ranks count inside a line only. Between lines the queue is fair: the line
with the least service is next. Service is computed tokens over the tenant's weight; a line earns none while nothing waits in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import chain, islice
from math import inf

from kvloom.core import Account
from kvloom.engine.request import Request

__all__ = ["Front", "TenantQueue", "WaitingQueue", "common_prefix", "front_of"]

Front = tuple[str, str, bytes]
"""What a request has when its next block is whole: tenant, adapter and content."""


UNWEIGHTED = 1 / 16
"""What a tenant of weight 0 counts beside tenants that have one: so much of the least weight."""


class TenantQueue:
    """The waiting requests of one tenant's account, by rank, and what the scheduler gave it: `running` requests, and
    `service`, computed tokens over `weight`. `short` is how many bytes its next request lacked in the last step."""

    __slots__ = ("account", "heap", "running", "service", "short", "weight")

    def __init__(self, account: Account, weight: float) -> None:
        self.account, self.weight = account, weight
        self.heap: list[tuple[tuple[int, int], Request]] = []
        self.running = self.short = 0
        self.service = 0.0

    @property
    def turn(self) -> tuple[float, float]:
        """Sorts first the line that is next."""
        return self.service, self.running / self.weight

    def head(self) -> Request | None:
        """The next request; None where none waits, or its last token is not known yet. Drops requests that ended."""
        while self.heap:
            request = self.heap[0][1]
            if request.finish_reason is None:
                return None if request.inflight_tokens else request
            heapq.heappop(self.heap)
        return None


class WaitingQueue:
    """Requests that hold no pages. Those that ended meanwhile are passed over, and dropped when their turn comes."""

    def __init__(self, accounts: Mapping[str, Account]) -> None:
        weights = [account.tenant.weight for account in accounts.values() if account.tenant.weight]
        least = UNWEIGHTED * min(weights) if weights else 1.0
        self._lines = {
            name: TenantQueue(account, account.tenant.weight or least) for name, account in accounts.items()
        }
        self._default = self._lines[""]
        self._active: dict[TenantQueue, None] = {}
        self._loading: list[tuple[Request, Front | None]] = []
        self._behind: dict[Front, list[Request]] = {}
        self._fronts: set[Front | None] = set()  # of those aside

    def __iter__(self) -> Iterator[Request]:
        """Those that have not ended, in no order."""
        behind = chain.from_iterable(self._behind.values())
        lines = (request for line in self._active for _, request in line.heap)
        found = (*lines, *(request for request, _ in self._loading), *behind)
        return (request for request in found if request.finish_reason is None)

    @property
    def length(self) -> int:
        """How many are in line, the ended among them. O(1)."""
        return sum(len(line.heap) for line in self._active)

    @property
    def loading(self) -> int:
        """How many wait for pages from below."""
        return len(self._loading) + sum(map(len, self._behind.values()))

    def line_of(self, request: Request) -> TenantQueue:
        """The line of a request's tenant. Tenants that were not declared share one."""
        return self._lines.get(request.control.tenant, self._default)

    def active(self) -> list[TenantQueue]:
        """The lines that have waiting or running requests. O(of those)."""
        found = [line for line in self._active if line.heap or line.running]
        if len(found) < len(self._active):
            self._active = dict.fromkeys(found)
        return found

    def push(self, request: Request) -> None:
        """Let a request wait in its tenant's line. A line that was empty starts level with the others: unused service is lost."""
        line = self.line_of(request)
        if len(self._lines) > 1 and not line.heap:
            others = [other.service for other in self.active() if other is not line]
            level = min(others) if others else max(other.service for other in self._lines.values())
            line.service = max(line.service, level)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Let a request that was popped wait again, as if it had not been."""
        line = self.line_of(request)
        self._active[line] = None
        heapq.heappush(line.heap, (request.rank, request))

    def pop(self, passed: Container[TenantQueue] = (), below: float = inf) -> Request | None:
        """The request that is next, of the lines that are not `passed` and had less service than `below`. None where no
        request waits there, or the first of each line was preempted a moment ago and its last token is not known yet."""
        lines = [line for line in self._active if line not in passed and line.service < below]
        ready = [line for line in lines if line.head() is not None]
        return heapq.heappop(min(ready, key=_turn).heap)[1] if ready else None

    def nearest(self, most: int) -> list[Request]:
        """Up to `most` of those in line, whose turn comes about next: as many of each line."""
        lines = [line.heap for line in self._active if line.heap]
        each = -(-most // max(1, len(lines)))
        return [
            request for heap in lines for _, request in islice(heap, each) if request.finish_reason is None
        ]

    def set_loading(self, request: Request, front: Front | None) -> None:
        """Let a request wait for pages, those of `front` among them."""
        self._loading.append((request, front))
        self._fronts.add(front)

    def wait_behind(self, request: Request, front: Front) -> bool:
        """Let a request wait behind one that waits for the pages of `front`; whether there is one."""
        if front not in self._fronts:
            return False
        self._behind.setdefault(front, []).append(request)
        return True

    def requeue_ready(self, still: Callable[[Request, bool], bool]) -> set[Front | None]:
        """Put back in line who waits aside and need not any more, and who waits behind those; the fronts of the others: nobody
        else need compute those. `still` is told of each whether others wait behind it."""
        waiting, self._loading = self._loading, []
        for request, front in waiting:
            if request.finish_reason is None and still(request, front in self._behind):
                self._loading.append((request, front))
            elif request.finish_reason is None:
                self.push(request)
        self._fronts = {front for _, front in self._loading}
        for front in [front for front in self._behind if front not in self._fronts]:
            for request in self._behind.pop(front):
                self.push(request)
        return set(self._fronts)


def _turn(line: TenantQueue) -> tuple[float, float]:
    return line.turn


def front_of(request: Request, start: int, block: int) -> Front | None:
    """What a request that has `start` tokens has when its next block is whole; None where nobody shares it."""
    control, end = request.control, (start // block + 1) * block
    alone = request.uncached or request.wants_prompt_logprobs
    if end > len(request.tokens) or alone or not (control.read and control.store):
        return None
    shown = b"" if request.images is None else request.images.content_key(end)
    return control.tenant, f"{control.adapter}{'~' * control.lossy}", request.ids(end).tobytes() + shown


def common_prefix(one: Request, other: Request, start: int, block: int) -> int:
    """Where `other` could resume on what `one` computes from `start` on, short of its end: by whole blocks; 0 for nowhere."""
    end = (start // block + 1) * block
    if min(len(one.tokens), len(other.tokens) - 1) < end or one.tokens[end - 1] != other.tokens[end - 1]:
        return 0  # so mostly
    front = front_of(one, start, block)
    if front is None or front != front_of(other, start, block):
        return 0
    shared = min(len(one.tokens), len(other.tokens))
    same = one.ids(shared) == other.ids(shared)
    shared = shared if same.all() else int(same.argmin())
    return 0 if shared == len(one.tokens) else min(shared, len(other.tokens) - 1) // block * block
