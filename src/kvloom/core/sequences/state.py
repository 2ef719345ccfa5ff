"""What the verbs of a cache share: its parts, and the few steps that all of them take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core.allocator import Allocator
from kvloom.core.clock import Clock
from kvloom.core.eviction.tenants import Account, Accounts
from kvloom.core.layout.pool_layout import PoolLayout
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.multimodal import Media, MediaIds, MediaRun
from kvloom.core.prefix.node import Checkpoint, Node
from kvloom.core.prefix.radix_tree import RadixTree

from .sequence import BlockTables, CheckpointPolicy, Sequence

__all__ = ["CacheState", "Rows", "SequenceOps"]

Rows = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CacheState:
    """One cache, taken apart."""

    layout: PoolLayout
    pages: BlockPages
    states: BlockPages
    media: BlockPages
    media_ids: MediaIds
    tree: RadixTree
    accounts: Accounts
    allocator: Allocator
    block_tables: BlockTables
    snapshots: CheckpointPolicy
    clock: Clock
    max_tokens: int


class SequenceOps:
    """The base of what a scheduler can do with sequences. Holds no state of its own."""

    def __init__(self, parts: CacheState) -> None:
        self.layout = parts.layout
        self.block_tokens = parts.layout.block_tokens
        self.pages = parts.pages
        self.states = parts.states
        self.media = parts.media
        self.media_ids = parts.media_ids
        self.tree = parts.tree
        self.accounts = parts.accounts
        self.allocator = parts.allocator
        self.block_tables = parts.block_tables
        self.snapshots = parts.snapshots
        self.clock = parts.clock
        self.max_tokens = parts.max_tokens
        self.has_states = bool(parts.states.width)

    def sequence(self, row: int) -> Sequence:
        seq = self.block_tables.sequences[row]
        if seq is None:
            raise ValueError(f"row {row} has no open sequence")
        return seq

    def ensure_open(self, seq: Sequence) -> None:
        try:
            if self.block_tables.sequences[seq.row] is seq:
                return
        except IndexError:  # it is another cache's, which has more rows
            pass
        raise ValueError(f"{seq!r} is not open in this cache")

    def release(self, account: Account, columns: BlockPages, rows: Ids) -> None:
        account.release(*columns.release(rows))

    def needs(self, rows: int, states: int, media: int) -> list[int]:
        needs = self.pages.needs(rows)
        if states:
            needs = [a + b for a, b in zip(needs, self.states.needs(states), strict=True)]
        if media:
            needs = [a + b for a, b in zip(needs, self.media.needs(media), strict=True)]
        return needs

    def visible_rows(self, rows: Ids, point: int) -> Ids:
        """A copy of `rows` without the pages that a query at `point` sees no more."""
        rows = rows.copy()
        for span, columns in zip(self.tree.windows, self.tree.window_columns, strict=True):
            rows[: span.first_visible(point) // self.block_tokens, columns] = 0
        return rows

    def set_window_edges(self, row: int, point: int) -> None:
        for window, span in enumerate(self.tree.windows):
            self.block_tables.first[window, row] = span.first_visible(point) // self.block_tokens

    def start_from(self, seq: Sequence, checkpoint: Checkpoint, now: float) -> None:
        assert checkpoint.states is not None
        seq.state_source = checkpoint.states.copy()
        seq.root.account.in_use += self.states.retain(seq.state_source)
        checkpoint.hits += 1
        checkpoint.ended = False
        seq.root.account.queue.policy.on_hit(checkpoint, now)
        checkpoint.last_used = now

    def retain_media(self, seq: Sequence, run: MediaRun, now: float) -> None:
        if run.key not in seq.media_runs:
            self.allocator.retain_media(run, now)
            seq.media_runs[run.key] = run

    def needs_run(self, item: Media, start: int, stop: int) -> bool:
        """Whether computing tokens [start, stop) takes an image's run of pages of its own."""
        has = bool(item.tokens and self.media.width)
        return has and item.start < stop and (self.allocator.media_outlives_prompt or item.stop > start)

    def mark_special(self, seq: Sequence) -> None:
        """Note whether a sequence must be served one by one: it has something to copy, to be given, or
        images ahead."""
        row = seq.row
        special = seq.shared_tail or (self.has_states and not self.block_tables.states[0, row])
        if seq.media and not special:
            special = any(item.stop > self.block_tables.length[row] for item in seq.media)
        self.block_tables.special[row] = special

    @staticmethod
    def path(node: Node) -> list[Node]:
        """The nodes from the root (left out) down to `node`."""
        path = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            path.append(current)
            current = current.parent
        return path[::-1]
