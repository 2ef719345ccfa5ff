"""The measured read throughput of a tier. This module reads no clock: the caller passes all times."""

from __future__ import annotations

import math

__all__ = ["Throughput"]

WINDOW_SECONDS = 0.25
"""Length in seconds of the window over which throughput is measured."""


class Throughput:
    """A decaying average of throughput: recent bytes divided by recent seconds. Bytes and seconds decay at the same
    rate, so the effect of a single hang fades soon."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        """Throughput estimate. 0 before the first measurement."""
        self.last_end = 0.0
        """Time of the monotonic clock at which a transfer last ended."""
        self._bytes = self._seconds = 0.0

    def record(self, size: int, began: float, now: float) -> None:
        """Record that `size` bytes were requested at `began` and loaded at `now`."""
        took = max(1e-6, now - max(began, self.last_end))
        if self.bytes_per_second:
            took = min(took, max(WINDOW_SECONDS, 4 * size / self.bytes_per_second))
        self.last_end = now
        fade = math.exp(-took / WINDOW_SECONDS)
        self._bytes = self._bytes * fade + size
        self._seconds = self._seconds * fade + took
        self.bytes_per_second = self._bytes / self._seconds

    def set_estimate(self, bytes_per_second: float) -> None:
        """Set the estimate, for example to a saved one. In later averages, it counts as much as a measurement that
        took WINDOW_SECONDS."""
        self.bytes_per_second = bytes_per_second
        self._bytes, self._seconds = bytes_per_second * WINDOW_SECONDS, WINDOW_SECONDS

    def raise_estimate(self) -> None:
        """Raise the estimate by a tenth. Call this method whenever a load is skipped because the tier is slow.
        After several skips the estimate is high enough to try the tier again.
        """
        self._bytes *= 1.1
        self.bytes_per_second *= 1.1
