"""The file format of a disk tier. A segment file has a header, then frames. A frame has the page headers of some
objects, then their bodies. Files are append-only.

    block 0   "KVLSEG"  version u16  id 16  number u64  checksum u64     owner 16 (0: no share)  checksum u64
    frame     "KVLF"  version u16  0 u16  id 16  offset u64  records u32  heads u32  bodies u64
              page headers (see codec; 32 MiB at most)  checksum u64 of the frame up to here
              … from the next block on: bodies, each beginning on a block of 4096 bytes

There is no separate index, so opening a segment reads the page headers of all frames. The checksum of a frame shows
whether its headers are complete. The checksums of its objects show whether the bodies are complete. Every frame
repeats the segment's random id, so page content cannot look like a frame. This module does not depend on tiers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvloom.tiers.aligned_memory import BLOCK, aligned, aligned_bytes
from kvloom.tiers.encoding import Head, checksum, parse_head
from kvloom.tiers.shares import SHARED_OWNER
from kvloom.tiers.transfer import Outcome

from .files import Files, UntrustedFileError

__all__ = [
    "MAX_HEAD_BYTES",
    "MAX_SEGMENT_NUMBER",
    "SEGMENT_VERSION",
    "Frame",
    "Record",
    "Segment",
]

SEGMENT_VERSION = 1
_MAGIC, _FRAME_MAGIC = b"KVLSEG", b"KVLF"
_HEADER = struct.Struct("<6sH16sQ")
_FRAME = struct.Struct("<4sHH16sQIIQ")
_CHECK = struct.Struct("<Q")
_SCAN_BYTES = 1 << 20
_MAX_SCANS = 4
"""After a damaged frame, the file is searched for the next frame. All searches in a file together read at most this
multiple of the file's size, plus 64 * _SCAN_BYTES bytes."""
MAX_HEAD_BYTES = 32 << 20
"""Largest number of bytes of page headers in one frame. A reader never allocates more memory, even if a frame states a
larger size."""
MAX_SEGMENT_NUMBER = 10**15
"""Largest valid segment number. A file with a larger number was not written by this tier."""
_OWNER_AT = _HEADER.size + _CHECK.size


class Record:
    """One stored object. Its page header is in memory. Its body is on disk, at position `offset` of the segment
    file."""

    __slots__ = ("head", "is_verified", "offset", "reads", "segment")

    def __init__(self, segment: Segment, offset: int, head: Head) -> None:
        self.segment, self.offset, self.head = segment, offset, head
        self.reads = 0  # since the page was written to this segment
        self.is_verified = True  # False if a process may have crashed during the write

    @property
    def span(self) -> int:
        return aligned(self.head.body_bytes)


class Frame:
    """The page headers and bodies of some objects. Each body is padded to whole blocks. `size` is the number of bytes
    of all padded bodies.

    Three threads of `SegmentWriter` use a frame. The sealing thread builds the frame. The appending thread sets the
    frame's position in the file and writes the frame. The publishing thread builds the records after the write. The
    appending thread therefore has little work.
    """

    __slots__ = ("_offset", "_segment", "_used", "block", "bodies", "heads", "size")

    def __init__(self, heads: Sequence[Head], bodies: Sequence[Any], size: int) -> None:
        packed = b"".join([head.pack() for head in heads])
        self.heads, self.bodies, self.size = heads, bodies, size
        self._used = _FRAME.size + len(packed) + _CHECK.size
        self.block = aligned_bytes(self._used)
        self.block[_FRAME.size : _FRAME.size + len(packed)] = packed
        self._segment: Segment | None = None
        self._offset = -1

    @property
    def span(self) -> int:
        """Number of bytes that the frame uses on disk, including headers and padding."""
        return len(self.block) + self.size

    def place(self, segment: Segment, offset: int) -> None:
        """Write the frame's position in the segment into the frame's header."""
        end = self._used - _CHECK.size
        stated = (_FRAME_MAGIC, SEGMENT_VERSION, 0, segment.id, offset)
        _FRAME.pack_into(self.block, 0, *stated, len(self.heads), end - _FRAME.size, self.size)
        _CHECK.pack_into(self.block, end, checksum(self.block[:end]))
        self._segment, self._offset = segment, offset

    def records(self) -> list[Record]:
        """Return the records of a written frame."""
        assert self._segment is not None
        records, at = [], self._offset + len(self.block)
        for head in self.heads:
            records.append(Record(self._segment, at, head))
            at += aligned(head.body_bytes)
        return records


