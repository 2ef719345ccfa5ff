"""How pages get onto the disk: one thread seals frames, one appends them, one tells who asked, so that neither checksums nor
bookkeeping cost disk time.

Frames are appended in the order of the calls. Where they are to survive a loss of power, several that wait share one sync; an object
is OK, and found, only after it. Knows no formats.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .codec import Codec, Head, most_bytes, most_head_bytes, plain_heads, seal
from .dropped import Gone
from .files import BLOCK, aligned, aligned_bytes
from .segment import MOST_HEADS, Frame
from .shelf import Shelf
from .tier import Objects, Ranges
from .transfer import Outcome, Transfer

__all__ = ["Appender"]

_FRAME_BYTES = 16 << 20  # sealed while the one before is written
_FIRST_BYTES = 512 << 10  # of a call's first frame, so that the disk begins soon
_FASTER = 4  # how much sealing is faster than a disk: by so much frames may grow, and it never waits
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
class _Sealed:
    """Objects `which` of a transfer in a frame; `scratch` is where its bodies are, unless those are the caller's memory."""

    transfer: Transfer
    which: list[int]
    page_bytes: int
    tenant: str
    frame: Frame | None = None
    scratch: memoryview | None = None


class Appender:
    """Three daemon threads. `pending` is the bytes of pages that wait or are being written."""

    def __init__(self, shelf: Shelf, codec: Codec, sync: bool) -> None:
        self._shelf, self._sync = shelf, sync
        self._codec = codec
        self._lock = threading.Lock()
        self.pending = 0
        self._asked: queue.SimpleQueue[_Write | Gone | None] = queue.SimpleQueue()
        self._sealed: queue.Queue[_Sealed | Gone | None] = queue.Queue(_AHEAD)
        self._over: queue.SimpleQueue[tuple[list[_Sealed], Outcome, str] | None] = queue.SimpleQueue()
        self._scratch: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._sync_bytes = min(_SYNC_BYTES, shelf.segment_bytes)  # acknowledged before its segment can leave
        self._threads = [
            threading.Thread(target=target, name=f"kvloom-disk-{name}", daemon=True)
            for name, target in (
                ("seal", self._seal_loop),
                ("append", self._append_loop),
                ("tell", self._tell_loop),
            )
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
            page = aligned(job.objects.form.page_bytes)
            most = min(_FRAME_BYTES, self._shelf.segment_bytes_for(job.objects.tenant) // 4) // page
            most = min(most, _FRAME_RECORDS, MOST_HEADS // most_head_bytes(job.objects.form))
            at, step = 0, max(1, min(_FIRST_BYTES // page, most))
            while at < len(job.which):
                if len(job.which) - at < step + step // 4:  # a short last frame takes longer than its bytes
                    step = len(job.which) - at
                self._seal(job, job.which[at : at + step].tolist())
                at, step = at + step, max(1, min(_FASTER * step, most))
            del job
        self._sealed.put(None)

    def _seal(self, job: _Write, which: list[int]) -> None:
        sealed = _Sealed(job.transfer, which, job.objects.form.page_bytes, job.objects.tenant)
        if not job.transfer.enter():
            self._add(-len(which) * sealed.page_bytes)
            return
        try:
            sealed.frame = self._in_place(sealed, job) or self._in_scratch(sealed, job)
        except Exception as error:  # noqa: BLE001  a page that cannot be sealed is not stored, and that is all
            self._finish(sealed, Outcome.FAILED, f"sealing: {error}")
            return
        self._sealed.put(sealed)

    def _in_place(self, sealed: _Sealed, job: _Write) -> Frame | None:
        """A frame of the caller's memory; None where the disk does not take that."""
        keys, form, view = job.objects.keys, job.objects.form, job.source.view
        size, starts = form.page_bytes, job.source.starts[sealed.which]
        if not self._codec.plain or size % BLOCK or ((job.source.address + starts) % BLOCK).any():
            return None
        heads: list[Head] = []
        bodies: list[memoryview] = []
        edges = [0, *(np.flatnonzero(np.diff(starts) != size) + 1).tolist(), len(starts)]
        for first, last in pairwise(edges):  # neighbours in the caller's memory go as one piece
            at = int(starts[first])
            bodies.append(view[at : at + (last - first) * size])
            heads += plain_heads([keys[index] for index in sealed.which[first:last]], form, bodies[-1])
        return Frame(heads, bodies, len(starts) * size)

    def _in_scratch(self, sealed: _Sealed, job: _Write) -> Frame:
        form, pages, starts = job.objects.form, job.source.view, job.source.starts
        room = self._room(len(sealed.which) * aligned(most_bytes(form)), sealed)
        heads, end = [], 0
        for index in sealed.which:
            at = int(starts[index])
            page, key = pages[at : at + form.page_bytes], job.objects.keys[index]
            head, pieces = seal(key, form, page, self._codec, job.objects.tenant)
            heads.append(head)
            begin = end
            for piece in pieces:
                room[end : end + len(piece)] = piece
                end += len(piece)
            stop = begin + aligned(end - begin)
            room[end:stop] = bytes(stop - end)  # nobody else's bytes in the gap
            end = stop
        return Frame(heads, [room[:end]], end)

    def _room(self, size: int, sealed: _Sealed) -> memoryview:
        try:
            sealed.scratch = self._scratch.get_nowait()
        except queue.Empty:
            sealed.scratch = None
        if sealed.scratch is None or len(sealed.scratch) < size:
            sealed.scratch = aligned_bytes(size)
        return sealed.scratch

    # --- the appending thread

    def _append_loop(self) -> None:
        written: list[_Sealed] = []
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
                self._over.put(None)
                return
            if not isinstance(job, _Sealed):
                self._drop(job)
                continue
            assert job.frame is not None
            try:
                self._shelf.append(job.frame, job.tenant)
            except Exception as error:  # noqa: BLE001  the disk's trouble is these pages' alone
                self._over.put(([job], *_why(error)))
                continue
            written.append(job)
            unsynced += job.frame.size
            if not self._sync or unsynced >= self._sync_bytes:
                self._acknowledge(written)
                written, unsynced = [], 0

    def _acknowledge(self, written: list[_Sealed]) -> None:
        if not written:
            return
        outcome, reason = Outcome.OK, ""
        try:
            if self._sync:
                self._shelf.sync()
        except Exception as error:  # noqa: BLE001
            outcome, reason = _why(error)
        self._over.put((written, outcome, reason))

    def _drop(self, gone: Gone) -> None:
        try:
            self._shelf.write_dropped(gone)
        except Exception as error:  # noqa: BLE001
            self._shelf.notes[f"dropped objects may come back: {error}"] = None

    # --- the telling thread

    def _tell_loop(self) -> None:
        while (over := self._over.get()) is not None:
            written, outcome, reason = over
            for sealed in written:
                if outcome == Outcome.OK and sealed.frame is not None:
                    self._shelf.publish(sealed.frame.records())
                self._finish(sealed, outcome, reason)
            del over, written

    def _finish(self, sealed: _Sealed, outcome: Outcome, reason: str = "") -> None:
        sealed.frame = None
        if sealed.scratch is not None and self._scratch.qsize() <= _AHEAD:
            self._scratch.put(sealed.scratch)
        sealed.transfer.settle(sealed.which, outcome, reason)
        sealed.transfer.leave()
        self._add(-len(sealed.which) * sealed.page_bytes)


def _why(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk" if error.errno == errno.ENOSPC else "a quota"
        return Outcome.FULL, f"{what} is full: {error.strerror}"
    return Outcome.FAILED, str(error)
