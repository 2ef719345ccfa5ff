"""Copies of pages inside the pool, decided now and made by the engine before its next step. No bytes are here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvloom.core.eviction.tenants import Account

from .block_pages import BlockPages
from .page_pool import Ids, PagePool

__all__ = ["CopyBatch", "PendingCopies"]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Pages to copy inside the pool: page `source[i]` to page `target[i]`, ids of one page size.

    To run before the next step writes anything, batch after batch. Within a batch no page is both a
    source and a target, so its copies may run at once.
    """

    page_stride: int
    source: Ids
    target: Ids


class PendingCopies:
    """Copies decided since the engine last took them. Their sources stay as they are until then, but
    for pages that were moved: a later copy into a slab that moved pages came from goes into a later
    batch."""

    def __init__(self, pool: PagePool, slab_bytes: int) -> None:
        self._per_slab = [c.per_slab for c in pool.classes]
        self._pool = pool
        self._slab_bytes = slab_bytes
        self._pending: list[dict[int, int]] = [{} for _ in pool.classes]
        self._batches: list[CopyBatch] = []
        self._vacated: set[int] = set()
        self._held: list[tuple[BlockPages, Ids, Account]] = []

    def add(self, cls: int, source: Ids, target: Ids) -> None:
        if self._vacated and not self._vacated.isdisjoint((target // self._per_slab[cls]).tolist()):
            self._close_batch()
        pending = self._pending[cls]
        sources = source.tolist()
        if not pending.keys().isdisjoint(sources):
            # A source that is itself still to be written is read where its bytes are now.
            sources = [pending.get(src, src) for src in sources]
        pending.update(zip(target.tolist(), sources, strict=True))

    def add_rows(self, columns: BlockPages, source: Ids, target: Ids) -> None:
        for cls in columns.classes:
            at = columns.columns_of(cls)
            self.add(cls, source[:, at].ravel(), target[:, at].ravel())

    def add_move(self, cls: int, source: Ids, target: Ids) -> None:
        """Pages leave a slab that may be lent again at once."""
        self.add(cls, source, target)
        self._vacated.update((source // self._per_slab[cls]).tolist())

    def retain_sources(self, columns: BlockPages, rows: Ids, account: Account) -> None:
        """Take over a hold on source pages."""
        self._held.append((columns, rows, account))

    def retained_sources(self) -> list[tuple[BlockPages, Ids]]:
        return [(columns, rows) for columns, rows, _ in self._held]

    def slabs(self) -> set[int]:
        """Slabs that copies yet to be taken may read or write, free ones among them. O(copies)."""
        pages = [
            (cls, page) for cls, pairs in enumerate(self._pending) for pair in pairs.items() for page in pair
        ]
        slabs = {page // self._per_slab[cls] for cls, page in pages}
        for batch in self._batches:
            per_slab = self._slab_bytes // batch.page_stride
            slabs.update((batch.source // per_slab).tolist(), (batch.target // per_slab).tolist())
        return slabs

    def current_pages(self, columns: BlockPages, rows: Ids) -> Ids:
        """Where the bytes of pages are now, while copies are still to be made; 0 where that cannot be said. It holds until
        they are made, whatever is decided meanwhile."""
        if not self._batches and not any(self._pending):
            return rows
        if not self._batches and len(self._pending) == 1:
            if self._pending[0].keys().isdisjoint(rows.ravel().tolist()):
                return rows  # so mostly: a few copies are to be made, and much leaves
        now = rows.copy()
        for cls in columns.classes:
            stride, pending = self._slab_bytes // self._per_slab[cls], self._pending[cls]
            unsure = {t for b in self._batches if b.page_stride == stride for t in b.target.tolist()}
            at = columns.columns_of(cls)
            pages = now[:, at].ravel().tolist()
            found = [pending.get(page, page) for page in pages]  # which may itself be still to be written
            found = [0 if page in unsure else page for page in found]
            now[:, at] = np.array(found, np.int32).reshape(len(rows), len(at))
        return now

    def _close_batch(self) -> None:
        for cls, pending in enumerate(self._pending):
            if pending:
                target = np.fromiter(pending.keys(), np.int32, len(pending))
                source = np.fromiter(pending.values(), np.int32, len(pending))
                # What was let go before it was written is not: its bytes may be someone else's now.
                counts = self._pool.classes[cls]
                live = (counts.in_use[target] > 0) | (counts.cached[target] > 0)
                stride = self._slab_bytes // self._per_slab[cls]
                self._batches.append(CopyBatch(stride, source[live], target[live]))
                pending.clear()
        self._vacated.clear()

    def take(self) -> list[CopyBatch]:
        self._close_batch()
        batches, self._batches = self._batches, []
        for columns, rows, account in self._held:
            account.release(*columns.release(rows))
        self._held.clear()
        return batches
