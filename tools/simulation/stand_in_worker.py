"""A worker for the simulated router. It answers in HTTP over connections in memory, and publishes its blocks.

    router                             stand-in
    loop.create_connection             Connection: bytes of HTTP, in parts of any size
    aiohttp session                    Session: health checks
    zmq.asyncio.Context                EventContext: batches in the wire format, replays and snapshots

The token after a prompt is a function of the prompt and the tokens so far, so that every worker gives the same answer.
All delays are multiples of 1/16 s. Therefore, many things happen at the same time.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import aiohttp
import zmq

from kvloom.core import HASH_TOKENS, hash_chain, root_hash, token_bytes
from kvloom.events_wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireEvent,
    encode_batch,
    raw_tokens,
    wire_hashes,
)
from kvloom.events_wire.publisher import END, SNAPSHOT

__all__ = [
    "FAULTS",
    "MODEL",
    "EventContext",
    "Faults",
    "Session",
    "StandInWorker",
    "answer_tokens",
    "block_hashes",
]

MODEL = "stand-in"
TICK = 1 / 16
FAULTS = {
    "draining": "the worker answers 503",
    "busy": "the worker answers 429",
    "reset": "the connection breaks in the answer",
    "cut": "the worker closes the connection in the answer",
    "stall": "no further byte of the answer arrives",
    "engine_died": "the stream has an error event",
    "slow": "the next part of the answer takes seconds",
    "slow_connect": "a connection takes seconds",
    "failed_check": "a health check fails",
    "slow_check": "a health check takes seconds",
    "lost_batch": "a batch of events is lost",
    "repeated_batch": "a batch of events arrives twice",
    "late_batch": "a batch of events arrives after later batches",
    "silent_replay": "a request for a replay or snapshot is not answered",
    "short_replay": "the worker has only the last batch for a replay",
}
"""Faults that may happen at any time, with a probability each."""


class Faults:
    """Decides with one random generator which faults happen, and counts them."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.rates: dict[str, float] = {}
        self.injected: Counter[str] = Counter()

    def happens(self, name: str) -> bool:
        if self.chance.random() >= self.rates.get(name, 0.0):
            return False
        self.injected[name] += 1
        return True

    def delay(self, *ticks: int) -> float:
        """Return one of these numbers of ticks, in seconds."""
        return self.chance.choice(ticks) * TICK


