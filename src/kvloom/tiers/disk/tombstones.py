"""The list of objects that a disk tier dropped. Without this list, the tier would find these objects again when it is
next opened, because their bytes are still in a segment.

Each line has a key, a segment, an offset and a checksum. Segment and offset give a position in the order of writes.
Copies of the key up to this position are dropped. A copy that was written later is valid. The file is append-only. When
a tier is opened, it removes the lines whose copies are no longer on disk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvloom.tiers.encoding import checksum
from kvloom.tiers.tier import KEY_BYTES

from .files import Files

__all__ = ["DroppedRecords", "Tombstones"]

DroppedRecords = Sequence[tuple[bytes, int, int]]
"""(key, segment number, offset in the segment) of each dropped object."""
_LINE = struct.Struct(f"<{KEY_BYTES}sQQQ")
_NAME = "dropped"
_READ_LINES = 16384  # lines read at once


class Tombstones:
    """The tombstone file of one directory. Every call opens the file and may raise OSError."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def add(self, dropped: DroppedRecords) -> None:
        """Append one line per dropped object to the file, and sync the file."""
        lines = []
        for key, number, offset in dropped:
            line = _LINE.pack(key, number, offset, 0)[:-8]
            lines.append(line + checksum(line).to_bytes(8, "little"))
        fd = self._open()
        try:
            whole = (
                self._files.size(fd) // _LINE.size * _LINE.size
            )  # starts a new line, because the last line may be incomplete
            self._files.write(fd, [b"".join(lines)], whole)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def read(self) -> dict[bytes, tuple[int, int]]:
        """Return a dictionary from each dropped key to (segment, offset). Copies of the key up to this position are
        dropped."""
        dead: dict[bytes, tuple[int, int]] = {}
        data, start = bytearray(_READ_LINES * _LINE.size), 0
        fd = self._open()
        try:
            while got := self._files.read(fd, [data], start):
                if (
                    data.count(0, 0, got) == got
                ):  # a sparse file may have any size; the rest of it was never written
                    break
                for at in range(0, got - _LINE.size + 1, _LINE.size):
                    key, number, offset, check = _LINE.unpack_from(data, at)
                    if check == checksum(bytes(data[at : at + _LINE.size - 8])):
                        dead[key] = max(dead.get(key, (-1, -1)), (number, offset))
                start += len(data)
        finally:
            self._files.close(fd)
        return dead

    def rewrite(self, dead: dict[bytes, tuple[int, int]]) -> None:
        """Replace all lines of the file by `dead`, a dictionary as in `read`."""
        fd = self._open()
        try:
            # Truncate first: a crash here can restore a dropped page, but never a wrong page.
            self._files.truncate(fd, 0)
            # An old line must not reappear: it could refer to a later segment with the same number.
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        if dead:
            self.add([(key, *position) for key, position in dead.items()])

    def _open(self) -> int:
        try:
            return self._files.open(_NAME, create=False, direct=False)
        except FileNotFoundError:
            return self._files.open(_NAME, create=True, direct=False)
