"""Resume points of a prefix tree: the checkpoints in its nodes, the window pages they protect, and those nobody needs.

A checkpoint marks a point where later requests will resume: it protects the window pages that end there and
owns the state snapshot taken there. `marks` of a node count, for each block and window, the checkpoints that
need its page; what has none and is held by no sequence is spare. Knows pages and positions, no tokens.
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
    """The part of the prefix tree that knows where one can resume. Costs are in proportion to the window."""

    def __init__(
        self, layout: PoolLayout, pages: BlockPages, states: BlockPages, teller: EventPublisher
    ) -> None:
        self.block = layout.block_tokens
        self.pages = pages
        self.states = states
        self.publisher = teller
        self.events = teller.events
        self.offload_source: OffloadSource | None = None  # for whoever keeps copies below the pool
        self.has_states = bool(states.width)
        windowed = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self.windows: tuple[Visibility, ...] = tuple(g.spec.visibility for g in windowed)
        self.window_columns = tuple(g.columns for g in windowed)
        self.window_groups = tuple(g.index for g in windowed)
        self.keeps_checkpoints = bool(self.windows) or self.has_states
        self.version = 0  # changes when a path or its pages may have
        self.replaced = 0  # how often a partial block's page gave way to a fuller one
        self._serials = count(1)

    # -- where one can resume -------------------------------------------------------------------

    def last_resume(self, node: Node) -> int:
        """The deepest point of a leaf that a request can resume at, or its start if there is none."""
        if not self.keeps_checkpoints:
            return node.end
        if not self.has_states and self.complete(node, node.end):
            return node.end
        return node.checkpoints[-1].position if node.checkpoints else node.start

    def presence(self, rows: Ids) -> list[tuple[Visibility, Ids]]:
        """Of each windowed group its span, and which rows have its page."""
        columns = (rows[:, c.start] for c in self.window_columns)
        return list(zip(self.windows, columns, strict=True))

    def _window_rows(
        self, node: Node, position: int, window: int, query: int
    ) -> Iterator[tuple[Node, slice]]:
        """The node rows that hold what `query` sees of the tokens before `position`, upwards from `node`."""
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
        """Whether every window that ends at `position` (in `node`) has its pages for the query there, or
        for `query`. The deepest node's row counts where a block stands in two."""
        for window, columns in enumerate(self.window_columns):
            covered = (position - 1) // self.block + 1
            for current, rows in self._window_rows(
                node, position, window, position if query is None else query
            ):
                base = current.start // self.block
                stop = min(rows.stop, covered - base)
                if stop > rows.start and not current.pages[rows.start : stop, columns.start].all():
                    return False
                covered = min(covered, base)
        return True

    # -- coming and going -----------------------------------------------------------------------

    def checkpoint(self, node: Node, position: int, states: Ids | None, now: float) -> Checkpoint | None:
        """Mark `position` in `node` as a resume point; the tree takes over the `states` row if it has none
        there yet (returns None otherwise, or where a window is broken)."""
        existing = self.checkpoint_at(node, position)
        if existing is not None or not self.complete(node, position):
            if existing is not None:
                existing.last_used = now
            return None
        checkpoint = Checkpoint(next(self._serials), now, node, position, states)
        # Resuming one token earlier must work too: the same prompt again leaves its last token to compute.
        checkpoint.reach = position - 1 if self.complete(node, position, position - 1) else position
        if states is not None:
            checkpoint.row_bytes = self.states.row_bytes
            self.states.add_cached(states, checkpoint)
        for span, columns in zip(self.windows, self.window_columns, strict=True):
            rows = -(-position // self.block) - span.first_visible(position) // self.block
            checkpoint.row_bytes += (
                rows * self.pages.row_bytes * (columns.stop - columns.start) // self.pages.width
            )
        insort(node.checkpoints, checkpoint, key=_position)
        self._mark(checkpoint, 1)
        queue = node.root.account.queue
        queue.policy.on_insert(checkpoint, now)
        queue.push(checkpoint, now)
        if states is not None and self.events.listening:
            self.publisher.checkpoint_stored(checkpoint)
        return checkpoint

    @staticmethod
    def checkpoint_at(node: Node, position: int) -> Checkpoint | None:
        i = bisect_left(node.checkpoints, position, key=_position)
        return (
            node.checkpoints[i]
            if i < len(node.checkpoints) and node.checkpoints[i].position == position
            else None
        )

    def drop_checkpoint(self, checkpoint: Checkpoint, why: str) -> None:
        """Forget a resume point and its snapshot; its window pages become spare."""
        if self.events.listening:
            self.publisher.checkpoint_dropped(checkpoint, why)
        if self.offload_source is not None:
            firsts = [span.first_visible(checkpoint.reach) // self.block for span in self.windows]
            self.offload_source.on_checkpoint_dropped(
                checkpoint, list(zip(self.window_columns, firsts, strict=True))
            )
        self.version += 1
        checkpoint.node.checkpoints.remove(checkpoint)
        self._mark(checkpoint, -1)
        account = checkpoint.node.root.account
        account.queue.remove(checkpoint)
        if checkpoint.states is not None:
            account.used -= self.states.drop_cached(checkpoint.states)

    def _mark(self, checkpoint: Checkpoint, delta: int) -> None:
        for window in range(len(self.windows)):
            for node, rows in self._window_rows(
                checkpoint.node, checkpoint.position, window, checkpoint.reach
            ):
                assert node.checkpoint_counts is not None
                node.checkpoint_counts[rows, window] += delta
                if delta < 0:
                    self.queue_unneeded(node, window)

    # -- pages nobody needs ---------------------------------------------------------------------

    def queue_unneeded(self, node: Node, window: int) -> None:
        """Some pages of `node` may now be needed by no sequence and no checkpoint: first to leave."""
        if not node.unneeded_windows >> window & 1:
            node.unneeded_windows |= 1 << window
            node.root.account.queue.unneeded.append((node, window))

    def queue_unneeded_range(self, node: Node, window: int, first: int, last: int) -> None:
        """Offer the nodes above (and at) `node` that hold blocks `first` to `last`."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.start // self.block <= last:
                self.queue_unneeded(current, window)
            if current.start // self.block <= first:
                return
            current = current.parent

    def drop_unneeded(self, node: Node, window: int, most: int, why: str) -> None:
        """Free the pages of up to `most` rows of a window that nobody needs."""
        node.unneeded_windows &= ~(1 << window)
        if node.checkpoint_counts is None or node.parent is None:
            return
        columns = self.window_columns[window]
        pages = node.pages[: node.count]
        idle = (node.checkpoint_counts[: node.count, window] == 0) & (pages[:, columns.start] > 0)
        rows = np.flatnonzero(idle & ~self.pages.in_use(pages, columns.start))
        if rows.size > most:
            rows = rows[:most]
            self.queue_unneeded(node, window)
        if not rows.size:
            return
        gone = np.zeros((rows.size, self.pages.width), np.int32)
        gone[:, columns] = pages[rows, columns]
        if self.events.listening:
            self.publisher.window_pages_dropped(node, rows, self.window_groups[window], why)
        self.version += 1
        pages[rows, columns] = 0
        node.root.account.used -= self.pages.drop_cached(gone)
        self._reassign_owner(node, gone[[0, -1]])

    def _reassign_owner(self, node: Node, rows: Ids) -> None:
        """Pages that `node` let go and a node that meets it still keeps are that one's now."""
        if self.pages.owners:
            for cls, page in self.pages.orphans(rows):
                columns = self.pages.columns_of(cls)
                for other in nodes_sharing_block(node, self.block):
                    if (other.pages[: other.count, columns] == page).any():
                        self.pages.owners[cls][page] = other
