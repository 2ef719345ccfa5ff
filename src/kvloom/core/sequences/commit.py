"""Commits computed tokens: publishes full blocks, takes checkpoints, and releases pages outside windows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvloom.core.pool.block_tables import Rows
from kvloom.core.prefix.block_hash import TOKEN_BYTES, token_bytes
from kvloom.core.state import CacheState

from .checkpoint import publish, take_checkpoints
from .sequence import Sequence, ensure_open, mark_special, sequence_at

__all__ = ["commit", "commit_many"]


def commit(state: CacheState, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
    """Commit tokens. The pages must be reserved. See `KVCache.commit`."""
    ensure_open(state, seq)
    data = token_bytes(tokens)
    row, table, block = seq.row, state.block_tables, state.block_tokens
    length = table.length.item(row)
    n = len(data) // TOKEN_BYTES
    end = length + n
    if end > table.blocks.item(row) * block or (n and not _is_ready(state, seq, end)):
        raise ValueError(
            f"commit of {n} tokens after {length}, but {seq.reserved_tokens} are reserved; extend first"
        )
    at = end if state_length is None else state_length
    if not table.state_length.item(row) <= at <= end:
        raise ValueError(
            f"state_length {at} is outside {seq.state_length} (now) to {end} (the committed tokens)"
        )
    table.state_length[row] = at
    if seq.media:
        data = _with_media_ids(state, seq, data, length)
    unpublished = length - seq.published
    if unpublished:
        data = table.tail[row, :unpublished].tobytes() + data
    rest = (unpublished + n) % block
    full = unpublished + n - rest
    table.length[row] = end
    if full:
        _publish_blocks(state, seq, data[: full * TOKEN_BYTES] if rest else data)
    if rest:
        table.tail[row, :rest] = np.frombuffer(data, np.int32, rest, full * TOKEN_BYTES)
    if seq.media:
        _commit_media(state, seq, end)
    if state.tree.needs_checkpoints:
        take_checkpoints(state, seq, length)
        _leave_windows(state, seq)
    if seq.media:
        mark_special(state, seq)


def commit_many(state: CacheState, rows: Rows, tokens: npt.ArrayLike) -> None:
    """Commit one token for each of several open sequences. `rows` contains their row numbers in the block tables
    (`Sequence.row`), and `tokens` has one token id per row. See `KVCache.commit_many`."""
    table, block = state.block_tables, state.block_tokens
    rows = table.validated(rows)
    ids = np.frombuffer(token_bytes(tokens), np.int32)
    if ids.shape != rows.shape:
        raise ValueError(f"{ids.size} tokens for {rows.size} sequences; give one token per row")
    lengths = table.length[rows]
    late = lengths >= table.blocks[rows] * block
    if late.any():
        raise ValueError(f"row {int(rows[late][0])} has no page for its next token; extend first")
    special = table.special[rows]
    if special.any():
        for row, token in zip(rows[special].tolist(), ids[special].tolist(), strict=True):
            commit(state, sequence_at(state, row), [token])
        rows, ids, lengths = rows[~special], ids[~special], lengths[~special]
    table.tail[rows, lengths % block] = ids
    lengths += 1
    table.length[rows] = table.state_length[rows] = lengths
    filled = rows[lengths % block == 0]
    if filled.size:
        _publish_many(state, filled)
    for row in rows[table.wants_checkpoint[rows]].tolist():
        take_checkpoints(state, sequence_at(state, row), int(table.length[row]) - 1)
    every = state.checkpoint_policy.every_blocks
    if every and state.tree.needs_checkpoints:
        for row in rows[lengths % (every * block) == 0].tolist():
            take_checkpoints(state, sequence_at(state, row), int(table.length[row]) - 1)
    for window, visibility in enumerate(state.tree.windows):
        steps = visibility.first_visible_each(lengths) // block - table.first[window, rows]
        if (steps > 0).any():
            _leave_window_many(state, window, rows[steps == 1])
            for row in rows[steps > 1].tolist():
                _leave_windows(state, sequence_at(state, row))


def _publish_many(state: CacheState, rows: Rows) -> None:
    """Publish one full block of each sequence. `rows` contains the row numbers of the sequences in the block tables.
    Blocks of sequences that are the only user of their node are published together, which takes less time."""
    table, tree = state.block_tables, state.tree
    plain: list[Sequence] = []
    rest: list[Sequence] = []
    for row in rows.tolist():
        seq = sequence_at(state, row)
        own = seq.control.store and not seq.control.retain and tree.may_append(seq.node, seq.owners.private)
        (plain if own else rest).append(seq)
    if plain:
        at = np.array([seq.row for seq in plain])
        pages = table.tables[:, at, table.length[at] // state.block_tokens - 1].T
        nodes = [seq.node for seq in plain]
        tree.append_blocks(nodes, table.tail[at].tobytes(), pages, state.clock.now())
        for seq in plain:
            seq.published += state.block_tokens
    for seq in rest:
        _publish_blocks(state, seq, table.tail[seq.row].tobytes())


def _publish_blocks(state: CacheState, seq: Sequence, data: bytes) -> None:
    """Publish full blocks. `data` contains their tokens, which follow the published tokens. If the request does not
    store blocks, only `seq.published` is increased."""
    tokens = len(data) // TOKEN_BYTES
    start = seq.published
    if not seq.control.store:
        seq.published += tokens
        return
    now = state.clock.now()
    node, end = seq.node, start + tokens
    if seq.control.retain or start < seq.owners.public_blocks * state.block_tokens:
        for first, last in pairwise([start, *_cuts(state, seq, start, end)]):
            part = data[(first - seq.published) * TOKEN_BYTES : (last - seq.published) * TOKEN_BYTES]
            node = publish(state, seq, node, part, first, last, now)
            start = last
        data = data[(start - seq.published) * TOKEN_BYTES :]
    seq.node = publish(state, seq, node, data, start, end, now, lock=True)
    seq.published = end


def _cuts(state: CacheState, seq: Sequence, start: int, stop: int) -> list[int]:
    """Return the block boundaries inside (start, stop) at which tokens must be published separately. These are the
    boundaries at which the priority or TTL of the request's retain ranges changes, and the end of the public prefix."""
    block = state.block_tokens
    edges = {r.start // block * block for r in seq.control.retain}
    edges |= {-(-r.stop // block) * block for r in seq.control.retain if r.stop is not None}
    edges.add(seq.owners.public_blocks * block)
    return sorted(e for e in edges if start < e < stop)


def _is_ready(state: CacheState, seq: Sequence, stop: int) -> bool:
    """Return whether the tokens up to `stop` can be committed: no partial block waits for its copy, and states and
    media runs are allocated."""
    if seq.shared_tail or (state.has_states and not state.block_tables.states[0, seq.row]):
        return False
    return not seq.media or all(
        not state.media_cache.needs_run(item, seq.length, stop)
        or seq.media_root + item.digest in seq.media_runs
        for item in seq.media
    )


def _with_media_ids(state: CacheState, seq: Sequence, data: bytes, start: int) -> bytes:
    """Replace media placeholders in committed tokens by the ids of their content. `data` contains the tokens from
    position `start` on."""
    ids = np.frombuffer(data, np.int32).copy()
    for item in seq.media:
        media_id = state.media_ids.id_of(item.digest)
        ids[max(0, item.start - start) : max(0, item.stop - start)] = media_id
    return ids.tobytes()


def _commit_media(state: CacheState, seq: Sequence, length: int) -> None:
    """Cache the media runs of images whose placeholders are computed. Release runs that later tokens do not read."""
    account, now, cache = seq.owners.account, state.clock.now(), state.media_cache
    for item in seq.media:
        key = seq.media_root + item.digest
        run = seq.media_runs.get(key)
        if item.stop > length or run is None:
            continue
        if seq.control.store and isinstance(run, np.ndarray) and key not in cache:
            seq.media_runs[key] = run = cache.add(key, account, run, item.tokens, now)
        if cache.outlives_prompt or any(
            later.digest == item.digest and later.stop > length for later in seq.media
        ):
            continue
        del seq.media_runs[key]
        if isinstance(run, np.ndarray):
            state.release(account, state.media, run)
        else:
            cache.release(run, now)


def _leave_windows(state: CacheState, seq: Sequence) -> None:
    """Release a sequence's pages that are now outside a window. Published pages stay cached, and other pages become
    free.

    Exception: the live states may cover fewer tokens than the sequence has. The remaining tokens are then computed
    again, so pages in their windows are kept.
    """
    row, table, tree = seq.row, state.block_tables, state.tree
    length = int((table.state_length if state.has_states else table.length)[row])
    for window, (visibility, columns) in enumerate(zip(tree.windows, tree.window_columns, strict=True)):
        old = int(table.first[window, row])
        new = visibility.first_visible(length) // state.block_tokens
        if new <= old:
            continue
        gone = np.zeros((new - old, state.pages.width), np.int32)
        part = table.tables[columns, row, old:new]
        gone[:, columns] = part.T
        seq.owners.release(state.pages, gone, old)
        part[:] = 0
        table.first[window, row] = new
        tree.queue_unneeded_range(seq.node, window, old, new - 1)


def _leave_window_many(state: CacheState, window: int, rows: Rows) -> None:
    """Do the work of `_leave_windows` for many sequences at once: in each sequence, release the one block that has
    left the window. `rows` are the row numbers of the sequences. If sequences share a page, if a page is
    missing, or if there are several accounts, all sequences are processed one by one.
    """
    table, columns = state.block_tables, state.tree.window_columns[window]
    if not rows.size:
        return
    old = table.first[window, rows]
    pages = table.tables[columns, rows, old]
    is_shared = len(set(pages[0].tolist())) < rows.size
    if len(state.accounts.accounts) > 1 or is_shared or not pages.all():
        for row in rows.tolist():
            _leave_windows(state, sequence_at(state, row))
        return
    gone = np.zeros((rows.size, state.pages.width), np.int32)
    gone[:, columns] = pages.T
    state.release(sequence_at(state, int(rows[0])).owners.account, state.pages, gone)
    table.tables[columns, rows, old] = 0
    table.first[window, rows] = old + 1
    for row, block in zip(rows.tolist(), old.tolist(), strict=True):
        state.tree.queue_unneeded_range(sequence_at(state, row).node, window, block, block)
