"""Going back: a sequence forgets its last tokens and stands where it can resume."""

from __future__ import annotations

from operator import index

import numpy as np

from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.node import Checkpoint, Node
from kvloom.core.prefix.resume_rule import longest_resume

from .sequence import Sequence
from .state import SequenceOps

__all__ = ["Rollback"]


class Rollback(SequenceOps):
    def rollback(self, seq: Sequence, n: int) -> int:
        self.ensure_open(seq)
        length = int(self.block_tables.length[seq.row])
        n = index(n)
        if not 0 <= n <= length:
            raise ValueError(f"cannot roll back {n} of {length} tokens")
        now = self.clock.now()
        blocks = -(-length // self.block_tokens)
        path = self.path(seq.node)
        in_tree = self.tree.rows(path, min(seq.node.end, length))
        rows = self.block_tables.tables[:, seq.row, :blocks].T.copy()
        known = min(len(in_tree), blocks)
        np.copyto(rows[:known], in_tree[:known], where=rows[:known] == 0)
        point, checkpoint = self._point_below(seq, path, rows, length - n, length)
        self._retreat(seq, point, rows, path, now)
        if self.has_states and point < self.block_tables.state_length[seq.row]:
            self._rewind_states(seq, checkpoint, now)
        self.block_tables.state_length[seq.row] = min(point, int(self.block_tables.state_length[seq.row]))
        self.mark_special(seq)
        return point

    def _point_below(
        self, seq: Sequence, path: list[Node], rows: Ids, target: int, length: int
    ) -> tuple[int, Checkpoint | None]:
        if target == length or not self.tree.keeps_checkpoints:
            return target, None
        windows = self.tree.presence(rows)
        if not self.has_states or target >= self.block_tables.state_length[seq.row]:
            point = longest_resume(target, windows, self.block_tokens)[0]
            if not self.has_states or point >= self.block_tables.state_length[seq.row]:
                return point, None
        candidates, reach = list(path), seq.node.end
        if target > seq.published == seq.node.end:  # a snapshot in its own partial tail
            ids = self.block_tables.tail[seq.row, : target - seq.published].tobytes()
            below, matched = self.tree.walk(seq.node, ids, target - seq.published)
            candidates += below
            reach += matched
        found = {
            c.position: c
            for node in reversed(candidates)
            for c in reversed(node.checkpoints)
            if c.position <= reach
        }
        point, _ = longest_resume(target, windows, self.block_tokens, found)
        return point, found.get(point)

    def _retreat(self, seq: Sequence, point: int, rows: Ids, path: list[Node], now: float) -> None:
        row, block = seq.row, self.block_tokens
        kept = self.visible_rows(rows[: -(-point // block)], point)
        account = seq.root.account
        reserved = int(self.block_tables.blocks[row])
        before = self.block_tables.tables[:, row, :reserved].T.copy()
        account.in_use += self.pages.retain(kept)
        self.release(account, self.pages, before)
        self.block_tables.tables[:, row, :reserved] = 0
        self.block_tables.tables[:, row, : len(kept)] = kept.T
        self.block_tables.blocks[row] = len(kept)
        self.block_tables.length[row] = point
        self.block_tables.mark_changed(row, 0)
        self.set_window_edges(row, point)
        boundary = point // block * block
        if boundary < seq.published:
            self._step_up(seq, path, boundary, point, now)
        seq.shared_tail = point % block > 0 and self.pages.shared(kept[-1:])

    def _step_up(self, seq: Sequence, path: list[Node], boundary: int, point: int, now: float) -> None:
        """Stand at an earlier block boundary; the tokens from there to `point` are the new tail."""
        tail = point - boundary
        if not seq.control.store and boundary >= seq.node.end:
            seq.published = boundary  # never entered the tree
            return
        text = b"".join(bytes(n.text) for n in path if n.end > boundary)
        start = next((n.start for n in path if n.end > boundary), boundary)
        if tail:
            self.block_tables.tail[seq.row, :tail] = np.frombuffer(
                text, np.int32, tail, (boundary - start) * TOKEN_BYTES
            )
        node: Node = seq.root
        for passed in path:
            if passed.start >= boundary:
                break
            node = passed if passed.end <= boundary else self.tree.split(passed, boundary)
        self.tree.lock(node)
        self.tree.unlock(seq.node, now)
        seq.node = node
        seq.published = boundary

    def _rewind_states(self, seq: Sequence, checkpoint: Checkpoint | None, now: float) -> None:
        account = seq.root.account
        live = self.block_tables.states[:, seq.row][None].copy()
        if live[0, 0]:
            self.release(account, self.states, live)
            self.block_tables.states[:, seq.row] = 0
        if seq.state_source is not None:
            self.release(account, self.states, seq.state_source)
            seq.state_source = None
        if checkpoint is not None:
            self.start_from(seq, checkpoint, now)
