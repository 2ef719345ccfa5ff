"""Limits the work of a step if the engine has several tenants. The request of another tenant then waits only for a
short step.

    seconds of a step = fixed + decoding requests + prompt tokens      (estimated by StepTimes)

| part of a step                        | largest time             | at least           |
|---------------------------------------|--------------------------|--------------------|
| decoding requests                     | the fixed part           | SHARED_SECONDS     |
| decoding requests beside prompts      | half of the fixed part   | SHARED_SECONDS / 2 |
| prompt tokens                         | the fixed part           | SHARED_SECONDS     |
| prompt tokens, if one tenant is alone | twice the fixed part     | ALONE_SECONDS      |

Suppose that a tenant alone gets its first token after a step with `fixed` and `prompt` seconds. Half of a machine would
take twice this time. Beside other tenants, the tenant waits for the end of a step, and its own step also decodes
requests of other tenants. All limits follow from `fixed`, so the sum stays at about twice the time of half of a machine.
Smaller steps would waste most of the time. A fast device decodes all requests in most steps, and reaches only the limit
of prompt tokens.
"""

from __future__ import annotations

import math

from kvloom.core import StepSize, StepTimes

__all__ = ["FIRST_TOKENS", "LEAST_ROWS", "LEAST_TOKENS", "StepLimit"]

SHARED_SECONDS, ALONE_SECONDS = 0.01, 0.05
LEAST_TOKENS, LEAST_ROWS = 16, 4
"""A step may always compute this many prompt tokens, and decode this many requests."""
MULTIPLE = 8
"""The limit of prompt tokens is a multiple of this number."""
FIRST_TOKENS = 64
"""The limit until enough steps were measured."""
GROWTH, FADE = 2.0, 0.99
"""A step may have at most GROWTH times the tokens of the largest recent step, because larger steps were not measured.
The size of the largest step is multiplied by FADE after each step."""
PROBE_STEPS = 16
"""One of so many steps decodes a quarter of the usual requests. Without steps of several sizes, the fixed part cannot be
estimated."""


class StepLimit:
    """Computes the limits of the next step from the estimated times of steps. `most` is the largest number of prompt
    tokens."""

    def __init__(self, most: int, times: StepTimes) -> None:
        self._most, self._times = most, times
        self._largest = FIRST_TOKENS / GROWTH
        self._steps = 0

    def observe(self, size: StepSize) -> None:
        """Record the size of a finished step. Its time must already be part of the estimate."""
        self._steps += 1
        self._largest = max(size.prompt_tokens + size.rows, FADE * self._largest, FIRST_TOKENS / GROWTH)

    def rows(self, context: float, has_prompts: bool) -> int:
        """Return the largest number of decoding requests of the next step. `context` is their mean length. With
        `has_prompts`, the step will also compute prompts."""
        fixed, _, row, position, _ = self._times.coefficients
        seconds = max(SHARED_SECONDS, fixed) / (2 if has_prompts else 1)
        rows = self._fitting(seconds, row + position * context)
        return max(LEAST_ROWS, rows // 4 if self._steps % PROBE_STEPS == PROBE_STEPS - 1 else rows)

    def prompt_tokens(self, length: int, is_alone: bool) -> int:
        """Return the largest number of prompt tokens of the next step. `length` is the length of the longest prompt.
        With `is_alone`, no other tenant has sent requests recently."""
        fixed, token, _, _, pair = self._times.coefficients
        seconds = max(ALONE_SECONDS, 2 * fixed) if is_alone else max(SHARED_SECONDS, fixed)
        fitting = self._fitting(seconds, token + pair * length)
        return min(self._most, max(LEAST_TOKENS, fitting // MULTIPLE * MULTIPLE))

    @property
    def row_tokens(self) -> int:
        """How many prompt tokens take as long as a decoding request. Short prompts count as so many tokens, because
        each of them also needs a sampled token."""
        _, token, row, _, _ = self._times.coefficients
        return min(LEAST_TOKENS, max(1, math.ceil(row / token))) if token > 0 else 1

    def _fitting(self, seconds: float, each: float) -> int:
        """Return how many tokens fit into `seconds` if each takes `each` seconds."""
        if not self._times.is_known:
            return FIRST_TOKENS
        most = GROWTH * self._largest
        return int(min(most, seconds / each if each > 0 else math.inf))
