"""Going back: a sequence forgets its last tokens and stands where it can resume."""

from __future__ import annotations

from operator import index

import numpy as np

from .names import TOKEN_BYTES
from .nodes import Checkpoint, Node
from .parts import Verbs
from .pool import Ids
from .resume import longest_resume
from .sequence import Sequence

__all__ = ["Rollback"]


class Rollback(Verbs):
    def rollback(self, seq: Sequence, n: int) -> int:
        self.ensure_open(seq)
        length = int(self.rows.length[seq.row])
        n = index(n)
        if not 0 <= n <= length:
            raise ValueError(f"cannot roll back {n} of {length} tokens")
        now = self.clock.now()
        blocks = -(-length // self.block_tokens)
        path = self.path(seq.node)
        in_tree = self.tree.rows(path, min(seq.node.end, length))
        rows = self.rows.tables[:, seq.row, :blocks].T.copy()
        known = min(len(in_tree), blocks)
        np.copyto(rows[:known], in_tree[:known], where=rows[:known] == 0)
        point, checkpoint = self._point_below(seq, path, rows, length - n, length)
        self._retreat(seq, point, rows, path, now)
        if self.has_states and point < self.rows.state_length[seq.row]:
            self._rewind_states(seq, checkpoint, now)
        self.rows.state_length[seq.row] = min(point, int(self.rows.state_length[seq.row]))
        self.mark_special(seq)
        return point

    def _point_below(
        self, seq: Sequence, path: list[Node], rows: Ids, target: int, length: int
    ) -> tuple[int, Checkpoint | None]:
        if target == length or not self.tree.keeps_checkpoints:
            return target, None
        windows = self.tree.presence(rows)
        if not self.has_states or target >= self.rows.state_length[seq.row]:
            point = longest_resume(target, windows, self.block_tokens)[0]
            if not self.has_states or point >= self.rows.state_length[seq.row]:
                return point, None
        candidates, reach = list(path), seq.node.end
        if target > seq.published == seq.node.end:  # a snapshot in its own partial tail
            ids = self.rows.tail[seq.row, : target - seq.published].tobytes()
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
        kept = self.in_view(rows[: -(-point // block)], point)
        account = seq.root.account
        reserved = int(self.rows.blocks[row])
        before = self.rows.tables[:, row, :reserved].T.copy()
        account.held += self.pages.retain(kept)
        self.let_go(account, self.pages, before)
        self.rows.tables[:, row, :reserved] = 0
        self.rows.tables[:, row, : len(kept)] = kept.T
        self.rows.blocks[row] = len(kept)
        self.rows.length[row] = point
        self.rows.touch(row, 0)
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
            self.rows.tail[seq.row, :tail] = np.frombuffer(
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
        live = self.rows.states[:, seq.row][None].copy()
        if live[0, 0]:
            self.let_go(account, self.states, live)
            self.rows.states[:, seq.row] = 0
        if seq.state_source is not None:
            self.let_go(account, self.states, seq.state_source)
            seq.state_source = None
        if checkpoint is not None:
            self.start_from(seq, checkpoint, now)
