"""Lists the pages in the directory of a disk tier, for operators. A server may use the directory at the same time.
Only `drop` needs the directory's lock, so `drop` fails while a server uses the directory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvloom.tiers.aligned_memory import aligned_bytes
from kvloom.tiers.shares import SHARED_OWNER, tenant_owner
from kvloom.tiers.stored_page import StoredPage, StoredPages, verify_page
from kvloom.tiers.tier import TierError
from kvloom.tiers.transfer import Outcome
from kvloom.tiers.ttl import expiry_cutoff

from .disk_tier import DiskConfig, DiskTier
from .files import SystemFiles
from .recovery import recover, replaces
from .segment import SEGMENT_VERSION, Record, Segment
from .tombstones import Tombstones

__all__ = ["DiskPages"]


class _UnchangedFiles(SystemFiles):
    """The files of a directory that a server may own. `remove` has no effect, because only the server may remove
    its files. The server may remove a file at any time, so a missing file has size 0."""

    def remove(self, name: str) -> None:
        return

    def size_of(self, name: str) -> int:
        try:
            return super().size_of(name)
        except FileNotFoundError:
            return 0


class DiskPages(StoredPages):
    """The pages of one disk tier. The constructor reads the headers of all pages. It raises TierError if the
    directory cannot be read."""

    def __init__(self, config: DiskConfig) -> None:
        self._config, self._notes = config, dict[str, None]()
        try:
            self._directory = os.open(config.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(f"{config.directory} cannot be read: {error.strerror}") from error
        self._files = _UnchangedFiles(self._directory)
        self._segments: dict[int, Segment] = {}
        self._records: dict[bytes, Record] = {}
        try:
            dead = Tombstones(self._files).read() if "dropped" in self._files.list_names() else {}
            found = recover(self._files, False, dead, self._segments, self._notes)
        except OSError as error:
            self.close()
            raise TierError(f"{config.directory} cannot be read: {error.strerror}") from error
        for record in found.records:
            if replaces(self._files, record, self._records.get(record.head.key)):
                self._records[record.head.key] = record

    @property
    def version(self) -> str:
        return str(SEGMENT_VERSION)

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def pages(self, max_heads: int | None = None) -> Iterator[StoredPage]:
        now, cutoff = time.time(), expiry_cutoff(self._config.ttl)
        ages = {number: now - os.fstat(segment.fd).st_mtime for number, segment in self._segments.items()}
        for key, record in self._records.items():
            owner = record.segment.owner
            tenant = b"" if owner == SHARED_OWNER else owner
            idle, is_expired = max(0.0, ages[record.segment.number]), record.head.stored_at < cutoff
            yield StoredPage(key, record.span, record.head, tenant, idle, is_expired)

    def verify(self, page: StoredPage) -> Outcome:
        record = self._records[page.key]
        body = aligned_bytes(record.span)
        try:
            got = self._files.read(record.segment.fd, [body], record.offset)
        except OSError:
            return Outcome.FAILED
        outcome = verify_page(record.head, body[:got])
        if outcome != Outcome.OK and not record.is_verified:
            return (
                Outcome.MISSING
            )  # the process that wrote this page ended during the write, or is still writing
        return outcome

    def owner_of(self, tenant: str) -> bytes:
        return tenant_owner(tenant)

    def drop(self, pages: Iterable[StoredPage]) -> int:
        """Remove pages. Also removes files that have no pages left. Return the number of removed pages."""
        config = replace(
            self._config, ttl=0
        )  # with a TTL, opening the tier would remove expired pages without counting them
        tier = DiskTier(config)
        try:
            dropped = tier.drop_stored([page.key for page in pages])
        finally:
            tier.close()
        tier = DiskTier(config)
        try:
            tier.remove_empty_files()
        finally:
            tier.close()
        return dropped

    def close(self) -> None:
        for segment in self._segments.values():
            with contextlib.suppress(OSError):
                os.close(segment.fd)
        self._segments.clear()
        os.close(self._directory)
