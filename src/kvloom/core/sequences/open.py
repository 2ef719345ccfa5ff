"""Opens a sequence on the cached prefix of its prompt, and closes sequences. The pages of a closed sequence stay
cached."""

from __future__ import annotations

import numpy as np

from kvloom.core.control import CacheControl
from kvloom.core.eviction.policies import ReuseHistory
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.lookup import Match
from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.prefix.node import Checkpoint, Node
from kvloom.core.state import CacheState

from .checkpoint import node_at
from .sequence import Sequence, SequenceOwner, ensure_open, mark_special

__all__ = ["close_sequence", "open_sequence", "resume_from", "retain_media"]


MAX_RETAINED = 4
"""Largest number of checkpoints that a prompt takes for retained token ranges, one at the end of each range."""


def open_sequence(state: CacheState, cache: SequenceOwner, match: Match, is_counted: bool = True) -> Sequence:
    """Open a sequence on a match that is not stale. See `KVCache.open`."""
    if is_counted:
        state.observe_lookup(match)
    runs = _media_runs(state, match) if match.media else ()
    tree, control, resume = state.tree, match.control, match.resume
    row = state.block_tables.take_row()
    now = state.clock.now()
    owners = state.owners(control, match.public)
    account = owners.account
    root = tree.root(match.root_hash, owners.at(0), control.adapter)
    node = _hit_path(state, match, root, now) if match.path else root
    tree.lock(node)
    seq = Sequence(cache, row, root, node, control, owners, now)
    seq.media_root = match.media_root
    state.block_tables.assign(row, seq)
    account.open += 1
    seq.resumed = resume
    seq.prompt = match.length
    if match.media:
        seq.media = tuple(sorted(match.media, key=lambda m: m.start))
    if resume:
        rows = tree.visible_rows(match.rows, resume) if tree.windows else match.rows
        _fill_row(state, seq, resume, rows, match.data)
    mark_special(state, seq)
    state.block_tables.first_changed[row] = 0
    if tree.needs_checkpoints:
        if match.checkpoint is not None:
            resume_from(state, seq, match.checkpoint, now)
        elif resume and state.checkpoint_policy.branch and tree.windows and not state.has_states:
            tree.checkpoint(_descend(node, match.data, resume), resume, None, now)
        seq.checkpoint_positions = _checkpoint_positions(state, match)
        state.block_tables.wants_checkpoint[row] = bool(seq.checkpoint_positions)
    for run in runs:
        retain_media(state, seq, run, now)
        if is_counted:
            state.counts.hit_media(len(run.rows))
    if resume and is_counted:
        has_snapshot = match.checkpoint is not None and state.has_states
        firsts = state.block_tables.first[:, row].tolist() if tree.windows else ()
        state.counts.hit(resume, has_snapshot, firsts)
    learner = account.queue.learner
    if learner is not None and control.store:
        seq.history = learner.on_open(node, _ghost_history(state, match), resume, now)
    return seq


def resume_from(state: CacheState, seq: Sequence, checkpoint: Checkpoint, now: float) -> None:
    """Make a sequence resume from the state snapshot of `checkpoint`. The first `extend` queues the copy of the
    snapshot to the sequence's own pages. Until then, the snapshot's pages stay in use."""
    assert checkpoint.states is not None
    seq.state_source = checkpoint.states.copy()
    seq.source_account = checkpoint.node.account
    seq.source_account.retain(state.states.retain(seq.state_source))
    seq.use_checkpoint(checkpoint)
    checkpoint.hits += 1
    checkpoint.ended = False
    seq.source_account.queue.policy.on_hit(checkpoint, now)
    checkpoint.last_used = now


def retain_media(state: CacheState, seq: Sequence, run: MediaRun, now: float) -> None:
    """Retain a cached media run for a sequence, at most once."""
    if run.key not in seq.media_runs:
        state.media_cache.retain(run, now)
        seq.media_runs[run.key] = run


