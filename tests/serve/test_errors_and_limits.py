"""Errors in OpenAI's format, and limits against clients that disconnect, read slowly or stay silent."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from kvloom import cli
from kvloom.bench.serve import Load, main, offer
from kvloom.serve.api import connection as connection_module
from kvloom.serve.api.request_fields import UNSUPPORTED
from tests.serve.running import LONGEST, MODEL, Running

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "ignore_eos": True}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


DEEP: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(500)}}],
    "documents": [{"title": nested(500)}],
    "chat_template_kwargs": {"more": nested(500)},
    "messages": [{"role": "user", "content": "hi", "more": nested(500)}],
    "tool_choice": {"type": nested(500)},
}


WRONG: list[tuple[str, Any, int, str | None, str]] = [
    (COMPLETIONS, b"", 400, None, "empty"),
    (COMPLETIONS, b"  ", 400, None, "empty"),
    (COMPLETIONS, b"{", 400, None, "not JSON"),
    (CHATS, b'{"model": "tiny", "messages": [{"role": ' + b"[" * 100_000, 400, None, "not JSON"),
    (COMPLETIONS, b'{"model": "\xff"}', 400, None, "JSON"),
    (COMPLETIONS, [], 400, None, "array"),
    (COMPLETIONS, "null", 400, None, "null"),
    (COMPLETIONS, {}, 400, "prompt", "missing"),
    (COMPLETIONS, without(GOOD, "prompt"), 400, "prompt", "missing"),
    (COMPLETIONS, {**GOOD, "model": "other"}, 404, "model", "'other'"),
    (COMPLETIONS, {**GOOD, "model": 5}, 400, "model", "str"),
    (COMPLETIONS, {**GOOD, "prompt": []}, 400, "prompt", "empty"),
    (COMPLETIONS, {**GOOD, "prompt": ""}, 400, "prompt", "at least one token"),
    (COMPLETIONS, {**GOOD, "prompt": {"text": "hi"}}, 400, "prompt", "object"),
    (COMPLETIONS, {**GOOD, "prompt": [1, "hi"]}, 400, "prompt", "mixes"),
    (COMPLETIONS, {**GOOD, "prompt": [True]}, 400, "prompt", "bool"),
    (COMPLETIONS, {**GOOD, "prompt": [-1]}, 400, "prompt", "-1"),
    (COMPLETIONS, {**GOOD, "prompt": [320]}, 400, "prompt", "320"),
    (COMPLETIONS, {**GOOD, "prompt": [10**30]}, 400, "prompt", str(10**30)),
    (COMPLETIONS, {**GOOD, "prompt": [5] * LONGEST}, 400, "prompt", "exceed"),
    (COMPLETIONS, {**GOOD, "prompt": "x" * 5000}, 400, "prompt", "exceed"),
    (COMPLETIONS, {**GOOD, "max_tokens": LONGEST}, 400, "prompt", "exceed"),
    (COMPLETIONS, {**GOOD, "max_tokens": -1}, 400, "max_tokens", "-1"),
    (COMPLETIONS, {**GOOD, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (COMPLETIONS, {**GOOD, "max_tokens": "2"}, 400, "max_tokens", "str"),
    (COMPLETIONS, {**GOOD, "max_tokens": 1.5}, 400, "max_tokens", "float"),
    (COMPLETIONS, {**GOOD, "temperature": -1}, 400, "temperature", "at least 0"),
    (COMPLETIONS, {**GOOD, "temperature": "hot"}, 400, "temperature", "str"),
    (COMPLETIONS, {**GOOD, "top_p": 0}, 400, "top_p", "at most 1"),
    (COMPLETIONS, {**GOOD, "n": 0}, 400, "n", "1 to"),
    (COMPLETIONS, {**GOOD, "n": -3}, 400, "n", "1 to"),
    (COMPLETIONS, {**GOOD, "n": 10**9}, 400, "n", "fewer"),
    (COMPLETIONS, {**GOOD, "n": 2, "temperature": 0}, 400, None, "same"),
    (COMPLETIONS, {**GOOD, "presence_penalty": 9}, 400, "presence_penalty", "from -2 to 2"),
    (COMPLETIONS, {**GOOD, "logprobs": 21}, 400, "logprobs", "20"),
    (COMPLETIONS, {**GOOD, "logprobs": True}, 400, "logprobs", "bool"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"x": 1}}, 400, "logit_bias", "int"),
    (COMPLETIONS, {**GOOD, "logit_bias": {"320": 1}}, 400, "logit_bias", "320"),
    (COMPLETIONS, {**GOOD, "stop": 5}, 400, "stop", "int"),
    (COMPLETIONS, {**GOOD, "stop": ["x"] * 99}, 400, "stop", "99"),
    (COMPLETIONS, {**GOOD, "seed": 10**30}, 400, "seed", "64 bits"),
    (COMPLETIONS, {**GOOD, "suffix": "end"}, 400, "suffix", "infilling"),
    (COMPLETIONS, {**GOOD, "echo": True, "logprobs": 1, "stream": True}, 400, "echo", "stream"),
    (COMPLETIONS, {**GOOD, "stream": True, "best_of": 3}, 400, "best_of", "stream"),
    (COMPLETIONS, {**GOOD, "stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    (COMPLETIONS, {**GOOD, "ttl": -1}, 400, "ttl", "positive"),
    (COMPLETIONS, {**GOOD, "priority": "high"}, 400, "priority", "str"),
    (COMPLETIONS, {**GOOD, "cache": {"store": "yes"}}, 400, "cache", "bool"),
    (COMPLETIONS, {**GOOD, "tenant": "t" * 999}, 400, "tenant", "longer"),
    (COMPLETIONS, {**GOOD, "response_format": {"type": "xml"}}, 400, "response_format", "xml"),
    (COMPLETIONS, {**GOOD, "regex": "("}, 400, "regex", "regex"),
    (COMPLETIONS, {**GOOD, "stream": True, "regex": "("}, 400, "regex", "regex"),
    (COMPLETIONS, {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, 400, "response_format", "x"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"json": "[" * 60_000}}, 400, "response_format", "nested too deeply"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"json": {"enum": nested(500)}}}, 400, "structured_outputs", "64 levels"),
    (COMPLETIONS, {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": nested(500)}}}}, 400, "response_format", "64 levels"),
    (COMPLETIONS, {**GOOD, "regex": "(" * 30_000 + "a" + ")" * 30_000}, 400, "regex", "regex"),
    (COMPLETIONS, {**GOOD, "grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, 400, "grammar", "grammar"),
    (COMPLETIONS, b'{"prompt": "a", "unknown": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", 400, None, "not JSON"),
    *[(CHATS, {**CHAT, name: value}, 400, name, "64 levels") for name, value in DEEP.items()],
    (CHATS, {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 900 + "]" * 900}}]}]}, 400, "messages", "64 levels"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a", "more": nested(500)}]}, 400, "messages", "64 levels"),
    (COMPLETIONS, {**GOOD, "top_k": 10**30}, 400, "top_k", str(10**30)),
    (COMPLETIONS, {**GOOD, "top_k": 2**31}, 400, "top_k", "vocabulary"),
    (COMPLETIONS, {**GOOD, "stop_token_ids": [10**30]}, 400, "stop_token_ids", str(10**30)),
    (COMPLETIONS, {**GOOD, "stop_token_ids": [320]}, 400, "stop_token_ids", "320"),
    (COMPLETIONS, {**GOOD, "prompt": "x" * 60_000}, 400, "prompt", "or more"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x" * 60_000}]}, 400, "messages", "or more"),
    (COMPLETIONS, {**GOOD, "prompt": "x" * 500_000}, 400, "prompt", "500,000 characters"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x" * 500_000}]}, 400, "messages", "characters"),
    (COMPLETIONS, {**GOOD, "prompt": [-1], "echo": True}, 400, "prompt", "-1"),
    (COMPLETIONS, {**GOOD, "prompt": [10**30], "echo": True}, 400, "prompt", str(10**30)),
    (COMPLETIONS, {**GOOD, "prompt": ["hi", [-1]], "echo": True}, 400, "prompt", "-1"),
    ("/tokenize", {"prompt": [-1], "return_token_strs": True}, 400, "prompt", "-1"),
    ("/tokenize", {"prompt": [2**40], "return_token_strs": True}, 400, "prompt", str(2**40)),
    ("/tokenize", {"prompt": "x" * 70_000}, 400, "prompt", "70,000 characters"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 70_000}]}, 400, "messages", "65,536"),
    ("/detokenize", {"tokens": [5] * 70_000}, 400, "tokens", "65,536"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "</s>" * 5000}]}, 400, "messages", "4,096"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"eos_token": "y"}}, 400, "chat_template_kwargs", "'eos_token'"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "'messages'"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"raise_exception": 1}}, 400, "chat_template_kwargs", "'raise_exception'"),
    (CHATS, {**CHAT, "tools": [{}] * 200_000}, 400, "tools", "131,072 values"),
    (CHATS, {**CHAT, "messages": [{"role": "user|>", "content": ""}]}, 400, "messages", "'user|>'"),
    (CHATS, b'{"model": "tiny", "messages": [{"role": "user", "content": "", "x": ' + b"[" * 500 + b"]" * 500 + b"}]}", 400, "messages", "64 levels"),
    (CHATS, without(CHAT, "messages"), 400, "messages", "missing"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages", "empty"),
    (CHATS, {**CHAT, "messages": "hi"}, 400, "messages", "array"),
    (CHATS, {**CHAT, "messages": [{"content": "hi"}]}, 400, "messages", "role"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, "messages", "content"),
    (CHATS, {**CHAT, "messages": [{"role": "forbidden", "content": ""}]}, 400, "messages", "no such role"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "accepts no images"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages", "needs the field text"),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "must be"),
    (CHATS, {**CHAT, "tools": "hammer"}, 400, "tools", "array"),
    (CHATS, {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    (CHATS, {**CHAT, "tool_choice": {"type": "function"}}, 400, "tool_choice", "must be"),
    (CHATS, {**CHAT, "modalities": ["text", "audio"]}, 400, "modalities", "text"),
    (CHATS, {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, 400, "messages", "JSON"),
    (CHATS, {**CHAT, "messages": [{"role": "assistant", "tool_calls": "x"}]}, 400, "messages", "tool_calls"),
    *[(COMPLETIONS, {**GOOD, name: 1}, 400, name, why) for name, why in UNSUPPORTED.items()],
    (CHATS, {**CHAT, "prompt_logprobs": 21}, 400, "prompt_logprobs", "0 to 20"),
    (CHATS, {**CHAT, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "stream"),
    (COMPLETIONS, {**GOOD, "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "-2"),
    (COMPLETIONS, {**GOOD, "truncate_prompt_tokens": 0}, 400, "prompt", "at least one token"),
    (COMPLETIONS, {**GOOD, "cache_salt": "s" * 999}, 400, "cache_salt", "longer"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"choice": []}}, 400, "structured_outputs", "at least one"),
    (COMPLETIONS, {**GOOD, "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs", "one form"),
    (COMPLETIONS, {**GOOD, "regex": "a", "structured_outputs": {"regex": "a"}}, 400, "structured_outputs", "one form"),
    (COMPLETIONS, {**GOOD, "min_tokens": 3}, 400, "min_tokens", "max_tokens"),
    ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt", "takes one"),
    ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model", "'other'"),
    ("/tokenize", b"{", 400, None, "not JSON"),
    ("/detokenize", {"tokens": [320]}, 400, "tokens", "320"),
    ("/detokenize", {"prompt": "a"}, 400, "tokens", "missing"),
    (CHATS, {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (CHATS, {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format", "schema"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_invalid_requests_get_openai_errors(server: Running, number: int) -> None:
    path, body, status, param, said = WRONG[number]
    found, headers, told = server.send("POST", path, body)
    assert (found, told["error"]["param"]) == (status, param), told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert said in told["error"]["message"]
    assert headers["content-type"] == "application/json"


def test_invalid_paths_methods_bodies_and_hosts_are_refused(server: Running) -> None:
    cases = [
        ("GET", "/nowhere", None, {}, 404),
        ("GET", "/v1/models/other", None, {}, 404),
        ("GET", COMPLETIONS, None, {}, 405),
        ("DELETE", "/v1/models", None, {}, 405),
        ("POST", COMPLETIONS, b"x" * ((1 << 20) + 1), {}, 413),
        ("POST", COMPLETIONS, json.dumps(GOOD), {"Content-Type": "text/plain"}, 415),
        ("POST", COMPLETIONS, json.dumps(GOOD), {"Host": "somewhere.example"}, 403),
        ("POST", COMPLETIONS, json.dumps(GOOD), {"Origin": "https://somewhere.example"}, 403),
        ("POST", COMPLETIONS, json.dumps(GOOD), {"Origin": "null"}, 403),
    ]
    for method, path, body, headers, status in cases:
        found, _, told = server.send(method, path, body, headers)
        assert found == status, told
        assert set(told["error"]) == {"message", "type", "param", "code"}
    for own in (
        {"Host": "localhost:1234"},
        {"Origin": "http://127.0.0.1:8000"},
        {"Origin": "http://[::1]:8000"},
    ):
        assert server.send("GET", "/health", headers=own)[2] == {"status": "ok", "role": "both"}


@pytest.mark.parametrize(
    "said",
    [
        b"how are you?\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # what https:// begins with
    ],
)
def test_data_that_is_not_http_gets_an_openai_error(server: Running, said: bytes) -> None:
    with _connected(server) as link:
        link.sendall(said)
        head, _, body = b"".join(iter(lambda: link.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400"), head
    assert b"application/json" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert server.healthy()


def test_the_official_client_raises_its_own_errors(server: Running) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.completions.create(model="other", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="exceed") as caught:
        client.completions.create(model=MODEL, prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.chat.completions.create(model=MODEL, messages=[])


def test_a_closed_stream_releases_its_pages(server: Running) -> None:
    before = server.metrics()["kvloom_disconnected_requests_total"]
    stream = server.client().completions.create(
        model=MODEL,
        prompt="go on for long",
        max_tokens=4000,
        stream=True,
        n=2,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    server.wait_for(lambda: server.metrics()["kvloom_in_use_pages"] > 0)
    stream.close()
    server.wait_for(server.idle, 10)
    assert server.metrics()["kvloom_disconnected_requests_total"] == before + 1


def test_a_disconnect_before_the_answer_releases_its_pages(server: Running) -> None:
    body = {**GOOD, "max_tokens": 4000, "ignore_eos": True}
    with _connected(server) as link:
        link.sendall(_request(COMPLETIONS, body))
        server.wait_for(lambda: server.metrics()["kvloom_in_use_pages"] > 0)
    server.wait_for(server.idle, 10)


def test_a_client_that_does_not_read_is_disconnected(server: Running) -> None:
    body = {
        **CHAT,
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    before = server.metrics()["kvloom_disconnected_requests_total"]
    with _connected(server, receive_bytes=4096) as link:
        link.sendall(_request(CHATS, body))
        server.wait_for(lambda: server.metrics()["kvloom_open_requests"] == 1)
        began = time.monotonic()
        assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2
        assert time.monotonic() - began < 5
        server.wait_for(server.idle, 20)
        assert server.metrics()["kvloom_disconnected_requests_total"] == before + 1
    assert not [line for line in server.said if "ERROR" in line]


def test_an_unread_answer_is_dropped_after_a_time(server: Running) -> None:
    body = {**GOOD, "max_tokens": 300, "n": 5, "ignore_eos": True, "logprobs": 20}  # a megabyte
    with _connected(server, receive_bytes=4096) as link:
        link.sendall(_request(COMPLETIONS, body))
        server.wait_for(lambda: server.metrics()["kvloom_open_requests"] == 1)
        server.wait_for(server.idle, 40)
        time.sleep(5)  # three times what a reader may take
        with pytest.raises(ConnectionResetError):
            b"".join(iter(lambda: link.recv(1 << 16), b""))


def test_a_client_must_read_a_kibibyte_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waiting = [1000.0], [1_000_000]
    monkeypatch.setattr(connection_module.time, "monotonic", lambda: clock[0])
    one = connection_module.Connection.__new__(connection_module.Connection)
    one.transport = SimpleNamespace(get_write_buffer_size=lambda: waiting[0])  # type: ignore[assignment]
    one.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)  # type: ignore[assignment]
    clock[0] += 100
    assert not one.reads_slowly(60), "little data waits"
    one.pause_writing()
    for _ in range(3):  # fast enough
        clock[0] += 59
        assert not one.reads_slowly(60)
        clock[0] += 2
        waiting[0] -= 70_000
        assert not one.reads_slowly(60)
    clock[0] += 61
    waiting[0] -= 50_000
    assert one.reads_slowly(60)
    one.resume_writing()
    assert not one.reads_slowly(60)


def test_incomplete_heads_and_bodies_time_out(server: Running) -> None:
    with (
        _connected(server) as silent,
        _connected(server) as slow,
        _connected(server) as half,
        _connected(server) as second,
    ):
        slow.sendall(b"POST /v1/comp")
        half.sendall(_request(COMPLETIONS, GOOD)[:-5])
        second.sendall(_request(COMPLETIONS, GOOD))
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        second.sendall(b"POST /v1/comp")
        assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2
        told = b"".join(iter(lambda: half.recv(4096), b""))
        assert told.startswith(b"HTTP/1.1 408")
        assert b"1.5 seconds" in told
        for link in (silent, slow, second):
            assert _closed(link)
    assert server.healthy()


def test_an_endless_head_is_refused(server: Running) -> None:
    with _connected(server) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        while not select.select([link], [], [], 0.001)[0]:
            link.sendall(b"x" * 4096)
            sent += 4096
        assert link.recv(4096).startswith(b"HTTP/1.1 431")
        assert sent < 1 << 20
    assert server.healthy()


def test_connections_beyond_the_limit_are_refused(server: Running) -> None:
    with ExitStack() as open_:
        links = [open_.enter_context(_connected(server)) for _ in range(300)]
        refused = [link for link in links if select.select([link], [], [], 0)[0]]
        last = open_.enter_context(_connected(server))
        told = b"".join(iter(lambda: last.recv(4096), b""))
        assert told.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in told
        assert len(refused) < 20  # (others of these tests may still be open)
    server.wait_for(server.healthy, 10)


def test_a_request_without_model_uses_the_served_one(server: Running) -> None:
    status, _, found = server.send("POST", COMPLETIONS, without(GOOD, "model"))
    assert (status, found["model"]) == (200, MODEL)


def test_encoding_a_long_text_delays_no_short_one(server: Running) -> None:
    long = ["xy " * 10_900] * 30  # each just short enough to be counted to its end, and then refused
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(server.send, "POST", COMPLETIONS, {**GOOD, "prompt": long}) for _ in range(8)]
        time.sleep(0.2)
        server.complete(prompt="hi", max_tokens=1)
        assert not all(one.done() for one in waits)
    assert {one.result()[0] for one in waits} == {400}


def test_200_concurrent_streams_run_without_error(server: Running) -> None:
    load = Load(server.url, MODEL, streams=200, seconds=2.0, prompt=48, shared=32, tokens=16, vocabulary=256)
    seen = asyncio.run(offer(load, [server.process.pid, server.engine]))
    assert not seen.errors
    assert seen.requests >= 200
    assert seen.pieces > seen.requests
    server.wait_for(server.idle, 10)
    told = server.metrics()
    assert told["kvloom_time_to_first_token_seconds_count"] >= 200
    assert told["kvloom_inter_token_seconds_count"] > 0
    assert told["kvloom_hit_tokens_total"] > 0


def test_bench_serve_runs_from_the_command_line(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--url",
        server.url,
        "--model",
        MODEL,
        "--streams",
        "4",
        "--seconds",
        "0.3",
        "--max-tokens",
        "4",
    ]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] >= 4
    assert told["errors"] == {}
    assert sum(told["first_tokens_in_each_tenth"]) == told["requests"]
    assert main([*arguments, "--model", "other"]) == 1
    assert "is not served" in capsys.readouterr().out
    assert (
        main(["--url", server.url, "--streams", "2", "--seconds", "0.3"]) == 0
    )  # it asks for the model's name
    assert "time to first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--url", "https://127.0.0.1:8000"], "must be like http://"),
        (["--url", "http://127.0.0.1:9"], "no OpenAI-compatible server"),
        (["--url", "http://127.0.0.1:9", "--serve", "kvloom-llama"], "use one"),
        (["--seconds", "0"], "above 0"),
        (["--seconds", "inf"], "inf is out of range"),
        (["--prompt-tokens", "4", "--shared-tokens", "5"], "cannot be shared"),
        (["--streams", "1000000000"], "open files"),
    ],
)
def test_bench_serve_refuses_invalid_arguments(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *wrong]) == 2
    assert said in capsys.readouterr().err


def _connected(server: Running, receive_bytes: int | None = None) -> socket.socket:
    place = urlsplit(server.url)
    link = socket.socket()
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(30)
    link.connect((place.hostname, place.port))
    return link


def _closed(link: socket.socket) -> bool:
    """Whether the other end closes within the link's time; what it still had to say is read."""
    try:
        while link.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def _request(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
