"""A disk tier's file: a header, then frames, each with the heads of some objects and their bodies. Only appended to.

    block 0   "KVLSEG"  version u16  id 16  number u64  checksum u64     owner 16  checksum u64   (0: everybody's)
    frame     "KVLF"  version u16  0 u16  id 16  offset u64  records u32  heads u32  bodies u64
              heads (see codec)  checksum u64              of the frame's header and heads; heads take 32 MiB at most
              … from the next block on: bodies, each beginning on a block of 4096 bytes

The frames are the index: opening a segment reads their heads. A frame that was not finished has a wrong checksum, or
its objects have. The id is random and in every frame, so no page's content is ever taken for one. Knows no tiers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from .checks import checksum
from .codec import Head, parse_head
from .files import BLOCK, Files, aligned, aligned_bytes
from .transfer import Outcome

__all__ = ["MOST_HEADS", "NOBODY", "SEGMENT_VERSION", "Frame", "Record", "Segment", "owner_of"]

SEGMENT_VERSION = 1
_MAGIC, _FRAME_MAGIC = b"KVLSEG", b"KVLF"
_HEADER = struct.Struct("<6sH16sQ")
_FRAME = struct.Struct("<4sHH16sQIIQ")
_CHECK = struct.Struct("<Q")
_SCAN_BYTES = 1 << 20
MOST_HEADS = 32 << 20
"""Bytes of heads in one frame. A reader sets no more memory aside, whatever a frame says."""
NOBODY = bytes(16)
"""The owner of segments that hold everybody's pages."""
_OWNER_AT = _HEADER.size + _CHECK.size


def owner_of(tenant: str) -> bytes:
    """What a segment says of the tenant whose pages it holds."""
    return blake2b(tenant.encode(), digest_size=16, person=b"kvloom.owner").digest() if tenant else NOBODY


class Record:
    """One object on the disk: its head is in memory, its body at `offset` of its segment."""

    __slots__ = ("head", "offset", "segment", "sure", "used")

    def __init__(self, segment: Segment, offset: int, head: Head) -> None:
        self.segment, self.offset, self.head = segment, offset, head
        self.used = 0  # reads since it was written here
        self.sure = True  # else a process may have ended while it was written

    @property
    def span(self) -> int:
        return aligned(self.head.body_bytes)


class Frame:
    """Heads and their bodies, which take `size` bytes, each padded to whole blocks. Made before its place is known, so that whoever
    writes it has little left to do; its records are made afterwards, for the same reason."""

    __slots__ = ("_heads", "_offset", "_segment", "_used", "block", "bodies", "size")

    def __init__(self, heads: Sequence[Head], bodies: Sequence[Any], size: int) -> None:
        packed = b"".join([head.pack() for head in heads])
        self._heads, self.bodies, self.size = heads, bodies, size
        self._used = _FRAME.size + len(packed) + _CHECK.size
        self.block = aligned_bytes(self._used)
        self.block[_FRAME.size : _FRAME.size + len(packed)] = packed
        self._segment: Segment | None = None
        self._offset = -1

    @property
    def span(self) -> int:
        """What it takes on the disk."""
        return len(self.block) + self.size

    def place(self, segment: Segment, offset: int) -> None:
        """Its header says where it goes."""
        end = self._used - _CHECK.size
        told = (_FRAME_MAGIC, SEGMENT_VERSION, 0, segment.id, offset)
        _FRAME.pack_into(self.block, 0, *told, len(self._heads), end - _FRAME.size, self.size)
        _CHECK.pack_into(self.block, end, checksum(self.block[:end]))
        self._segment, self._offset = segment, offset

    def records(self) -> list[Record]:
        """Of a frame that was written."""
        assert self._segment is not None
        records, at = [], self._offset + len(self.block)
        for head in self._heads:
            records.append(Record(self._segment, at, head))
            at += aligned(head.body_bytes)
        return records


