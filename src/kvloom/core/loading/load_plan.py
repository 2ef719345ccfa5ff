"""How far a prompt could resume with pages that lie below the pool, and which pages that takes.

    prospect = cache.prospect(match)
    while (questions := prospect.questions()): prospect.answer([found(q.group, q.names) for q in questions])
    prospect.point, prospect.needs(first)

A page below is known by the name of the prefix that ends where its tokens do: the end of its block, or of a partial tail.
The rule is that of every resume point (`resume.py`); who answers, and how long that takes, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import HASH_TOKENS, PageGroup, PoolLayout
from kvloom.core.lookup import Lookup, Match, Miss
from kvloom.core.prefix.block_hash import TOKEN_BYTES, tail_hash
from kvloom.core.prefix.resume_rule import longest_resume, missing_unit

__all__ = ["LoadPlan", "MissingPages", "TierQuery", "deciding_group", "first_query"]

Mask = npt.NDArray[np.bool_]
MOST_TAILS = 4096
"""Positions at which a snapshot is looked for, at the most; each costs a hash."""
LAST_ROUND = 16


@dataclass(frozen=True, slots=True)
class TierQuery:
    """Which of these names have a page of `group` below?"""

    group: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages of one group to bring: of block `blocks[i]` under `names[i]`; of a state group one, its block is -1."""

    group: PageGroup
    blocks: list[int]
    hashes: list[bytes]


def deciding_group(layout: PoolLayout) -> PageGroup | None:
    """The group whose page of the next block decides whether anything below is of use; None where no one does. A layer that sees
    everything needs that page, wherever one resumes further on; a state may stand within the block."""
    if layout.of("state"):
        return None
    return next((group for group in layout.of("token") if not group.spec.visibility.windowed), None)


