"""Extends sequences. Reserves pages for the next tokens: new blocks, a copy of a shared partial block, states and
media runs."""

from __future__ import annotations

from operator import index

import numpy as np

from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.block_tables import Rows
from kvloom.core.prefix.multimodal import Media, MediaRun
from kvloom.core.state import CacheState

from .open import retain_media
from .sequence import Sequence, ensure_open, mark_special, sequence_at

__all__ = ["exceeds_quota", "extend", "extend_many", "give_states"]


def extend(state: CacheState, seq: Sequence, n: int) -> int:
    """Reserve pages for `n` more tokens. Return the number of missing pages, or 0 on success."""
    ensure_open(state, seq)
    n = index(n)
    if n < 0:
        raise ValueError(f"cannot extend by {n} tokens; give 0 or more")
    length = state.block_tables.length.item(seq.row)
    if length + n > state.max_tokens:
        raise ValueError(f"{length} + {n} tokens exceed max_tokens {state.max_tokens}")
    new_runs: list[Media] = []
    retained: list[MediaRun] = []
    media = 0
    if seq.media:
        retained = _retain_cached_runs(state, seq, length + n)
        new_runs = _new_runs(state, seq, length + n)
        media = sum(-(-m.tokens // state.block_tokens) for m in new_runs)
    blocks, copy_tail, states = _wants(state, seq, length, n)
    public = _public_rows(state, seq, length, blocks, copy_tail)
    missing = state.take(seq.owners, state.needs(blocks + copy_tail, states, media), public)
    if missing:
        for run in retained:
            del seq.media_runs[run.key]
            state.media_cache.release(run, state.clock.now())
        return missing
    if copy_tail:
        _copy_tail(state, seq, length // state.block_tokens)
    if blocks:
        _reserve(state, seq, blocks)
    if states:
        give_states(state, seq)
    for item in new_runs:
        rows = state.media.allocate(-(-item.tokens // state.block_tokens))
        seq.media_runs[seq.media_root + item.digest] = rows
    if copy_tail or states or seq.media:
        mark_special(state, seq)
    return 0


def exceeds_quota(state: CacheState, seq: Sequence, n: int) -> bool:
    """Return whether `n` more tokens exceed the tenant's quota even if all its cached pages were evicted."""
    ensure_open(state, seq)
    needs = _needs(state, seq, n)
    return seq.owners.account.beyond_quota(state.allocator.bytes_of(needs)) > 0


def extend_many(state: CacheState, rows: Rows, n: int | Rows = 1) -> int:
    """Reserve pages for `n` more tokens in each of many open sequences. `rows` contains the row numbers of the
    sequences. `n` is one number, or an array with one number for each sequence. Return the number of missing
    pages, or 0 on success."""
    table, block = state.block_tables, state.block_tokens
    rows = table.validated(rows)
    n = n if isinstance(n, np.ndarray) else index(n)
    if isinstance(n, np.ndarray) and n.shape != rows.shape:
        raise ValueError(f"{n.size} numbers of tokens for {rows.size} sequences; give one per row")
    least, most = (int(n.min()), int(n.max())) if isinstance(n, np.ndarray) and n.size else (n, n)
    if least < 0:
        raise ValueError(f"cannot extend by {least} tokens; give 0 or more")
    lengths = table.length[rows]
    new = (lengths + (n + (block - 1))) // block - table.blocks[rows]
    special = table.special[rows]
    if lengths.size and int((lengths + n).max()) > state.max_tokens:
        raise ValueError(f"{int(lengths.max())} + {most} tokens exceed max_tokens {state.max_tokens}")
    if special.any() or len(state.accounts.accounts) > 1 or most > block:
        needy = (new > 0) | special
        return _extend_each(state, rows[needy], np.broadcast_to(n, rows.shape)[needy].tolist())
    grow = rows[new > 0]
    if not grow.size:
        return 0
    owners = sequence_at(state, int(grow[0])).owners
    missing = state.take(owners, state.pages.needs(grow.size))
    if missing:
        return missing
    if state.pages.owners:
        for row in grow.tolist():
            _reserve(state, sequence_at(state, row), 1)
        return 0
    table.tables[:, grow, table.blocks[grow]] = state.pages.allocate(grow.size).T
    table.first_changed[grow] = np.minimum(table.first_changed[grow], table.blocks[grow])
    table.blocks[grow] += 1
    return 0


def _extend_each(state: CacheState, rows: Rows, counts: list[int]) -> int:
    """Extend sequences one by one. The sequence with row number `rows[i]` gets pages for `counts[i]` tokens. First
    checks that the pages of all sequences fit together, so that usually either all or none are extended. Return
    the number of missing pages."""
    sequences = [sequence_at(state, row) for row in rows.tolist()]
    total: dict[int, tuple[Account, list[int]]] = {}
    for seq, n in zip(sequences, counts, strict=True):
        account = seq.owners.account
        _, sums = total.setdefault(id(account), (account, [0] * len(state.pool.classes)))
        for cls, pages in enumerate(_needs(state, seq, n)):
            sums[cls] += pages
    together = [sum(pages) for pages in zip(*(sums for _, sums in total.values()), strict=True)]
    if together and state.pool.missing_slabs(together):
        account, _ = next(iter(total.values()))
        missing = state.allocator.free_pages(account, together)
        if missing:  # `missing` is 0 if releasing expired pins was enough
            return missing
    for account, sums in total.values():
        if account.beyond_quota(state.allocator.bytes_of(sums)):
            missing = state.allocator.free_pages(account, sums)
            if missing:
                return missing
    for seq, n in zip(sequences, counts, strict=True):
        missing = extend(state, seq, n)
        if missing:
            return missing
    return 0


def give_states(state: CacheState, seq: Sequence) -> None:
    """Allocate the live states of a sequence. If the sequence resumes from a snapshot, queue the copy of the snapshot
    to the live states. The pages must already be charged to the account."""
    live = state.states.allocate(1)
    state.block_tables.states[:, seq.row] = live[0]
    if seq.state_source is not None:
        state.copy_rows(seq.source_account, state.states, seq.state_source, live)
        seq.state_source = None


def _needs(state: CacheState, seq: Sequence, n: int) -> list[int]:
    """Return the number of pages of each size class that `n` more tokens need."""
    length = int(state.block_tables.length[seq.row])
    blocks, copy_tail, states = _wants(state, seq, length, n)
    media = sum(-(-item.tokens // state.block_tokens) for item in _new_runs(state, seq, length + n))
    return state.needs(blocks + copy_tail, states, media)


def _wants(state: CacheState, seq: Sequence, length: int, n: int) -> tuple[int, int, int]:
    """Return three numbers: the number of blocks to reserve, 1 if the partial block must be copied (else 0), and 1 if
    states must be allocated (else 0)."""
    blocks = -(-(length + n) // state.block_tokens) - state.block_tables.blocks.item(seq.row)
    copy_tail = int(n > 0 and seq.shared_tail)
    states = int(n > 0 and state.has_states and not state.block_tables.states[0, seq.row])
    return blocks if blocks > 0 else 0, copy_tail, states


def _public_rows(state: CacheState, seq: Sequence, length: int, blocks: int, copy_tail: int) -> int:
    """Return how many blocks belong to a public prefix, among the blocks to allocate for a sequence of `length` tokens.
    `blocks` is the number of new blocks, and `copy_tail` is 1 if the partial block is also copied.
    """
    owners = seq.owners
    if not owners.public_blocks:
        return 0
    have = state.block_tables.blocks.item(seq.row)
    return owners.public_rows(have, blocks) + owners.public_rows(length // state.block_tokens, copy_tail)


def _reserve(state: CacheState, seq: Sequence, blocks: int) -> None:
    """Allocate `blocks` more blocks. Their pages must already be charged to the account."""
    row, table = seq.row, state.block_tables
    have = table.blocks.item(row)
    near = table.tables[:, row, have - 1] if have and state.pages.owners else None
    pages = state.pages.allocate(blocks, near)
    table.tables[:, row, have : have + blocks] = pages.T
    if have < seq.owners.public_blocks:
        seq.owners.borrow(state.pages, pages, have)
    table.blocks[row] = have + blocks
    table.mark_changed(row, have)


def _copy_tail(state: CacheState, seq: Sequence, block: int) -> None:
    """Replace the shared pages of the partial block `block` by copies that only this sequence uses."""
    row, table = seq.row, state.block_tables
    source = table.tables[:, row, block][None].copy()
    target = state.pages.allocate(1, source[0] if state.pages.owners else None)
    state.copy_rows(seq.owners.give_up(state.pages, source, block), state.pages, source, target)
    table.tables[:, row, block] = target[0]
    if block < seq.owners.public_blocks:
        seq.owners.borrow(state.pages, target, block)
    table.mark_changed(row, block)
    seq.shared_tail = False


def _retain_cached_runs(state: CacheState, seq: Sequence, stop: int) -> list[MediaRun]:
    """Retain the cached media runs (pages of images) that are needed to compute the tokens up to `stop`, and return
    these media runs."""
    retained: list[MediaRun] = []
    if not seq.control.read:
        return retained
    now = state.clock.now()
    for item in seq.media:
        key = seq.media_root + item.digest
        run = state.media_cache.get(key)
        needed = run is not None and state.media_cache.needs_run(item, seq.length, stop)
        if run is not None and needed and key not in seq.media_runs:
            retain_media(state, seq, run, now)
            retained.append(run)
    return retained


def _new_runs(state: CacheState, seq: Sequence, stop: int) -> list[Media]:
    """Return the images before `stop` whose media runs (pages) must be allocated, because neither the sequence nor
    the cache has them. If the request does not read the cache, cached media runs are ignored."""
    new: dict[bytes, Media] = {}
    for item in seq.media:
        key = seq.media_root + item.digest
        known = key in seq.media_runs or (seq.control.read and key in state.media_cache)
        if state.media_cache.needs_run(item, seq.length, stop) and not known:
            new.setdefault(item.digest, item)
    return list(new.values())
