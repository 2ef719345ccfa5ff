"""Writes pages to disk with three threads. The sealing thread builds frames of sealed pages. The appending thread
appends frames to a segment. The publishing thread adds the records of written frames to the index, and sets outcomes.

The disk never waits for checksums or bookkeeping. Frames are appended in the order of the calls. With durable writes,
queued frames share one sync. An object is OK, and lookups find it, only after this sync.
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

from kvloom.tiers.aligned_memory import BLOCK, aligned, aligned_bytes
from kvloom.tiers.encoding import Codec, Head, max_head_bytes, max_sealed_bytes, plain_heads, seal
from kvloom.tiers.tier import Objects, Ranges
from kvloom.tiers.transfer import Outcome, Transfer

from .segment import MAX_HEAD_BYTES, Frame
from .segment_store import SegmentStore
from .tombstones import DroppedRecords

__all__ = ["SegmentWriter"]

_FRAME_BYTES = 16 << 20  # size of a frame; the next frame is sealed while this frame is written
_FIRST_BYTES = 512 << 10  # size of a call's first frame, so that the disk starts early
_GROWTH = 4  # a frame may be this much larger than the frame before it, because sealing is this much faster than a disk
_FRAME_RECORDS = 512
_SYNC_BYTES = 128 << 20
_MAX_SEALED = 2  # number of sealed frames queued for the disk


@dataclass(slots=True)
class _WriteRequest:
    transfer: Transfer
    objects: Objects
    which: npt.NDArray[np.int64]
    source: Ranges


@dataclass(slots=True)
class _SealedFrame:
    """A frame with some objects of a transfer, given by their indexes `which`. `scratch` is the memory of the bodies,
    or None if the frame uses the caller's memory."""

    transfer: Transfer
    which: list[int]
    page_bytes: int
    tenant: str
    frame: Frame | None = None
    scratch: memoryview | None = None


