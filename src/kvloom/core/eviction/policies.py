"""Which cached thing leaves first: one priority function a policy.

An entry is what can leave on its own: the tail of a leaf run of blocks, a checkpoint (window
pages and state snapshot at one resume point), the pages of one image. A policy sees no tokens and
no pages. The queue asks for an entry's priority when it is queued and again when it is popped.
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
"""The rank of what nobody can use, or said it would not: below any priority that a request may give."""


class ReuseHistory:
    """What a policy that learns remembers of an entry; it outlives the entry as a ghost."""

    __slots__ = ()

    def split(self) -> ReuseHistory:
        """The memo of the upper part when a run is cut in two: the same, unless it counts something."""
        return self


class Entry(ABC):
    """What a policy may look at. `value` and `memo` are the policy's own."""

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
        self.expiring: float | None = None  # the time at which its queue will look at it again
        self.ended = False  # its session said that it will not come back
        self.useless = False  # some of it completes no resume point any more
        self.value = 0.0
        self.wanted_by: tuple[
            tuple[int, int], ...
        ] = ()  # the turns at which it is wanted, the first of them first
        self.history: ReuseHistory | None = None
        self.queued: tuple[int, tuple[float, ...]] | None = None

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens whose pages would have to be computed again."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Tokens before it."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of pages that leave with it."""

    def rank(self, now: float) -> int:
        """What comes before any policy: FIRST, or the priority that requests gave until it expires."""
        if self.useless or self.ended:
            return FIRST
        if self.expires is not None and now >= self.expires:
            return 0
        return self.priority


class Policy(Protocol):
    """Smaller priorities leave first. The hooks are optional in spirit: most do nothing. In `on_hit`
    the entry's `last_used` is still that of the use before."""

    @property
    def name(self) -> str: ...

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]: ...
    def on_insert(self, entry: Entry, now: float) -> None: ...
    def on_hit(self, entry: Entry, now: float) -> None: ...
    def on_evict(self, entry: Entry, now: float) -> None: ...


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy whose priorities fall as time passes, and that follows requests from beginning to end."""

    def review(self, entry: Entry, now: float) -> float:
        """When to ask for the priority again, because it may have fallen; infinity for never."""
        ...

    def tokens_to_evict(self, entry: Entry) -> int:
        """Of an entry that leaves, the tokens at its end that are worth as little as its priority says."""
        ...

    def on_open(self, entry: Entry, ghost: ReuseHistory | None, resumed: int, now: float) -> ReuseHistory:
        """A request resumes `resumed` tokens that end in `entry` (a root, if none); `ghost` is the memo of
        what it would have met next, had that not left. Returns what `on_close` will be given."""
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
        """That request is done, with `length` tokens; `path` is the runs it used, deepest first. `ending`
        is what its caller says about how it ended."""
        ...


class _Plain:
    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        pass

    def on_evict(self, entry: Entry, now: float) -> None:
        pass


class LRU(_Plain):
    name = "lru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.last_used,)


class LFU(_Plain):
    name = "lfu"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.hits, entry.last_used)


class FIFO(_Plain):
    name = "fifo"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (entry.created,)


class MRU(_Plain):
    name = "mru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (-entry.last_used,)


class SLRU(_Plain):
    """Two segments: what was never hit leaves before what was, each by last use."""

    name = "slru"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        return (min(entry.hits, 1), entry.last_used)


class PriorityTTL(_Plain):
    """Within a priority, what expires soonest leaves first; what never expires goes by last use."""

    name = "priority"

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        expires = float("inf") if entry.expires is None else max(entry.expires, now)
        return (expires, entry.last_used)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to compute a token again: a constant part and one that grows with the tokens before it."""

    per_token: float = 1.0
    per_token_per_depth: float = 1.0 / 32768

    def __call__(self, entry: Entry) -> float:
        middle = entry.depth + entry.tokens / 2
        return entry.tokens * (self.per_token + self.per_token_per_depth * middle)


class CostAware:
    """Seconds to compute again per byte freed, times uses, aged by what was evicted last (GDSF)."""

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
