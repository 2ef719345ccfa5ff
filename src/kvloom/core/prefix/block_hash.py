"""Names: what a page contains, the same in every process, tier, restart and machine.

    root = hash(model, tenant salt, adapter)          name = hash(parent's name, 16 tokens)

A name covers everything before it. The grain is fixed, so page layouts never show in it. Media
tokens enter by the digest of their content. Names know nothing of where pages are; the NameIndex
below knows that, and knows no tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.layer_spec import Visibility
from kvloom.core.layout.pool_layout import HASH_TOKENS, PageGroup
from kvloom.core.pool import loops

from .resume_rule import longest_resume

__all__ = ["HASH_BYTES", "HashIndex", "hash_chain", "media_hash", "root_hash", "tail_hash", "token_bytes"]

HASH_BYTES = 16
TOKEN_BYTES = 4
token_at = struct.Struct("<i").unpack_from
"""The token at a byte of a run of them, as a tuple of one."""
_TOKEN = np.dtype("<i4")
_GRAIN_BYTES = HASH_TOKENS * TOKEN_BYTES
Resolve = Callable[[int], bytes]
_HASH = blake2b(digest_size=HASH_BYTES)


def token_bytes(tokens: npt.ArrayLike) -> bytes:
    """Token ids as the little-endian int32 run that names and the tree compare."""
    array = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one row of ids, got shape {array.shape}")
    if array.dtype != _TOKEN:
        if array.size:
            if array.dtype.kind not in "iu":
                raise ValueError(f"tokens must be integers, got {array.dtype}")
            if not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
                raise ValueError(f"token ids from {array.min()} to {array.max()} do not fit 31 bits")
        array = array.astype(_TOKEN)
    data: bytes = array.tobytes()
    if loops.any_negative(data):
        raise ValueError(f"token id {array.min()} is negative")
    return data


def root_hash(model: str, salt: str = "", adapter: str = "") -> bytes:
    """The name that all names of one model, tenant and adapter hang below."""
    message = b"".join(
        struct.pack("<Q", len(part)) + part for part in (s.encode() for s in (model, salt, adapter))
    )
    return blake2b(message, digest_size=HASH_BYTES, person=b"kvloom.root").digest()


def media_hash(root: bytes, digest: bytes) -> bytes:
    """The name of an image's own run of pages below a root."""
    return blake2b(root + digest, digest_size=HASH_BYTES, person=b"kvloom.media").digest()


def hash_chain(parent: bytes, data: bytes | memoryview, resolve: Resolve | None = None) -> list[bytes]:
    """The names of the whole grains in `data` (token bytes that begin at a grain's start), in order.

    `resolve` gives the digest behind a negative id (a media token); without it there are none.
    """
    raw = bytes(data)
    whole = len(raw) // _GRAIN_BYTES * _GRAIN_BYTES
    media = resolve is not None and whole > 0 and loops.any_negative(raw)
    if not media and loops.chain is not None:
        return loops.chain(parent, raw)
    names = []
    fresh = _HASH.copy  # copying a hash costs less than making one
    for (grain,) in struct.iter_unpack(f"{_GRAIN_BYTES}s", raw[:whole]):
        if media and resolve is not None:
            grain = _with_media(grain, resolve)
        link = fresh()
        link.update(parent + grain)
        parent = link.digest()
        names.append(parent)
    return names


def tail_hash(parent: bytes, data: bytes | memoryview, resolve: Resolve | None = None) -> bytes:
    """The name of a partial tail: fewer than a grain of tokens after `parent`."""
    if not 0 < len(data) < _GRAIN_BYTES:
        raise ValueError(f"a tail has 1 to {HASH_TOKENS - 1} tokens, got {len(data) / TOKEN_BYTES:g}")
    message = bytes(data) if resolve is None else _with_media(bytes(data), resolve)
    return blake2b(parent + message, digest_size=HASH_BYTES, person=b"kvloom.tail").digest()


def _with_media(grain: bytes, resolve: Resolve) -> bytes:
    """A grain's tokens with each media run as -1s, followed by the runs' extents and digests."""
    if not loops.any_negative(grain):
        return grain
    ids = np.frombuffer(grain, "<i4")
    edges = np.flatnonzero(np.diff(ids)) + 1
    parts = [np.where(ids < 0, -1, ids).astype("<i4").tobytes()]
    for start, stop in zip([0, *edges], [*edges, ids.size], strict=True):
        if ids[start] < 0:
            parts.append(struct.pack("<BB", start, stop) + resolve(int(ids[start])))
    return b"".join(parts)


