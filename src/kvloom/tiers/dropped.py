"""A disk tier's list of what was dropped: it keeps objects whose bytes are still in a segment from coming back.

Lines of key, segment and offset, each with a checksum: copies of the key up to that place do not count. Only appended to, and
written anew when a tier opens and some of them have left the disk. Knows no segments.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .checks import checksum
from .files import Files
from .tier import KEY_BYTES

__all__ = ["Dropped", "Gone"]

Gone = Sequence[tuple[bytes, int, int]]
"""Keys, and the segment and offset where each was."""
_LINE = struct.Struct(f"<{KEY_BYTES}sQQQ")
_NAME = "dropped"
_READ_LINES = 16384  # in memory at once


class Dropped:
    """The file of one directory. Every call opens it; OSError: the disk's words."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def add(self, gone: Gone) -> None:
        """These do not come back with the next opening, and the disk has heard of it."""
        lines = []
        for key, number, offset in gone:
            line = _LINE.pack(key, number, offset, 0)[:-8]
            lines.append(line + checksum(line).to_bytes(8, "little"))
        fd = self._open()
        try:
            whole = self._files.size(fd) // _LINE.size * _LINE.size  # not after a line cut short
            self._files.write(fd, [b"".join(lines)], whole)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def read(self) -> dict[bytes, tuple[int, int]]:
        """key → the last place at which it was dropped."""
        dead: dict[bytes, tuple[int, int]] = {}
        data, start = bytearray(_READ_LINES * _LINE.size), 0
        fd = self._open()
        try:
            while got := self._files.read(fd, [data], start):
                if data.count(0, 0, got) == got:  # never written: a file may say any size
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
        """Forgets all others."""
        fd = self._open()
        try:
            # Cut first: losing this in a crash lets a dropped page come back, never a wrong one.
            self._files.truncate(fd, 0)
        finally:
            self._files.close(fd)
        if dead:
            self.add([(key, *place) for key, place in dead.items()])

    def _open(self) -> int:
        try:
            return self._files.open(_NAME, create=False, direct=False)
        except FileNotFoundError:
            return self._files.open(_NAME, create=True, direct=False)
