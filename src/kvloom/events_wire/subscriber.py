"""Follows the events of one worker. This is the router's side.

    received after batch n            action
    batch n+1                         apply it
    a later batch                     replay the missing batches; if the worker does not have them, get a snapshot
    an earlier batch, newer time      the worker restarted: get a snapshot
    another earlier batch             a duplicate: ignore it
    first contact                     get a snapshot, because the worker may have pages already

If no snapshot is available, the pages of the worker are removed from the index. If the worker did not answer at all, the
subscriber asks again later, and applies new batches until then. A wrong entry of the index can only make a worker
recompute a prefix. It never changes the generated tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from .curve import CurveKey
from .messages import AllBlocksCleared, EventBatch, EventDecoder
from .publisher import END, SNAPSHOT

__all__ = ["Followed", "Subscriber"]

log = logging.getLogger("kvloom.events")
REPLAY_SECONDS = 5.0
RETRY_SECONDS, LONGEST_RETRY = 5.0, 40.0
"""Seconds until the next request for a snapshot, if the worker did not answer. The pause doubles up to the second."""
BATCHES_PER_TURN = 64
"""The subscriber lets other tasks of the event loop run after this many batches."""


@dataclass(slots=True)
class Followed:
    """Counts of one followed worker.

    - `gaps` counts breaks in the sequence numbers, and `invalid` counts messages that cannot be read.
    - `retries` counts repeated requests for a snapshot that the worker did not answer.
    - `is_synced` states that the index has all pages that the worker published.
    """

    batches: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    snapshots: int = 0
    retries: int = 0
    invalid: int = 0
    is_synced: bool = False


class Subscriber:
    """Follows one worker. `await Subscriber(...).run()` runs until it is cancelled, and passes each batch to
    `apply`, in order.

    If a batch contains AllBlocksCleared, `apply` must remove the worker's pages. An invalid message is counted and
    raises no error. If the worker publishes with a key, `key` must be the same key."""

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        apply: Callable[[EventBatch], None],
        topic: str = "",
        key: CurveKey | None = None,
    ) -> None:
        self.counts, self._key = Followed(), key
        self._endpoint, self._replay, self._apply, self._topic = endpoint, replay, apply, topic
        self._decoder = EventDecoder()
        self._last: int | None = None
        self._last_at = 0.0
        self._retry_at, self._pause = math.inf, RETRY_SECONDS
        """Time of the event loop at which the next request for a snapshot is due, and the pause before it."""

    async def run(self) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        if self._key is not None:
            self._key.protect_client(socket)
        socket.connect(self._endpoint)
        try:
            await self._resync(context)
            while True:
                try:
                    async with asyncio.timeout_at(None if self._retry_at == math.inf else self._retry_at):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    await self._retry(context)
                    continue
                for _ in range(BATCHES_PER_TURN):
                    await self._take(context, frames)
                    try:
                        frames = await socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                await asyncio.sleep(0)
        finally:
            context.destroy(linger=0)

    async def _take(self, context: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counts.invalid += 1
            return
        sequence = int.from_bytes(frames[1], "big")
        last = self._last
        if sequence == (0 if last is None else last + 1):
            self._deliver(sequence, frames[2])
        elif last is not None and sequence <= last and not self._is_newer(frames[2]):
            return  # a duplicate after a replay or snapshot
        else:
            self.counts.gaps += last is not None
            is_restart = last is not None and sequence <= last
            if is_restart or not await self._fill(context, sequence):
                await self._resync(context)
                if self._last is None or sequence == self._last + 1:
                    self._deliver(sequence, frames[2])
            elif self._last is not None and sequence == self._last + 1:
                self._deliver(sequence, frames[2])

    def _is_newer(self, payload: bytes) -> bool:
        """Return whether a batch was sent later than the last applied batch. A later batch with a smaller sequence
        number means that the worker has restarted."""
        try:
            return self._decoder.decode(payload).ts > self._last_at
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    async def _fill(self, context: Any, sequence: int) -> bool:
        """Apply the batches between the last applied batch and `sequence`, from a replay. Return False if some of
        them are no longer available."""
        if self._last is None:
            return False
        first = self._last + 1
        parts = await self._ask(context, first.to_bytes(8, "big"))
        if not parts or parts[0][0] != first:
            return False
        self.counts.replays += 1
        for number, payload in parts:
            if number == self._last + 1:
                self._deliver(number, payload)
        return self._last + 1 >= sequence

    async def _resync(self, context: Any) -> None:
        """Replace the worker's pages in the index by a snapshot. vLLM offers no snapshots. For vLLM, all past batches
        that are still available are applied instead."""
        self.counts.is_synced = False
        self._clear()
        self._pause = RETRY_SECONDS
        await self._load(context)

    async def _retry(self, context: Any) -> None:
        """Ask for a snapshot again, after the worker did not answer. The index keeps the pages of the batches since then
        until the worker answers."""
        self.counts.retries += 1
        self._pause = min(2 * self._pause, LONGEST_RETRY)
        await self._load(context)

    def _clear(self) -> None:
        self._last = None
        self._apply(EventBatch(0.0, [AllBlocksCleared()]))

    async def _load(self, context: Any) -> None:
        """Request a snapshot, or else all past batches, and replace the worker's pages by them. If no snapshot arrives in
        time, and the past batches are not complete either, set the time of the next attempt."""
        self._retry_at = math.inf
        parts, is_complete = await self._ask(context, SNAPSHOT), True
        if parts and parts[0][1]:
            self.counts.snapshots += 1
        else:
            is_silent = parts is None and self._replay is not None
            parts = await self._ask(context, (0).to_bytes(8, "big"))
            is_complete = not is_silent or any(number == 0 for number, _ in parts or [])
        if not is_complete:
            self._retry_at = asyncio.get_running_loop().time() + self._pause
        if parts or is_complete:
            self._clear()
            for number, payload in parts or []:
                self._deliver(number, payload)
        self.counts.is_synced = is_complete

    def _deliver(self, sequence: int, payload: bytes) -> None:
        self._last = sequence
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.counts.invalid += 1
            log.warning("an event batch of %s is invalid: %s", self._endpoint, error)
            return
        self._last_at = max(self._last_at, batch.ts)
        self.counts.batches += 1
        self.counts.events += len(batch.events)
        self._apply(batch)

    async def _ask(self, context: Any, start: bytes) -> list[tuple[int, bytes]] | None:
        """Request a replay from sequence number `start`, and return its messages. Return None if the worker has no
        replay socket or does not answer in time."""
        import zmq

        if self._replay is None:
            return None
        socket = context.socket(zmq.DEALER)
        if self._key is not None:
            self._key.protect_client(socket)
        socket.connect(self._replay)
        parts: list[tuple[int, bytes]] = []
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                await socket.send_multipart((b"", start))
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) != 3 or frames[1] == END:
                        return parts
                    parts.append((int.from_bytes(frames[1], "big"), frames[2]))
        except TimeoutError:
            return None
        finally:
            socket.close(linger=0)
