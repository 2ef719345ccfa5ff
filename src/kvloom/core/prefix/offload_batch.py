"""Offload batches: pages and their hashes. The offload listener gets a batch before pages are evicted and when a
sequence closes.

The hash of a page is the hash of the prefix that ends with its last token. Without a listener no hash is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvloom.core.layout.pool_layout import HASH_TOKENS
from kvloom.core.pool.page_pool import Ids

from .node import Checkpoint, Node, OffloadMarks
from .publisher import EventPublisher

__all__ = ["OffloadBatch", "OffloadSource"]


class OffloadBatch(NamedTuple):
    """Pages to offload: the page ids of one block, or of one state, per block hash.

    | field     | meaning                                                                                     |
    |-----------|---------------------------------------------------------------------------------------------|
    | numbering | kind of the groups: "token" or "state"                                                      |
    | hashes    | block hash of each row of `rows`                                                            |
    | rows      | page ids, one column per page of a block or of a state; id 0 means no page                  |
    | tokens    | number of tokens of each row of `rows`. A partial block has fewer tokens than its pages     |
    |           | have space for. For states, the position of the state                                       |
    | pages     | for each page of `rows`, the id of the page that contains its bytes until the next          |
    |           | `take_copies`. For the target of a pending copy, this is the source. Id 0 means unknown     |
    | evicted   | true: the pages are evicted and will be overwritten soon; false: their sequence closed,     |
    |           | and they stay cached                                                                        |
    | was_hit   | whether a later request hit the pages                                                       |
    | tenant    | owner of the pages                                                                          |
    | root      | root of the block hashes of the pages                                                       |
    | age       | number of step marks since the pages were written or moved, at most 2 (2 also if unknown)   |

    The engine sets a step mark before each step, and after copies inside the pool. Age 0 means that work
    after the last mark may have written the pages. Age 1 means that the pages were written before the last
    mark, and age 2 before the second last mark.
    """

    numbering: str
    hashes: list[bytes]
    rows: Ids
    pages: Ids
    tenant: str
    evicted: bool
    was_hit: bool
    root: bytes
    age: int
    tokens: Ids


class OffloadSource:
    """Builds offload batches from nodes for one listener. The listener must not call the cache."""

    def __init__(
        self,
        publisher: EventPublisher,
        block: int,
        current_pages: Callable[[str, Ids], Ids],
        listener: Callable[[OffloadBatch], None],
        on_close: bool,
    ) -> None:
        self._publisher, self._block = publisher, block
        self._current_pages, self._listener = current_pages, listener
        self.on_close = on_close
        """Whether the listener also gets the pages of closed sequences."""
        self._marks = 0
        self._before = 0
        self._marked = -math.inf, -math.inf

    def mark_step(self, now: float, moved: bool) -> None:
        """Set a step mark, which increases the age of all pages in the tree. `moved` states that pages were copied
        inside the pool since the last mark. The mark then counts twice, as the last and as the second last mark.
        Offloads of age 1 and 2 therefore wait for these copies.
        """
        self._before = self._marks + moved
        self._marks += 1
        self._marked = now, now if moved else self._marked[0]

    # -- notifications of the tree --------------------------------------------------------------

    def on_grow(self, node: Node, end: int) -> None:
        """Record that a node has new pages for the tokens from `end` on."""
        marks = node.offload
        if marks is None:
            marks = node.offload = OffloadMarks(node.start)
        marks.settled = end if marks.grown < self._marks else min(end, marks.settled)
        marks.grown = self._marks

    @staticmethod
    def on_split(upper: Node, lower: Node, at: int) -> None:
        """Divide the `OffloadMarks` of a node that was split at token `at`. `lower` is the original node, and
        `upper` the new node."""
        marks = lower.offload
        if marks is not None:
            upper.offload = OffloadMarks(min(marks.settled, at), marks.grown, marks.offloaded_tokens)
            marks.settled = max(marks.settled, at)

    def on_trim(self, node: Node, end: int) -> None:
        """Pass pages of `node` to the listener, before they are evicted: the pages of the tokens from position
        `end` to the end of the node. If `end` is inside a block, the whole block is passed."""
        first = max(end, node.start) // self._block - node.start // self._block
        self._collect(node, first, node.count, evicted=True)
        if node.offload is not None:
            node.offload.offloaded_tokens = min(node.offload.offloaded_tokens, end)

    def on_checkpoint_dropped(self, checkpoint: Checkpoint, windows: list[tuple[slice, int]]) -> None:
        """Pass the states, the partial block and the window pages of a checkpoint to the listener before the
        checkpoint is dropped.

        `windows` contains, for each windowed group, the columns of its page ids and the first block inside the
        window.
        """
        node, position = checkpoint.node, checkpoint.position
        self._collect_states(checkpoint, evicted=True)
        if position % self._block:
            self._collect_tail(node, position, evicted=True)
        for columns, first in windows:
            current: Node | None = node
            while current is not None and current.parent is not None:
                base = current.start // self._block
                stop = min(position // self._block - base, current.count)
                if stop > max(0, first - base):
                    self._collect(current, max(0, first - base), stop, evicted=True, columns=columns)
                if base <= first:
                    break
                current = current.parent

    def on_sequence_closed(self, node: Node) -> None:
        """Pass the pages on the path of a closed sequence to the listener, except pages that were passed before."""
        if self.on_close:
            self.offload_path(node)

    def offload_path(self, node: Node, again: bool = False) -> None:
        """Pass the pages on a path to the listener. Pages that were passed before are skipped, unless `again` is
        set. Set `again` if tiers may have evicted these pages.
        """
        current: Node | None = node
        while current is not None and current.parent is not None:
            base = current.start // self._block
            marks = current.offload
            if marks is None:
                marks = current.offload = OffloadMarks(current.start)
            if again:
                marks.offloaded_tokens = current.start
            if marks.offloaded_tokens < current.end:
                first = max(marks.offloaded_tokens, current.start) // self._block - base
                self._collect(current, first, current.count, evicted=False)
                marks.offloaded_tokens = current.end
            for checkpoint in current.checkpoints:
                if again or not checkpoint.is_offloaded:
                    checkpoint.is_offloaded = True
                    self._collect_states(checkpoint, evicted=False)
                    if checkpoint.position % self._block and checkpoint.position < current.end:
                        self._collect_tail(current, checkpoint.position, evicted=False)
            current = current.parent

    # -- building batches -----------------------------------------------------------------------

    def _collect(
        self, node: Node, first: int, last: int, evicted: bool, columns: slice | None = None
    ) -> None:
        if last <= first:
            return
        rows = node.pages[first:last].copy()
        if columns is not None:
            window = rows[:, columns].copy()
            rows[:] = 0
            rows[:, columns] = window
        if not rows.any():
            return
        hashes = self._row_hashes(node, first, last)
        age = self._age(node)
        tokens = np.full(last - first, self._block, np.int32)
        if last == node.count and node.end % self._block:
            tokens[-1] = node.end % self._block
        # If a node grew since a mark, the blocks that were full at the mark are older than its other blocks.
        settled = node.start if node.offload is None else node.offload.settled
        full = last if age == 2 else settled // self._block - node.start // self._block
        cut = max(0, min(last, full) - first)
        if cut:
            self._emit("token", hashes[:cut], rows[:cut], tokens[:cut], node, evicted, min(2, age + 1))
        if cut < len(rows):
            self._emit("token", hashes[cut:], rows[cut:], tokens[cut:], node, evicted, age)

    def _age(self, node: Node) -> int:
        """Return the age of the newest pages of a node, in step marks: 0, 1 or 2, as in `OffloadBatch`."""
        grown = 0 if node.offload is None else node.offload.grown
        return 2 if grown < self._before else int(grown < self._marks)

    def _collect_tail(self, node: Node, position: int, evicted: bool) -> None:
        row = node.pages[(position - 1) // self._block - node.start // self._block][None].copy()
        if row.any():
            hashes = [self._publisher.block_hash_at(node, position)]
            tokens = np.full(1, (position - 1) % self._block + 1, np.int32)
            self._emit("token", hashes, row, tokens, node, evicted, self._age(node))

    def _collect_states(self, checkpoint: Checkpoint, evicted: bool) -> None:
        if checkpoint.states is not None:
            node, states = checkpoint.node, checkpoint.states.copy()
            used = max(checkpoint.last_used, node.last_used)
            age = sum(used < marked for marked in self._marked)
            hashes = [self._publisher.hash_at(node, checkpoint.position)]
            tokens = np.full(1, checkpoint.position, np.int32)
            self._emit("state", hashes, states, tokens, node, evicted, age)

    def _emit(
        self,
        numbering: str,
        hashes: list[bytes],
        rows: Ids,
        tokens: Ids,
        node: Node,
        evicted: bool,
        age: int,
    ) -> None:
        pages, root = self._current_pages(numbering, rows), node.root
        tenant = node.owner.tenant
        self._listener(
            OffloadBatch(
                numbering, hashes, rows, pages, tenant, evicted, node.hits > 0, root.hash, age, tokens
            )
        )

    def _row_hashes(self, node: Node, first: int, last: int) -> list[bytes]:
        """Return one hash for each block [first, last) of a node: the hash of the prefix that ends with the last
        token of the block. Blocks count from the first block of the node."""
        base, each = node.start // self._block, self._block // HASH_TOKENS
        full = max(first, min(last, node.end // self._block - base))  # blocks of the node that are full
        start = (base + first + 1) * each - node.start // HASH_TOKENS - 1
        hashes = self._publisher.hashes(node)[start : start + (full - first) * each : each]
        if each > 1:
            ends = range((base + first + 1) * self._block, (base + full + 1) * self._block, self._block)
            hashes = [self._publisher.block_hash_at(node, end) for end in ends]
        return hashes if full == last else [*hashes, self._publisher.block_hash_at(node, node.end)]
