"""A prompt is computed from its front while its tail loads from its end: how far to compute next, or whether to wait.

    0 ──computed──> front ········ gap ········ low <──loaded── point

Wherever the two meet the request goes on behind `point`, so neither speed need be known for the result: they say how large the
next step should be, and whether what is missing comes sooner than it is computed. A wait that was wrong costs a bounded time.
Arithmetic of seconds and tokens; knows no tiers, and no clock but the `now` it is told.
"""

from __future__ import annotations

from collections.abc import Callable

from .throughput import meeting_point

__all__ = ["LoadOrRecompute"]


class LoadOrRecompute:
    """One request's; `lost` is how many seconds it waited beyond what computing the tokens that came meanwhile would take."""

    def __init__(self) -> None:
        self.seconds_lost = 0.0
        self._since: float | None = None  # while it waits
        self._low = 0
        self._began: tuple[float, int] | None = None  # when it was first asked, and what had come by then

    def tokens_to_compute(
        self,
        front: int,
        low: int,
        end: int,
        block: int,
        least: int,
        computing: Callable[[int], float] | None,
        loading: Callable[[int], float] | None,
        busy: float | None,
        allowed: float,
        now: float,
    ) -> int:
        """How many tokens from `front` on, which is below `low`, to compute before asking again, all up to the prompt's `end`
        where going on behind what was loaded would take a step more than it saves; 0: wait. `computing(n)` says what a step of
        n tokens takes, one of fewer than `least` as much as one of so many; `loading(first)` when all from `first` on will have
        come; None where nobody knows. `busy`: seconds that the device still needs for the request's last step, during which
        waiting costs nothing. Else no more than `allowed` seconds may be lost by it."""
        gap = low - front
        wanted: int | None = None
        if computing is not None and loading is not None:
            takes, blocks = computing, -(-gap // block)
            comes = self._as_seen(low, min(gap, least), loading, now)
            met = meeting_point(
                blocks,
                lambda n: (busy or 0.0) + takes(max(least, gap - (blocks - n) * block)),
                lambda n: comes(low - (blocks - n) * block),
            )
            wanted = self._whole(gap, max(least, gap - (blocks - met) * block), block) if met else 0
            until = takes(max(least, wanted)) if wanted else comes(front) - (busy or 0.0)
            if takes(end - front) <= until + takes(least):
                wanted = end - front
        if not wanted:
            if busy is not None or self.may_wait(low, computing, allowed, now):
                return 0
            wanted = self._whole(gap, max(least, gap // 2), block)
        self.ends(low, computing, now)
        return wanted

    def _as_seen(
        self, low: int, next_: int, loading: Callable[[int], float], now: float
    ) -> Callable[[int], float]:
        """`loading`, as much slower as what should have come by now was; of the `next_` tokens nothing need have come."""
        began, first_low = self._began = self._began or (now, low)
        soon = loading(low - next_)
        due = soon + soon / next_ * (first_low - low)
        slower = max(1.0, (now - began) / max(1e-9, due))
        return lambda first: slower * loading(first)

    @staticmethod
    def _whole(gap: int, tokens: int, block: int) -> int:
        """`tokens` or a few more, so that what is left of the gap is whole blocks."""
        return gap - max(0, gap - tokens) // block * block

    def may_wait(
        self, low: int, computing: Callable[[int], float] | None, allowed: float, now: float
    ) -> bool:
        """Whether waiting (on) may be: what it has cost so far is within `allowed`."""
        if self._since is not None and low > self._low:
            self.ends(self._low, computing, now)  # it waited to know what there is to load
        if self._since is None:
            self._since, self._low = now, low
        return self._lost(low, computing, now) <= allowed

    def ends(self, low: int, computing: Callable[[int], float] | None, now: float) -> None:
        """The request waits no longer."""
        if self._since is not None:
            self.seconds_lost = max(0.0, self._lost(low, computing, now))
            self._since = None

    def _lost(self, low: int, computing: Callable[[int], float] | None, now: float) -> float:
        assert self._since is not None
        came = self._low - low
        worth = computing(came) if came > 0 and computing is not None else 0.0
        return self.seconds_lost + now - self._since - worth
