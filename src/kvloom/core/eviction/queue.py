"""Eviction queue: a heap of entries in the order of eviction. When an entry reaches the top, the queue
computes its key again.

Unneeded window pages are evicted first, in the order of their age. A window page is unneeded if no checkpoint needs it
and it is not in use. The entries follow, ordered by retention priority (`Entry.retention_priority`), and then by the
policy's priority. Within a retention priority, entries that waiting requests will hit come last. The queue only chooses
the next entry, and evicts nothing.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from .policies import Entry, LearningPolicy, Policy

__all__ = ["EvictionQueue"]

INF = float("inf")
E = TypeVar("E", bound=Entry)


class EvictionQueue(Generic[E]):
    """The entries of one account (the pages of one tenant) that may be evicted. An entry that is removed, or that must
    be evicted earlier than before, leaves its old item in the heap. The queue skips this item when it reaches the top.

    | call        | cost                                                                                 |
    |-------------|--------------------------------------------------------------------------------------|
    | push        | O(log n)                                                                             |
    | next_victim | O(log n) amortised: the top entry is sorted in again only if it was used meanwhile           |
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.learner = policy if isinstance(policy, LearningPolicy) else None
        self.unneeded: deque[tuple[E, int]] = deque()
        # (retention priority, priority, number, entry) as a flat tuple, because comparing nested tuples takes twice as
        # long.
        self._heap: list[tuple[int, tuple[float, ...], int, E]] = []
        self._expiring: list[tuple[float, int, E]] = []
        self._pushed = 0
        self.live = 0
        """Number of queued entries."""

    def __len__(self) -> int:
        return self.live

    def push(self, entry: E, now: float) -> None:
        """Queue `entry`, or update its position if it is already queued.

        An entry with a smaller key than before moves up now. An entry with a larger key moves when it reaches the top.
        A key can also fall while the entry is queued. The entry then moves when its request priority expires, or at the
        policy's next review.
        """
        retention, priority = key = self._key(entry, now)
        queued = entry.queued
        if queued is None or key < queued:
            if queued is None:
                self.live += 1
            entry.queued = key
            self._pushed = number = self._pushed + 1
            heappush(self._heap, (retention, priority, number, entry))
        if self.learner is not None or entry.expires is not None:
            self._schedule_review(entry, now)

    def _key(self, entry: E, now: float) -> tuple[int, tuple[float, ...]]:
        """Return the sort key: the retention priority of the entry, then the priority of the policy.

        Within a retention priority, entries that waiting requests will hit come last. Their order depends on the first
        waiting request that will hit each of them: the entry whose request is scheduled latest is evicted first.
        """
        if entry.wanted_by:
            urgent, number = entry.wanted_by[0]
            return entry.retention_priority(now), (INF, INF, -urgent, -number)
        return entry.retention_priority(now), self.policy.priority(entry, now)

    def _schedule_review(self, entry: E, now: float) -> None:
        """Schedule when to compute the key of `entry` again, if the key can fall with time. The time is the expiry of
        the request priority or the policy's next review, whichever is earlier."""
        due = INF if entry.expires is None or entry.expires <= now else entry.expires
        if self.learner is not None:
            review = self.learner.review(entry, now)
            if now < review < due:
                due = review
        if due != INF and due != entry.expiring:
            entry.expiring = due
            self._pushed = number = self._pushed + 1
            heappush(self._expiring, (due, number, entry))

    def remove(self, entry: E) -> None:
        """Remove an entry that is in use or evicted. Its item stays in the heap and is skipped later."""
        if entry.queued is None:
            return
        entry.queued = None
        self.live = live = self.live - 1
        if len(self._heap) > 64 + 2 * live:
            self._heap = [item for item in self._heap if item[3].queued == item[:2]]
            heapify(self._heap)
        if len(self._expiring) > 64 + 4 * live:
            self._expiring = [item for item in self._expiring if item[2].expiring == item[0]]
            self._expiring = [item for item in self._expiring if item[2].queued is not None]
            heapify(self._expiring)

    def next_victim(self, now: float) -> E | None:
        """Return the entry to evict next, or None if the queue is empty. The entry stays queued. Does not consider
        window pages that no checkpoint needs."""
        if self._expiring and self._expiring[0][0] <= now:
            self._expire(now)
        heap = self._heap
        while heap:
            retention, priority, _, entry = heap[0]
            queued = entry.queued
            if queued is None or queued[1] != priority or queued[0] != retention:
                heappop(heap)
                continue
            current = self._key(entry, now)
            if current <= queued:
                return entry
            entry.queued = current
            self._pushed += 1
            heapreplace(heap, (*current, self._pushed, entry))
            if self.learner is not None:
                self._schedule_review(entry, now)
        return None

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            due, _, entry = heappop(self._expiring)
            if entry.expiring == due:
                entry.expiring = None
                if entry.queued is not None:
                    self.push(entry, now)
