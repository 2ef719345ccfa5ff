"""Tokens become real: full blocks are published, pages that left a window go back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvloom.core.prefix.block_hash import TOKEN_BYTES, token_bytes

from .sequence import Sequence
from .snapshot import Checkpointer
from .state import CacheState, Rows, SequenceOps

__all__ = ["Committer"]


class Committer(SequenceOps):
    def __init__(self, parts: CacheState, points: Checkpointer) -> None:
        super().__init__(parts)
        self.points = points

    def commit(self, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
        self.ensure_open(seq)
        data = token_bytes(tokens)
        row, table, block = seq.row, self.block_tables, self.block_tokens
        length = table.length.item(row)
        n = len(data) // TOKEN_BYTES
        end = length + n
        if end > table.blocks.item(row) * block or (n and not self._ready(seq, end)):
            raise ValueError(
                f"commit of {n} tokens after {length}, but {seq.reserved_tokens} are reserved; extend first"
            )
        at = end if state_length is None else state_length
        if not table.state_length.item(row) <= at <= end:
            raise ValueError(
                f"states cannot stand at {at}: they were at {seq.state_length}, tokens end at {end}"
            )
        table.state_length[row] = at
        if seq.media:
            data = self._with_media(seq, data, length)
        held_back = length - seq.published
        if held_back:
            data = table.tail[row, :held_back].tobytes() + data
        rest = (held_back + n) % block
        whole = held_back + n - rest
        table.length[row] = end
        if whole:
            self._publish(seq, data[: whole * TOKEN_BYTES] if rest else data)
        if rest:
            table.tail[row, :rest] = np.frombuffer(data, np.int32, rest, whole * TOKEN_BYTES)
        if seq.media:
            self._commit_runs(seq, end)
        if self.tree.keeps_checkpoints:
            self.points.take_checkpoints(seq, length)
            self._leave_windows(seq)
        if seq.media:
            self.mark_special(seq)

    def commit_many(self, rows: Rows, tokens: npt.ArrayLike) -> None:
        rows = self.block_tables.validated(rows)
        ids = np.frombuffer(token_bytes(tokens), np.int32)
        if ids.shape != rows.shape:
            raise ValueError(f"{ids.size} tokens for {rows.size} sequences")
        table = self.block_tables
        lengths = table.length[rows]
        late = lengths >= table.blocks[rows] * self.block_tokens
        if late.any():
            raise ValueError(f"row {int(rows[late][0])} has no page for its next token; extend first")
        special = table.special[rows]
        if special.any():
            for row, token in zip(rows[special].tolist(), ids[special].tolist(), strict=True):
                self.commit(self.sequence(row), [token])
            rows, ids, lengths = rows[~special], ids[~special], lengths[~special]
        table.tail[rows, lengths % self.block_tokens] = ids
        lengths += 1
        table.length[rows] = table.state_length[rows] = lengths
        filled = rows[lengths % self.block_tokens == 0]
        if filled.size:
            self._publish_many(filled)
        watched = rows[self.block_tables.wants_checkpoint[rows]]
        for row in watched.tolist():
            self.points.take_checkpoints(self.sequence(row), int(table.length[row]) - 1)
        if self.snapshots.every_blocks and self.tree.keeps_checkpoints:
            for row in rows[lengths % (self.snapshots.every_blocks * self.block_tokens) == 0].tolist():
                self.points.take_checkpoints(self.sequence(row), int(table.length[row]) - 1)
        for window, span in enumerate(self.tree.windows):
            steps = span.first_visible_each(lengths) // self.block_tokens - table.first[window, rows]
            if (steps > 0).any():
                self._leave_window_many(window, rows[steps == 1])
                for row in rows[steps > 1].tolist():
                    self._leave_windows(self.sequence(row))

    def _publish_many(self, rows: Rows) -> None:
        """A full block each: those that only lengthen their own run go together."""
        table = self.block_tables
        plain: list[Sequence] = []
        rest: list[Sequence] = []
        for row in rows.tolist():
            seq = self.sequence(row)
            own = seq.control.store and not seq.control.retain and self.tree.may_append(seq.node)
            (plain if own else rest).append(seq)
        if plain:
            at = np.array([seq.row for seq in plain])
            pages = table.tables[:, at, table.length[at] // self.block_tokens - 1].T
            nodes = [seq.node for seq in plain]
            self.tree.append_blocks(nodes, table.tail[at].tobytes(), pages, self.clock.now())
            for seq in plain:
                seq.published += self.block_tokens
        for seq in rest:
            self._publish(seq, table.tail[seq.row].tobytes())

    def _publish(self, seq: Sequence, data: bytes) -> None:
        """Full blocks after `published` enter the tree (or only count, for a request that stores nothing)."""
        tokens = len(data) // TOKEN_BYTES
        start = seq.published
        if not seq.control.store:
            seq.published += tokens
            return
        now = self.clock.now()
        node, end = seq.node, start + tokens
        if seq.control.retain:
            for first, last in pairwise([start, *self._retention_cuts(seq, start, end)]):
                part = data[(first - seq.published) * TOKEN_BYTES : (last - seq.published) * TOKEN_BYTES]
                node = self.points.publish_part(seq, node, part, first, last, now)
                start = last
            data = data[(start - seq.published) * TOKEN_BYTES :]
        seq.node = self.points.publish_part(seq, node, data, start, end, now, stands=True)
        seq.published = end

    def _retention_cuts(self, seq: Sequence, start: int, stop: int) -> list[int]:
        block = self.block_tokens
        edges = {r.start // block * block for r in seq.control.retain}
        edges |= {-(-r.stop // block) * block for r in seq.control.retain if r.stop is not None}
        return sorted(e for e in edges if start < e < stop)

    def _ready(self, seq: Sequence, stop: int) -> bool:
        """Whether tokens up to `stop` could be written: nothing is left to copy or to give."""
        if seq.shared_tail or (self.has_states and not self.block_tables.states[0, seq.row]):
            return False
        return not seq.media or all(
            not self.needs_run(item, seq.length, stop) or seq.root.hash + item.digest in seq.media_runs
            for item in seq.media
        )

    def _with_media(self, seq: Sequence, data: bytes, start: int) -> bytes:
        """Media placeholders as ids of their content, also in what is committed."""
        ids = np.frombuffer(data, np.int32).copy()
        for item in seq.media:
            ids[max(0, item.start - start) : max(0, item.stop - start)] = self.media_ids.id_of(item.digest)
        return ids.tobytes()

    def _commit_runs(self, seq: Sequence, length: int) -> None:
        """Runs whose placeholder is computed are real: the cache keeps them for the next prompt. Those that nothing behind
        the image needs are let go."""
        account, now = seq.root.account, self.clock.now()
        for item in seq.media:
            key = seq.root.hash + item.digest
            run = seq.media_runs.get(key)
            if item.stop > length or run is None:
                continue
            if seq.control.store and isinstance(run, np.ndarray) and key not in self.allocator.media_runs:
                seq.media_runs[key] = run = self.allocator.add_media(key, account, run, item.tokens, now)
            if self.allocator.media_outlives_prompt or any(
                later.digest == item.digest and later.stop > length for later in seq.media
            ):
                continue
            del seq.media_runs[key]
            if isinstance(run, np.ndarray):
                self.release(account, self.media, run)
            else:
                self.allocator.release_media(run, now)

    def _leave_windows(self, seq: Sequence) -> None:
        """Pages that left a window go back: to the cache if published, else to the pool."""
        row, length = seq.row, int(self.block_tables.length[seq.row])
        for window, (span, columns) in enumerate(
            zip(self.tree.windows, self.tree.window_columns, strict=True)
        ):
            old, new = (
                int(self.block_tables.first[window, row]),
                span.first_visible(length) // self.block_tokens,
            )
            if new <= old:
                continue
            gone = np.zeros((new - old, self.pages.width), np.int32)
            part = self.block_tables.tables[columns, row, old:new]
            gone[:, columns] = part.T
            self.release(seq.root.account, self.pages, gone)
            part[:] = 0
            self.block_tables.first[window, row] = new
            self.tree.queue_unneeded_range(seq.node, window, old, new - 1)

    def _leave_window_many(self, window: int, rows: Rows) -> None:
        """`_leave_windows` of one block each for many rows, unless some share the page or the account."""
        table, columns = self.block_tables, self.tree.window_columns[window]
        if not rows.size:
            return
        old = table.first[window, rows]
        pages = table.tables[columns, rows, old]
        if len(self.accounts.accounts) > 1 or np.unique(pages[0]).size < rows.size or not pages.all():
            for row in rows.tolist():
                self._leave_windows(self.sequence(row))
            return
        gone = np.zeros((rows.size, self.pages.width), np.int32)
        gone[:, columns] = pages.T
        self.release(self.sequence(int(rows[0])).root.account, self.pages, gone)
        table.tables[columns, rows, old] = 0
        table.first[window, rows] = old + 1
        for row, block in zip(rows.tolist(), old.tolist(), strict=True):
            self.tree.queue_unneeded_range(self.sequence(row).node, window, block, block)
