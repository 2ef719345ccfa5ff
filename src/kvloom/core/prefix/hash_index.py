"""Hash index: maps each block hash to its parent hash, and to the places and layer groups of its pages. A place is, for
example, a tier or a worker. Only events fill the index.

Tiers, restarted servers, peers and routers use this index. It contains no tokens and no pages. A hash is bytes, or an
integer if the events contain integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import HASH_TOKENS, PageGroup
from kvloom.core.pool import loops
from kvloom.core.pool.counts import leading as counts_leading

from .resume_rule import longest_resume

__all__ = ["HashIndex", "HashKey"]

HashKey = TypeVar("HashKey", bytes, int)
MAX_NATIVE = 64
"""Largest number of places (tiers, peers or workers) for which the native loops can be used."""


class HashIndex(Generic[HashKey]):
    """A map from block hashes to the places and groups of their pages. A place is a tier, a peer or a worker. `match`
    applies the same resume rule as the radix tree. Not thread-safe.

    Without `keeps_parents` the index stores neither parents nor partial last blocks. The index is then smaller, and
    `stored` is faster.
    """

    __slots__ = (
        "_bits",
        "_counts",
        "_full",
        "_groups",
        "_parents",
        "_places",
        "_states",
        "_tails",
        "_windows",
    )

    def __init__(self, groups: Sequence[PageGroup], keeps_parents: bool = True) -> None:
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
        self._bits: dict[HashKey, int] = {}
        self._parents: dict[HashKey, HashKey] | None = {} if keeps_parents else None
        self._tails: dict[HashKey, dict[HashKey, int]] = {}
        self._places: dict[str, int] = {}
        self._counts: list[int] = []
        """Number of hashes of each place."""

    def __len__(self) -> int:
        return len(self._bits)

    def __contains__(self, hash_: HashKey) -> bool:
        return hash_ in self._bits

    @staticmethod
    def _mask(groups: Iterable[int]) -> int:
        mask = 0
        for group in groups:
            mask |= 1 << group
        return mask

    def _bits_of(self, groups: Iterable[int], place: str) -> int:
        mask = self._mask(groups)
        if mask >> self._groups:
            raise ValueError(f"unknown group in {tuple(groups)}; this index has {self._groups}")
        return mask << self.add_place(place) * self._groups

    def count(self, place: str) -> int:
        """Return the number of hashes that have pages in `place`."""
        number = self._places.get(place)
        return 0 if number is None else self._counts[number]

    def _every_group(self, place: str) -> int:
        """Return an integer in which the bits of all layer groups at `place` are set. See `bits`."""
        return ((1 << self._groups) - 1) << self._places[place] * self._groups

    def stored(
        self,
        parent: HashKey,
        hashes: Sequence[HashKey],
        groups: Iterable[int],
        place: str,
        tail_tokens: int = 0,
    ) -> None:
        """Record that `place` has pages of `groups` for each of `hashes`. The hashes form a chain: `parent` is the
        parent of the first hash, and each hash is the parent of the next hash. If `tail_tokens` is not 0, `hashes`
        must have exactly one hash, which covers a partial last block of this many tokens."""
        bits = self._bits_of(tuple(groups), place)
        known, parents = self._bits, self._parents
        number, here, new = self._places[place], self._every_group(place), 0
        if parents is None:
            if known.keys().isdisjoint(hashes):  # all hashes are new, which is the usual case
                before = len(known)
                known.update(dict.fromkeys(hashes, bits))
                new = len(known) - before
            else:
                for hash_ in hashes:
                    mask = known.get(hash_, 0)
                    new += not mask & here
                    known[hash_] = mask | bits
            self._counts[number] += new if bits else 0
            return
        if tail_tokens:
            if not 0 < tail_tokens < HASH_TOKENS or len(hashes) != 1:
                raise ValueError(
                    f"a tail is one hash of 1 to {HASH_TOKENS - 1} tokens, got {len(hashes)} of {tail_tokens}"
                )
            self._tails.setdefault(parent, {})[hashes[0]] = tail_tokens
        for hash_ in hashes:
            mask = known.get(hash_, 0)
            new += not mask & here
            known[hash_] = mask | bits
            parents[hash_] = parent
            parent = hash_
        self._counts[number] += new if bits else 0

    def dropped(self, hashes: Iterable[HashKey], groups: Iterable[int], place: str) -> None:
        """Record that pages of `groups` were removed from `place`. A hash without pages in any place is removed from
        the index."""
        keep = ~self._bits_of(tuple(groups), place)
        known = self._bits
        here, gone, has_parents = self._every_group(place), 0, self._parents is not None
        for hash_ in hashes:
            mask = known.get(hash_)
            if mask is None:
                continue
            left = mask & keep
            if left == mask and mask:  # no bit changes, and the hash still has pages
                continue
            if mask & here and not left & here:
                gone += 1
            if left:
                known[hash_] = left
            elif has_parents:
                self._remove(hash_)
            else:
                del known[hash_]
        self._counts[self._places[place]] -= gone

    def forget(self, place: str) -> None:
        """Remove all pages of `place`, for example because a peer died or a tier was cleared. O(hashes)."""
        for _ in self.forgetting(place):
            pass

    def forgetting(self, place: str, chunk: int = 10_000) -> Iterator[None]:
        """Do the work of `forget` in steps of `chunk` hashes. An event loop can do other work between the steps. Do
        not add pages of `place` before the last step."""
        if place not in self._places:
            return
        mine, number = self._every_group(place), self._places[place]
        hashes = list(self._bits)
        for start in range(0, len(hashes), chunk):
            for hash_ in hashes[start : start + chunk]:
                mask = self._bits.get(hash_, 0)
                if not mask & mine:
                    continue
                self._counts[number] -= 1
                if mask & ~mine:
                    self._bits[hash_] = mask & ~mine
                else:
                    self._remove(hash_)
            yield

    def add_place(self, place: str) -> int:
        """Register a place (such as a worker or a tier) if it is new, and return its number. The number is the index of
        the place in the result of `lengths`."""
        number = self._places.setdefault(place, len(self._places))
        if number == len(self._counts):
            self._counts.append(0)
        return number

    def entries(self) -> list[tuple[HashKey, tuple[HashKey, int]]]:
        """Return a copy of all entries, which is the input of `chains`. O(hashes), about 50 ns each."""
        assert self._parents is not None, "this index has no parents"
        return list(
            zip(self._bits, zip(self._parents.values(), self._bits.values(), strict=True), strict=True)
        )

    def chains(
        self, entries: list[tuple[HashKey, tuple[HashKey, int]]]
    ) -> Iterator[tuple[HashKey, list[HashKey], tuple[int, ...], str, int]]:
        """Yield the entries as chains of hashes, each as (parent, hashes, groups, place, tail tokens). The tail tokens
        are the tokens of a partial last block, or 0. Calling `stored` with every chain rebuilds the index."""
        names = list(self._places)
        every = (1 << self._groups) - 1

        def split(parent: HashKey, hashes: list[HashKey], bits: int, tail: int) -> Iterator[Any]:
            for number, place in enumerate(names):
                mask = bits >> number * self._groups & every
                if mask:
                    yield parent, hashes, tuple(g for g in range(self._groups) if mask >> g & 1), place, tail

        first: HashKey | None = None
        run: list[HashKey] = []
        bits = tail = 0
        for hash_, (parent, mask) in entries:
            length = self._tails.get(parent, {}).get(hash_, 0)
            if run and parent == run[-1] and mask == bits and not tail and not length:
                run.append(hash_)
                continue
            if first is not None:
                yield from split(first, run, bits, tail)
            first, run, bits, tail = parent, [hash_], mask, length
        if first is not None:
            yield from split(first, run, bits, tail)

    def _remove(self, hash_: HashKey) -> None:
        del self._bits[hash_]
        if self._parents is None:
            return
        parent = self._parents.pop(hash_)
        tails = self._tails.get(parent)
        if tails is not None and tails.pop(hash_, None) is not None and not tails:
            del self._tails[parent]

    def places(self, hash_: HashKey) -> dict[str, tuple[int, ...]]:
        """Return the places that have pages for `hash_`, with the groups of the pages."""
        bits = self._bits.get(hash_, 0)
        found = {}
        for place, index in self._places.items():
            mask = bits >> index * self._groups & (1 << self._groups) - 1
            if mask:
                found[place] = tuple(g for g in range(self._groups) if mask >> g & 1)
        return found

    def parent(self, hash_: HashKey) -> HashKey | None:
        """Return the parent hash, or None if `hash_` is not in the index."""
        return None if self._parents is None else self._parents.get(hash_)

    def match(
        self,
        hashes: Sequence[HashKey],
        limit: int,
        *,
        root: HashKey | None = None,
        tail: Callable[[HashKey, int, int], HashKey] | None = None,
        places: Iterable[str] | None = None,
    ) -> int:
        """Return the longest resumable length of a prompt with block hashes `hashes`, at most `limit` tokens.

        - `places`: search only these places. For example, a router passes one worker.
        - `tail(parent, start, length)`: returns the hash of a partial last block of the prompt. If `tail` is given and
          the model has states, partial blocks can also match.
        - `root`: the parent of the first hash, needed to match a partial first block.
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
        # Try a hit that ends with a partial block first, because it is longer than the hit before that block.
        for count in range(reach, -1, -1):
            parent = hashes[count - 1] if count else root
            if parent is None:
                break
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

    def bits(self, hashes: Sequence[HashKey]) -> list[int]:
        """Return one integer for each hash. The integer has one bit for each pair of a place (a tier, peer or worker)
        and a layer group. The bit is set if the place has the group's page. The result is the input of `lengths`. About
        30 ns per hash."""
        return list(map(self._bits.get, hashes, repeat(0)))

    def lengths(self, bits: list[int]) -> list[int]:
        """Return, for each place (for example a worker), the length at which a prompt can resume with the pages of this
        place. Entry i belongs to place number i. Partial last blocks are ignored.

        `bits` is the result of `bits()` for the prompt's hashes. For several indexes with the same places and groups,
        combine their bits with `|` first. Without windows and states, a call makes one comparison per block, and does a
        little work per place.
        """
        if self._windows or self._states:
            return self._checkpoint_lengths(bits)
        if self._groups > 1:
            return self._full_lengths(bits)
        places = len(self._places)
        counts = loops.leading(bits, places) if places <= MAX_NATIVE else counts_leading(bits, places)
        return [count * HASH_TOKENS for count in counts]

    def lengths_of(self, hashes: list[HashKey]) -> list[int]:
        """Return the same as `lengths(bits(hashes))`. With one group and at most 64 places, native code reads the bits
        from the index. This takes half the time."""
        places = len(self._places)
        if self._windows or self._states or self._groups > 1 or places > MAX_NATIVE:
            return self.lengths(self.bits(hashes))
        return loops.leading_of(self._bits, hashes, places, HASH_TOKENS)

    def _full_lengths(self, bits: Sequence[int]) -> list[int]:
        places, width = len(self._places), self._groups
        found = [len(bits) * HASH_TOKENS] * places
        alive = 0
        for _ in range(places):
            alive = alive << width | self._full
        each = (1 << width) - 1
        before = -1
        at = 0
        for mask in bits:
            if mask != before:
                before = mask
                missing = alive & ~mask
                while missing:
                    place = ((missing & -missing).bit_length() - 1) // width
                    found[place] = at
                    gone = each << place * width
                    missing &= ~gone
                    alive &= ~gone
                if not alive:
                    break
            at += HASH_TOKENS
        return found

    def _checkpoint_lengths(self, bits: Sequence[int]) -> list[int]:
        """Compute the result of `lengths` for models with windows or states. Uses an array with one truth value per
        block, place and group."""
        places, width, blocks = len(self._places), self._groups, len(bits)
        if not places or not blocks:
            return [0] * places
        size = -(-places * width // 8)
        packed = np.frombuffer(b"".join([mask.to_bytes(size, "little") for mask in bits]), np.uint8)
        has = np.unpackbits(packed.reshape(blocks, size), axis=1, count=places * width, bitorder="little")
        has = has.reshape(blocks, places, width).astype(bool)
        ends = np.arange(1, blocks + 1)
        valid = np.ones((blocks, places), bool)  # whether a prompt may resume after each block
        for group in range(width):
            bit = 1 << group
            if self._full & bit:
                valid &= np.logical_and.accumulate(has[:, :, group])
            elif self._states & bit:
                valid &= has[:, :, group]
        for visibility, bit in self._windows:
            present = has[:, :, bit.bit_length() - 1]
            missing = np.maximum.accumulate(np.where(present, -1, ends[:, None] - 1))
            first = visibility.first_visible_each(ends * HASH_TOKENS) // HASH_TOKENS
            valid &= missing < first[:, None]
        last = blocks - np.argmax(valid[::-1], axis=0)
        return [int(n) for n in np.where(valid.any(axis=0), last, 0) * HASH_TOKENS]

    def _tail_complete(self, position: int, folded: Sequence[int], tail: int) -> bool:
        if tail & self._full != self._full:
            return False
        masks = [*folded[: position // HASH_TOKENS], tail]
        windows = [
            (visibility, np.array([bool(mask & bit) for mask in masks])) for visibility, bit in self._windows
        ]
        return longest_resume(position, windows, HASH_TOKENS, (position,))[0] == position

    def _fold(self, hashes: Sequence[HashKey], places: Iterable[str] | None) -> list[int]:
        """Return a bit mask for each hash. Bit g is set if any of `places` has a page of group g for this hash. If
        `places` is None, all places count."""
        every = (1 << self._groups) - 1
        chosen = (
            range(len(self._places))
            if places is None
            else [self._places[p] for p in places if p in self._places]
        )
        shifts = [index * self._groups for index in chosen]
        folded = []
        for bits in self.bits(hashes):
            mask = 0
            for shift in shifts:
                mask |= bits >> shift
            folded.append(mask & every)
        return folded
