"""The base class of tiers that convert pages and store them in another tier. Separate threads do the conversion, so
a caller never waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from .shares import Shares, SupportsShares
from .tier import Objects, Tier
from .transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer
from .workers import Workers

__all__ = ["WrappedTier"]

_WAIT_SECONDS, _CLOSE_SECONDS = 60.0, 10.0


class WrappedTier(Tier):
    """Wraps the tier `inner`, and converts pages in `threads` threads. A subclass implements lookup, read, write
    and drop.
    """

    def __init__(self, inner: Tier, threads: int = 2) -> None:
        self.inner = inner
        self._transfer_counts = TransferCounts()
        self._closed = False
        self._lock = (
            threading.Lock()
        )  # prevents jobs from being submitted after close() has ended the threads
        self._workers: Workers[Callable[[], None]] = Workers(
            threads, "kvloom-convert", lambda: lambda job: job()
        )

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def is_lossy(self) -> bool:
        return self.inner.is_lossy

    @property
    def is_reachable(self) -> bool:
        return self.inner.is_reachable

    def set_shares(self, shares: Shares) -> None:
        if isinstance(self.inner, SupportsShares):
            self.inner.set_shares(shares)

    def used_by(self, tenant: str) -> int:
        return self.inner.used_by(tenant) if isinstance(self.inner, SupportsShares) else 0

    def stats(self) -> TierStats:
        """Return the stats of the inner tier, but with the transfer counts of this tier."""
        inner = self.inner.stats()
        return self._transfer_counts.stats(
            inner.objects, inner.bytes, inner.capacity, inner.evicted, inner.notes, inner.tenants
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._workers.close(_CLOSE_SECONDS)
        self.inner.close()  # fails transfers that are still pending

    def _failed(self, objects: Objects, verb: str) -> Transfer:
        return failed_transfer(
            len(objects), self._transfer_counts, verb, Outcome.FAILED, f"{self.name} is closed"
        )

    def _submit(self, transfer: Transfer, work: Callable[[], None]) -> Transfer:
        """Run `work` in a thread and return the transfer. `work` sets the outcomes of the transfer. If `work` raises,
        pending objects get the outcome FAILED."""

        def job() -> None:
            if not transfer.begin_access():
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001  on any error the request continues without these pages
                transfer.settle_pending(Outcome.FAILED, f"{self.name}: {error}")
            finally:
                transfer.end_access()

        with self._lock:
            if not self._closed:
                self._workers.submit(job)
                return transfer
        transfer.settle_pending(Outcome.FAILED, f"{self.name} is closed")
        return transfer

    @staticmethod
    def _wait(inner: Transfer) -> None:
        """Wait for a transfer of the inner tier. Objects that are not done in time get the outcome LATE and are
        not converted."""
        inner.wait(_WAIT_SECONDS)
        inner.cancel()

    @staticmethod
    def _copy_outcomes(inner: Transfer, outer: Transfer) -> None:
        for outcome in np.unique(inner.results).tolist():
            outer.settle(np.flatnonzero(inner.results == outcome), Outcome(outcome), inner.reason)
