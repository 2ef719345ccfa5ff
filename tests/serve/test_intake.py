"""Requests before they reach the engine: limits of their JSON, memory of their bodies, and turns of tenants."""

from __future__ import annotations

import asyncio
import json
import threading
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvloom.serve.api.fair_thread import FairThread
from kvloom.serve.api.generation import CompletionEndpoint
from kvloom.serve.api.json_limits import MAX_CONTAINERS, MAX_ITEMS, check_structure
from kvloom.serve.api.prompts import LONG_BYTES, PromptEncoder
from kvloom.serve.auth.limits import BodyLimiter
from kvloom.serve.errors import ApiError
from kvloom.serve.worker.messages import Delta
from kvloom.serve.worker.response_stream import ResponseStream
from tests.serve.running import MODEL, Running

MARKS = '[{:,\\"\\\\"]' * 40_000


def test_only_lists_and_objects_outside_of_texts_are_counted() -> None:
    for text in (MARKS, MARKS + "\\", '"' + MARKS, '\\\\"' + MARKS):
        check_structure(json.dumps({text: [text, text]}).encode())
        check_structure(json.dumps({text: text}, ensure_ascii=False).encode())
    check_structure(b"[" + b"1," * MAX_ITEMS + b"1]")
    check_structure(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"1]")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", f"{MAX_CONTAINERS + 1:,} lists, objects and keys"),
        (b"[" + b'["\\"]",""],' * MAX_CONTAINERS + b"1]", f"{MAX_CONTAINERS + 1:,} lists, objects and keys"),
        (b"{" + b'"a":1,' * MAX_CONTAINERS + b'"a":1}', "lists, objects and keys"),
        (b"[" + b"1," * (MAX_ITEMS + 1) + b"1]", f"{MAX_ITEMS + 1:,} items"),
        (b"[" + b'"",' * (MAX_ITEMS + 1) + b"1]", f"{MAX_ITEMS + 1:,} items"),
    ],
)
def test_a_body_with_too_much_structure_is_refused_before_decoding(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        check_structure(body)
    assert caught.value.status == 400


def test_the_server_refuses_too_much_structure_and_too_many_stop_tokens(server: Running) -> None:
    lists = b'{"prompt": "x", "suffix": [' + b"[]," * MAX_CONTAINERS + b"1]}"
    for path in ("/v1/completions", "/tokenize"):
        status, _, told = server.send("POST", path, lists)
        assert (status, told["error"]["param"]) == (400, None)
        assert "lists, objects and keys" in told["error"]["message"]
    calls = [{"function": {"name": "f", "arguments": "[" + "[]," * MAX_CONTAINERS + "1]"}}]
    chat = {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]}
    status, _, told = server.send("POST", "/tokenize", chat)
    assert (status, "lists, objects and keys" in told["error"]["message"]) == (400, True)
    status, _, told = server.send(
        "POST", "/v1/completions", {"model": MODEL, "prompt": "x", "stop_token_ids": [5] * 1025}
    )
    assert (status, told["error"]["param"]) == (400, "stop_token_ids")
    server.complete(prompt="x", max_tokens=1, stop_token_ids=[5] * 1024)


def test_an_announced_body_of_any_size_is_refused_at_once(server: Running) -> None:
    for length in ("99999999999", "9223372036854775807"):
        connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_a_tenant_waits_for_one_function_of_another() -> None:
    async def talk() -> list[str]:
        thread, release = FairThread("test"), threading.Event()
        order: list[str] = []

        def work(tenant: str) -> None:
            order.append(tenant)
            assert release.wait(30)

        async def run(tenant: str) -> None:
            await thread.run(tenant, lambda: work(tenant))

        tenants = ("red", "red", "red", "red", "blue", "blue", "grey")
        tasks = [asyncio.create_task(run(tenant)) for tenant in tenants]
        await asyncio.sleep(0)
        tasks[1].cancel()  # it takes no turn
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await thread.run("red", lambda: 1 // 0)
        assert await thread.run("blue", lambda: 6) == 6
        return order

    assert asyncio.run(talk()) == ["red", "red", "blue", "grey", "red", "blue"]


def test_encoding_takes_turns_and_long_requests_have_their_own_thread() -> None:
    async def talk() -> None:
        prompts, release = PromptEncoder(None), threading.Event()
        order: list[str] = []

        def work(tenant: str) -> None:
            order.append(tenant)
            assert release.wait(30)

        async def run(tenant: str) -> None:
            await prompts.run(lambda: work(tenant), tenant, LONG_BYTES + 1)

        tasks = [asyncio.create_task(run("red")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(run("blue")))
        assert await prompts.run(lambda: "short", "red", LONG_BYTES) == "short"
        release.set()
        await asyncio.gather(*tasks)
        assert order.index("blue") <= 2

    asyncio.run(talk())


@pytest.mark.parametrize(("tokens", "thread"), [(1, "MainThread"), (1000, "long-tokenizer_0")])
def test_large_log_probabilities_are_written_outside_of_the_event_loop(tokens: int, thread: str) -> None:
    async def talk() -> None:
        served: Any = SimpleNamespace(require_encoder=lambda: PromptEncoder(None))
        written: Any = SimpleNamespace(
            whole=lambda deltas: threading.current_thread().name.encode(),
            warning=None,
            content_type=b"application/json",
        )
        stream, sent = ResponseStream([1]), []
        stream.put(Delta(1, 0, "", [5], finish_reason="length", prompt_logprobs=[[(5, -1.0, 1)]] * tokens))

        async def send(message: Any) -> None:
            sent.append(message)

        context: Any = None
        await CompletionEndpoint(context)._send_whole(served, stream, written, "red", send)
        assert sent[1]["body"] == thread.encode()

    asyncio.run(talk())


def test_bodies_count_until_they_are_encoded_and_one_tenant_leaves_space() -> None:
    bodies = BodyLimiter(1000, shared=True)
    with bodies.hold("red") as large:
        for _ in range(8):
            large.add(100)
        with bodies.hold("blue") as small:
            small.add(100)
            with pytest.raises(ApiError) as caught:
                large.add(1)
            assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert bodies.used == 801
    assert (bodies.used, dict(bodies.by_tenant)) == (0, {})
    alone = BodyLimiter(1000)
    with alone.hold() as whole:
        whole.add(1000)
        with pytest.raises(ApiError):
            whole.add(1)
