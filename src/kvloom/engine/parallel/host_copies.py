"""Copies between the pools of all ranks and the host tier, which is memory that all ranks share.

    rank 0   HostCopies   sends each copy as a message, and counts the answers
    others   RankHost     makes the copies in the order of the messages, between steps

A page in the host tier is a page of the whole model. It is complete when every rank has copied its part.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import PageGroup, PoolLayout, TensorPart
from kvloom.engine.offload import HostPages, Ids, pin_memory
from kvloom.models.sharding import RankError, Shard
from kvloom.tiers.host import SharedMemory, map_shared_memory

from .messages import CopyHost, ShareHost

__all__ = ["HostCopies", "RankHost"]

POLL_SECONDS = 0.001
SHARE_SECONDS = 600.0
"""Longest time until a rank has mapped the memory of the host tier, in seconds. On a GPU, the rank also pins the memory
in this time."""


class HostCopies:
    """On rank 0, starts copies on ranks 1 to N-1 and counts the finished ones. Implements `RankCopies` of the offload
    manager. Another thread may call `copied`."""

    def __init__(
        self,
        count: int,
        send: Callable[[ShareHost | CopyHost], None],
        fail: Callable[[str], None],
        failure: Callable[[], str | None],
        seconds: float,
    ) -> None:
        """`send` sends a message to all ranks. `fail` records why the group cannot continue, and `failure` returns the
        recorded reason. `seconds` is the longest time of a copy."""
        self.count = count
        self._send, self._fail, self._failure, self._seconds = send, fail, failure, seconds
        self._sent = 0
        self._done = [0] * (count - 1)
        self._pending: deque[tuple[int, float]] = deque()  # unfinished copies: their numbers and deadlines

    @property
    def has_failed(self) -> bool:
        """Whether a rank has stopped, so that copies may never end."""
        return self._failure() is not None

    def share(self, memory: SharedMemory) -> None:
        """Let all ranks map the host tier, and wait until they have done so. Raises RankError if a rank has stopped,
        or has not mapped it after SHARE_SECONDS."""
        number = self._start(ShareHost(memory.path, memory.token, memory.size), SHARE_SECONDS)
        while not self.is_done(number):
            self.check()
            time.sleep(POLL_SECONDS)

    def offload(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> int:
        """Let all ranks copy pages of a layer group to the host tier, after the steps that were sent before. Return the
        number of the copy. Does not wait."""
        return self._start(CopyHost(False, group.index, _bytes(pages), _bytes(offsets)))

    def load(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64]) -> int:
        """Let all ranks copy from the host tier to pages of a layer group. Otherwise like `offload`."""
        return self._start(CopyHost(True, group.index, _bytes(pages), _bytes(offsets)))

    def is_done(self, number: int) -> bool:
        """Return whether all ranks have made the copy with this number."""
        return min(self._done) >= number

    def copied(self, rank: int, number: int) -> None:
        """Record that a rank has made its copies up to `number`."""
        self._done[rank - 1] = number

    def fail(self, reason: str) -> None:
        """Record why the group cannot continue."""
        self._fail(reason)

    def check(self) -> None:
        """Raise RankError if a rank has stopped, or takes longer than the time limit for a copy."""
        while self._pending and self.is_done(self._pending[0][0]):
            self._pending.popleft()
        if self._pending and time.monotonic() > self._pending[0][1]:
            rank = 1 + min(range(len(self._done)), key=self._done.__getitem__)
            self._fail(f"rank {rank} has not copied pages in time")
        if (reason := self._failure()) is not None:
            raise RankError(f"ranks: {reason}: restart the engine")

    def _start(self, message: ShareHost | CopyHost, seconds: float | None = None) -> int:
        self.check()
        self._send(message)
        self._sent += 1
        self._pending.append((self._sent, time.monotonic() + (seconds or self._seconds)))
        return self._sent


def _bytes(ids: Ids) -> bytes:
    return np.asarray(ids, np.int64).tobytes()


class RankHost:
    """The host tier in the process of a rank. `shard` is the rank's part of the weights. `report` sends the number of
    the last finished copy to rank 0. On a GPU, copies end later. A separate thread then calls `report`, or `fail` if a
    copy fails.
    """

    def __init__(
        self,
        layout: PoolLayout,
        buffer: torch.Tensor,
        shard: Shard,
        report: Callable[[int], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._layout, self._buffer, self._shard = layout, buffer, shard
        self._report, self._fail = report, fail
        self._pages: HostPages | None = None
        self._count = 0
        self._events: SimpleQueue[Any] | None = None
        if buffer.is_cuda:
            self._events = SimpleQueue()
            threading.Thread(target=self._wait, name="kvloom-copies", daemon=True).start()

    def run(self, message: ShareHost | CopyHost) -> None:
        """Map the host tier, or copy pages. Raises ValueError if the memory cannot be mapped or pinned."""
        event = None
        if isinstance(message, ShareHost):
            self._share(message)
        else:
            event = self._copy(message)
        if self._events is None:
            self._count += 1
            self._report(self._count)
        else:
            self._events.put(event)

    def _share(self, message: ShareHost) -> None:
        arena = map_shared_memory(message.path, message.token, message.size)
        if arena is None or not arena.flags.writeable:
            raise ValueError("the memory of the host tier cannot be mapped: run all ranks as the same user")
        if self._buffer.is_cuda:
            pin_memory(arena)
        part = TensorPart(self._shard.rank, self._shard.count)
        self._pages = HostPages(self._layout, self._buffer, arena, part=part)

    def _copy(self, message: CopyHost) -> Any:
        assert self._pages is not None
        pages, offsets = (np.frombuffer(each, np.int64) for each in (message.pages, message.offsets))
        group = self._layout.groups[message.group]
        if message.is_load:
            return self._pages.load(group, pages, offsets)
        event = self._pages.offload(group, pages, offsets)
        self._pages.wait(event)  # later steps may overwrite the pages
        return event

    def _wait(self) -> None:
        """Thread on a GPU: wait for each copy in turn, and report its number to rank 0."""
        assert self._events is not None
        try:
            while True:
                event = self._events.get()
                if event is not None:
                    event.synchronize()
                self._count += 1
                self._report(self._count)
        except Exception as error:  # noqa: BLE001 - rank 0 reports every error
            self._fail(error)
