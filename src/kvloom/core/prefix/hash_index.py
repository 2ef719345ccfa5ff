"""Hash index: for each block hash, its parent hash and the groups stored under it, by medium. Only events fill it.

Tiers, restarted servers, peers and routers use it. It has no access to tokens or pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import HASH_TOKENS, PageGroup

from .resume_rule import longest_resume

__all__ = ["HashIndex"]


class HashIndex:
    """An index of block hashes. `match` applies the same resume rule as the radix tree. Not thread-safe."""

    __slots__ = ("_entries", "_full", "_groups", "_places", "_states", "_tails", "_windows")

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        text = [g for g in groups if g.spec.axis == "text"]
        self._groups = max((g.index for g in groups), default=0) + 1
        self._full = self._mask(
            g.index for g in text if g.spec.unit == "token" and not g.spec.visibility.windowed
        )
        self._states = self._mask(g.index for g in text if g.spec.unit == "state")
        self._windows: tuple[tuple[Visibility, int], ...] = tuple(
            (g.spec.visibility, 1 << g.index)
            for g in text
            if g.spec.unit == "token" and g.spec.visibility.windowed
        )
        self._entries: dict[bytes, tuple[bytes, int]] = {}
        self._tails: dict[bytes, dict[bytes, int]] = {}
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._entries

    @staticmethod
    def _mask(groups: Iterable[int]) -> int:
        mask = 0
        for group in groups:
            mask |= 1 << group
        return mask

    def _bits(self, groups: Iterable[int], place: str) -> int:
        mask = self._mask(groups)
        if mask >> self._groups:
            raise ValueError(f"unknown group in {tuple(groups)}; this index has {self._groups}")
        return mask << self._places.setdefault(place, len(self._places)) * self._groups

    def stored(
        self, parent: bytes, hashes: Sequence[bytes], groups: Iterable[int], place: str, tail_tokens: int = 0
    ) -> None:
        """Record that pages of `groups` are stored in `place` under each of `hashes`, which form a chain after
        `parent`.
        """
        bits = self._bits(tuple(groups), place)
        if tail_tokens:
            if not 0 < tail_tokens < HASH_TOKENS or len(hashes) != 1:
                raise ValueError(
                    f"a tail is one hash of 1 to {HASH_TOKENS - 1} tokens, got {len(hashes)} of {tail_tokens}"
                )
            self._tails.setdefault(parent, {})[hashes[0]] = tail_tokens
        entries = self._entries
        for hash_ in hashes:
            entry = entries.get(hash_)
            entries[hash_] = (parent, bits if entry is None else entry[1] | bits)
            parent = hash_

    def dropped(self, hashes: Iterable[bytes], groups: Iterable[int], place: str) -> None:
        """Record that pages of `groups` were removed from `place`. Hashes without pages leave the index."""
        keep = ~self._bits(tuple(groups), place)
        for hash_ in hashes:
            entry = self._entries.get(hash_)
            if entry is not None:
                self._put(hash_, entry[0], entry[1] & keep)

    def forget(self, place: str) -> None:
        """Remove all entries of `place`, because a peer died or a tier was cleared. O(hashes)."""
        if place in self._places:
            keep = ~(((1 << self._groups) - 1) << self._places[place] * self._groups)
            for hash_, (parent, bits) in list(self._entries.items()):
                self._put(hash_, parent, bits & keep)

    def _put(self, hash_: bytes, parent: bytes, bits: int) -> None:
        if bits:
            self._entries[hash_] = (parent, bits)
            return
        del self._entries[hash_]
        tails = self._tails.get(parent)
        if tails is not None and tails.pop(hash_, None) is not None and not tails:
            del self._tails[parent]

    def places(self, hash_: bytes) -> dict[str, tuple[int, ...]]:
        """Return the places that have pages under `hash_`, with their groups."""
        _, bits = self._entries.get(hash_, (b"", 0))
        found = {}
        for place, index in self._places.items():
            mask = bits >> index * self._groups & (1 << self._groups) - 1
            if mask:
                found[place] = tuple(g for g in range(self._groups) if mask >> g & 1)
        return found

    def parent(self, hash_: bytes) -> bytes | None:
        """Return the parent hash, or None if the index does not contain `hash_`."""
        entry = self._entries.get(hash_)
        return entry[0] if entry else None

    def match(
        self,
        hashes: Sequence[bytes],
        limit: int,
        *,
        root: bytes = b"",
        tail: Callable[[bytes, int, int], bytes] | None = None,
        places: Iterable[str] | None = None,
    ) -> int:
        """Return the longest resumable length, at most `limit` tokens, of a prompt with block hashes `hashes`.
        `places` restricts the locations; a router asks for one worker. `tail(parent, start, length)` returns the hash
        of a partial tail of the prompt. With it, partial tails can match too.
        """
        folded = self._fold(hashes[: -(-limit // HASH_TOKENS)], places)
        need = self._full
        reach = (
            next((i for i, mask in enumerate(folded) if mask & need != need), len(folded))
            if need
            else len(folded)
        )
        windows = [
            (visibility, np.fromiter((mask & bit for mask in folded[:reach]), bool, reach))
            for visibility, bit in self._windows
        ]
        if not self._states:
            return longest_resume(min(limit, reach * HASH_TOKENS), windows, HASH_TOKENS)[0]
        # A partial tail gives a longer hit than its parent, so it is tried first.
        for count in range(reach, -1, -1):
            parent = hashes[count - 1] if count else root
            for hash_, length in sorted(self._tails.get(parent, {}).items(), key=lambda item: -item[1]):
                start = count * HASH_TOKENS
                if tail is None or start + length > limit or tail(parent, start, length) != hash_:
                    continue
                mask = self._fold([hash_], places)[0]
                if mask & self._states == self._states and self._tail_complete(start + length, folded, mask):
                    return start + length
            position = count * HASH_TOKENS
            if count and position <= limit and folded[count - 1] & self._states == self._states:
                if longest_resume(position, windows, HASH_TOKENS, (position,))[0] == position:
                    return position
        return 0

    def _tail_complete(self, position: int, folded: Sequence[int], tail: int) -> bool:
        if tail & self._full != self._full:
            return False
        masks = [*folded[: position // HASH_TOKENS], tail]
        windows = [
            (visibility, np.array([bool(mask & bit) for mask in masks])) for visibility, bit in self._windows
        ]
        return longest_resume(position, windows, HASH_TOKENS, (position,))[0] == position

    def _fold(self, hashes: Sequence[bytes], places: Iterable[str] | None) -> list[int]:
        """Return, as bit masks, the groups that each hash has in any of `places`."""
        every = (1 << self._groups) - 1
        chosen = (
            range(len(self._places))
            if places is None
            else [self._places[p] for p in places if p in self._places]
        )
        shifts = [index * self._groups for index in chosen]
        folded = []
        entries = self._entries
        nothing = (b"", 0)
        for hash_ in hashes:
            bits = entries.get(hash_, nothing)[1]
            mask = 0
            for shift in shifts:
                mask |= bits >> shift
            folded.append(mask & every)
        return folded
