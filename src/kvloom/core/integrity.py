"""The truth about a cache, counted from scratch: for tests, and for idle time in debug runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from .loading.reservation import Reservation
from .pool.block_pages import BlockPages
from .pool.page_pool import Ids
from .prefix.multimodal import MediaRun
from .prefix.node import Node
from .prefix.offload_batch import OffloadBatch
from .sequences.pins import Pin
from .sequences.state import CacheState

__all__ = ["check_integrity"]


def check_integrity(
    cache: CacheState,
    pins: Iterable[Pin],
    arrivals: Iterable[Reservation] = (),
    lent: Iterable[OffloadBatch] = (),
) -> None:
    """Every page's holds and keeps equal what sequences, pins, pending copies and the cache name."""
    held = [np.zeros_like(c.in_use) for c in cache.allocator.pool.classes]
    kept = [np.zeros_like(c.in_use) for c in cache.allocator.pool.classes]
    rows = cache.block_tables
    for row in rows.open_rows():
        seq = rows.sequences[row]
        assert seq is not None
        blocks = int(rows.blocks[row])
        assert not rows.tables[:, row, blocks:].any(), f"row {row} names pages beyond its blocks"
        assert rows.state_length[row] <= rows.length[row], f"row {row}: its states stand beyond its tokens"
        assert rows.length[row] <= blocks * cache.layout.block_tokens, f"row {row} is longer than its pages"
        assert seq.node.locks > 0, f"row {row} stands on an unlocked node"
        assert not seq.control.store or seq.node.end == seq.published, (
            f"row {row} stands elsewhere than it published"
        )
        _count(held, cache.pages, rows.tables[:, row, :blocks].T)
        if rows.states[:, row].any():
            _count(held, cache.states, rows.states[:, row][None])
        if seq.state_source is not None:
            _count(held, cache.states, seq.state_source)
        for run in seq.media_runs.values():
            _count(held, cache.media, run.rows if isinstance(run, MediaRun) else run)
    for pin in pins:
        _count(held, cache.pages, pin.rows)
        if pin.states is not None:
            _count(held, cache.states, pin.states)
        for run in pin.media_runs:
            _count(held, cache.media, run.rows)
    fixed: list[Counter[int]] = [Counter() for _ in cache.allocator.pool.classes]
    for arrival in arrivals:
        _count(held, cache.pages, arrival.rows)
        written = [(cache.pages, np.where(arrival.to_load, arrival.rows, 0))]
        if arrival.states is not None:
            _count(held, cache.states, arrival.states)
            written.append((cache.states, arrival.states))
        for columns, pages in written:
            _count_slabs(fixed, columns, pages)
    for parcel in lent:
        columns = cache.states if parcel.numbering == "state" else cache.pages
        _count(held, columns, parcel.rows)
        _count_slabs(fixed, columns, parcel.rows)
    for c, slabs in zip(cache.allocator.pool.classes, fixed, strict=True):
        assert c.fixed == slabs, f"class {c.index}: fixed slabs differ"
    for columns, pages in cache.allocator.copies.retained_sources():
        _count(held, columns, pages)
    nodes = 0
    for root in cache.tree.roots.values():
        for node in _below(root):
            nodes += 1
            _check_node(cache, node)
            _count(kept, cache.pages, node.pages[: node.count])
            for checkpoint in node.checkpoints:
                assert checkpoint.node is node and node.start < checkpoint.position <= node.end
                assert cache.tree.complete(node, checkpoint.position), "a checkpoint's window is broken"
                if checkpoint.states is not None:
                    _count(kept, cache.states, checkpoint.states)
    assert nodes == cache.tree.nodes, f"{nodes} nodes, counted {cache.tree.nodes}"
    for run in cache.allocator.media_runs.values():
        _count(kept, cache.media, run.rows)
    for c, holds, keeps in zip(cache.allocator.pool.classes, held, kept, strict=True):
        assert (c.in_use == holds).all(), (
            f"class {c.index}: holds differ at pages {np.flatnonzero(c.in_use != holds)[:8]}"
        )
        assert (c.cached == keeps).all(), (
            f"class {c.index}: keeps differ at pages {np.flatnonzero(c.cached != keeps)[:8]}"
        )
    pool = cache.allocator.pool
    pool.check()
    absent = cache.allocator.copies.slabs().intersection(
        pool.unbacked_slabs(pool.reserved - pool.slabs).tolist()
    )
    assert not absent, f"a pending copy reads or writes the absent slabs {absent}"
    _check_accounts(cache)


