"""The disk tier stores pages in segment files of one directory. Pages stay available after a restart or a
crash.

    write -> sealing thread (checksums, compression) -> appending thread (one write per frame, one sync
             for several queued frames) -> publishing thread (index) -> OK
    read  -> reading threads, directly into aligned memory of the caller; a read is verified while
             other reads run

To seal a page is to compute its header and its stored bytes. A frame contains several sealed pages.
`segment.py` defines the file format. `segment_store.py` has the index and eviction. `segment_writer.py` and
`segment_reader.py` run the transfers.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloom.core import format_bytes, parse_size
from kvloom.tiers.aligned_memory import BLOCK, aligned
from kvloom.tiers.encoding import (
    LEGACY_CIPHER,
    Compression,
    NoKeyError,
    Protect,
    check_protect,
    make_codec,
    max_sealed_bytes,
    read_keys,
)
from kvloom.tiers.options import Options
from kvloom.tiers.page_changes import PageChanges
from kvloom.tiers.shares import Shares
from kvloom.tiers.tier import Objects, Ranges, Tier, TierError, part_range
from kvloom.tiers.transfer import (
    Outcome,
    TierStats,
    Transfer,
    TransferCounts,
    describe_outcome,
    failed_transfer,
)
from kvloom.tiers.ttl import check_ttl

from .files import Files, SystemFiles, lock_directory
from .segment_reader import SegmentReader
from .segment_store import SegmentStore, SegmentStoreConfig
from .segment_writer import SegmentWriter

__all__ = ["DiskConfig", "DiskTier", "disk_config", "parse_url"]

log = logging.getLogger("kvloom.tiers")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Settings of a disk tier.

    - `durable`: with "power", a stored page survives power loss, and queued pages share one sync. With
      "process", a stored page survives only the end or crash of the process.
    - `keys`: a file with the encryption keys of tenants (encryption.py). A tenant's key encrypts or authenticates its
      pages, as `protect` selects. The keys under which pages are stored are also derived from the tenant's key.
    - `segment_bytes`: the size of a segment. The default (None) is 1/64 of the capacity. Small tiers have
      larger segments: 64 MiB, or a quarter of the capacity if that is less.
    - `pending_bytes`: the largest number of bytes in queued and running reads. Writes have a separate limit of
      the same size. Objects beyond the limit get the outcome BUSY.
    - `evict`: which segment is evicted first: the oldest, or the least recently used.
    - `copy_forward`: when a segment is evicted, those of its pages that were read are first copied to another
      segment.
    - `direct`: whether files are opened with O_DIRECT, if the file system supports it.
    - `readers`: the number of reading threads.
    - `close_seconds`: how long `close` waits for the writing threads. If they end in time, `close` waits as
      long again for the reading threads.
    - `ttl`: the number of seconds after which a page is a miss. 0 means never.
    """

    directory: Path | str
    capacity: int
    segment_bytes: int | None = None
    durable: Literal["power", "process"] = "power"
    compression: Compression = "none"
    keys: Path | str | None = None  # key file of the tenants (encryption.py)
    protect: Protect | None = None  # the default with keys is "encrypt"
    evict: Literal["oldest", "least-used"] = "least-used"
    copy_forward: bool = True
    direct: bool = True
    readers: int = 16
    pending_bytes: int = 1 << 30
    close_seconds: float = 10.0
    ttl: float = 0

    def __post_init__(self) -> None:
        for field, allowed in (
            ("durable", ("power", "process")),
            ("evict", ("oldest", "least-used")),
            ("compression", get_args(Compression)),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r} is none of {', '.join(allowed)}")
        check_protect(self.keys, self.protect)
        check_ttl(self.ttl)
        if self.readers < 1 or self.pending_bytes < 1:
            raise ValueError(
                f"readers={self.readers} and pending_bytes={self.pending_bytes} must be positive"
            )
        if self.effective_segment_bytes < 3 * BLOCK or self.capacity < 3 * self.effective_segment_bytes:
            raise ValueError(
                f"capacity={self.capacity} bytes does not fit three segments of {max(self.effective_segment_bytes, 3 * BLOCK)}: one to "
                "write, the next, one to read. Use a larger capacity"
                + (", or smaller segment_bytes" if self.segment_bytes else "")
            )

    @property
    def effective_segment_bytes(self) -> int:
        """Size of a segment in bytes, rounded down to whole disk blocks. This is `segment_bytes`, or its default."""
        chosen = self.segment_bytes or max(self.capacity // 64, min(64 << 20, self.capacity // 4))
        return chosen // BLOCK * BLOCK


class DiskTier(Tier):
    """A tier in one directory. Thread-safe. Opening the tier locks the directory and reads the headers of all stored
    pages.

    Raises TierError if the directory has wrong permissions or another process uses it. After opening, faults such
    as a full disk or a damaged file are outcomes of a transfer and never raise.
    """

    def __init__(self, config: DiskConfig, files: Callable[[int], Files] = SystemFiles) -> None:
        self._config = config
        self._keys = read_keys(config.keys, config.protect)
        self._make_codec = partial(make_codec, config.compression, self._keys)
        self._make_codec()  # raises now if a package is missing
        self._path = Path(config.directory)
        self._directory, self._lock_file = lock_directory(self._path)
        try:
            self._files = files(self._directory)
            self._store = SegmentStore(
                self._files,
                SegmentStoreConfig(
                    config.capacity,
                    config.effective_segment_bytes,
                    config.direct,
                    config.evict,
                    config.copy_forward,
                    config.ttl,
                    config.durable == "power",
                ),
            )
        except BaseException as error:
            self._unlock()
            if not isinstance(error, OSError):
                raise
            raise TierError(f"the disk tier cannot read {self._path}: {error.strerror or error}") from error
        self._warn_if_disk_is_small()
        self._transfer_counts = TransferCounts()
        self._tenants: tuple[str, ...] = ()
        self._closed = False
        self._state_lock = threading.Lock()
        self._open_transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._writer = SegmentWriter(self._store, self._make_codec(), config.durable == "power")
        self._reader = SegmentReader(self.name, self._files, self._store, self._make_codec, config.readers)

    def _warn_if_disk_is_small(self) -> None:
        """Log a warning if the disk is smaller than the capacity, because the disk may then become full."""
        disk = os.fstatvfs(self._directory)
        space = disk.f_bavail * disk.f_frsize + self._store.file_bytes
        if space < self._config.capacity:
            log.warning(
                "tier %s has a capacity of %s, but its file system has space for %s only",
                self.name,
                format_bytes(self._config.capacity),
                format_bytes(space),
            )

    @property
    def folder(self) -> Path:
        """The folder of the tier."""
        return self._path

    @property
    def name(self) -> str:
        return f"disk:{self._path}"

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def set_shares(self, shares: Shares) -> None:
        """Set the shares of tenants to enforce, and remove files of tenants that exceed their share. Raises
        TierError if a file cannot be removed."""
        self._tenants = tuple(shares)
        try:
            self._store.set_shares(shares)
        except OSError as error:
            raise TierError(
                f"the disk tier cannot free space in {self._path}: {error.strerror or error}"
            ) from error

    def used_by(self, tenant: str) -> int:
        return self._store.used_by(tenant)

    def watch(self) -> PageChanges | None:
        """Record changes (see `SupportsChanges`). Return None if the tier has a key file, because its stored keys do
        not contain the block hashes."""
        return self._store.watch() if self._keys is None else None

    def _with_stored_keys(self, objects: Objects, legacy: bool = False) -> Objects:
        """Return the objects with their stored keys, under which the disk stores them. Without a key file, the stored
        keys are `Objects.keys`. With a key file, they are derived from `Objects.keys` and the tenant's encryption
        key. Raises NoKeyError if the tenant has no encryption key.

        Earlier releases stored encrypted pages (format version 2) under `Objects.keys`. With `legacy`, the key of
        an object is not changed if the disk has the object only in this old format.
        """
        if self._keys is None:
            return objects
        stored = self._keys.with_stored_keys(objects)
        if legacy:
            index = self._store.index
            for at, (plain, key) in enumerate(zip(objects.keys, stored.keys, strict=True)):
                record = index.get(plain)
                if record is not None and record.head.cipher == LEGACY_CIPHER and key not in index:
                    stored.keys[at] = plain
        return stored

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        try:
            objects = self._with_stored_keys(objects, legacy=True)
        except NoKeyError:
            return np.zeros(len(objects), np.bool_)
        with self._store.lock:
            get = self._store.getter()
            return np.array([get(key) is not None for key in objects.keys], np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        if self.closed:
            return failed_transfer(
                len(objects), self._transfer_counts, "read", Outcome.FAILED, "the disk tier is closed"
            )
        try:
            objects = self._with_stored_keys(objects, legacy=True)
        except NoKeyError as error:
            return failed_transfer(
                len(objects), self._transfer_counts, "read", Outcome.LOCKED, f"{self.name}: {error}"
            )
        transfer = Transfer(len(objects), self._transfer_counts, "read", stop - start)
        with self._state_lock:
            self._open_transfers.add(transfer)
        missing, wrong, plain, busy, found = [], [], [], [], []
        store, size = self._store, stop - start
        checks, run_bytes = 8 * objects.form.runs, objects.form.run_bytes
        space = max(0, self._config.pending_bytes - self._reader.pending)
        with store.lock:
            get = store.getter()
            for index, key in enumerate(objects.keys):
                record = get(key)
                if record is None:
                    missing.append(index)
                elif record.head.run_bytes != run_bytes or len(record.head.checksums) != checks:
                    wrong.append(index)
                elif self._keys is not None and not record.head.cipher:
                    plain.append((index, record))
                elif space > 0:
                    space -= size
                    found.append((index, record))
                else:
                    busy.append(index)
            store.begin_reads([record for _, record in found])
        transfer.settle(missing, Outcome.MISSING)
        transfer.settle(
            wrong, Outcome.LAYOUT, "the stored page has another form (byte layout) than the requested one"
        )
        for index, record in plain:
            store.remove(record.head.key, record)
            transfer.settle(index, Outcome.UNTRUSTED, f"{self.name}: {describe_outcome(Outcome.UNTRUSTED)}")
        transfer.settle(busy, Outcome.BUSY, "too many reads are in flight")
        with self._state_lock:  # `close` waits for jobs that were submitted under this lock
            if not (closed := self._closed):
                self._reader.submit(transfer, found, into, (start, stop), objects.tenant)
        if closed:
            for _, record in found:
                store.release_readers(record.segment, 1)
            transfer.settle_pending(Outcome.FAILED, "the disk tier is closed")
        return transfer

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if aligned(max_sealed_bytes(objects.form)) + 3 * BLOCK > self._config.effective_segment_bytes:
            raise ValueError(
                f"a page of {size} bytes does not fit a segment of {self._config.effective_segment_bytes} bytes: raise segment_bytes"
            )
        if self.closed:
            return failed_transfer(
                len(objects), self._transfer_counts, "write", Outcome.FAILED, "the disk tier is closed"
            )
        try:
            objects = self._with_stored_keys(objects)
        except NoKeyError as error:
            reason = f"{self.name}: not stored in the clear: {error}"
            return failed_transfer(len(objects), self._transfer_counts, "write", Outcome.FAILED, reason)
        transfer = Transfer(len(objects), self._transfer_counts, "write", size)
        with self._store.lock:
            get = self._store.getter()
            stored = np.array(
                [(record := get(key)) is not None and record.is_verified for key in objects.keys], bool
            )
        transfer.settle(np.flatnonzero(stored), Outcome.OK)
        wanted = np.flatnonzero(~stored)
        space = max(0, self._config.pending_bytes - self._writer.pending) // size
        if len(wanted) > space:
            transfer.settle(wanted[space:], Outcome.BUSY, "too many writes are in flight")
            wanted = wanted[:space]
        if len(wanted):
            with self._state_lock:
                if not self._closed:
                    self._open_transfers.add(transfer)
                    self._writer.submit(transfer, objects, wanted, source)
                    return transfer
            transfer.settle_pending(Outcome.FAILED, "the disk tier is closed")
        return transfer

    def drop(self, objects: Objects) -> int:
        """Remove objects from the index at once. The removal on disk is queued with the writes. Return the number
        of removed objects."""
        try:
            stored = self._with_stored_keys(objects)
        except NoKeyError:
            return 0
        legacy = (
            objects.keys if self._keys is not None else []
        )  # pages of format version 2, or written without keys
        dropped = self._store.remove_keys(stored.keys)
        dropped += self._store.remove_keys([key for key in legacy if key in self._store.index])
        if dropped:
            self._writer.submit_tombstones(dropped)
        return len(dropped)

    def drop_stored(self, keys: Sequence[bytes]) -> int:
        """Remove objects by their stored keys, for operators. Return the number of removed objects."""
        dropped = self._store.remove_keys(keys)
        if dropped:
            self._writer.submit_tombstones(dropped)
        return len(dropped)

    def remove_empty_files(self) -> None:
        """Remove files without pages, for operators. Call this method before the first write."""
        self._store.remove_empty()

    def stats(self) -> TierStats:
        """Return counts. `bytes` is the size of the files, and `notes` are messages for the operator."""
        with self._store.lock:
            objects, size = len(self._store.index), self._store.file_bytes
        notes = tuple(self._store.notes)
        tenants = {tenant: self._store.used_by(tenant) for tenant in self._tenants}
        return self._transfer_counts.stats(objects, size, self.capacity, self._store.evicted, notes, tenants)

    def close(self) -> None:
        with self._state_lock:
            if self._closed:
                return
            self._closed = True
        quiet = self._writer.close(self._config.close_seconds)
        quiet = self._reader.close(self._config.close_seconds if quiet else 0.1) and quiet
        with self._state_lock:
            pending = list(self._open_transfers)
        for transfer in pending:
            transfer.settle_pending(Outcome.FAILED, "the disk tier was closed")
        if quiet:  # otherwise a hung thread still uses the files: leave them open until the process ends
            self._store.close()
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._lock_file)
        os.close(self._directory)


def disk_config(options: Options, directory: str, capacity: int) -> DiskConfig:
    """Read the options of a disk tier from a URL. Raises ValueError for an invalid value."""
    durable: Any = options.text("durable", "power")
    evict: Any = options.text("evict", "least-used")
    return DiskConfig(
        directory,
        capacity,
        durable=durable,
        compression=options.compression(),
        keys=options.optional_text("keys"),
        protect=options.optional_text("protect"),
        evict=evict,
        ttl=options.ttl(),
    )


def parse_url(url: str) -> Callable[[], DiskTier]:
    """Parse `disk:/path:1TiB?durable=power&compression=lz4&…`. Return a function that opens the tier."""
    plain, _, query = url.partition("?")
    path, colon, size = plain.removeprefix("disk:").rpartition(":")
    if not colon or not path:
        raise ValueError("path or size is missing; write disk:/path:1TiB")
    options = Options(url, query)
    config = disk_config(options, path, parse_size(size))
    options.reject_unknown()
    return partial(DiskTier, config)
