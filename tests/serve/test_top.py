"""`kvloom top`: once, as JSON, and live in a terminal that changes its size."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import asdict
from rich.console import Console

from kvloom.cli import main
from kvloom.serve.dashboard.terminal import MODES, screen
from kvloom.serve.worker.messages import TierUsage
from tests.serve.running import MODEL, Running


def test_top_once_prints_the_dashboard(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.complete(prompt="for the terminal, " * 8, max_tokens=4, ignore_eos=True)
    time.sleep(1.1)
    assert main(["top", "--url", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    for word in (
        MODEL,
        "hit rate",
        "TTFT p50",
        "ITL p50",
        "p95",
        "p99",
        "saved",
        "tokens: pool",
        "computed",
        "pool",
        "prefix tree",
        "never seen",
        "chunk: 2,048 tokens",
        "no tiers",
        "full",
    ):
        assert word in shown
    assert "for the terminal" not in shown
    assert main(["top", "--url", server.url, "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["engine"]["pool"]["cached_pages"] > 0


def test_explain_prints_measured_settings(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.complete(prompt="settings", max_tokens=2, ignore_eos=True)
    time.sleep(1.1)
    assert main(["explain", "--settings", "--url", server.url]) == 0
    assert capsys.readouterr().out == (
        "chunk: 2,048 tokens: no decoding request has an objective for the time between tokens\n"
    )
    assert main(["explain", "--settings", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "chunk"
    assert server.metrics()['kvloom_setting{setting="chunk"}'] == 2048
    assert main(["explain", "cmpl-1", "--settings", "--url", server.url]) == 2
    assert "--settings explains no request" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://127.0.0.1", "nothing"])
def test_top_reports_a_missing_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--once"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvloom top: ")
    assert url in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("width", "height"), [(200, 60), (110, 40), (80, 24), (40, 12), (12, 5)])
@pytest.mark.parametrize("mode", MODES)
def test_the_screen_fits_any_terminal(server: Running, width: int, height: int, mode: str) -> None:
    _, _, state = server.send("GET", "/kvloom/state")
    console = Console(width=width, height=height)
    with console.capture() as shown:
        console.print(screen(state, [], mode), height=height)
    lines = shown.get().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_tier_shows_failures_and_its_circuit_breaker(server: Running) -> None:
    _, _, state = server.send("GET", "/kvloom/state")
    use = asdict(TierUsage("redis", 3, 96, 1 << 20, {"ok": 5, "missing": 4}, {"ok": 2}, 1, 2, 0, "open"))
    use["faults"] = {"corrupt": 2, "late": 41}
    console = Console(width=200, height=60)
    with console.capture() as shown:
        console.print(screen({**state, "engine": {**state["engine"], "tiers": [use]}}, [], MODES[0]))
    assert "41 late, 2 corrupt, disabled after faults" in shown.get()


def test_a_missing_snapshot_is_reported(server: Running) -> None:
    _, _, state = server.send("GET", "/kvloom/state")
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(screen({**state, "engine": None, "engine_at": None}, None))
    assert "no snapshot of the cache yet" in shown.get()


class Terminal:
    """A real terminal with `kvloom top` in it."""

    def __init__(self, url: str) -> None:
        self._mine, theirs = pty.openpty()
        self.resize(30, 100)
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
        for size in ("COLUMNS", "LINES"):  # would be believed before the terminal
            env.pop(size, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvloom.cli", "top", "--url", url], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )  # fmt: skip
        os.close(theirs)
        self._bytes, self.seen = b"", ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._mine, key)

    def close(self) -> None:
        os.close(self._mine)

    def until(self, words: str) -> list[str]:
        """The lines of the last whole picture once it has these words; colours left out."""
        end = time.monotonic() + 30
        while True:
            frames = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame) for frame in self.seen.split("\x1b[H")]
            if len(frames) > 1 and words in frames[-2]:  # the last one may still be coming
                return frames[-2].replace("\r", "").splitlines()
            assert time.monotonic() < end, f"{words!r} did not come; it wrote {self.seen[-2000:]!r}"
            self.read()

    def read(self) -> None:
        if select.select([self._mine], [], [], 0.2)[0]:
            with suppress(OSError):  # the other end is closed
                self._bytes += os.read(self._mine, 1 << 16)  # which may end inside a character
            self.seen = self._bytes.decode(errors="ignore")


def test_top_follows_the_terminal_size_and_quits_by_key(server: Running) -> None:
    terminal = Terminal(server.url)
    try:
        first = terminal.until("colours by kind")
        assert 90 < max(map(len, first)) <= 100
        terminal.press(b"m")
        terminal.until("colours by state")
        terminal.resize(20, 60)
        terminal.press(b"m")
        narrow = terminal.until("colours by tenant")
        assert 50 < max(map(len, narrow)) <= 60
        terminal.press(b"q")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.process.kill()


def test_top_ends_with_its_terminal(server: Running) -> None:
    terminal = Terminal(server.url)
    try:
        terminal.until("q quit")
        terminal.close()
        terminal.process.wait(30)
    finally:
        terminal.process.kill()


def test_ctrl_c_ends_top_quietly(server: Running) -> None:
    terminal = Terminal(server.url)
    try:
        terminal.until("q quit")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(10) == 0
        terminal.read()
        assert "Traceback" not in terminal.seen
    finally:
        terminal.process.kill()


def test_a_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(url: str, path: str, key: str | None = None) -> dict[str, Any]:
        asked.append(key)
        raise ValueError("API key required")

    monkeypatch.setattr("kvloom.serve.dashboard.command.fetch", answer)
    monkeypatch.setenv("KVLOOM_API_KEY", "from-the-environment")
    assert main(["top", "--once"]) == 2
    assert main(["top", "--once", "--api-key", "given"]) == 2
    monkeypatch.delenv("KVLOOM_API_KEY")
    assert main(["top", "--once"]) == 2
    assert asked == ["from-the-environment", "given", None]
