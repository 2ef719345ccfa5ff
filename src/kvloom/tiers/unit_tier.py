"""A tier that stores pages in units of HASH_TOKENS tokens inside another tier. Servers with different block sizes can
share the other tier.

    caller   pages of N · HASH_TOKENS tokens      one hash per unit of HASH_TOKENS tokens (`core.BlockHash`)
    inner    pages of HASH_TOKENS tokens          the objects of a server with that block size

A page is found if all its units are found. Values are reordered, but never changed (`encoding/formats.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.core import unit_hashes

from .aligned_memory import aligned_bytes
from .encoding import PageFields, join_units, split_units
from .page_changes import PageChanges, SupportsChanges
from .tier import Form, Objects, Ranges, Tier, part_range
from .transfer import Outcome, Transfer
from .wrapped_tier import WrappedTier

__all__ = ["UnitForm", "UnitTier"]


@dataclass(frozen=True, slots=True)
class UnitForm:
    """How pages of one form (byte layout) are divided into smaller pages, called units. `page` describes the
    fields of a whole page, and `unit` the fields of a unit. `form` is the form of a unit."""

    form: Form
    unit: PageFields
    page: PageFields


class UnitTier(WrappedTier):
    """Wraps the tier `inner`. Pages whose form is in `forms` are stored as units. Other pages pass unchanged.

    Set `has_whole_pages` if the inner tier is the host memory of another server, which may have the same
    block size. A lookup or read then tries the whole page first, and its units only if the page is missing. A
    write then stores whole pages.
    """

    def __init__(
        self, inner: Tier, forms: Mapping[Form, UnitForm], threads: int = 2, has_whole_pages: bool = False
    ) -> None:
        super().__init__(inner, threads)
        self._forms, self._has_whole_pages = dict(forms), has_whole_pages

    def watch(self) -> PageChanges | None:
        """Record changes (see `SupportsChanges`). A change refers to a unit, not to a whole page."""
        return self.inner.watch() if isinstance(self.inner, SupportsChanges) else None

    def stored_form(self, form: Form) -> Form:
        """Return the form of the units into which pages of `form` are divided, or `form` itself if they are not
        divided."""
        unit = self._unit_form(form)
        return form if unit is None else unit.form

    def _unit_form(self, form: Form) -> UnitForm | None:
        found = self._forms.get(replace(form, exact=True))
        if found is None or form.exact:
            return found
        return replace(found, form=replace(found.form, exact=False))

    @staticmethod
    def _units(objects: Objects, unit: UnitForm) -> tuple[Objects, npt.NDArray[np.int64]]:
        """Return the units of all objects as one batch. Also returns an array with the index of each object's first
        unit, followed by the total number of units."""
        hashes = [
            unit_hashes(block_hash) if unit.unit.tokens else (block_hash,)
            for block_hash in objects.block_hashes
        ]
        firsts = np.cumsum([0, *map(len, hashes)])
        flat = [one for units in hashes for one in units]
        return Objects(flat, objects.group, unit.form, objects.tenant), firsts

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        unit = self._unit_form(objects.form)
        if unit is None or not len(objects):
            return self.inner.lookup(objects)
        if self._has_whole_pages:
            found = self.inner.lookup(objects)
            missing = np.flatnonzero(~found)
            if missing.size:
                found[missing] = self._lookup_units(objects.take(missing), unit)
            return found
        return self._lookup_units(objects, unit)

    def _lookup_units(self, objects: Objects, unit: UnitForm) -> npt.NDArray[np.bool_]:
        units, firsts = self._units(objects, unit)
        found: npt.NDArray[np.bool_] = np.logical_and.reduceat(self.inner.lookup(units), firsts[:-1])
        return found

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        unit = self._unit_form(objects.form)
        if unit is None:
            return self.inner.read(objects, into, part)
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        if self._closed:
            return self._failed(objects, "read")
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)

        def work() -> None:
            indexes = np.arange(len(objects))
            if self._has_whole_pages:
                is_whole = self.inner.lookup(objects)
                whole, indexes = indexes[is_whole], indexes[~is_whole]
                if whole.size:
                    inner = self.inner.read(objects.take(whole), Ranges(into.view, into.starts[whole]), part)
                    self._wait(inner)
                    self._settle(transfer, whole, inner.results, inner.reason)
            if indexes.size:
                self._read_units(objects.take(indexes), unit, into, (start, stop), transfer, indexes)

        return self._submit(transfer, work)

    def _read_units(
        self,
        objects: Objects,
        unit: UnitForm,
        into: Ranges,
        part: tuple[int, int],
        transfer: Transfer,
        indexes: npt.NDArray[np.int64],
    ) -> None:
        """Read the units of `objects`, join them to pages, and copy the byte range `part` of each page to `into`.
        `indexes` are the indexes of the objects in `into` and `transfer`."""
        units, firsts = self._units(objects, unit)
        size, page_bytes = unit.form.page_bytes, objects.form.page_bytes
        start, stop = part
        scratch = aligned_bytes(size * len(units))
        inner = self.inner.read(units, Ranges(scratch, np.arange(len(units)) * size))
        self._wait(inner)
        outcomes = self._joined_outcomes(inner, firsts)
        for index in np.flatnonzero(outcomes == Outcome.OK).tolist():
            first, last = int(firsts[index]), int(firsts[index + 1])
            parts = [scratch[number * size : (number + 1) * size] for number in range(first, last)]
            at = int(into.starts[indexes[index]])
            target = into.view[at : at + page_bytes]
            if part == (0, page_bytes):
                join_units(parts, unit.unit, target, unit.page)
            else:
                whole = memoryview(bytearray(page_bytes))
                join_units(parts, unit.unit, whole, unit.page)
                target[start:stop] = whole[start:stop]
        self._settle(transfer, indexes, outcomes, inner.reason)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        unit = self._unit_form(objects.form)
        if unit is None or self._has_whole_pages:
            return self.inner.write(objects, source)
        source.check(objects, writable=False)
        if self._closed:
            return self._failed(objects, "write")
        transfer = Transfer(len(objects), self._transfer_counts, "write", objects.form.page_bytes)
        units, firsts = self._units(objects, unit)
        size = unit.form.page_bytes

        def work() -> None:
            scratch = aligned_bytes(size * len(units))
            for index, at in enumerate(source.starts.tolist()):
                first, last = int(firsts[index]), int(firsts[index + 1])
                parts = [scratch[number * size : (number + 1) * size] for number in range(first, last)]
                page = source.view[at : at + objects.form.page_bytes]
                split_units(page, unit.page, parts, unit.unit)
            inner = self.inner.write(units, Ranges(scratch, np.arange(len(units)) * size))
            self._wait(inner)
            outcomes = self._joined_outcomes(inner, firsts)
            self._settle(transfer, np.arange(len(objects)), outcomes, inner.reason)

        return self._submit(transfer, work)

    @staticmethod
    def _joined_outcomes(inner: Transfer, firsts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Return the outcome of each object. The outcome is OK if all units of the object are OK. Otherwise it is
        the outcome of one unit that is not OK."""
        return np.maximum.reduceat(inner.results, firsts[:-1]) if len(firsts) > 1 else inner.results

    @staticmethod
    def _settle(
        transfer: Transfer, indexes: npt.NDArray[np.int64], outcomes: npt.NDArray[np.uint8], reason: str
    ) -> None:
        for outcome in np.unique(outcomes).tolist():
            transfer.settle(indexes[outcomes == outcome], Outcome(outcome), reason)

    def drop(self, objects: Objects) -> int:
        unit = self._unit_form(objects.form)
        if unit is None or self._has_whole_pages:
            return self.inner.drop(objects)
        found = int(self.lookup(objects).sum())
        self.inner.drop(self._units(objects, unit)[0])
        return found
