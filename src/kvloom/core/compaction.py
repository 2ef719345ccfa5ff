"""Moving pages together, so that a partly used slab comes free for another page size.

Only where slabs hold several pages. A page that moves gets another id: the cache's own rows, the tables of
sequences, pins and arrivals follow at once, and the bytes by a copy that the engine makes before its next step.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .loading.reservation import Reservations
from .pool.block_pages import BlockPages
from .pool.page_pool import Ids, Index
from .prefix.multimodal import MediaRun
from .prefix.node import Checkpoint, Node, nodes_sharing_block
from .sequences.pins import Pins
from .sequences.state import CacheState, SequenceOps

__all__ = ["Compaction"]


class Compaction(SequenceOps):
    def __init__(self, parts: CacheState, hints: Pins, arrivals: Reservations) -> None:
        super().__init__(parts)
        self.pins = hints
        self.reservations = arrivals

    def compact_one_slab(self, cheaply: bool) -> bool:
        """Empty one partly used slab by moving its pages to others. Cheaply: only if it is mostly free."""
        pool = self.allocator.pool
        for c in pool.classes:
            if c.per_slab == 1 or not c.free_pages:
                continue
            slab = pool.movable(c.index)
            if slab is None or (cheaply and 2 * int(c.used[slab]) > c.per_slab):
                continue
            pool.move_out(c.index, slab, partial(self.renumber, c.index))
            return True
        return False

    def renumber(self, cls: int, old: Ids, new: Ids) -> None:
        """Pages `old` of a size class are now `new`: whoever names them follows."""
        self.allocator.moved_pages += old.size
        self.tree.version += 1
        self.allocator.copies.add_move(cls, old, new)
        new_of = dict(zip(old.tolist(), new.tolist(), strict=True))
        for columns in (self.pages, self.states, self.media):
            keepers = columns.owners.get(cls)
            if keepers is None:
                continue
            for page, target in new_of.items():
                keeper = keepers[page]
                keepers[page], keepers[target] = None, keeper
                at = columns.columns_of(cls)
                if isinstance(keeper, Node):
                    # A page stands in one node, or in some of those that meet it inside a block.
                    for node in (keeper, *nodes_sharing_block(keeper, self.block_tokens)):
                        _renumber(node.pages[: node.count], at, page, target)
                elif isinstance(keeper, Checkpoint) and keeper.states is not None:
                    _renumber(keeper.states, at, page, target)
                elif isinstance(keeper, MediaRun):
                    _renumber(keeper.rows, at, page, target)
        held = self.allocator.pool.classes[cls].in_use[old] > 0  # by whom the tables are
        if held.any():
            order = np.argsort(old[held])
            self._follow_tables(cls, old[held][order], new[held][order])

    def _follow_tables(self, cls: int, old: Ids, new: Ids) -> None:
        """Every table that names pages `old` (in order) follows."""

        def follow(columns: BlockPages, array: Ids) -> bool:
            if cls not in columns.classes:
                return False
            at = columns.columns_of(cls)
            part = array[:, at]
            place = np.minimum(np.searchsorted(old, part), old.size - 1)
            hit = old[place] == part
            if hit.any():
                array[:, at] = np.where(hit, new[place], part)
            return bool(hit.any())

        rows = self.block_tables
        if cls in self.pages.classes:
            for column in self.pages.columns_of(cls).tolist():
                # All rows at once, free ones being empty: there may be hundreds of them, and a page in many.
                table = rows.tables[column, :, : int(rows.blocks.max())]
                at = np.nonzero((table >= old[0]) & (table <= old[-1]))
                place = np.searchsorted(old, table[at])
                hit = old[place] == table[at]
                at = at[0][hit], at[1][hit]
                table[at] = new[place[hit]]
                rows.mark_each_changed(*at)
        for row in rows.open_rows() if cls in self.states.classes or cls in self.media.classes else ():
            seq = self.sequence(row)
            moved = follow(self.states, rows.states[:, row][None])
            for run in seq.media_runs.values():
                if not isinstance(run, MediaRun):
                    moved |= follow(self.media, run)
            if seq.state_source is not None:
                follow(self.states, seq.state_source)
            if moved:
                rows.mark_changed(row, 0)
        for pin in self.pins.pins():
            follow(self.pages, pin.rows)
            if pin.states is not None:
                follow(self.states, pin.states)
        for arrival in self.reservations.active():
            follow(self.pages, arrival.rows)  # those it shares with the tree: what is written to stays
        for columns, held in self.allocator.copies.retained_sources():
            follow(columns, held)


def _renumber(rows: Ids, columns: Index, page: int, target: int) -> None:
    """Replace a page id in some columns; ids of other page sizes stand in the others."""
    part = rows[:, columns]
    hit = part == page
    if hit.any():
        part[hit] = target
        rows[:, columns] = part