def _media_runs(state: CacheState, match: Match) -> list[MediaRun]:
    """Return the cached pages of images (media runs) that are read by the tokens after the hit. The result is empty
    for models without cross attention."""
    cache = state.media_cache
    return [
        cache[match.media_root + item.digest]
        for item in match.media
        if cache.outlives_prompt and cache.needs_run(item, match.resume, match.resume)
    ]


def _ghost_history(state: CacheState, match: Match) -> ReuseHistory | None:
    """Return the reuse history of the evicted tokens that follow the hit in the prompt. Return None if no such
    tokens were evicted, or if their history is not stored."""
    if match.miss.reason != "evicted":
        return None
    place = match.path[-1].serial if match.path else match.root_hash
    ghost = state.ghosts.find(place, match.data, match.matched * TOKEN_BYTES)
    return None if ghost is None else ghost.history


def _hit_path(state: CacheState, match: Match, root: Node, now: float) -> Node:
    """Record a hit of the matched nodes below `root`, and return the node that ends at the last block boundary of the
    hit. If a node contains this boundary, the node is split there."""
    boundary = match.resume // state.block_tokens * state.block_tokens
    tree, node, before = state.tree, root, now
    for passed in match.path:
        if passed.start >= boundary:
            if passed.start < match.resume:
                before = passed.last_used
                passed.last_used = now
            break
        before = passed.last_used
        node = passed if passed.end <= boundary else tree.split(passed, boundary)
        tree.hit(node, now)
        if match.control.retain and node.owner == state.accounts.owner(match.control.tenant):
            _raise_priority(node, match.control, state.block_tokens, now)
        if passed is not node:
            passed.last_used = now if boundary < match.resume else passed.last_used
            break
    if match.resume:
        state.counts.reuse_seconds.add(now - before)
    return node


