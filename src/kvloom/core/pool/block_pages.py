"""Rows of page ids over the pool: what a block, a state or a block of an image has of each page size.

Knows which column is of which size, adds up bytes for the accounts, and remembers who keeps a page
where slabs hold several (only there can pages move). Knows no tokens and no policies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .page_pool import Ids, PagePool

__all__ = ["BlockPages"]


class BlockPages:
    """The pool as one numbering sees it: rows of page ids, one column a page of a block, 0 for none.

    Adds up bytes, so that accounts can be charged, and remembers who keeps a page where slabs hold
    several (only there can pages move).
    """

    def __init__(self, pool: PagePool, classes: Sequence[int], slab_bytes: int) -> None:
        self.pool = pool
        self.width = len(classes)
        self.classes = tuple(dict.fromkeys(classes))
        self._columns = {c: np.flatnonzero(np.array(classes) == c) for c in self.classes}
        self._strides = {c: slab_bytes // pool.classes[c].per_slab for c in self.classes}
        self.row_bytes = sum(self._strides[c] for c in classes)
        self._single_class = self.classes[0] if len(self.classes) == 1 else None
        """The one page size there is, where there is one: most models have no other."""
        self.owners: dict[int, npt.NDArray[np.object_]] = {
            c: np.empty(pool.reserved * pool.classes[c].per_slab, object)
            for c in self.classes
            if pool.classes[c].per_slab > 1
        }

    def needs(self, rows: int) -> list[int]:
        """Pages of each of the pool's classes in `rows` rows."""
        needs = [0] * len(self.pool.classes)
        if self._single_class is not None:
            needs[self._single_class] = rows * self.width
        else:
            for c in self.classes:
                needs[c] = rows * len(self._columns[c])
        return needs

    def by_class(self, rows: Ids) -> list[tuple[int, Ids]]:
        """The page ids of `rows` for each size class, zeros included."""
        if self._single_class is not None:
            return [(self._single_class, rows.ravel())]
        return [(c, rows[:, self._columns[c]].ravel()) for c in self.classes]

    def allocate(self, n: int, near: Ids | None = None) -> Ids:
        """`n` rows of fresh pages; the caller has made sure that they are there."""
        if self._single_class is not None and near is None:
            ids = self.pool.allocate(self._single_class, n * self.width)
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
        """Hold every page of `rows`; returns the bytes that nobody held before."""
        if self._single_class is not None:
            return self.pool.retain(self._single_class, rows.ravel()) * self._strides[self._single_class]
        return sum(self.pool.retain(c, ids) * self._strides[c] for c, ids in self.by_class(rows))

    def release(self, rows: Ids) -> tuple[int, int]:
        """Let go of every page; returns the bytes that nobody holds now, and those of them now free."""
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

    def add_cached(self, rows: Ids, keeper: object) -> None:
        """The cache keeps every page of `rows` for `keeper`."""
        if self._single_class is not None and not self.owners:
            self.pool.add_cached(self._single_class, rows.ravel())
            return
        for c, ids in self.by_class(rows):
            self.pool.add_cached(c, ids)
            if c in self.owners:
                self.owners[c][ids[ids > 0]] = keeper

    def own(self, rows: Ids, keeper: object) -> None:
        """Pages already kept change their keeper."""
        for c, keepers in self.owners.items():
            ids = rows[:, self._columns[c]].ravel()
            keepers[ids[ids > 0]] = keeper

    def drop_cached(self, rows: Ids) -> int:
        """The cache lets go; returns the bytes now free."""
        if self._single_class is not None and not self.owners:
            return self.pool.drop_cached(self._single_class, rows.ravel()) * self._strides[self._single_class]
        freed = 0
        for c, ids in self.by_class(rows):
            freed += self.pool.drop_cached(c, ids) * self._strides[c]
            if c in self.owners:
                self.owners[c][ids] = None
        return freed

    def orphans(self, rows: Ids) -> list[tuple[int, int]]:
        """Pages of `rows` that are still kept, but whose keeper let go: (class, page) each."""
        return [
            (c, page)
            for c in self.owners
            for page in rows[:, self._columns[c]].ravel().tolist()
            if page and self.pool.classes[c].cached[page] and self.owners[c][page] is None
        ]

    def shared(self, rows: Ids) -> bool:
        """Whether anyone but the one who asks (and holds them once) could read a page of `rows`."""
        classes = self.pool.classes
        return any(
            bool((classes[c].in_use[ids] > 1).any() or (classes[c].cached[ids] > 0).any())
            for c, ids in ((c, ids[ids > 0]) for c, ids in self.by_class(rows))
        )

    def columns_of(self, cls: int) -> npt.NDArray[np.intp]:
        return self._columns[cls]

    def in_use(self, rows: Ids, column: int) -> npt.NDArray[np.bool_]:
        """Which rows someone holds, judged by one column."""
        c = next(c for c in self.classes if column in self._columns[c])
        return self.pool.classes[c].in_use[rows[:, column]] > 0
