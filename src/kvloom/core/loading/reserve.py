"""Reserves pages for a load plan. After the load, publishes the loaded pages like computed pages, or cancels the load.

    reserve(plan) → Reservation      publish_loaded(reservation, loaded) → resumable tokens      cancel(reservation)

This module moves no bytes. The load job fills the pages and reports which pages were loaded.
"""

from __future__ import annotations

import numpy as np

from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.in_transfer import Mask, Reservation
from kvloom.core.prefix.node import Node
from kvloom.core.prefix.resume_rule import longest_resume
from kvloom.core.state import CacheState

from .load_plan import LoadPlan

__all__ = ["cancel", "publish_loaded", "reserve"]


def reserve(state: CacheState, plan: LoadPlan) -> Reservation | None:
    """Allocate the missing pages of a plan, and retain the pages that the pool already has. The plan's match must not
    be stale. Return None if the pool has too few pages for the plan and one more block. The request needs this block
    for its first step."""
    match, tree = plan.match, state.tree
    owners = state.owners(match.control, match.public)
    root = tree.root(match.root_hash, owners.at(0), match.control.adapter)
    node = match.path[-1] if match.path else root
    tree.lock(node)  # the loaded tokens are published after this node
    blocks = -(-plan.end // state.block_tokens)
    rows = np.zeros((blocks, state.pages.width), np.int32)
    to_load = np.zeros(rows.shape, bool)
    cached = tree.rows(match.path, match.matched)[:blocks]
    rows[: len(cached)] = cached
    if plan.resume > match.matched:
        rows[match.matched // state.block_tokens :] = (
            0  # no page of a cached block whose tokens differ from the prompt
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
    owners.retain(state.pages, rows)
    hashes = [plan.page_hash(b) for b in range(len(rows))]
    state_hash = plan.hash_at(plan.resume)
    reservation = Reservation(
        match.data, plan.resume, plan.end, hashes, state_hash, root, owners, node, rows, to_load
    )
    state.in_transfer.add(reservation)
    needs = _needs(state, to_load, states)
    # One more block, for the first step of the request. Without it, the loaded pages could be evicted before they are
    # used.
    first_step = state.needs(1, int(state.has_states), 0)
    public = to_load[: owners.public_blocks]
    public_size = state.pages.bytes_of(public.astype(np.int32))
    if public_size:
        state.allocator.limit_public(public_size)
    if state.allocator.free_pages(owners.account, [a + b for a, b in zip(needs, first_step, strict=True)]):
        state.in_transfer.remove(reservation)
        owners.release(state.pages, rows)
        tree.unlock(node, state.clock.now())
        return None
    owners.charge(state.pages.bytes_of(to_load.astype(np.int32)), public_size)
    for cls in state.pages.classes:
        at = state.pages.columns_of(cls)
        wanted = to_load[:, at]
        part = rows[:, at]
        ids = state.pool.allocate(cls, int(wanted.sum()))
        assert ids is not None
        part[wanted] = ids
        rows[:, at] = part
    owners.borrow(state.pages, np.where(to_load, rows, 0))
    if states:
        reservation.state_account.charge(state.states.row_bytes)
        reservation.states = state.states.allocate(1)
    state.in_transfer.pin_in_place(reservation, 1)
    return reservation


def publish_loaded(
    state: CacheState, reservation: Reservation, loaded: Mask | None, states_loaded: bool = True
) -> int:
    """Publish the loaded pages up to the length at which a prompt can resume, and end the reservation. Return this
    length. `loaded` marks the pages that were loaded, and None means all pages. `states_loaded` is true if the state
    snapshot was loaded."""
    now, tree, to_load = state.clock.now(), state.tree, reservation.to_load
    loaded = to_load if loaded is None else to_load & loaded
    for columns in tree.window_columns:  # the pages of one block and window are valid only together
        some = to_load[:, columns] & ~loaded[:, columns]
        loaded[some.any(1), columns] = False
    rows = _with_tree_rows(state, reservation, np.where(to_load & ~loaded, 0, reservation.rows))
    end, resume = _end(state, reservation, rows, loaded, states_loaded)
    if resume:
        node = _publish(state, reservation, rows, end, now)
        tree.invalidate_matches()
        if tree.needs_checkpoints:
            tree.checkpoint(node, end, reservation.states, now)
    _release(state, reservation, now)
    return resume


def _publish(state: CacheState, reservation: Reservation, rows: Ids, end: int, now: float) -> Node:
    """Publish the tokens before `end` and their pages, and return the node where they end. The public prefix and the
    tokens after it are published one after the other, because their pages have different owners."""
    block, owners = state.block_tokens, reservation.owners
    node: Node = reservation.root
    boundary = owners.public_blocks * block
    for start, stop in ((0, min(boundary, end)), (boundary, end)):
        if start < stop:
            node, _ = state.tree.publish(
                node,
                reservation.data[start * TOKEN_BYTES : stop * TOKEN_BYTES],
                rows[start // block : -(-stop // block)],
                now,
                locked=reservation.node,
                last=True,
                owner=owners.at(start // block),
            )
    return node


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
    """Return two positions: the end of the tokens to publish, and the position at which a prompt can then resume.
    Both may be earlier than planned, because some pages may not have been loaded. Only tokens for which `rows` has
    all needed pages are published. `rows` has the page ids of each block."""
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
    node = reservation.node
    reservation.owners.release(state.pages, reservation.rows)
    if reservation.states is not None:
        state.release(reservation.state_account, state.states, reservation.states)
    for window in range(len(state.tree.windows)):
        last = max(0, node.end - 1) // state.block_tokens
        state.tree.queue_unneeded_range(node, window, 0, last)
    state.tree.unlock(node, now)
