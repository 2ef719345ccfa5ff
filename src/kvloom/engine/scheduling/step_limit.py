"""How many tokens a step may compute where several tenants share the engine, so that a new tenant waits for a short step.

It holds for prompt tokens, and for decoding requests beside them. It follows the measured speed: each of the two takes
about SHARED_SECONDS. Fast devices never reach it.
"""

from __future__ import annotations

__all__ = ["LEAST_TOKENS", "SHARED_SECONDS", "StepLimit"]

SHARED_SECONDS = 0.1
"""Time of the prompt tokens, and of the decoding requests, of a step."""
LEAST_TOKENS = 64
"""The limit is a multiple of this. Smaller steps are not measured: they mostly take a constant time."""
SMOOTHING = 0.25
"""Weight of the latest step."""


class StepLimit:
    """Limits the tokens of a step by the speed of earlier steps, to `most` at most."""

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
        """Tokens of the next step, at least one."""
        if self._speed is None:
            return self._most
        fitting = int(self._speed * SHARED_SECONDS) // LEAST_TOKENS * LEAST_TOKENS
        return min(self._most, max(LEAST_TOKENS, fitting))
