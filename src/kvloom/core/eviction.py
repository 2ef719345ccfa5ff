"""The order in which entries leave: a heap whose keys are checked again when popped.

Spare window pages go before everything else, oldest first; then entries by rank and policy. The
queue decides who is next. It frees nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, TypeVar

from .policies import Entry, Learner, Policy

__all__ = ["EvictionQueue"]

INF = float("inf")
E = TypeVar("E", bound=Entry)
Key = tuple[int, tuple[float, ...]]


class EvictionQueue(Generic[E]):
    """Entries of one account. An entry is in it while it may leave; stale items are skipped.

    | call    | cost     |
    |---------|----------|
    | push    | O(log n) |
    | pop     | O(log n) amortised: an item is looked at again only if its entry was used meanwhile |
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.learner = policy if isinstance(policy, Learner) else None
        self.spares: deque[tuple[E, int]] = deque()
        self._heap: list[tuple[Key, int, E]] = []
        self._expiring: list[tuple[float, int, E]] = []
        self._pushed = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, entry: E, now: float) -> None:
        """Queue `entry`, or move it if its priority fell. Rises are noticed when it is popped, falls with
        time when its retention expires or the policy wants to look again."""
        key = self._key(entry, now)
        if entry.queued is None or key < entry.queued:
            self._live += entry.queued is None
            entry.queued = key
            self._pushed += 1
            heapq.heappush(self._heap, (key, self._pushed, entry))
        if self.learner is not None or entry.expires is not None:
            self._look_again(entry, now)

    def _look_again(self, entry: E, now: float) -> None:
        """Note when the key of `entry` may have fallen by itself."""
        due = INF if entry.expires is None or entry.expires <= now else entry.expires
        if self.learner is not None:
            review = self.learner.review(entry, now)
            if now < review < due:
                due = review
        if due < INF and due != entry.expiring:
            entry.expiring = due
            self._pushed += 1
            heapq.heappush(self._expiring, (due, self._pushed, entry))

    def remove(self, entry: E) -> None:
        """The entry may not leave now (or is gone); its item is skipped later."""
        if entry.queued is None:
            return
        entry.queued = None
        self._live -= 1
        if len(self._heap) > 64 + 2 * self._live:
            self._heap = [item for item in self._heap if item[2].queued == item[0]]
            heapq.heapify(self._heap)
        if len(self._expiring) > 64 + 4 * self._live:
            self._expiring = [item for item in self._expiring if item[2].expiring == item[0]]
            self._expiring = [item for item in self._expiring if item[2].queued is not None]
            heapq.heapify(self._expiring)

    def peek(self, now: float) -> Key | None:
        """The key of the entry that would leave next, spares excepted."""
        self._expire(now)
        heap = self._heap
        while heap:
            key, _, entry = heap[0]
            if entry.queued != key:
                heapq.heappop(heap)
                continue
            current = self._key(entry, now)
            if current <= key:
                return key
            entry.queued = current
            self._pushed += 1
            heapq.heapreplace(heap, (current, self._pushed, entry))
            if self.learner is not None:
                self._look_again(entry, now)
        return None

    def pop(self, now: float) -> E | None:
        """Take the entry that leaves next, or None."""
        if self.peek(now) is None:
            return None
        entry = heapq.heappop(self._heap)[2]
        entry.queued = None
        self._live -= 1
        return entry

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            due, _, entry = heapq.heappop(self._expiring)
            if entry.expiring == due:
                entry.expiring = None
                if entry.queued is not None:
                    self.push(entry, now)

    def _key(self, entry: E, now: float) -> Key:
        return entry.rank(now), self.policy.priority(entry, now)
