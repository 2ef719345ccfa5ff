"""A tier that converts pages to float32 values, and stores the values in a lossy tier. Servers with different KV dtypes
can share the lossy tier.

    caller   pages in the KV dtype of the server    for example bf16, or int8 with scales
    inner    the values of the pages in float32     one form for all KV dtypes; `LossyTier` re-encodes them

The inner tier is lossy, so only requests that accept lossy pages read from it. `encoding/page_values.py` has the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .aligned_memory import aligned_bytes
from .encoding import PageValues
from .tier import Form, Objects, Ranges, Tier, part_range
from .transfer import Transfer
from .wrapped_tier import WrappedTier

__all__ = ["ValueForm", "ValueTier"]


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How a ValueTier stores the pages of one form (byte layout). `values` converts a page to float32 values and
    back. `form` is the form of these values, in which the inner tier receives them."""

    form: Form
    values: PageValues


class ValueTier(WrappedTier):
    """Stores pages in the lossy tier `inner`. Pages whose form is in `forms` are stored as values. Other pages are
    stored unchanged."""

    def __init__(self, inner: Tier, forms: Mapping[Form, ValueForm], threads: int = 2) -> None:
        if not inner.is_lossy:
            raise ValueError(
                f"{inner.name} stores exact pages; their values in another KV dtype are not exact"
            )
        super().__init__(inner, threads)
        self._forms = dict(forms)

    def _stored(self, objects: Objects) -> tuple[Objects, PageValues | None]:
        """Return the objects as the inner tier stores them, and the converter of their pages. The converter is
        None if pages are stored unchanged.
        """
        found = self._forms.get(replace(objects.form, exact=True))
        if found is None:
            return objects, None
        form = replace(found.form, exact=objects.form.exact)
        return Objects(objects.block_hashes, objects.group, form, objects.tenant), found.values

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        return self.inner.lookup(self._stored(objects)[0])

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        stored, values = self._stored(objects)
        if values is None:
            return self.inner.read(objects, into, part)
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        page_bytes, size = objects.form.page_bytes, stored.form.page_bytes

        def work() -> None:
            scratch = aligned_bytes(size * len(objects))
            inner = self.inner.read(stored, Ranges(scratch, np.arange(len(objects)) * size))
            self._wait(inner)
            page = memoryview(bytearray(page_bytes))
            for index in np.flatnonzero(inner.ok).tolist():
                at = int(into.starts[index])
                values.fill(page, scratch[index * size : (index + 1) * size])
                into.view[at + start : at + stop] = page[start:stop]
            self._copy_outcomes(inner, transfer)

        return self._submit(transfer, work)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        stored, values = self._stored(objects)
        if values is None:
            return self.inner.write(objects, source)
        source.check(objects, writable=False)
        transfer = Transfer(len(objects), self._transfer_counts, "write", objects.form.page_bytes)
        size = stored.form.page_bytes

        def work() -> None:
            scratch = aligned_bytes(size * len(objects))
            for index, at in enumerate(source.starts.tolist()):
                page = source.view[at : at + objects.form.page_bytes]
                values.read(page, scratch[index * size : (index + 1) * size])
            inner = self.inner.write(stored, Ranges(scratch, np.arange(len(objects)) * size))
            self._wait(inner)
            self._copy_outcomes(inner, transfer)

        return self._submit(transfer, work)

    def drop(self, objects: Objects) -> int:
        return self.inner.drop(self._stored(objects)[0])
