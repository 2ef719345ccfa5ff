"""A light load for `kvloom bench router`: a worker that answers at once, and a generator of requests at a fixed rate.

Both are plain asyncio protocols on uvloop. They take less than a tenth of the router's time per request, so on a
machine with few cores they hardly delay the router. `python -m kvloom.bench.router_load PORT` runs the worker.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

__all__ = ["loop_factory", "send_load"]

INFO = (
    b'{"tenant":null,"open_requests":0,"models":[{"id":"m","status":"ok","hash_model":"m","hash_tokens":16,'
    b'"groups":[{"index":0,"kind":"full","window":0}],"bytes_per_token":1,"pool_bytes":1000000000,"events":null,"replay":null}]}'
)
EVENT = b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[5]}]}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
INFO_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(INFO), INFO)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PROMPTS = 32
PROMPT_TOKENS = 1024


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST = STREAM_HEAD + _chunk(EVENT)
LAST = _chunk(DONE) + END


class _Worker(asyncio.Protocol):
    """A worker that answers POST with a stream of one token, and GET with its description. Does not support pipelining."""

    _transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._data = transport, b""  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        if not blank:
            return
        _, found, rest = head.lower().partition(b"content-length:")
        if found and len(body) < int(rest.partition(b"\r\n")[0]):
            return
        self._data = b""
        if not head.startswith(b"POST"):
            self._transport.write(INFO_ANSWER)
            return
        self._transport.write(FIRST)
        self._transport.write(LAST)


class _Client(asyncio.Protocol):
    """One connection of the load generator. At the end of an answer, calls `done(client, seconds)` with the seconds to
    the first byte."""

    _transport: asyncio.Transport

    def __init__(self, done: Any) -> None:
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, counts: bool) -> None:
        self._first, self._tail, self.counts = 0.0, b"", counts
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {data[:200]!r}")
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            self._done(self, self._first - self._began)


async def send_load(url: str, rate: int, seconds: int) -> list[float]:
    """Send `rate` requests per second for `seconds` seconds. Return the seconds to the first byte of each answer. One
    more second of load runs before, and is not measured.

    Raises TimeoutError if answers are missing 30 seconds after the last request.
    """
    host, port = url.removeprefix("http://").split(":")
    rng = np.random.default_rng(0)
    bodies = [
        json.dumps(
            {
                "model": "m",
                "prompt": rng.integers(0, 100_000, PROMPT_TOKENS).tolist(),
                "stream": True,
                "max_tokens": 1,
            }
        ).encode()
        for _ in range(PROMPTS)
    ]
    requests = [
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
        for body in bodies
    ]
    loop = asyncio.get_running_loop()
    idle: list[_Client] = []
    times: list[float] = []
    total, ended = rate * (seconds + 1), 0
    finished = loop.create_future()

    def done(client: _Client, took: float) -> None:
        nonlocal ended
        ended += 1
        idle.append(client)
        if client.counts:
            times.append(took)
        if ended == total and not finished.done():
            finished.set_result(None)

    async def connect() -> _Client:
        _, client = await loop.create_connection(lambda: _Client(done), host, int(port))
        return client

    for _ in range(8):
        idle.append(await connect())
    began = loop.time()
    for number in range(total):
        left = began + number / rate - loop.time()
        if left > 0:
            await asyncio.sleep(left)
        client = idle.pop() if idle else await connect()
        client.send(requests[number % PROMPTS], number >= rate)
    async with asyncio.timeout(30):
        await finished
    for client in idle:
        client._transport.close()
    return times


def loop_factory() -> Any:
    """Return uvloop's loop factory, or asyncio's where uvloop is missing."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Worker, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(int(sys.argv[1])))
