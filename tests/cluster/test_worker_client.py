"""The client that forwards requests: connections stay open, break, and are not read faster than the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from kvloom.cluster.router.call import Call
from kvloom.cluster.router.worker_client import MAX_BUFFERED, UnreachableError, WorkerClient, WorkerConnection

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def run(handler: Handler, test: Callable[[WorkerClient, str, list[int]], Awaitable[None]]) -> None:
    """Run a test against a server that calls `handler` with the head and body of every request. The list counts the
    connections."""

    async def main() -> None:
        connections: list[int] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(1)
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    await handler(head + await reader.readexactly(length), writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = WorkerClient()
            try:
                async with asyncio.timeout(60):
                    await test(client, f"http://127.0.0.1:{port}", connections)
            finally:
                client.close()

    asyncio.run(main())


async def echo(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-Kind: echo\r\ncontent-length: %d\r\n\r\n%b" % (len(request), request))


def test_a_connection_serves_one_request_after_another() -> None:
    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        for number in range(3):
            answer = await client.post(url, "/v1/x", {"accept": "*/*"}, b"%d" % number, 60)
            assert answer.status == 200
            assert (b"x-kind", b"echo") in answer.headers
            request = await answer.read()
            assert request.startswith(b"POST /v1/x HTTP/1.1\r\n")
            assert b"accept: */*" in request
            assert request.endswith(b"%d" % number)
            answer.release()
        assert len(connections) == 1

    run(echo, test)


def test_a_path_cannot_add_headers() -> None:
    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/v1/x HTTP/1.1\r\nevil: 1\r\n", {}, b"", 60)
        assert b"\r\nevil" not in await answer.read()
        answer.release()

    run(echo, test)


async def completed(answer: WorkerConnection) -> None:
    for _ in range(1000):
        if answer.is_complete:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the end of the answer did not arrive")


def test_a_chunked_answer_arrives_piece_by_piece_and_its_end_may_come_later() -> None:
    may_end = asyncio.Event()

    async def stream(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        await may_end.wait()
        writer.write(b"0\r\n\r\n")

    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/", {}, b"", 60)
        assert await answer.read_any() == b"abc"
        answer.release()
        may_end.set()
        await completed(answer)
        again = await client.post(url, "/", {}, b"", 60)
        assert again is answer
        again.close()
        assert len(connections) == 1

    run(stream, test)


def test_a_request_on_a_broken_idle_connection_is_sent_again() -> None:
    async def once(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"close" in request:
            writer.transport.abort()
        else:
            await echo(request, writer)

    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/", {}, b"a", 60)
        await answer.read()
        answer.release()
        with pytest.raises(ConnectionError):
            await client.post(url, "/", {}, b"close", 60)
        assert len(connections) == 2, "the idle connection broke, then the new one"

    run(once, test)


def test_an_answer_that_breaks_off_is_an_error_and_one_without_length_ends_with_its_connection() -> None:
    async def short(request: bytes, writer: asyncio.StreamWriter) -> None:
        head = b"content-length: 9\r\n" if request.endswith(b"short") else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\nabc")
        writer.close()

    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/", {}, b"short", 60)
        with pytest.raises(ConnectionError):
            await answer.read()
        answer.close()
        answer = await client.post(url, "/", {}, b"open", 60)
        assert await answer.read() == b"abc"
        answer.release()

    run(short, test)


def test_a_slow_reader_pauses_the_worker() -> None:
    size = 64 << 20

    async def large(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(bytes(size // 64))
            await writer.drain()

    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/", {}, b"", 60)
        await asyncio.sleep(0.5)
        assert len(answer.take()) < 16 * MAX_BUFFERED
        assert 0 < len(await answer.read()) < size

    run(large, test)


def test_an_answer_that_stops_is_late() -> None:
    async def stop(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")

    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        answer = await client.post(url, "/", {}, b"", 2)
        with pytest.raises(TimeoutError):
            await answer.read()
        answer.close()

    run(stop, test)


def test_a_worker_that_is_not_there_is_unreachable() -> None:
    async def test(client: WorkerClient, url: str, connections: list[int]) -> None:
        with pytest.raises(UnreachableError):
            await client.post("http://127.0.0.1:1", "/", {}, b"", 60)

    run(echo, test)


@pytest.mark.parametrize("raw", [b'{"a": 1} \n', b"{}", b'{"seed":null,"a":[1]}'])
def test_added_fields_replace_fields_of_the_request(raw: bytes) -> None:
    body = msgspec.json.decode(raw)
    call = Call("/v1/completions", {}, body, raw)
    assert call.with_fields({}) == raw
    assert msgspec.json.decode(call.with_fields({"seed": 7, "b": [2]})) == {**body, "seed": 7, "b": [2]}
