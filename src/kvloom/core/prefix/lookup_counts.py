"""Counters of lookups: tokens looked up and hit, pages hit by kind, miss reasons, seconds between uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvloom.core.histogram import Histogram
from kvloom.core.layout.pool_layout import PoolLayout

from .lookup import Match

__all__ = ["LookupCounts"]


class LookupCounts:
    """Counts every opened sequence of one cache."""

    def __init__(self, layout: PoolLayout) -> None:
        self._layout = layout
        self.misses: defaultdict[str, int] = defaultdict(int)
        """Number of opened sequences by miss reason. A Counter would take three times as long per sequence."""
        self.looked_up_tokens = 0
        self.hit_tokens = 0
        self.reuse_seconds = Histogram()
        """Histogram of the seconds between a hit and the previous use of the deepest node that was hit."""
        self._blocks = self._states = self._media_blocks = 0
        windowed = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self._outside_window = [0] * len(windowed)

    def opened(self, match: Match) -> None:
        """Count the tokens and the miss reason of the match with which a sequence was opened."""
        self.looked_up_tokens += match.length
        self.hit_tokens += match.resume
        self.misses[match.miss.reason] += 1

    def hit(self, resume: int, has_snapshot: bool, first_blocks: Iterable[int]) -> None:
        """Count the pages of a hit of `resume` tokens. With `has_snapshot`, count also one state snapshot.
        `first_blocks` contains the first block inside each window. Window pages of earlier blocks do not count."""
        self._blocks += -(-resume // self._layout.block_tokens)
        self._states += has_snapshot
        for window, first in enumerate(first_blocks):
            self._outside_window[window] += first

    def hit_media(self, blocks: int) -> None:
        """Count `blocks` blocks of a media run as hit."""
        self._media_blocks += blocks

    def hit_pages(self) -> dict[str, int]:
        """Return the number of pages hit so far, by group name. O(groups)."""
        found: dict[str, int] = {}
        outside = iter(self._outside_window)
        for group in self._layout.groups:
            if group.spec.axis == "media":
                blocks = self._media_blocks
            elif group.spec.unit == "state":
                blocks = self._states
            else:
                blocks = self._blocks - (next(outside) if group.spec.visibility.windowed else 0)
            kind = group.name.rsplit(" #", 1)[0]
            found[kind] = found.get(kind, 0) + blocks * group.runs
        return found
