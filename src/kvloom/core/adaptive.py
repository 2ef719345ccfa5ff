"""The policy that learns: whoever is least likely to be wanted soon leaves first.

A request comes back to a run of tokens, or it does not. What the policy can tell of the future is
how long it takes others to come back: by how often this one has come back, after how long, with how
much that was new, how the last answer ended, and how long it has been away. `Returns` learns that;
this file decides which visit an entry belongs to and turns what was learned into priorities.

| an entry is   | when                                          | leaves by                              |
|---------------|-----------------------------------------------|----------------------------------------|
| one visit's   | the same conversation used it each time       | the index that `Returns` gives         |
| left behind   | its visit went on without it                  | before all that may come back          |
| shared        | different conversations used it               | how often it is used, how long it idles|
| long away     | longer than nearly every return took          | least recently used, before the others |

Before anything is learned every entry is long away: the policy begins as least recently used, and
where a cache is so large that only what is long away has to leave it stays that.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeVar

from .policies import Entry, Memo
from .returns import VALUES, Returns

__all__ = ["Adaptive", "Shared", "Visit"]

K = TypeVar("K", bound=Hashable)

_FIRST, _AGAIN = 0, 1
_KINDS = 8
_UNKNOWN = 60.0
"""Seconds between uses that a shared entry is taken to have before it has shown any."""


class Visit(Memo):
    """One request's use of a run of tokens, and what it is known by. Shared by the entries on its path."""

    __slots__ = (
        "before",
        "fit",
        "length",
        "level",
        "number",
        "open",
        "resumed",
        "since",
        "start",
        "stratum",
        "turn",
        "values",
    )

    def __init__(self, before: Visit | None, resumed: int, now: float) -> None:
        self.before = before  # the visit it came back to; None once it is closed
        self.resumed = resumed
        self.turn: int = 0 if before is None else min(before.turn + 1, VALUES - 1)
        self.stratum = _AGAIN if self.turn else _FIRST
        self.since: float = -1.0 if before is None else max(0.0, now - before.start)
        self.start: float = now
        self.length = 0
        self.number = -1
        self.open = True  # nobody has come back to it yet
        self.values = b""  # of the features, once it is closed
        self.level = self.fit = 0  # what `Returns` makes of the values, and by which fit


class Shared(Memo):
    """How often an entry that several conversations use is used."""

    __slots__ = ("between", "counted", "used", "uses")

    def __init__(self, between: float, used: float, uses: int = 1) -> None:
        self.between = max(1.0, between)  # seconds, smoothed
        self.used = used  # when it was last
        self.uses = uses
        self.counted = 0.0  # how much of its present absence has been counted

    def split(self) -> Shared:
        return Shared(self.between, self.used, self.uses)

    @property
    def kind(self) -> int:
        return min(_KINDS - 1, self.uses.bit_length())


