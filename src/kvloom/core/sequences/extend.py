"""Reserving pages for tokens to come: new blocks, a copy of a shared tail, live states, media runs."""

from __future__ import annotations

from operator import index

import numpy as np

from kvloom.core.eviction.tenants import Account
from kvloom.core.prefix.multimodal import Media, MediaRun

from .sequence import Sequence
from .state import Rows, SequenceOps

__all__ = ["Extender"]


class Extender(SequenceOps):
    def extend(self, seq: Sequence, n: int) -> int:
        self.ensure_open(seq)
        n = index(n)
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        length = self.block_tables.length.item(seq.row)
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
        missing = self.allocator.make_room(account, needs)
        if missing:
            for run in held_runs:
                self._drop_run(seq, run, self.clock.now())
            return missing
        account.charge(self.allocator.bytes_of(needs))
        if copy_tail:
            self._copy_tail(seq, length // self.block_tokens)
        if blocks:
            self._reserve(seq, blocks)
        if states:
            self.give_states(seq)
        for item in new_runs:
            rows = self.media.allocate(-(-item.tokens // self.block_tokens))
            seq.media_runs[seq.root.hash + item.digest] = rows
        if copy_tail or states or seq.media:
            self.mark_special(seq)
        return 0

    def short_of_quota(self, seq: Sequence, n: int) -> bool:
        self.ensure_open(seq)
        length = int(self.block_tables.length[seq.row])
        blocks, copy_tail, states = self._wants(seq, length, n)
        media = sum(-(-item.tokens // self.block_tokens) for item in self._new_runs(seq, length + n))
        return (
            seq.root.account.beyond_quota(
                self.allocator.bytes_of(self.needs(blocks + copy_tail, states, media))
            )
            > 0
        )

    def _wants(self, seq: Sequence, length: int, n: int) -> tuple[int, int, int]:
        """Blocks to reserve, whether the tail must be copied, whether states are needed."""
        blocks = -(-(length + n) // self.block_tokens) - self.block_tables.blocks.item(seq.row)
        copy_tail = int(n > 0 and seq.shared_tail)
        states = int(n > 0 and self.has_states and not self.block_tables.states[0, seq.row])
        return blocks if blocks > 0 else 0, copy_tail, states

    def _reserve(self, seq: Sequence, blocks: int) -> None:
        row, have = seq.row, self.block_tables.blocks.item(seq.row)
        near = self.block_tables.tables[:, row, have - 1] if have and self.pages.owners else None
        fresh = self.pages.allocate(blocks, near)
        self.block_tables.tables[:, row, have : have + blocks] = fresh.T
        self.block_tables.blocks[row] = have + blocks
        self.block_tables.mark_changed(row, have)

    def _copy_tail(self, seq: Sequence, block: int) -> None:
        """The partial block is someone else's page: write to a copy."""
        row = seq.row
        source = self.block_tables.tables[:, row, block][None].copy()
        target = self.pages.allocate(1, source[0] if self.pages.owners else None)
        self.allocator.copies.add_rows(self.pages, source, target)
        self.allocator.copies.retain_sources(self.pages, source, seq.root.account)
        self.block_tables.tables[:, row, block] = target[0]
        self.block_tables.mark_changed(row, block)
        seq.shared_tail = False

    def give_states(self, seq: Sequence) -> None:
        live = self.states.allocate(1)
        self.block_tables.states[:, seq.row] = live[0]
        if seq.state_source is not None:
            self.allocator.copies.add_rows(self.states, seq.state_source, live)
            self.allocator.copies.retain_sources(self.states, seq.state_source, seq.root.account)
            seq.state_source = None

    def extend_many(self, rows: Rows, n: int = 1) -> int:
        n, rows = index(n), self.block_tables.validated(rows)
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        lengths = self.block_tables.length[rows]
        new = (lengths + (n + self.block_tokens - 1)) // self.block_tokens - self.block_tables.blocks[rows]
        special = self.block_tables.special[rows]
        if lengths.size and int(lengths.max()) + n > self.max_tokens:
            raise ValueError(f"{int(lengths.max())} + {n} tokens exceed max_tokens {self.max_tokens}")
        if special.any() or len(self.accounts.accounts) > 1 or n > self.block_tokens:
            return self._extend_each(rows[(new > 0) | special], n)
        grow = rows[new > 0]
        if not grow.size:
            return 0
        account = self.sequence(int(grow[0])).root.account
        needs = self.pages.needs(grow.size)
        missing = self.allocator.make_room(account, needs)
        if missing:
            return missing
        account.charge(self.allocator.bytes_of(needs))
        if self.pages.owners:
            for row in grow.tolist():
                self._reserve(self.sequence(row), 1)
            return 0
        self.block_tables.tables[:, grow, self.block_tables.blocks[grow]] = self.pages.allocate(grow.size).T
        self.block_tables.first_changed[grow] = np.minimum(
            self.block_tables.first_changed[grow], self.block_tables.blocks[grow]
        )
        self.block_tables.blocks[grow] += 1
        return 0

    def _extend_each(self, rows: Rows, n: int) -> int:
        sequences = [self.sequence(row) for row in rows.tolist()]
        total: dict[int, tuple[Account, list[int]]] = {}
        for seq in sequences:
            blocks, copy_tail, states = self._wants(seq, int(self.block_tables.length[seq.row]), n)
            account = seq.root.account
            _, sums = total.setdefault(id(account), (account, [0] * len(self.allocator.pool.classes)))
            stop = int(self.block_tables.length[seq.row]) + n
            media = sum(-(-item.tokens // self.block_tokens) for item in self._new_runs(seq, stop))
            for cls, pages in enumerate(self.needs(blocks + copy_tail, states, media)):
                sums[cls] += pages
        together = [sum(pages) for pages in zip(*(sums for _, sums in total.values()), strict=True)]
        if together and self.allocator.pool.missing_slabs(together):
            account, _ = next(iter(total.values()))
            missing = self.allocator.make_room(account, together)
            if missing:  # else pins have ended meanwhile
                return missing
        for account, sums in total.values():
            if account.beyond_quota(self.allocator.bytes_of(sums)):
                missing = self.allocator.make_room(account, sums)
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
            key = seq.root.hash + item.digest
            run = self.allocator.media_runs.get(key) if seq.control.read else None
            if run is not None and self.needs_run(item, seq.length, stop) and key not in seq.media_runs:
                self.retain_media(seq, run, now)
                held.append(run)
        return self._new_runs(seq, stop), held

    def _new_runs(self, seq: Sequence, stop: int) -> list[Media]:
        """Media before `stop` whose runs neither the sequence nor, as far as it may read, the cache has."""
        new: dict[bytes, Media] = {}
        for item in seq.media:
            key = seq.root.hash + item.digest
            known = key in seq.media_runs or (seq.control.read and key in self.allocator.media_runs)
            if self.needs_run(item, seq.length, stop) and not known:
                new.setdefault(item.digest, item)
        return list(new.values())

    def _drop_run(self, seq: Sequence, run: MediaRun, now: float) -> None:
        del seq.media_runs[run.key]
        self.allocator.release_media(run, now)
