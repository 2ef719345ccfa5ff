"""Forks a sequence: creates a second sequence with the same tokens, which shares all pages except the states."""

from __future__ import annotations

from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.state import CacheState

from .extend import give_states
from .open import retain_media
from .sequence import Sequence, ensure_open, mark_special

__all__ = ["fork"]


def fork(state: CacheState, seq: Sequence) -> Sequence | None:
    """Fork `seq`. Return None if the pool has no free pages for copies of its recurrent states."""
    ensure_open(state, seq)
    owners, table = seq.owners, state.block_tables
    account = owners.account
    has_live = bool(state.has_states and table.states[0, seq.row])
    row = table.take_row()
    if has_live and state.take(owners, state.needs(0, 1, 0)):
        table.free_row(row)
        return None
    now = state.clock.now()
    child = Sequence(seq.cache, row, seq.root, seq.node, seq.control, owners, now)
    table.assign(row, child)
    account.open += 1
    state.tree.lock(seq.node)
    child.published, child.resumed, child.prompt = seq.published, seq.resumed, seq.prompt
    child.cold_runs, child.cold_blocks = list(seq.cold_runs), seq.cold_blocks
    for cold in child.cold_runs:
        cold.users += 1
    child.checkpoint_positions, child.media = seq.checkpoint_positions, seq.media
    child.media_root = seq.media_root
    length = int(table.length[seq.row])
    blocks = -(-length // state.block_tokens)
    rows = table.tables[:, seq.row, :blocks].T.copy()
    owners.retain(state.pages, rows)
    table.tables[:, row, :blocks] = rows.T
    table.blocks[row], table.length[row] = blocks, length
    table.state_length[row] = table.state_length[seq.row]
    table.first[:, row] = table.first[:, seq.row]
    table.tail[row] = table.tail[seq.row]
    table.mark_changed(row, 0)
    table.wants_checkpoint[row] = table.wants_checkpoint[seq.row]
    child.shared_tail = length % state.block_tokens != 0
    if has_live:
        give_states(state, child)
        source = table.states[:, seq.row][None].copy()
        account.retain(state.states.retain(source))
        state.copy_rows(account, state.states, source, table.states[:, row][None])
    elif seq.state_source is not None:
        child.state_source, child.source_account = seq.state_source.copy(), seq.source_account
        child.source_account.retain(state.states.retain(child.state_source))
    for key, run in seq.media_runs.items():
        if isinstance(run, MediaRun):
            retain_media(state, child, run, now)
        else:
            account.retain(state.media.retain(run))
            child.media_runs[key] = run.copy()
    mark_special(state, child)
    return child