class Segment:
    """One open file. `end` is where the next frame goes. Reads of a removed segment go on: see `retire`."""

    def __init__(
        self,
        files: Files,
        number: int,
        fd: int,
        identity: bytes,
        direct: bool,
        size: int,
        owner: bytes = NOBODY,
    ) -> None:
        self._files = files
        self.number, self.fd, self.id, self.direct, self.size = number, fd, identity, direct, size
        self.owner = owner
        self.end = BLOCK
        self.last_used = number
        self.keys: set[bytes] = set()  # of records whose newest copy is here
        self.readers = 0
        self.removed = False

    @staticmethod
    def file_name(number: int) -> str:
        return f"{number:012d}.seg"

    @classmethod
    def create(cls, files: Files, number: int, size: int, direct: bool, owner: bytes = NOBODY) -> Segment:
        """A new file with room for `size` bytes; buffered where O_DIRECT is refused. OSError: nothing is left."""
        name = cls.file_name(number)
        try:
            fd = files.open(name, create=True, direct=direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return cls._refused(files, number, size, owner)
        try:
            files.allocate(fd, size)
            identity = os.urandom(16)
            block = aligned_bytes(BLOCK)
            header = _HEADER.pack(_MAGIC, SEGMENT_VERSION, identity, number)
            header += _CHECK.pack(checksum(header))
            if owner != NOBODY:
                header += owner + _CHECK.pack(checksum(owner))
            block[: len(header)] = header
            files.write(fd, [block], 0)
        except OSError as error:
            files.close(fd)
            files.remove(name)
            if direct and error.errno == errno.EINVAL:
                return cls._refused(files, number, size, owner)
            raise
        return cls(files, number, fd, identity, direct, size, owner)

    @classmethod
    def _refused(cls, files: Files, number: int, size: int, owner: bytes) -> Segment:
        with contextlib.suppress(FileNotFoundError):
            files.remove(cls.file_name(number))  # some systems make the file, then refuse
        return cls.create(files, number, size, False, owner)

    @classmethod
    def open(cls, files: Files, number: int, direct: bool) -> Segment | Outcome:
        """A segment that is there, or what is wrong with its header. OSError: it cannot be read."""
        try:
            fd = files.open(cls.file_name(number), create=False, direct=direct)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return cls.open(files, number, direct=False)
        try:
            block = aligned_bytes(BLOCK)
            outcome = Outcome.SHORT
            if files.read(fd, [block], 0) == BLOCK:
                magic, version, identity, told = _HEADER.unpack_from(block)
                (check,) = _CHECK.unpack_from(block, _HEADER.size)
                if magic == _MAGIC and version != SEGMENT_VERSION:
                    outcome = Outcome.VERSION
                elif magic != _MAGIC or told != number or check != checksum(block[: _HEADER.size]):
                    outcome = Outcome.CORRUPT
                else:
                    owner = bytes(block[_OWNER_AT : _OWNER_AT + len(NOBODY)])
                    (check,) = _CHECK.unpack_from(block, _OWNER_AT + len(owner))
                    owner = owner if check == checksum(owner) else NOBODY
                    return cls(files, number, fd, identity, direct, files.size(fd), owner)
        except OSError:
            files.close(fd)
            raise
        files.close(fd)
        return outcome

    def records(self) -> Iterator[Record]:
        """Every record that a frame names, in the order of writing; leaves `end` after the last frame.

        Costs a read of the heads. After a frame that is damaged (not: nothing was written there) it looks on for
        the next one, which costs a read of what lies between.
        """
        at = BLOCK
        while at < self.size:
            frame = self._frame(at)
            if frame is None:
                at = self._next_frame(at)
                continue
            heads, body, stop = frame
            for head in heads:
                yield Record(self, body, head)
                body += aligned(head.body_bytes)
            at = stop
            self.end = min(stop, aligned(self.size))

    def _frame(self, at: int) -> tuple[list[Head], int, int] | None:
        """The heads of the frame at `at`, where its bodies begin, where it stops; None: there is no whole one."""
        room = aligned_bytes(BLOCK)
        if self._files.read(self.fd, [room], at) < BLOCK:
            return None
        magic, version, _, identity, told, count, heads_bytes, bodies = _FRAME.unpack_from(room)
        if (magic, version, identity, told) != (_FRAME_MAGIC, SEGMENT_VERSION, self.id, at):
            return None
        used = _FRAME.size + heads_bytes + _CHECK.size
        if heads_bytes > MOST_HEADS or at + used > aligned(self.size):
            return None
        if used > BLOCK:
            room = aligned_bytes(used)
            if self._files.read(self.fd, [room[: aligned(used)]], at) < aligned(used):
                return None
        data = room[:used]
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
        """The next block after `at` that looks like a frame of this segment, or the file's end."""
        room = aligned_bytes(_SCAN_BYTES)
        mark = _FRAME_MAGIC + struct.pack("<HH", SEGMENT_VERSION, 0) + self.id
        at += BLOCK
        while at < self.size:
            got = self._files.read(self.fd, [room], at)
            if got <= 0 or bytes(room[:got]).count(0) == got:  # a megabyte of nothing: never written
                break
            for step in range(0, got - BLOCK + 1, BLOCK):
                if bytes(room[step : step + len(mark)]) == mark:
                    return at + step
            at += max(BLOCK, got // BLOCK * BLOCK)
        return self.size

    def append(self, frame: Frame) -> None:
        """Writes a whole frame. OSError: what follows must go to another segment."""
        frame.place(self, self.end)
        self._files.write(self.fd, [frame.block, *frame.bodies], self.end)
        self.end += frame.span

    def fits(self, frame: Frame) -> bool:
        return self.end + frame.span <= self.size

    def reopen(self, size: int) -> None:
        """Room for more frames after those that are there, and nothing else in it."""
        self._files.truncate(self.fd, self.end)
        self._files.allocate(self.fd, size)
        self.size = size

    def sync(self) -> None:
        self._files.sync(self.fd)

    def seal(self) -> None:
        """Gives back the room it did not use."""
        if self.end < self.size:
            self._files.truncate(self.fd, self.end)
            self.size = self.end

    def remove(self) -> None:
        """The file leaves the directory; the descriptor stays for who is reading."""
        self._files.remove(self.file_name(self.number))

    def retire(self) -> int:
        """The descriptor to close, once the segment is `removed` and nobody reads it; else -1. Under the tier's
        lock; the closing, which may take long where it frees a file, is not."""
        fd = self.fd if self.removed and not self.readers else -1
        if fd >= 0:
            self.fd = -1
        return fd
