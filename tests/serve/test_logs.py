"""The server's log: one line per request with its id, counts and error reason, and never text."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvloom.serve.access_log import RequestLog, _log_request as log_request
from kvloom.serve.errors import ApiError
from tests.serve.running import MODEL, Running, running

pytestmark = pytest.mark.slow  # servers of its own

SECRET = "a very private prompt"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def logged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("key-of-red-1 red\nkey-of-blue-1 blue\n")
    keys.chmod(0o600)
    with running(folder, "--pool", "16MiB", "--log-format", "json", "--api-keys", str(keys)) as found:
        yield found


def lines(server: Running) -> list[dict[str, Any]]:
    """The log's lines in JSON; the start-up message is not part of the log."""
    return [json.loads(line) for line in server.said if line.startswith("{")]


def line_of(server: Running, request_id: str) -> dict[str, Any]:
    """The access line of a request; it is written after the response."""
    found: list[dict[str, Any]] = []

    def written() -> bool:
        found[:] = [line for line in lines(server) if line.get("request_id") == request_id]
        return bool(found)

    server.wait_for(written)
    assert len(found) == 1
    return found[0]


def test_a_request_is_logged_with_its_counts(logged: Running) -> None:
    body = {"model": MODEL, "prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    status, headers, made = logged.send(
        "POST", COMPLETIONS, body, {"X-Request-Id": "first-1"}, "key-of-red-1"
    )
    assert (status, headers["x-request-id"]) == (200, "first-1")
    line = line_of(logged, "first-1")
    usage = made["usage"]
    assert line["logger"] == "kvloom.access"
    assert (line["level"], line["method"], line["path"], line["status"]) == ("INFO", "POST", COMPLETIONS, 200)
    assert (line["tenant"], line["id"], line["finish_reason"]) == ("red", made["id"], "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 3)
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < line["seconds"] < 60
    for name in (made["id"], "first-1"):
        status, _, record = logged.send("GET", f"/kvloom/requests/{name}", key="key-of-red-1")
        assert (status, record["id"], record["request_id"]) == (200, made["id"], "first-1")
    assert logged.send("GET", "/kvloom/requests/first-1", key="key-of-blue-1")[0] == 404


@pytest.mark.parametrize("given", ["", "with space", "a" * 129, "é"])
def test_an_unsafe_request_id_is_replaced(logged: Running, given: str) -> None:
    _, got, _ = logged.send("GET", "/version", headers={"X-Request-Id": given})
    made = got["x-request-id"]
    assert len(made) == 32
    assert line_of(logged, made)["status"] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        (COMPLETIONS, {"prompt": SECRET, "max_tokens": 0}, 400, "invalid max_tokens"),
        (COMPLETIONS, {"prompt": SECRET, "regex": f"({SECRET}"}, 400, "invalid regex"),
        (COMPLETIONS, {"prompt": SECRET, "model": SECRET}, 404, "model '…'"),
        (CHATS, {"messages": [{"role": "forbidden", "content": SECRET}]}, 400, "template rejects these messages"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}, 400, "content parts of type '…'"),
        ("/v1/unknown", {"prompt": SECRET}, 404, "no endpoint POST /v1/unknown"),
    ],
)  # fmt: skip
def test_an_error_is_logged_with_its_reason(
    logged: Running, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    got, headers, _ = logged.send("POST", path, body, key="key-of-blue-1")
    assert got == status
    line = line_of(logged, headers["x-request-id"])
    assert (line["level"], line["status"]) == ("WARNING", status)
    assert reason in line["reason"]


def test_a_missing_key_and_data_that_is_not_http_are_logged(logged: Running) -> None:
    status, headers, _ = logged.send("GET", "/v1/models")
    line = line_of(logged, headers["x-request-id"])
    assert (status, line["status"], line["code"]) == (401, 401, "invalid_api_key")
    address = urlsplit(logged.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as plain:
        plain.sendall(b"hello\r\n\r\n")
        assert plain.recv(1 << 16).startswith(b"HTTP/1.1 400")
    logged.wait_for(lambda: any("not a valid HTTP" in line.get("reason", "") for line in lines(logged)))


def test_polls_are_not_logged_and_text_never_is(logged: Running) -> None:
    for path in ("/health", "/metrics"):
        assert logged.send("GET", path)[0] == 200
    body = {"prompt": SECRET, "max_tokens": 2, "stream": True}
    _, headers, _ = logged.send("POST", COMPLETIONS, body, key="key-of-red-1")
    assert line_of(logged, headers["x-request-id"])["output_tokens"] == 2
    assert not any(line.get("path") in ("/health", "/metrics") for line in lines(logged))
    shown = "\n".join(logged.said)
    assert SECRET not in shown
    assert "key-of-" not in shown


def test_a_path_cannot_break_the_line(server: Running) -> None:
    path = "/nothing%0a2026-01-01%20INFO%20forged/" + "x" * 500
    assert server.send("GET", path, headers={"X-Request-Id": "forged-1"})[0] == 404
    server.wait_for(lambda: any("request_id=forged-1" in line for line in server.said))
    found = [line for line in server.said if "forged-1" in line]
    assert len(found) == 1
    assert r'path="/nothing\n2026' in found[0]
    assert len(found[0]) < 1000


def test_quiet_prints_warnings_only(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvloom.cli", "serve", str(folder), "--device", "cpu", "--pool", "16MiB"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "-q"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        server = Running(process, f"http://127.0.0.1:{port}", 0)

        def answers() -> bool:
            try:
                return server.send("GET", "/version")[0] == 200
            except OSError:
                return False

        server.wait_for(answers, 90)
        assert server.send("GET", "/nothing")[0] == 404
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "status=404" in said
    assert all("WARNING" in line for line in said.splitlines()), said


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 503, logging.DEBUG),
        ("/health", 500, logging.ERROR),
        ("/metrics", 401, logging.WARNING),
        ("/v1/models", 200, logging.INFO),
        ("/v1/completions", 503, logging.WARNING),
    ],
)
def test_the_level_of_a_line(path: str, status: int, level: int, caplog: pytest.LogCaptureFixture) -> None:
    entry = RequestLog("some-id", error=ApiError(status, "loading") if status >= 400 else None)
    with caplog.at_level(logging.DEBUG, "kvloom.access"):
        log_request("GET", path, status, 0.5, entry)
    (line,) = caplog.records
    assert line.levelno == level
    assert vars(line)["fields"].get("reason") == ("loading" if status >= 400 else None)


def test_the_log_of_an_error_leaves_out_quoted_values() -> None:
    error = ApiError(404, """model 'it's "mine"' is not served here; use 'tiny'""")
    assert error.log_text == "model '…'"
    assert ApiError(400, "text of the client", logged="what is wrong").log_text == "what is wrong"
