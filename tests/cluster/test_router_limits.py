"""Limits of a router: slow and silent clients, large bodies, and fields of wrong types."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("zmq")

from kvloom.cluster.router import prompt_keys
from kvloom.cluster.router.application import RouterApplication
from kvloom.cluster.router.fleet import Fleet, Offer
from kvloom.cluster.router.prompt_keys import PromptReader
from kvloom.cluster.router.proxy import Proxy
from kvloom.cluster.router.text_tokenizer import TextTokenizer
from tests.cluster.fleet import Process, started, until

EVENT = b"data: " + json.dumps({"id": "a", "choices": [{"index": 0, "text": "x" * 4000}]}).encode() + b"\n\n"


class Worker:
    """A worker that is not kvloom. It answers each POST with a stream without an end, as fast as it is read."""

    def __init__(self) -> None:
        self.open = self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    self.open += 1
                    kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
                    while True:
                        writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
                        await writer.drain()
                elif head.startswith(b"GET /kvloom"):
                    writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                else:
                    body = b'{"data": [{"id": "m"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    limits = [
        "--read-seconds",
        "1",
        "--request-seconds",
        "1",
        "--max-connections",
        "20",
        "--max-body",
        "1MiB",
    ]
    log = tmp_path_factory.mktemp("router") / "log"
    with started(log, "route", "--no-tokenize", *limits, "--body-memory", "2MiB") as one:
        until(lambda: answers(one))
        yield one


def answers(router: Process) -> bool:
    try:
        return router.send("GET", "/version")[0] == 200
    except OSError:
        return False


def connected(router: Process, receive_bytes: int | None = None) -> socket.socket:
    place = urlsplit(router.url)
    link = socket.socket()
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(60)
    link.connect((place.hostname, place.port))
    return link


def request(body: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body) if length is None else length).encode() + body


def test_a_client_that_reads_slowly_is_disconnected(router: Process) -> None:
    """It reads some bytes all the time, so that the kernel sees progress."""
    worker = Worker()

    async def run() -> None:
        server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await asyncio.to_thread(router.send, "POST", "/register", {"url": url}))[0] == 201

        def is_served() -> bool:
            return bool(router.send("GET", "/v1/models")[1].get("data"))

        await asyncio.to_thread(until, is_served)
        with connected(router, 4096) as link:
            link.sendall(request(json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()))

            def has_ended() -> bool:
                link.recv(16)
                return "kvloom_router_running 0" in router.send("GET", "/metrics")[1]

            await asyncio.to_thread(until, lambda: worker.open == 1)
            await asyncio.to_thread(until, has_ended)
            with pytest.raises(ConnectionResetError):
                b"".join(iter(lambda: link.recv(4096), b""))
        assert (await asyncio.to_thread(router.send, "POST", "/unregister", {"url": url}))[0] == 200
        server.close()

    asyncio.run(run())


def test_incomplete_heads_and_bodies_time_out(router: Process) -> None:
    with connected(router) as silent, connected(router) as half:
        half.sendall(request(b'{"model"', 100))
        assert b" 408 " in half.recv(4096)
        assert silent.recv(4096) == b""


def test_connections_and_bodies_are_limited(router: Process) -> None:
    part = b'{"prompt": "' + b"x" * 900_000
    links = [connected(router) for _ in range(3)]
    for link in links:
        link.sendall(request(part, 1_000_000))
    received = [link.recv(4096) for link in links]
    assert any(b" 429 " in answer for answer in received), received
    for link in links:
        link.close()
    many = [connected(router) for _ in range(40)]
    refused = [link for link in many[-5:] if b"too_many_connections" in link.recv(4096)]
    assert refused
    for link in many:
        link.close()
    until(lambda: answers(router))


def application() -> RouterApplication:
    fleet = Fleet(None)  # type: ignore[arg-type]
    return RouterApplication(fleet, Proxy(fleet, PromptReader(fleet)))


async def send(app: RouterApplication, path: str, body: Any, raw: bytes | None = None) -> tuple[int, bytes]:
    found: list[Any] = []

    async def receive() -> Any:
        if asked:
            await asyncio.get_running_loop().create_future()
        asked.append(1)
        return {"type": "http.request", "body": json.dumps(body).encode() if raw is None else raw}

    async def keep(message: Any) -> None:
        found.append(message)

    asked: list[int] = []
    await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, keep)
    return found[0]["status"], b"".join(one.get("body", b"") for one in found[1:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register", {"endpoint": "nothing", "model": "m"}),
        ("/register", {"endpoint": "tcp://127.0.0.1:1", "model": "m", "replay_endpoint": 5}),
        ("/register", {"endpoint": "tcp://127.0.0.1:1", "model": "m", "hash_model": ["m"]}),
        ("/register", {"endpoint": ["tcp://127.0.0.1:1"], "url": "http://127.0.0.1:1", "model": "m"}),
        ("/register", {"endpoint": "tcp://127.0.0.1:1", "model": "m", "url": 5}),
        ("/register", {"endpoint": "tcp://127.0.0.1:1", "model": "m", "url": {"a": 1}}),
        ("/query", {"model": ["m"]}),
        ("/query", {"model": {"m": 1}, "token_ids": [1]}),
        ("/query", {"model": "m", "token_ids": 5}),
        ("/query", {"model": "m", "token_ids": [[1]]}),
        ("/query", {"model": "m", "token_ids": ["1"]}),
        ("/query", {"model": "m", "token_ids": [1.5]}),
        ("/query", {"model": "m", "token_ids": [1 << 40]}),
        ("/query", {"model": "m", "token_ids": {"a": 1}}),
        ("/unregister", {"url": ["x"]}),
    ],
)
def test_wrong_types_get_400_or_404(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        app = application()
        app.fleet.register("instance", "", "m", Offer("m"))
        status, answer = await send(app, path, body)
        assert status in (400, 404), answer
        await app.fleet.close()

    asyncio.run(run())


def test_many_small_lists_are_refused_before_they_are_decoded() -> None:
    raw = b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"
    status, answer = asyncio.run(send(application(), "/v1/completions", None, raw))
    assert status == 400
    assert b"lists, objects and keys" in answer


def test_paths_of_clients_are_not_counted_one_by_one() -> None:
    async def run() -> None:
        app = application()
        for number in range(100):
            await send(app, f"/v1/{number}", {"model": "m"})
        assert len(app.proxy.counts.requests) == 1

    asyncio.run(run())


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return type("Encoding", (), {"ids": list(text.encode())})


def test_long_texts_without_spaces_are_not_cached() -> None:
    tokenizer = TextTokenizer(Letters())
    text = "x" * 100_000
    assert len(tokenizer.tokens(text, False)) == 400_000
    assert not tokenizer._pieces


def test_long_texts_do_not_block_other_requests() -> None:
    class Slow(Letters):
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            if len(text) > prompt_keys.LONG_TEXT:
                is_tokenising.set()
                assert may_end.wait(60)
            return super().encode(text, add_special_tokens)

    is_tokenising, may_end = threading.Event(), threading.Event()
    reader = PromptReader(Fleet(None))  # type: ignore[arg-type]
    reader._tokenizer = TextTokenizer(Slow())

    async def run() -> None:
        long = asyncio.create_task(reader.read({"prompt": "x" * 100_000}, {}))
        await asyncio.to_thread(is_tokenising.wait, 60)
        assert (await reader.read({"prompt": "short"}, {})).length == 5
        assert not long.done()
        may_end.set()
        assert (await long).length == 100_000
        very_long = await reader.read({"prompt": "x" * (prompt_keys.LONGEST_TEXT + 1)}, {})
        assert very_long.tokens is None
        assert len(very_long.text) <= prompt_keys.TEXT_BYTES // 64

    asyncio.run(run())


def test_cached_tokens_of_workers_are_separate_for_each_key() -> None:
    """Clients of the Messages API send the key in the header x-api-key."""
    reader = PromptReader(Fleet(None))  # type: ignore[arg-type]
    asked: list[bytes] = []

    async def tokenize(request: bytes, model: Any, headers: dict[str, str]) -> tuple[bytes, int]:
        asked.append(request)
        return bytes(4), 0

    reader._tokenize = tokenize  # type: ignore[method-assign]

    async def run() -> None:
        for key, tenant in (("a", "a"), ("b", "b"), ("a", "a")):
            await reader.read({"prompt": "text"}, {"x-api-key": key}, tenant)

    asyncio.run(run())
    assert len(asked) == 2
