"""Finds the longest earlier match of the last tokens in a growing list of tokens.

A dictionary contains the latest position of each n-gram of three tokens. A list links each position to the previous
position of the same n-gram. The search follows these links through at most CANDIDATES positions. It compares tokens
backwards from each position, and returns the longest match. A suffix tree would also find longer matches at older
positions, but needs more time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["MIN_MATCH", "TokenIndex"]

MIN_MATCH = 3
"""Number of tokens of an indexed n-gram, which is also the shortest match."""
LONGEST_MATCH = 24
"""Largest number of tokens of a match. A match of this length ends the search."""
CANDIDATES = 8
"""Largest number of earlier positions of an n-gram that a search compares."""
BASE = 1 << 21
"""Larger than any token id, so that the key of an n-gram fits 63 bits."""
BULK = 64


class TokenIndex:
    """An index of `tokens`. Adding many tokens at once takes about 0.2 µs per token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[int, int] = {}
        self._earlier: list[int] = []
        """For each position, the previous position at which the same n-gram ends, or -1."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens, whose ids must be less than BASE."""
        start = len(self.tokens)
        self.tokens += tokens
        if len(tokens) >= BULK:
            self._add_bulk(start)
            return
        every, last, earlier = self.tokens, self._last, self._earlier
        for i in range(start, len(every)):
            if i < MIN_MATCH - 1:
                earlier.append(-1)
                continue
            key = (every[i - 2] * BASE + every[i - 1]) * BASE + every[i]
            earlier.append(last.get(key, -1))
            last[key] = i

    def _add_bulk(self, start: int) -> None:
        skipped = max(0, MIN_MATCH - 1 - start)
        self._earlier += [-1] * skipped
        first = start + skipped
        ids = np.array(self.tokens[first - MIN_MATCH + 1 :], np.int64)
        keys = (ids[:-2] * BASE + ids[1:-1]) * BASE + ids[2:]
        order = np.argsort(keys, kind="stable")
        same = keys[order][1:] == keys[order][:-1]
        earlier = np.full(len(keys), -1)
        earlier[order[1:][same]] = order[:-1][same] + first
        found = earlier.tolist()
        key_list = keys.tolist()
        if self._last:
            known = self._last
            found = [known.get(key, -1) if at < 0 else at for key, at in zip(key_list, found, strict=True)]
        self._earlier += found
        self._last.update(zip(key_list, range(first, first + len(keys)), strict=True))

    def longest_match(self, tail: Sequence[int], own: bool) -> tuple[int, int]:
        """Find the longest earlier occurrence of the last tokens of `tail` in the index. Return the position after the
        occurrence and its length in tokens, or (0, 0) if there is none. `own` means that the indexed tokens themselves
        end with `tail`. The search then ignores this occurrence at the end.
        """
        if len(tail) < MIN_MATCH:
            return 0, 0
        key = (tail[-3] * BASE + tail[-2]) * BASE + tail[-1]
        at = self._earlier[-1] if own else self._last.get(key, -1)
        tokens, best, best_at = self.tokens, 0, 0
        longest = min(len(tail), LONGEST_MATCH)
        for _ in range(CANDIDATES):
            if at < 0:
                break
            length, most = MIN_MATCH, min(longest, at + 1)
            while length < most and tokens[at - length] == tail[-1 - length]:
                length += 1
            if length > best:
                best, best_at = length, at + 1
                if length == longest:
                    break
            at = self._earlier[at]
        return best_at, best
