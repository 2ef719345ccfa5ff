"""Cold blocks: the oldest blocks of a running sequence, whose full-attention pages are in host memory.

    block      0 … cold - 1         cold … blocks - 1
    pages      in host memory       in the pool            groups with full attention
               none                 inside the window      groups with a window: their old pages are released

Attention reads the pages in host memory and in the pool, and combines the results. Consecutive blocks
that became cold together are a cold run. The sequence owns its cold runs and releases them when it closes.
A sequence with cold blocks leaves the radix tree and publishes no further blocks, because a path of the
tree must not have gaps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvloom.core.pool.page_pool import Ids
from kvloom.core.state import CacheState

from .sequence import ColdRun, Sequence, ensure_open, mark_special

__all__ = ["ColdBlocks"]


class ColdBlocks:
    """The cold blocks of the sequences of one cache (`cache.cold`). Not thread-safe, like the cache."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    @property
    def columns(self) -> npt.NDArray[np.intp]:
        """The columns of the block tables that belong to token groups with full attention. Only the pages in these
        columns can become cold."""
        return self._state.full_columns

    def next_pages(self, seq: Sequence, most: int) -> Ids:
        """Return the page ids of the next blocks that can become cold (move to host memory), at most `most` blocks.
        The result is indexed [blocks, columns]. A column is one of the pages that a block owns. Columns of windowed
        groups contain 0.

        These blocks are full, and all layers have computed them, including recurrent layers. All later queries are
        therefore at positions after the cold tokens. Run the pending copies before you read the pages.
        """
        state = self._state
        ensure_open(state, seq)
        table, first = state.block_tables, seq.cold_blocks
        computed = min(table.length.item(seq.row), table.state_length.item(seq.row))
        last = min(first + most, computed // state.block_tokens)
        rows = np.zeros((max(0, last - first), state.pages.width), np.int32)
        rows[:, state.full_columns] = table.tables[state.full_columns, seq.row, first : first + len(rows)].T
        return rows

    def add_run(self, seq: Sequence, run: ColdRun) -> None:
        """Record that the next blocks of a sequence are cold, and release their pages in the pool. The caller has
        already copied these blocks to the pages `run` in host memory. From now on the sequence publishes no blocks, and
        attention must read the cold blocks from host memory."""
        state = self._state
        rows = self.next_pages(seq, len(run.pages))
        if len(rows) < len(run.pages):
            raise ValueError(
                f"{len(run.pages)} blocks cannot become cold: only {len(rows)} are full and computed"
            )
        _leave_tree(state, seq)
        first = seq.cold_blocks
        seq.owners.release(state.pages, rows, first)
        state.block_tables.tables[state.full_columns, seq.row, first : first + len(rows)] = 0
        seq.cold_runs.append(run)
        seq.cold_blocks += len(rows)

    def open(self, seq: Sequence, run: ColdRun, position: int, tail: Ids) -> bool:
        """Start an empty sequence at `position`, after the cold blocks of `run`. `run` must contain all full blocks before
        `position`. If the pool lacks pages, returns False and changes nothing.

        Allocates the current states of recurrent layers, the window pages that a query at `position` sees, and the partial
        block with the tokens `tail`. The caller must write all of them.
        """
        state = self._state
        ensure_open(state, seq)
        table, row, block = state.block_tables, seq.row, state.block_tokens
        if table.blocks.item(row) or len(run.pages) != position // block or len(tail) != position % block:
            raise ValueError(
                f"{seq!r} cannot start at {position} after {len(run.pages)} cold blocks and {len(tail)} tokens; "
                f"give an empty sequence, {position // block} blocks and {position % block} tokens"
            )
        rows = state.tree.visible_rows(
            np.ones((-(-position // block), state.pages.width), np.int32), position
        )
        rows[: len(run.pages), state.full_columns] = 0
        needs = state.needs(0, int(state.has_states), 0)
        for cls, wanted in state.pages.by_class(rows):
            needs[cls] += int(wanted.sum())
        public = state.pages.bytes_of(rows[: seq.owners.public_blocks])
        if state.allocator.free_pages(seq.owners.account, needs):
            return False
        seq.owners.charge(state.allocator.bytes_of(needs), public)
        for cls in state.pages.classes:
            at = state.pages.columns_of(cls)
            part = rows[:, at]
            ids = state.pool.allocate(cls, int(part.sum()))
            assert ids is not None
            part[part > 0] = ids
            rows[:, at] = part
        seq.owners.borrow(state.pages, rows)
        if state.has_states:
            table.states[:, row] = state.states.allocate(1)[0]
        _leave_tree(state, seq)
        table.tables[:, row, : len(rows)] = rows.T
        table.blocks[row] = len(rows)
        table.length[row] = table.state_length[row] = seq.resumed = position
        table.tail[row, : len(tail)] = tail
        seq.published = position - len(tail)
        seq.cold_runs, seq.cold_blocks = [run], len(run.pages)
        state.set_window_edges(row, position)
        table.mark_changed(row, 0)
        mark_special(state, seq)
        return True


def _leave_tree(state: CacheState, seq: Sequence) -> None:
    """Stop publishing blocks of a sequence, and unlock its path in the tree."""
    if seq.control.store:
        seq.control = replace(seq.control, store=False)
    if seq.node is not seq.root:
        state.tree.lock(seq.root)
        state.tree.unlock(seq.node, state.clock.now())
        seq.node = seq.root
