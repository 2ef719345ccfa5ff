"""The disk tier: pages in segment files of one directory, there again after a restart or a crash.

    write -> sealing thread (checksums, compression) -> appending thread (one write a frame, one sync for several) -> OK
    read  -> reading threads, straight into aligned memory of the caller; each read is checked while others come

Knows objects and bytes. What is on the disk is `segment.py`; what is where, and what leaves, `shelf.py`; how pages get there and
back, `append.py` and `fetch.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloom.core.sizes import format_bytes

from .append import Appender
from .codec import OLD_CIPHER, Compression, make_codec, most_bytes
from .fetch import Fetcher
from .files import BLOCK, Files, SystemFiles, aligned, lock_directory
from .keys import NoKeyError, Protect, check_protect, read_keys
from .shares import Shares
from .shelf import Shelf, ShelfConfig
from .tier import Objects, Ranges, Tier, TierError, parted
from .transfer import Outcome, Tally, TierStats, Transfer, explain, failed_transfer

__all__ = ["DiskConfig", "DiskTier"]

log = logging.getLogger("kvloom.tiers")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A disk tier. `durable="power"`: a written page survives the loss of power (one sync for what is queued);
    `"process"`: it survives the end of the process, however that comes.

    `segment_bytes=None` is a 64th of the capacity, at least 64 MiB or a quarter. `pending_bytes` bounds what may be
    under way, each way; beyond it objects are BUSY.
    """

    directory: Path | str
    capacity: int
    segment_bytes: int | None = None
    durable: Literal["power", "process"] = "power"
    compression: Compression = "none"
    keys: Path | str | None = (
        None  # a file of keys (keys.py): pages are sealed, and their names derived, with them
    )
    protect: Protect | None = None  # with keys: "encrypt" unless given
    evict: Literal["oldest", "least-used"] = "least-used"
    carry: bool = True
    direct: bool = True
    readers: int = 16
    pending_bytes: int = 1 << 30
    close_seconds: float = 10.0

    def __post_init__(self) -> None:
        for field, allowed in (
            ("durable", ("power", "process")),
            ("evict", ("oldest", "least-used")),
            ("compression", get_args(Compression)),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r} is none of {', '.join(allowed)}")
        check_protect(self.keys, self.protect)
        if self.readers < 1 or self.pending_bytes < 1:
            raise ValueError(
                f"readers={self.readers} and pending_bytes={self.pending_bytes} must be positive"
            )
        if self.segment < 2 * BLOCK or self.capacity < 3 * self.segment:
            raise ValueError(
                f"capacity={self.capacity} bytes does not hold three segments of {max(self.segment, 2 * BLOCK)}: one to "
                "write, one to come, one to read. Give more"
                + (", or smaller segment_bytes" if self.segment_bytes else "")
            )

    @property
    def segment(self) -> int:
        chosen = self.segment_bytes or max(self.capacity // 64, min(64 << 20, self.capacity // 4))
        return chosen // BLOCK * BLOCK


class DiskTier(Tier):
    """Safe from any thread. Opening takes the directory's lock and reads the heads of everything there.

    Raises TierError when the directory cannot be used: a wrong permission, another process. Afterwards nothing raises:
    a full disk, a lost mount, a damaged file are outcomes.
    """

    def __init__(self, config: DiskConfig, files: Callable[[int], Files] = SystemFiles) -> None:
        self._config = config
        self._keys = read_keys(config.keys, config.protect)
        self._make_codec = partial(make_codec, config.compression, self._keys)
        self._make_codec()  # a missing package is said now
        self._path = Path(config.directory)
        self._directory, self._lock_file = lock_directory(self._path)
        try:
            self._files = files(self._directory)
            self._shelf = Shelf(
                self._files,
                ShelfConfig(config.capacity, config.segment, config.direct, config.evict, config.carry),
            )
        except BaseException as error:
            self._unlock()
            if not isinstance(error, OSError):
                raise
            raise TierError(f"the disk tier cannot read {self._path}: {error.strerror or error}") from error
        self._warn_of_room()
        self._tally = Tally()
        self._closed = False
        self._counts = threading.Lock()
        self._open: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._appender = Appender(self._shelf, self._make_codec(), config.durable == "power")
        self._fetcher = Fetcher(self.name, self._files, self._shelf, self._make_codec, config.readers)

    def _warn_of_room(self) -> None:
        """Said now, not when it is full: pages are refused then."""
        disk = os.fstatvfs(self._directory)
        room = disk.f_bavail * disk.f_frsize + self._shelf.file_bytes
        if room < self._config.capacity:
            log.warning(
                "tier %s may take %s, and its file system has room for %s: it will be full before",
                self.name,
                format_bytes(self._config.capacity),
                format_bytes(room),
            )

    @property
    def name(self) -> str:
        return f"disk:{self._path}"

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def closed(self) -> bool:
        return self._closed

    def share_out(self, shares: Shares) -> None:
        """Raises TierError where the disk does not let files go that a share has no room for."""
        try:
            self._shelf.share_out(shares)
        except OSError as error:
            raise TierError(
                f"the disk tier cannot make room in {self._path}: {error.strerror or error}"
            ) from error

    def kept_for(self, tenant: str) -> int:
        return self._shelf.kept_for(tenant)

    def _stored(self, objects: Objects, old: bool = False) -> Objects:
        """Returns objects under the keys that are on the disk; with `old`, an encrypted page of version 2 under its plain key.
        NoKeyError: their tenant has no key."""
        if self._keys is None:
            return objects
        stored = self._keys.rename(objects)
        if old:
            index = self._shelf.index
            for at, (plain, key) in enumerate(zip(objects.keys, stored.keys, strict=True)):
                record = index.get(plain)
                if record is not None and record.head.cipher == OLD_CIPHER and key not in index:
                    stored.keys[at] = plain
        return stored

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        try:
            objects = self._stored(objects, old=True)
        except NoKeyError:
            return np.zeros(len(objects), np.bool_)
        with self._shelf.lock:
            index = self._shelf.index
            return np.array([key in index for key in objects.keys], np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = parted(objects.form, part)
        if self.closed:
            return failed_transfer(
                len(objects), self._tally, "read", Outcome.FAILED, "the disk tier is closed"
            )
        try:
            objects = self._stored(objects, old=True)
        except NoKeyError as error:
            return failed_transfer(len(objects), self._tally, "read", Outcome.LOCKED, f"{self.name}: {error}")
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        with self._counts:
            self._open.add(transfer)
        missing, wrong, plain, busy, found = [], [], [], [], []
        shelf, size = self._shelf, stop - start
        checks, run_bytes = 8 * objects.form.runs, objects.form.run_bytes
        room = max(0, self._config.pending_bytes - self._fetcher.pending)
        with shelf.lock:
            get = shelf.index.get
            for index, key in enumerate(objects.keys):
                record = get(key)
                if record is None:
                    missing.append(index)
                elif record.head.run_bytes != run_bytes or len(record.head.checks) != checks:
                    wrong.append(index)
                elif self._keys is not None and not record.head.cipher:
                    plain.append((index, record))
                elif room > 0:
                    room -= size
                    found.append((index, record))
                else:
                    busy.append(index)
            shelf.touch([record for _, record in found])
        transfer.settle(missing, Outcome.MISSING)
        transfer.settle(wrong, Outcome.LAYOUT, "an object's head disagrees with its form")
        for index, record in plain:
            shelf.forget(record.head.key, record)
            transfer.settle(index, Outcome.UNTRUSTED, f"{self.name}: {explain(Outcome.UNTRUSTED)}")
        transfer.settle(busy, Outcome.BUSY, "too many reads are under way")
        with self._counts:  # close() ends the threads after what was submitted under this lock
            if not (closed := self._closed):
                self._fetcher.submit(transfer, found, into, (start, stop), objects.tenant)
        if closed:
            for _, record in found:
                shelf.let_go(record.segment, 1)
            transfer.settle_rest(Outcome.FAILED, "the disk tier is closed")
        return transfer

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if aligned(most_bytes(objects.form)) + 2 * BLOCK > self._config.segment:
            raise ValueError(
                f"a page of {size} bytes does not fit a segment of {self._config.segment}: raise segment_bytes"
            )
        if self.closed:
            return failed_transfer(
                len(objects), self._tally, "write", Outcome.FAILED, "the disk tier is closed"
            )
        try:
            objects = self._stored(objects)
        except NoKeyError as error:
            reason = f"{self.name}: not stored in the clear: {error}"
            return failed_transfer(len(objects), self._tally, "write", Outcome.FAILED, reason)
        transfer = Transfer(len(objects), self._tally, "write", size)
        with self._shelf.lock:
            get = self._shelf.index.get
            here = np.array([(record := get(key)) is not None and record.sure for key in objects.keys], bool)
        transfer.settle(np.flatnonzero(here), Outcome.OK)
        wanted = np.flatnonzero(~here)
        room = max(0, self._config.pending_bytes - self._appender.pending) // size
        if len(wanted) > room:
            transfer.settle(wanted[room:], Outcome.BUSY, "too many writes are under way")
            wanted = wanted[:room]
        if len(wanted):
            with self._counts:
                if not self._closed:
                    self._open.add(transfer)
                    self._appender.submit(transfer, objects, wanted, source)
                    return transfer
            transfer.settle_rest(Outcome.FAILED, "the disk tier is closed")
        return transfer

    def drop(self, objects: Objects) -> int:
        """Forgotten at once; on the disk in the order of the writes."""
        try:
            stored = self._stored(objects)
        except NoKeyError:
            return 0
        old = objects.keys if self._keys is not None else []  # of version 2, or from before there were keys
        gone = self._shelf.take(stored.keys)
        gone += self._shelf.take([key for key in old if key in self._shelf.index])
        if gone:
            self._appender.submit_dropped(gone)
        return len(gone)

    def stats(self) -> TierStats:
        """`bytes` is what its files take; `notes` say what a person should know."""
        with self._shelf.lock:
            objects, size = len(self._shelf.index), self._shelf.file_bytes
        notes = tuple(self._shelf.notes)
        return self._tally.stats(objects, size, self.capacity, self._shelf.evicted, notes)

    def close(self) -> None:
        with self._counts:
            if self._closed:
                return
            self._closed = True
        quiet = self._appender.close(self._config.close_seconds)
        quiet = self._fetcher.close(self._config.close_seconds if quiet else 0.1) and quiet
        with self._counts:
            left = list(self._open)
        for transfer in left:
            transfer.settle_rest(Outcome.FAILED, "the disk tier was closed")
        if quiet:  # else a call hangs in a thread that uses them: they go with the process
            self._shelf.close()
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._lock_file)
        os.close(self._directory)
