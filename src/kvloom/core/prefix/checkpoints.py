"""The checkpoints of a radix tree: resumable positions, the window pages that they need, and unneeded window pages.

A checkpoint owns the state snapshot at its position and protects the window pages before it. `Node.checkpoint_counts`
is the number of checkpoints that need a page, by block and window. A window page is unneeded if this count is 0 and
the page is not in use. Unneeded pages are evicted first. This file handles pages and positions, but no tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

import numpy as np

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import PoolLayout
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .node import Checkpoint, Node, nodes_sharing_block
from .offload_batch import OffloadSource
from .publisher import EventPublisher

__all__ = ["Checkpoints"]


def _position(checkpoint: Checkpoint) -> int:
    return checkpoint.position


class Checkpoints:
    """The base class of `RadixTree`. Handles the checkpoints of its nodes, and the window pages and state snapshots
    that they need. The time of a call grows with the size of the window, not with the length of the prefix.
    """

    def __init__(
        self, layout: PoolLayout, pages: BlockPages, states: BlockPages, publisher: EventPublisher
    ) -> None:
        self.block = layout.block_tokens
        self.pages = pages
        self.states = states
        self.publisher = publisher
        self.events = publisher.events
        self.offload_source: OffloadSource | None = None
        self.has_states = bool(states.width)
        windowed = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self.windows: tuple[Visibility, ...] = tuple(g.spec.visibility for g in windowed)
        self.window_columns = tuple(g.columns for g in windowed)
        self.window_groups = tuple(g.index for g in windowed)
        self.needs_checkpoints = bool(self.windows) or self.has_states
        """Whether a prompt can resume only at checkpoints, because the model has windows or states."""
        self.version = 0  # increases when a path or its pages may have changed
        self.replaced = 0  # number of partial blocks whose pages were replaced by pages with more tokens
        self._serials = count(1)

    def set_offload_source(self, source: OffloadSource | None) -> None:
        """Set the object that builds offload batches. None removes it."""
        self.offload_source = source

    def invalidate_matches(self) -> None:
        """Mark every match as stale."""
        self.version += 1

    # -- resumable positions --------------------------------------------------------------------

    def last_resume(self, node: Node) -> int:
        """Return the deepest position in a leaf at which a prompt can resume. Return the start of the leaf if there is
        none."""
        if not self.needs_checkpoints:
            return node.end
        if not self.has_states and self.complete(node, node.end):
            return node.end
        return node.checkpoints[-1].position if node.checkpoints else node.start

    def presence(self, rows: Ids) -> list[tuple[Visibility, Ids]]:
        """Return, for each windowed group, its visibility and its page id for each block (0 for no page). `rows`
        has one row per block, with the page ids of all groups."""
        columns = (rows[:, c.start] for c in self.window_columns)
        return list(zip(self.windows, columns, strict=True))

    def visible_rows(self, rows: Ids, position: int) -> Ids:
        """Return a copy of `rows` (page ids, one row per block). Ids of pages that a query at `position` does not see
        are 0 in the copy."""
        rows = rows.copy()
        for visibility, columns in zip(self.windows, self.window_columns, strict=True):
            rows[: visibility.first_visible(position) // self.block, columns] = 0
        return rows

    def _window_rows(
        self, node: Node, position: int, window: int, query: int
    ) -> Iterator[tuple[Node, slice]]:
        """Yield `node` and its ancestors, each with a range of its blocks. The range contains the blocks that start
        before `position` and that the query at position `query` sees. Block numbers in the range count from the
        first block of the node. `window` is the index of the windowed group in `self.windows`."""
        first, last = self.windows[window].first_visible(query) // self.block, (position - 1) // self.block
        current: Node | None = node
        while current is not None and current.parent is not None and last >= first:
            base = current.start // self.block
            if base <= last:
                yield (
                    current,
                    slice(max(first, base) - base, min(last, (current.end - 1) // self.block) - base + 1),
                )
            if base < first or (base == first and current.start % self.block == 0):
                return
            current = current.parent

    def complete(self, node: Node, position: int, query: int | None = None) -> bool:
        """Return whether the tree has all window pages before `position` that a query at position `query` sees.
        `position` is in `node` or at its end. If `query` is None, the query is at `position`. If several nodes share a
        block, only the pages of the deepest of these nodes are tested."""
        block = self.block
        for visibility, columns in zip(self.windows, self.window_columns, strict=True):
            first = visibility.first_visible(position if query is None else query) // block
            stop = (position - 1) // block + 1  # blocks from `stop` on were tested in deeper nodes
            current: Node | None = node
            while first < stop and current is not None and current.parent is not None:
                base = current.start // block
                start = max(first, base)
                if np.count_nonzero(current.pages[start - base : stop - base, columns.start]) < stop - start:
                    return False
                stop = start
                current = current.parent
        return True

    # -- adding and dropping --------------------------------------------------------------------

    def checkpoint(self, node: Node, position: int, states: Ids | None, now: float) -> Checkpoint | None:
        """Add a checkpoint at `position` in `node` and return it. The pages in `states` become cached. Return None
        if the position already has a checkpoint, or if a window lacks a page.
        """
        existing = self.checkpoint_at(node, position)
        if existing is not None:
            existing.last_used = now
            return None
        # Protect the window of the query one token earlier, if possible. An identical prompt resumes there, because it
        # computes its last token again. This window includes the window of the query at `position`.
        reach = position - 1
        if not self.complete(node, position, reach):
            reach = position
            if not self.complete(node, position):
                return None
        checkpoint = Checkpoint(next(self._serials), now, node, position, states)
        checkpoint.reach = reach
        if states is not None:
            checkpoint.row_bytes = self.states.row_bytes
            self.states.add_cached(states, checkpoint)
        for visibility, columns in zip(self.windows, self.window_columns, strict=True):
            rows = -(-position // self.block) - visibility.first_visible(position) // self.block
            checkpoint.row_bytes += (
                rows * self.pages.row_bytes * (columns.stop - columns.start) // self.pages.width
            )
        insort(node.checkpoints, checkpoint, key=_position)
        self._mark(checkpoint, 1)
        queue = node.account.queue
        queue.policy.on_insert(checkpoint, now)
        queue.push(checkpoint, now)
        if states is not None and self.events.listening:
            self.publisher.checkpoint_stored(checkpoint)
        return checkpoint

    @staticmethod
    def checkpoint_at(node: Node, position: int) -> Checkpoint | None:
        """Return the checkpoint at `position` in `node`, or None."""
        i = bisect_left(node.checkpoints, position, key=_position)
        return (
            node.checkpoints[i]
            if i < len(node.checkpoints) and node.checkpoints[i].position == position
            else None
        )

    def drop_checkpoint(self, checkpoint: Checkpoint, reason: str) -> None:
        """Drop a checkpoint and its snapshot. Window pages that only this checkpoint needed become unneeded, and are
        evicted first."""
        if self.events.listening:
            self.publisher.checkpoint_dropped(checkpoint, reason)
        if self.offload_source is not None:
            firsts = [window.first_visible(checkpoint.reach) // self.block for window in self.windows]
            self.offload_source.on_checkpoint_dropped(
                checkpoint, list(zip(self.window_columns, firsts, strict=True))
            )
        self.version += 1
        checkpoint.node.checkpoints.remove(checkpoint)
        self._mark(checkpoint, -1)
        account = checkpoint.node.account
        account.queue.remove(checkpoint)
        if checkpoint.states is not None:
            account.free(self.states.drop_cached(checkpoint.states))

    def _mark(self, checkpoint: Checkpoint, delta: int) -> None:
        for window in range(len(self.windows)):
            for node, rows in self._window_rows(
                checkpoint.node, checkpoint.position, window, checkpoint.reach
            ):
                assert node.checkpoint_counts is not None
                node.checkpoint_counts[rows, window] += delta
                if delta < 0:
                    self.queue_unneeded(node, window)

    # -- unneeded window pages ------------------------------------------------------------------

    def queue_unneeded(self, node: Node, window: int) -> None:
        """Queue a node for `drop_unneeded`, because some of its window pages may have become unneeded. `window` is the
        index of the windowed group in `self.windows`."""
        if not node.unneeded_windows >> window & 1:
            node.unneeded_windows |= 1 << window
            node.account.queue.unneeded.append((node, window))

    def queue_unneeded_range(self, node: Node, window: int, first: int, last: int) -> None:
        """Call `queue_unneeded` for `node` and each of its ancestors that contains one of the blocks `first` to
        `last`."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.start // self.block <= last:
                self.queue_unneeded(current, window)
            if current.start // self.block <= first:
                return
            current = current.parent

    def drop_unneeded(self, node: Node, window: int, most: int, reason: str) -> None:
        """Evict the unneeded window pages in at most `most` blocks of a node. A page is unneeded if no checkpoint needs
        it and it is not in use. `window` is the index of the windowed layer group in `self.windows`. `reason` is
        published with the event. If the node still has unneeded pages afterwards, queue it again.
        """
        node.unneeded_windows &= ~(1 << window)
        if node.checkpoint_counts is None or node.parent is None:
            return
        columns = self.window_columns[window]
        pages = node.pages[: node.count]
        idle = (node.checkpoint_counts[: node.count, window] == 0) & (pages[:, columns.start] > 0)
        rows = (idle & ~self.pages.in_use(pages, columns.start)).nonzero()[0]
        if rows.size > most:
            rows = rows[:most]
            self.queue_unneeded(node, window)
        if not rows.size:
            return
        first, last = rows.item(0), rows.item(-1)
        at = slice(first, last + 1) if last - first < rows.size else rows  # a slice is faster
        gone = np.zeros((rows.size, self.pages.width), np.int32)
        gone[:, columns] = pages[at, columns]
        if self.events.listening:
            self.publisher.window_pages_dropped(node, rows, self.window_groups[window], reason)
        self.version += 1
        pages[at, columns] = 0
        node.account.free(self.pages.drop_cached(gone))
        self._reassign_owner(node, gone[[0, -1]])

    def _reassign_owner(self, node: Node, rows: Ids) -> None:
        """Record a new owner for each page in `rows` that `node` dropped but that is still cached. The new owner is
        another node that shares the block and refers to the page."""
        if self.pages.owners:
            for cls, page in self.pages.orphans(rows):
                columns = self.pages.columns_of(cls)
                for other in nodes_sharing_block(node, self.block):
                    if (other.pages[: other.count, columns] == page).any():
                        self.pages.set_owner(cls, page, other)
