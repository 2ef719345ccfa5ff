"""Publishes the events of a cache. This is the worker's side.

    cache emits an event ──▶ listener (engine thread) ──▶ flush: one batch per step ──▶ bounded queue
                                    │                                                     │
                                    ▼                                                     ▼ publisher thread
                              mirror of all hashes ──▶ snapshot, on request         PUB socket, replay buffer

A step never waits for the publisher thread. If the queue is full, the batch is dropped and counted. The sequence number
of a dropped batch is not used again. Subscribers therefore notice the gap and request a snapshot. Pages of images are
not published.

Pages in host memory and in disk tiers are published with the medium CPU or DISK (`add_tier`). As in vLLM, these events
have no parent and no tokens, unless `EventSettings.tier_tokens` is set. A block that moves from the pool to host memory
causes two events: stored in CPU, and removed from GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvloom.core import (
    HASH_TOKENS,
    BlockRemoved as Removed,
    BlockStored as Stored,
    Event,
    HashIndex,
    KVCache,
    PageGroup,
)

from .block_tokens import BlockTokens
from .curve import CurveKey
from .messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireEvent,
    WireHash,
    encode_batch,
    raw_tokens,
    wire_hashes,
)
from .settings import EventSettings, is_local
from .tier_blocks import TierBlocks

__all__ = ["END", "SNAPSHOT", "WirePublisher"]

log = logging.getLogger("kvloom.events")
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay."""
SNAPSHOT = (-2).to_bytes(8, "big", signed=True)
"""A replay request whose start is this number asks for a snapshot instead of past batches."""
MAX_QUEUED_BATCHES = 20_000
REPLAY_BATCHES = 10_000
SNAPSHOT_BLOCKS = 4096
"""A message of a snapshot ends when it has at least this many blocks."""
POLL_SECONDS = 0.05
MEDIUM_NAMES = {"device": "GPU", "host": "CPU", "disk": "DISK"}
KIND_NAMES = {
    "full": "full_attention",
    "sliding": "sliding_window",
    "chunked": "chunked_local_attention",
    "state": "mamba",
}


