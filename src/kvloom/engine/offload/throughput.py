"""How long things take, learned from how long they took: a line through what was seen lately."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TimeModel", "meeting_point"]


class TimeModel:
    """seconds = a + b * amount, by least squares over what was seen, older sights fading. Both are at least 0. Where it was seen
    what nothing takes, that is a: amounts that hardly differ say little of it."""

    FADE = 0.9
    ENOUGH = 2.7
    """Three sights: the first is often of what happens only once."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._nothing = 0.0, 0.0
        """Sights of nothing, and their seconds."""

    @property
    def is_known(self) -> bool:
        return self._n > 0

    @property
    def is_trusted(self) -> bool:
        """Whether enough was seen to refuse something for it."""
        return self._n >= self.ENOUGH

    def doubt(self) -> None:
        """Something was refused for what this line says, so that nothing new is seen of it: it says a tenth less from now on,
        until it is tried again. One slow moment would count for ever otherwise."""
        self._y *= self.FADE
        self._xy *= self.FADE

    def observe(self, amount: float, seconds: float) -> None:
        """So much took so long. A sight counts for four times of what was expected at most: a moment in which the machine
        did something else says little, and what has become slower is believed after a few."""
        fade = self.FADE
        if self.is_trusted and (expected := self.seconds(amount)):
            seconds = min(seconds, 4 * expected)
        if not amount:
            seen, took = self._nothing
            self._nothing = seen * fade + 1, took * fade + seconds
            return
        self._n = self._n * fade + 1
        self._x = self._x * fade + amount
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + amount * amount
        self._xy = self._xy * fade + amount * seconds

    def seconds(self, amount: float) -> float:
        """How long so much would take; 0 while nothing is known."""
        if not self._n:
            return 0.0
        seen, took = self._nothing
        if seen and (slope := (self._xy - took / seen * self._x) / self._xx) > 0:
            return took / seen + slope * amount
        spread = self._n * self._xx - self._x * self._x
        through_zero = self._y / self._x if self._x else 0.0
        if spread <= 1e-9 * self._xx * self._n:
            return through_zero * amount
        slope = (self._n * self._xy - self._x * self._y) / spread
        if slope <= 0:
            return self._y / self._n
        base = (self._y - slope * self._x) / self._n
        return base + slope * amount if base >= 0 else through_zero * amount


def meeting_point(blocks: int, computing: Callable[[int], float], loading: Callable[[int], float]) -> int:
    """The first of so many blocks at which computing up to it takes as long as loading the rest. Of both only that one grows
    and the other shrinks is asked, O(log blocks) times."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        if computing(middle) >= loading(middle):
            high = middle
        else:
            low = middle + 1
    return low
