"""Reads pages from disk with several threads. A read has about 256 KiB, and its bytes are verified immediately.

    many pages     a job has whole pages; one call reads pages that are adjacent on disk
    few pages      each page is split into several jobs, so all threads have work

The calling thread only splits the work into jobs. The reading threads compute the disk ranges, so reading starts early.
A page is OK if all its reads are OK. If one read fails, the page gets the outcome of this read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvloom.tiers.aligned_memory import BLOCK, aligned
from kvloom.tiers.encoding import Codec, read_step, unseal
from kvloom.tiers.tier import Ranges
from kvloom.tiers.transfer import Outcome, Transfer, describe_outcome
from kvloom.tiers.workers import Tools, Workers

from .files import Files
from .segment import Record, Segment
from .segment_store import SegmentStore

__all__ = ["SegmentReader"]

_MAX_JOB_BYTES = 2 << 20  # per job


class SegmentReader:
    """Threads that read pages. `pending` counts the bytes of pages that are queued or being read."""

    def __init__(
        self, name: str, files: Files, store: SegmentStore, make_codec: Callable[[], Codec], readers: int
    ) -> None:
        self._name, self._files, self._store, self._make_codec = name, files, store, make_codec
        self._lock = threading.Lock()
        self.pending = 0
        self._readers = readers
        self._workers: Workers[_Job] = Workers(readers, "kvloom-disk-read", self._reader)

    def submit(
        self,
        transfer: Transfer,
        found: list[tuple[int, Record]],
        into: Ranges,
        part: tuple[int, int],
        tenant: str,
    ) -> None:
        """Queue reads of the byte range `part` of each record's page. `found` contains (index in the transfer, record)
        pairs. All records have the same form.

        The caller has counted one reader per record in the segment store (`begin_reads`). The jobs release these
        readers.
        """
        size = part[1] - part[0]
        with self._lock:
            self.pending += len(found) * size
        call = _ReadCall(transfer, into, part, tenant)
        at, remaining = 0, len(found) * size
        step = read_step(found[0][1].head.run_bytes) if found else 1
        while at < len(found):
            # Jobs become smaller, so that all threads finish at the same time.
            share = max(1, min(remaining // (2 * self._readers), _MAX_JOB_BYTES) // step) * step
            if share < size and call.is_in_place(found[at][1]):
                count, some = _PageReads(-(-size // share)), found[at : at + 1]
                for low in range(part[0], part[1], share):
                    self._workers.submit(_Job(call, some, (low, min(low + share, part[1])), count))
            else:
                some = found[at : at + max(1, share // size)]
                self._workers.submit(_Job(call, some, part))
            at, remaining = at + len(some), remaining - len(some) * size

    def close(self, timeout: float) -> bool:
        """End the threads after all submitted jobs have run. Return False if threads still run after `timeout`
        seconds."""
        return self._workers.close(timeout)

    def _reader(self) -> Callable[[_Job], None]:
        tools = Tools(self._make_codec())

        def run(job: _Job) -> None:
            transfer, found = job.call.transfer, job.found
            try:
                if transfer.begin_access():
                    try:
                        for piece in self._ranges(job):
                            if piece.in_place:
                                self._read_in_place(job, piece)
                            else:
                                self._read_through_scratch(job, piece, tools)
                    finally:
                        transfer.end_access()
            except Exception as error:  # noqa: BLE001  on any error the request continues without these pages
                transfer.settle([index for index, _ in found], Outcome.FAILED, f"{self._name}: {error}")
            finally:
                with self._lock:
                    self.pending -= len(found) * (job.part[1] - job.part[0])
                    ended = job.count is None or job.count.finish()
                if ended:
                    for segment, readers in Counter([record.segment for _, record in found]).items():
                        self._store.release_readers(segment, readers)

        return run

    def _ranges(self, job: _Job) -> list[_DiskRange]:
        """Return the disk ranges that contain a job's records, in disk order. Adjacent records become one range."""
        call, found, size = job.call, job.found, job.part[1] - job.part[0]
        starts, offsets = call.starts, [record.offset for _, record in found]
        if offsets != sorted(offsets):
            found = sorted(found, key=_disk_order)
        pieces: list[_DiskRange] = []
        segment, end = None, -1  # where the next adjacent record would start
        for index, record in found:
            if record.offset == end and record.segment is segment and record.head.stored_lengths is None:
                pieces[-1].items.append((index, record, starts[index]))
                end += size
                continue
            segment, is_in_place = record.segment, call.is_in_place(record)
            pieces.append(_DiskRange(segment, [(index, record, starts[index])], is_in_place))
            # A part of a page has no adjacent record.
            end = record.offset + size if is_in_place else -1
        return pieces

    def _read_in_place(self, job: _Job, piece: _DiskRange) -> None:
        (start, stop), pages, items = job.part, job.call.view, piece.items
        size, run_bytes = stop - start, items[0][1].head.run_bytes
        low = items[0][2]
        spans, end = [], low  # the pages are also adjacent in the caller's memory
        for _, _, at in items:
            if at != end:
                spans.append((low, end))
                low = end = at
            end += size
        spans.append((low, end))
        read_bytes, sums, offset = 0, b"", items[0][1].offset + start
        for low, end in spans:
            scratch = pages[low + start : end + start]
            got, found = self._files.read_checked(piece.segment.fd, scratch, offset + read_bytes, run_bytes)
            read_bytes, sums = read_bytes + got, sums + found
            if got < end - low:
                break
        wanted = slice(start // run_bytes * 8, stop // run_bytes * 8)
        if read_bytes == len(items) * size and sums == b"".join(
            [r.head.checksums[wanted] for _, r, _ in items]
        ):
            good = [index for index, _, _ in items]
        else:
            good = self._settle_damaged(job, piece, read_bytes, sums, wanted)
        if job.count is not None and good:
            with self._lock:
                if not job.count.succeed():
                    return
        if len(good) == len(items):
            job.mark_verified([record for _, record, _ in items])
        job.call.transfer.settle(
            good, Outcome.OK
        )  # one call for all pages, because separate calls would cost as much as the checksums

    def _settle_damaged(
        self, job: _Job, piece: _DiskRange, read_bytes: int, sums: bytes, wanted: slice
    ) -> list[int]:
        """Set the outcomes of short or damaged pages in the disk range `piece`, of which `read_bytes` bytes were read.
        Return the indexes of the intact pages. `sums` are the checksums of the bytes that were read, and `wanted`
        selects the expected checksums in the page header."""
        size, each = job.part[1] - job.part[0], wanted.stop - wanted.start
        good = []
        for number, (index, record, _) in enumerate(piece.items):
            if read_bytes < (number + 1) * size:
                self._reject(job, index, record, Outcome.SHORT)
            elif sums[number * each : (number + 1) * each] != record.head.checksums[wanted]:
                self._reject(job, index, record, Outcome.CORRUPT)
            else:
                good.append(index)
        return good

    def _read_through_scratch(self, job: _Job, piece: _DiskRange, tools: Tools) -> None:
        (start, stop), pages = job.part, job.call.view
        for index, record, at in piece.items:
            head = record.head
            first, last = start // head.run_bytes, stop // head.run_bytes
            low, high = head.span(first, last)
            base = low // BLOCK * BLOCK
            scratch = tools.scratch(aligned(high - base))[: aligned(high - base)]
            got = self._files.read(piece.segment.fd, [scratch], record.offset + base)
            body = scratch[low - base : max(low - base, min(got, high - base))]
            outcome = unseal(head, body, first, pages[at + start : at + stop], tools.codec, job.call.tenant)
            if outcome == Outcome.OK:
                job.mark_verified([record])
                job.call.transfer.settle(index, outcome)
            else:
                self._reject(job, index, record, outcome)

    def _reject(self, job: _Job, index: int, record: Record, outcome: Outcome) -> None:
        self._store.remove(record.head.key, record)  # a retry cannot succeed
        job.call.transfer.settle(index, outcome, f"{self._name}: {describe_outcome(outcome)}")


def _disk_order(item: tuple[int, Record]) -> tuple[int, int]:
    return item[1].segment.number, item[1].offset


class _PageReads:
    """Counters for a page that is read in several parts: the reads that still run, and the reads that have not
    succeeded. The reader's lock guards both counters."""

    __slots__ = ("_good", "_remaining")

    def __init__(self, reads: int) -> None:
        self._remaining = self._good = reads

    def succeed(self) -> bool:
        """Count a successful read. Return whether all reads succeeded."""
        self._good -= 1
        return self._good == 0

    def finish(self) -> bool:
        """Count a finished read. Return whether all reads are finished."""
        self._remaining -= 1
        return self._remaining == 0


class _ReadCall:
    """The state that the jobs of one `submit` share."""

    __slots__ = ("_aligned", "part", "starts", "tenant", "transfer", "view")

    def __init__(self, transfer: Transfer, into: Ranges, part: tuple[int, int], tenant: str) -> None:
        self.transfer, self.part, self.tenant = transfer, part, tenant
        self.view, self.starts = into.view, into.starts.tolist()
        blocks = not (part[0] % BLOCK or part[1] % BLOCK)
        self._aligned = blocks and not ((into.starts + into.address) % BLOCK).any()

    def is_in_place(self, record: Record) -> bool:
        """Return whether a record can be read directly into the caller's memory. The stored bytes must be plain. With
        O_DIRECT, the memory must also be aligned to blocks. If one page of a call is unaligned, all pages of the call
        count as unaligned."""
        return record.head.stored_lengths is None and (self._aligned or not record.segment.direct)


@dataclass(slots=True)
class _Job:
    """Reads the byte range `part` of some pages. `found` contains a pair for each page: its index in the transfer, and
    its record. If several jobs read parts of one page, these jobs share `count`, which counts the reads of the page.
    Otherwise `count` is None.
    """

    call: _ReadCall
    found: list[tuple[int, Record]]
    part: tuple[int, int]
    count: _PageReads | None = None

    def mark_verified(self, records: list[Record]) -> None:
        """Mark records as verified, after their bytes matched the checksums. Does nothing if the call reads only a
        part of each page."""
        size = self.call.part[1] - self.call.part[0]
        for record in records:
            if not record.is_verified:
                record.is_verified = size == record.head.runs * record.head.run_bytes


@dataclass(slots=True)
class _DiskRange:
    """Records that are adjacent on disk, which one call reads. Each item is (index in the transfer, record, start of
    the page in memory)."""

    segment: Segment
    items: list[tuple[int, Record, int]]
    in_place: bool