class SegmentWriter:
    """Writes pages with three daemon threads, which the module docstring describes. With `sync`, a page gets the
    outcome OK only after it was synced to disk. `pending` counts the bytes of pages that are queued or being written.
    """

    def __init__(self, store: SegmentStore, codec: Codec, sync: bool) -> None:
        self._store, self._sync = store, sync
        self._codec = codec
        self._lock = threading.Lock()
        self.pending = 0
        self._requests: queue.SimpleQueue[_WriteRequest | DroppedRecords | None] = queue.SimpleQueue()
        self._sealed: queue.Queue[_SealedFrame | DroppedRecords | None] = queue.Queue(_MAX_SEALED)
        self._finished: queue.SimpleQueue[tuple[list[_SealedFrame], Outcome, str] | None] = (
            queue.SimpleQueue()
        )
        self._scratch: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        # So that the outcome of a page is set before its segment can be evicted.
        self._sync_bytes = min(_SYNC_BYTES, store.segment_bytes)
        self._threads = [
            threading.Thread(target=target, name=f"kvloom-disk-{name}", daemon=True)
            for name, target in (
                ("seal", self._seal_loop),
                ("append", self._append_loop),
                ("publish", self._publish_loop),
            )
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, transfer: Transfer, objects: Objects, which: npt.NDArray[np.int64], source: Ranges
    ) -> None:
        self._add(len(which) * objects.form.page_bytes)
        self._requests.put(_WriteRequest(transfer, objects, which, source))

    def submit_tombstones(self, dropped: DroppedRecords) -> None:
        self._requests.put(dropped)

    def close(self, timeout: float) -> bool:
        """End the threads after all submitted writes. Return False if threads still run after `timeout` seconds."""
        self._requests.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _add(self, size: int) -> None:
        with self._lock:
            self.pending += size

    # --- the sealing thread

    def _seal_loop(self) -> None:
        while (job := self._requests.get()) is not None:
            if not isinstance(job, _WriteRequest):
                self._sealed.put(job)
                continue
            page = aligned(job.objects.form.page_bytes)
            limit = min(_FRAME_BYTES, self._store.segment_bytes_for(job.objects.tenant) // 4) // page
            limit = min(limit, _FRAME_RECORDS, MAX_HEAD_BYTES // max_head_bytes(job.objects.form))
            at, step = 0, max(1, min(_FIRST_BYTES // page, limit))
            while at < len(job.which):
                if (
                    len(job.which) - at < step + step // 4
                ):  # a short last frame is merged with the frame before it, because every frame has a fixed cost
                    step = len(job.which) - at
                self._seal(job, job.which[at : at + step].tolist())
                at, step = at + step, max(1, min(_GROWTH * step, limit))
            del job
        self._sealed.put(None)

    def _seal(self, job: _WriteRequest, which: list[int]) -> None:
        sealed = _SealedFrame(job.transfer, which, job.objects.form.page_bytes, job.objects.tenant)
        if not job.transfer.begin_access():
            self._add(-len(which) * sealed.page_bytes)
            return
        try:
            sealed.frame = self._in_place(sealed, job) or self._in_scratch(sealed, job)
        except Exception as error:  # noqa: BLE001  a page that cannot be sealed is not stored
            self._finish(sealed, Outcome.FAILED, f"sealing: {error}")
            return
        self._sealed.put(sealed)

    def _in_place(self, sealed: _SealedFrame, job: _WriteRequest) -> Frame | None:
        """Return a frame that is written directly from the caller's memory. Return None if the codec compresses or
        seals pages, or if the pages are not aligned to blocks."""
        keys, form, view = job.objects.keys, job.objects.form, job.source.view
        size, starts = form.page_bytes, job.source.starts[sealed.which]
        if not self._codec.is_plain or size % BLOCK or ((job.source.address + starts) % BLOCK).any():
            return None
        heads: list[Head] = []
        bodies: list[memoryview] = []
        edges = [0, *(np.flatnonzero(np.diff(starts) != size) + 1).tolist(), len(starts)]
        for first, last in pairwise(
            edges
        ):  # pages that are adjacent in the caller's memory are written as one piece
            at = int(starts[first])
            bodies.append(view[at : at + (last - first) * size])
            heads += plain_heads([keys[index] for index in sealed.which[first:last]], form, bodies[-1])
        return Frame(heads, bodies, len(starts) * size)

    def _in_scratch(self, sealed: _SealedFrame, job: _WriteRequest) -> Frame:
        form, pages, starts = job.objects.form, job.source.view, job.source.starts
        scratch = self._scratch_for(len(sealed.which) * aligned(max_sealed_bytes(form)), sealed)
        heads, end = [], 0
        for index in sealed.which:
            at = int(starts[index])
            page, key = pages[at : at + form.page_bytes], job.objects.keys[index]
            head, pieces = seal(key, form, page, self._codec, job.objects.tenant)
            heads.append(head)
            begin = end
            for piece in pieces:
                scratch[end : end + len(piece)] = piece
                end += len(piece)
            stop = begin + aligned(end - begin)
            scratch[end:stop] = bytes(stop - end)  # the padding must not contain bytes of other pages
            end = stop
        return Frame(heads, [scratch[:end]], end)

    def _scratch_for(self, size: int, sealed: _SealedFrame) -> memoryview:
        try:
            sealed.scratch = self._scratch.get_nowait()
        except queue.Empty:
            sealed.scratch = None
        if sealed.scratch is None or len(sealed.scratch) < size:
            sealed.scratch = aligned_bytes(size)
        return sealed.scratch

    # --- the appending thread

    def _append_loop(self) -> None:
        written: list[_SealedFrame] = []
        unsynced = 0
        while True:
            try:
                job = self._sealed.get(block=not written, timeout=self._store.sweep_seconds)
            except queue.Empty:
                if not written:
                    self._sweep()
                self._acknowledge(written)
                written, unsynced = [], 0
                continue
            if job is None:
                self._acknowledge(written)
                self._finished.put(None)
                return
            if not isinstance(job, _SealedFrame):
                self._drop(job)
                continue
            assert job.frame is not None
            try:
                self._store.append(job.frame, job.tenant)
            except Exception as error:  # noqa: BLE001  the error affects these pages only
                self._finished.put(([job], *_outcome_of(error)))
                continue
            written.append(job)
            unsynced += job.frame.size
            if not self._sync or unsynced >= self._sync_bytes:
                self._acknowledge(written)
                written, unsynced = [], 0

    def _acknowledge(self, written: list[_SealedFrame]) -> None:
        if not written:
            return
        outcome, reason = Outcome.OK, ""
        try:
            if self._sync:
                self._store.sync()
        except Exception as error:  # noqa: BLE001
            outcome, reason = _outcome_of(error)
        self._finished.put((written, outcome, reason))

    def _sweep(self) -> None:
        try:
            self._store.remove_expired()
        except OSError as error:
            self._store.notes[f"expired segments could not be removed: {error.strerror}"] = None

    def _drop(self, dropped: DroppedRecords) -> None:
        try:
            self._store.write_tombstones(dropped)
        except Exception as error:  # noqa: BLE001
            self._store.notes[f"dropped objects may return after a restart: {error}"] = None

    # --- the publishing thread

    def _publish_loop(self) -> None:
        while (finished := self._finished.get()) is not None:
            written, outcome, reason = finished
            for sealed in written:
                if outcome == Outcome.OK and sealed.frame is not None:
                    self._store.publish(sealed.frame.records())
                self._finish(sealed, outcome, reason)
            del finished, written

    def _finish(self, sealed: _SealedFrame, outcome: Outcome, reason: str = "") -> None:
        sealed.frame = None
        if sealed.scratch is not None and self._scratch.qsize() <= _MAX_SEALED:
            self._scratch.put(sealed.scratch)
        sealed.transfer.settle(sealed.which, outcome, reason)
        sealed.transfer.end_access()
        self._add(-len(sealed.which) * sealed.page_bytes)


def _outcome_of(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk" if error.errno == errno.ENOSPC else "the quota"
        return Outcome.FULL, f"{what} is full: {error.strerror}"
    return Outcome.FAILED, str(error)
