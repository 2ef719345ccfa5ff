"""When a tier is left alone, and how it is tried again; and faults, counted and told once a burst.

    closed ── failures in a row ──> open ── after a while ──> one try ── ok ──> closed
                                     ^                          │
                                     └──────── failed ──────────┘  and a longer while

Knows no tiers: someone tells it what went well and what did not. Safe from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass

__all__ = ["CircuitBreaker", "CircuitBreakerConfig", "FaultLog"]

log = logging.getLogger("kvloom.tiers")


@dataclass(frozen=True, slots=True)
class CircuitBreakerConfig:
    """Opens after `failures` in a row, for `first` seconds; each try that fails doubles that, up to `most`. A try whose
    end nobody hears of within `try_seconds` has failed."""

    max_failures: int = 3
    first_pause: float = 0.5
    max_pause: float = 30.0
    probe_seconds: float = 5.0


class CircuitBreaker:
    """See the module."""

    def __init__(self, config: CircuitBreakerConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._probe_at: float | None = None  # while open: when it may be tried
        self._probing_since: float | None = None  # since when a try is under way
        self._pause = config.first_pause
        self.times_opened = 0
        """How often it opened, or stayed open after a try."""

    @property
    def is_closed(self) -> bool:
        return self._probe_at is None

    @property
    def state(self) -> str:
        """For people: closed, open, or half-open while the one try is under way."""
        with self._lock:
            return (
                "closed" if self._probe_at is None else "open" if self._probing_since is None else "half-open"
            )

    def allow_request(self, now: float) -> bool:
        """Whether to ask the tier now. Where that is the one try, the next answer is no until its end is told."""
        with self._lock:
            if self._probe_at is None:
                return True
            if self._probing_since is not None and now - self._probing_since < self._config.probe_seconds:
                return False
            if self._probing_since is not None:
                self._extend_pause(now)
                return False
            if now < self._probe_at:
                return False
            self._probing_since = now
            return True

    def record_success(self) -> None:
        with self._lock:
            self._failures_in_a_row, self._probe_at, self._probing_since = 0, None, None
            self._pause = self._config.first_pause

    def record_inconclusive(self) -> None:
        """The one try told nothing: another may follow at once."""
        with self._lock:
            self._probing_since = None

    def record_failure(self, now: float) -> None:
        with self._lock:
            self._failures_in_a_row += 1
            if self._probing_since is not None:
                self._extend_pause(now)
            elif self._probe_at is None and self._failures_in_a_row >= self._config.max_failures:
                self._probe_at = now + self._pause
                self.times_opened += 1

    def _extend_pause(self, now: float) -> None:
        self._pause = min(2 * self._pause, self._config.max_pause)
        self._probe_at, self._probing_since = now + self._pause, None
        self.times_opened += 1


class FaultLog:
    """Counts faults by (tier, what, outcome); of a burst the first is logged, the rest are counted."""

    BURST_GAP = 30.0
    """Seconds without a fault after which the next begins a burst."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._last: dict[str, float] = {}
        self._suppressed: Counter[str] = Counter()

    def add(self, tier: str, verb: str, outcome: str, count: int, reason: str, now: float) -> None:
        with self._lock:
            self.counts[tier, verb, outcome] += count
            burst = now - self._last.get(tier, -self.BURST_GAP) < self.BURST_GAP
            self._last[tier] = now
            before = self._suppressed.pop(tier, 0) if not burst else 0
            if burst:
                self._suppressed[tier] += count
                return
        more = f"; {before} more since the last line" if before else ""
        log.warning(
            "tier %s: %s of %d pages %s%s%s: they are %s, further faults are counted",
            tier, verb, count, outcome, f" ({reason})" if reason else "", more,
            "not kept there" if verb == "write" else "computed instead",
        )  # fmt: skip
