"""The time to live of pages in a tier. A page's age counts from the moment at which the tier stored it. In
Redis, the age counts from the last use of the page.

Times are whole seconds since 1970, rounded down. If the TTL is a whole number of seconds, a page never
expires early, but up to one second late.
"""

from __future__ import annotations

import time

__all__ = ["MAX_TTL", "Expiry", "check_ttl", "expiry_cutoff", "now"]

MAX_TTL = 10 * 365 * 86400


def now() -> int:
    return int(time.time())


def check_ttl(ttl: float) -> None:
    """Raises ValueError unless `ttl` is a number of seconds. 0 means that pages never expire."""
    if not 0 <= ttl <= MAX_TTL:
        raise ValueError(f"ttl={ttl:g} is not a number of seconds from 0 to {MAX_TTL}")


def expiry_cutoff(ttl: float) -> float:
    """Return the cutoff time. Pages that were stored before this time have expired. Return 0 if `ttl` is 0, because
    pages then never expire."""
    return now() - ttl if ttl else 0.0


class Expiry:
    """Decides which pages of a tier have expired. Pages of earlier releases contain no write time, so their `stored_at`
    is 0. Their age counts from the time when this process opened the tier."""

    def __init__(self, ttl: float = 0) -> None:
        self.ttl, self._opened_at = ttl, now()

    def is_expired(self, stored_at: int) -> bool:
        return (stored_at or self._opened_at) < expiry_cutoff(self.ttl)
