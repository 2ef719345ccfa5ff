"""A tier that stores pages smaller than they are: int8 or fp8 values with scales, inside any other tier.

    write   the page of either form         -> re-encoded, under the same block hash and a form of its own (exact=False)
    read    the form with `exact=False`     -> decoded to the page's own type; the caller accepts the loss by this form
            the exact form                  -> missing: lossy bytes never replace computed ones

Runs stay separate, so layers load in order. `encoding/quantisation.py` has the arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from .aligned_memory import aligned_bytes
from .encoding import CODINGS, Coding, decode, encode, lossy_form
from .registry import Opener, parse_tier, scheme_of
from .shares import Shares, SupportsShares
from .tier import Objects, Ranges, Tier, part_range
from .transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer
from .workers import Workers

__all__ = ["LossyTier", "parse_url"]

_WAIT_SECONDS, _CLOSE_SECONDS = 60.0, 10.0


class LossyTier(Tier):
    """`inner`, with every page re-encoded in transfer. Its own threads re-encode, so a caller never waits for it."""

    def __init__(self, inner: Tier, coding: Coding, threads: int = 2) -> None:
        if coding not in CODINGS:
            raise ValueError(f"coding={coding!r} is none of {', '.join(CODINGS)}")
        self._inner, self.coding = inner, coding
        self._transfer_counts = TransferCounts()
        self._closed = False
        self._lock = threading.Lock()  # no job is submitted after close() ended the threads
        self._workers: Workers[Callable[[], None]] = Workers(
            threads, "kvloom-lossy", lambda: lambda job: job()
        )

    @property
    def name(self) -> str:
        return f"{self.coding}:{self._inner.name}"

    @property
    def capacity(self) -> int:
        return self._inner.capacity

    @property
    def is_lossy(self) -> bool:
        return True

    def set_shares(self, shares: Shares) -> None:
        if isinstance(self._inner, SupportsShares):
            self._inner.set_shares(shares)

    def used_by(self, tenant: str) -> int:
        return self._inner.used_by(tenant) if isinstance(self._inner, SupportsShares) else 0

    def _encoded(self, objects: Objects) -> Objects:
        """Returns the objects' representation in the inner tier; the same for the exact and the lossy form."""
        exact = replace(objects.form, exact=True)
        return Objects(objects.block_hashes, objects.group, lossy_form(exact, self.coding), objects.tenant)

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        """Never finds an exact page."""
        if objects.form.exact or self._closed:
            return np.zeros(len(objects), np.bool_)
        return self._inner.lookup(self._encoded(objects))

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        if self._closed:
            return failed_transfer(
                len(objects), self._transfer_counts, "read", Outcome.FAILED, f"{self.name} is closed"
            )
        if objects.form.exact:
            transfer.settle_pending(Outcome.MISSING)
            return transfer
        encoded = self._encoded(objects)
        run, coded_bytes = objects.form.run_bytes, encoded.form.run_bytes
        encoded_part = (start // run * coded_bytes, stop // run * coded_bytes)

        def work() -> None:
            size = encoded.form.page_bytes
            scratch = aligned_bytes(size * len(objects))
            inner_transfer = self._inner.read(
                encoded, Ranges(scratch, np.arange(len(objects)) * size), encoded_part
            )
            inner_transfer.wait(_WAIT_SECONDS)
            inner_transfer.cancel()  # pages not read by now are late, and not decoded
            for index in np.flatnonzero(inner_transfer.ok).tolist():
                at, page = int(into.starts[index]), scratch[index * size : (index + 1) * size]
                for number in range(start // run, stop // run):
                    coded = page[number * coded_bytes : (number + 1) * coded_bytes]
                    target = into.view[at + number * run : at + (number + 1) * run]
                    decode(coded, objects.form.dtype, self.coding, target)
            self._copy_outcomes(inner_transfer, transfer)

        return self._submit(transfer, work)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        """Writes computed pages. A page that was read from here and evicted since loses up to half a quantisation step
        more."""
        source.check(objects, writable=False)
        encoded = self._encoded(objects)
        transfer = Transfer(len(objects), self._transfer_counts, "write", objects.form.page_bytes)
        if self._closed:
            return failed_transfer(
                len(objects), self._transfer_counts, "write", Outcome.FAILED, f"{self.name} is closed"
            )
        form = objects.form

        def work() -> None:
            size, coded_bytes = encoded.form.page_bytes, encoded.form.run_bytes
            scratch = aligned_bytes(size * len(objects))
            for index, at in enumerate(source.starts.tolist()):
                page = scratch[index * size : (index + 1) * size]
                for number in range(form.runs):
                    run = source.view[at + number * form.run_bytes : at + (number + 1) * form.run_bytes]
                    encode(
                        run, form.dtype, self.coding, page[number * coded_bytes : (number + 1) * coded_bytes]
                    )
            inner_transfer = self._inner.write(encoded, Ranges(scratch, np.arange(len(objects)) * size))
            inner_transfer.wait(_WAIT_SECONDS)
            inner_transfer.cancel()
            self._copy_outcomes(inner_transfer, transfer)

        return self._submit(transfer, work)

    def _submit(self, transfer: Transfer, work: Callable[[], None]) -> Transfer:
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
    def _copy_outcomes(inner: Transfer, outer: Transfer) -> None:
        for outcome in np.unique(inner.results).tolist():
            outer.settle(np.flatnonzero(inner.results == outcome), Outcome(outcome), inner.reason)

    def drop(self, objects: Objects) -> int:
        return 0 if self._closed else self._inner.drop(self._encoded(objects))

    def stats(self) -> TierStats:
        """Returns the inner tier's contents, with counts of this tier."""
        inner = self._inner.stats()
        return self._transfer_counts.stats(
            inner.objects, inner.bytes, inner.capacity, inner.evicted, inner.notes
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._workers.close(_CLOSE_SECONDS)
        self._inner.close()  # fails transfers that are still pending


def parse_url(url: str) -> Opener:
    """Parses `int8:` or `fp8:` before the URL of any other tier; returns the opener."""
    coding, _, rest = url.partition(":")
    if scheme_of(rest) in CODINGS:
        raise ValueError(f"tier {url!r} re-encodes pages twice; omit {coding}: or the other scheme")
    open_inner = parse_tier(rest)
    return lambda: LossyTier(open_inner(), cast(Coding, coding))
