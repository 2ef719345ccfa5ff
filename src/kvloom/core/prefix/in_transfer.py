"""Pages in transfer: reservations that a load job fills, and offload batches that a tier reads.

Reservations and batches retain their pages. The bytes of these pages are charged to the tenant. Compaction must not
move pages that a transfer reads or writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.tenants import Accounts
from kvloom.core.layout.pool_layout import PageGroup
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .node import Node, Root
from .offload_batch import OffloadBatch
from .owners import BlockOwners

__all__ = ["Mask", "PagesInTransfer", "Reservation"]

Mask = npt.NDArray[np.bool_]


class Reservation:
    """The pages reserved for one prompt: cached pages, and pages that a load job fills.

    | field           | meaning                                                                         |
    |-----------------|---------------------------------------------------------------------------------|
    | `data`          | token ids of the prompt, as bytes                                               |
    | `resume`        | position at which the prompt can resume after the load                          |
    | `end`           | position at which the pages end, at or after `resume`                           |
    | `rows`          | page ids, one row per block                                                     |
    | `hashes`        | hash of each block                                                              |
    | `to_load`       | marks the pages in `rows` that the load job must fill                           |
    | `states`        | page ids of the state snapshot, or None                                         |
    | `state_hash`    | hash of the snapshot                                                            |
    | `state_account` | account of the snapshot                                                         |
    | `node`          | node after which the pages are published when the load has ended. It is locked  |
    |                 | until then                                                                      |
    """

    __slots__ = (
        "data",
        "end",
        "hashes",
        "node",
        "owners",
        "resume",
        "root",
        "rows",
        "state_account",
        "state_hash",
        "states",
        "to_load",
    )

    def __init__(
        self,
        data: bytes,
        resume: int,
        end: int,
        hashes: list[bytes],
        state_hash: bytes,
        root: Root,
        owners: BlockOwners,
        node: Node,
        rows: Ids,
        to_load: Mask,
    ) -> None:
        self.data, self.resume, self.end = data, resume, end
        self.hashes, self.state_hash = hashes, state_hash
        self.root, self.owners, self.node = root, owners, node
        self.rows, self.to_load = rows, to_load
        self.states: Ids | None = None
        self.state_account = owners.at(len(rows) - 1).account

    def pages(self, group: PageGroup) -> list[tuple[list[bytes], Ids]]:
        """Return the pages of a group that the load job must fill, as (hashes, page ids). There is one such pair
        for each page that a block owns in the group."""
        columns = range(group.columns.start, group.columns.stop)
        if group.spec.unit == "state":
            if self.states is None:
                return []
            return [([self.state_hash], self.states[:, c].copy()) for c in columns]
        found = []
        for column in columns:
            at = np.flatnonzero(self.to_load[:, column])
            found.append(([self.hashes[b] for b in at.tolist()], self.rows[at, column]))
        return found


class PagesInTransfer:
    """Owns the active reservations and the retained offload batches of one cache."""

    def __init__(self, pages: BlockPages, states: BlockPages, accounts: Accounts) -> None:
        self._pages, self._states, self._accounts = pages, states, accounts
        self._reservations: dict[int, Reservation] = {}
        self._batches: dict[int, OffloadBatch] = {}

    def retained(self) -> Iterator[tuple[BlockPages, Ids]]:
        """Yield the page ids of every reservation and batch. Compaction may move some of these pages, but not the pages
        that are pinned in place."""
        for reservation in self._reservations.values():
            yield self._pages, reservation.rows
            if reservation.states is not None:
                yield self._states, reservation.states
        for batch in self._batches.values():
            yield self._columns(batch), batch.rows

    def reservations(self) -> list[Reservation]:
        """Return the active reservations."""
        return list(self._reservations.values())

    def batches(self) -> list[OffloadBatch]:
        """Return the offload batches whose pages are retained."""
        return list(self._batches.values())

    def slabs_in_place(self) -> list[Counter[int]]:
        """Return, for each size class, how many pages of each slab are pinned in place. Counts them again for the
        integrity check."""
        counts: list[Counter[int]] = [Counter() for _ in self._pages.pool.classes]
        written = [self._to_fill(reservation) for reservation in self._reservations.values()]
        rows = [part for parts in written for part in parts]
        rows += [(self._columns(batch), batch.rows) for batch in self._batches.values()]
        for columns, ids_of in rows:
            for cls, ids in columns.by_class(ids_of):
                per_slab = columns.pool.classes[cls].per_slab
                if per_slab > 1:
                    counts[cls].update((ids[ids > 0] // per_slab).tolist())
        return counts

    def _columns(self, batch: OffloadBatch) -> BlockPages:
        return self._states if batch.numbering == "state" else self._pages

    def _to_fill(self, reservation: Reservation) -> list[tuple[BlockPages, Ids]]:
        parts = [(self._pages, np.where(reservation.to_load, reservation.rows, 0))]
        if reservation.states is not None:
            parts.append((self._states, reservation.states))
        return parts

    # -- reservations ---------------------------------------------------------------------------

    def add(self, reservation: Reservation) -> None:
        """Register a reservation. Call this method before the missing pages are allocated. Allocation may compact
        slabs, and then updates the page ids that the reservation already has."""
        self._reservations[id(reservation)] = reservation

    def remove(self, reservation: Reservation) -> None:
        """Unregister a reservation whose pages are not pinned in place."""
        del self._reservations[id(reservation)]

    def pin_in_place(self, reservation: Reservation, count: int) -> None:
        """Forbid compaction to move the pages that a transfer writes (`count` is 1), or allow the move again (`count`
        is -1)."""
        for columns, rows in self._to_fill(reservation):
            for cls, ids in columns.by_class(rows):
                columns.pool.pin_in_place(cls, ids[ids > 0], count)

    # -- offload batches ------------------------------------------------------------------------

    def retain_batch(self, batch: OffloadBatch) -> None:
        """Retain the pages of a batch and pin them in place."""
        columns = self._columns(batch)
        self._accounts[batch.tenant].retain(columns.retain(batch.rows))
        for cls, ids in columns.by_class(batch.rows):
            columns.pool.pin_in_place(cls, ids[ids > 0], 1)
        self._batches[id(batch)] = batch

    def release_batch(self, batch: OffloadBatch) -> None:
        """Release the pages of a retained batch."""
        del self._batches[id(batch)]
        columns = self._columns(batch)
        for cls, ids in columns.by_class(batch.rows):
            columns.pool.pin_in_place(cls, ids[ids > 0], -1)
        self._accounts[batch.tenant].release(*columns.release(batch.rows))
