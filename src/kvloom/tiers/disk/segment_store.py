"""The segments of a disk tier and their index: positions of pages, recovery after a crash, eviction.

One thread appends frames, starts segments and evicts. Any thread may look up pages. When a segment is created, the
store also evicts until the next segment fits. The files therefore never exceed the capacity. A tenant with a share
has its own segments. This module does not depend on transfers.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvloom.core import HASH_BYTES
from kvloom.tiers.aligned_memory import BLOCK, aligned_bytes
from kvloom.tiers.page_changes import PageChanges
from kvloom.tiers.shares import Shares
from kvloom.tiers.ttl import expiry_cutoff

from .files import Files
from .recovery import recover, replaces
from .segment import MAX_SEGMENT_NUMBER, Frame, Record, Segment
from .segment_owners import SegmentOwner, SegmentOwners
from .tombstones import DroppedRecords, Tombstones

__all__ = ["SegmentStore", "SegmentStoreConfig"]

_MAX_NAME_TRIES = 1024  # number of file names tried for a new segment


@dataclass(frozen=True, slots=True)
class SegmentStoreConfig:
    """Settings of the store. A segment is a file with pages.

    - `evict`: which segment is evicted first: the oldest, or the least recently used.
    - `copy_forward`: before a segment is evicted, those of its pages that have been read are copied to another segment.
      The copies fill at most half a segment.
    - `ttl`: the number of seconds after which a page expires. 0 means never.
    - `sync`: a segment is synced before it is sealed, so that its pages are complete even after power loss.
    """

    capacity: int
    segment_bytes: int
    direct: bool = True
    evict: Literal["oldest", "least-used"] = "least-used"
    copy_forward: bool = True
    ttl: float = 0
    sync: bool = True


class SegmentStore:
    """All segments (files with pages) and the index of a disk tier. `lock` guards the index, and the readers and keys
    of each segment. The constructor reads the headers of all pages."""

    def __init__(self, files: Files, config: SegmentStoreConfig) -> None:
        self._files, self._config = files, config
        self.lock = threading.Lock()
        self.index: dict[bytes, Record] = {}
        self.evicted = 0
        self.changes: PageChanges | None = None
        """Records stored and removed pages, if the tier is watched."""
        self.notes: dict[str, None] = {}  # messages for the operator, each logged once
        self._segments: dict[int, Segment] = {}
        self._owners = SegmentOwners(self._segments, config.capacity, config.segment_bytes)
        self._foreign: dict[int, int] = {}  # files of other versions are never read, and evicted first
        self._tombstones = Tombstones(files)
        self._dirty: set[Segment] = set()
        self._sync_error: OSError | None = (
            None  # the error of a sync during copy-forward; the next `sync` raises it
        )
        # A segment was evicted because the disk was full, and no segment was created since.
        self._evicted_for_space = False
        self._clock = 0
        self._next_number = 0
        try:
            self._recover()
        except BaseException:
            self._close_files()
            raise

    # --- any thread

    @property
    def segment_bytes(self) -> int:
        return self._config.segment_bytes

    @property
    def file_bytes(self) -> int:
        """Number of bytes of all segment files."""
        return sum(segment.size for segment in self._segments.values()) + sum(self._foreign.values())

    @property
    def sweep_seconds(self) -> float | None:
        """Number of seconds between two calls of `remove_expired`, or None if pages never expire."""
        return min(60.0, max(1.0, self._config.ttl / 4)) if self._config.ttl else None

    def getter(self) -> Callable[[bytes], Record | None]:
        """Return a function that maps a key to its record, or to None if the page is missing or expired. The
        caller holds the lock."""
        get, cutoff = self.index.get, expiry_cutoff(self._config.ttl)
        if not cutoff:
            return get

        def get_unexpired(key: bytes) -> Record | None:
            record = get(key)
            return None if record is None or record.head.stored_at < cutoff else record

        return get_unexpired

    def segment_bytes_for(self, tenant: str) -> int:
        """Return the size of a segment file for a tenant's pages, in bytes."""
        return self._owners.of_tenant(tenant).segment_bytes

    def used_by(self, tenant: str) -> int:
        """Return the size of the files that contain a tenant's pages. For a tenant without a share, these are the
        shared files."""
        with self.lock:
            return self._owners.used_bytes(self._owners.of_tenant(tenant))

    def begin_reads(self, records: Sequence[Record]) -> None:
        """Count one reader for each record. The caller holds the lock, and later calls `release_readers`."""
        self._clock += 1
        for record in records:
            record.reads += 1
        for segment, readers in Counter([record.segment for record in records]).items():
            segment.last_used = self._clock
            segment.readers += readers

    def release_readers(self, segment: Segment, readers: int) -> None:
        with self.lock:
            segment.readers -= readers
            fd = segment.take_closable_fd()
        if fd >= 0:
            self._files.close(fd)

    def remove(self, key: bytes, record: Record) -> None:
        """Remove `record` from the index, if the index still maps `key` to this record."""
        with self.lock:
            if self.index.get(key) is record:
                del self.index[key]
                self._record_removed([key])
                record.segment.keys.discard(key)

    def remove_keys(self, keys: Iterable[bytes]) -> list[tuple[bytes, int, int]]:
        """Remove keys from the index. Return (key, segment, offset) of each removed record, for
        `write_tombstones`."""
        dropped = []
        with self.lock:
            for key in keys:
                record = self.index.pop(key, None)
                if record is not None:
                    record.segment.keys.discard(key)
                    dropped.append((key, record.segment.number, record.offset))
            self._record_removed([key for key, _, _ in dropped])
        return dropped

    def watch(self) -> PageChanges:
        """Record changes of pages from now on. The first changes are the pages that are already in the index."""
        with self.lock:
            self.changes = PageChanges()
            self.changes.stored(self.index, [key[:HASH_BYTES] for key in self.index])
            return self.changes

    def _record_removed(self, keys: Iterable[bytes]) -> None:
        if self.changes is not None:
            self.changes.removed(keys)

    def publish(self, records: Iterable[Record]) -> None:
        """Add records to the index, unless their segment has been evicted."""
        with self.lock:
            for record in records:
                if record.segment.removed:
                    self.evicted += 1
                    continue
                key = record.head.key
                before = self.index.get(key)
                if before is not None:
                    before.segment.keys.discard(key)
                    record.reads += before.reads
                self.index[key] = record
                record.segment.keys.add(key)
                if self.changes is not None and before is None:
                    self.changes.stored([key], [key[:HASH_BYTES]])

    # --- the appending thread

    def set_shares(self, shares: Shares) -> None:
        """Give every tenant with a share its own segments. Segments that the tenant already has on disk are used
        again. Call this method before the first frame."""
        self._owners.set_shares(shares)
        for owner in self._owners:
            if owner.current is None:
                self._reopen_last(owner)
            self._free_space(owner, copy_forward=False)

    def append(self, frame: Frame, tenant: str = "") -> None:
        """Write a frame to the current segment for pages of this tenant, and start a new segment if needed. Lookups
        find the frame's records only after `publish`. If OSError is raised, nothing was stored."""
        need = frame.span
        if need > self._config.segment_bytes - 2 * BLOCK:
            raise OSError(
                errno.EFBIG,
                f"a frame of {need} bytes does not fit a segment of {self._config.segment_bytes} bytes",
            )
        owner = self._owners.of_tenant(tenant)
        current = owner.current
        if current is None or not current.fits(frame) or self._is_old(current):
            self._grow_segments(owner, need + 2 * BLOCK)
            self._start_segment(owner)
        segment = owner.current
        if segment is None:
            raise OSError(errno.EIO, "the new segment failed while pages were copied forward to it")
        self._append(owner, segment, frame)

    def _append(self, owner: SegmentOwner, segment: Segment, frame: Frame) -> None:
        try:
            segment.append(frame)
        except OSError:
            owner.current = None
            with contextlib.suppress(OSError):
                self._seal(segment)  # the failed write left no valid frame
            raise
        self._dirty.add(segment)

    def sync(self) -> None:
        """Sync all appended frames, so that they survive power loss. If OSError is raised, frames since the last
        sync may be lost.
        """
        error, self._sync_error = self._sync_error or self._sync(), None
        if error is not None:
            raise error

    def _sync(self) -> OSError | None:
        dirty, self._dirty = self._dirty, set()
        try:
            for segment in dirty:
                segment.sync()
        except OSError as error:
            for segment in dirty:
                segment.is_complete = False
            for owner in self._owners:
                if owner.current in dirty:
                    owner.current = None
            return error
        return None

    def _seal(self, segment: Segment) -> None:
        """Seal a segment. If pages must survive power loss, syncs the segment's frames first. If the sync fails, the
        segment is still sealed, and the next call of `sync` raises the error."""
        if self._config.sync and segment in self._dirty:
            self._sync_error = self._sync_error or self._sync()
        segment.seal()

    def write_tombstones(self, dropped: DroppedRecords) -> None:
        """Record dropped objects on disk. Otherwise the tier would find them again when it is next opened."""
        self._tombstones.add(dropped)

    def remove_expired(self) -> None:
        """Remove segments whose pages have all expired. Does nothing without a TTL."""
        cutoff = expiry_cutoff(self._config.ttl)
        for segment in [one for one in self._segments.values() if 0 < one.newest < cutoff]:
            owner = self._owners.owner_of(segment)
            if owner.current is segment:
                owner.current = None
            self._drop_segment(segment)

    def _is_old(self, segment: Segment) -> bool:
        """Return whether a segment has an expired page. Such a segment gets no new pages, so that its file can be
        removed when all its pages have expired."""
        return 0 < segment.oldest < expiry_cutoff(self._config.ttl)

    def remove_empty(self) -> None:
        """Remove the files of all segments without pages. This includes current segments."""
        for segment in [one for one in self._segments.values() if not one.keys]:
            owner = self._owners.owner_of(segment)
            if owner.current is segment:
                owner.current = None
            with self.lock:
                segment.removed = True
                del self._segments[segment.number]
            self._dirty.discard(segment)
            self._remove(segment)

    def close(self) -> None:
        """Seal all segments and close their files."""
        with self.lock:
            self.index.clear()
        for segment in self._segments.values():
            try:
                self._seal(segment)
            except OSError as error:
                self.notes[f"a segment could not be truncated to its length: {error.strerror}"] = None
        self._close_files()

    def _close_files(self) -> None:
        for segment in self._segments.values():
            segment.removed = True  # the last reader in this process closes the file
            self.release_readers(segment, 0)

    # --- freeing space

    def _grow_segments(self, owner: SegmentOwner, need: int) -> None:
        """Make the new segment files of an owner at least `need` bytes large. Raises OSError if three segments of
        `need` bytes do not fit into the owner's share."""
        if need > owner.segment_bytes:
            owner.check_limit(need)
            owner.segment_bytes = need
            self._free_space(owner, copy_forward=False)

    def _start_segment(self, owner: SegmentOwner) -> None:
        """Create a segment file that becomes the current segment. Then evict, so that one more segment fits."""
        owner.check_limit(owner.segment_bytes)
        before, owner.current = owner.current, None
        if before is not None:
            before.last_used = max(before.last_used, self._clock)  # a write counts as use
            self._seal(before)
        try:
            segment = self._create(owner)
        except OSError as error:
            # Another program filled the disk. Evict one segment to free space for the new segment, but not all segments.
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or self._evicted_for_space or not self._evict_segment(owner, copy_forward=False):
                raise
            self._evicted_for_space = True
            segment = self._create(owner)
        self._evicted_for_space = False
        if segment.direct != self._config.direct:
            self.notes["the file system does not support O_DIRECT: reads and writes use the page cache"] = (
                None
            )
        with self.lock:
            self._segments[segment.number] = segment
        owner.current = segment
        self._free_space(owner, self._config.copy_forward)

    def _free_space(self, owner: SegmentOwner, copy_forward: bool) -> None:
        """Remove expired segments. Then evict segments until one more segment fits into the capacity, and into the
        limit of the owner's share."""
        self.remove_expired()
        limit = self._config.capacity - self._config.segment_bytes
        while self.file_bytes > limit and self._evict_segment(owner, copy_forward):
            pass
        limit = owner.limit - owner.segment_bytes
        while self._owners.used_bytes(owner) > limit and self._evict_segment(owner, copy_forward, own=True):
            pass

    def _create(self, owner: SegmentOwner) -> Segment:
        for tries in range(_MAX_NAME_TRIES):
            number, self._next_number = self._next_number, self._next_number + 1
            try:
                segment = Segment.create(
                    self._files, number, owner.segment_bytes, self._config.direct, owner.name
                )
                break
            except FileExistsError:  # a file of another user, which recovery ignored
                if tries == _MAX_NAME_TRIES - 1:
                    raise
        try:
            self._files.sync_directory()
        except OSError:
            with contextlib.suppress(OSError):
                self._remove(segment)
            raise
        return segment

    def _evict_segment(self, owner: SegmentOwner, copy_forward: bool, own: bool = False) -> bool:
        """Evict one segment so that `owner` gets space. With `own`, only a segment of `owner` is evicted. Without
        `own`, an unreadable file or a file of another version is removed first, if there is one. Otherwise
        `SegmentOwners.victim` chooses the segment. With `copy_forward`, pages of the segment that have been read are
        copied first. Return False if nothing can be evicted."""
        if self._foreign and not own:
            number = min(self._foreign)
            with self.lock:
                del self._foreign[number]
            self._files.remove(Segment.file_name(number))
            return True
        victim = self._owners.victim(owner, own, self._config.evict == "oldest")
        if victim is None:
            return False
        victim_owner = self._owners.owner_of(victim)
        if victim is victim_owner.current:
            victim_owner.current = None
        elif copy_forward:
            self._copy_forward(victim, victim_owner)
        self._drop_segment(victim)
        return True

    def _drop_segment(self, victim: Segment) -> None:
        """Remove a segment with its pages."""
        with self.lock:
            self._record_removed(victim.keys)
            for key in victim.keys:
                del self.index[key]
            self.evicted += len(victim.keys)
            victim.keys.clear()
            victim.removed = True
            del self._segments[victim.number]
        self._dirty.discard(victim)
        self._remove(victim)

    def _remove(self, segment: Segment) -> None:
        """Remove the file of a segment without index entries."""
        try:
            segment.remove()
        finally:
            segment.removed = True
            self.release_readers(segment, 0)

    def _copy_forward(self, victim: Segment, victim_owner: SegmentOwner) -> None:
        """Copy pages of the segment `victim` to the current segment of their owner, before `victim` is evicted.
        Only pages that have been read are copied, the most read pages first. The copies fill at most half a
        segment."""
        with self.lock:
            get = self.getter()
            used = [record for key in victim.keys if (record := get(key)) is not None and record.reads]
        used.sort(key=lambda record: -record.reads)
        remaining = victim_owner.segment_bytes // 2
        moved: list[tuple[Record, Record]] = []
        try:
            for record in used:
                remaining -= record.span
                current = victim_owner.current
                frame = Frame([record.head], [aligned_bytes(record.span)], record.span)
                if remaining < 0 or current is None or not current.fits(frame):
                    break
                if self._files.read(victim.fd, frame.bodies, record.offset) == record.span:
                    self._append(victim_owner, current, frame)
                    moved += zip([record], frame.records(), strict=True)
            self._sync_error = (
                self._sync()
            )  # the copies must be on disk before the file with the originals is removed
            if self._sync_error is not None:
                raise self._sync_error
            self._publish_copies(moved)
        except OSError as error:
            self.notes[f"pages could not be copied forward: {error.strerror}"] = None

    def _publish_copies(self, moved: Sequence[tuple[Record, Record]]) -> None:
        """Update the index to the new copies. `moved` contains (old record, new record) pairs. An object that was
        dropped during the copy stays dropped."""
        dropped = []
        with self.lock:
            for before, now in moved:
                key, found = now.head.key, self.index.get(now.head.key)
                if found is before:
                    before.segment.keys.discard(key)
                    now.is_verified = before.is_verified
                    self.index[key] = (
                        # The new record has no reads, so the page is copied again only if it is read again.
                        now
                    )
                    now.segment.keys.add(key)
                elif found is None:
                    dropped.append((key, now.segment.number, now.offset))
        if dropped:
            self._tombstones.add(dropped)

    # --- opening

    def _recover(self) -> None:
        dead = {
            key: position
            for key, position in self._tombstones.read().items()
            if position[0] < MAX_SEGMENT_NUMBER
        }
        found = recover(self._files, self._config.direct, dead, self._segments, self.notes)
        self._foreign = found.foreign
        # A segment number is never reused, not even the number in a tombstone, because new records there would count as dropped.
        self._next_number = self._clock = 1 + max(
            [-1, *found.numbers, *(number for number, _ in dead.values())]
        )
        for record in found.records:
            if replaces(self._files, record, self.index.get(record.head.key)):
                self.publish([record])
        shared = self._owners.shared
        self._reopen_last(shared)
        for number, segment in list(self._segments.items()):
            if segment is shared.current:
                continue
            if not segment.keys and number not in found.unread:
                del self._segments[number]
                self._remove(segment)
            else:
                segment.seal()
        alive = {key: position for key, position in dead.items() if key in found.still_stored}
        if len(alive) < len(dead) and not found.unread and not self._foreign:
            self._tombstones.rewrite(alive)
        self._free_space(shared, copy_forward=False)

    def _reopen_last(self, owner: SegmentOwner) -> None:
        """Make the newest segment of an owner its current segment again, if at least half of the segment is free.

        A segment with pages of an earlier release is not used. These pages contain no write time, so their age counts
        from the last write of the file. A new write to the file would make these pages younger.
        """
        last = self._owners.newest_segment(owner)
        if last is None or last.end >= owner.segment_bytes // 2 or last.has_undated or self._is_old(last):
            return
        try:
            last.reopen(owner.segment_bytes)
        except OSError:
            last.seal()  # the disk is full, but the segment can still be read
        else:
            owner.current = last