class Adaptive:
    """See the module. Learns online; two caches that see the same requests decide the same.

    Costs a few microseconds a request and a few hundred bytes for it, whatever its length.
    """

    name = "adaptive"

    COVER = 0.5
    """A request that resumes this share of a visit or more has come back to it."""

    def __init__(self) -> None:
        self.returns = Returns(strata=2, features=5)
        self._tenants: dict[str, int] = {}
        self._endings: dict[str | None, int] = {None: 0}
        # Of what is shared, by how often it was used: uses seen, and those that one use per
        # `between + age` would have made. Their ratio is how much to believe that rate.
        self._used = [1.0] * _KINDS
        self._due = [1.0] * _KINDS

    # -- who leaves first -----------------------------------------------------------------------

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        age = now - entry.last_used
        memo = entry.memo
        if age >= self.returns.horizon:
            return (0.0, entry.last_used)
        if isinstance(memo, Visit):
            if not memo.open:
                return (0.0, entry.last_used)
            return (1.0, self.returns.index(memo.stratum, self._level(memo), age), entry.last_used)
        if isinstance(memo, Shared):
            rate = self._used[memo.kind] / self._due[memo.kind] / (memo.between + age)
        else:
            rate = self._used[1] / self._due[1] / (_UNKNOWN + age)
        return (1.0, math.log(rate), entry.last_used)

    def review(self, entry: Entry, now: float) -> float:
        age = now - entry.last_used
        memo = entry.memo
        if isinstance(memo, Shared):
            self._count_idle(memo, age)
        if age >= self.returns.horizon or (isinstance(memo, Visit) and not memo.open):
            return math.inf  # it keeps its place among them
        if isinstance(memo, Visit):
            later = self.returns.falls(memo.stratum, self._level(memo), age)
        else:
            later = age + 0.3 * ((memo.between if isinstance(memo, Shared) else _UNKNOWN) + age)
        return entry.last_used + min(later, self.returns.horizon)

    # -- what happens ---------------------------------------------------------------------------

    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        memo, age = entry.memo, now - entry.last_used
        if isinstance(memo, Shared):
            if memo.used == now:
                return  # a run and its checkpoint are one use
            memo.used = now
            self._count_idle(memo, age)
            self._used[memo.kind] += 1
            memo.uses += 1
            memo.between += 0.3 * (max(age, 1.0) - memo.between)
            memo.counted = 0.0
        elif memo is None:
            entry.memo = Shared(age, now)

    def on_evict(self, entry: Entry, now: float) -> None:
        if isinstance(entry.memo, Shared):
            self._count_idle(entry.memo, now - entry.last_used)

    def on_open(self, entry: Entry, ghost: Memo | None, resumed: int, now: float) -> Visit:
        """A request begins at the end of `entry`; `ghost` is the memo of what would have come next, had it
        not left."""
        before: Visit | None = None
        if isinstance(ghost, Visit):
            before = ghost
        elif isinstance(entry.memo, Visit) and resumed >= self.COVER * entry.memo.length:
            before = entry.memo
        if before is not None and before.open:
            before.open = False
            self.returns.returned(before.number, max(0.0, now - before.start))
        return Visit(before, resumed, now)

    def on_close(
        self, visit: Memo, path: Sequence[Entry], length: int, tenant: str, ending: str | None, now: float
    ) -> None:
        """The request is done with `path`, the entries from its end upwards."""
        assert isinstance(visit, Visit)
        before, visit.before = visit.before, None
        visit.start, visit.length = now, length
        visit.values = self._values(visit, length, tenant, ending)
        visit.number = self.returns.start(visit.stratum, visit.values, now)
        for entry in path:
            memo = entry.memo
            if memo is None or memo is before or memo is visit:
                entry.memo = visit
            elif isinstance(memo, Visit):
                entry.memo = Shared(now - memo.start, now)
        if visit.number >= 0 and visit.number % 512 == 511:
            self._forget()

    def _values(self, visit: Visit, length: int, tenant: str, ending: str | None) -> bytes:
        new = max(0, length - visit.resumed).bit_length()
        values = (
            min(visit.turn, 7),
            min(7, max(0, new - 4) * 2 // 3) + (8 if visit.turn else 0),
            0 if visit.since < 0 else min(VALUES - 1, int(visit.since / 2).bit_length() + 1),
            _code(self._tenants, tenant),
            _code(self._endings, ending),
        )
        return bytes(values)

    def _level(self, visit: Visit) -> int:
        if visit.fit != self.returns.fits:
            visit.level, visit.fit = self.returns.level(visit.values), self.returns.fits
        return visit.level

    def _count_idle(self, memo: Shared, age: float) -> None:
        if age > memo.counted:
            self._due[memo.kind] += math.log((memo.between + age) / (memo.between + memo.counted))
            memo.counted = age

    def _forget(self) -> None:
        """What was long ago counts less."""
        for kind in range(_KINDS):
            self._used[kind] = 0.5 * (self._used[kind] + 1.0)
            self._due[kind] = 0.5 * (self._due[kind] + 1.0)


def _code(codes: dict[K, int], key: K) -> int:
    """A small number for a word: its own for the first few, one for all the others."""
    code = codes.get(key)
    if code is None:
        code = min(len(codes), VALUES - 1)
        if code < VALUES - 1:
            codes[key] = code
    return code
