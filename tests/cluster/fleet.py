"""Real workers and a router on loopback, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Process", "free_port", "started", "until"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


@dataclass(slots=True)
class Process:
    """A server process and its address."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    events: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One request; status and JSON (or text)."""
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in (answer.headers.get("content-type") or "")
            return answer.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, up to its end."""
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        try:
            connection.request(
                "POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def kill(self) -> None:
        """kill -9 of the process itself."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def is_healthy(self) -> bool:
        try:
            return self.send("GET", "/health")[0] == 200
        except OSError:
            return False


@contextmanager
def started(log: Path, *arguments: str, port: int | None = None) -> Iterator[Process]:
    """Start a kvloom command with a server, without waiting for it; end it at last."""
    port = port or free_port()
    command = [sys.executable, "-m", "kvloom.cli", *arguments, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield Process(process, f"http://127.0.0.1:{port}", log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
