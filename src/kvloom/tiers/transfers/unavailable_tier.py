"""A stand-in for a tier that could not be opened. The stand-in tries to open the tier again after growing pauses.
Once the tier is open, all calls are forwarded to it. Until then every lookup is a miss, and every other operation
fails at once with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvloom.tiers.tier import Objects, Ranges, Tier
from kvloom.tiers.transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer

__all__ = ["UnavailableTier"]

log = logging.getLogger("kvloom.tiers")
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""First and largest number of seconds between two attempts to open the tier. Each failure doubles the pause."""


class UnavailableTier(Tier):
    """A stand-in for a tier. `open_tier` opens the tier or raises TierError. `reason` is the message of the first
    failure."""

    def __init__(self, name: str, open_tier: Callable[[], Tier], reason: str) -> None:
        self._name, self._open, self._reason = name, open_tier, reason
        self._inner: Tier | None = None
        self._transfer_counts = TransferCounts()
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._retry, name=f"kvloom-unavailable-{name}", daemon=True).start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        return 0 if self._inner is None else self._inner.capacity

    @property
    def is_reachable(self) -> bool:
        return self._inner is not None and self._inner.is_reachable

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        return np.zeros(len(objects), np.bool_) if self._inner is None else self._inner.lookup(objects)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        return self._fail(objects, "read") if self._inner is None else self._inner.read(objects, into, part)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        return self._fail(objects, "write") if self._inner is None else self._inner.write(objects, source)

    def drop(self, objects: Objects) -> int:
        return 0 if self._inner is None else self._inner.drop(objects)

    def stats(self) -> TierStats:
        return self._transfer_counts.stats(0, 0, 0, 0) if self._inner is None else self._inner.stats()

    def close(self) -> None:
        with self._lock:  # otherwise a concurrent try could open the tier and leave it open
            self._closed.set()
        if self._inner is not None:
            self._inner.close()

    def _fail(self, objects: Objects, verb: str) -> Transfer:
        return failed_transfer(len(objects), self._transfer_counts, verb, Outcome.FAILED, self._reason)

    def _retry(self) -> None:
        pause = FIRST_PAUSE
        while not self._closed.wait(pause):
            try:
                tier = self._open()
            except Exception as error:  # noqa: BLE001  any failure leads to a retry
                self._reason = str(error)
            else:
                with self._lock:
                    if not self._closed.is_set():
                        self._inner = tier
                        log.warning("tier %s is available now", self._name)
                        return
                tier.close()
                return
            pause = min(2 * pause, MAX_PAUSE)