def _below(root: Node) -> Iterable[Node]:
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def _check_node(cache: CacheState, node: Node) -> None:
    block = cache.layout.block_tokens
    assert len(node.text) == 4 * (node.end - node.start) > 0, "a node's text and range differ"
    assert node.count == (node.end - 1) // block - node.start // block + 1, "a node's rows and range differ"
    assert node.parent is not None and node.start == node.parent.end, (
        "a node does not begin where its parent ends"
    )
    assert all(int.from_bytes(c.text[:4], "little", signed=True) == k for k, c in node.children.items())
    windowed = {c for columns in cache.tree.window_columns for c in range(columns.start, columns.stop)}
    full = [c for c in range(cache.pages.width) if c not in windowed]
    assert (node.pages[: node.count, full] > 0).all(), "a page of a full group is missing"
    if node.checkpoint_counts is not None:
        assert (node.checkpoint_counts >= 0).all(), "negative marks"
        for window, columns in enumerate(cache.tree.window_columns):
            marked = node.checkpoint_counts[: node.count, window] > 0
            shared = np.zeros(node.count, bool)
            shared[-1] = node.end % block != 0 and bool(node.children)
            assert (node.pages[: node.count, columns.start][marked & ~shared] > 0).all(), (
                "a marked page is missing"
            )
    if node.leaf:
        assert node.queued is not None, "a leaf that may leave is not queued"


def _count(counts: list[Ids], columns: BlockPages, rows: Ids) -> None:
    for cls, ids in columns.by_class(rows):
        np.add.at(counts[cls], ids[ids > 0], 1)


def _count_slabs(counts: list[Counter[int]], columns: BlockPages, rows: Ids) -> None:
    for cls, ids in columns.by_class(rows):
        per_slab = columns.pool.classes[cls].per_slab
        if per_slab > 1:
            counts[cls].update((ids[ids > 0] // per_slab).tolist())


def _check_accounts(cache: CacheState) -> None:
    strides = [cache.layout.slab_bytes // c.per_slab for c in cache.allocator.pool.classes]
    held = sum(c.in_use_pages * s for c, s in zip(cache.allocator.pool.classes, strides, strict=True))
    used = held + sum(c.cached_pages * s for c, s in zip(cache.allocator.pool.classes, strides, strict=True))
    accounts = cache.accounts.accounts.values()
    assert sum(a.in_use for a in accounts) == held, (
        f"accounts hold {sum(a.in_use for a in accounts)}, pages {held}"
    )
    assert sum(a.used for a in accounts) == used, (
        f"accounts use {sum(a.used for a in accounts)}, pages {used}"
    )
    shares = sum(a.guaranteed for a in accounts)
    total = (cache.allocator.pool.slabs - 1) * cache.layout.slab_bytes
    firm = all(a.tenant.firm for a in accounts)
    assert not shares or shares - total < 1, f"shares of {shares} in a pool of {total} bytes"
    assert not shares or not firm or total - shares < 1, f"shares of {shares} in a pool of {total} bytes"
    sequences = Counter(id(seq.root.account) for seq in cache.block_tables.sequences if seq is not None)
    for account in accounts:
        assert account.open == sequences[id(account)], (
            f"tenant {account.tenant.name!r} has {sequences[id(account)]} open sequences, counted {account.open}"
        )
        quota = account.tenant.quota
        assert quota is None or account.used <= quota, f"tenant {account.tenant.name!r} is over its quota"
