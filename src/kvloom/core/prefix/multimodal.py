"""Images and other media: ids for their placeholder tokens, and media runs.

**Ids.** Each content digest gets a negative token id, which is valid only in this process. Block hashes use the digest
itself. Two other tokens also get a negative id: the first token to which an activated LoRA applies (`activation_mark`),
and the first token after a public prefix (`private_mark`).

**Media runs.** Layers on the media axis have one media run per image: the pages of that image. Cross attention reads
the run while the sequence is open. Embeddings are read until the image's tokens are computed. Both stay cached for
later prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.policies import Entry
from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.block_pages import replace_page
from kvloom.core.pool.page_pool import Ids, Index

__all__ = ["Media", "MediaIds", "MediaRun", "activation_mark", "private_mark", "public_length"]


@dataclass(frozen=True, slots=True)
class Media:
    """The placeholder tokens [start, stop) of a prompt, and the digest of their content. `tokens` is the number of
    tokens of the image in media layers (such as cross attention), or 0 if the model has no media layers.
    """

    start: int
    stop: int
    digest: bytes
    tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"media placeholder [{self.start}, {self.stop}) is empty or negative; give 0 <= start < stop"
            )
        if len(self.digest) < 16:
            raise ValueError(f"a media digest needs 16 bytes or more, got {len(self.digest)}")
        if self.tokens < 0:
            raise ValueError(f"media tokens {self.tokens} is negative")


def activation_mark(tokens: npt.NDArray[np.integer], invocation: Sequence[int], adapter: str) -> Media | None:
    """Return a mark for the token from which an activated LoRA applies: the first token of the last occurrence of
    `invocation`. Return None if the `invocation` tokens do not occur. `adapter` is the digest of the adapter.

    The mark is a `Media` of one token. Block hashes contain the digest of the mark instead of the token. Blocks
    before the mark have the hashes of the base model, and later blocks depend on the adapter."""
    wanted = np.array(invocation)
    if not 0 < len(wanted) <= len(tokens):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    found = np.flatnonzero((windows == wanted).all(1))
    if not len(found):
        return None
    content = f"{adapter} {wanted[0]}".encode()
    start = int(found[-1])
    return Media(start, start + 1, blake2b(content, digest_size=16, person=b"kvloom.alora").digest())


def public_length(tokens: int, length: int, block_tokens: int, media: Sequence[Media] = ()) -> int:
    """Return how many tokens of a prompt of `length` tokens are public, if the request marked the first
    `tokens` tokens. The result is a multiple of `block_tokens`. The last token of the prompt is never public.
    The first private token is neither in an image nor the first token to which an activated LoRA applies."""
    end = min(tokens, length - 1) // block_tokens * block_tokens
    for item in sorted(media, key=lambda m: m.start, reverse=True):
        if item.start <= end < item.stop:
            end = (item.start - 1) // block_tokens * block_tokens
    return max(0, end)


def private_mark(start: int, token: int, root: bytes) -> Media:
    """Return a mark of the first private token of a prompt, which follows the public prefix at `start`. `token` is the
    id of this token, and `root` the root hash of the tenant.

    Block hashes contain the mark instead of the token. Blocks before the mark have public hashes, and later blocks
    depend on the tenant."""
    content = root + str(token).encode()
    return Media(start, start + 1, blake2b(content, digest_size=16, person=b"kvloom.private").digest())


class MediaRun(Entry):
    """The cached pages of one image in the media groups. `users` is the number of sequences and pins that retain the
    pages."""

    __slots__ = ("_bytes", "_tokens", "account", "key", "rows", "users")

    def __init__(
        self, serial: int, now: float, key: bytes, account: Account, rows: Ids, tokens: int, size: int
    ):
        super().__init__(serial, now)
        self.key = key
        self.account = account
        self.rows = rows
        self.users = 0
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

    def replace_page(self, columns: Index, page: int, target: int, block_tokens: int) -> None:
        """Replace the page id `page` by `target` in the page ids of the image."""
        replace_page(self.rows, columns, page, target)


class MediaIds:
    """Maps digests to negative token ids and back. The number of digests is limited, and old digests are dropped. A
    dropped digest gets a new id when it is used again. Prompts then miss the pages that were cached under the old
    id."""

    LIMIT = 1 << 18

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._next = -1

    @property
    def used(self) -> bool:
        """Whether any digest has got an id. If not, no cached token is negative."""
        return self._next < -1

    def id_of(self, digest: bytes) -> int:
        """Return the id of a digest. A digest without an id gets a new id."""
        known = self._ids.get(digest)
        if known is not None:
            self._ids.move_to_end(digest)
            return known
        if self._next < -(2**31) + 1:
            raise OverflowError("all 2**31 media ids are used; create a new cache")
        new, self._next = self._next, self._next - 1
        self._ids[digest] = new
        self._digests[new] = digest
        if len(self._ids) > self.LIMIT:
            del self._digests[self._ids.popitem(last=False)[1]]
        return new

    def digest_of(self, media_id: int) -> bytes:
        """Return the digest of an id. For a dropped id, return a digest that matches no image."""
        return self._digests.get(media_id) or b"forgotten media " + str(media_id).encode()

    def place(self, tokens: npt.NDArray[np.int32], media: Sequence[Media]) -> npt.NDArray[np.int32]:
        """Return `tokens` with every placeholder replaced by the id of its content."""
        if not media:
            return tokens
        placed = tokens.copy()
        end = 0
        for item in sorted(media, key=lambda m: m.start):
            if item.start < end or item.stop > len(tokens):
                raise ValueError(
                    f"media [{item.start}, {item.stop}) overlaps another image or is outside the {len(tokens)} tokens"
                )
            placed[item.start : item.stop] = self.id_of(item.digest)
            end = item.stop
        return placed