def first_query(group: PageGroup, lookup: Lookup, match: Match) -> TierQuery | None:
    """What to look up before all else, of the deciding group: where none of its names is below, nothing there takes the prompt
    further. None where no one name decides: the matched text itself lacks a window's pages. Hashes one block."""
    if match.resume < match.matched:
        return None
    end = (match.matched // group.block_tokens + 1) * group.block_tokens
    return TierQuery(group.index, [lookup.hash_at(match, end)] if end <= match.length else [])


class LoadPlan:
    """See the module. Changes nothing; made for one match, and good while the tree holds what that found."""

    def __init__(self, layout: PoolLayout, lookup: Lookup, match: Match) -> None:
        self.match, self.block = match, layout.block_tokens
        self._lookup = lookup
        self._tokens, self._states = layout.of("token"), layout.of("state")
        self._all_hashes = lookup.block_hashes(match)
        per_block = self.block // HASH_TOKENS
        self.hashes = self._all_hashes[per_block - 1 :: per_block]
        """The name of every whole block of the prompt."""
        self.resume = match.resume
        """The resume point found so far."""
        blocks = len(self.hashes)
        self._rows = rows = lookup.tree.rows(match.path, match.matched)
        whole = match.matched // self.block
        self._present: dict[int, Mask] = {}
        for group in self._tokens:
            have = np.zeros(blocks, bool)
            have[:whole] = rows[:whole, group.column] > 0
            self._present[group.index] = have
        self.limit = match.limit
        room = lookup.allocator
        for item in match.media:
            wanted = item.tokens and room.media.width and room.media_outlives_prompt
            if wanted and match.root_hash + item.digest not in room.media_runs:
                self.limit = min(self.limit, item.start)  # runs of images are not looked for below
        self._reach = blocks
        self._upper_bound = 0
        self._round = 0
        self._asked: list[tuple[int, list[int]]] = []
        self._positions: list[int] = []
        self._tails = 0
        self._tail_in_tier = False

    def hash_at(self, position: int) -> bytes:
        """The name of the prompt's prefix of `position` tokens."""
        grains = position // HASH_TOKENS
        parent = self._all_hashes[grains - 1] if grains else self.match.root_hash
        if position % HASH_TOKENS == 0:
            return parent
        text = self.match.data[grains * HASH_TOKENS * TOKEN_BYTES : position * TOKEN_BYTES]
        return tail_hash(parent, text, self._lookup.tree.publisher.resolve)

    # -- asking ---------------------------------------------------------------------------------

    def next_queries(self) -> list[TierQuery]:
        """What to look up next; nothing: `point` is final. Give `answer` one line of truth values each."""
        self._round += 1
        if self.limit <= self.match.resume or not self.match.control.read:
            return []
        if self._round == 1 and self._tokens:
            return self._ask_blocks()
        if self._states and self._round < LAST_ROUND:
            return self._ask_snapshots()
        return []

    def answer(self, found: Sequence[Mask]) -> None:
        if self._round == 1 and self._tokens:
            for (group, blocks), here in zip(self._asked, found, strict=True):
                self._present[group][blocks] |= np.asarray(here, bool)
            self._settle_blocks()
        else:
            self._settle_snapshots(found)

    def _ask_blocks(self) -> list[TierQuery]:
        self._asked = []
        for group in self._tokens:
            lacking = np.flatnonzero(~self._present[group.index]).tolist()
            self._asked.append((group.index, lacking))
        return [TierQuery(group, [self.hashes[b] for b in blocks]) for group, blocks in self._asked]

    def _settle_blocks(self) -> None:
        for group in self._tokens:
            if not group.spec.visibility.windowed:
                missing = np.flatnonzero(~self._present[group.index][: self._reach])
                self._reach = int(missing[0]) if missing.size else self._reach
        if self._states:
            return
        point = min(self.limit, max(self._reach * self.block, self.match.matched))
        while point > self.match.resume:
            if not self._has_end(point, {}):
                point -= point % self.block
                continue
            deepest = longest_resume(point, self._units(point), self.block)[0]
            if deepest == point:
                self.resume, self._tail_in_tier = point, not self._is_cached(point)
                return
            point = deepest

    def _units(self, point: int) -> list[tuple[Visibility, Mask]]:
        """Of every window which blocks before `point` have their page, here or below; the last, if partial, has."""
        whole, part = divmod(point, self.block)
        more = np.ones(int(part > 0), bool)
        return [
            (g.spec.visibility, np.append(self._present[g.index][:whole], more))
            for g in self._tokens
            if g.spec.visibility.windowed
        ]

    def _is_cached(self, point: int) -> bool:
        """Whether the block that `point` cuts needs nothing from below: every group has its page in the tree."""
        whole, part = divmod(point, self.block)
        if not part:
            return True
        return point <= self.match.matched and bool((self._rows[whole] > 0).all())

    def _has_end(self, point: int, tails: dict[int, set[int]]) -> bool:
        """Whether the block that `point` cuts has its pages: all in the tree, or all below, where a page that goes on
        behind `point` serves too unless states are to stand there."""
        if self._is_cached(point):
            return True
        whole = point // self.block
        if self._states:
            return all(point in tails.get(g.index, ()) for g in self._tokens)
        return whole < len(self.hashes) and all(self._present[g.index][whole] for g in self._tokens)

    def _ask_snapshots(self) -> list[TierQuery]:
        """Snapshots stand anywhere: their places are tried from the deepest up, more each time."""
        if not self._upper_bound:
            top = max(self._reach * self.block + self.block - 1, self.match.matched)
            self._upper_bound = min(self.limit, top) + 1
        size = min(self.block << 2 * min(self._round, 6), MOST_TAILS - self._tails)
        first = max(self.match.resume + 1, self._upper_bound - size)
        self._positions = list(range(self._upper_bound - 1, first - 1, -1))
        if not self._positions:
            return []
        self._tails += len(self._positions)
        self._upper_bound = first
        names = [self.hash_at(p) for p in self._positions]
        self._asked = [(g.index, []) for g in self._states]
        asked = [TierQuery(g.index, names) for g in self._states]
        for group in self._tokens:
            own = [i for i, p in enumerate(self._positions) if not self._is_cached(p)]
            self._asked.append((group.index, own))
            asked.append(TierQuery(group.index, [names[i] for i in own]))
        return asked

    def _settle_snapshots(self, found: Sequence[Mask]) -> None:
        kinds = len(self._states)
        states = np.logical_and.reduce([np.asarray(here, bool) for here in found[:kinds]])
        tails: dict[int, set[int]] = {}
        for (group, own), here in zip(self._asked[kinds:], found[kinds:], strict=True):
            tails[group] = {self._positions[i] for i, there in zip(own, here, strict=True) if there}
        for i in np.flatnonzero(states).tolist():
            point = self._positions[i]
            whole = point // self.block
            if (whole <= self._reach or point <= self.match.matched) and self._has_end(point, tails):
                if missing_unit(point, self._units(point), self.block) is None:
                    self.resume, self._tail_in_tier = point, not self._is_cached(point)
                    self._round = LAST_ROUND
                    return

    @property
    def miss(self) -> Miss | None:
        """Why one cannot resume further, where the pages of tokens beyond `point` are there, here or below: a state's
        snapshot was not kept, or a window's page has left. None where that is not why."""
        full = any(not group.spec.visibility.windowed for group in self._tokens)
        known = min(self.limit, self._reach * self.block) if full and self._round else 0
        if known < self.resume + self.block:
            return None
        return Miss("snapshot missing" if self._states else "window page missing", self.resume)

    # -- what it takes --------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """Where the text ends that the pages will be for: the end of `point`'s block, where its page below goes so far."""
        if self._tail_in_tier and not self._states:
            return -(-self.resume // self.block) * self.block
        return self.resume

    def missing_pages(self, first: int = 0) -> list[MissingPages]:
        """The pages that the tree lacks for resuming at `point`. Of the text that it lacks altogether only what comes
        from `first` on (a multiple of the block), the rest being computed meanwhile."""
        if self.resume <= self.match.resume:
            return []
        needed = []
        whole, blocks = self.match.matched // self.block, self.resume // self.block
        gap = range(whole, first // self.block)
        for group in self._tokens:
            start = group.spec.visibility.first_visible(self.resume) // self.block
            lacking = [
                b
                for b in range(start, blocks)
                if b not in gap and (b >= whole or not self._rows[b, group.column])
            ]
            if self._tail_in_tier:
                lacking.append(blocks)
            if lacking:
                needed.append(MissingPages(group, lacking, [self.page_hash(b) for b in lacking]))
        return needed + [MissingPages(group, [-1], [self.hash_at(self.resume)]) for group in self._states]

    def page_hash(self, block: int) -> bytes:
        """The name of the page of one block, as far as `end`."""
        return self.hashes[block] if (block + 1) * self.block <= self.end else self.hash_at(self.end)
