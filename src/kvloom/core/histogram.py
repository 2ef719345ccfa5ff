"""How often values fell where: a histogram of plain numbers, cheap to add to and read whenever somebody asks.

Knows no metric names and no formats; whoever shows it gives it both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["SECONDS", "Histogram"]

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
"""Bounds for what lies between two uses of a page: a moment to a day."""


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and more than the bound before; the last count is of what lay beyond.
    `total` is their sum. Adding costs O(log bounds), well under a microsecond."""

    __slots__ = ("_edges", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds {tuple(bounds)} must be numbers that rise")
        self.bounds = tuple(bounds)
        self._edges = tuple(map(float, bounds))  # comparing like with like is faster
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`value` was seen so many times."""
        self.counts[bisect_left(self._edges, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)
