"""Resume points: where a sequence leaves checkpoints, and how its tokens enter the tree for them."""

from __future__ import annotations

import numpy as np

from kvloom.core.prefix.node import Node
from kvloom.core.prefix.radix_tree import Retention

from .sequence import Sequence
from .state import SequenceOps

__all__ = ["Checkpointer"]


class Checkpointer(SequenceOps):
    def take_checkpoints(self, seq: Sequence, before: int) -> None:
        """Checkpoints at the wanted positions that the last commit passed."""
        if not self.tree.keeps_checkpoints or not seq.control.store:
            return
        length = int(self.block_tables.length[seq.row])
        points = {p for p in seq.checkpoint_positions if before < p <= length}
        every = self.snapshots.every_blocks * self.block_tokens
        if every:
            points.update(range((before // every + 1) * every, length + 1, every))
        if self.has_states:
            points &= {int(self.block_tables.state_length[seq.row])}
        for point in sorted(points):
            self.snapshot(seq, point)
        if seq.checkpoint_positions and seq.checkpoint_positions[-1] <= length:
            seq.checkpoint_positions = ()
            self.block_tables.wants_checkpoint[seq.row] = False

    def snapshot(self, seq: Sequence, position: int | None = None) -> bool:
        self.ensure_open(seq)
        length = int(self.block_tables.length[seq.row])
        here = int(self.block_tables.state_length[seq.row]) if self.has_states else length
        point = here if position is None else position
        if not 0 <= point <= self.max_tokens:
            raise ValueError(f"no resume point at {point}: a sequence has up to {self.max_tokens} tokens")
        if not self.tree.keeps_checkpoints or not seq.control.store or not point:
            return False
        if point > length:
            seq.checkpoint_positions = tuple(sorted({*seq.checkpoint_positions, point}))
            self.block_tables.wants_checkpoint[seq.row] = True
            return True
        now = self.clock.now()
        if not self.has_states:
            node = self.published_node(seq, point, now)
            return node is not None and self.tree.checkpoint(node, point, None, now) is not None
        if point != here or not self.block_tables.states[0, seq.row]:
            return False
        node = self.published_node(seq, point, now)
        if node is None or self.tree.checkpoint_at(node, point) is not None:
            return False
        needs = self.states.needs(1)
        self.tree.lock(node)
        missing = self.allocator.make_room(seq.root.account, needs)
        taken = None
        if not missing:
            account = seq.root.account
            account.charge(self.allocator.bytes_of(needs))
            copy = self.states.allocate(1)
            live = self.block_tables.states[:, seq.row][None].copy()
            taken = self.tree.checkpoint(node, point, copy.copy(), now)
            if taken is not None:
                self.allocator.copies.add_rows(self.states, live, copy)
                account.in_use += self.states.retain(live)
                self.allocator.copies.retain_sources(self.states, live, account)
            self.release(account, self.states, copy)
        self.tree.unlock(node, now)
        return taken is not None

    def published_node(self, seq: Sequence, point: int, now: float, closing: bool = False) -> Node | None:
        """The tree's node that holds `point` of a sequence; its partial tail is entered if need be."""
        if point <= seq.published:
            node: Node | None = seq.node
            while node is not None and node.start >= point:
                node = node.parent
            return node if node is not None and node.parent is not None else None
        data = self.block_tables.tail[seq.row, : point - seq.published].tobytes()
        return self.publish_part(seq, seq.node, data, seq.published, point, now, closing)

    def publish_part(
        self,
        seq: Sequence,
        node: Node,
        data: bytes,
        first: int,
        last: int,
        now: float,
        closing: bool = False,
        stands: bool = False,
    ) -> Node:
        """Enter tokens [first, last) of a sequence after `node`; `stands` if that is where it stands from now on."""
        block = self.block_tokens
        table = self.block_tables.tables[:, seq.row, first // block : -(-last // block)]
        rows = table.T.copy()
        retention = self._retention(seq, first) if seq.control.retain else (0, None)
        node, met = self.tree.publish(node, data, rows, now, retention, seq.node, closing, stands)
        if met and last % block == 0:
            differs = rows != table.T
            if differs.any():
                account = seq.root.account
                account.in_use += self.pages.retain(np.where(differs, rows, 0))
                self.release(account, self.pages, np.where(differs, table.T, 0))
                table[:] = rows.T
                self.block_tables.mark_changed(seq.row, first // block)
        return node

    def _retention(self, seq: Sequence, position: int) -> Retention:
        for item in seq.control.retain:
            start = item.start // self.block_tokens * self.block_tokens
            if start <= position and (item.stop is None or position < item.stop):
                return item.priority, None if item.ttl is None else seq.opened + item.ttl
        return 0, None
