"""The order in which entries leave: a heap whose keys are checked again at its top.

Spare window pages go before everything else, oldest first; then entries by rank and policy, and last
those that somebody in line will want. The queue decides who is next. It frees nothing.
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
    """Entries of one account. An entry is in it while it may leave; stale items are skipped.

    | call    | cost     |
    |---------|----------|
    | push    | O(log n) |
    | first   | O(log n) amortised: an item is looked at again only if its entry was used meanwhile |
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.learner = policy if isinstance(policy, LearningPolicy) else None
        self.unneeded: deque[tuple[E, int]] = deque()
        # rank, priority, number and entry, side by side: comparing tuples within tuples costs twice.
        self._heap: list[tuple[int, tuple[float, ...], int, E]] = []
        self._expiring: list[tuple[float, int, E]] = []
        self._pushed = 0
        self.live = 0
        """Entries that are in it."""

    def __len__(self) -> int:
        return self.live

    def push(self, entry: E, now: float) -> None:
        """Queue `entry`, or move it if its priority fell. Rises are noticed when it would be next, falls with
        time when its retention expires or the policy wants to look again."""
        rank, priority = key = self._key(entry, now)
        queued = entry.queued
        if queued is None or key < queued:
            if queued is None:
                self.live += 1
            entry.queued = key
            self._pushed = number = self._pushed + 1
            heappush(self._heap, (rank, priority, number, entry))
        if self.learner is not None or entry.expires is not None:
            self._look_again(entry, now)

    def _key(self, entry: E, now: float) -> tuple[int, tuple[float, ...]]:
        """What somebody in line will want leaves after all else, who comes last first."""
        if entry.wanted_by:
            urgent, number = entry.wanted_by[0]
            return entry.rank(now), (INF, INF, -urgent, -number)
        return entry.rank(now), self.policy.priority(entry, now)

    def _look_again(self, entry: E, now: float) -> None:
        """Note when the key of `entry` may have fallen by itself."""
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
        """The entry may not leave now (or is gone); its item is skipped later."""
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
        """The entry that leaves next, spares excepted; it stays queued until it is removed."""
        if self._expiring and self._expiring[0][0] <= now:
            self._expire(now)
        heap = self._heap
        while heap:
            rank, priority, _, entry = heap[0]
            queued = entry.queued
            if queued is None or queued[1] != priority or queued[0] != rank:
                heappop(heap)
                continue
            current = self._key(entry, now)
            if current <= queued:
                return entry
            entry.queued = current
            self._pushed += 1
            heapreplace(heap, (*current, self._pushed, entry))
            if self.learner is not None:
                self._look_again(entry, now)
        return None

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            due, _, entry = heappop(self._expiring)
            if entry.expiring == due:
                entry.expiring = None
                if entry.queued is not None:
                    self.push(entry, now)
