"""How fast a tier gives bytes, as seen lately. Arithmetic of bytes and seconds; knows no clock."""

from __future__ import annotations

import math

__all__ = ["Throughput"]

WINDOW_SECONDS = 0.25
"""Seconds of loading over which a speed is seen."""


class Throughput:
    """Bytes, and the seconds they took, fade together as time passes: what ends at the same moment is one sight, and a tier that
    hung once is not slow for long."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        """Bytes a second; 0 while nothing was seen."""
        self.last_end = 0.0
        """When something last ended."""
        self._bytes = self._seconds = 0.0

    def record(self, size: int, began: float, now: float) -> None:
        """So many bytes were asked for at `began`, and are there `now`."""
        took = max(1e-6, now - max(began, self.last_end))
        if self.bytes_per_second:
            took = min(took, max(WINDOW_SECONDS, 4 * size / self.bytes_per_second))
        self.last_end = now
        fade = math.exp(-took / WINDOW_SECONDS)
        self._bytes = self._bytes * fade + size
        self._seconds = self._seconds * fade + took
        self.bytes_per_second = self._bytes / self._seconds

    def raise_estimate(self) -> None:
        """Something was not asked for because the tier is slow, so that nothing new is seen of it: it counts as a tenth faster
        from now on, until it is tried again."""
        self._bytes *= 1.1
        self.bytes_per_second *= 1.1
