"""/v1/messages and /v1/messages/count_tokens, and the retention of pages before cache breakpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import LONGEST, MODEL, Running, running

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Ulm"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
EPHEMERAL = {"type": "ephemeral"}


def send(server: Running, **fields: Any) -> dict[str, Any]:
    """A message that must succeed."""
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}
    status, _, found = server.send("POST", "/v1/messages", body)
    assert status == 200, found
    return dict(found)


def events(server: Running, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}  # fmt: skip
    status, headers, text = server.send("POST", "/v1/messages", body)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_has_the_text_of_the_chat(server: Running) -> None:
    found = send(server, system="be brief", max_tokens=6, temperature=0, ignore_eos=True)
    chat = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    _, _, wanted = server.send(
        "POST", "/v1/chat/completions", {**chat, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    )
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert found["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    assert usage["output_tokens"] == 6
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert prompt == wanted["usage"]["prompt_tokens"]


def test_a_stop_sequence_is_reported(server: Running) -> None:
    fields: dict[str, Any] = {"regex": "abcd", "max_tokens": 9}
    assert send(server, **fields)["stop_reason"] == "end_turn"
    found = send(server, **fields, stop_sequences=["c"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "c")
    assert found["content"][0]["text"] == "ab"


def test_blocks_are_messages_of_the_chat(server: Running) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    wanted = "<weather>[system]be brief[user]hi[assistant]so(Oslo)[tool]rain[user]and?[assistant]"
    body = {"system": [{"type": "text", "text": "be brief"}], "messages": messages, "tools": [WEATHER]}
    status, _, found = server.send("POST", "/v1/messages/count_tokens", {"model": MODEL, **body})
    assert (status, found) == (200, {"input_tokens": len(wanted)})
    assert send(server, **body, max_tokens=1)["usage"]["output_tokens"] == 1
    prefilled = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    _, _, found = server.send("POST", "/v1/messages/count_tokens", {"messages": prefilled})
    assert found == {"input_tokens": len("[user]hi[assistant]so")}


def test_a_forced_tool_is_used(server: Running) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        found = send(server, tools=[WEATHER], tool_choice=choice, max_tokens=100)
        (block,) = found["content"]
        assert (block["type"], block["name"], found["stop_reason"]) == ("tool_use", "weather", "tool_use")
        assert block["input"]["city"] in ("Oslo", "Ulm")
        assert block["id"]


def test_a_stream_has_the_events_of_the_api(server: Running) -> None:
    found = events(server, temperature=0, ignore_eos=True)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    text = "".join(event["delta"]["text"] for event in found[2:-3])
    assert text == send(server, temperature=0, ignore_eos=True)["content"][0]["text"]
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 4
    calls = events(server, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=100)
    start = next(event for event in calls if event["type"] == "content_block_start")["content_block"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "weather", {})
    pieces = [event["delta"] for event in calls if event["type"] == "content_block_delta"]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    assert json.loads("".join(piece["partial_json"] for piece in pieces))["city"] in ("Oslo", "Ulm")
    assert calls[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source must have"),
        ({"messages": [{"role": "user", "content": 5}]}, "list of blocks"),
        ({"system": [{"type": "image"}]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "input_schema"),
        ({"cache_control": {"type": "forever"}}, "ephemeral"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "5m or 1h"),
        ({"system": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}] * 5}, "more than 4"),
        ({"max_tokens": LONGEST}, "exceed the limit"),
    ],
)  # fmt: skip
def test_errors_have_the_form_of_the_api(server: Running, fields: dict[str, Any], match: str) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}
    status, _, found = server.send("POST", "/v1/messages", body)
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert match in found["error"]["message"]


def test_usage_counts_tokens_before_the_breakpoint(server: Running) -> None:
    """The template writes [system]… before the block and [user]hi[assistant] after it."""
    text = "usage of breakpoints " * 20
    fields: dict[str, Any] = {"system": [{"type": "text", "text": text, "cache_control": EPHEMERAL}], "cache_salt": "usage"}  # fmt: skip
    size, rest = len("[system]" + text), len("[user]hi[assistant]")
    first = send(server, **fields)["usage"]
    assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, size)
    assert first["input_tokens"] == rest
    again = send(server, **fields)["usage"]
    assert again["cache_read_input_tokens"] >= size - 16
    assert sum(v for k, v in again.items() if k != "output_tokens") == size + rest


@pytest.mark.slow
def test_pages_before_a_breakpoint_outlive_others(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-red-1 red - - max_ttl=600\n")
    keys.chmod(0o600)
    with running(folder, "--pool", "1MiB", "--api-keys", str(keys)) as server:

        def cached(name: str, **control: Any) -> int:
            block = {"type": "text", "text": f"{name} " * 60, **control}
            body = {"max_tokens": 1, "system": [block], "messages": [{"role": "user", "content": "hi"}]}
            status, _, found = server.send("POST", "/v1/messages", body, {"x-api-key": "key-of-red-1"})
            assert status == 200, found
            return int(found["usage"]["cache_read_input_tokens"])

        assert cached("first", cache_control=EPHEMERAL) == 0
        assert cached("plain") < 16
        assert cached("first", cache_control=EPHEMERAL) > 300
        assert cached("plain") > 300
        for i in range(40):
            cached(f"flood{i:02}")
        assert cached("plain") < 16  # evicted
        assert cached("first", cache_control=EPHEMERAL) > 300
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        long = {**body, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        status, _, found = server.send("POST", "/v1/messages", long, {"x-api-key": "key-of-red-1"})
        assert (status, "600 seconds" in found["error"]["message"]) == (400, True)
        for headers, key in (({}, None), ({"x-api-key": "key-of-blue"}, None)):
            status, _, found = server.send("POST", "/v1/messages", body, headers, key)
            assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert server.send("POST", "/v1/messages", body, key="key-of-red-1")[0] == 200
