"""Pending copies of pages inside the pool. The engine runs them before its next step. This module moves no bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core.eviction.tenants import Account

from .block_pages import BlockPages
from .page_pool import Ids, PagePool

__all__ = ["CopyBatch", "PendingCopies"]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Copies of page `source[i]` to page `target[i]`, all of one page size. Run batches in order, before the next
    step writes. The copies of one batch may run in parallel, because no page is both source and target.
    """

    page_stride: int
    source: Ids
    target: Ids


class PendingCopies:
    """The copies queued since the last `take`. Source pages keep their bytes until `take`, except in slabs that
    compaction emptied. An emptied slab can be reused at once. A copy that writes to an emptied slab is put into a later
    batch, because an earlier batch still reads the slab."""

    def __init__(self, pool: PagePool, slab_bytes: int) -> None:
        self._per_slab = [c.per_slab for c in pool.classes]
        self._pool = pool
        self._slab_bytes = slab_bytes
        self._pending: list[dict[int, int]] = [{} for _ in pool.classes]
        self._batches: list[CopyBatch] = []
        self._vacated: set[int] = set()
        self._retained: list[tuple[BlockPages, Ids, Account]] = []

    def add(self, cls: int, source: Ids, target: Ids) -> None:
        """Queue copies of pages of size class `cls`: page `source[i]` is copied to page `target[i]`."""
        if self._vacated and not self._vacated.isdisjoint((target // self._per_slab[cls]).tolist()):
            self._close_batch()
        pending = self._pending[cls]
        sources = source.tolist()
        if not pending.keys().isdisjoint(sources):
            # If a source is itself the target of a pending copy, the bytes are read from the source of that
            # copy.
            sources = [pending.get(src, src) for src in sources]
        pending.update(zip(target.tolist(), sources, strict=True))

    def add_rows(self, columns: BlockPages, source: Ids, target: Ids) -> None:
        """Queue copies of the pages of whole blocks: the pages `source[i]` are copied to the pages `target[i]`."""
        for (cls, sources), (_, targets) in zip(
            columns.by_class(source), columns.by_class(target), strict=True
        ):
            self.add(cls, sources, targets)

    def add_move(self, cls: int, source: Ids, target: Ids) -> None:
        """Queue copies that move pages of the size class with index `cls` out of slabs, from the ids `source` to the
        ids `target`. A copy that is queued later and writes to one of these slabs is put into a later batch."""
        self.add(cls, source, target)
        self._vacated.update((source // self._per_slab[cls]).tolist())

    def retain_sources(self, columns: BlockPages, rows: Ids, account: Account) -> None:
        """Take over the caller's references to the source pages `rows`. `take` releases these references, so the caller
        must not release them."""
        self._retained.append((columns, rows, account))

    def retained(self) -> list[tuple[BlockPages, Ids]]:
        """Return the ids of the source pages, which are in use until `take`."""
        return [(columns, rows) for columns, rows, _ in self._retained]

    def charged(self) -> list[tuple[Account, BlockPages, Ids]]:
        """Return the source pages with the accounts to which they are charged."""
        return [(account, columns, rows) for columns, rows, account in self._retained]

    def slabs(self) -> set[int]:
        """Return the slabs that pending copies read or write, including free slabs. O(copies)."""
        pages = [
            (cls, page) for cls, pairs in enumerate(self._pending) for pair in pairs.items() for page in pair
        ]
        slabs = {page // self._per_slab[cls] for cls, page in pages}
        for batch in self._batches:
            per_slab = self._slab_bytes // batch.page_stride
            slabs.update((batch.source // per_slab).tolist(), (batch.target // per_slab).tolist())
        return slabs

    def current_pages(self, columns: BlockPages, rows: Ids) -> Ids:
        """Return, for each page in `rows`, the id of the page that contains its bytes now. For the target of a pending
        copy, this is the source page. The id is 0 if the bytes exist only after an earlier batch of copies has run. The
        result is valid until `take`."""
        if not self._batches and not any(self._pending):
            return rows
        if not self._batches and len(self._pending) == 1:
            if self._pending[0].keys().isdisjoint(rows.ravel().tolist()):
                return rows  # the common case: no page is the target of a copy
        now = rows.copy()
        for cls in columns.classes:
            stride, pending = self._slab_bytes // self._per_slab[cls], self._pending[cls]
            unknown = {t for b in self._batches if b.page_stride == stride for t in b.target.tolist()}
            at = columns.columns_of(cls)
            pages = now[:, at].ravel().tolist()
            found = [
                pending.get(page, page) for page in pages
            ]  # a source page may itself be the target of a pending copy
            found = [0 if page in unknown else page for page in found]
            now[:, at] = np.array(found, np.int32).reshape(len(rows), len(at))
        return now

    def _close_batch(self) -> None:
        for cls, pending in enumerate(self._pending):
            if pending:
                target = np.fromiter(pending.keys(), np.int32, len(pending))
                source = np.fromiter(pending.values(), np.int32, len(pending))
                # Skip targets that were freed meanwhile, because the page may have another use now.
                counts = self._pool.classes[cls]
                live = (counts.in_use.take(target) | counts.cached.take(target)) > 0
                if not live.all():
                    source, target = source[live], target[live]
                stride = self._slab_bytes // self._per_slab[cls]
                self._batches.append(CopyBatch(stride, source, target))
                pending.clear()
        self._vacated.clear()

    def take(self) -> list[CopyBatch]:
        """Return the pending copies in order, and release their source pages."""
        self._close_batch()
        batches, self._batches = self._batches, []
        for columns, rows, account in self._retained:
            account.release(*columns.release(rows))
        self._retained.clear()
        return batches
