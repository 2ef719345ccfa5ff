"""Cold blocks: the oldest blocks of a running sequence, whose full-attention pages are in host memory.

    block      0 … cold - 1         cold … blocks - 1
    pages      in host memory       in the pool            groups with full attention
               none                 inside the window      groups with a window: they drop pages by themselves

Attention reads both parts and joins them. The sequence owns its cold runs: closing it releases them. A sequence with
cold blocks leaves the radix tree, because a path of the tree has no gaps: its next blocks are not published.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvloom.core.pool.page_pool import Ids
from kvloom.core.state import CacheState

from .sequence import ColdRun, Sequence, ensure_open

__all__ = ["add_cold_run", "coldable_pages", "open_cold"]


def coldable_pages(state: CacheState, seq: Sequence, most: int) -> Ids:
    """Return the page ids of up to `most` next blocks that can become cold, [blocks, columns]; 0 in columns of windows.

    These are full and computed. Pending copies may still write to them: make those first."""
    ensure_open(state, seq)
    table, first = state.block_tables, seq.cold_blocks
    last = min(first + most, table.length.item(seq.row) // state.block_tokens)
    rows = np.zeros((max(0, last - first), state.pages.width), np.int32)
    rows[:, state.full_columns] = table.tables[state.full_columns, seq.row, first : first + len(rows)].T
    return rows


def add_cold_run(state: CacheState, seq: Sequence, run: ColdRun) -> None:
    """Make the next blocks of a sequence cold: `run` has their bytes. Releases their pages in the pool."""
    rows = coldable_pages(state, seq, len(run.pages))
    if len(rows) < len(run.pages):
        raise ValueError(
            f"{len(run.pages)} blocks cannot become cold: only {len(rows)} are full and computed"
        )
    _leave_tree(state, seq)
    state.release(seq.root.account, state.pages, rows)
    first = seq.cold_blocks
    state.block_tables.tables[state.full_columns, seq.row, first : first + len(rows)] = 0
    seq.cold_runs.append(run)
    seq.cold_blocks += len(rows)


def open_cold(state: CacheState, seq: Sequence, run: ColdRun) -> None:
    """Start an empty sequence behind cold blocks: `run` has all bytes before its first token to compute.

    Raises ValueError if the model has windows or states: their pages would be missing."""
    ensure_open(state, seq)
    table, row, blocks = state.block_tables, seq.row, len(run.pages)
    if state.tree.needs_checkpoints or table.blocks.item(row):
        raise ValueError(
            f"{seq!r} cannot start behind cold blocks: it has pages, or its model has windows or states"
        )
    _leave_tree(state, seq)
    table.blocks[row] = blocks
    table.length[row] = table.state_length[row] = seq.published = seq.resumed = blocks * state.block_tokens
    seq.cold_runs.append(run)
    seq.cold_blocks = blocks


def _leave_tree(state: CacheState, seq: Sequence) -> None:
    """Publish no more blocks of a sequence, and unlock its path."""
    if seq.control.store:
        seq.control = replace(seq.control, store=False)
    if seq.node is not seq.root:
        state.tree.lock(seq.root)
        state.tree.unlock(seq.node, state.clock.now())
        seq.node = seq.root
