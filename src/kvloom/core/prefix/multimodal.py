"""Images and other media: ids for their tokens in the text, and runs of pages of their own.

Two images never match by their placeholders: each content digest gets an id of its own (negative,
so that it is no token), good for this process; names use the digest itself. Layers on the media
axis keep a run of pages per image, found by its digest alone: cross attention for as long as a sequence
lives, embeddings until the image's tokens are computed (the cache keeps them for the next prompt).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.policies import Entry
from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.page_pool import Ids

__all__ = ["Media", "MediaIds", "MediaRun"]


@dataclass(frozen=True, slots=True)
class Media:
    """The placeholder tokens [start, stop) of a prompt stand for content with this digest.

    `tokens` counts its tokens on the media axis, where the model has such layers.
    """

    start: int
    stop: int
    digest: bytes
    tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"media placeholder [{self.start}, {self.stop}) is empty or negative")
        if len(self.digest) < 16:
            raise ValueError(f"a media digest needs 16 bytes or more, got {len(self.digest)}")
        if self.tokens < 0:
            raise ValueError(f"media tokens {self.tokens} is negative")


class MediaRun(Entry):
    """The pages of one image in the media groups."""

    __slots__ = ("_bytes", "_tokens", "account", "holds", "key", "rows")

    def __init__(
        self, serial: int, now: float, key: bytes, account: Account, rows: Ids, tokens: int, size: int
    ):
        super().__init__(serial, now)
        self.key = key
        self.account = account
        self.rows = rows
        self.holds = 0
        self._tokens = tokens
        self._bytes = size

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def depth(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return self._bytes


class MediaIds:
    """digest ↔ negative id. Bounded: a forgotten digest gets a new id, so old pages of it are missed,
    never mistaken."""

    LIMIT = 1 << 18

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._next = -1

    def id_of(self, digest: bytes) -> int:
        known = self._ids.get(digest)
        if known is not None:
            self._ids.move_to_end(digest)
            return known
        if self._next < -(2**31) + 1:
            raise OverflowError("2**31 different media were seen; start a new cache")
        new, self._next = self._next, self._next - 1
        self._ids[digest] = new
        self._digests[new] = digest
        if len(self._ids) > self.LIMIT:
            del self._digests[self._ids.popitem(last=False)[1]]
        return new

    def digest_of(self, media_id: int) -> bytes:
        """The digest behind an id. One that was forgotten gives a digest that matches nothing."""
        return self._digests.get(media_id) or b"forgotten media " + str(media_id).encode()

    def place(self, tokens: npt.NDArray[np.int32], media: Sequence[Media]) -> npt.NDArray[np.int32]:
        """`tokens` with every placeholder replaced by the id of its content."""
        if not media:
            return tokens
        placed = tokens.copy()
        end = 0
        for item in sorted(media, key=lambda m: m.start):
            if item.start < end or item.stop > len(tokens):
                raise ValueError(
                    f"media [{item.start}, {item.stop}) overlaps another or lies outside the {len(tokens)} tokens"
                )
            placed[item.start : item.stop] = self.id_of(item.digest)
            end = item.stop
        return placed
