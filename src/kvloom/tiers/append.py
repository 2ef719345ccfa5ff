"""How pages get onto the disk: one thread seals frames, one appends them, so that checksums cost no disk time.

Frames are appended in the order of the calls. Several that wait share one sync; an object is OK, and found, only
after it. Knows no formats.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import Codec, Head, most_bytes, seal
from .dropped import Gone
from .files import BLOCK, aligned, aligned_bytes
from .segment import Record
from .shelf import Shelf
from .tier import Objects, Ranges
from .transfer import Outcome, Transfer

__all__ = ["Appender"]

_FRAME_BYTES = 8 << 20  # sealed while the one before is written: the smaller, the less waits at either end
_FIRST_BYTES = 1 << 20  # of a call's first frame, so that the disk begins soon
_FRAME_RECORDS = 512
_SYNC_BYTES = 128 << 20
_AHEAD = 2  # sealed frames that wait for the disk


@dataclass(slots=True)
class _Write:
    transfer: Transfer
    objects: Objects
    which: npt.NDArray[np.int64]
    source: Ranges


@dataclass(slots=True)
class _Frame:
    transfer: Transfer
    which: list[int]
    page_bytes: int
    tenant: str
    heads: list[Head] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    size: int = 0
    scratch: memoryview | None = None


class Appender:
    """Two daemon threads. `pending` is the bytes of pages that wait or are being written."""

    def __init__(self, shelf: Shelf, codec: Codec, sync: bool) -> None:
        self._shelf, self._sync = shelf, sync
        self._codec = codec
        self._lock = threading.Lock()
        self.pending = 0
        self._asked: queue.SimpleQueue[_Write | Gone | None] = queue.SimpleQueue()
        self._sealed: queue.Queue[_Frame | Gone | None] = queue.Queue(_AHEAD)
        self._scratch: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._sync_bytes = min(_SYNC_BYTES, shelf.segment_bytes)  # acknowledged before its segment can leave
        self._threads = [
            threading.Thread(target=target, name=f"kvloom-disk-{name}", daemon=True)
            for name, target in (("seal", self._seal_loop), ("append", self._append_loop))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, transfer: Transfer, objects: Objects, which: npt.NDArray[np.int64], source: Ranges
    ) -> None:
        self._add(len(which) * objects.form.page_bytes)
        self._asked.put(_Write(transfer, objects, which, source))

    def submit_dropped(self, gone: Gone) -> None:
        self._asked.put(gone)

    def close(self, timeout: float) -> bool:
        """Ends after what was submitted; False if it has not within `timeout` seconds."""
        self._asked.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _add(self, size: int) -> None:
        with self._lock:
            self.pending += size

    # --- the sealing thread

    def _seal_loop(self) -> None:
        while (job := self._asked.get()) is not None:
            if not isinstance(job, _Write):
                self._sealed.put(job)
                continue
            most = min(_FRAME_BYTES, self._shelf.segment_bytes_for(job.objects.tenant) // 4)
            at, size = 0, min(_FIRST_BYTES, most)
            while at < len(job.which):
                step = max(1, min(_FRAME_RECORDS, size // job.objects.form.page_bytes))
                self._seal(job, job.which[at : at + step].tolist())
                at, size = at + step, min(2 * size, most)
            del job
        self._sealed.put(None)

    def _seal(self, job: _Write, which: list[int]) -> None:
        frame = _Frame(job.transfer, which, job.objects.form.page_bytes, job.objects.tenant)
        if not job.transfer.enter():
            self._add(-len(which) * frame.page_bytes)
            return
        try:
            self._fill(frame, job)
        except Exception as error:  # noqa: BLE001  a page that cannot be sealed is not stored, and that is all
            self._finish(frame, Outcome.FAILED, f"sealing: {error}")
            return
        self._sealed.put(frame)

    def _fill(self, frame: _Frame, job: _Write) -> None:
        form, pages, starts = job.objects.form, job.source.view, job.source.starts
        size = form.page_bytes
        in_place = (
            self._codec.plain
            and size % BLOCK == 0
            and not ((job.source.address + starts[frame.which]) % BLOCK).any()
        )
        room = None if in_place else self._room(len(frame.which) * aligned(most_bytes(form)), frame)
        run = (0, 0)  # neighbours in the caller's memory go as one piece
        for index in frame.which:
            at = int(starts[index])
            key = job.objects.keys[index]
            head, pieces = seal(key, form, pages[at : at + size], self._codec, job.objects.tenant)
            frame.heads.append(head)
            if room is None:
                if run[1] == at and frame.bodies:
                    run = (run[0], at + size)
                    frame.bodies[-1] = pages[run[0] : run[1]]
                else:
                    run = (at, at + size)
                    frame.bodies.append(pages[at : at + size])
                frame.size += size
                continue
            begin = frame.size
            for piece in pieces:
                room[frame.size : frame.size + len(piece)] = piece
                frame.size += len(piece)
            stop = begin + aligned(frame.size - begin)
            room[frame.size : stop] = bytes(stop - frame.size)  # nobody else's bytes in the gap
            frame.size = stop
        if room is not None:
            frame.bodies = [room[: frame.size]]

    def _room(self, size: int, frame: _Frame) -> memoryview:
        try:
            frame.scratch = self._scratch.get_nowait()
        except queue.Empty:
            frame.scratch = None
        if frame.scratch is None or len(frame.scratch) < size:
            frame.scratch = aligned_bytes(size)
        return frame.scratch

    # --- the appending thread

    def _append_loop(self) -> None:
        written: list[tuple[_Frame, list[Record]]] = []
        unsynced = 0
        while True:
            try:
                job = self._sealed.get(block=not written)
            except queue.Empty:
                self._acknowledge(written)
                written, unsynced = [], 0
                continue
            if job is None:
                self._acknowledge(written)
                return
            if not isinstance(job, _Frame):
                self._drop(job)
                continue
            try:
                records = self._shelf.append(job.heads, job.bodies, job.size, job.tenant)
            except Exception as error:  # noqa: BLE001  the disk's trouble is these pages' alone
                self._finish(job, *_why(error))
                continue
            written.append((job, records))
            unsynced += job.size
            if unsynced >= self._sync_bytes:
                self._acknowledge(written)
                written, unsynced = [], 0

    def _acknowledge(self, written: list[tuple[_Frame, list[Record]]]) -> None:
        if not written:
            return
        outcome, reason = Outcome.OK, ""
        try:
            if self._sync:
                self._shelf.sync()
        except Exception as error:  # noqa: BLE001
            outcome, reason = _why(error)
        for frame, records in written:
            if outcome == Outcome.OK:
                self._shelf.publish(records)
            self._finish(frame, outcome, reason)

    def _drop(self, gone: Gone) -> None:
        try:
            self._shelf.write_dropped(gone)
        except Exception as error:  # noqa: BLE001
            self._shelf.notes[f"dropped objects may come back: {error}"] = None

    def _finish(self, frame: _Frame, outcome: Outcome, reason: str = "") -> None:
        frame.bodies = []
        if frame.scratch is not None and self._scratch.qsize() <= _AHEAD:
            self._scratch.put(frame.scratch)
        frame.transfer.settle(frame.which, outcome, reason)
        frame.transfer.leave()
        self._add(-len(frame.which) * frame.page_bytes)


def _why(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk" if error.errno == errno.ENOSPC else "a quota"
        return Outcome.FULL, f"{what} is full: {error.strerror}"
    return Outcome.FAILED, str(error)
