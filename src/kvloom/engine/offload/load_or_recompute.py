"""Load or recompute: decides how many tokens a request computes next, or that it waits for its pages.

    0 ──computed──> computed_to ········ gap ········ loaded_from <──loaded── resume

The request computes its prompt from the start while pages load from the end. When both meet, the request resumes after
the loaded tokens. Estimated times decide only how many tokens the next step computes, and whether the request waits.
They do not affect the output. If an estimate is wrong, the request loses a bounded time by waiting. The caller passes
the time of the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .time_model import meeting_point

__all__ = ["Estimates", "LoadOrRecompute", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has computed and loaded its prompt. Tokens before `computed_to` are computed. Tokens from
    `loaded_from` to `end` are loaded. `end` is the end of the prompt.
    """

    computed_to: int
    loaded_from: int
    end: int
    block_tokens: int
    min_step: int
    """Smallest useful number of tokens in a step. A step with fewer tokens takes as long as a step of this size."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Measured times from which `LoadOrRecompute` decides. A field is None if nothing was measured yet."""

    compute_seconds: Callable[[int], float] | None
    """A function: number of tokens → seconds of a step with this many tokens."""
    load_seconds: Callable[[int], float] | None
    """A function: position → seconds until all pages from this position on are loaded."""
    inflight_seconds: float | None
    """Seconds until the in-flight step of this request ends. The request loses no time by waiting until then. None if
    no in-flight step computes the request.
    """
    max_lost_seconds: float
    """Largest number of seconds that the request may lose by waiting."""


class LoadOrRecompute:
    """Decides whether one request waits for loaded pages or computes tokens itself. `seconds_lost` compares both: the
    time that the request has waited, minus the time to compute the loaded tokens.
    """

    def __init__(self) -> None:
        self.seconds_lost = 0.0
        self._waiting_since: float | None = None
        self._loaded_at_wait = 0
        self._first: tuple[float, int] | None = None  # time and loaded_from of the first decision

    def tokens_to_compute(self, at: Progress, estimates: Estimates, now: float) -> int:
        """Return how many tokens the request computes before the next decision. 0 means that the request waits for
        pages. `at` states which tokens are computed and loaded. If loading saves no time, returns all tokens up to the
        end of the prompt.
        """
        gap = at.loaded_from - at.computed_to
        compute, load = estimates.compute_seconds, estimates.load_seconds
        tokens: int | None = None
        if compute is not None and load is not None:
            takes, blocks, block = compute, -(-gap // at.block_tokens), at.block_tokens
            loads = self._corrected(at.loaded_from, min(gap, at.min_step), load, now)
            busy = estimates.inflight_seconds or 0.0
            met = meeting_point(
                blocks,
                lambda n: busy + takes(max(at.min_step, gap - (blocks - n) * block)),
                lambda n: loads(at.loaded_from - (blocks - n) * block),
            )
            tokens = (
                self._whole_blocks(gap, max(at.min_step, gap - (blocks - met) * block), block) if met else 0
            )
            until = takes(max(at.min_step, tokens)) if tokens else loads(at.computed_to) - busy
            if takes(at.end - at.computed_to) <= until + takes(at.min_step):
                tokens = at.end - at.computed_to
        if not tokens:
            if estimates.inflight_seconds is not None or self.may_wait(
                at.loaded_from, compute, estimates.max_lost_seconds, now
            ):
                return 0
            tokens = self._whole_blocks(gap, max(at.min_step, gap // 2), at.block_tokens)
        self._end_wait(at.loaded_from, compute, now)
        return tokens

    def may_wait(
        self, loaded_from: int, compute_seconds: Callable[[int], float] | None, max_lost: float, now: float
    ) -> bool:
        """Start or continue a wait for pages. Return whether the request may wait longer. It may wait while it has lost
        at most `max_lost` seconds (see `seconds_lost`).
        """
        if self._waiting_since is not None and loaded_from > self._loaded_at_wait:
            # Until now, the request waited for the lookup.
            self._end_wait(self._loaded_at_wait, compute_seconds, now)
        if self._waiting_since is None:
            self._waiting_since, self._loaded_at_wait = now, loaded_from
        return self._lost(loaded_from, compute_seconds, now) <= max_lost

    def _corrected(
        self, loaded_from: int, next_tokens: int, load: Callable[[int], float], now: float
    ) -> Callable[[int], float]:
        """Return a corrected version of the estimate `load`, for a load that is slower than expected. The results of
        `load` are multiplied by elapsed time / expected time, but at least by 1.

        The elapsed time counts from the first decision. The expected time is the estimate for the tokens loaded
        since then and for the next `next_tokens` tokens, which may still be in transfer.
        """
        first_time, first_loaded = self._first = self._first or (now, loaded_from)
        soon = load(loaded_from - next_tokens)
        expected = soon + soon / next_tokens * (first_loaded - loaded_from)
        slower = max(1.0, (now - first_time) / max(1e-9, expected))
        return lambda first: slower * load(first)

    @staticmethod
    def _whole_blocks(gap: int, tokens: int, block: int) -> int:
        """Return `tokens`, rounded up so that gap - tokens is a multiple of `block`. The result is at most `gap`."""
        return gap - max(0, gap - tokens) // block * block

    def _end_wait(self, loaded_from: int, compute_seconds: Callable[[int], float] | None, now: float) -> None:
        if self._waiting_since is not None:
            self.seconds_lost = max(0.0, self._lost(loaded_from, compute_seconds, now))
            self._waiting_since = None

    def _lost(self, loaded_from: int, compute_seconds: Callable[[int], float] | None, now: float) -> float:
        assert self._waiting_since is not None
        loaded = self._loaded_at_wait - loaded_from
        saved = compute_seconds(loaded) if loaded > 0 and compute_seconds is not None else 0.0
        return self.seconds_lost + now - self._waiting_since - saved
