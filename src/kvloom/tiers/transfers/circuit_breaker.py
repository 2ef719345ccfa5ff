"""A circuit breaker and a fault log. The breaker stops requests to a failing tier and probes the tier later. The
log has one line per burst of faults.

    closed ── failures in a row ──> open ── after a pause ──> one probe ── ok ──> closed
                                     ^                          │
                                     └──────── failed ──────────┘  with a longer pause

This module is independent of tiers. The caller records successes and failures. Both classes are thread-safe.
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
    """Settings of the circuit breaker. The breaker opens after `max_failures` failures in a row, for `first_pause`
    seconds. Each failed probe doubles the pause, up to `max_pause`. A probe without a result after `probe_seconds`
    counts as failed."""

    max_failures: int = 3
    first_pause: float = 0.5
    max_pause: float = 30.0
    probe_seconds: float = 5.0


class CircuitBreaker:
    """Decides whether requests may be sent to a tier. The figure at the top of this file shows the states."""

    def __init__(self, config: CircuitBreakerConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._failures_in_a_row = 0
        self._probe_at: float | None = None  # while open: time of the next probe
        self._probing_since: float | None = None  # start of the running probe
        self._pause = config.first_pause
        self.times_opened = 0
        """Number of times the breaker opened. A failed probe also counts."""

    @property
    def is_closed(self) -> bool:
        return self._probe_at is None

    @property
    def state(self) -> str:
        """The state for display: closed, open, or half-open while a probe runs."""
        with self._lock:
            return (
                "closed" if self._probe_at is None else "open" if self._probing_since is None else "half-open"
            )

    def allow_request(self, now: float) -> bool:
        """Return whether the caller may send a request now. The first request after the pause is the probe.
        Further requests are refused until the result of the probe is recorded.
        """
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
        """Record that the running probe neither succeeded nor failed. The next request becomes a new probe."""
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
    """Counts faults by (tier, operation, outcome). Logs only the first fault of each burst. A burst is a series
    of faults of one tier, with pauses of less than BURST_GAP seconds."""

    BURST_GAP = 30.0
    """A burst ends after this many seconds without a fault of the tier."""

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
        more = f"; {before} more since the last message" if before else ""
        log.warning(
            "tier %s: %s of %d pages %s%s%s: the pages are %s; further faults are counted",
            tier, verb, count, outcome, f" ({reason})" if reason else "", more,
            "not stored there" if verb == "write" else "recomputed",
        )  # fmt: skip
