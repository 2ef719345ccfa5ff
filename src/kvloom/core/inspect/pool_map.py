"""Pool map: the state of the pool in a bounded number of cells, with the hottest prefixes.

    pool  |.. .. .. ..|.. .. .. ..|  …      a cell is a range of slabs: its shares in use, cached and pinned,
    cells |     0     |     1     |         by group and by tenant

The pool provides the state of each page. A walk over the tree provides the group and the tenant of each page. The walk
takes a few milliseconds per map and continues where it stopped, so the map of a large tree is slightly outdated. Does
not modify the cache. The map contains numbers and names of groups and tenants, but no tokens.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.tenants import Accounts
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids, SizeClass
from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.prefix.node import Node
from kvloom.core.state import CacheState

from .hot_prefixes import HotPrefixes
from .stats import cache_stats

__all__ = ["STATES", "PoolMap"]

STATES = ("unknown", "cached", "in use", "pinned", "unbacked")
CACHED, IN_USE, PINNED, UNBACKED = range(1, len(STATES))
TENANTS = 32
"""Number of tenant codes. The last code stands for all tenants without a separate code. The second last code stands
for pages whose tenant is unknown, because the walk has not visited them yet."""
OTHERS, UNSEEN = TENANTS - 1, TENANTS - 2
PAGES_A_LOOK = 1 << 17
CODES = np.int32


class PoolMap:
    """Makes maps of one cache. A map has at most `cells` cells, and at most `branches` nodes of the radix tree. Not
    thread-safe, like the cache."""

    def __init__(self, state: CacheState, cells: int = 4096, branches: int = 200) -> None:
        if cells < 1 or branches < 1:
            raise ValueError(f"cells {cells} and branches {branches} must be positive")
        self._state = state
        pool, layout = state.pool, state.layout
        self._place: dict[
            str, int
        ] = {}  # the code of every tenant with a separate code; declared tenants come first
        for name in state.accounts.accounts:
            self._tenant(name)
        # Last known group and tenant of every page: 1 + group * TENANTS + tenant, or 0 if unknown.
        self._owner = [np.full(c.in_use.size, self._first_guess(c.index), np.int16) for c in pool.classes]
        self._codes = {
            numbering: np.array([1 + g.index * TENANTS for g in layout.of(numbering) for _ in range(g.runs)], np.int16)
            for numbering in ("token", "state", "media")
        }  # fmt: skip
        total = pool.reserved - 1  # slab 0 is never used
        self.cells = min(cells, total)
        self._starts = 1 + np.arange(self.cells + 1, dtype=np.int64) * total // self.cells
        self._chunks = self._cut()
        self._found: list[list[tuple[Ids, Ids, Ids, Ids]]] = [[] for _ in self._chunks]
        self._next = 0
        self._painted: dict[int, tuple[object, int]] = {}
        self._branches = HotPrefixes(state, branches)

    def look(self, seconds: float = 0.003) -> dict[str, Any]:
        """Return the map. The walk over the tree takes at most `seconds`. The time of the other work grows with the
        number of cells, branches and open sequences."""
        self._paint_sequences()
        for node in self._branches.walk(time.thread_time() + seconds):
            self._paint_node(node)
        for run in self._runs():
            self._paint(self._state.media, "media", run.rows, run.account.tenant.name)
        pinned = self._pinned()
        looked = 0
        for _ in self._chunks:
            looked += self._count(self._next, pinned)
            self._next = (self._next + 1) % len(self._chunks)
            if looked >= PAGES_A_LOOK // 2 and self._found[self._next]:
                break
        tree, found = self._branches.report(self._where, self._listed), self._map()
        return {
            "pool": self._pool(),
            "groups": self._groups(),
            # One more code for all other tenants.
            "tenants": [self._usage(name, place, found["legend"]) for name, place in self._place.items()],
            "map": found,
            "tree": tree,
        }

    # -- owners of pages ------------------------------------------------------------------------

    def _tenant(self, name: str) -> int:
        """Return the number that stands for a tenant in owner codes. An owner code stands for a group and a tenant. A
        new tenant gets the next free number, or OTHERS if none is free.
        """
        if name not in self._place and len(self._place) < UNSEEN:
            self._place[name] = len(self._place)
        return self._place.get(name, OTHERS)

    def _listed(self, name: str) -> int:
        """Return the index of a tenant in the reported list `tenants`. The list has at most UNSEEN tenants. For a
        tenant that is not in the list, returns the length of the list."""
        return min(self._tenant(name), len(self._place))

    def _first_guess(self, cls: int) -> int:
        """Return the owner code that the pages of a size class have until the walk visits them. An owner code stands
        for a group and a tenant. If several groups have pages of this size, the code is 0, which means unknown."""
        groups = [
            g.index
            for g, c in zip(self._state.layout.groups, self._state.pool.class_of, strict=True)
            if c == cls
        ]
        if len(groups) > 1:
            return 0
        return 1 + groups[0] * TENANTS + (0 if len(self._state.accounts.accounts) == 1 else UNSEEN)

    def _paint(self, columns: BlockPages, numbering: str, rows: Ids, tenant: str) -> None:
        codes = self._codes[numbering] + self._tenant(tenant)
        for c in columns.classes:
            at = columns.columns_of(c)
            self._owner[c][rows[:, at]] = codes[at]

    def _paint_node(self, node: Node) -> None:
        tenant = node.owner.tenant
        if node.count:
            self._paint(self._state.pages, "token", node.pages[: node.count], tenant)
        for checkpoint in node.checkpoints:
            if checkpoint.states is not None:
                self._paint(self._state.states, "state", checkpoint.states, tenant)

    def _paint_sequences(self) -> None:
        """Record the group and tenant of pages that open sequences allocated since the last map."""
        rows, painted = self._state.block_tables, self._painted
        self._painted = {}
        for row in rows.open_rows():
            seq, blocks = rows.sequences[row], int(rows.blocks[row])
            assert seq is not None
            before = painted.get(row)
            first = before[1] if before is not None and before[0] is seq else 0
            if blocks > first:
                pages, cut = (
                    rows.tables[:, row, first:blocks].T,
                    seq.owners.public_rows(first, blocks - first),
                )
                self._paint(self._state.pages, "token", pages[:cut], seq.owners.public.tenant)
                self._paint(self._state.pages, "token", pages[cut:], seq.owners.private.tenant)
            if self._state.has_states:
                self._paint(self._state.states, "state", rows.states[:, row][None], seq.control.tenant)
            self._painted[row] = seq, blocks

    def _runs(self) -> Iterator[MediaRun]:
        """Yield the most recently used media runs (the pages of images)."""
        runs = self._state.media_cache.runs()
        yield from heapq.nlargest(256, runs, key=lambda run: run.last_used) if runs else ()

    def _pinned(self) -> list[Ids]:
        """Return the page ids of all pinned pages, for each size class."""
        state = self._state
        found: list[list[Ids]] = [[] for _ in state.pool.classes]
        for pin in state.pins.pins():
            retained = [(state.pages, pin.rows)]
            if pin.states is not None:
                retained.append((state.states, pin.states))
            retained += [(state.media, run.rows) for run in pin.media_runs]
            for columns, rows in retained:
                for c, ids in columns.by_class(rows):
                    found[c].append(ids[ids > 0])
        return [np.concatenate(ids) if ids else np.empty(0, np.int32) for ids in found]

    # -- the map --------------------------------------------------------------------------------

    def _cut(self) -> list[tuple[int, int]]:
        """Divide the cells into ranges. One range has about as many pages as one call of `look` may count."""
        pages = sum(c.per_slab for c in self._state.pool.classes)
        slabs = max(1, PAGES_A_LOOK // pages)
        cells = max(1, slabs * self.cells // (self._state.pool.reserved - 1))
        return [(a, min(a + cells, self.cells)) for a in range(0, self.cells, cells)]

    def _count(self, chunk: int, pinned: list[Ids]) -> int:
        """Count the pages in one range of cells (`self._chunks[chunk]`) again: by cell, owner (group and tenant) and
        state. `pinned` has the ids of pinned pages of each size class. Return the number of pages visited."""
        first, last = self._chunks[chunk]
        found, looked = [], 0
        for c in self._state.pool.classes:
            begin, end = int(self._starts[first]) * c.per_slab, int(self._starts[last]) * c.per_slab
            looked += end - begin
            state = (c.cached[begin:end] > 0).astype(np.int8)
            state[c.in_use[begin:end] > 0] = IN_USE
            pins = pinned[c.index]
            state[pins[(pins >= begin) & (pins < end)] - begin] = PINNED
            at = np.flatnonzero(state)
            code = self._owner[c.index][begin:end][at].astype(CODES) * len(STATES) + state[at]
            found.append(self._tallied(c, first, last, at, code))
        pool = self._state.pool
        if pool.reserved > pool.slabs:
            absent = pool.unbacked_slabs(pool.reserved - pool.slabs)
            absent = absent[(absent >= self._starts[first]) & (absent < self._starts[last])]
            at = absent.astype(np.intp) - int(self._starts[first])
            found.append(self._tallied(None, first, last, at, np.full(at.size, UNBACKED, CODES)))
        self._found[chunk] = found
        return looked

    def _tallied(
        self, c: SizeClass | None, first: int, last: int, at: npt.NDArray[np.intp], code: npt.NDArray[CODES]
    ) -> tuple[Ids, Ids, Ids, Ids]:
        """Count the pages in cells [first, last), separately for each cell and code. `at` has the index of each page,
        counted from the first page of cell `first`. `code` has the code of each page, which stands for its owner and
        state. If `c` is None, slabs are counted instead, and `at` has slab indices.

        Return four arrays with one entry for each cell and code that occurs: the cell, the code, the share of the cell
        in thousandths, and the number of pages."""
        per_slab = 1 if c is None else c.per_slab
        slabs = np.diff(self._starts[first : last + 1])
        cell = np.repeat(np.arange(last - first), slabs * per_slab)[at]
        present = np.flatnonzero(np.bincount(code))
        short = np.zeros(int(present[-1]) + 1 if present.size else 1, CODES)
        short[present] = np.arange(present.size)
        counts = np.bincount(cell * present.size + short[code], minlength=(last - first) * present.size)
        some = np.flatnonzero(counts)
        cells, which = np.divmod(some, max(1, present.size))
        pages = counts[some]
        share = np.maximum(1, pages * 1000 // (slabs[cells] * per_slab))
        return (
            (cells + first).astype(np.int32),
            present[which].astype(np.int32),
            share.astype(np.int32),
            pages.astype(np.int32),
        )

    def _map(self) -> dict[str, Any]:
        parts = [part for chunk in self._found for part in chunk]
        at, code, share, pages = (np.concatenate([part[i] for part in parts]) for i in range(4))
        present, what = np.unique(code, return_inverse=True)
        totals = np.bincount(what, pages, minlength=present.size).astype(np.int64)
        legend = []
        for value, count in zip(present.tolist(), totals.tolist(), strict=True):
            owner, state = divmod(value, len(STATES))
            group, tenant = divmod(owner - 1, TENANTS) if owner else (None, UNSEEN)
            listed = None if tenant == UNSEEN else min(tenant, len(self._place))
            legend.append({"group": group, "tenant": listed, "state": STATES[state], "pages": count})
        order = np.argsort(at, kind="stable")
        return {
            "cells": self.cells,
            "slabs": self._state.pool.reserved - 1,
            "legend": legend,
            "at": at[order].tolist(),
            "what": what[order].tolist(),
            "share": share[order].tolist(),
        }

    def _where(self, node: Node) -> list[int]:
        """Return the cells that contain pages of a node, as a flat list: first, last, first, last and so on. Return
        at most the 32 longest ranges."""
        state = self._state
        parts = [(state.pages, node.pages[: node.count])]
        parts += [(state.states, c.states) for c in node.checkpoints if c.states is not None]
        slabs = [
            ids[ids > 0] // state.pool.classes[c].per_slab
            for columns, rows in parts
            for c, ids in columns.by_class(rows)
        ]
        cells = np.unique(
            np.searchsorted(self._starts, np.concatenate(slabs or [np.empty(0, np.int32)]), "right") - 1
        )
        if not cells.size:
            return []
        breaks = np.flatnonzero(np.diff(cells) > 1)
        first, last = cells[np.append(0, breaks + 1)], cells[np.append(breaks, cells.size - 1)]
        longest = np.sort(np.argsort(first - last, kind="stable")[:32])
        return np.stack((first[longest], last[longest]), 1).ravel().tolist()

    # -- numbers --------------------------------------------------------------------------------

    def _pool(self) -> dict[str, Any]:
        return {
            **cache_stats(self._state),
            "slab_bytes": self._state.layout.slab_bytes,
            "block_tokens": self._state.block_tokens,
        }

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {
                "name": group.name.rsplit(" #", 1)[0],
                "kind": "latent" if any(f.name == "latent" for f in group.spec.fields) else group.spec.kind,
                "layers": len(group.layers),
                "page_bytes": group.page_bytes,
                "pages_per_slab": group.pages_per_slab,
            }
            for group in self._state.layout.groups
        ]

    def _usage(self, name: str, place: int, legend: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the memory use, quota and share of a tenant. `place` is its number in the map. Undeclared tenants have
        one common account, which does not show the use of a single tenant. The use of an undeclared tenant is therefore
        the sum of its pages in `legend`, the page counts of the map."""
        account = self._state.accounts.accounts.get(name)
        if account is not None and name != Accounts.DEFAULT:
            used, in_use = account.used, account.in_use
        else:
            size, groups = self._state.layout.slab_bytes, self._state.layout.groups
            rows = [row for row in legend if row["tenant"] == place and row["group"] is not None]
            of = {id(row): row["pages"] * size // groups[row["group"]].pages_per_slab for row in rows}
            used = sum(of.values())
            in_use = sum(of[id(row)] for row in rows if row["state"] in ("in use", "pinned"))
        return {
            "name": name,
            "used": used,
            "in_use": in_use,
            "declared": account is not None and name != Accounts.DEFAULT,
            "quota": None if account is None else account.tenant.quota,
            "share": 0 if account is None else int(account.guaranteed),
        }
