"""Compaction moves pages out of a partly used slab, so that the slab becomes free for another page size.

Only slabs of several pages can be compacted. A moved page gets a new id. Compaction updates the id in the owners of
the page, the block tables and every page holder at once. The engine copies the bytes before its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .block_pages import BlockPages, PageHolder, PageOwner
from .block_tables import BlockTables
from .page_pool import Ids, PagePool
from .pending_copies import PendingCopies

__all__ = ["Compaction"]


class Compaction:
    """Moves pages of one pool. `holders` are objects that retain pages outside the block tables. After a move,
    `on_move` is called with a dictionary from the old to the new number of each page (`PagePool.numbers`)."""

    def __init__(
        self,
        pool: PagePool,
        pages: BlockPages,
        states: BlockPages,
        media: BlockPages,
        tables: BlockTables,
        copies: PendingCopies,
        holders: Sequence[PageHolder],
        block_tokens: int,
        on_move: Callable[[dict[int, int]], None],
    ) -> None:
        self._pool = pool
        self._pages, self._states, self._media = pages, states, media
        self._tables = tables
        self._copies = copies
        self._holders = (*holders, copies)
        self._block_tokens = block_tokens
        self._on_move = on_move
        self.is_possible = any(c.per_slab > 1 for c in pool.classes)
        """Whether a slab can have several pages, so that compaction is possible."""
        self.moved_pages = 0

    def compact_one_slab(self, cheaply: bool) -> bool:
        """Move all pages out of one partly used slab, so that it becomes free. Return whether a slab was emptied.
        With `cheaply`, a slab is emptied only if at most half of its pages are in use or cached."""
        for c in self._pool.classes:
            if c.per_slab == 1 or not c.free_pages:
                continue
            slab = self._pool.movable(c.index)
            if slab is None or (cheaply and 2 * int(c.used[slab]) > c.per_slab):
                continue
            self._pool.move_out(c.index, slab, partial(self.renumber, c.index))
            return True
        return False

    def renumber(self, cls: int, old: Ids, new: Ids) -> None:
        """Replace the page ids `old` by `new` in all references, and queue the copies of the pages. `cls` is the index
        of the size class of the pages."""
        self.moved_pages += old.size
        self._copies.add_move(cls, old, new)
        new_of = dict(zip(old.tolist(), new.tolist(), strict=True))
        numbers = self._pool.numbers(cls, old), self._pool.numbers(cls, new)
        self._on_move(dict(zip(*numbers, strict=True)))
        for columns in (self._pages, self._states, self._media):
            owners = columns.owners.get(cls)
            if owners is None:
                continue
            at = columns.columns_of(cls)
            for page, target in new_of.items():
                owner: PageOwner | None = owners.item(page)
                owners[page], owners[target] = None, owner
                if owner is not None:
                    owner.replace_page(at, page, target, self._block_tokens)
        in_use = self._pool.classes[cls].in_use[old] > 0
        if in_use.any():
            order = np.argsort(old[in_use])
            self._renumber_in_use(cls, old[in_use][order], new[in_use][order])

    def _renumber_in_use(self, cls: int, old: Ids, new: Ids) -> None:
        """Replace the sorted page ids `old` by `new` in block tables, sequences and page holders. `cls` is the index of
        the size class of the pages."""

        def replace(columns: BlockPages, array: Ids) -> bool:
            if cls not in columns.classes:
                return False
            at = columns.columns_of(cls)
            part = array[:, at]
            place = np.minimum(np.searchsorted(old, part), old.size - 1)
            hit = old[place] == part
            if hit.any():
                array[:, at] = np.where(hit, new[place], part)
            return bool(hit.any())

        tables = self._tables
        if cls in self._pages.classes:
            for column in self._pages.columns_of(cls).tolist():
                # All sequences at once, because hundreds of sequences may share a page. Unused row numbers have no
                # page ids.
                table = tables.tables[column, :, : int(tables.blocks.max())]
                at = np.nonzero((table >= old[0]) & (table <= old[-1]))
                place = np.searchsorted(old, table[at])
                hit = old[place] == table[at]
                at = at[0][hit], at[1][hit]
                table[at] = new[place[hit]]
                tables.mark_each_changed(*at)
        if cls in self._states.classes or cls in self._media.classes:
            for row, sequence in tables.open_sequences():
                moved = replace(self._states, tables.states[:, row][None])
                for columns, rows in sequence.retained():
                    moved |= replace(columns, rows)
                if moved:
                    tables.mark_changed(row, 0)
        for holder in self._holders:
            for columns, rows in holder.retained():
                replace(columns, rows)
