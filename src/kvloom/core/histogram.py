"""Histogram: counts values in fixed intervals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["SECONDS", "Histogram"]

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
"""Default bounds, in seconds: 0.1 s to a day."""


class Histogram:
    """Counts values in the intervals between `bounds`.

    `counts[i]` is the number of values above `bounds[i - 1]` and up to `bounds[i]`. The last count is the number of
    values above all bounds. `total` is the sum of all values. Adding a value takes O(log bounds) time.
    """

    __slots__ = ("_edges", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds {tuple(bounds)} must increase; sort them and remove duplicates")
        self.bounds = tuple(bounds)
        self._edges = tuple(map(float, bounds))  # comparing two floats is faster
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add `value`, `times` times."""
        self.counts[bisect_left(self._edges, value)] += times
        self.total += value * times

    def quantile(self, q: float) -> float | None:
        """Return the `q` quantile of all values, interpolated between bounds. Return None if there are no values.
        Values above the last bound count as the last bound. O(bounds).
        """
        rank = q * self.count
        reached, low = 0, 0.0
        for bound, count in zip(self._edges, self.counts, strict=False):
            if count and reached + count >= rank:
                return low + (bound - low) * max(0.0, rank - reached) / count
            reached, low = reached + count, bound
        return low if self.count else None

    def since(self, counts: Sequence[int]) -> Histogram:
        """Return a histogram of the values that were added since `counts` was copied from this histogram. Does not set
        `total`."""
        found = Histogram(self.bounds)
        found.counts = [now - before for now, before in zip(self.counts, counts, strict=True)]
        return found

    @property
    def count(self) -> int:
        """Number of all values."""
        return sum(self.counts)
