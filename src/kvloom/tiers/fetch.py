"""How pages come off the disk: by several threads, a quarter of a megabyte at a time, each checked as soon as it has come.

    many pages     a thread has whole pages; neighbours on the disk that land in place come together
    few pages      each is cut into several reads, so that all threads have work

A page is OK when its last read is; one bad read settles it. Knows records and memory, not what they are for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .checks import read_step
from .codec import Codec, unseal
from .files import BLOCK, Files, aligned
from .segment import Record, Segment
from .shelf import Shelf
from .tier import Ranges
from .transfer import Outcome, Transfer, explain
from .workers import Tools, Workers

__all__ = ["Fetcher"]

_MOST_BYTES = 2 << 20  # of one job


class Fetcher:
    """`pending` is the bytes of pages that wait or are being read."""

    def __init__(
        self, name: str, files: Files, shelf: Shelf, make_codec: Callable[[], Codec], readers: int
    ) -> None:
        self._name, self._files, self._shelf, self._make_codec = name, files, shelf, make_codec
        self._lock = threading.Lock()
        self.pending = 0
        self._readers = readers
        self._workers: Workers[_Read] = Workers(readers, "kvloom-disk-read", self._reader)

    def share(self, size: int) -> int:
        """How many of `size` bytes one job should have."""
        return min(size // (2 * self._readers), _MOST_BYTES)

    def submit(
        self,
        transfer: Transfer,
        found: list[tuple[int, Record]],
        into: Ranges,
        part: tuple[int, int],
        tenant: str,
        share: int,
    ) -> None:
        """Brings bytes `part` of records, each with its place in the transfer, in jobs of about `share` bytes. The shelf counts
        a reader of every record's segment already; it is let go here."""
        with self._lock:
            self.pending += len(found) * (part[1] - part[0])
        for job in self._plan(transfer, found, into, part, tenant, share):
            self._workers.submit(job)

    def close(self, timeout: float) -> bool:
        """Ends after what was submitted; False if it has not within `timeout` seconds."""
        return self._workers.close(timeout)

    def _plan(
        self,
        transfer: Transfer,
        found: list[tuple[int, Record]],
        into: Ranges,
        part: tuple[int, int],
        tenant: str,
        share: int,
    ) -> list[_Read]:
        """Reads that together bring every record, in the order of the disk. They are of one form."""
        found.sort(key=_place)
        starts, address = into.starts.tolist(), into.address
        start, stop = part
        size = stop - start
        blocks = not (start % BLOCK or size % BLOCK)
        whole = read_step(found[0][1].head.run_bytes) if found else 1
        step = max(1, share // whole) * whole
        together = max(1, step // size)
        jobs: list[_Read] = []
        end, job = -1, None  # of the read that the next record may join
        for index, record in found:
            at, segment = starts[index], record.segment
            in_place = record.head.stored is None and (
                not segment.direct or (blocks and (address + at + start) % BLOCK == 0)
            )
            item = (index, record, at)
            if not in_place:
                jobs.append(_Read(transfer, segment, into, part, tenant, [item]))
                job = None
            elif step < size:
                count = _Count(-(-size // step))
                for low in range(start, stop, step):
                    some = (low, min(low + step, stop))
                    jobs.append(_Read(transfer, segment, into, some, tenant, [item], True, count))
            elif (
                job is not None
                and record.offset == end
                and segment is job.segment
                and len(job.items) < together
            ):
                job.items.append(item)
            else:
                job = _Read(transfer, segment, into, part, tenant, [item], True)
                jobs.append(job)
            end = record.offset + size  # a part of a page has no neighbour: the next page begins further on
        return jobs

    def _reader(self) -> Callable[[_Read], None]:
        tools = Tools(self._make_codec())

        def run(job: _Read) -> None:
            try:
                if job.transfer.enter():
                    try:
                        self._in_place(job) if job.in_place else self._through_scratch(job, tools)
                    finally:
                        job.transfer.leave()
            except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without these pages
                which = [index for index, _, _ in job.items]
                job.transfer.settle(which, Outcome.FAILED, f"{self._name}: {error}")
            finally:
                with self._lock:
                    self.pending -= len(job.items) * (job.part[1] - job.part[0])
                    ended = job.count is None or job.count.let_go()
                if ended:
                    self._shelf.let_go(job.segment, len(job.items))

        return run

    def _in_place(self, job: _Read) -> None:
        (start, stop), pages = job.part, job.into.view
        size, run = stop - start, job.items[0][1].head.run_bytes
        spans: list[list[int]] = []  # neighbours in the caller's memory come together
        for _, _, at in job.items:
            if spans and spans[-1][1] == at + start:
                spans[-1][1] += size
            else:
                spans.append([at + start, at + stop])
        came, sums, offset = 0, b"", job.items[0][1].offset + start
        for low, high in spans:
            got, found = self._files.read_checked(job.segment.fd, pages[low:high], offset + came, run)
            came, sums = came + got, sums + found
            if got < high - low:
                break
        wanted = slice(start // run * 8, stop // run * 8)
        items = job.items
        if came == len(items) * size and sums == b"".join([r.head.checks[wanted] for _, r, _ in items]):
            good = [index for index, _, _ in items]
        else:
            good = self._sort_out(job, came, sums, wanted)
        if job.count is not None and good:
            with self._lock:
                if not job.count.came():
                    return
        job.transfer.settle(good, Outcome.OK)  # together: one by one costs as much as the checksums

    def _sort_out(self, job: _Read, came: int, sums: bytes, wanted: slice) -> list[int]:
        """Settles the bad ones of a read; returns those that are good."""
        size, each = job.part[1] - job.part[0], wanted.stop - wanted.start
        good = []
        for number, (index, record, _) in enumerate(job.items):
            if came < (number + 1) * size:
                self._bad(job, index, record, Outcome.SHORT)
            elif sums[number * each : (number + 1) * each] != record.head.checks[wanted]:
                self._bad(job, index, record, Outcome.CORRUPT)
            else:
                good.append(index)
        return good

    def _through_scratch(self, job: _Read, tools: Tools) -> None:
        (start, stop), pages = job.part, job.into.view
        for index, record, at in job.items:
            head = record.head
            first, last = start // head.run_bytes, stop // head.run_bytes
            low, high = head.span(first, last)
            base = low // BLOCK * BLOCK
            room = tools.room(aligned(high - base))[: aligned(high - base)]
            got = self._files.read(job.segment.fd, [room], record.offset + base)
            body = room[low - base : max(low - base, min(got, high - base))]
            outcome = unseal(head, body, first, pages[at + start : at + stop], tools.codec, job.tenant)
            if outcome == Outcome.OK:
                job.transfer.settle(index, outcome)
            else:
                self._bad(job, index, record, outcome)

    def _bad(self, job: _Read, index: int, record: Record, outcome: Outcome) -> None:
        self._shelf.forget(record.head.key, record)  # it will not get better
        job.transfer.settle(index, outcome, f"{self._name}: {explain(outcome)}")


def _place(item: tuple[int, Record]) -> tuple[int, int]:
    return item[1].segment.number, item[1].offset


class _Count:
    """The reads of one page. Under the fetcher's lock."""

    __slots__ = ("_good", "_left")

    def __init__(self, reads: int) -> None:
        self._left = self._good = reads

    def came(self) -> bool:
        """One is good; are all?"""
        self._good -= 1
        return self._good == 0

    def let_go(self) -> bool:
        """One is over; are all?"""
        self._left -= 1
        return self._left == 0


@dataclass(slots=True)
class _Read:
    """One call to the disk: bytes `part` of records that follow each other, each with where its page begins; `count` where
    there are more of the same page."""

    transfer: Transfer
    segment: Segment
    into: Ranges
    part: tuple[int, int]
    tenant: str
    items: list[tuple[int, Record, int]]
    in_place: bool = False
    count: _Count | None = None
