"""The policy that learns: what is least likely to be wanted soon leaves first.

A request comes back to a run of tokens, or it does not. What the policy can tell of the future is how long
it took others: by how often the run was used, how often its conversation came back and after how long, how
much the last request brought that was new, how its answer ended, and how long ago all that was. `Returns`
learns that; this file says who is asked about and turns what was learned into priorities.

| an entry is  | when                                         | leaves by                                  |
|--------------|----------------------------------------------|--------------------------------------------|
| in use       | somebody may come back to its last visit     | the index that `Returns` gives             |
| an end       | those who came back wanted less than all     | the same, times the share that wants it    |
| left behind  | its conversation went on without it          | least recently used, before the others     |
| long away    | longer than nearly all took who came back    | the same                                   |

Before anything is learned the longest away leaves first: the policy begins as least recently used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from operator import getitem
from typing import TypeVar

from .policies import Entry, ReuseHistory
from .reuse_model import VALUES, ReuseModel

__all__ = ["Adaptive", "Visit"]

K = TypeVar("K", bound=Hashable)

_ENDINGS = 4
_SHARED = _ENDINGS  # the stratum of what different conversations use
_ENDS = 24
_NONE = VALUES - 1  # the value of a feature that does not matter
_OTHERS = bytes([_NONE] * 4)
SWITCHES = 2.0
"""Uses by another conversation than the one before that make an entry shared."""


class Visit(ReuseHistory):
    """One request's use of a run of tokens, and what it is known by. Shared by the entries on its path."""

    __slots__ = (
        "again",
        "before",
        "fit",
        "length",
        "level",
        "open",
        "resumed",
        "since",
        "start",
        "stratum",
        "turn",
        "values",
        "watched",
    )

    def __init__(self, before: Visit | None, resumed: int, now: float) -> None:
        self.before = before  # the visit it came back to; None once it is closed
        self.resumed = resumed
        self.turn: int = 0 if before is None else min(before.turn + 1, VALUES - 1)
        self.since: float = -1.0 if before is None else max(0.0, now - before.start)
        self.start: float = now
        self.length = 0
        self.again = 0  # its turn, if what it brought had been cached before and left
        self.open = True  # nobody has come back to it yet
        self.values = b""  # of the features, once it is closed
        self.stratum = 0
        self.level, self.fit = 0.0, 0  # what `Returns` makes of the values, and by which fit
        self.watched: tuple[int, ...] = ()  # place in its text and number, of each that is watched


