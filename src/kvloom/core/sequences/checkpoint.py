"""Takes checkpoints of a sequence, and publishes its tokens in the radix tree."""

from __future__ import annotations

import numpy as np

from kvloom.core.prefix.node import Node
from kvloom.core.prefix.radix_tree import Retention
from kvloom.core.state import CacheState

from .sequence import Sequence, ensure_open

__all__ = ["checkpoint", "node_at", "publish", "take_checkpoints"]


def take_checkpoints(state: CacheState, seq: Sequence, before: int) -> None:
    """Take the checkpoints at positions that the last commit reached. `before` is the length before the commit."""
    if not state.tree.needs_checkpoints or not seq.control.store:
        return
    table = state.block_tables
    length = int(table.length[seq.row])
    named = {p for p in seq.checkpoint_positions if before < p <= length}
    positions = set(named)
    every = state.checkpoint_policy.every_blocks * state.block_tokens
    if every:
        positions.update(range((before // every + 1) * every, length + 1, every))
    if state.has_states:
        positions &= {int(table.state_length[seq.row])}
    for position in sorted(positions):
        checkpoint(state, seq, position, is_periodic=position not in named)
    if seq.checkpoint_positions and seq.checkpoint_positions[-1] <= length:
        seq.checkpoint_positions = ()
        table.wants_checkpoint[seq.row] = False


def checkpoint(
    state: CacheState, seq: Sequence, position: int | None = None, is_periodic: bool = False
) -> bool:
    """Take a checkpoint at `position` (None means the current end). A checkpoint beyond the current length is
    scheduled. `is_periodic` marks a state snapshot that is only taken because of the interval. Return whether a
    checkpoint was taken or scheduled.
    """
    ensure_open(state, seq)
    tree, table = state.tree, state.block_tables
    length = int(table.length[seq.row])
    here = int(table.state_length[seq.row]) if state.has_states else length
    position = here if position is None else position
    if not 0 <= position <= state.max_tokens:
        raise ValueError(f"checkpoint position {position} is outside 0 to max_tokens {state.max_tokens}")
    if not tree.needs_checkpoints or not seq.control.store or not position:
        return False
    if position > length:
        seq.checkpoint_positions = tuple(sorted({*seq.checkpoint_positions, position}))
        table.wants_checkpoint[seq.row] = True
        return True
    now = state.clock.now()
    if not state.has_states:
        node = node_at(state, seq, position, now)
        return node is not None and tree.checkpoint(node, position, None, now) is not None
    if position != here or not table.states[0, seq.row]:
        return False
    node = node_at(state, seq, position, now)
    if node is None:
        return False
    existing = tree.checkpoint_at(node, position)
    if existing is not None:
        existing.is_periodic &= is_periodic
        return False
    tree.lock(node)
    taken, account = None, seq.owners.account
    if not state.allocator.free_pages(account, state.states.needs(1)):
        node.account.charge(state.states.row_bytes)
        copy = state.states.allocate(1)
        live = table.states[:, seq.row][None].copy()
        taken = tree.checkpoint(node, position, copy.copy(), now)
        if taken is not None:
            taken.is_periodic = is_periodic
            seq.use_checkpoint(taken)
            account.retain(state.states.retain(live))
            state.copy_rows(account, state.states, live, copy)
        state.release(node.account, state.states, copy)
    tree.unlock(node, now)
    return taken is not None


def node_at(
    state: CacheState, seq: Sequence, position: int, now: float, closing: bool = False
) -> Node | None:
    """Return the tree node that contains the token before `position`, or None at position 0. If the tree lacks tokens
    of the sequence before `position`, adds these tokens first. Their last block may be partial. `closing` states that
    the caller will close the sequence next."""
    if position <= seq.published:
        node: Node | None = seq.node
        while node is not None and node.start >= position:
            node = node.parent
        return node if node is not None and node.parent is not None else None
    data = state.block_tables.tail[seq.row, : position - seq.published].tobytes()
    return publish(state, seq, seq.node, data, seq.published, position, now, closing)


def publish(
    state: CacheState,
    seq: Sequence,
    node: Node,
    data: bytes,
    first: int,
    last: int,
    now: float,
    closing: bool = False,
    lock: bool = False,
) -> Node:
    """Add tokens [first, last) of a sequence to the tree after `node`, and return the node where they end. If the tree
    already has some of the full blocks, the sequence uses the tree's pages and releases its own. `closing` states that
    the caller will close the sequence next. `lock` moves the sequence's lock to the returned node."""
    block = state.block_tokens
    table = state.block_tables.tables[:, seq.row, first // block : -(-last // block)]
    rows = table.T.copy()
    owner = seq.owners.at(first // block)
    # Priorities of one tenant have no effect on public blocks, which other tenants share.
    is_own = seq.control.retain and owner is seq.owners.private
    retention = _retention(seq, first, block) if is_own else (0, None)
    node, had_some = state.tree.publish(node, data, rows, now, retention, seq.node, closing, lock, owner)
    if had_some and last % block == 0:
        differs = rows != table.T
        if differs.any():
            seq.owners.retain(state.pages, np.where(differs, rows, 0), first // block)
            seq.owners.release(state.pages, np.where(differs, table.T, 0), first // block)
            table[:] = rows.T
            state.block_tables.mark_changed(seq.row, first // block)
    return node


def _retention(seq: Sequence, position: int, block: int) -> Retention:
    """Return the retention for the token at `position`: the priority and the expiry time that the request sets."""
    for item in seq.control.retain:
        start = item.start // block * block
        if start <= position and (item.stop is None or position < item.stop):
            return item.priority, None if item.ttl is None else seq.opened + item.ttl
    return 0, None
