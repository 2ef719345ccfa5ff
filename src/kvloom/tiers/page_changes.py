"""Changes of a tier's pages: the pages that the tier stored and removed. The engine makes block events from these
changes.

    tier (any thread) ── stored, removed ──▶ PageChanges ── take ──▶ engine: events with the tier's medium

A tier records changes only after `watch`. Tiers to which other processes also write, such as Redis, are not watched.
Such tiers do not report pages that other processes remove.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvloom.core import HASH_BYTES

from .tier import KEY_BYTES

__all__ = ["PageChange", "PageChanges", "SupportsChanges"]

_GROUP = slice(HASH_BYTES, HASH_BYTES + 4)


class PageChange(NamedTuple):
    """A page of the layer group `group` was stored or removed. `form` is the fingerprint of the page's form."""

    is_stored: bool
    block_hash: bytes
    group: int
    form: bytes


class PageChanges:
    """The changes of one tier since the last `take`, in order. Any thread may add changes, and one thread takes
    them."""

    def __init__(self) -> None:
        self._changes: deque[tuple[bytes, bytes | None]] = (
            deque()
        )  # key, and block hash of a stored page, or None for a removed page

    def stored(self, keys: Iterable[bytes], block_hashes: Sequence[bytes]) -> None:
        """Record stored pages. `block_hashes` has one block hash per key. If a block consists of several units of
        HASH_TOKENS tokens, its hash is a `core.BlockHash`, which also contains the hashes of the units."""
        self._changes.extend(zip(keys, block_hashes, strict=True))

    def removed(self, keys: Iterable[bytes]) -> None:
        """Record removed pages by their keys."""
        self._changes.extend((key, None) for key in keys)

    def take(self) -> list[PageChange]:
        """Return all changes and clear the list. Changes whose key is not KEY_BYTES long are left out, because such a
        key contains no block hash."""
        found = []
        for _ in range(len(self._changes)):
            key, block_hash = self._changes.popleft()
            if len(key) == KEY_BYTES:
                group = int.from_bytes(key[_GROUP], "little")
                name = key[:HASH_BYTES] if block_hash is None else block_hash
                found.append(PageChange(block_hash is not None, name, group, key[_GROUP.stop :]))
        return found


@runtime_checkable
class SupportsChanges(Protocol):
    """A tier that can record the changes of its pages."""

    def watch(self) -> PageChanges | None:
        """Record changes from now on, and return the list to which they are added. The pages that the tier already has
        are the first changes. Return None if the stored keys do not contain block hashes, for example because pages
        are encrypted."""
        ...