class Adaptive:
    """See the module. Learns online; two caches that see the same requests decide the same.

    Costs a few microseconds a request and a few hundred bytes for it, whatever its length.
    """

    name = "adaptive"

    COVER = 0.5
    """A request that resumes this share of a visit or more has come back to it."""

    def __init__(self) -> None:
        self.returns = ReuseModel(strata=_ENDINGS + 1, features=5)
        self._tenants: dict[str, int] = {}
        self._endings: dict[str | None, int] = {None: 0}
        self._closed = 0
        self._asked: Entry | None = None  # whose priority was asked for last: its review is asked next
        self._placed = 0, 0.0
        # Of those who came back, how many did not want the last so many tokens (by their bit length), and
        # from that the logarithm of the share that wanted what stands so far from the end.
        self._without = [0.0] * _ENDS
        self._wanted = [0.0] * _ENDS
        self._tail = 0  # tokens at the end of a visit that most do not want

    # -- who leaves first -----------------------------------------------------------------------

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        memo = entry.history
        age = now - entry.last_used
        if not isinstance(memo, Visit) or not memo.open or age >= self.returns.horizon:
            return (0.0, entry.last_used)
        stratum, level = self._placed = self._place(entry, memo)
        self._asked = entry
        return (1.0, self.returns.index(stratum, level, age), entry.last_used)

    def review(self, entry: Entry, now: float) -> float:
        memo = entry.history
        age = now - entry.last_used
        if not isinstance(memo, Visit) or not memo.open or age >= self.returns.horizon:
            return math.inf  # it keeps its place among them
        stratum, level = self._placed if entry is self._asked else self._place(entry, memo)
        self._asked = None
        later, horizon = self.returns.falls(stratum, level, age), self.returns.horizon
        return entry.last_used + (later if later < horizon else horizon)

    def tokens_to_evict(self, entry: Entry) -> int:
        """Tokens at the end of `entry` that are worth no more than its last ones."""
        memo = entry.history
        if not isinstance(memo, Visit) or not memo.open:
            return entry.tokens
        more = self._tail - (memo.length - entry.depth - entry.tokens)
        return min(more, entry.tokens) if more > 0 else entry.tokens

    def _place(self, entry: Entry, visit: Visit) -> tuple[int, float]:
        """Stratum and level of an entry."""
        factors = self.returns.factors
        uses = factors[0][_uses(entry.hits or visit.again)]
        if entry.value >= SWITCHES:
            return _SHARED, uses
        if visit.fit != self.returns.fits:
            visit.level, visit.fit = sum(map(getitem, factors[1:], visit.values)), self.returns.fits
        if self._tail and (behind := visit.length - entry.depth - entry.tokens) < self._tail:
            uses += self._wanted[max(0, behind).bit_length()]
        return visit.stratum, visit.level + uses

    # -- what happens ---------------------------------------------------------------------------

    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        memo = entry.history
        if isinstance(memo, Visit) and memo.watched:
            self._see(memo, entry.depth, entry.depth + entry.tokens, now)

    def on_evict(self, entry: Entry, now: float) -> None:
        pass

    def on_open(self, entry: Entry, ghost: ReuseHistory | None, resumed: int, now: float) -> Visit:
        """A request begins at the end of `entry`; `ghost` is the memo of what would have come next, had it
        not left."""
        before: Visit | None = None
        if isinstance(ghost, Visit):
            before = ghost
            self._see(ghost, resumed, 1 << 62, now)  # how much more of it was wanted nobody knows
        elif isinstance(entry.history, Visit) and entry.value < SWITCHES:
            before = entry.history if resumed >= self.COVER * entry.history.length else None
        if before is not None and before.open:
            before.open = False
            self._count_end(before.length - resumed, before is ghost)
        return Visit(before, resumed, now)

    def on_close(
        self,
        visit: ReuseHistory,
        path: Sequence[Entry],
        length: int,
        tenant: str,
        ending: str | None,
        now: float,
    ) -> None:
        """The request is done with `path`, the entries from its end upwards."""
        assert isinstance(visit, Visit)
        before, visit.before = visit.before, None
        visit.start, visit.length = now, length
        visit.stratum = min(_code(self._endings, ending), _ENDINGS - 1)
        known = visit.resumed if before is None else max(visit.resumed, before.length - self._tail)
        visit.again = visit.turn if 2 * visit.resumed < known else 0
        visit.values = self._values(visit, max(0, length - known), tenant)
        for entry in path:
            if entry.history is not None and entry.history is not before and entry.history is not visit:
                entry.value += 1.0
            entry.history = visit
        self._watch(visit, path, now)
        self._closed += 1
        if self._closed % 32 == 0:
            self._learn_ends()

    def _values(self, visit: Visit, new: int, tenant: str) -> bytes:
        new = new.bit_length()
        return bytes(
            (
                min(7, max(0, new - 4)) if visit.turn == 0 else min(14, 8 + max(0, new - 4)),
                min(visit.turn, 8),
                0 if visit.since < 0 else min(_NONE - 1, int(visit.since).bit_length() + 1),
                min(_code(self._tenants, tenant), _NONE - 1),
            )
        )

    def _watch(self, visit: Visit, path: Sequence[Entry], now: float) -> None:
        """Watch the middle of what the request brought, and a place in what it found."""
        new = visit.length - visit.resumed - self._tail
        watched: list[int] = []
        if new > 0:
            number = self.returns.start(
                visit.stratum, bytes((_uses(visit.again),)) + visit.values, math.sqrt(new), now
            )
            if number >= 0:
                watched += [visit.resumed + new // 2, number]
        brought = 0
        while brought < len(path) and path[brought].depth >= visit.resumed:
            brought += 1
        if brought < len(path):
            entry = path[brought + self._closed % (len(path) - brought)]
            shared = entry.value >= SWITCHES
            values = bytes((_uses(entry.hits),)) + (_OTHERS if shared else visit.values)
            stratum = _SHARED if shared else visit.stratum
            number = self.returns.start(stratum, values, math.sqrt(visit.resumed), now)
            if number >= 0:
                watched += [entry.depth + entry.tokens // 2, number]
        visit.watched = tuple(watched)

    def _see(self, visit: Visit, first: int, last: int, now: float) -> None:
        """Tokens `first` to `last` of a visit are wanted."""
        rest: list[int] = []
        for place, number in zip(visit.watched[::2], visit.watched[1::2], strict=True):
            if first <= place < last:
                self.returns.returned(number, max(0.0, now - visit.start))
            else:
                rest += place, number
        visit.watched = tuple(rest)

    def _count_end(self, without: int, at_most: bool) -> None:
        """Somebody came back who did not want the last `without` tokens of a visit, or `at_most` those: then
        how many is guessed from the others."""
        end = min(max(0, without).bit_length(), _ENDS - 1)
        if not at_most:
            self._without[end] += 1.0
            return
        weights = [n + 0.5 * (i == 0) for i, n in enumerate(self._without[: max(1, end)])]
        total = sum(weights)
        for i, weight in enumerate(weights):
            self._without[i] += weight / total

    def _learn_ends(self) -> None:
        total, wanted = sum(self._without) + 4.0, 4.0
        for end in range(_ENDS):
            wanted += self._without[end]
            self._wanted[end] = math.log(wanted / total)
        few = sum(share < math.log(0.5) for share in self._wanted)
        self._tail = 1 << (few - 1) if few else 0
        if total > 1024.0:
            self._without = [0.5 * n for n in self._without]  # what was long ago counts less


def _uses(hits: int) -> int:
    """How often an entry was used, as a feature: exact for the first few, then by powers of two."""
    return hits if hits < 6 else min(VALUES - 1, 3 + hits.bit_length())


def _code(codes: dict[K, int], key: K) -> int:
    """A small number for a word: its own for the first few, one for all the others."""
    code = codes.get(key)
    if code is None:
        code = min(len(codes), VALUES - 1)
        if code < VALUES - 1:
            codes[key] = code
    return code