class HashIndex:
    """name → parent and, by place, the groups stored under it. Filled from events alone.

    For tiers, restarted servers, peers and routers. `match` follows the same resume rule as the
    prefix tree. Not thread-safe.
    """

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

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

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
        """`names`, a chain below `parent`, have pages of `groups` in `place`."""
        bits = self._bits(tuple(groups), place)
        if tail_tokens:
            if not 0 < tail_tokens < HASH_TOKENS or len(hashes) != 1:
                raise ValueError(
                    f"a tail is one name of 1 to {HASH_TOKENS - 1} tokens, got {len(hashes)} of {tail_tokens}"
                )
            self._tails.setdefault(parent, {})[hashes[0]] = tail_tokens
        entries = self._entries
        for name in hashes:
            known = entries.get(name)
            entries[name] = (parent, bits if known is None else known[1] | bits)
            parent = name

    def dropped(self, hashes: Iterable[bytes], groups: Iterable[int], place: str) -> None:
        """Pages of `groups` left `place`; names with nothing left anywhere are forgotten."""
        keep = ~self._bits(tuple(groups), place)
        for name in hashes:
            known = self._entries.get(name)
            if known is not None:
                self._put(name, known[0], known[1] & keep)

    def forget(self, place: str) -> None:
        """Everything in `place` is gone (a peer died, a tier was cleared). O(names)."""
        if place in self._places:
            keep = ~(((1 << self._groups) - 1) << self._places[place] * self._groups)
            for name, (parent, bits) in list(self._entries.items()):
                self._put(name, parent, bits & keep)

    def _put(self, name: bytes, parent: bytes, bits: int) -> None:
        if bits:
            self._entries[name] = (parent, bits)
            return
        del self._entries[name]
        tails = self._tails.get(parent)
        if tails is not None and tails.pop(name, None) is not None and not tails:
            del self._tails[parent]

    def places(self, name: bytes) -> dict[str, tuple[int, ...]]:
        """Where pages under `name` are, and of which groups."""
        _, bits = self._entries.get(name, (b"", 0))
        found = {}
        for place, index in self._places.items():
            mask = bits >> index * self._groups & (1 << self._groups) - 1
            if mask:
                found[place] = tuple(g for g in range(self._groups) if mask >> g & 1)
        return found

    def parent(self, name: bytes) -> bytes | None:
        known = self._entries.get(name)
        return known[0] if known else None

    def match(
        self,
        hashes: Sequence[bytes],
        limit: int,
        *,
        root: bytes = b"",
        tail: Callable[[bytes, int, int], bytes] | None = None,
        places: Iterable[str] | None = None,
    ) -> int:
        """The longest resume point in tokens, at most `limit`, for a prompt whose grains are `names`.

        `places` restricts where pages may be (a router asks for one worker). `tail(parent, start,
        length)` names the prompt's tokens after a grain, so that partial tails can match too.
        """
        folded = self._fold(hashes[: -(-limit // HASH_TOKENS)], places)
        need = self._full
        reach = (
            next((i for i, mask in enumerate(folded) if mask & need != need), len(folded))
            if need
            else len(folded)
        )
        windows = [
            (span, np.fromiter((mask & bit for mask in folded[:reach]), bool, reach))
            for span, bit in self._windows
        ]
        if not self._states:
            return longest_resume(min(limit, reach * HASH_TOKENS), windows, HASH_TOKENS)[0]
        # A partial tail below a grain resumes deeper than the grain itself; try it first.
        for grains in range(reach, -1, -1):
            parent = hashes[grains - 1] if grains else root
            for name, length in sorted(self._tails.get(parent, {}).items(), key=lambda item: -item[1]):
                start = grains * HASH_TOKENS
                if tail is None or start + length > limit or tail(parent, start, length) != name:
                    continue
                mask = self._fold([name], places)[0]
                if mask & self._states == self._states and self._tail_complete(start + length, folded, mask):
                    return start + length
            point = grains * HASH_TOKENS
            if grains and point <= limit and folded[grains - 1] & self._states == self._states:
                if longest_resume(point, windows, HASH_TOKENS, (point,))[0] == point:
                    return point
        return 0

    def _tail_complete(self, point: int, folded: Sequence[int], tail: int) -> bool:
        if tail & self._full != self._full:
            return False
        masks = [*folded[: point // HASH_TOKENS], tail]
        windows = [(span, np.array([bool(mask & bit) for mask in masks])) for span, bit in self._windows]
        return longest_resume(point, windows, HASH_TOKENS, (point,))[0] == point

    def _fold(self, names: Sequence[bytes], places: Iterable[str] | None) -> list[int]:
        """The groups each name has in any of `places`, as a mask."""
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
        for name in names:
            bits = entries.get(name, nothing)[1]
            mask = 0
            for shift in shifts:
                mask |= bits >> shift
            folded.append(mask & every)
        return folded
