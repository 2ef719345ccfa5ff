"""Reserves pages for a load plan. After the load, publishes the loaded pages like computed pages, or cancels the load.

    reserve(plan) → Reservation      publish_loaded(reservation, loaded) → resumable tokens      cancel(reservation)

This module moves no bytes. The load job fills the pages and reports which pages were loaded.
"""

from __future__ import annotations

import numpy as np

from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.in_transfer import Mask, Reservation
from kvloom.core.prefix.resume_rule import longest_resume
from kvloom.core.state import CacheState

from .load_plan import LoadPlan

__all__ = ["cancel", "publish_loaded", "reserve"]


def reserve(state: CacheState, plan: LoadPlan) -> Reservation | None:
    """Allocate the missing pages of a plan, and retain the pages that the pool already has. The plan's match must not
    be stale. Returns None if the pool has too few pages for the plan and one more block. The request needs this block
    for its first step."""
    match, tree = plan.match, state.tree
    account = state.accounts[match.control.tenant]
    root = tree.root(match.root_hash, account, match.control.tenant, match.control.adapter)
    node = match.path[-1] if match.path else root
    tree.lock(node)  # the loaded tokens are published after this node
    blocks = -(-plan.end // state.block_tokens)
    rows = np.zeros((blocks, state.pages.width), np.int32)
    to_load = np.zeros(rows.shape, bool)
    cached = tree.rows(match.path, match.matched)[:blocks]
    rows[: len(cached)] = cached
    if plan.resume > match.matched:
        rows[match.matched // state.block_tokens :] = (
            0  # leave out a cached block whose tokens differ from the prompt
        )
    rows = tree.visible_rows(rows, plan.resume)
    states = 0
    for missing in plan.missing_pages():
        columns = missing.group.columns
        if missing.group.spec.unit == "state":
            states = 1
        else:
            to_load[np.ix_(missing.blocks, range(columns.start, columns.stop))] = True
    rows[to_load] = 0
    account.retain(state.pages.retain(rows))
    hashes = [plan.page_hash(b) for b in range(len(rows))]
    state_hash = plan.hash_at(plan.resume)
    reservation = Reservation(
        match.data, plan.resume, plan.end, hashes, state_hash, root, node, rows, to_load
    )
    state.in_transfer.add(reservation)
    needs = _needs(state, to_load, states)
    # One more block, with which the request starts. Otherwise the loaded pages could be evicted before
    # their use.
    first_step = state.needs(1, int(state.has_states), 0)
    if state.allocator.free_pages(account, [a + b for a, b in zip(needs, first_step, strict=True)]):
        state.in_transfer.remove(reservation)
        state.release(account, state.pages, rows)
        tree.unlock(node, state.clock.now())
        return None
    account.charge(state.allocator.bytes_of(needs))
    for cls in state.pages.classes:
        at = state.pages.columns_of(cls)
        wanted = to_load[:, at]
        part = rows[:, at]
        ids = state.pool.allocate(cls, int(wanted.sum()))
        assert ids is not None
        part[wanted] = ids
        rows[:, at] = part
    if states:
        reservation.states = state.states.allocate(1)
    state.in_transfer.pin_in_place(reservation, 1)
    return reservation


def publish_loaded(
    state: CacheState, reservation: Reservation, loaded: Mask | None, states_loaded: bool = True
) -> int:
    """Publish the loaded pages up to the length at which a prompt can resume, and end the reservation. Returns this
    length. `loaded` marks the pages that were loaded, and None means all pages."""
    now, tree, to_load = state.clock.now(), state.tree, reservation.to_load
    loaded = to_load if loaded is None else to_load & loaded
    for columns in tree.window_columns:  # the pages of one block and window are valid only together
        some = to_load[:, columns] & ~loaded[:, columns]
        loaded[some.any(1), columns] = False
    rows = _with_tree_rows(state, reservation, np.where(to_load & ~loaded, 0, reservation.rows))
    end, resume = _end(state, reservation, rows, loaded, states_loaded)
    if resume:
        node, _ = tree.publish(
            reservation.root,
            reservation.data[: end * TOKEN_BYTES],
            rows[: -(-end // state.block_tokens)],
            now,
            locked=reservation.node,
            last=True,
        )
        tree.invalidate_matches()
        if tree.needs_checkpoints:
            tree.checkpoint(node, end, reservation.states, now)
    _release(state, reservation, now)
    return resume


def cancel(state: CacheState, reservation: Reservation) -> None:
    """Free the pages of a reservation. The caller must ensure that no transfer still writes to the pages."""
    _release(state, reservation, state.clock.now())


def _needs(state: CacheState, to_load: Mask, states: int) -> list[int]:
    needs = state.states.needs(states)
    for cls in state.pages.classes:
        needs[cls] += int(to_load[:, state.pages.columns_of(cls)].sum())
    return needs


def _end(
    state: CacheState, reservation: Reservation, rows: Ids, loaded: Mask, states_loaded: bool
) -> tuple[int, int]:
    """Return two positions after a load in which some pages may have failed. The first is the end of the tokens to
    publish, for which `rows` has all needed pages. The second is the position at which a prompt can then resume.
    `rows` has the page ids of each block."""
    block, tree = state.block_tokens, state.tree
    lost = reservation.to_load & ~loaded
    if not lost.any() and (reservation.states is None or states_loaded):
        return reservation.end, reservation.resume
    if state.has_states:
        return 0, 0
    windowed = {c for columns in tree.window_columns for c in range(columns.start, columns.stop)}
    full = [c for c in range(state.pages.width) if c not in windowed]
    incomplete = (lost[:, full] & (rows[:, full] == 0)).any(1)
    reach = int(np.flatnonzero(incomplete)[0]) if incomplete.any() else len(rows)
    resume = min(reservation.end, reach * block) // block * block
    while resume:
        deepest = longest_resume(resume, tree.presence(rows), block)[0] // block * block
        if deepest == resume:
            break
        resume = deepest
    return resume, resume


def _with_tree_rows(state: CacheState, reservation: Reservation, rows: Ids) -> Ids:
    """Fill missing pages of `rows` from the tree, in place, and return `rows`. `rows` has the page ids of each
    block. Other requests may have published these pages since the reservation."""
    path, matched = state.tree.walk(reservation.root, reservation.data, reservation.end)
    known = state.tree.rows(path, matched)[: matched // state.block_tokens]
    part = rows[: len(known)]
    np.copyto(part, known[: len(part)], where=part == 0)
    return rows


def _release(state: CacheState, reservation: Reservation, now: float) -> None:
    state.in_transfer.pin_in_place(reservation, -1)
    state.in_transfer.remove(reservation)
    account, node = reservation.root.account, reservation.node
    state.release(account, state.pages, reservation.rows)
    if reservation.states is not None:
        state.release(account, state.states, reservation.states)
    for window in range(len(state.tree.windows)):
        last = max(0, node.end - 1) // state.block_tokens
        state.tree.queue_unneeded_range(node, window, 0, last)
    state.tree.unlock(node, now)
