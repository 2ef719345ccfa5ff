"""`kvloom top`: the dashboard of a running server or router in a terminal. Fetches the same data as the page."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvloom.arguments import SERVER, server
from kvloom.serve.http_client import KEY, fetch

if TYPE_CHECKING:
    from rich.layout import Layout

__all__ = ["arguments", "run"]

KEY_SECONDS = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", type=server, default="http://127.0.0.1:8000", help=SERVER)
    add("--api-key", metavar="KEY", help=f"admin API key (default: ${KEY})")
    add("--model", metavar="NAME", help="model to show (default: the server's first)")
    add("--colour", choices=("kind", "state", "tenant"), default="kind", help="what the colours of the map show (default: kind)")  # fmt: skip
    add("--once", action="store_true", help="print once and exit (default if the output is not a terminal)")
    add("--json", action="store_true", help="print the server's state as JSON and exit")


def run(args: argparse.Namespace) -> int:
    """Show a server's cache until q or Ctrl-C. Raises ValueError if the server refuses the request, and OSError if no
    server answers.
    """
    key = args.api_key or os.environ.get(KEY)
    source = _Server(args.url, key, args.model)
    source.refresh()  # an error of the first call is raised; later errors are shown on the screen
    if args.json:
        print(json.dumps(source.state, indent=2))
        return 0
    from rich.console import Console

    assert source.state is not None
    terminal = sys.stdout.isatty()
    if args.once or not terminal:  # a pipe gets lines, not a screen
        console = Console(width=None if terminal else 110, height=None if terminal else 44, highlight=False)
        console.print(source.screen(args.colour), height=min(console.height - 1, 60))
        return 0
    _live(source, args.colour)
    return 0


class _Server:
    """Polls a server for its dashboard state. Stores the latest state and the latest error."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._url, self._key = url, key
        self._model = "" if model is None else f"model={quote(model, safe='')}"
        self.state: dict[str, Any] | None = None
        self.requests: list[dict[str, Any]] | None = None
        self.error = ""

    def refresh(self) -> None:
        state = fetch(self._url, f"/kvloom/state?{self._model}", self._key)
        if "history" not in state:
            raise ValueError(f"{self._url} is not a kvloom server")
        if "router" not in state:
            self.requests = fetch(self._url, f"/kvloom/requests?limit=100&{self._model}", self._key)[
                "requests"
            ]
        self.state, self.error = state, ""

    def screen(self, mode: str) -> Layout:
        """Return the screen of a server, or of a router's fleet."""
        assert self.state is not None
        if "router" in self.state:
            from .fleet_terminal import fleet_screen

            return fleet_screen(self.state, self.error)
        from .terminal import screen

        return screen(self.state, self.requests, mode, self.error)

    def refresh_until(self, stop: threading.Event) -> None:
        """Fetch the state regularly until `stop` is set."""
        while not stop.wait(1.0 if self.state is None else float(self.state["interval"])):
            try:
                self.refresh()
            except (OSError, ValueError) as error:
                self.error = str(error)


def _live(source: _Server, mode: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from .terminal import MODES

    stop = threading.Event()
    threading.Thread(target=source.refresh_until, args=(stop,), daemon=True).start()
    console = Console(highlight=False)
    try:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            shown: tuple[Any, ...] = ()
            while True:
                now = (id(source.state), source.error, mode, console.size)
                if now != shown and source.state is not None:
                    live.update(source.screen(mode), refresh=True)
                    shown = now
                key = pressed(KEY_SECONDS)
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
    """Yield a function that waits up to a given number of seconds for a key press. The function returns the key, or ""
    if no key was pressed. When the `with` block ends, the terminal is restored."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(fd, 1).decode(errors="replace") or "q"
        except OSError:
            return "q"  # the terminal was closed

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
