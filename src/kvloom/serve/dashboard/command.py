"""`kvloom top`: the dashboard of a running server in a terminal. Asks over HTTP, like the page."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvloom.arguments import SERVER, server
from kvloom.serve.explain_command import KEY, fetch

__all__ = ["arguments", "run"]

WAIT = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=server, default="http://127.0.0.1:8000", help=SERVER)
    add("--api-key", metavar="KEY", help=f"an admin's key, where the server wants keys (default: ${KEY})")
    add("--colour", choices=("kind", "state", "tenant"), default="kind", help="what the map's colours tell (default: kind)")  # fmt: skip
    add("--once", action="store_true", help="print it once and end; so it is where the output is no terminal")
    add("--json", action="store_true", help="print the server's state as JSON and end")


def run(args: argparse.Namespace) -> int:
    """Show a server's cache until q or Ctrl-C. Raises ValueError where the server refuses, OSError where there is none."""
    key = args.api_key or os.environ.get(KEY)
    source = _Source(args.url, key)
    source.ask()  # what is wrong now is told now; later it is only noted
    if args.json:
        print(json.dumps(source.state, indent=2))
        return 0
    from rich.console import Console

    from .terminal import screen

    assert source.state is not None
    terminal = sys.stdout.isatty()
    if args.once or not terminal:  # who reads a pipe wants lines, not a screen
        console = Console(width=None if terminal else 110, height=None if terminal else 44, highlight=False)
        console.print(screen(source.state, source.requests, args.colour), height=min(console.height - 1, 60))
        return 0
    _live(source, args.colour)
    return 0


class _Source:
    """What a server said last, and what went wrong since."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url, key
        self.state: dict[str, Any] | None = None
        self.requests: list[dict[str, Any]] | None = None
        self.wrong = ""

    def ask(self) -> None:
        state = fetch(self._url, "/kvloom/state", self._key)
        if "history" not in state:
            raise ValueError(f"{self._url} does not answer as a kvloom server does")
        self.requests = fetch(self._url, "/kvloom/requests?limit=100", self._key)["requests"]
        self.state, self.wrong = state, ""

    def follow(self, stop: threading.Event) -> None:
        """Ask again and again until told to stop."""
        while not stop.wait(1.0 if self.state is None else float(self.state["interval"])):
            try:
                self.ask()
            except (OSError, ValueError) as error:
                self.wrong = str(error)


def _live(source: _Source, mode: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from .terminal import MODES, screen

    stop = threading.Event()
    threading.Thread(target=source.follow, args=(stop,), daemon=True).start()
    console = Console(highlight=False)
    try:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            shown: tuple[Any, ...] = ()
            while True:
                now = (id(source.state), source.wrong, mode, console.size)
                if now != shown and source.state is not None:
                    live.update(screen(source.state, source.requests, mode, source.wrong), refresh=True)
                    shown = now
                key = pressed(WAIT)
                if key in ("q", "Q"):
                    return
                if key == "m":
                    mode = MODES[(MODES.index(mode) + 1) % len(MODES)]
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key a while, and returns it or nothing. The terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
