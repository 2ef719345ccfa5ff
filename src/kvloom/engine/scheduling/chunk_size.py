"""Chooses the largest number of prompt tokens of a step, so that requests with an objective for the time between tokens
(TBT) meet it.

    seconds of a step = constant + decoding requests + context  +  prompt tokens * seconds of a prompt token
                        └─────── measured: StepTimes ────────┘     └── fills the time that the objective leaves ──┘

Steps without such requests have the whole token budget. The time of a step is fitted to measured steps, so the size
follows the machine, the batch and the lengths of contexts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvloom.core import SloAdmission, StepSize
from kvloom.engine.request import Request

__all__ = ["LEAST_TOKENS", "ChunkSize"]

LEAST_TOKENS = 64
"""A step may always compute this many prompt tokens, so that prompts never stop."""
SHARE = 0.9
"""A step takes at most this share of the smallest objective. The rest is for errors of the estimate."""


class ChunkSize:
    """The largest number of prompt tokens of the next step: `most`, or less if decoding requests have a TBT objective.

    With `is_fixed`, the size is always `most`."""

    def __init__(self, admission: SloAdmission, is_fixed: bool = False) -> None:
        self._admission = admission
        self.is_fixed = is_fixed
        self.tokens: int | None = None
        """The size in the last step. None if no decoding request had a TBT objective."""
        self.reason = "no decoding request has an objective for the time between tokens"
        """Why the last step had this size, with figures."""

    def choose(self, most: int, decoding: Sequence[Request], prompts: Iterable[Request]) -> int:
        """Return the size for a step that decodes the requests in `decoding`, and store it with its reason. `most` is
        the token budget. `prompts` are the requests whose prompts the step may compute. O(requests)."""
        times = self._admission.times
        tbt = min((_tbt(request) for request in decoding), default=math.inf)
        if self.is_fixed or tbt == math.inf or not times.is_known:
            self.tokens = None
            self.reason = (
                "fixed"
                if self.is_fixed
                else "no decoding request has an objective for the time between tokens"
                if tbt == math.inf
                else "too few steps have been measured"
            )
            return most
        context = sum(len(request.tokens) for request in decoding)
        base = times.seconds(StepSize(rows=len(decoding), context=context))
        _, token, _, _, pair = times.coefficients
        # The attention of a prompt token grows with the position of the token.
        each = token + pair * max((len(request.tokens) for request in prompts), default=0)
        left = SHARE * tbt - base
        fitting = int(min(most, left / each)) if left > 0 and each > 0 else most if left > 0 else 0
        size = min(most, max(LEAST_TOKENS, _rounded(fitting)))
        self.tokens = size
        self.reason = (
            f"a step with {len(decoding)} decoding requests takes {1e3 * base:.1f} ms, and {size} prompt tokens take "
            f"{1e3 * size * each:.1f} ms; the smallest objective is {1e3 * tbt:.1f} ms"
        )
        return size


def _tbt(request: Request) -> float:
    """Return the TBT objective of a request in seconds, or infinity."""
    slo = request.slo
    return math.inf if slo is None or slo.objective.tbt_ms is None else slo.objective.tbt_ms / 1e3


def _rounded(tokens: int) -> int:
    """Round down to a power of two, or to one and a half times a power of two. Few different sizes let libraries reuse
    their plans of a step."""
    if tokens < LEAST_TOKENS:
        return tokens
    power = 1 << tokens.bit_length() - 1
    return power + power // 2 if tokens >= power + power // 2 else power