def answer_tokens(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that every worker generates after a prompt."""
    state, found = zlib.crc32(token_bytes(prompt)), []
    for _ in range(count):
        state = zlib.crc32(state.to_bytes(4, "big"))
        found.append(1 + state % 900)
    return found


def text_of(tokens: Iterable[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def block_hashes(prompt: list[int], tenant: str) -> list[int]:
    """Return the block hashes of a prompt on a worker that is kvloom."""
    return wire_hashes(hash_chain(root_hash(MODEL, tenant, "", ""), token_bytes(prompt)))


class StandInWorker:
    """One worker: its cache, its connections and its subscribers. `is_foreign` means a worker that is not kvloom. It has
    neither events nor token ids, and cannot resume an answer."""

    def __init__(self, number: int, faults: Faults, capacity: int, is_foreign: bool) -> None:
        self.host, self.is_foreign = f"worker{number}", is_foreign
        self.url = f"http://{self.host}:80"
        self.is_down = False
        self.frozen_until = 0.0
        self._faults, self._capacity = faults, capacity
        self.connections: dict[Connection, None] = {}
        self._subscribers: list[_EventSocket] = []
        self.cache: OrderedDict[int, int | None] = OrderedDict()
        """Hash and parent of each block, the least recently used first."""
        self.announced: dict[int, None] = {}
        """All block hashes that were ever published, also before restarts."""
        self._sequence = self._starts = 0
        self._buffer: list[tuple[int, bytes]] = []

    # -- life -------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Break all connections and forget everything."""
        self.is_down = True
        for connection in list(self.connections):
            connection.end(ConnectionResetError("killed"))
        self.cache.clear()
        self._sequence, self._buffer = 0, []
        self._starts += 1

    def start(self) -> None:
        self.is_down = False

    async def thaw(self) -> None:
        """Wait while the process is stopped."""
        left = self.frozen_until - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)
            await self.thaw()  # it may have been stopped again

    # -- blocks and events ------------------------------------------------------------------------

    def store(self, prompt: list[int], tenant: str) -> None:
        """Store the blocks of a prompt, evict others, and publish both as one batch."""
        if self.is_foreign:
            return
        events: list[WireEvent] = []
        parent: int | None = None
        hashes = block_hashes(prompt, tenant)[: self._capacity]
        for number, one in enumerate(hashes):
            if one not in self.cache:
                tokens = prompt[number * HASH_TOKENS : (number + 1) * HASH_TOKENS]
                events.append(_stored(one, parent, tokens))
                self.cache[one] = parent
                self.announced[one] = None
            parent = one
        for one in reversed(hashes):  # the last block of a prompt is evicted first
            self.cache.move_to_end(one)
        removed: list[int] = []
        while len(self.cache) > self._capacity:
            removed.append(self.cache.popitem(last=False)[0])
        if removed:
            events.append(BlockRemoved(list(removed), "GPU", 0))
        if events:
            self.publish(events)

    def clear(self) -> None:
        """Evict all blocks."""
        if self.cache:
            removed = list(self.cache)
            self.cache.clear()
            self.publish([BlockRemoved(list(removed), "GPU", 0)])

    def publish(self, events: list[WireEvent]) -> None:
        """Send a batch to all subscribers. Some do not get it, or get it twice or late."""
        loop = asyncio.get_running_loop()
        payload = encode_batch(EventBatch(1e9 + loop.time(), events), "map")
        frames = [b"", self._sequence.to_bytes(8, "big"), payload]
        self._buffer = [*self._buffer[-20:], (self._sequence, payload)]
        self._sequence += 1
        for socket in self._subscribers:
            if self._faults.happens("lost_batch"):
                continue
            late = self._faults.delay(8, 40, 200) if self._faults.happens("late_batch") else 0.0
            loop.call_later(late, self._deliver, socket, frames, self._starts)
            if self._faults.happens("repeated_batch"):
                again = late + self._faults.delay(0, 3, 100)
                loop.call_later(again, self._deliver, socket, frames, self._starts)

    def _deliver(self, socket: _EventSocket, frames: list[bytes], starts: int) -> None:
        if starts == self._starts:  # a connection ends with its process, and so do the batches on it
            socket.put(frames)

    def subscribe(self, socket: _EventSocket) -> None:
        self._subscribers.append(socket)

    def unsubscribe(self, socket: _EventSocket) -> None:
        if socket in self._subscribers:
            self._subscribers.remove(socket)

    def replay(self, start: bytes) -> list[list[bytes]]:
        """Return the messages of a replay from a sequence number, or of a snapshot."""
        if start == SNAPSHOT:
            events: list[WireEvent] = [AllBlocksCleared()]
            events += [_stored(one, parent, []) for one, parent in self.cache.items()]
            at = 1e9 + asyncio.get_running_loop().time()
            parts = (
                [(self._sequence - 1, encode_batch(EventBatch(at, events), "map"))] if self._sequence else []
            )
        else:
            kept = self._buffer[-1:] if self._faults.happens("short_replay") else self._buffer
            parts = [one for one in kept if one[0] >= int.from_bytes(start, "big")]
        return [[b"", number.to_bytes(8, "big"), payload] for number, payload in parts] + [[b"", END, b""]]

    # -- requests ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the reply of /kvloom/worker."""
        model = {
            "id": MODEL, "status": "ok", "hash_tokens": HASH_TOKENS, "hash_model": MODEL, "pool_bytes": self._capacity * HASH_TOKENS,
            "groups": [{"index": 0, "kind": "full", "window": 0}], "bytes_per_token": 1, "events": f"tcp://{self.host}:1",
            "replay": f"tcp://{self.host}:2", "instance": str(self._starts),
        }  # fmt: skip
        return {"models": [model], "open_requests": sum(one.is_busy for one in self.connections)}

    async def answer(self, connection: Connection, body: dict[str, Any]) -> None:
        """Answer one completion request on a connection."""
        faults = self._faults
        await asyncio.sleep(faults.delay(0, 1, 1, 2, 6))
        await self.thaw()
        for name, status, code in (("draining", 503, "draining"), ("busy", 429, "queue_full")):
            if faults.happens(name):
                error = {"error": {"message": name, "type": "server_error", "code": code}}
                await connection.send(_head(status) + _body(error))
                return
        prompt = body["prompt"]
        self.store(prompt, body.get("tenant", ""))
        tokens = answer_tokens(prompt, body["max_tokens"])
        if not body.get("stream"):
            await self._next_part(connection)
            await connection.send(_head(200) + _body({"choices": [{"index": 0, "text": text_of(tokens)}]}))
            return
        resumed = body.get("resume_token_ids") or []
        if resumed != tokens[: len(resumed)]:
            raise AssertionError(f"the router resumes after {resumed}, but the answer is {tokens}")
        await connection.send(
            _head(200) + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        parts = [resumed] if resumed else []
        rest = tokens[len(resumed) :]
        while rest:
            size = faults.chance.choice((1, 1, 1, 2, 5))
            parts.append(rest[:size])
            rest = rest[size:]
        for number, part in enumerate(parts):
            if not await self._next_part(connection):
                return
            is_last = number == len(parts) - 1
            choice: dict[str, Any] = {
                "index": 0,
                "text": text_of(part),
                "finish_reason": "length" if is_last else None,
            }
            if body.get("return_token_ids"):
                choice["token_ids"] = part
            await connection.send(
                _chunk(b"data: %s\n\n" % json.dumps({"id": self.host, "choices": [choice]}).encode())
            )
        await connection.send(_chunk(b"data: [DONE]\n\n"))
        await asyncio.sleep(faults.delay(0, 0, 1, 12))
        await connection.send(b"0\r\n\r\n")
        self.store([*prompt, *tokens], body.get("tenant", ""))

    async def _next_part(self, connection: Connection) -> bool:
        """Wait until the next part of an answer is computed. Return False if the answer has ended with an error."""
        faults = self._faults
        await asyncio.sleep(
            faults.delay(20, 100, 700) if faults.happens("slow") else faults.delay(0, 1, 1, 2)
        )
        if faults.happens("stall"):
            await asyncio.get_running_loop().create_future()
        await self.thaw()
        if faults.happens("reset"):
            connection.end(ConnectionResetError("injected"))
        elif faults.happens("cut"):
            connection.end(None)
        elif faults.happens("engine_died"):
            error = {"error": {"message": "the engine died", "type": "server_error", "code": "engine_died"}}
            await connection.send(_chunk(b"data: %s\n\n" % json.dumps(error).encode()))
            await connection.send(b"0\r\n\r\n")
            return False
        return True


def _stored(one: int, parent: int | None, tokens: list[int]) -> BlockStored:
    return BlockStored(
        [one],
        parent,
        raw_tokens(token_bytes(tokens) if tokens else b""),
        HASH_TOKENS,
        medium="GPU",
        group_idx=0,
    )


def _head(status: int) -> bytes:
    return b"HTTP/1.1 %d X\r\n" % status


def _body(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Transport):
    """The router's end of a connection to a worker."""

    def __init__(self, worker: StandInWorker, protocol: Any, faults: Faults) -> None:
        super().__init__()
        self._worker, self._protocol, self._faults = worker, protocol, faults
        self._task: asyncio.Task[None] | None = None
        self._is_open = True
        worker.connections[self] = None
        protocol.connection_made(self)

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def write(self, data: Any) -> None:
        if not self._is_open:
            return
        if self.is_busy:
            raise AssertionError("the router sent a request before the end of the previous answer")
        _, _, body = bytes(data).partition(b"\r\n\r\n")
        self._task = asyncio.get_running_loop().create_task(self._worker.answer(self, json.loads(body)))
        self._task.add_done_callback(_raise)

    async def send(self, data: bytes) -> None:
        """Send bytes to the router in one or several parts."""
        while data and self._is_open:
            size = self._faults.chance.choice((len(data), len(data), 1, len(data) // 2 + 1))
            self._protocol.data_received(data[:size])
            data = data[size:]
            if data:
                await asyncio.sleep(self._faults.delay(0, 0, 0, 1))

    def end(self, error: Exception | None) -> None:
        """Close the connection. The router notices it in the next turn of the loop."""
        if self._is_open:
            self._is_open = False
            self._worker.connections.pop(self, None)
            loop = asyncio.get_running_loop()
            loop.call_soon(self._protocol.connection_lost, error)
            if self._task is not None:
                self._task.cancel()

    def abort(self) -> None:
        self.end(None)

    def close(self) -> None:
        self.end(None)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def _raise(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        asyncio.get_running_loop().call_exception_handler({"message": "stand-in worker", "exception": error})


class Session:
    """In place of the aiohttp session that checks workers."""

    def __init__(self, workers: dict[str, StandInWorker], faults: Faults) -> None:
        self._workers, self._faults = workers, faults

    def get(self, url: str, timeout: aiohttp.ClientTimeout, headers: Any = None) -> _Reply:
        _, _, rest = url.partition("//")
        host, _, path = rest.partition("/")
        return _Reply(self._workers[host.partition(":")[0]], path, self._faults, timeout.total or 1.0)


class _Reply:
    """The answer to one health check."""

    def __init__(self, worker: StandInWorker, path: str, faults: Faults, seconds: float) -> None:
        self._worker, self._path, self._faults, self._seconds = worker, path, faults, seconds
        self.status = 200

    async def __aenter__(self) -> _Reply:
        async with asyncio.timeout(self._seconds):
            if self._faults.happens("slow_check"):
                await asyncio.sleep(self._faults.delay(10, 40, 100))
            await self._worker.thaw()
        if self._worker.is_down:
            raise aiohttp.ClientConnectionError("down")
        if self._faults.happens("failed_check"):
            self.status = 500
        elif self._worker.is_foreign and self._path == "kvloom/worker":
            self.status = 404
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> bytes:
        return json.dumps(
            {"data": [{"id": MODEL}]} if self._worker.is_foreign else self._worker.state()
        ).encode()


class EventContext:
    """In place of `zmq.asyncio.Context`."""

    def __init__(self, workers: dict[str, StandInWorker], faults: Faults) -> None:
        self._workers, self._faults = workers, faults
        self._sockets: list[_EventSocket] = []

    def socket(self, kind: int) -> _EventSocket:
        socket = _EventSocket(self._workers, self._faults, kind)
        self._sockets.append(socket)
        return socket

    def destroy(self, linger: int) -> None:
        for socket in self._sockets:
            socket.close(linger)


class _EventSocket:
    """A SUB socket for batches, or a DEALER socket for replays."""

    def __init__(self, workers: dict[str, StandInWorker], faults: Faults, kind: int) -> None:
        self._workers, self._faults, self._kind = workers, faults, kind
        self._worker: StandInWorker | None = None
        self._messages: asyncio.Queue[list[bytes]] = asyncio.Queue()

    def setsockopt(self, *_: object) -> None:
        pass

    setsockopt_string = setsockopt

    def connect(self, endpoint: str) -> None:
        self._worker = self._workers[endpoint.removeprefix("tcp://").partition(":")[0]]
        if self._kind == zmq.SUB:
            self._worker.subscribe(self)

    def put(self, frames: list[bytes]) -> None:
        self._messages.put_nowait(frames)

    async def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if flags and self._messages.empty():
            raise zmq.Again
        return await self._messages.get()

    async def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        worker = self._worker
        assert worker is not None
        is_silent = self._faults.happens("silent_replay")
        await asyncio.sleep(self._faults.delay(0, 1, 3))
        if is_silent or worker.is_down or worker.frozen_until > asyncio.get_running_loop().time():
            return
        for message in worker.replay(frames[1]):
            self.put(message)

    def close(self, linger: int) -> None:
        if self._worker is not None:
            self._worker.unsubscribe(self)
