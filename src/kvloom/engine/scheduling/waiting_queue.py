"""Who waits: in line by rank, aside until pages have come from below, or behind someone aside for the same pages. Knows no cache
and no pages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, islice

from kvloom.engine.request import Request

__all__ = ["Front", "WaitingQueue", "common_prefix", "front_of"]

Front = tuple[str, str, bytes]
"""What a request has when its next block is whole: tenant, adapter and content."""


class WaitingQueue:
    """Requests that hold no pages. Those that ended meanwhile are passed over, and dropped when their turn comes."""

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, int], Request]] = []
        self._loading: list[tuple[Request, Front | None]] = []
        self._behind: dict[Front, list[Request]] = {}
        self._fronts: set[Front | None] = set()  # of those aside

    def __iter__(self) -> Iterator[Request]:
        """Those that have not ended, in no order."""
        behind = chain.from_iterable(self._behind.values())
        found = (
            *(request for _, request in self._ready),
            *(request for request, _ in self._loading),
            *behind,
        )
        return (request for request in found if request.finish_reason is None)

    @property
    def length(self) -> int:
        """How many are in line, the ended among them. O(1)."""
        return len(self._ready)

    @property
    def loading(self) -> int:
        """How many wait for pages from below."""
        return len(self._loading) + sum(map(len, self._behind.values()))

    def push(self, request: Request) -> None:
        heapq.heappush(self._ready, (request.rank, request))

    def pop(self) -> Request | None:
        """Whose turn it is; None where nobody waits, or the first was preempted a moment ago and its last token is not
        known yet."""
        while self._ready:
            request = self._ready[0][1]
            if request.inflight_tokens:
                return None
            heapq.heappop(self._ready)
            if request.finish_reason is None:
                return request
        return None

    def nearest(self, most: int) -> list[Request]:
        """Up to `most` of those in line, whose turn comes about next."""
        return [request for _, request in islice(self._ready, most) if request.finish_reason is None]

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
