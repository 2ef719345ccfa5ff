"""Estimates how many seconds an amount of work takes, from a line fitted to recent measurements."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["TimeModel", "meeting_point"]


class TimeModel:
    """Models the seconds of an amount of work as base + slope * amount, fitted by least squares. Older measurements
    have less weight. Base and slope are at least 0. If amount 0 was measured, its seconds are used as the base.
    Measurements of similar amounts alone would not determine the base well."""

    FADE = 0.9
    ENOUGH = 2.7
    """Sum of weights from which the estimate is trusted: three measurements. The first measurement often includes work
    that is done only once, such as an allocation.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._empty = 0.0, 0.0
        """Sums over the measurements with amount 0: of their weights, and of their weighted seconds."""

    VALUES = 7
    """Number of `values`."""

    @property
    def values(self) -> list[float]:
        """The internal sums of the fit. Save and set them to restore the model."""
        return [self._n, self._x, self._y, self._xx, self._xy, *self._empty]

    @values.setter
    def values(self, values: list[float]) -> None:
        self._n, self._x, self._y, self._xx, self._xy, weight, seconds = values
        self._empty = weight, seconds

    @property
    def is_known(self) -> bool:
        """Whether there is any measurement."""
        return self._n > 0

    @property
    def is_trusted(self) -> bool:
        """Whether there are enough measurements to refuse a load because of the estimate."""
        return self._n >= self.ENOUGH

    def doubt(self) -> None:
        """Lower the estimate by a tenth. Call this method after a load was refused because of the estimate.

        A refused load is not measured. Without this correction, a single slow measurement could prevent all later
        loads.
        """
        self._y *= self.FADE
        self._xy *= self.FADE

    def observe(self, amount: float, seconds: float) -> None:
        """Add a measurement: `amount` of work took `seconds`. Once there are enough measurements, `seconds` is capped
        at four times the estimate. A single outlier then has a small effect, and repeated slow measurements still raise
        the estimate quickly.
        """
        fade = self.FADE
        if self.is_trusted and (expected := self.seconds(amount)):
            seconds = min(seconds, 4 * expected)
        if not amount:
            weight, total = self._empty
            self._empty = weight * fade + 1, total * fade + seconds
            return
        self._n = self._n * fade + 1
        self._x = self._x * fade + amount
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + amount * amount
        self._xy = self._xy * fade + amount * seconds

    def seconds(self, amount: float) -> float:
        """Return the estimated seconds for `amount`. Return 0 without measurements."""
        if not self._n:
            return 0.0
        weight, total = self._empty
        if weight and (slope := (self._xy - total / weight * self._x) / self._xx) > 0:
            return total / weight + slope * amount
        spread = self._n * self._xx - self._x * self._x
        through_zero = self._y / self._x if self._x else 0.0
        if spread <= 1e-9 * self._xx * self._n:
            return through_zero * amount
        slope = (self._n * self._xy - self._x * self._y) / spread
        if slope <= 0:
            return self._y / self._n
        base = (self._y - slope * self._x) / self._n
        return base + slope * amount if base >= 0 else through_zero * amount


def meeting_point(
    blocks: int, compute_seconds: Callable[[int], float], load_seconds: Callable[[int], float]
) -> int:
    """Return the smallest number n for which computing the first n blocks takes at least as long as loading the other
    blocks.

    `compute_seconds(n)` must not decrease with n, and `load_seconds(n)` must not increase. Calls them O(log blocks)
    times.
    """
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        if compute_seconds(middle) >= load_seconds(middle):
            high = middle
        else:
            low = middle + 1
    return low
