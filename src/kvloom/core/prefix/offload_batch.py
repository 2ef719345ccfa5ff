"""Pages offered to whoever keeps copies below the pool: with their names, when they leave, or when a sequence ends.

A page is offered under the name of the prefix that ends where its tokens do. Nothing is named unless someone listens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kvloom.core.layout.pool_layout import HASH_TOKENS
from kvloom.core.pool.page_pool import Ids

from .node import Checkpoint, Node
from .publisher import EventPublisher

__all__ = ["OffloadBatch", "OffloadSource"]


class OffloadBatch(NamedTuple):
    """Rows of page ids, one a name, in the columns of one numbering ("token" or "state"); 0 where there is no page.

    The bytes of `rows` are those of the pages `at` (0: nobody can say where) until the next `take_copies`. `leaving`: the bytes will be overwritten soon; else their sequence has ended, and they stay for now. `used`: someone
    came back to them. `tenant` is whose they are, `root` where their names begin. `age`: 1 if they were in the tree, where they
    are, at the last mark, so that whoever wrote them had been launched by then; 2 if at the mark before, too (or if that says
    nothing any more: pages moved since).
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


class OffloadSource:
    """Makes parcels of what the tree holds, for one listener. A listener must not call the cache back."""

    def __init__(
        self,
        teller: EventPublisher,
        block: int,
        where: Callable[[str, Ids], Ids],
        listener: Callable[[OffloadBatch], None],
        ends: bool,
    ) -> None:
        self.publisher, self.block, self.where, self.listener = teller, block, where, listener
        self.ends = ends
        """Whether the listener wants to hear of sequences that end, too."""
        self.marks = 0
        """How often was marked."""
        self._before = 0
        self._marked = -math.inf, -math.inf

    def mark(self, now: float, moved: bool) -> None:
        """What is in the tree now is older from now on. `moved`: some of it has moved since the mark before, which says nothing any more."""
        self._before = self.marks + moved
        self.marks += 1
        self._marked = now, now if moved else self._marked[0]

    def on_trim(self, node: Node, end: int) -> None:
        """The pages of a run from `end` on are about to leave; a block that `end` cuts is offered whole, too."""
        first = max(end, node.start) // self.block - node.start // self.block
        self._collect(node, first, node.count, leaving=True)

    def on_checkpoint_dropped(self, checkpoint: Checkpoint, columns: list[tuple[slice, int]]) -> None:
        """A resume point leaves: its states, the partial block it stands in, and of each window (its columns, the first
        block it sees) the pages that nothing else may protect."""
        node, position = checkpoint.node, checkpoint.position
        self._collect_states(checkpoint, leaving=True)
        if position % self.block:
            self._collect_tail(node, position, leaving=True)
        for at, first in columns:
            current: Node | None = node
            while current is not None and current.parent is not None:
                base = current.start // self.block
                stop = min(position // self.block - base, current.count)
                if stop > max(0, first - base):
                    self._collect(current, max(0, first - base), stop, leaving=True, columns=at)
                if base <= first:
                    break
                current = current.parent

    def on_sequence_closed(self, node: Node) -> None:
        """A sequence ended at `node`: what is on its path and was not offered before."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            base = current.start // self.block
            if current.offloaded_tokens < current.end:
                first = max(current.offloaded_tokens, current.start) // self.block - base
                self._collect(current, first, current.count, leaving=False)
                current.offloaded_tokens = current.end
            for checkpoint in current.checkpoints:
                if not checkpoint.is_offloaded:
                    checkpoint.is_offloaded = True
                    self._collect_states(checkpoint, leaving=False)
                    if checkpoint.position % self.block and checkpoint.position < current.end:
                        self._collect_tail(current, checkpoint.position, leaving=False)
            current = current.parent

    def _collect(
        self, node: Node, first: int, last: int, leaving: bool, columns: slice | None = None
    ) -> None:
        if last <= first:
            return
        rows = node.pages[first:last].copy()
        if columns is not None:
            kept = rows[:, columns].copy()
            rows[:] = 0
            rows[:, columns] = kept
        if not rows.any():
            return
        names = self._row_hashes(node, first, last)
        age = self._age(node)
        # Of a run that grew since a mark, the blocks that were whole then are older.
        settled = last if age == 2 else node.settled // self.block - node.start // self.block
        cut = max(0, min(last, settled) - first)
        if cut:
            self._emit("token", names[:cut], rows[:cut], node, leaving, min(2, age + 1))
        if cut < len(rows):
            self._emit("token", names[cut:], rows[cut:], node, leaving, age)

    def _age(self, node: Node) -> int:
        """The age of the last pages that a run got."""
        return 2 if node.grown < self._before else int(node.grown < self.marks)

    def _collect_tail(self, node: Node, position: int, leaving: bool) -> None:
        row = node.pages[(position - 1) // self.block - node.start // self.block][None].copy()
        if row.any():
            names = [self.publisher.hash_at(node, position)]
            self._emit("token", names, row, node, leaving, self._age(node))

    def _collect_states(self, checkpoint: Checkpoint, leaving: bool) -> None:
        if checkpoint.states is not None:
            node, states = checkpoint.node, checkpoint.states.copy()
            used = max(checkpoint.last_used, node.last_used)
            age = sum(used < marked for marked in self._marked)
            self._emit(
                "state", [self.publisher.hash_at(node, checkpoint.position)], states, node, leaving, age
            )

    def _emit(
        self, numbering: str, names: list[bytes], rows: Ids, node: Node, leaving: bool, age: int
    ) -> None:
        at, root = self.where(numbering, rows), node.root
        self.listener(
            OffloadBatch(numbering, names, rows, at, root.tenant, leaving, node.hits > 0, root.hash, age)
        )

    def _row_hashes(self, node: Node, first: int, last: int) -> list[bytes]:
        """The names of the prefixes that end where some of the node's rows do."""
        base, each = node.start // self.block, self.block // HASH_TOKENS
        whole = max(
            first, min(last, node.end // self.block - base)
        )  # rows whose tokens end where a block does
        start = (base + first + 1) * each - node.start // HASH_TOKENS - 1
        names = self.publisher.hashes(node)[start : start + (whole - first) * each : each]
        return names if whole == last else [*names, self.publisher.hash_at(node, node.end)]
