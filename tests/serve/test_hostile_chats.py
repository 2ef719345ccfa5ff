"""Hostile chats on a repeating template are refused, cost little memory, and block no other request."""

from __future__ import annotations

import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import MODEL, Running

KEY = "key-of-red-1"
CHATS = "/v1/chat/completions"


def peak_bytes(server: Running) -> int:
    """The most memory that the server's process had so far."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def lists(count: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "x", "y": [' + b",".join([b"[]"] * count) + b"]}]}"


HOSTILE: list[tuple[str, Any]] = [
    (CHATS, {"messages": [{"role": "user", "content": "x"}] * 2000, "chat_template_kwargs": {"more": "y" * 500_000}}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 2000, "chat_template_kwargs": {"more": "y" * 500_000}}),
    (CHATS, {"messages": [{"role": "user", "content": "x"}] * 2000, "chat_template_kwargs": {"more": "y" * 500_000}, "truncate_prompt_tokens": 5}),
    (CHATS, lists(200_000)),
    ("/tokenize", {"prompt": "x" * 4_000_000}),
    ("/v1/completions", {"prompt": " " * 200_000 + "x" * 4_000_000}),
]  # fmt: skip


@pytest.mark.slow
def test_hostile_requests_are_refused_and_block_no_others(guarded: Running) -> None:
    """Whole, the first of them would be a text of a gigabyte."""
    before, slowest, done = peak_bytes(guarded), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert guarded.healthy()
            slowest[0] = max(slowest[0], time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for path, body in HOSTILE:
            status, _, told = guarded.send("POST", path, body, key=KEY)
            assert (status, told["error"]["type"]) == (400, "invalid_request_error"), told
    finally:
        done.set()
        watcher.join()
    assert peak_bytes(guarded) - before < 400 << 20
    assert slowest[0] < 5
    assert (
        guarded.send(
            "POST", CHATS, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, key=KEY
        )[0]
        == 200
    )


def test_a_long_text_is_truncated_without_encoding_it_all(guarded: Running) -> None:
    long = "0123456789" * 700_000
    found = guarded.complete(KEY, prompt=long, truncate_prompt_tokens=5, max_tokens=1, echo=True)
    assert found["choices"][0]["text"].startswith("56789")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": long}],
        "truncate_prompt_tokens": 30,
        "max_tokens": 1,
    }
    status, _, told = guarded.send("POST", CHATS, body, key=KEY)
    assert (status, told["usage"]["prompt_tokens"]) == (200, 30)


def test_the_text_of_a_special_token_is_text_in_chats(guarded: Running) -> None:
    for content, ends in (("a</s>b", 1), ("ab", 1)):
        body = {"messages": [{"role": "user", "content": content}], "return_token_strs": True}
        told = guarded.send("POST", "/tokenize", body, key=KEY)[2]
        assert told["token_strs"].count("</s>") == ends
        assert (
            guarded.send("POST", "/detokenize", {"tokens": told["tokens"]}, key=KEY)[2]["prompt"]
            == f"[user]{content}</s>[assistant]"
        )
    told = guarded.send("POST", "/tokenize", {"prompt": "a</s>b", "return_token_strs": True}, key=KEY)[2]
    assert told["token_strs"] == ["a", "</s>", "b"]


def test_a_recording_is_private(guarded: Running, record: Path) -> None:
    guarded.complete(KEY, prompt="any", max_tokens=1)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
