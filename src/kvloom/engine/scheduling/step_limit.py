"""Limits the tokens of a step if several tenants share the engine, so that a new tenant waits only for a short
step.

Prompt tokens and decoding requests have separate limits. The limits are computed from the measured speed. With these
limits, the prompt tokens of a step take about SHARED_SECONDS, and so do its decoding requests. Fast devices never reach
the limits.
"""

from __future__ import annotations

__all__ = ["LEAST_TOKENS", "SHARED_SECONDS", "StepLimit"]

SHARED_SECONDS = 0.1
"""Target time, in seconds, for the prompt tokens of a step, and separately for its decoding requests."""
LEAST_TOKENS = 64
"""The limit is a multiple of this number of tokens. Steps with fewer tokens are not measured, because they take a
nearly constant time."""
SMOOTHING = 0.25
"""Weight of the latest step in the moving average of speeds."""


class StepLimit:
    """Computes the limit of a step from the speed of earlier steps. The limit is at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._speed: float | None = None  # tokens per second

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the tokens and the time of a step."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        speed = tokens / seconds
        self._speed = speed if self._speed is None else (1 - SMOOTHING) * self._speed + SMOOTHING * speed

    @property
    def tokens(self) -> int:
        """The limit of the next step. The limit applies to the number of prompt tokens, and separately to the number of
        decoding requests. The limit is at least LEAST_TOKENS, unless `most` is smaller."""
        if self._speed is None:
            return self._most
        fitting = int(self._speed * SHARED_SECONDS) // LEAST_TOKENS * LEAST_TOKENS
        return min(self._most, max(LEAST_TOKENS, fitting))
