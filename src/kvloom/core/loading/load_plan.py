"""Load plan: the position at which a prompt could resume with pages from tiers, and the pages that must be loaded for
this.

    plan = cache.loading.plan(match)
    while (queries := plan.next_queries()): plan.answer([found(q.group, q.hashes) for q in queries])
    plan.resume, plan.missing_pages(first)

A tier stores a page under the hash of the prefix that ends with the page's last token. The last page may be a partial
block. The plan applies the resume rule. The caller queries the tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import HASH_TOKENS, PageGroup, PoolLayout
from kvloom.core.prefix.block_hash import BlockHash
from kvloom.core.prefix.lookup import Lookup, Match, Miss
from kvloom.core.prefix.resume_rule import longest_resume, missing_unit

__all__ = ["LoadPlan", "MissingPages", "TierQuery", "deciding_group", "first_query"]

Mask = npt.NDArray[np.bool_]
MOST_TAILS = 4096
"""Largest number of positions at which a plan queries the tiers for a snapshot. For each position, one hash is
computed."""
LAST_ROUND = 16


@dataclass(frozen=True, slots=True)
class TierQuery:
    """One question to the tiers: for which of `hashes` do they store a page of the layer group `group`? The caller
    passes the answer to `LoadPlan.answer`. With `is_public`, the pages belong to a public prefix. Tiers store them
    under the name PUBLIC_TENANT."""

    group: int
    hashes: list[bytes]
    is_public: bool = False


@dataclass(frozen=True, slots=True)
class MissingPages:
    """The pages of one group to load. The page of block `blocks[i]` has the hash `hashes[i]`. A state group has one
    page, whose block is -1. With `is_public`, the pages belong to a public prefix."""

    group: PageGroup
    blocks: list[int]
    hashes: list[bytes]
    is_public: bool = False


def deciding_group(layout: PoolLayout) -> PageGroup | None:
    """Return a group with full attention. Its page of the next block decides whether tiers can extend a hit: every
    longer hit needs this page.

    Return None if no group has full attention. Also returns None if the model has states, because a prompt can
    then resume at a snapshot inside the next block.
    """
    if layout.of("state"):
        return None
    return next((group for group in layout.of("token") if not group.spec.visibility.windowed), None)


def first_query(layout: PoolLayout, group: PageGroup, lookup: Lookup, match: Match) -> TierQuery | None:
    """Return the query for the next block's page in `group`. `group` is the result of `deciding_group`. If no tier has
    this page, tiers cannot extend the hit. Computes one hash.

    Return None if the prompt cannot resume at the end of the matched tokens, because some pages of matched tokens are
    missing. Tiers could then extend the hit with those pages alone. `TierQuery.hashes` is empty if the prompt ends
    inside the next block.
    """
    if match.resume < match.matched:
        return None
    end = (match.matched // layout.block_tokens + 1) * layout.block_tokens
    hashes = [lookup.hash_at(match, end)] if end <= match.length else []
    return TierQuery(group.index, hashes, end <= match.public)


class LoadPlan:
    """The load plan of one match. A plan is valid until the cache changes, and does not modify the cache."""

    def __init__(self, layout: PoolLayout, lookup: Lookup, match: Match) -> None:
        self.match, self.block = match, layout.block_tokens
        self._lookup = lookup
        self._tokens, self._states = layout.of("token"), layout.of("state")
        self._all_hashes = lookup.block_hashes(match)
        per_block = self.block // HASH_TOKENS
        self.hashes = self._all_hashes
        if per_block > 1:
            firsts = range(0, len(self._all_hashes) - per_block + 1, per_block)
            self.hashes = [BlockHash.of(self._all_hashes[at : at + per_block]) for at in firsts]
        """Hash of every full block of the prompt."""
        self.resume = match.resume
        """Longest resumable length found so far."""
        blocks = len(self.hashes)
        self._rows = rows = lookup.rows(match)
        whole = match.matched // self.block
        self._present: dict[int, Mask] = {}
        for group in self._tokens:
            have = np.zeros(blocks, bool)
            have[:whole] = rows[:whole, group.column] > 0
            self._present[group.index] = have
        self.limit = lookup.cached_media_limit(match)  # the pages of images are not loaded from tiers
        self._reach = blocks
        self._upper_bound = 0
        self._round = 0
        self._asked: list[tuple[int, list[int]]] = []
        self._positions: list[int] = []
        self._tails = 0
        self._tail_in_tier = False

    def hash_at(self, position: int) -> bytes:
        """Return the hash of the prompt's first `position` tokens."""
        units = position // HASH_TOKENS
        if not position:
            return self.match.root_hash
        before = self._all_hashes[(position - 1) // self.block * self.block // HASH_TOKENS : units]
        if position % HASH_TOKENS == 0:
            return BlockHash.of(before)
        parent = self._all_hashes[units - 1] if units else self.match.root_hash
        tail = self._lookup.tail_hash(self.match, parent, units * HASH_TOKENS, position)
        return BlockHash.of([*before, tail])

    # -- querying -------------------------------------------------------------------------------

    def next_queries(self) -> list[TierQuery]:
        """Return the next queries. The caller passes their results to `answer`. The list is empty when `resume` is
        final."""
        self._round += 1
        if self.limit <= self.match.resume or not self.match.control.read:
            return []
        if self._round == 1 and self._tokens:
            return self._ask_blocks()
        if self._states and self._round < LAST_ROUND:
            return self._ask_snapshots()
        return []

    def answer(self, found: Sequence[Mask]) -> None:
        """Process the results of the last queries. Each result is an array with one truth value per hash."""
        if self._round == 1 and self._tokens:
            for (group, blocks), here in zip(self._asked, found, strict=True):
                self._present[group][blocks] |= np.asarray(here, bool)
            self._settle_blocks()
        else:
            self._settle_snapshots(found)

    def _ask_blocks(self) -> list[TierQuery]:
        self._asked, queries = [], []
        for group in self._tokens:
            lacking = np.flatnonzero(~self._present[group.index]).tolist()
            for is_public, blocks in self._by_owner(lacking):
                self._asked.append((group.index, blocks))
                queries.append(TierQuery(group.index, [self.hashes[b] for b in blocks], is_public))
        return queries

    def _by_owner(self, blocks: list[int]) -> list[tuple[bool, list[int]]]:
        """Divide block numbers into those of the public prefix and the others. Return (is public, blocks) for each
        part. If no block is public, the public part is left out."""
        end = self.match.public // self.block
        public = [b for b in blocks if b < end]
        rest = (False, [b for b in blocks if b >= end])
        return [(True, public), rest] if public else [rest]

    def _settle_blocks(self) -> None:
        for group in self._tokens:
            if not group.spec.visibility.windowed:
                missing = np.flatnonzero(~self._present[group.index][: self._reach])
                self._reach = int(missing[0]) if missing.size else self._reach
        if self._states:
            return
        resume = min(self.limit, max(self._reach * self.block, self.match.matched))
        while resume > self.match.resume:
            if not self._has_end(resume, {}):
                resume -= resume % self.block
                continue
            deepest = longest_resume(resume, self._units(resume), self.block)[0]
            if deepest == resume:
                self.resume, self._tail_in_tier = resume, not self._is_cached(resume)
                return
            resume = deepest

    def _units(self, resume: int) -> list[tuple[Visibility, Mask]]:
        """Return, for every windowed group, the visibility of the group and one truth value per block before
        `resume`. The value is true if the pool or a tier has the group's page of the block. A partial last block
        counts as present, because `_has_end` tests it."""
        whole, part = divmod(resume, self.block)
        more = np.ones(int(part > 0), bool)
        return [
            (g.spec.visibility, np.append(self._present[g.index][:whole], more))
            for g in self._tokens
            if g.spec.visibility.windowed
        ]

    def _is_cached(self, resume: int) -> bool:
        """Return whether the pool has the pages of all groups for the partial block that ends at `resume`. Return True
        if `resume` is a block boundary."""
        whole, part = divmod(resume, self.block)
        if not part:
            return True
        return resume <= self.match.matched and bool((self._rows[whole] > 0).all())

    def _has_end(self, resume: int, tails: dict[int, set[int]]) -> bool:
        """Return whether the pool or the tiers have all pages of the partial block at `resume`.

        In a model without states, a tier's page of the full block is sufficient. In a model with states, tiers must
        have the pages of the partial block that ends exactly at `resume`. `tails` contains, for each group, the ends of
        the partial blocks that tiers have.
        """
        if self._is_cached(resume):
            return True
        whole = resume // self.block
        if self._states:
            return all(resume in tails.get(g.index, ()) for g in self._tokens)
        return whole < len(self.hashes) and all(self._present[g.index][whole] for g in self._tokens)

    def _ask_snapshots(self) -> list[TierQuery]:
        """Return queries for snapshots, and for the partial blocks that end at the same positions. A snapshot may be
        at any position, so each round queries a range of positions. The deepest range comes first, and later ranges
        are longer."""
        if not self._upper_bound:
            top = max(self._reach * self.block + self.block - 1, self.match.matched)
            self._upper_bound = min(self.limit, top) + 1
        size = min(self.block << 2 * min(self._round, 6), MOST_TAILS - self._tails)
        first = max(self.match.resume + 1, self._upper_bound - size)
        if self._upper_bound > self.match.public + 1:  # one round queries either public or private positions
            first = max(first, self.match.public + 1)
        is_public = self._upper_bound <= self.match.public + 1
        self._positions = list(range(self._upper_bound - 1, first - 1, -1))
        if not self._positions:
            return []
        self._tails += len(self._positions)
        self._upper_bound = first
        hashes = [self.hash_at(p) for p in self._positions]
        self._asked = [(g.index, []) for g in self._states]
        asked = [TierQuery(g.index, hashes, is_public) for g in self._states]
        for group in self._tokens:
            own = [i for i, p in enumerate(self._positions) if not self._is_cached(p)]
            self._asked.append((group.index, own))
            asked.append(TierQuery(group.index, [hashes[i] for i in own], is_public))
        return asked

    def _settle_snapshots(self, found: Sequence[Mask]) -> None:
        kinds = len(self._states)
        states = np.logical_and.reduce([np.asarray(here, bool) for here in found[:kinds]])
        tails: dict[int, set[int]] = {}
        for (group, own), here in zip(self._asked[kinds:], found[kinds:], strict=True):
            tails[group] = {self._positions[i] for i, there in zip(own, here, strict=True) if there}
        for i in np.flatnonzero(states).tolist():
            resume = self._positions[i]
            whole = resume // self.block
            if (whole <= self._reach or resume <= self.match.matched) and self._has_end(resume, tails):
                if missing_unit(resume, self._units(resume), self.block) is None:
                    self.resume, self._tail_in_tier = resume, not self._is_cached(resume)
                    self._round = LAST_ROUND
                    return

    @property
    def miss(self) -> Miss | None:
        """Return a miss if tiers have full-attention pages after `resume`, but a snapshot or a window page is missing
        there. Otherwise return None."""
        full = any(not group.spec.visibility.windowed for group in self._tokens)
        present = min(self.limit, self._reach * self.block) if full and self._round else 0
        if present < self.resume + self.block:
            return None
        reason = "snapshot missing" if self._states else "window page missing"
        return Miss(reason, self.resume, matched=present // self.block * self.block)

    # -- missing pages --------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """The position at which the planned pages end, usually `resume`. If `resume` is inside a block whose pages
        come from a tier, the position is the end of that block. The tier has the full block. In models with states,
        the position is always `resume`."""
        if self._tail_in_tier and not self._states:
            return -(-self.resume // self.block) * self.block
        return self.resume

    def missing_pages(self, first: int = 0) -> list[MissingPages]:
        """Return the pages that must be loaded to resume at `resume`. `first` is a block boundary. Unmatched blocks
        before `first` are omitted, because the request computes them while the other pages load."""
        if self.resume <= self.match.resume:
            return []
        needed = []
        whole, blocks = self.match.matched // self.block, self.resume // self.block
        gap = range(whole, first // self.block)
        for group in self._tokens:
            lacking = [
                b
                for b in group.spec.visibility.visible_blocks(self.resume, self.block)
                if b < blocks and b not in gap and (b >= whole or not self._rows[b, group.column])
            ]
            if self._tail_in_tier:
                lacking.append(blocks)
            for is_public, some in self._by_owner(lacking):
                if some:
                    needed.append(MissingPages(group, some, [self.page_hash(b) for b in some], is_public))
        end, is_public = self.hash_at(self.resume), self.resume <= self.match.public
        return needed + [MissingPages(group, [-1], [end], is_public) for group in self._states]

    def page_hash(self, block: int) -> bytes:
        """Return the hash under which a tier stores the page of `block`. The hash covers at most the tokens before
        `end`."""
        return self.hashes[block] if (block + 1) * self.block <= self.end else self.hash_at(self.end)
