"""A cache at one moment as a picture that stays small however large the pool: a map of cells, and the hottest branches.

    pool  |.. .. .. ..|.. .. .. ..|  …      a cell is a run of slabs: which shares of it are held, cached, pinned,
    cells |     0     |     1     |         by which group, for which tenant

Counts of a page's state are read where they are. Whose a page is stands in tables only: a walk over the tree paints it, a few
milliseconds a look, and goes on where it stopped; so a small tree is told exactly and a large one a few looks late. Reads
only; nothing of it exists until somebody looks. Tells numbers, and names of groups and tenants: no token, no text.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.tenants import Account
from kvloom.core.kv_cache import KVCache
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids, SizeClass
from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.prefix.node import Node
from kvloom.core.sequences.sequence import Sequence

from .hot_prefixes import HotPrefixes

__all__ = ["STATES", "PoolMap"]

STATES = ("unknown", "cached", "in use", "pinned", "unbacked")
CACHED, IN_USE, PINNED, UNBACKED = range(1, len(STATES))
TENANTS = 32
"""Places for tenants: the last is for all those together that have none, and the one before it for those not seen yet."""
OTHERS, UNSEEN = TENANTS - 1, TENANTS - 2
PAGES_A_LOOK = 1 << 17
CODES = np.int32


class PoolMap:
    """Looks at one cache, again and again. Call it where the cache is called: it is no more thread-safe than that."""

    def __init__(self, cache: KVCache, cells: int = 4096, branches: int = 200) -> None:
        if cells < 1 or branches < 1:
            raise ValueError(f"cells {cells} and branches {branches} must be positive")
        self.cache = cache
        pool, layout = cache.pool, cache.layout
        self._tenants = list(cache.accounts.accounts)[:UNSEEN]
        self._place = {name: i for i, name in enumerate(self._tenants)}
        # Of every page the group and tenant it was last seen with: 1 + group * TENANTS + tenant; 0 for none yet.
        self._owner = [np.full(c.in_use.size, self._first_guess(c.index), np.int16) for c in pool.classes]
        self._codes = {
            numbering: np.array([1 + g.index * TENANTS for g in layout.of(numbering) for _ in range(g.runs)], np.int16)
            for numbering in ("token", "state", "media")
        }  # fmt: skip
        total = pool.reserved - 1  # slab 0 is never lent
        self.cells = min(cells, total)
        self._starts = 1 + np.arange(self.cells + 1, dtype=np.int64) * total // self.cells
        self._chunks = self._cut()
        self._found: list[list[tuple[Ids, Ids, Ids, Ids]]] = [[] for _ in self._chunks]
        self._next = 0
        self._painted: dict[int, tuple[Sequence, int]] = {}
        self._branches = HotPrefixes(cache, branches)

    def look(self, seconds: float = 0.003) -> dict[str, Any]:
        """The picture. The walk takes `seconds` of it at most; the rest depends on cells, branches and open sequences."""
        self._paint_sequences()
        for node in self._branches.walk(time.thread_time() + seconds):
            self._paint_node(node)
        for run in self._runs():
            self._paint(self.cache.media, "media", run.rows, run.account)
        pinned = self._pinned()
        looked = 0
        for _ in self._chunks:
            looked += self._count(self._next, pinned)
            self._next = (self._next + 1) % len(self._chunks)
            if looked >= PAGES_A_LOOK // 2 and self._found[self._next]:
                break
        return {
            "pool": self._pool(),
            "groups": self._groups(),
            "tenants": [self._account(name) for name in self._tenants],  # one place beyond them: all others
            "map": self._map(),
            "tree": self._branches.report(self._where, self._listed),
        }

    # -- whose pages ----------------------------------------------------------------------------

    def _tenant(self, account: Account) -> int:
        return self._place.get(account.tenant.name, OTHERS)

    def _listed(self, account: Account) -> int:
        """A tenant's place in the list that is told; one beyond it for those that have none."""
        return min(self._tenant(account), len(self._tenants))

    def _first_guess(self, cls: int) -> int:
        """Whose a page of this size must be, before it is seen: where one group has such pages, its."""
        groups = [
            g.index
            for g, c in zip(self.cache.layout.groups, self.cache.pool.class_of, strict=True)
            if c == cls
        ]
        if len(groups) > 1:
            return 0
        return 1 + groups[0] * TENANTS + (0 if len(self.cache.accounts.accounts) == 1 else UNSEEN)

    def _paint(self, columns: BlockPages, numbering: str, rows: Ids, account: Account) -> None:
        codes = self._codes[numbering] + self._tenant(account)
        for c in columns.classes:
            at = columns.columns_of(c)
            self._owner[c][rows[:, at]] = codes[at]

    def _paint_node(self, node: Node) -> None:
        account = node.root.account
        if node.count:
            self._paint(self.cache.pages, "token", node.pages[: node.count], account)
        for checkpoint in node.checkpoints:
            if checkpoint.states is not None:
                self._paint(self.cache.states, "state", checkpoint.states, account)

    def _paint_sequences(self) -> None:
        """What open sequences hold beyond what was painted for them before."""
        rows, painted = self.cache.block_tables, self._painted
        self._painted = {}
        for row in rows.open_rows():
            seq, blocks = rows.sequences[row], int(rows.blocks[row])
            assert seq is not None
            before = painted.get(row)
            first = before[1] if before is not None and before[0] is seq else 0
            if blocks > first:
                self._paint(self.cache.pages, "token", rows.tables[:, row, first:blocks].T, seq.root.account)
            if self.cache.has_states:
                self._paint(self.cache.states, "state", rows.states[:, row][None], seq.root.account)
            self._painted[row] = seq, blocks

    def _runs(self) -> Iterator[MediaRun]:
        """Of images, those that were used last."""
        runs = self.cache.allocator.media_runs
        yield from heapq.nlargest(256, runs.values(), key=lambda run: run.last_used) if runs else ()

    def _pinned(self) -> list[Ids]:
        """Of each size class the pages that pins hold."""
        cache = self.cache
        found: list[list[Ids]] = [[] for _ in cache.pool.classes]
        for pin in cache.pins():
            held = [(cache.pages, pin.rows)]
            if pin.states is not None:
                held.append((cache.states, pin.states))
            held += [(cache.media, run.rows) for run in pin.media_runs]
            for columns, rows in held:
                for c, ids in columns.by_class(rows):
                    found[c].append(ids[ids > 0])
        return [np.concatenate(ids) if ids else np.empty(0, np.int32) for ids in found]

    # -- the map --------------------------------------------------------------------------------

    def _cut(self) -> list[tuple[int, int]]:
        """Runs of cells of about so many pages as one look counts."""
        pages = sum(c.per_slab for c in self.cache.pool.classes)
        slabs = max(1, PAGES_A_LOOK // pages)
        cells = max(1, slabs * self.cells // (self.cache.pool.reserved - 1))
        return [(a, min(a + cells, self.cells)) for a in range(0, self.cells, cells)]

    def _count(self, chunk: int, pinned: list[Ids]) -> int:
        """Count the pages of a run of cells anew, by what they are; returns how many were looked at."""
        first, last = self._chunks[chunk]
        found, looked = [], 0
        for c in self.cache.pool.classes:
            begin, end = int(self._starts[first]) * c.per_slab, int(self._starts[last]) * c.per_slab
            looked += end - begin
            state = (c.cached[begin:end] > 0).astype(np.int8)
            state[c.in_use[begin:end] > 0] = IN_USE
            pins = pinned[c.index]
            state[pins[(pins >= begin) & (pins < end)] - begin] = PINNED
            at = np.flatnonzero(state)
            code = self._owner[c.index][begin:end][at].astype(CODES) * len(STATES) + state[at]
            found.append(self._tallied(c, first, last, at, code))
        pool = self.cache.pool
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
        """Cells, codes, thousandths of the cell, pages: one place each for what a cell has of one code."""
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
            told = None if tenant == UNSEEN else min(tenant, len(self._tenants))
            legend.append({"group": group, "tenant": told, "state": STATES[state], "pages": count})
        order = np.argsort(at, kind="stable")
        return {
            "cells": self.cells,
            "slabs": self.cache.pool.reserved - 1,
            "legend": legend,
            "at": at[order].tolist(),
            "what": what[order].tolist(),
            "share": share[order].tolist(),
        }

    def _where(self, node: Node) -> list[int]:
        """The cells that have pages of a branch: first and last of each run of them, the longest 32 runs."""
        cache = self.cache
        parts = [(cache.pages, node.pages[: node.count])]
        parts += [(cache.states, c.states) for c in node.checkpoints if c.states is not None]
        slabs = [
            ids[ids > 0] // cache.pool.classes[c].per_slab
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
            **self.cache.stats(),
            "slab_bytes": self.cache.layout.slab_bytes,
            "block_tokens": self.cache.block_tokens,
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
            for group in self.cache.layout.groups
        ]

    def _account(self, name: str) -> dict[str, Any]:
        account = self.cache.accounts.accounts[name]
        return {
            "name": name,
            "used": account.used,
            "in_use": account.in_use,
            "quota": account.tenant.quota,
            "share": int(account.guaranteed),
        }
