"""Adaptive policy: learns from traffic which entry is least likely to be hit soon, and evicts that entry.

A visit is one request's use of cached tokens. A later request that hits most tokens of a visit returns to the visit.
Such a request is the next turn of the same conversation.

`ReuseModel` predicts from these features when an entry will be used again:

- the number of uses, and the time since the last use,
- the tenant,
- the turn number of the conversation, and the time since the previous turn,
- the number of new tokens and the finish reason of the last request.

This file chooses the samples for the model, and computes priorities from its predictions.

| entry      | condition                                       | order of eviction                            |
|------------|-------------------------------------------------|----------------------------------------------|
| active     | no later request has returned to its last visit | smallest value first (`ReuseModel.index`)    |
| tail       | at the end of a visit; not all returning        | like active entries, but the predicted reuse |
|            | requests use this end                           | is multiplied by the share of returning      |
|            |                                                 | requests that use this end                   |
| superseded | a later turn of its conversation did not use it | before active and tail entries, least        |
|            |                                                 | recently used first                          |
| stale      | idle longer than nearly all returning requests  | like superseded entries                      |

Until the model has samples, the policy evicts the least recently used entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from operator import getitem
from typing import Any, TypeVar

from .policies import Entry, ReuseHistory
from .reuse_model import VALUES, ReuseModel
from .shadow import ShadowLRU

__all__ = ["Adaptive", "Visit"]

K = TypeVar("K", bound=Hashable)

_ENDINGS = 4
_SHARED = _ENDINGS  # the stratum of entries used by different conversations
_ENDS = 24
_NONE = VALUES - 1  # the value of an ignored feature
_OTHERS = bytes([_NONE] * 4)
SWITCHES = 2.0
"""If a request uses an entry that a request of another conversation used before, this is a switch. An entry with this
many switches counts as shared."""


class Visit(ReuseHistory):
    """One request's use of a path in the tree, with the features of the request. All entries of the path have the
    same `Visit` object."""

    __slots__ = (
        "again",
        "before",
        "fit",
        "length",
        "level",
        "lru_share",
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
        self.before = before  # the visit that this request continues; None once the request is closed
        self.resumed = resumed
        self.turn: int = 0 if before is None else min(before.turn + 1, VALUES - 1)
        self.since: float = -1.0 if before is None else max(0.0, now - before.start)
        self.start: float = now
        self.length = 0
        self.again = 0  # turn number of the request, if its new tokens had been cached and evicted before
        self.open = True  # no request has returned to this visit yet
        self.values = b""  # feature values, set when the request is closed
        self.stratum = 0
        self.level, self.fit = (
            0.0,
            0,
        )  # sum of the feature factors, and the number of the model fit with which it was computed
        self.watched: tuple[int, ...] = ()  # (token position, sample number) pairs
        self.lru_share = 0.0  # share of the evicted tokens of visit `before` that LRU would still have


class Adaptive:
    """The adaptive policy. It learns online and deterministically: equal requests give equal decisions. Takes a few
    microseconds and a few hundred bytes per request, for any prompt length.
    """

    @property
    def name(self) -> str:
        """`adaptive`, or `adaptive (off: LRU)` while the policy evicts like LRU."""
        return "adaptive (off: LRU)" if self.shadow.is_off else "adaptive"

    COVER = 0.5
    """A visit is one request's use of cached tokens. A later request returns to the visit if it hits at least this
    share of the visit's tokens."""

    def __init__(self) -> None:
        self.model = ReuseModel(strata=_ENDINGS + 1, features=5)
        self._tenants: dict[str, int] = {}  # by digest, so that saved data has no tenant's name
        self._endings: dict[str | None, int] = {None: 0}
        self._closed = 0
        self._asked: Entry | None = None  # the entry of the last `priority` call; a `review` call follows
        self._placed = 0, 0.0
        # About requests that return to a visit: counts by the bit length of the number of unused last
        # tokens, and the logarithm of the share of requests that use tokens at this distance from the end.
        self._without = [0.0] * _ENDS
        self._wanted = [0.0] * _ENDS
        self._tail = 0  # number of last tokens of a visit that most returning requests do not use
        self.shadow = ShadowLRU()
        """Compares the hits with those of LRU. If LRU would have more, this policy evicts like LRU."""
        self._on_since = -math.inf  # entries that were last used before this time are evicted like LRU
        self._cached_tokens: Callable[[], int] = lambda: 0
        self._looked_up_tokens: Callable[[], int] = lambda: 0
        self._before_lookup = 0
        self._gained = 0.0  # tokens of the present request that LRU would not have hit
        self._evicted = False
        # The lowest index that the policy would keep if it were on, and the fit with which it was computed.
        self._threshold, self._judged = -math.inf, 0

    def compare_with_lru(self, cached_tokens: Callable[[], int], looked_up_tokens: Callable[[], int]) -> None:
        """Start the comparison with LRU. `cached_tokens` returns the number of tokens in the cache, and
        `looked_up_tokens` the number of tokens of all prompts so far."""
        self._cached_tokens, self._looked_up_tokens = cached_tokens, looked_up_tokens

    def save(self, now: float) -> dict[str, Any]:
        """Return what was learned, for `restore`. See `SavablePolicy`."""
        learned = {"tenants": self._tenants, "endings": list(self._endings), "without": self._without}
        return {**self.model.save(now), **learned}

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Replace what was learned by the result of `save`. See `SavablePolicy`."""
        tenants, endings, without = (saved.get(name) for name in ("tenants", "endings", "without"))
        if not isinstance(tenants, dict) or sorted(tenants.values()) != list(range(len(tenants))):
            raise ValueError("tenants are damaged")
        if (
            not isinstance(endings, list)
            or endings[:1] != [None]
            or len({*map(str, endings)}) != len(endings)
        ):
            raise ValueError("endings are damaged")
        if max(len(tenants), len(endings)) >= VALUES:
            raise ValueError("there are too many tenants or endings")
        if not isinstance(without, list) or len(without) != _ENDS or not all(map(_is_count, without)):
            raise ValueError("the counts of unused last tokens are damaged")
        self.model.restore(saved, now)
        self._tenants = {str(name): code for name, code in tenants.items()}
        self._endings = {None: 0, **{str(name): code for code, name in enumerate(endings) if code}}
        self._without = without
        self._learn_ends()

    # -- priorities -----------------------------------------------------------------------------

    def priority(self, entry: Entry, now: float) -> tuple[float, ...]:
        if entry.users:  # nothing is known about them before their requests end
            return (2.0, entry.last_used)
        history = entry.history
        age = now - entry.last_used
        if not isinstance(history, Visit) or not history.open or self._is_lru(entry, age):
            return (0.0, entry.last_used)
        stratum, level = self._placed = self._place(entry, history)
        self._asked = entry
        return (1.0, self.model.index(stratum, level, age), entry.last_used)

    def review(self, entry: Entry, now: float) -> float:
        history = entry.history
        age = now - entry.last_used
        if entry.users or not isinstance(history, Visit) or not history.open or self._is_lru(entry, age):
            return math.inf  # its priority is constant
        stratum, level = self._placed if entry is self._asked else self._place(entry, history)
        self._asked = None
        later, horizon = self.model.falls(stratum, level, age), self.model.horizon
        return entry.last_used + (later if later < horizon else horizon)

    def tokens_to_evict(self, entry: Entry) -> int:
        """Return how many of the last tokens of `entry` may be evicted together, usually all its tokens. Requests that
        continue an earlier request often do not use its last tokens. If most of them do not, only these last tokens are
        evicted together."""
        history = entry.history
        if not isinstance(history, Visit) or not history.open or self.shadow.is_off:
            return entry.tokens
        more = self._tail - (history.length - entry.depth - entry.tokens)
        return min(more, entry.tokens) if more > 0 else entry.tokens

    def _is_lru(self, entry: Entry, age: float) -> bool:
        """Return whether an entry is ordered by its last use only, as in LRU. `age` is the number of seconds since that
        use."""
        return age >= self.model.horizon or self.shadow.is_off or entry.last_used < self._on_since

    def _place(self, entry: Entry, visit: Visit) -> tuple[int, float]:
        """Return two arguments of `ReuseModel.index` for an entry: the stratum and the level. The stratum (for example
        the finish reason) selects a baseline of the model. The level is the sum of the logarithms of the feature
        factors."""
        factors = self.model.factors
        uses = factors[0][_uses(entry.hits or visit.again)]
        if entry.value >= SWITCHES:
            return _SHARED, uses
        if visit.fit != self.model.fits:
            visit.level, visit.fit = sum(map(getitem, factors[1:], visit.values)), self.model.fits
        if self._tail and (behind := visit.length - entry.depth - entry.tokens) < self._tail:
            uses += self._wanted[max(0, behind).bit_length()]
        return visit.stratum, visit.level + uses

    # -- observations ---------------------------------------------------------------------------

    def on_insert(self, entry: Entry, now: float) -> None:
        pass

    def on_hit(self, entry: Entry, now: float) -> None:
        history = entry.history
        if not isinstance(history, Visit):
            return
        tokens, last_used = entry.tokens, entry.last_used
        if history.watched:
            self._record_reuse(history, entry.depth, entry.depth + tokens, now)
        self._gained += tokens * (1.0 - self.shadow.share(last_used))
        self.shadow.use(tokens, last_used, now)

    def on_evict(self, entry: Entry, now: float) -> None:
        self._evicted = True

    def on_open(self, entry: Entry, ghost: ReuseHistory | None, resumed: int, now: float) -> Visit:
        """Record that a request opened with a hit of `resumed` tokens. Return its visit, the record of its use of
        cached tokens. The parameters are those of `LearningPolicy.on_open`."""
        before: Visit | None = None
        lru_share = 0.0
        if isinstance(ghost, Visit):
            lru_share = self.shadow.share(ghost.start)
            before = ghost
            # All later samples, because the end of the request's use is unknown.
            self._record_reuse(ghost, resumed, 1 << 62, now)
        elif isinstance(entry.history, Visit) and entry.value < SWITCHES:
            before = entry.history if resumed >= self.COVER * entry.history.length else None
        if before is not None and before.open:
            before.open = False
            self._count_end(before.length - resumed, before is ghost)
        visit = Visit(before, resumed, now)
        visit.lru_share = lru_share
        return visit

    def on_close(
        self,
        visit: ReuseHistory,
        path: Sequence[Entry],
        length: int,
        tenant: str,
        ending: str | None,
        now: float,
    ) -> None:
        """Record that the request of `visit` closed. `path` contains the entries that the request used, deepest
        first. All of them now belong to this visit."""
        assert isinstance(visit, Visit)
        before, visit.before = visit.before, None
        visit.start, visit.length = now, length
        visit.stratum = min(_code(self._endings, ending), _ENDINGS - 1)
        known = visit.resumed if before is None else max(visit.resumed, before.length - self._tail)
        visit.again = visit.turn if 2 * visit.resumed < known else 0
        visit.values = self._values(visit, max(0, length - known), tenant)
        self._count_hits(visit, before, path, now)
        for entry in path:
            if entry.history is not None and entry.history is not before and entry.history is not visit:
                entry.value += 1.0
            entry.history = visit
        self._sample(visit, path, now)
        self._closed += 1
        if self._closed % 32 == 0:
            self._learn_ends()

    def _count_hits(self, visit: Visit, before: Visit | None, path: Sequence[Entry], now: float) -> None:
        """Record the uses of the entries in the shadow LRU. Compare the tokens that the request hit with the tokens
        that it would have hit under LRU. `before` is the visit to which the request returned, or None."""
        shadow, lost = self.shadow, 0.0
        if visit.lru_share and before is not None:
            # The request would have used the evicted tokens before the tail. If all evicted tokens are in the tail, it
            # would have used the tail.
            is_tail = visit.resumed >= before.length - self._tail
            end = before.length if is_tail else before.length - self._tail
            evicted = max(0, min(end, visit.length) - visit.resumed)
            lost = evicted * visit.lru_share
            shadow.drop(evicted, before.start)
        for entry in path:
            shadow.use(entry.tokens, None if entry.history is None else entry.last_used, now)
        looked_up = self._looked_up_tokens()
        capacity = self._cached_tokens() if self._evicted else shadow.capacity
        self._evicted = False
        if shadow.count(self._gained, lost, looked_up - self._before_lookup, capacity) and not shadow.is_off:
            self._on_since = now
        self._gained, self._before_lookup = 0.0, looked_up

    def _values(self, visit: Visit, new: int, tenant: str) -> bytes:
        new = new.bit_length()
        return bytes(
            (
                min(7, max(0, new - 4)) if visit.turn == 0 else min(14, 8 + max(0, new - 4)),
                min(visit.turn, 8),
                0 if visit.since < 0 else min(_NONE - 1, int(visit.since).bit_length() + 1),
                min(_code(self._tenants, _digest(tenant)), _NONE - 1),
            )
        )

    def _sample(self, visit: Visit, path: Sequence[Entry], now: float) -> None:
        """Start up to two samples. A sample is a position in the sequence. The model learns from the time until
        this position is used again. One sample is in the middle of the request's new tokens. The other is in an
        entry that the request hit."""
        new = visit.length - visit.resumed - self._tail
        watched: list[int] = []
        if new > 0:
            number = self.model.start(
                visit.stratum, bytes((_uses(visit.again),)) + visit.values, math.sqrt(new), now
            )
            if number >= 0:
                watched += [visit.resumed + new // 2, number]
        new_entries = 0
        while new_entries < len(path) and path[new_entries].depth >= visit.resumed:
            new_entries += 1
        if new_entries < len(path):
            entry = path[new_entries + self._closed % (len(path) - new_entries)]
            shared = entry.value >= SWITCHES
            values = bytes((_uses(entry.hits),)) + (_OTHERS if shared else visit.values)
            stratum = _SHARED if shared else visit.stratum
            number = self.model.start(stratum, values, math.sqrt(visit.resumed), now)
            if number >= 0:
                watched += [entry.depth + entry.tokens // 2, number]
        visit.watched = tuple(watched)

    def _record_reuse(self, visit: Visit, first: int, last: int, now: float) -> None:
        """End the reuse samples at the token positions [first, last) of `visit`, because a request has used these
        tokens again."""
        rest: list[int] = []
        for place, number in zip(visit.watched[::2], visit.watched[1::2], strict=True):
            if first <= place < last:
                if self.shadow.is_off:
                    self._predict(visit, number, now)
                self.model.returned(number, max(0.0, now - visit.start))
            else:
                rest += place, number
        visit.watched = tuple(rest)

    def _predict(self, visit: Visit, number: int, now: float) -> None:
        """While the policy is off, report to the shadow whether the policy would have kept the tokens of a sample until
        this use."""
        model, shadow = self.model, self.shadow
        if self._judged != model.fits:
            self._judged, self._threshold = model.fits, model.threshold(now - shadow.cutoff, now)
        keeps = model.index_of(number, max(0.0, now - visit.start)) > self._threshold
        shadow.predict(model.tokens_of(number) * (keeps - shadow.share(visit.start)))

    def _count_end(self, without: int, at_most: bool) -> None:
        """Count a request that returned to a visit (continued an earlier request). `without` is the number of the
        visit's last tokens that the request did not use. There is one count for each bit length of this number.

        With `at_most`, the exact number is unknown, and `without` is an upper bound. The request then adds a fraction
        to the count of each shorter bit length. The fractions add up to 1 and are proportional to the earlier counts.
        """
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
            self._without = [0.5 * n for n in self._without]  # older observations get less weight


def _uses(hits: int) -> int:
    """Return the feature value for `hits` uses. Up to 5 uses, the value is the number itself. Above 5, the value
    depends only on the bit length of the number."""
    return hits if hits < 6 else min(VALUES - 1, 3 + hits.bit_length())


def _digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=8).hexdigest()


def _is_count(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _code(codes: dict[K, int], key: K) -> int:
    """Return a small number that stands for `key`, and store it in `codes`. The first VALUES - 1 keys get separate
    numbers, in the order of their first use. All later keys share the number VALUES - 1."""
    code = codes.get(key)
    if code is None:
        code = min(len(codes), VALUES - 1)
        if code < VALUES - 1:
            codes[key] = code
    return code