class WirePublisher:
    """Publishes a cache's events. The engine's thread calls `flush` after every step, and `close` at the end. Events of
    the cache contain the text that salts the block hashes of a LoRA adapter. `adapter_name` maps this text to the name
    that is published.

    Raises OSError if an address is unavailable, and ValueError if the key file is invalid."""

    def __init__(
        self,
        cache: KVCache,
        settings: EventSettings,
        adapter_name: Callable[[str], str] = lambda adapter: adapter,
    ) -> None:
        import zmq

        self.settings, self._adapter_name = settings, adapter_name
        self.published = self.dropped = 0
        """Batches sent, and batches dropped because the queue was full."""
        self._groups = {
            group.index: group
            for group in cache.layout.groups
            if group.spec.axis == "text" and group.spec.lifetime == "target"
        }
        self._order = sorted(self._groups, key=lambda i: (self._groups[i].spec.kind != "full", i))
        self._has_states = any(group.spec.unit == "state" for group in self._groups.values())
        self._roots = cache.roots
        self._mirror: HashIndex[bytes] = HashIndex(list(self._groups.values()))
        self._tiers: list[TierBlocks] = []
        self._tokens = BlockTokens(self._order[0]) if settings.tier_tokens and self._order else None
        self._pending: list[tuple[Event, bool]] = []  # each event, and whether its parent is a root
        self._lock = threading.Lock()  # guards the mirror, the sequence and the queue
        self._queue: deque[tuple[int, float, list[tuple[Event, bool]]]] = deque()
        self._sequence = 0
        self._wake, self._closing = threading.Event(), False
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        key = None if settings.key is None else CurveKey.read(settings.key)
        for address in (settings.endpoint, settings.replay):
            if key is None and address is not None and not is_local(address):
                log.warning(
                    "events on %s are neither encrypted nor authenticated: give --kv-events-key FILE, or let a firewall "
                    "admit only routers",
                    address,
                )
        self._context = zmq.Context()
        self._authenticator = None if key is None else key.open_authenticator(self._context)
        try:
            self._socket = _bound(self._context, zmq.PUB, settings.endpoint, key)
            self._replay = (
                None if settings.replay is None else _bound(self._context, zmq.ROUTER, settings.replay, key)
            )
        except OSError:
            self._end(linger=0)
            raise
        self._unsubscribe = cache.events.subscribe(self._on_event)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def add_tier(self, blocks: TierBlocks) -> None:
        """Also publish the blocks of this tier from now on."""
        self._tiers.append(blocks)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Stored):
            if event.tail_tokens and not self._has_states:
                return  # a partial block without a snapshot is useless: no prompt can resume there
            self._pending.append((event, event.parent in self._roots))
        else:
            self._pending.append((event, False))

    def flush(self) -> None:
        """Queue the events since the last call as one batch. Does not block."""
        if not self._pending and not self._tiers:
            return
        events, self._pending = self._pending, []
        with self._lock:
            self._reflect(events)
            for tier in self._tiers:
                events += [(event, True) for event in tier.poll()]
            if not events:
                return
            sequence = self._sequence
            self._sequence += 1
            if len(self._queue) >= MAX_QUEUED_BATCHES:
                self.dropped += 1
                return
            self._queue.append((sequence, time.time(), events))
        self._wake.set()

    def _reflect(self, events: Iterable[tuple[Event, bool]]) -> None:
        """Apply events to the mirror, which is the index of all published hashes. Takes about 0.2 µs per block."""
        for event, _ in events:
            groups = [index for index in event.groups if index in self._groups]
            if not groups:
                continue
            if isinstance(event, Stored):
                self._mirror.stored(event.parent, event.hashes, groups, event.medium, event.tail_tokens)
            else:
                self._mirror.dropped(event.hashes, groups, event.medium)

    def close(self, seconds: float = 1.0) -> None:
        """Send the queued batches and close the sockets. Waits at most `seconds`."""
        self._unsubscribe()
        self.flush()
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)

    # -- the publisher thread -----------------------------------------------------------------

    def _run(self) -> None:
        import zmq

        try:
            while not self._closing or self._queue:
                self._send_queued()
                if self._replay is not None and self._replay.poll(0):
                    try:
                        self._answer(self._replay.recv_multipart())
                    except zmq.ZMQError as error:  # the client is gone
                        log.warning("a replay failed: %s", error)
                if not self._closing:
                    self._wake.wait(POLL_SECONDS)
                    self._wake.clear()
        finally:
            self._end(linger=200)

    def _end(self, linger: int) -> None:
        """Close the sockets. Waits up to `linger` milliseconds until queued messages are sent."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=linger)

    def _send_queued(self) -> None:
        while self._queue:
            sequence, at, events = self._queue.popleft()
            payload = self._encoded(at, self._wire_events(events))
            self._socket.send_multipart((self.settings.topic.encode(), sequence.to_bytes(8, "big"), payload))
            self._buffer.append((sequence, payload))
            self.published += 1

    def _answer(self, frames: list[bytes]) -> None:
        """Answer a replay request. `frames` are the client's address, an empty frame, and the first sequence number
        that the client needs, or SNAPSHOT. The last message of the answer has the sequence number END."""
        if len(frames) != 3 or len(frames[2]) != 8 or self._replay is None:
            log.warning(
                "a replay request with %d frames is invalid: send an empty frame and 8 bytes of sequence number",
                len(frames),
            )
            return
        client, _, start = frames
        if start == SNAPSHOT:
            parts = self._snapshot()
        else:
            first = int.from_bytes(start, "big")
            parts = [(sequence, payload) for sequence, payload in list(self._buffer) if sequence >= first]
        for sequence, payload in parts:
            self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", END, b""))

    def _snapshot(self) -> list[tuple[int, bytes]]:
        """Return a snapshot: messages from which a subscriber rebuilds the index of this worker. Each message is a
        sequence number and a payload. All of them have the sequence number of the last batch that the snapshot
        contains.

        Holds the lock for about 0.1 µs per block.
        """
        with self._lock:
            last = self._sequence - 1
            entries = self._mirror.entries()
            in_tiers = [blocks for tier in self._tiers for blocks in tier.blocks()]
        if last < 0:
            return []
        now, parts = time.time(), []
        events: list[WireEvent] = [AllBlocksCleared()]
        count = 0
        for parent, hashes, groups, place, tail_tokens in self._mirror.chains(entries):
            stored = Stored(parent, tuple(hashes), groups, place, tail_tokens)
            events += self._wire_stored(stored, parent in self._roots)
            count += len(hashes)
            if count >= SNAPSHOT_BLOCKS:
                parts.append(self._encoded(now, events))
                events, count = [], 0
        if events:
            parts.append(self._encoded(now, events))
        for blocks in in_tiers:
            for start in range(0, len(blocks.hashes), SNAPSHOT_BLOCKS):
                part = replace(blocks, hashes=blocks.hashes[start : start + SNAPSHOT_BLOCKS])
                parts.append(self._encoded(now, self._wire_stored(part, True)))
        return [(last, payload) for payload in parts]

    def _encoded(self, at: float, events: list[WireEvent]) -> bytes:
        """Return the payload of a batch with these events. `at` is the Unix time of the batch."""
        return encode_batch(EventBatch(at, events, self.settings.rank), self.settings.encoding)

    def _wire_events(self, events: list[tuple[Event, bool]]) -> list[WireEvent]:
        found: list[WireEvent] = []
        for event, is_first in events:
            if isinstance(event, Stored):
                parts = [(event, is_first)] if self._tokens is None else self._tokens.stored(event, is_first)
                for part, starts in parts:
                    found += self._wire_stored(part, starts)
            else:
                if self._tokens is not None:
                    self._tokens.removed(event)
                found += self._wire_removed(event)
        return found

    def _hashes(self, hashes: Iterable[bytes]) -> list[WireHash]:
        return list(hashes) if self.settings.hashes == "bytes" else list(wire_hashes(list(hashes)))

    def _wire_stored(self, event: Stored, is_first: bool) -> list[WireEvent]:
        """Return the events to send for one stored event of the cache: one for each layer group, the full-attention
        group first. If `is_first`, the first block starts a prompt, and the events have no parent."""
        medium = MEDIUM_NAMES.get(event.medium, "STORAGE")
        hashes = self._hashes(event.hashes)
        parent = None if is_first else self._hashes([event.parent])[0]
        tokens = raw_tokens(event.tokens)
        return [
            BlockStored(
                hashes,
                parent,
                tokens,
                event.tail_tokens or HASH_TOKENS,
                medium=medium,
                lora_name=self._adapter_name(event.adapter) if event.adapter else None,
                group_idx=index,
                kv_cache_spec_kind=KIND_NAMES[self._groups[index].spec.kind],
                kv_cache_spec_sliding_window=_window(self._groups[index]),
            )
            for index in self._order
            if index in event.groups
        ]

    def _wire_removed(self, event: Removed) -> list[WireEvent]:
        medium = MEDIUM_NAMES.get(event.medium, "STORAGE")
        hashes = self._hashes(event.hashes)
        return [BlockRemoved(hashes, medium, index) for index in self._order if index in event.groups]


def _window(group: PageGroup) -> int | None:
    return group.spec.visibility.size if group.spec.visibility.windowed else None


def _bound(context: Any, kind: int, address: str, key: CurveKey | None) -> Any:
    import zmq

    socket = context.socket(kind)
    if key is not None:
        key.protect_server(socket)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.LINGER, 200)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise OSError(f"cannot publish events on {address}: {error}; choose another address") from None
    return socket
