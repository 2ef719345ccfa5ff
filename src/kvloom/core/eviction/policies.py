"""Eviction policies. Each policy is one priority function. The entry with the smallest priority is evicted first.

An entry is a part of the cache that can be evicted alone. There are three kinds: the last blocks of a leaf, a
checkpoint, and a media run (the pages of one image). A policy has no access to tokens or pages. The queue computes an
entry's priority when the entry is queued, and again before it is evicted.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
    "SavablePolicy",
]


FIRST = -(1 << 31)
"""Retention priority of entries at whose end no prompt can resume, and of entries of ended sessions. FIRST is below any
priority that a request sets."""


class ReuseHistory:
    """The data that a learning policy keeps about an entry. After the entry is evicted, `Ghosts` keeps this data."""

    __slots__ = ()

    def split(self) -> ReuseHistory:
        """Return the history of the upper node, after a node was split in two. By default, both nodes share one
        history."""
        return self


class Entry(ABC):
    """A cached entry as a policy sees it. Only the policy writes `value` and `history`."""

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

    users = 0
    """Number of open sequences that resumed at the entry or took it. Only checkpoints count their users. Other entries
    cannot be evicted while a sequence uses them."""

    def __init__(self, serial: int, now: float, priority: int = 0, expires: float | None = None) -> None:
        self.serial = serial
        self.created = now
        self.last_used = now
        self.hits = 0
        self.priority = priority
        self.expires = expires
        self.expiring: float | None = None  # time at which the queue computes the key again
        self.ended = False  # whether the session of the entry has ended
        self.useless = False  # whether no prompt can resume at the end of the node
        self.value = 0.0
        self.wanted_by: tuple[
            tuple[int, int], ...
        ] = ()  # queue positions of waiting requests, earliest first
        self.history: ReuseHistory | None = None
        self.queued: tuple[int, tuple[float, ...]] | None = None

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of tokens that must be computed again if a request needs the entry after its eviction."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of tokens before the entry."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Number of bytes that an eviction frees."""

    def retention_priority(self, now: float) -> int:
        """Return the first part of the entry's sort key in the eviction queue. The retention priority is FIRST if no
        prompt can resume at the end of the entry, or if the session of the entry has ended. Otherwise it is the
        priority that a request set for these tokens, or 0 after this priority has expired."""
        if self.useless or self.ended:
            return FIRST
        if self.expires is not None and now >= self.expires:
            return 0
        return self.priority

    def rank(self, now: float) -> int:
        """Deprecated name of `retention_priority`."""
        warnings.warn(
            "Entry.rank is deprecated and will be removed in 0.4.0: use Entry.retention_priority",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.retention_priority(now)


class Policy(Protocol):
    """An eviction policy. Entries with smaller priorities are evicted first. The cache reports events by calling
    `on_insert`, `on_hit` and `on_evict`. A policy may ignore these calls. During `on_hit`, `entry.last_used` is
    still the time of the previous use."""

    @property
    def name(self) -> str:
        """The name by which the policy is selected and reported."""
        ...

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        """Return the priority of an entry. The entry with the smallest tuple is evicted first."""
        ...

    def on_insert(self, entry: Entry, now: float) -> None:
        """Called after an entry was cached."""
        ...

    def on_hit(self, entry: Entry, now: float) -> None:
        """Called when a request hits an entry."""
        ...

    def on_evict(self, entry: Entry, now: float) -> None:
        """Called immediately before the allocator evicts an entry."""
        ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that observes requests. The priority of an entry may fall while the entry is queued."""

    def review(self, entry: Entry, now: float) -> float:
        """Return the time at which the queue must compute the priority of `entry` again, because the priority may be
        lower then. Infinity means never."""
        ...

    def tokens_to_evict(self, entry: Entry) -> int:
        """Return how many of the last tokens of `entry` may be evicted together. After their eviction, the queue
        computes a new priority for the remaining tokens."""
        ...

    def on_open(self, entry: Entry, ghost: ReuseHistory | None, resumed: int, now: float) -> ReuseHistory:
        """Record that a request opened with a hit of `resumed` tokens. `entry` is the node that ends at the last full
        block of the hit, or the root if the hit has no full block. If the hit ended because the next tokens were
        evicted, `ghost` is their history, otherwise None.

        Return the history of this request. The cache passes this history to `on_close`.
        """
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
        """Record that a request closed with `length` tokens.

        - `visit` is the history that `on_open` returned for this request.
        - `path` contains the nodes of the request, deepest first.
        - `ending` is the finish reason.
        """
        ...


@runtime_checkable
class SavablePolicy(Policy, Protocol):
    """A policy whose learned state survives a restart. An engine with a disk tier saves the state."""

    def save(self, now: float) -> dict[str, Any]:
        """Return what was learned, as numbers, strings, bytes, lists and dicts. Must be fast: the engine waits."""
        ...

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Replace what was learned by the result of `save`. Raises ValueError for damaged data, and then changes
        nothing."""
        ...


class _Plain:
    """Base class of policies that ignore insertions, hits and evictions."""

    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        pass

    def on_evict(self, entry: Entry, now: float) -> None:
        pass


class LRU(_Plain):
    """Evicts the least recently used entry first."""

    name = "lru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.last_used,)


class LFU(_Plain):
    """Evicts the entry with the fewest hits first. Among equal entries, evicts the least recently used first."""

    name = "lfu"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.hits, entry.last_used)


class FIFO(_Plain):
    """Evicts the oldest entry first."""

    name = "fifo"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.created,)


class MRU(_Plain):
    """Evicts the most recently used entry first."""

    name = "mru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (-entry.last_used,)


class SLRU(_Plain):
    """Segmented LRU: entries without a hit are evicted before entries with a hit. Each segment is ordered by last
    use.
    """

    name = "slru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (min(entry.hits, 1), entry.last_used)


class PriorityTTL(_Plain):
    """Evicts entries with the lowest request priority first. Among equal priorities, the entry that expires first
    is evicted first. Entries without an expiry are ordered by last use.
    """

    name = "priority"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        expires = float("inf") if entry.expires is None else max(entry.expires, now)
        return (expires, entry.last_used)


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimates the seconds to recompute an entry. Each token takes `per_token` seconds, plus `per_token_per_depth`
    seconds for each token before it."""

    per_token: float = 1.0
    per_token_per_depth: float = 1.0 / 32768

    def __call__(self, entry: Entry) -> float:
        middle = entry.depth + entry.tokens / 2
        return entry.tokens * (self.per_token + self.per_token_per_depth * middle)


class CostAware:
    """Evicts the entry with the smallest value first (GDSF: greedy dual size frequency). Each use sets the
    value of an entry to a sum of two parts. The first part is the recompute seconds per byte, times the number
    of uses. The second part is the largest value of an entry that was evicted so far. Newer entries therefore
    have larger values than entries that are no longer used."""

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
