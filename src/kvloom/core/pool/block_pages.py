"""The page ids of blocks, as arrays. A row of such an array contains the page ids of one block, one state
or one block of an image.

This module stores the size class of each column of a row, and converts pages to bytes for the accounts. It also records
the owner of cached pages, an entry of the prefix cache, if slabs have several pages. Compaction needs the owner to move
such a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .page_pool import Ids, Index, PagePool

__all__ = ["BlockPages", "PageHolder", "PageOwner", "replace_page"]


class PageOwner(Protocol):
    """An entry of the prefix cache that has arrays of page ids, one row per block."""

    def replace_page(self, columns: Index, page: int, target: int, block_tokens: int) -> None:
        """Replace the page id `page` by `target` in the given columns of the owner's page ids."""


class PageHolder(Protocol):
    """An object that retains pages outside the block tables: a pin, a load, a pending copy or a sequence."""

    def retained(self) -> Iterable[tuple[BlockPages, Ids]]:
        """Return all arrays of page ids that the object retains. Compaction may rewrite these arrays in place."""


def replace_page(rows: Ids, columns: Index, page: int, target: int) -> None:
    """Replace the page id `page` by `target` in the given columns of `rows`. In other columns, the same number may be
    the id of a page of another size class."""
    part = rows[:, columns]
    hit = part == page
    if hit.any():
        part[hit] = target
        rows[:, columns] = part


