"""Clocks: the wall clock, and a virtual clock that tests and simulators advance."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "VirtualClock", "WallClock"]


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the time in seconds. The time never decreases."""
        ...


class WallClock:
    """The system's monotonic clock."""

    now = staticmethod(time.monotonic)  # the C function itself, because each request reads the clock often


class VirtualClock:
    """A clock that advances only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s; give 0 or more")
        self._now += seconds
