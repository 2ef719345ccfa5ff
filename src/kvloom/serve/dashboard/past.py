"""The past hour of a dashboard, as frames. A frame is the state of the dashboard at one time, as a compressed JSON
document without curves. A frame is stored every FRAME_SECONDS. All frames together take at most MAX_BYTES.

    now - 1 h                                               now
    ├──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┬──┤      one frame per mark
"""

from __future__ import annotations

import bisect
import zlib
from collections import deque
from typing import Any, NamedTuple

__all__ = ["FRAME_SECONDS", "PAST_SECONDS", "Past"]

FRAME_SECONDS = 15.0
PAST_SECONDS = 3600.0
MAX_BYTES = 16 << 20
"""Largest number of compressed bytes of all frames. Above it, the oldest frames are dropped."""


class _Frame(NamedTuple):
    at: float
    data: bytes


class Past:
    """The frames of the last PAST_SECONDS. Not thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._frames: deque[_Frame] = deque()
        self._max_bytes, self._bytes = max_bytes, 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def last(self) -> float:
        """The time of the newest frame, or 0."""
        return self._frames[-1].at if self._frames else 0.0

    def add(self, at: float, document: bytes) -> None:
        """Add a frame with the time `at`. Times must not decrease from call to call. Compresses the document, which
        takes about 1 ms for 100 KB."""
        self._append(_Frame(at, zlib.compress(document, 1)))

    def repeat(self, at: float) -> None:
        """Add a frame with the time `at` and the document of the newest frame. The new frame shares this document, so
        it needs no memory."""
        if self._frames:
            self._append(_Frame(at, self._frames[-1].data))

    def find(self, at: float) -> tuple[float, bytes] | None:
        """Return time and document of the last frame at or before the time `at`. If all frames are later, use the
        oldest frame. Return None if there is no frame."""
        if not self._frames:
            return None
        after = bisect.bisect_right(self._frames, at, key=lambda frame: frame.at)
        frame = self._frames[max(0, after - 1)]
        return frame.at, zlib.decompress(frame.data)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the times of the oldest and the newest frame (null if there is none), the seconds
        between two frames, and the bytes of all frames in memory.
        """
        first = self._frames[0].at if self._frames else None
        return {
            "from": first,
            "until": self.last or None,
            "seconds": FRAME_SECONDS,
            "bytes": self._bytes,
        }

    def _append(self, frame: _Frame) -> None:
        if not self._frames or self._frames[-1].data is not frame.data:
            self._bytes += len(frame.data)
        self._frames.append(frame)
        while len(self._frames) > 1 and (
            self._bytes > self._max_bytes or self._frames[0].at < frame.at - PAST_SECONDS
        ):
            oldest = self._frames.popleft()
            if self._frames[0].data is not oldest.data:
                self._bytes -= len(oldest.data)
