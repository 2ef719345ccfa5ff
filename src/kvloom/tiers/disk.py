"""The disk tier: pages in segment files of one directory, there again after a restart or a crash.

    write -> sealing thread (checksums, compression) -> appending thread (one write a frame, one sync for several) -> OK
    read  -> a few reading threads, straight into aligned memory of the caller, then the checksums

Knows objects and bytes. What is on the disk is `segment.py`; what is where, and what leaves, `shelf.py`.
"""

from __future__ import annotations

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

from .append import Appender
from .codec import Compression, make_codec, most_bytes, unseal
from .files import BLOCK, Files, aligned, lock_directory
from .keys import Keyring
from .segment import Record, Segment
from .shelf import Shelf, ShelfConfig
from .tier import Objects, Ranges, Tier, TierError, parted
from .transfer import Outcome, Tally, TierStats, Transfer, explain, failed_transfer
from .workers import Tools, Workers

__all__ = ["DiskConfig", "DiskTier"]

_READ_BYTES = 2 << 20  # one read; larger batches become several, so that the threads share them


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
    keys: Path | str | None = None  # a file of keys (keys.py): pages are encrypted
    evict: Literal["oldest", "least-used"] = "least-used"
    carry: bool = True
    direct: bool = True
    readers: int = 4
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
        if self.readers < 1 or self.pending_bytes < 1:
            raise ValueError(
                f"readers={self.readers} and pending_bytes={self.pending_bytes} must be positive"
            )
        if self.segment < 2 * BLOCK or self.capacity < 3 * self.segment:
            raise ValueError(
                f"capacity={self.capacity} bytes does not hold three segments of {self.segment}: one to write, one "
                "to come, one to read. Give more, or smaller segment_bytes"
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

    def __init__(self, config: DiskConfig, files: Callable[[int], Files] = Files) -> None:
        self._config = config
        keys = None if config.keys is None else Keyring.read(config.keys)
        self._make_codec = partial(make_codec, config.compression, keys)
        self._make_codec()  # a missing package is said now
        self._path = Path(config.directory)
        self._directory, self._lock_file = lock_directory(self._path)
        try:
            self._files = files(self._directory)
            self._shelf = Shelf(
                self._files,
                ShelfConfig(config.capacity, config.segment, config.direct, config.evict, config.carry),
            )
        except OSError as error:
            self._unlock()
            raise TierError(f"the disk tier cannot read {self._path}: {error.strerror or error}") from error
        self._tally = Tally()
        self._closed = False
        self._reading = 0
        self._counts = threading.Lock()
        self._open: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._appender = Appender(self._shelf, self._make_codec(), config.durable == "power")
        self._readers: Workers[_Read] = Workers(config.readers, "kvloom-disk-read", self._reader)

    @property
    def name(self) -> str:
        return f"disk:{self._path}"

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def closed(self) -> bool:
        return self._closed

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
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
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        missing, wrong, found = [], [], []
        form, shelf = objects.form, self._shelf
        room = self._config.pending_bytes - self._reading
        with shelf.lock:
            for index, key in enumerate(objects.keys):
                record = shelf.index.get(key)
                if record is None:
                    missing.append(index)
                elif (record.head.runs, record.head.run_bytes) != (form.runs, form.run_bytes):
                    wrong.append(index)
                elif room > 0:
                    room -= stop - start
                    shelf.touch(record)
                    found.append((index, record))
        jobs = self._plan(found, transfer, into, start, stop, objects.tenant)
        transfer.settle(missing, Outcome.MISSING)
        transfer.settle(wrong, Outcome.LAYOUT, "an object's head disagrees with its form")
        if len(missing) + len(wrong) + len(found) < len(objects):
            taken = np.ones(len(objects), np.bool_)
            taken[missing + wrong + [index for index, _ in found]] = False
            transfer.settle(np.flatnonzero(taken), Outcome.BUSY, "too many reads are under way")
        with self._counts:  # close() ends the threads after what was submitted under this lock
            if not (closed := self._closed):
                self._open.add(transfer)
                self._reading += len(found) * (stop - start)
                for job in jobs:
                    self._readers.submit(job)
        if closed:
            for job in jobs:
                self._shelf.let_go(job.segment, len(job.items))
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
        transfer = Transfer(len(objects), self._tally, "write", size)
        here = self.lookup(objects)
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
        gone = self._shelf.take(objects.keys)
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
        quiet = self._readers.close(self._config.close_seconds if quiet else 0.1) and quiet
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

    # --- reading

    def _plan(
        self,
        found: list[tuple[int, Record]],
        transfer: Transfer,
        into: Ranges,
        start: int,
        stop: int,
        tenant: str,
    ) -> list[_Read]:
        """Reads that together bring every record; neighbours on the disk that land in place come in one."""
        found.sort(key=_place)
        starts, address = into.starts.tolist(), into.address + start
        size = stop - start
        blocks = not (start % BLOCK or size % BLOCK)
        jobs: list[_Read] = []
        end, items, segment = -1, [], None  # of the read that the next record may join
        for index, record in found:
            at = starts[index]
            in_place = record.head.stored is None and (
                not record.segment.direct or (blocks and (address + at) % BLOCK == 0)
            )
            if (
                record.offset == end
                and in_place
                and record.segment is segment
                and len(items) * size < _READ_BYTES
            ):
                items.append((index, record, at + start))
            else:
                items = [(index, record, at + start)]
                jobs.append(_Read(transfer, record.segment, into, start, stop, in_place, items, tenant))
                segment = record.segment if in_place else None
            end = record.offset + size  # a part of a page has no neighbour: the next page begins further on
        return jobs

    def _reader(self) -> Callable[[_Read], None]:
        tools = Tools(self._make_codec())

        def run(job: _Read) -> None:
            try:
                if job.transfer.enter():
                    try:
                        job.in_place_read(self, tools) if job.in_place else job.scratch_read(self, tools)
                    finally:
                        job.transfer.leave()
            except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without these pages
                which = [index for index, _, _ in job.items]
                job.transfer.settle(which, Outcome.FAILED, f"{self.name}: {error}")
            finally:
                self._shelf.let_go(job.segment, len(job.items))
                with self._counts:
                    self._reading -= len(job.items) * (job.stop - job.start)

        return run

    def _settle(self, transfer: Transfer, index: int, record: Record, outcome: Outcome) -> None:
        if outcome != Outcome.OK:
            self._shelf.forget(record.head.key, record)  # it will not get better
        transfer.settle(index, outcome, "" if outcome == Outcome.OK else f"{self.name}: {explain(outcome)}")


def _place(item: tuple[int, Record]) -> tuple[int, int]:
    return item[1].segment.number, item[1].offset


@dataclass(slots=True)
class _Read:
    """One call to the disk: records that follow each other, each with where its part goes."""

    transfer: Transfer
    segment: Segment
    into: Ranges
    start: int
    stop: int
    in_place: bool
    items: list[tuple[int, Record, int]]
    tenant: str

    def in_place_read(self, tier: DiskTier, tools: Tools) -> None:
        pages, size = self.into.view, self.stop - self.start
        pieces = [pages[at : at + size] for _, _, at in self.items]
        got = tier._files.read(self.segment.fd, pieces, self.items[0][1].offset + self.start)
        good = []
        for (index, record, _), piece in zip(self.items, pieces, strict=True):
            outcome = Outcome.SHORT
            if got >= size:
                outcome = unseal(record.head, piece, self.start // record.head.run_bytes, piece, tools.codec)
            got -= size
            if outcome == Outcome.OK:
                good.append(index)
            else:
                tier._settle(self.transfer, index, record, outcome)
        self.transfer.settle(good, Outcome.OK)  # together: one by one costs as much as the checksums

    def scratch_read(self, tier: DiskTier, tools: Tools) -> None:
        pages = self.into.view
        for index, record, at in self.items:
            head = record.head
            first, last = self.start // head.run_bytes, self.stop // head.run_bytes
            low, high = head.span(first, last)
            base = low // BLOCK * BLOCK
            room = tools.room(aligned(high - base))[: aligned(high - base)]
            got = tier._files.read(self.segment.fd, [room], record.offset + base)
            body = room[low - base : max(low - base, min(got, high - base))]
            into = pages[at : at + self.stop - self.start]
            tier._settle(
                self.transfer, index, record, unseal(head, body, first, into, tools.codec, self.tenant)
            )
