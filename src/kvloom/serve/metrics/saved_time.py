"""Estimates the prefill time that cached tokens save, from the prefill times of finished requests."""

from __future__ import annotations

__all__ = ["SavedTime"]

FADE = 0.99
MIN_SPREAD = 1e-6


class SavedTime:
    """Sums the prefill time that cached tokens have saved, in `seconds`.

    The saved time of a request is the number of its cached tokens times the seconds per computed token, minus its load
    time. A line is fitted to the prefill times of recent requests, and its slope is the seconds per computed token.
    Nothing is counted until two requests have computed different numbers of tokens.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def seconds_per_token(self) -> float:
        """The slope of the fitted line, at least 0. The value is 0 while the slope is unknown."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= MIN_SPREAD * self._n * self._xx:
            return 0.0
        return max(0.0, (self._n * self._xy - self._x * self._y) / spread)

    def add(self, computed: int, cached: int, prefill_seconds: float, load_seconds: float) -> None:
        """Add the saved time of a finished request."""
        values = (1.0, computed, prefill_seconds, computed * computed, computed * prefill_seconds)
        before = (self._n, self._x, self._y, self._xx, self._xy)
        self._n, self._x, self._y, self._xx, self._xy = (
            FADE * old + new for old, new in zip(before, values, strict=True)
        )
        self.seconds += max(0.0, cached * self.seconds_per_token - load_seconds)
