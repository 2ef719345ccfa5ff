"""Integrity check: counts the references to every page again and compares them with the cache's counts. For tests, and
for idle time in debug runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvloom.core.control import PUBLIC_TENANT
from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.in_transfer import Reservation
from kvloom.core.prefix.node import Node
from kvloom.core.prefix.owners import BlockOwners
from kvloom.core.prefix.pins import Pin
from kvloom.core.state import CacheState

__all__ = ["check_integrity"]


def check_integrity(state: CacheState) -> None:
    """Count the references and the prefix cache entries of every page again, and compare them with the cache's own
    counts. Raises AssertionError at the first difference. O(pool)."""
    pool, tables, tree = state.pool, state.block_tables, state.tree
    in_use = [np.zeros_like(c.in_use) for c in pool.classes]
    cached = [np.zeros_like(c.in_use) for c in pool.classes]
    locked = set()
    for row, seq in tables.open_sequences():
        blocks = int(tables.blocks[row])
        assert not tables.tables[:, row, blocks:].any(), f"row {row} has pages beyond its blocks"
        assert tables.state_length[row] <= tables.length[row], f"row {row}: its states are beyond its tokens"
        assert tables.length[row] <= blocks * state.block_tokens, f"row {row} is longer than its pages"
        cold, full = seq.cold_blocks, tables.tables[state.full_columns, row, :blocks]
        assert cold == sum(len(run.pages) for run in seq.cold_runs), (
            f"row {row}: its cold runs differ from their count"
        )
        assert cold * state.block_tokens <= tables.length[row], f"row {row}: a cold block is not full"
        assert not full[:, :cold].any(), f"row {row} has pages of cold blocks"
        assert (full[:, cold:] > 0).all(), f"row {row} lacks a page of a full group"
        assert not cold or seq.node is seq.root, f"row {row} has cold blocks and a path in the tree"
        assert seq.node.locks > 0, f"the node of row {row} is not locked"
        assert not seq.control.store or seq.node.end == seq.published, (
            f"row {row}: its node does not end where it published"
        )
        locked.add(seq.node)
        _count(in_use, state.pages, tables.tables[:, row, :blocks].T)
        if tables.states[:, row].any():
            _count(in_use, state.states, tables.states[:, row][None])
        for columns, rows in seq.retained():
            _count(in_use, columns, rows)
    for holder in (state.pins, state.in_transfer, state.copies):
        for columns, rows in holder.retained():
            _count(in_use, columns, rows)
    locked.update(pin.node for pin in state.pins.pins() if pin.node is not None)
    assert locked <= tree.locked, "a node in use is not among the locked nodes"
    assert all(node.locks > 0 for node in tree.locked), "a locked node has no locks"
    for c, slabs in zip(pool.classes, state.in_transfer.slabs_in_place(), strict=True):
        assert c.fixed == slabs, f"class {c.index}: slabs pinned in place differ"
    nodes = 0
    for root in tree.roots.values():
        for node in _below(root):
            nodes += 1
            _check_node(state, node)
            assert (node.locks > 0) == (node in tree.locked), "locks and the set of locked nodes differ"
            _count(cached, state.pages, node.pages[: node.count])
            for checkpoint in node.checkpoints:
                assert checkpoint.node is node and node.start < checkpoint.position <= node.end
                assert tree.complete(node, checkpoint.position), "a checkpoint lacks a window page"
                if checkpoint.states is not None:
                    _count(cached, state.states, checkpoint.states)
    assert nodes == tree.nodes, f"{nodes} nodes, counted {tree.nodes}"
    for run in state.media_cache.runs():
        _count(cached, state.media, run.rows)
    for c, uses, entries in zip(pool.classes, in_use, cached, strict=True):
        wrong = np.flatnonzero(c.in_use != uses)[:8]
        assert not wrong.size, f"class {c.index}: uses differ at pages {wrong}"
        wrong = np.flatnonzero(c.cached != entries)[:8]
        assert not wrong.size, f"class {c.index}: cached entries differ at pages {wrong}"
    pool.check()
    unbacked = pool.unbacked_slabs(pool.reserved - pool.slabs).tolist()
    touched = state.copies.slabs().intersection(unbacked)
    assert not touched, f"a pending copy reads or writes the unbacked slabs {touched}"
    _check_accounts(state)
    _check_charges(state)


def _check_charges(state: CacheState) -> None:
    """Determine the account of every page again, sum the bytes of each account, and compare the sums with the accounts'
    own counts."""
    accounts = list(state.accounts.accounts.values())
    known = [np.full(c.in_use.shape, -1) for c in state.pool.classes]

    def charge(account: Account, columns: BlockPages, rows: Ids) -> None:
        number = accounts.index(account)
        for cls, ids in columns.by_class(rows):
            pages = ids[ids > 0]
            others = known[cls][pages]
            assert ((others < 0) | (others == number)).all(), f"class {cls}: a page belongs to two accounts"
            known[cls][pages] = number

    def charge_blocks(owners: BlockOwners, rows: Ids) -> None:
        charge(owners.public.account, state.pages, rows[: owners.public_blocks])
        charge(owners.account, state.pages, rows[owners.public_blocks :])
        for numbers, size in state.pages.numbers(rows[: owners.public_blocks]):
            uses = borrowed.setdefault(id(owners.account), Counter())
            uses.update(numbers)
            sizes.update(dict.fromkeys(numbers, size))

    borrowed: dict[int, Counter[int]] = {}
    sizes: dict[int, int] = {}
    tables = state.block_tables
    for root in state.tree.roots.values():
        for node in _below(root):
            charge(node.account, state.pages, node.pages[: node.count])
            for checkpoint in node.checkpoints:
                if checkpoint.states is not None:
                    charge(node.account, state.states, checkpoint.states)
    for row, seq in tables.open_sequences():
        charge_blocks(seq.owners, tables.tables[:, row, : int(tables.blocks[row])].T)
        charge(seq.owners.account, state.states, tables.states[:, row][None])
        if seq.state_source is not None:
            charge(seq.source_account, state.states, seq.state_source)
        for run in seq.media_runs.values():
            if isinstance(run, np.ndarray):
                charge(seq.owners.account, state.media, run)
    for run in state.media_cache.runs():
        charge(run.account, state.media, run.rows)
    holders: list[Pin | Reservation] = [*state.pins.pins(), *state.in_transfer.reservations()]
    for holder in holders:
        charge_blocks(holder.owners, holder.rows)
        if holder.states is not None:
            charge(holder.state_account, state.states, holder.states)
    for account, columns, rows in state.copies.charged():
        charge(account, columns, rows)
    for batch in state.in_transfer.batches():
        columns = state.states if batch.numbering == "state" else state.pages
        charge(state.accounts[batch.tenant], columns, batch.rows)
    strides = [state.layout.slab_bytes // c.per_slab for c in state.pool.classes]
    for number, account in enumerate(accounts):
        used = sum(int((k == number).sum()) * s for k, s in zip(known, strides, strict=True))
        name = account.tenant.name
        assert account.used == used, f"tenant {name!r} uses {account.used} bytes, its pages {used}"
        uses = borrowed.get(id(account), Counter())
        assert account.borrowed_pages == dict(uses), f"tenant {name!r}: uses of public pages differ"
        size = sum(sizes[page] for page in uses)
        assert account.borrowed == size, f"tenant {name!r} borrows {account.borrowed} bytes, its pages {size}"


def _below(root: Node) -> Iterable[Node]:
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def _check_node(state: CacheState, node: Node) -> None:
    block = state.block_tokens
    assert len(node.text) == 4 * (node.end - node.start) > 0, "a node's text and range differ"
    assert node.count == (node.end - 1) // block - node.start // block + 1, "a node's rows and range differ"
    assert node.parent is not None and node.start == node.parent.end, (
        "a node does not start where its parent ends"
    )
    assert all(int.from_bytes(c.text[:4], "little", signed=True) == k for k, c in node.children.items())
    assert (node.pages[: node.count, state.full_columns] > 0).all(), "a page of a full group is missing"
    if node.checkpoint_counts is not None:
        assert (node.checkpoint_counts >= 0).all(), "negative checkpoint counts"
        for window, columns in enumerate(state.tree.window_columns):
            marked = node.checkpoint_counts[: node.count, window] > 0
            shared = np.zeros(node.count, bool)
            shared[-1] = node.end % block != 0 and bool(node.children)
            assert (node.pages[: node.count, columns.start][marked & ~shared] > 0).all(), (
                "a page that a checkpoint needs is missing"
            )
    if node.leaf:
        assert node.queued is not None, "a leaf is not queued for eviction"


def _count(counts: list[Ids], columns: BlockPages, rows: Ids) -> None:
    for cls, ids in columns.by_class(rows):
        np.add.at(counts[cls], ids[ids > 0], 1)


def _check_accounts(state: CacheState) -> None:
    strides = [state.layout.slab_bytes // c.per_slab for c in state.pool.classes]
    in_use = sum(c.in_use_pages * s for c, s in zip(state.pool.classes, strides, strict=True))
    used = in_use + sum(c.cached_pages * s for c, s in zip(state.pool.classes, strides, strict=True))
    accounts = state.accounts.accounts.values()
    assert sum(a.in_use for a in accounts) == in_use, (
        f"accounts have {sum(a.in_use for a in accounts)} bytes in use, pages {in_use}"
    )
    assert sum(a.used for a in accounts) == used, (
        f"accounts use {sum(a.used for a in accounts)}, pages {used}"
    )
    shares = sum(a.guaranteed for a in accounts)
    total = (state.pool.slabs - 1) * state.layout.slab_bytes
    is_firm = all(a.tenant.firm for a in accounts)
    assert not shares or shares - total < 1, f"shares of {shares} in a pool of {total} bytes"
    assert not shares or not is_firm or total - shares < 1, f"shares of {shares} in a pool of {total} bytes"
    sequences = Counter(id(seq.owners.account) for _, seq in state.block_tables.open_sequences())
    for account in accounts:
        assert account.open == sequences[id(account)], (
            f"tenant {account.tenant.name!r} has {sequences[id(account)]} open sequences, counted {account.open}"
        )
        quota = None if account.tenant.name == PUBLIC_TENANT else account.tenant.quota
        assert quota is None or account.used <= quota, f"tenant {account.tenant.name!r} is over its quota"
