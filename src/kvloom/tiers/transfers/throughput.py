"""How fast a tier gives bytes, as seen lately. Arithmetic of bytes and seconds; knows no clock."""

from __future__ import annotations

import math

__all__ = ["Rate"]

SIGHT = 0.25
"""Seconds of loading over which a speed is seen."""


class Rate:
    """Bytes, and the seconds they took, fade together as time passes: what ends at the same moment is one sight, and a tier that
    hung once is not slow for long."""

    def __init__(self) -> None:
        self.speed = 0.0
        """Bytes a second; 0 while nothing was seen."""
        self.last = 0.0
        """When something last ended."""
        self._bytes = self._seconds = 0.0

    def saw(self, size: int, began: float, now: float) -> None:
        """So many bytes were asked for at `began`, and are there `now`."""
        took = max(1e-6, now - max(began, self.last))
        if self.speed:
            took = min(took, max(SIGHT, 4 * size / self.speed))
        self.last = now
        fade = math.exp(-took / SIGHT)
        self._bytes = self._bytes * fade + size
        self._seconds = self._seconds * fade + took
        self.speed = self._bytes / self._seconds

    def doubt(self) -> None:
        """Something was not asked for because the tier is slow, so that nothing new is seen of it: it counts as a tenth faster
        from now on, until it is tried again."""
        self._bytes *= 1.1
        self.speed *= 1.1