class Segment:
    """One segment file, which is open. `end` is the position of the next frame. A removed segment can be read until it
    is closed."""

    def __init__(
        self,
        files: Files,
        number: int,
        fd: int,
        identity: bytes,
        direct: bool,
        size: int,
        owner: bytes = SHARED_OWNER,
    ) -> None:
        self._files = files
        self.number, self.fd, self.id, self.direct, self.size = number, fd, identity, direct, size
        self.owner = owner
        self.end = BLOCK
        self.last_used = number
        self.keys: set[bytes] = set()  # keys whose newest copy is in this segment
        self.readers = 0
        self.removed = False
        self.is_complete = True  # False if a crash or a failed sync may have left partly written pages
        self.oldest = self.newest = (
            0  # times at which the first and the last page were stored; 0 without pages
        )
        self.modified_at = 0  # write time of pages of an earlier release, whose headers contain no time
        self.has_undated = False
        self._scanned = 0  # bytes read to find frames

    @staticmethod
    def file_name(number: int) -> str:
        return f"{number:012d}.seg"

    @classmethod
    def create(
        cls, files: Files, number: int, size: int, direct: bool, owner: bytes = SHARED_OWNER
    ) -> Segment:
        """Create segment file `number`, with `size` bytes, for the pages of `owner`. With `direct`, uses O_DIRECT, or
        buffered I/O if the file system refuses O_DIRECT. Removes the file if an OSError occurs."""
        name = cls.file_name(number)
        try:
            fd = files.open(name, create=True, direct=direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return cls._create_buffered(files, number, size, owner)
        try:
            files.allocate(fd, size)
            identity = os.urandom(16)
            block = aligned_bytes(BLOCK)
            header = _HEADER.pack(_MAGIC, SEGMENT_VERSION, identity, number)
            header += _CHECK.pack(checksum(header))
            if owner != SHARED_OWNER:
                header += owner + _CHECK.pack(checksum(owner))
            block[: len(header)] = header
            files.write(fd, [block], 0)
        except OSError as error:
            files.close(fd)
            files.remove(name)
            if direct and error.errno == errno.EINVAL:
                return cls._create_buffered(files, number, size, owner)
            raise
        return cls(files, number, fd, identity, direct, size, owner)

    @classmethod
    def _create_buffered(cls, files: Files, number: int, size: int, owner: bytes) -> Segment:
        with contextlib.suppress(FileNotFoundError):
            files.remove(cls.file_name(number))  # some file systems create the file before they refuse
        return cls.create(files, number, size, False, owner)

    @classmethod
    def open(cls, files: Files, number: int, direct: bool) -> Segment | Outcome:
        """Open a segment. Return an Outcome if the header is invalid. Raises OSError if the file cannot be read.
        Raises UntrustedFileError for a file that is not a segment, and does not remove such a file.
        """
        try:
            fd = files.open(cls.file_name(number), create=False, direct=direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return cls.open(files, number, direct=False)
        try:
            block = aligned_bytes(BLOCK)
            outcome = Outcome.SHORT
            got = files.read(fd, [block], 0)
            content = bytes(block[:got])
            if content.strip(b"\0") and not content.startswith(
                _MAGIC[:got]
            ):  # only zeros: a crash before the header was written
                raise UntrustedFileError(
                    cls.file_name(number), "is not a segment of a disk tier: move it to another directory"
                )
            if got == BLOCK:
                magic, version, identity, stated = _HEADER.unpack_from(block)
                (check,) = _CHECK.unpack_from(block, _HEADER.size)
                if magic == _MAGIC and version != SEGMENT_VERSION:
                    outcome = Outcome.VERSION
                elif magic != _MAGIC or stated != number or check != checksum(block[: _HEADER.size]):
                    outcome = Outcome.CORRUPT
                else:
                    owner = bytes(block[_OWNER_AT : _OWNER_AT + len(SHARED_OWNER)])
                    (check,) = _CHECK.unpack_from(block, _OWNER_AT + len(owner))
                    owner = owner if check == checksum(owner) else SHARED_OWNER
                    found = cls(files, number, fd, identity, direct, files.size(fd), owner)
                    found.modified_at = files.modified_at(fd)
                    return found
        except OSError:
            files.close(fd)
            raise
        files.close(fd)
        return outcome

    def records(self) -> Iterator[Record]:
        """Yield every record in the order of writing, and set `end` to the end of the last frame. Reads all page
        headers.

        After a damaged frame, the method searches the following bytes for the next frame. The searches read at most a
        few times the size of the file, for any number of damaged frames.
        """
        at, self._scanned = BLOCK, 0
        limit = _MAX_SCANS * self.size + 64 * _SCAN_BYTES
        while at < self.size and self._scanned <= limit:
            frame = self._frame(at)
            if frame is None:
                at = self._next_frame(at)
                continue
            heads, body, stop = frame
            for head in self._dated(heads):
                yield Record(self, body, head)
                body += aligned(head.body_bytes)
            at = stop
            self.end = min(stop, aligned(self.size))
            self.is_complete &= stop <= self.size

    def _dated(self, heads: Sequence[Head]) -> list[Head]:
        """Return the page headers with their write times. A page of an earlier release gets the time of the file's
        last write."""
        self.has_undated |= any(not head.stored_at for head in heads)
        heads = [head if head.stored_at else head._replace(stored_at=self.modified_at) for head in heads]
        self._count_times(heads)
        return heads

    def _count_times(self, heads: Sequence[Head]) -> None:
        times = [head.stored_at for head in heads]
        self.oldest = min([*times, self.oldest] if self.oldest else times, default=0)
        self.newest = max([*times, self.newest])

    def _frame(self, at: int) -> tuple[list[Head], int, int] | None:
        """Return the page headers of the frame at `at`, the position of its first body, and its end. Return None if
        there is no complete frame at `at`."""
        buffer = aligned_bytes(BLOCK)
        if self._files.read(self.fd, [buffer], at) < BLOCK:
            return None
        magic, version, _, identity, stated, count, heads_bytes, bodies = _FRAME.unpack_from(buffer)
        if (magic, version, identity, stated) != (_FRAME_MAGIC, SEGMENT_VERSION, self.id, at):
            return None
        used = _FRAME.size + heads_bytes + _CHECK.size
        if heads_bytes > MAX_HEAD_BYTES or at + used > aligned(self.size):
            return None
        if used > BLOCK:
            buffer = aligned_bytes(used)
            self._scanned += used
            if self._files.read(self.fd, [buffer[: aligned(used)]], at) < aligned(used):
                return None
        data = buffer[:used]
        if _CHECK.unpack_from(data, used - _CHECK.size)[0] != checksum(data[: -_CHECK.size]):
            return None
        heads, place = [], _FRAME.size
        for _ in range(count):
            parsed = parse_head(data[place : used - _CHECK.size])
            if isinstance(parsed, Outcome):
                return None
            heads.append(parsed[0])
            place += parsed[1]
        return heads, at + aligned(used), at + aligned(used) + bodies

    def _next_frame(self, at: int) -> int:
        """Return the position of the next block after `at` that starts like a frame of this segment, or the end of
        the file."""
        buffer = aligned_bytes(_SCAN_BYTES)
        mark = _FRAME_MAGIC + struct.pack("<HH", SEGMENT_VERSION, 0) + self.id
        at += BLOCK
        while at < self.size:
            got = self._files.read(self.fd, [buffer], at)
            self._scanned += got
            if got <= 0 or bytes(buffer[:got]).count(0) == got:  # a megabyte of zeros was never written
                break
            for step in range(0, got - BLOCK + 1, BLOCK):
                if bytes(buffer[step : step + len(mark)]) == mark:
                    return at + step
            at += max(BLOCK, got // BLOCK * BLOCK)
        return self.size

    def append(self, frame: Frame) -> None:
        """Write a whole frame. After an OSError, the caller must write later frames to another segment."""
        frame.place(self, self.end)
        self._files.write(self.fd, [frame.block, *frame.bodies], self.end)
        self.end += frame.span
        self._count_times(frame.heads)

    def fits(self, frame: Frame) -> bool:
        """Return whether a frame fits into the file and leaves one free block after it. `seal` removes this block. If
        a file ends at its last frame, it was therefore sealed."""
        return self.end + frame.span + BLOCK <= self.size

    def reopen(self, size: int) -> None:
        """Extend the file to `size` bytes, so that more frames can be appended."""
        self._files.truncate(self.fd, self.end)
        self._files.allocate(self.fd, size)
        self.size = size

    def sync(self) -> None:
        self._files.sync(self.fd)

    def seal(self) -> None:
        """Seal the segment: truncates the file to the end of its last frame. A sealed segment receives no more
        frames. If `is_complete` is False, one free block stays after the last frame. When the tier is opened again,
        this block shows that pages may be incomplete."""
        end = self.end if self.is_complete else self.end + BLOCK
        if end < self.size or (end > self.size and not self.is_complete):
            self._files.truncate(self.fd, end)
            self.size = end

    def remove(self) -> None:
        """Remove the file from the directory. The descriptor stays open for readers."""
        self._files.remove(self.file_name(self.number))

    def take_closable_fd(self) -> int:
        """Return the file descriptor if the segment is `removed` and has no readers, else -1. The caller must close
        the descriptor.

        The caller holds the store's lock, and closes the descriptor after it has released the lock. Closing the
        descriptor of a removed file frees its disk space, which may take long.
        """
        fd = self.fd if self.removed and not self.readers else -1
        if fd >= 0:
            self.fd = -1
        return fd