def _raise_priority(node: Node, control: CacheControl, block: int, now: float) -> None:
    """Apply the retain ranges of a request to a node that is already cached, if a range covers the whole node. A higher
    priority that the node already has is not lowered."""
    for item in control.retain:
        if item.start <= node.start and (item.stop is None or node.end <= -(-item.stop // block) * block):
            if item.priority >= node.retention_priority(now):
                node.priority = item.priority
                node.expires = None if item.ttl is None else now + item.ttl
            return


def _fill_row(state: CacheState, seq: Sequence, resume: int, rows: Ids, data: bytes) -> None:
    """Fill the block table of a sequence that resumes after `resume` tokens, and retain its pages. Sets the page
    ids (`rows`, one row per block), the first visible block of each window, and the tokens of the partial block
    (from `data`)."""
    row, table, blocks = seq.row, state.block_tables, len(rows)
    seq.owners.retain(state.pages, rows)
    table.tables[:, row, :blocks] = rows.T
    table.blocks[row] = blocks
    table.length[row] = table.state_length[row] = resume
    if state.tree.windows:
        state.set_window_edges(row, resume)
    tail = resume - seq.published
    if tail:
        start = seq.published * TOKEN_BYTES
        table.tail[row, :tail] = np.frombuffer(data, np.int32, tail, start)
        seq.shared_tail = True


def _descend(node: Node, data: bytes, position: int) -> Node:
    """Return the node that contains `position`. The search starts at `node` and follows the path of `data` down the
    tree."""
    ids = memoryview(data).cast("i")
    while node.end < position:
        node = node.children[ids[node.end]]
    return node


def _checkpoint_positions(state: CacheState, match: Match) -> tuple[int, ...]:
    """Return the positions at which a new sequence should take checkpoints, in order."""
    if not match.control.store:
        return ()
    positions = set()
    if state.checkpoint_policy.prompt_end:
        early = state.checkpoint_policy.before_last and match.length > state.block_tokens
        positions.add(match.length - early)
        if early and not state.has_states:
            # Tiers store full blocks only. An identical prompt resumes from a tier at its last full block.
            positions.add((match.length - 1) // state.block_tokens * state.block_tokens)
    if state.checkpoint_policy.branch:
        # The tree has the tokens up to here, but no prompt can resume here. Take a checkpoint for the next prompt.
        positions.add(match.matched // state.block_tokens * state.block_tokens)
    if match.public:
        positions.add(match.public)  # other tenants resume here
    if match.control.retain:
        # Later prompts share the retained token ranges.
        stops = (item.stop for item in match.control.retain if item.stop is not None and item.priority > 0)
        shared = {stop // state.block_tokens * state.block_tokens for stop in stops if stop < match.length}
        positions |= set(sorted(shared)[-MAX_RETAINED:])
    return tuple(sorted(p for p in positions if p > match.resume))


def close_sequence(state: CacheState, seq: Sequence) -> Node:
    """Close a sequence and return the node where its tokens end."""
    ensure_open(state, seq)
    now = state.clock.now()
    tree, table = state.tree, state.block_tables
    account, row = seq.owners.account, seq.row
    length = table.length.item(row)
    node = seq.node
    if seq.control.store and length > seq.resumed:
        node = _publish_end(state, seq, now)
    firsts = table.first[:, row].tolist() if tree.windows else ()
    seq.owners.release(state.pages, table.tables[:, row, : table.blocks.item(row)].T)
    if state.has_states and table.states[0, row]:
        state.release(account, state.states, table.states[:, row][None].copy())
    if seq.state_source is not None:
        state.release(seq.source_account, state.states, seq.state_source)
    for run in seq.media_runs.values():
        if isinstance(run, MediaRun):
            state.media_cache.release(run, now)
        else:
            state.release(account, state.media, run)
    seq.release_cold_runs()
    table.free_row(row)
    account.open -= 1
    learner = account.queue.learner
    is_observed = learner is not None and seq.history is not None
    if learner is not None and seq.history is not None:
        path = tree.path(node)[::-1]
        learner.on_close(seq.history, path, length, seq.control.tenant, seq.finish_reason, now)
    passed: Node | None = node
    while passed is not None:
        passed.last_used = now
        passed = passed.parent
    if is_observed and node is not seq.node:
        tree.requeue(node, now)
    for checkpoint in seq.used_checkpoints:
        checkpoint.users -= 1
        if not checkpoint.users and checkpoint.queued is not None:
            checkpoint.node.account.queue.push(checkpoint, now)  # its priority may fall
    seq.used_checkpoints = []
    for window, first in enumerate(firsts):
        tree.queue_unneeded_range(node, window, first, length // state.block_tokens)
    tree.unlock(seq.node, now)
    if seq.control.session is not None:
        state.pins.note_session(seq.control.session, node)
    if tree.offload_source is not None:
        tree.offload_source.on_sequence_closed(node)
    return node


def _publish_end(state: CacheState, seq: Sequence, now: float) -> Node:
    """Publish the partial last block, and take a checkpoint at the end of the sequence if the model needs checkpoints.
    The live states of the sequence become the snapshot. Return the node where the published tokens end. If
    `CheckpointPolicy.turn_end` is off, models that need checkpoints publish nothing here."""
    tree, table = state.tree, state.block_tables
    if not tree.needs_checkpoints:
        if table.length.item(seq.row) == seq.published:
            return seq.node
    elif not state.checkpoint_policy.turn_end:
        return seq.node
    end = int((table.state_length if state.has_states else table.length)[seq.row])
    node = node_at(state, seq, end, now, closing=True)
    if node is None:
        return seq.node
    if tree.needs_checkpoints:
        states = table.states[:, seq.row][None].copy() if state.has_states else None
        # The live states are charged to the tenant, so they cannot become a snapshot of a public prefix.
        if states is None or (states[0, 0] and node.account is seq.owners.account):
            tree.checkpoint(node, end, states, now)
    return node
