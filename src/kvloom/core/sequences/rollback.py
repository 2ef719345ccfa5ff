"""Rolls a sequence back: discards its last tokens and resumes at the nearest resumable position."""

from __future__ import annotations

from operator import index

import numpy as np

from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.node import Checkpoint, Node
from kvloom.core.prefix.resume_rule import longest_resume
from kvloom.core.state import CacheState

from .open import resume_from
from .sequence import Sequence, ensure_open, mark_special

__all__ = ["rollback"]


def rollback(state: CacheState, seq: Sequence, n: int) -> int:
    """Discard the last `n` tokens. Return the new length, which may be shorter than requested."""
    ensure_open(state, seq)
    table, tree = state.block_tables, state.tree
    length = int(table.length[seq.row])
    n = index(n)
    if not 0 <= n <= length:
        raise ValueError(f"cannot roll back {n} of {length} tokens; give 0 to {length}")
    now = state.clock.now()
    blocks = -(-length // state.block_tokens)
    path = tree.path(seq.node)
    in_tree = tree.rows(path, min(seq.node.end, length))
    rows = table.tables[:, seq.row, :blocks].T.copy()
    known = min(len(in_tree), blocks)
    np.copyto(rows[:known], in_tree[:known], where=rows[:known] == 0)
    resume, checkpoint = _resumable_below(state, seq, path, rows, length - n, length)
    if (
        resume < seq.cold_blocks * state.block_tokens
    ):  # tokens in cold blocks have no pages in the pool: start again
        resume, checkpoint = 0, None
        seq.release_cold_runs()
    _shorten(state, seq, resume, rows, path, now)
    if state.has_states and resume < table.state_length[seq.row]:
        _rewind_states(state, seq, checkpoint, now)
    table.state_length[seq.row] = min(resume, int(table.state_length[seq.row]))
    mark_special(state, seq)
    return resume


def _resumable_below(
    state: CacheState, seq: Sequence, path: list[Node], rows: Ids, target: int, length: int
) -> tuple[int, Checkpoint | None]:
    """Return the longest resumable position at or below `target`. Also return the checkpoint there if the states must
    be restored from its snapshot, otherwise None."""
    table, tree = state.block_tables, state.tree
    if target == length or not tree.needs_checkpoints:
        return target, None
    windows = tree.presence(rows)
    if not state.has_states or target >= table.state_length[seq.row]:
        resume = longest_resume(target, windows, state.block_tokens)[0]
        if not state.has_states or resume >= table.state_length[seq.row]:
            return resume, None
    candidates, reach = list(path), seq.node.end
    if target > seq.published == seq.node.end:  # a snapshot in the partial last block of this sequence
        ids = table.tail[seq.row, : target - seq.published].tobytes()
        below, matched = tree.walk(seq.node, ids, target - seq.published)
        candidates += below
        reach += matched
    found = {
        c.position: c
        for node in reversed(candidates)
        for c in reversed(node.checkpoints)
        if c.position <= reach
    }
    resume, _ = longest_resume(target, windows, state.block_tokens, found)
    return resume, found.get(resume)


def _shorten(state: CacheState, seq: Sequence, resume: int, rows: Ids, path: list[Node], now: float) -> None:
    """Cut the block table of a sequence to its first `resume` tokens, and release the pages that these tokens do not
    need. `rows` has the page ids of the sequence's blocks. If published blocks are cut, the sequence's lock moves up
    in the tree."""
    row, block, table = seq.row, state.block_tokens, state.block_tables
    left = state.tree.visible_rows(rows[: -(-resume // block)], resume)
    reserved = int(table.blocks[row])
    before = table.tables[:, row, :reserved].T.copy()
    seq.owners.retain(state.pages, left)
    seq.owners.release(state.pages, before)
    table.tables[:, row, :reserved] = 0
    table.tables[:, row, : len(left)] = left.T
    table.blocks[row] = len(left)
    table.length[row] = resume
    table.mark_changed(row, 0)
    state.set_window_edges(row, resume)
    boundary = resume // block * block
    if boundary < seq.published:
        _unpublish(state, seq, path, boundary, resume, now)
    seq.shared_tail = resume % block > 0 and state.pages.shared(left[-1:])


def _unpublish(
    state: CacheState, seq: Sequence, path: list[Node], boundary: int, resume: int, now: float
) -> None:
    """Move the sequence's lock to the node that ends at the earlier block boundary `boundary`. Splits a node if
    needed. The tokens from `boundary` to `resume` then count as unpublished again."""
    tail, tree = resume - boundary, state.tree
    if not seq.control.store and boundary >= seq.node.end:
        seq.published = boundary  # later tokens count as not in the tree
        return
    text = b"".join(bytes(n.text) for n in path if n.end > boundary)
    start = next((n.start for n in path if n.end > boundary), boundary)
    if tail:
        offset = (boundary - start) * TOKEN_BYTES
        state.block_tables.tail[seq.row, :tail] = np.frombuffer(text, np.int32, tail, offset)
    node: Node = seq.root
    for passed in path:
        if passed.start >= boundary:
            break
        node = passed if passed.end <= boundary else tree.split(passed, boundary)
    tree.lock(node)
    tree.unlock(seq.node, now)
    seq.node = node
    seq.published = boundary


def _rewind_states(state: CacheState, seq: Sequence, checkpoint: Checkpoint | None, now: float) -> None:
    """Release the live states of a sequence. If `checkpoint` is not None, the next `extend` queues the copy of its
    snapshot to new live states."""
    table = state.block_tables
    live = table.states[:, seq.row][None].copy()
    if live[0, 0]:
        state.release(seq.owners.account, state.states, live)
        table.states[:, seq.row] = 0
    if seq.state_source is not None:
        state.release(seq.source_account, state.states, seq.state_source)
        seq.state_source = None
    if checkpoint is not None:
        resume_from(state, seq, checkpoint, now)
