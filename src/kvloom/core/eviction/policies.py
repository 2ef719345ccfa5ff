"""Eviction policies: one priority function each; the entry with the smallest priority is evicted first.

An entry is what can be evicted on its own: the tail of a leaf, a checkpoint, a media run. A policy sees no tokens and no
pages. The queue computes an entry's priority when it is queued and again before it is evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "MRU",
    "SLRU",
    "Cost",
    "CostAware",
    "Entry",
    "LearningPolicy",
    "Policy",
    "PriorityTTL",
    "ReuseHistory",
]


FIRST = -(1 << 31)
"""Rank of useless entries and of ended sessions: below any priority of a request."""


class ReuseHistory:
    """A learning policy's record of an entry. It outlives the entry in `Ghosts`."""

    __slots__ = ()

    def split(self) -> ReuseHistory:
        """Return the history of the upper node when a node is split: this object, unless it has counts."""
        return self


class Entry(ABC):
    """A cached entry as a policy sees it. `value` and `history` belong to the policy."""

    __slots__ = (
        "created",
        "ended",
        "expires",
        "expiring",
        "history",
        "hits",
        "last_used",
        "priority",
        "queued",
        "serial",
        "useless",
        "value",
        "wanted_by",
    )

    def __init__(self, serial: int, now: float, priority: int = 0, expires: float | None = None) -> None:
        self.serial = serial
        self.created = now
        self.last_used = now
        self.hits = 0
        self.priority = priority
        self.expires = expires
        self.expiring: float | None = None  # when the queue computes the key again
        self.ended = False  # its session ended
        self.useless = False  # its tail is not resumable
        self.value = 0.0
        self.wanted_by: tuple[tuple[int, int], ...] = ()  # turns of waiting requests, earliest first
        self.history: ReuseHistory | None = None
        self.queued: tuple[int, tuple[float, ...]] | None = None

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens to compute again if it is evicted."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Tokens before the entry."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of pages that an eviction frees."""

    def rank(self, now: float) -> int:
        """Sort key before the policy's: FIRST, or the priority of a request until it expires."""
        if self.useless or self.ended:
            return FIRST
        if self.expires is not None and now >= self.expires:
            return 0
        return self.priority


class Policy(Protocol):
    """An eviction policy: entries with smaller priorities are evicted first. Hooks may do nothing.

    In `on_hit`, the entry's `last_used` is still that of the previous use."""

    @property
    def name(self) -> str: ...

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]: ...
    def on_insert(self, entry: Entry, now: float) -> None: ...
    def on_hit(self, entry: Entry, now: float) -> None: ...
    def on_evict(self, entry: Entry, now: float) -> None: ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that observes requests, and whose priorities may fall with time."""

    def review(self, entry: Entry, now: float) -> float:
        """Return the time at which to compute the priority again, because it may have fallen; infinity for never."""
        ...

    def tokens_to_evict(self, entry: Entry) -> int:
        """Return how many tokens at the end of an entry have a value no higher than its priority."""
        ...

    def on_open(self, entry: Entry, ghost: ReuseHistory | None, resumed: int, now: float) -> ReuseHistory:
        """Record that a request hit `resumed` tokens that end in `entry` (a root if none). Returns the history for
        `on_close`.

        `ghost` is the history of the evicted run that would follow."""
        ...

    def on_close(
        self,
        visit: ReuseHistory,
        path: Sequence[Entry],
        length: int,
        tenant: str,
        ending: str | None,
        now: float,
    ) -> None:
        """Record that the request closed with `length` tokens.

        `path` has its nodes, deepest first; `ending` is its finish reason."""
        ...


class _Plain:
    """Hooks that do nothing."""

    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        pass

    def on_evict(self, entry: Entry, now: float) -> None:
        pass


class LRU(_Plain):
    """Least recently used."""

    name = "lru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.last_used,)


class LFU(_Plain):
    """Least frequently hit, then least recently used."""

    name = "lfu"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.hits, entry.last_used)


class FIFO(_Plain):
    """Oldest first."""

    name = "fifo"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.created,)


class MRU(_Plain):
    """Most recently used first."""

    name = "mru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (-entry.last_used,)


class SLRU(_Plain):
    """Two segments: entries without a hit are evicted before the others, each segment by last use."""

    name = "slru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (min(entry.hits, 1), entry.last_used)


class PriorityTTL(_Plain):
    """By request priority, then by expiry; entries that never expire by last use."""

    name = "priority"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        expires = float("inf") if entry.expires is None else max(entry.expires, now)
        return (expires, entry.last_used)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to compute a token again: a constant, plus a part that grows with the tokens before it."""

    per_token: float = 1.0
    per_token_per_depth: float = 1.0 / 32768

    def __call__(self, entry: Entry) -> float:
        middle = entry.depth + entry.tokens / 2
        return entry.tokens * (self.per_token + self.per_token_per_depth * middle)


class CostAware:
    """Seconds to recompute per byte freed, times uses, aged by the last eviction (GDSF)."""

    name = "cost"

    def __init__(self, cost: Cost | None = None) -> None:
        self.cost = cost or Cost()
        self.age = 0.0

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.value, entry.last_used)

    def on_insert(self, entry: Entry, now: float) -> None:
        self.on_hit(entry, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        entry.value = self.age + (1 + entry.hits) * self.cost(entry) / max(1, entry.bytes)

    def on_evict(self, entry: Entry, now: float) -> None:
        self.age = max(self.age, entry.value)