class BlockPages:
    """Access to the pool by arrays of page ids. Such an array has one row per block, and one column per page of a
    block. The argument `classes` has the size class of each column. The id 0 means no page. Token, state and media
    groups each have a separate `BlockPages`.
    """

    def __init__(self, pool: PagePool, classes: Sequence[int], slab_bytes: int) -> None:
        self.pool = pool
        self.width = len(classes)
        self._class_of_column = tuple(classes)
        self.classes = tuple(dict.fromkeys(classes))
        self._columns = {c: np.flatnonzero(np.array(classes) == c) for c in self.classes}
        self._strides = {c: slab_bytes // pool.classes[c].per_slab for c in self.classes}
        self.row_bytes = sum(self._strides[c] for c in classes)
        self._single_class = self.classes[0] if len(self.classes) == 1 else None
        """The size class of all columns, or None if the columns have different size classes."""
        self.owners: dict[int, npt.NDArray[np.object_]] = {
            c: np.empty(pool.reserved * pool.classes[c].per_slab, object)
            for c in self.classes
            if pool.classes[c].per_slab > 1
        }

    def needs(self, rows: int) -> list[int]:
        """Return the number of pages of each size class that `rows` blocks need."""
        needs = [0] * len(self.pool.classes)
        if self._single_class is not None:
            needs[self._single_class] = rows * self.width
        else:
            for c in self.classes:
                needs[c] = rows * len(self._columns[c])
        return needs

    def bytes_of(self, rows: Ids) -> int:
        """Return the number of bytes of all pages in `rows`. A page that occurs twice counts twice."""
        return sum(int(np.count_nonzero(ids)) * self._strides[c] for c, ids in self.by_class(rows))

    def numbers(self, rows: Ids) -> list[tuple[list[int], int]]:
        """Return the pages in `rows` by size class, as (numbers, bytes of one page). The number of a page is unique in
        the pool."""
        return [(self.pool.numbers(c, ids[ids > 0]), self._strides[c]) for c, ids in self.by_class(rows)]

    def by_class(self, rows: Ids) -> list[tuple[int, Ids]]:
        """Return (size class, page ids) for each size class. The ids of `rows` are flattened and include zeros."""
        if self._single_class is not None:
            return [(self._single_class, rows.ravel())]
        return [(c, rows[:, self._columns[c]].ravel()) for c in self.classes]

    def allocate(self, n: int, near: Ids | None = None) -> Ids:
        """Allocate the pages of `n` blocks, and return their ids with one row per block. The caller has checked
        that enough pages are free. The pool prefers pages in the slabs of `near`, the page ids of one block, so
        that the pages of a sequence stay together."""
        if self._single_class is not None:
            ids = self.pool.allocate(self._single_class, n * self.width, 0 if near is None else near.item(0))
            assert ids is not None
            return ids.reshape(n, self.width)
        rows = np.empty((n, self.width), np.int32)
        for c in self.classes:
            columns = self._columns[c]
            ids = self.pool.allocate(c, n * columns.size, 0 if near is None else int(near[columns[0]]))
            assert ids is not None
            rows[:, columns] = ids.reshape(n, columns.size)
        return rows

    def retain(self, rows: Ids) -> int:
        """Add one reference to every page in `rows`. Return the bytes of the pages that were cached before, and are
        now in use."""
        if self._single_class is not None:
            return self.pool.retain(self._single_class, rows.ravel()) * self._strides[self._single_class]
        return sum(self.pool.retain(c, ids) * self._strides[c] for c, ids in self.by_class(rows))

    def release(self, rows: Ids) -> tuple[int, int]:
        """Remove one reference from every page in `rows`. Return two numbers: the bytes of the pages that were in use
        and are now cached or free, and the bytes of those that are free."""
        if self._single_class is not None:
            stride = self._strides[self._single_class]
            idle, freed = self.pool.release(self._single_class, rows.ravel())
            return idle * stride, freed * stride
        idle_bytes = freed_bytes = 0
        for c, ids in self.by_class(rows):
            idle, freed = self.pool.release(c, ids)
            idle_bytes += idle * self._strides[c]
            freed_bytes += freed * self._strides[c]
        return idle_bytes, freed_bytes

    def add_cached(self, rows: Ids, owner: PageOwner | None) -> None:
        """Record that one more entry of the prefix cache, `owner`, refers to each page in `rows`."""
        if self._single_class is not None and not self.owners:
            self.pool.add_cached(self._single_class, rows.ravel())
            return
        for c, ids in self.by_class(rows):
            self.pool.add_cached(c, ids)
            if c in self.owners:
                self.owners[c][ids[ids > 0]] = owner

    def own(self, rows: Ids, owner: PageOwner) -> None:
        """Record `owner` as the owner of all cached pages in `rows`."""
        for c, owners in self.owners.items():
            ids = rows[:, self._columns[c]].ravel()
            owners[ids[ids > 0]] = owner

    def own_each(self, rows: Ids, owners: Sequence[PageOwner]) -> None:
        """Record `owners[i]` as the owner of all cached pages in `rows[i]`."""
        each = np.empty(len(rows), object)
        each[:] = owners
        for c, recorded in self.owners.items():
            ids = rows[:, self._columns[c]]
            row, column = ids.nonzero()
            recorded[ids[row, column]] = each[row]

    def set_owner(self, cls: int, page: int, owner: PageOwner) -> None:
        """Record `owner` as the owner of one cached page of size class `cls`."""
        self.owners[cls][page] = owner

    def drop_cached(self, rows: Ids) -> int:
        """Record that one prefix cache entry fewer refers to each page in `rows`. Return the number of bytes that are
        now free."""
        if self._single_class is not None and not self.owners:
            return self.pool.drop_cached(self._single_class, rows.ravel()) * self._strides[self._single_class]
        freed = 0
        for c, ids in self.by_class(rows):
            freed += self.pool.drop_cached(c, ids) * self._strides[c]
            if c in self.owners:
                self.owners[c][ids] = None
        return freed

    def orphans(self, rows: Ids) -> list[tuple[int, int]]:
        """Return the pages of `rows` that are cached but have no recorded owner, as (size class, page)."""
        return [
            (c, page)
            for c in self.owners
            for page in rows[:, self._columns[c]].ravel().tolist()
            if page and self.pool.classes[c].cached[page] and self.owners[c][page] is None
        ]

    def shared(self, rows: Ids) -> bool:
        """Return whether any page of `rows` is cached or has more than one reference."""
        classes = self.pool.classes
        return any(
            bool((classes[c].in_use[ids] > 1).any() or (classes[c].cached[ids] > 0).any())
            for c, ids in ((c, ids[ids > 0]) for c, ids in self.by_class(rows))
        )

    def columns_of(self, cls: int) -> Index:
        """Return the columns whose pages belong to size class `cls`."""
        return self._columns[cls]

    def in_use(self, rows: Ids, column: int) -> npt.NDArray[np.bool_]:
        """Return, for each row of `rows`, whether its page in `column` is in use."""
        in_use = self.pool.classes[self._class_of_column[column]].in_use
        return in_use.take(rows[:, column]) > 0
