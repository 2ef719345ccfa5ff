"""A tier that re-encodes pages to int8 or fp8 values with scales, and stores them in another tier.

A caller reads and writes a page in its exact form or in its lossy form (`Form.exact`):

    write either form     -> stored re-encoded, under the block hash and the lossy form
    read the lossy form   -> decoded to the page's own dtype, with a rounding error
    read the exact form   -> a miss: lossy bytes never replace computed bytes

A caller that reads the lossy form accepts the rounding error. Each layer run is encoded separately, so
layers can load one after the other. `encoding/quantisation.py` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from kvloom.combinations import refused

from .aligned_memory import aligned_bytes
from .encoding import CODINGS, Coding, decode, encode, lossy_form
from .registry import Opener, parse_tier, scheme_of
from .tier import Objects, Ranges, Tier, part_range
from .transfer import Outcome, Transfer
from .wrapped_tier import WrappedTier

__all__ = ["LossyTier", "parse_url"]


class LossyTier(WrappedTier):
    """Wraps the tier `inner`. Encodes pages when they are written, and decodes them when they are read. Pages of
    `exact_groups` are stored unchanged."""

    def __init__(self, inner: Tier, coding: Coding, threads: int = 2) -> None:
        if coding not in CODINGS:
            raise ValueError(f"coding={coding!r} is none of {', '.join(CODINGS)}")
        super().__init__(inner, threads)
        self.coding = coding
        self.exact_groups: frozenset[int] = frozenset()
        """Groups whose pages are stored unchanged, such as recurrent states. In a state, an error would grow with
        every token."""

    @property
    def name(self) -> str:
        return f"{self.coding}:{self.inner.name}"

    @property
    def is_lossy(self) -> bool:
        return True

    def _encoded(self, objects: Objects) -> Objects:
        """Return the objects as the inner tier stores them. The exact and the lossy form of a page get the same key in
        the inner tier, so the inner tier stores each page once."""
        if objects.group in self.exact_groups:
            form = replace(objects.form, exact=False)
        else:
            form = lossy_form(replace(objects.form, exact=True), self.coding)
        return Objects(objects.block_hashes, objects.group, form, objects.tenant)

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        """Return for each object whether a read would probably find it. An object with an exact form is always a
        miss."""
        if objects.form.exact or self._closed:
            return np.zeros(len(objects), np.bool_)
        return self.inner.lookup(self._encoded(objects))

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        if self._closed:
            return self._failed(objects, "read")
        if objects.form.exact:
            transfer.settle_pending(Outcome.MISSING)
            return transfer
        encoded = self._encoded(objects)
        if objects.group in self.exact_groups:
            return self.inner.read(encoded, into, part)
        run, coded_bytes = objects.form.run_bytes, encoded.form.run_bytes
        encoded_part = (start // run * coded_bytes, stop // run * coded_bytes)

        def work() -> None:
            size = encoded.form.page_bytes
            scratch = aligned_bytes(size * len(objects))
            inner_transfer = self.inner.read(
                encoded, Ranges(scratch, np.arange(len(objects)) * size), encoded_part
            )
            self._wait(inner_transfer)
            for index in np.flatnonzero(inner_transfer.ok).tolist():
                at, page = int(into.starts[index]), scratch[index * size : (index + 1) * size]
                for number in range(start // run, stop // run):
                    coded = page[number * coded_bytes : (number + 1) * coded_bytes]
                    target = into.view[at + number * run : at + (number + 1) * run]
                    decode(coded, objects.form.dtype, self.coding, target)
            self._copy_outcomes(inner_transfer, transfer)

        return self._submit(transfer, work)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        """Re-encodes pages and writes them. A page that was read from this tier already has a rounding error. Writing
        the page again adds an error of up to half a quantisation step."""
        source.check(objects, writable=False)
        encoded = self._encoded(objects)
        transfer = Transfer(len(objects), self._transfer_counts, "write", objects.form.page_bytes)
        if self._closed:
            return self._failed(objects, "write")
        if objects.group in self.exact_groups:
            return self.inner.write(encoded, source)
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
            inner_transfer = self.inner.write(encoded, Ranges(scratch, np.arange(len(objects)) * size))
            self._wait(inner_transfer)
            self._copy_outcomes(inner_transfer, transfer)

        return self._submit(transfer, work)

    def drop(self, objects: Objects) -> int:
        return 0 if self._closed else self.inner.drop(self._encoded(objects))


def parse_url(url: str) -> Opener:
    """Parse `int8:` or `fp8:`, followed by the URL of another tier. Return a function that opens the tier."""
    coding, _, rest = url.partition(":")
    if scheme_of(rest) in CODINGS:
        raise ValueError(refused("lossy tier, lossy tier", url=url, coding=coding))
    open_inner = parse_tier(rest)
    return lambda: LossyTier(open_inner(), cast(Coding, coding))
