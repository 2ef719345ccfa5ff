"""Reserving pages for tokens to come: new blocks, a copy of a shared tail, live states, media runs."""

from __future__ import annotations

from operator import index

import numpy as np

from .media import Media, MediaRun
from .parts import Rows, Verbs
from .sequence import Sequence
from .tenants import Account

__all__ = ["Reserving"]


class Reserving(Verbs):
    def extend(self, seq: Sequence, n: int) -> int:
        self.ensure_open(seq)
        n = index(n)
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        length = self.rows.length.item(seq.row)
        if length + n > self.max_tokens:
            raise ValueError(f"{length} + {n} tokens exceed max_tokens {self.max_tokens}")
        account = seq.root.account
        new_runs: list[Media] = []
        held_runs: list[MediaRun] = []
        media = 0
        if seq.media:
            new_runs, held_runs = self._runs_for(seq, length + n, self.clock.now())
            media = sum(-(-m.tokens // self.block_tokens) for m in new_runs)
        blocks, copy_tail, states = self._wants(seq, length, n)
        needs = self.needs(blocks + copy_tail, states, media)
        missing = self.room.make(account, needs)
        if missing:
            for run in held_runs:
                self._drop_run(seq, run, self.clock.now())
            return missing
        account.charge(self.room.bytes_of(needs))
        if copy_tail:
            self._copy_tail(seq, length // self.block_tokens)
        if blocks:
            self._reserve(seq, blocks)
        if states:
            self.give_states(seq)
        for item in new_runs:
            rows = self.media.allocate(-(-item.tokens // self.block_tokens))
            seq.runs[seq.root.name + item.digest] = rows
        if copy_tail or states or seq.media:
            self.mark_special(seq)
        return 0

    def short_of_quota(self, seq: Sequence, n: int) -> bool:
        self.ensure_open(seq)
        length = int(self.rows.length[seq.row])
        blocks, copy_tail, states = self._wants(seq, length, n)
        media = sum(-(-item.tokens // self.block_tokens) for item in self._new_runs(seq, length + n))
        return (
            seq.root.account.beyond_quota(self.room.bytes_of(self.needs(blocks + copy_tail, states, media)))
            > 0
        )

    def _wants(self, seq: Sequence, length: int, n: int) -> tuple[int, int, int]:
        """Blocks to reserve, whether the tail must be copied, whether states are needed."""
        blocks = -(-(length + n) // self.block_tokens) - self.rows.blocks.item(seq.row)
        copy_tail = int(n > 0 and seq.shared_tail)
        states = int(n > 0 and self.has_states and not self.rows.states[0, seq.row])
        return blocks if blocks > 0 else 0, copy_tail, states

    def _reserve(self, seq: Sequence, blocks: int) -> None:
        row, have = seq.row, self.rows.blocks.item(seq.row)
        near = self.rows.tables[:, row, have - 1] if have and self.pages.keepers else None
        fresh = self.pages.allocate(blocks, near)
        self.rows.tables[:, row, have : have + blocks] = fresh.T
        self.rows.blocks[row] = have + blocks
        self.rows.touch(row, have)

    def _copy_tail(self, seq: Sequence, block: int) -> None:
        """The partial block is someone else's page: write to a copy."""
        row = seq.row
        source = self.rows.tables[:, row, block][None].copy()
        target = self.pages.allocate(1, source[0] if self.pages.keepers else None)
        self.room.copies.add_rows(self.pages, source, target)
        self.room.copies.hold(self.pages, source, seq.root.account)
        self.rows.tables[:, row, block] = target[0]
        self.rows.touch(row, block)
        seq.shared_tail = False

    def give_states(self, seq: Sequence) -> None:
        live = self.states.allocate(1)
        self.rows.states[:, seq.row] = live[0]
        if seq.state_source is not None:
            self.room.copies.add_rows(self.states, seq.state_source, live)
            self.room.copies.hold(self.states, seq.state_source, seq.root.account)
            seq.state_source = None

    def extend_many(self, rows: Rows, n: int = 1) -> int:
        n, rows = index(n), self.rows.checked(rows)
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        lengths = self.rows.length[rows]
        new = (lengths + (n + self.block_tokens - 1)) // self.block_tokens - self.rows.blocks[rows]
        special = self.rows.special[rows]
        if lengths.size and int(lengths.max()) + n > self.max_tokens:
            raise ValueError(f"{int(lengths.max())} + {n} tokens exceed max_tokens {self.max_tokens}")
        if special.any() or len(self.accounts.accounts) > 1 or n > self.block_tokens:
            return self._extend_each(rows[(new > 0) | special], n)
        grow = rows[new > 0]
        if not grow.size:
            return 0
        account = self.handle(int(grow[0])).root.account
        needs = self.pages.needs(grow.size)
        missing = self.room.make(account, needs)
        if missing:
            return missing
        account.charge(self.room.bytes_of(needs))
        if self.pages.keepers:
            for row in grow.tolist():
                self._reserve(self.handle(row), 1)
            return 0
        self.rows.tables[:, grow, self.rows.blocks[grow]] = self.pages.allocate(grow.size).T
        self.rows.stale[grow] = np.minimum(self.rows.stale[grow], self.rows.blocks[grow])
        self.rows.blocks[grow] += 1
        return 0

    def _extend_each(self, rows: Rows, n: int) -> int:
        sequences = [self.handle(row) for row in rows.tolist()]
        total: dict[int, tuple[Account, list[int]]] = {}
        for seq in sequences:
            blocks, copy_tail, states = self._wants(seq, int(self.rows.length[seq.row]), n)
            account = seq.root.account
            _, sums = total.setdefault(id(account), (account, [0] * len(self.room.pool.classes)))
            stop = int(self.rows.length[seq.row]) + n
            media = sum(-(-item.tokens // self.block_tokens) for item in self._new_runs(seq, stop))
            for cls, pages in enumerate(self.needs(blocks + copy_tail, states, media)):
                sums[cls] += pages
        together = [sum(pages) for pages in zip(*(sums for _, sums in total.values()), strict=True)]
        if together and self.room.pool.missing_slabs(together):
            account, _ = next(iter(total.values()))
            missing = self.room.make(account, together)
            if missing:  # else pins have ended meanwhile
                return missing
        for account, sums in total.values():
            if account.beyond_quota(self.room.bytes_of(sums)):
                missing = self.room.make(account, sums)
                if missing:
                    return missing
        for seq in sequences:
            missing = self.extend(seq, n)
            if missing:
                return missing
        return 0

    def _runs_for(self, seq: Sequence, stop: int, now: float) -> tuple[list[Media], list[MediaRun]]:
        """Media runs that tokens up to `stop` need and the sequence lacks: to allocate, and now held."""
        held = []
        for item in seq.media:
            key = seq.root.name + item.digest
            run = self.room.runs.get(key) if seq.control.read else None
            if run is not None and self.needs_run(item, seq.length, stop) and key not in seq.runs:
                self.hold_run(seq, run, now)
                held.append(run)
        return self._new_runs(seq, stop), held

    def _new_runs(self, seq: Sequence, stop: int) -> list[Media]:
        """Media before `stop` whose runs neither the sequence nor, as far as it may read, the cache has."""
        new: dict[bytes, Media] = {}
        for item in seq.media:
            key = seq.root.name + item.digest
            known = key in seq.runs or (seq.control.read and key in self.room.runs)
            if self.needs_run(item, seq.length, stop) and not known:
                new.setdefault(item.digest, item)
        return list(new.values())

    def _drop_run(self, seq: Sequence, run: MediaRun, now: float) -> None:
        del seq.runs[run.key]
        self.room.let_run_go(run, now)
