"""Limits the tokens of a step if several tenants share the engine. A new tenant then waits only for a short step.

Prompt tokens and decoding requests have separate limits. With these limits, the prompt tokens of a step take about
SHARED_SECONDS, and so do its decoding requests. Fast devices never reach the limits.

    seconds of a step = fixed + each * tokens

Both numbers are fitted to the measured steps. If `fixed` alone takes longer than half of SHARED_SECONDS, small steps
would waste most of the time. The limit then allows as much time for the tokens as the fixed part takes.
"""

from __future__ import annotations

__all__ = ["LEAST_TOKENS", "SHARED_SECONDS", "StepLimit"]

SHARED_SECONDS = 0.1
"""Target time, in seconds, for the prompt tokens of a step, and separately for its decoding requests."""
LEAST_TOKENS = 64
"""The limit is a multiple of this number of tokens."""
SMOOTHING = 0.05
"""Weight of the latest step in the moving averages."""
PROBE_STEPS = 16
"""One of so many steps may have twice the tokens. Without steps of several sizes, the two numbers cannot be fitted."""


class StepLimit:
    """Computes the limit of a step from the times of earlier steps. The limit is at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps = 0
        self._tokens = self._seconds = self._squares = self._products = 0.0  # moving averages

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the tokens and the time of a step."""
        if tokens < 1 or seconds <= 0:
            return
        self._steps += 1
        weight = max(SMOOTHING, 1 / self._steps)
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (tokens * tokens - self._squares)
        self._products += weight * (tokens * seconds - self._products)

    @property
    def tokens(self) -> int:
        """The limit of the next step. The limit applies to the number of prompt tokens, and separately to the number of
        decoding requests. The limit is at least LEAST_TOKENS, unless `most` is smaller."""
        if self._squares < LEAST_TOKENS**2:  # small steps say nothing about large ones
            return self._most
        each = self._seconds / self._tokens  # if the fixed part is 0
        spread = self._squares - self._tokens**2
        if spread > 1:
            fitted = (self._products - self._tokens * self._seconds) / spread
            each = min(each, max(fitted, each / self._most))
        fixed = self._seconds - each * self._tokens
        fitting = int((max(SHARED_SECONDS, 2 * fixed) - fixed) / each) // LEAST_TOKENS * LEAST_TOKENS
        is_probe = self._steps % PROBE_STEPS == 0
        return min(self._most, max(LEAST_TOKENS, fitting) * (2 if is_probe else 1))
