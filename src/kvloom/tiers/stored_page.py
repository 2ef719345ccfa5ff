"""The interface through which operators list, verify and drop the pages of a tier. Callers do not need the block
hashes of the pages.

`disk/disk_pages.py` and `remote/redis_pages.py` implement this interface. `tiers_command.py` is the command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .encoding import Head, make_codec, run_checksums, unseal
from .transfer import Outcome

__all__ = ["StoredPage", "StoredPages", "verify_page"]

_METHODS = ("none", "lz4", "zstd")
_PROTECTS = {0: "none", 1: "encrypt", 2: "encrypt", 3: "authenticate"}


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One stored page. `head` is None if the header was not read. `tenant` is a digest of the tenant's name, or empty
    if the tenant has no share.

    `idle_seconds` is the time since the last use of the page (Redis), or since its file was written (disk).
    `is_expired` is set if the page's age exceeds the TTL in the tier's URL.
    """

    key: bytes
    stored_bytes: int
    head: Head | None = None
    tenant: bytes = b""
    idle_seconds: float = 0.0
    is_expired: bool = False

    @property
    def format(self) -> str:
        """The format of the page in words: group, form, page size, compression and protection. For a page that is
        sealed with a tenant's key, group and form are unknown and left out."""
        if self.head is None:
            return "not read"
        size = self.head.runs * self.head.run_bytes
        protect = _PROTECTS.get(self.head.cipher, "unknown")
        group = f"group {int.from_bytes(self.key[16:20], 'little')} form {self.key[20:24].hex()}"
        parts = [group if not self.head.cipher else "sealed", f"{size} bytes in {self.head.runs} runs"]
        parts += [f"compression {_METHODS[self.head.method]}"] if self.head.method else []
        return ", ".join(parts + ([f"protect {protect}"] if self.head.cipher else []))


class StoredPages(Protocol):
    """The pages of one tier, for operators. Only `drop` changes the tier."""

    @property
    def version(self) -> str: ...

    @property
    def capacity(self) -> int: ...

    @property
    def notes(self) -> list[str]:
        """Messages for the operator."""
        ...

    def pages(self, max_heads: int | None = None) -> Iterator[StoredPage]:
        """Yield every page. Reads the headers of at most `max_heads` pages, or of all pages if None."""
        ...

    def verify(self, page: StoredPage) -> Outcome:
        """Read a page and compare its checksums. Return MISSING if the page was removed or is not complete."""
        ...

    def owner_of(self, tenant: str) -> bytes:
        """Return the digest in `StoredPage.tenant` for pages of this tenant. Raises ValueError if the tier does
        not separate tenants.
        """
        ...

    def drop(self, pages: Iterable[StoredPage]) -> int:
        """Remove pages. Return the number removed. Raises TierError if another process has locked the tier."""
        ...

    def close(self) -> None: ...


def verify_page(head: Head, body: memoryview) -> Outcome:
    """Compare the body of a stored page with the checksums in the page's header `head`. Needs no tenant's key, because
    the checksums of sealed pages cover the stored bytes."""
    if len(body) < head.body_bytes:
        return Outcome.SHORT
    if not head.cipher:
        into = memoryview(bytearray(head.runs * head.run_bytes))
        return unseal(head, body, 0, into, make_codec())
    assert head.stored_lengths is not None
    at, sums = 0, b""
    for length in head.stored_lengths:
        sums += run_checksums(body[at : at + length], length)
        at += length
    return Outcome.OK if sums == head.checksums else Outcome.CORRUPT
