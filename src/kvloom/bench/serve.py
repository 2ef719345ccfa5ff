"""`kvloom bench serve` puts a load on a server: many concurrent streams. When a stream ends, a new one starts.

Without --url, a server is started with the embedded model, and the memory of its processes is sampled. The client
parses little, because it shares the cores with the server. Any server with OpenAI's /v1/completions can be tested.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request

from rich.console import Console
from rich.table import Table

from kvloom.arguments import Parser, number, progress_bar, server, whole
from kvloom.serve.http_client import KEY, open_url

from .online_client import FIRST_ID

__all__ = ["Load", "Seen", "main", "offer", "served_model", "started"]

STARTUP_SECONDS = 300
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """A load of `streams` concurrent streams for `seconds` seconds.

    - `prompt` is the number of tokens of a prompt. They are random ids below `vocabulary`.
    - `shared` is the number of first tokens that all prompts have in common.
    - `tokens` is the largest number of tokens of an answer. The smallest is half of it.
    - `key` is an API key.
    - `seed` selects the prompts.
    """

    url: str
    model: str
    streams: int = 200
    seconds: float = 60.0
    prompt: int = 64
    shared: int = 32
    tokens: int = 32
    vocabulary: int = 256
    key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        place = urlsplit(self.url)
        if place.scheme != "http" or not place.hostname or not place.port:
            raise ValueError(f"url {self.url!r} must be like http://127.0.0.1:8000")
        if self.streams < 1 or not 0 < self.seconds < math.inf or self.tokens < 1:
            raise ValueError(
                f"{self.streams} streams of {self.tokens} tokens for {self.seconds:g} seconds: each must be above 0"
            )
        if not 0 <= self.shared <= self.prompt or self.prompt < 1:
            raise ValueError(
                f"{self.shared} of a prompt's {self.prompt} tokens cannot be shared: shared tokens must not exceed the prompt"
            )
        if self.vocabulary <= FIRST_ID:
            raise ValueError(f"vocabulary {self.vocabulary} must be above {FIRST_ID}")

    def body(self, numbers: random.Random) -> bytes:
        head = [FIRST_ID + i % (self.vocabulary - FIRST_ID) for i in range(self.shared)]
        own = [numbers.randrange(FIRST_ID, self.vocabulary) for _ in range(self.prompt - self.shared)]
        fields = {
            "model": self.model, "prompt": head + own, "max_tokens": numbers.randint(1 + self.tokens // 2, self.tokens), "ignore_eos": True, "stream": True,
        }  # fmt: skip
        return json.dumps(fields).encode()


@dataclass(slots=True)
class Seen:
    """Results of all streams, with times in seconds.

    - `pieces` is the number of messages of all streams.
    - `first` has the times to first token, and `between` the times between later messages.
    - `arrivals` has the times of the first tokens, counted from the start of the load.
    - `memory` has samples of the memory of processes, in MiB.
    """

    requests: int = 0
    pieces: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures by name. Times are in milliseconds."""
        arrivals = sorted(self.arrivals)
        gaps = [b - a for a, b in pairwise(arrivals)]
        return {
            "requests": self.requests,
            "requests_per_second": round(self.requests / max(self.seconds, 1e-9), 2),
            "pieces_per_second": round(self.pieces / max(self.seconds, 1e-9), 1),
            "ttft_ms": _percentiles(self.first),
            "between_pieces_ms": _percentiles(self.between),
            "first_tokens_in_each_tenth": self._tenths(),
            "longest_without_a_first_token_s": round(max(gaps, default=0.0), 3),
            "errors": dict(self.errors),
            "seconds": round(self.seconds, 2),
            "memory_mib": self.memory,
            "memory_growth_mib": self._growth(),
        }

    def _growth(self) -> dict[str, float]:
        """Return the memory growth of each process from the middle to the end of the run.

        The system allocates pool memory at its first use, so a pool that is still filling causes growth."""
        if len(self.memory) < 4:
            return {}
        warm, last = self.memory[len(self.memory) // 2], self.memory[-1]
        return {name: round(last[name] - warm[name], 1) for name in last if name != "second"}

    def _tenths(self) -> list[int]:
        counts = [0] * 10
        for second in self.arrivals:
            counts[min(9, int(10 * second / max(self.seconds, 1e-9)))] += 1
        return counts


async def offer(
    load: Load, processes: list[int] | None = None, progress: Callable[[int, int], None] | None = None
) -> Seen:
    """Run a load on a server, and sample the memory of `processes`. Calls `progress` with the elapsed seconds and
    the total."""
    seen = Seen()
    began = time.monotonic()
    end = began + load.seconds
    watches = [asyncio.create_task(_watch(processes or [], load.seconds, seen))]
    if progress is not None:
        watches.append(asyncio.create_task(_show_progress(progress, load.seconds)))
    await asyncio.gather(*(_stream(load, i, began, end, seen) for i in range(load.streams)))
    seen.seconds = time.monotonic() - began
    for watch in watches:
        watch.cancel()
    return seen


async def _show_progress(progress: Callable[[int, int], None], seconds: float) -> None:
    for second in range(1 + int(seconds)):
        progress(second, max(1, int(seconds)))
        await asyncio.sleep(1)


async def _stream(load: Load, number: int, began: float, end: float, seen: Seen) -> None:
    numbers = random.Random(load.seed << 32 | number)
    place = urlsplit(load.url)
    writer = None
    while time.monotonic() < end:
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(_request(load, place.netloc, load.body(numbers)))
            await _answer(reader, began, seen)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            seen.errors[f"{type(error).__name__}: {error}"[:300]] += 1
            if writer is not None:
                writer.close()
            writer = None
            await asyncio.sleep(0.1)
    if writer is not None:
        writer.close()


def _request(load: Load, host: str, body: bytes) -> bytes:
    auth = "" if load.key is None else f"Authorization: Bearer {load.key}\r\n"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n{auth}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _answer(reader: asyncio.StreamReader, began: float, seen: Seen) -> None:
    """Read one answer. If the server returns an error, raises ValueError with its message."""
    asked = last = time.monotonic()
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode(errors="replace")
    if " 200 " not in status:
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        error = await reader.readexactly(int(length[1])) if length else b""
        raise ValueError(f"{status}: {error[:240].decode(errors='replace')}")
    first = True
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            break
        now = time.monotonic()
        if chunk.startswith(b'data: {"error"'):
            raise ValueError(chunk[:160].decode(errors="replace"))
        if first:
            seen.first.append(now - asked)
            seen.arrivals.append(now - began)
            first = False
        elif b"[DONE]" not in chunk:
            seen.between.append(now - last)
        seen.pieces += chunk.count(b"data: {")
        last = now
    seen.requests += 1


async def _watch(processes: list[int], seconds: float, seen: Seen) -> None:
    began = time.monotonic()
    while processes:
        sample = {"second": round(time.monotonic() - began, 1)}
        for name, pid in zip(("server", "engine"), processes, strict=False):
            sample[name] = round(_resident(pid), 1)
        seen.memory.append(sample)
        await asyncio.sleep(max(0.5, seconds / 12))


def _resident(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    sample = {
        f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in PERCENTS
    }
    return {**sample, "max": round(1e3 * ordered[-1], 2)}


def started(arguments: list[str]) -> tuple[subprocess.Popen[str], str, str, int]:
    """Start a server. Return its process, its address, the name of its first model, and the process id of an engine."""
    command = [
        sys.executable,
        "-m",
        "kvloom.cli",
        "serve",
        "--port",
        "0",
        "--log-level",
        "warning",
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    engine, end = 0, time.monotonic() + STARTUP_SECONDS
    try:
        for line in process.stdout:
            if found := re.search(r"\(process (\d+)\)", line):
                engine = int(found[1])
            if found := re.search(r"kvloom serves (.+) at (http://\S+);", line):
                return process, found[2], found[1].split()[0], engine
            if time.monotonic() > end:
                break
    except BaseException:  # Ctrl-C: end the server
        process.kill()
        process.wait()
        raise
    process.kill()
    raise ValueError(f"the server did not start (exit code {process.wait()}); see its output above")


def served_model(url: str, key: str | None) -> str:
    """Return the name of the served model. Raises ValueError if the server does not respond."""
    request = Request(
        f"{url.rstrip('/')}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with open_url(request, 30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"no OpenAI-compatible server at {url} ({error}): is it running, and does it need --api-key?"
        ) from None


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench serve",
        description="Keep many streams open on a server: throughput, latency, errors, memory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  kvloom bench serve --streams 200 --seconds 60 --json      starts a server with kvloom-llama\n"
        "  kvloom bench serve --serve kvloom-hybrid --pool 2GiB      the same with other arguments for `kvloom serve`\n"
        "  kvloom bench serve --url 127.0.0.1:8000 --api-key KEY    any server with /v1/completions\n\n"
        "The exit code is 1 if a stream failed.",
    )
    add = parser.add_argument
    add(
        "--url",
        type=server,
        metavar="URL",
        help="running server (default: start one and sample its memory)",
    )
    add("--model", metavar="NAME", help="model name (default: the first listed)")
    add("--api-key", metavar="KEY", help=f"API key (default: ${KEY})")
    add("--streams", type=whole(1), default=200, metavar="N", help="concurrent streams (default: 200)")
    add(
        "--seconds",
        type=number(0, above=True),
        default=60.0,
        metavar="S",
        help="duration in seconds (default: 60)",
    )
    add("--prompt-tokens", type=whole(1), default=64, metavar="N", help="tokens per prompt (default: 64)")
    shared = "prompt tokens common to all streams (default: half)"
    add("--shared-tokens", type=whole(0), metavar="N", help=shared)
    answer = "limit of tokens per answer; the minimum is half of it (default: 32)"
    add("--max-tokens", type=whole(1), default=32, metavar="N", help=answer)
    ids = "prompt ids are below N (default: 256)"
    add("--vocabulary", type=whole(FIRST_ID + 1), default=256, metavar="N", help=ids)
    own = "further arguments of the started server"
    add("--serve", nargs=argparse.REMAINDER, default=[], metavar="...", help=own)
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        seen = _measured(options)
    except ValueError as error:
        print(f"kvloom bench serve: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(seen, indent=2))
    else:
        _show(seen)
    return int(bool(seen["errors"]))


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    if options.url is not None and options.serve:
        raise ValueError("--serve and --url exclude each other: use one")
    key = options.api_key or os.environ.get(KEY)
    shared = options.prompt_tokens // 2 if options.shared_tokens is None else options.shared_tokens

    def load(url: str, model: str) -> Load:
        return Load(
            url, model, options.streams, options.seconds, options.prompt_tokens, shared, options.max_tokens,
            options.vocabulary, key,
        )  # fmt: skip

    load(options.url or "http://127.0.0.1:8000", "")  # reject invalid values before starting a server
    _raise_file_limit(options.streams)
    process, pids, url, model = None, [], options.url, options.model
    if url is None:
        process, url, served, engine = started(options.serve)
        pids, model = [process.pid, engine], model or served
    try:
        model = model or served_model(url, key)
        with progress_bar(f"{options.streams} streams", sys.stderr.isatty()) as progress:
            return asyncio.run(offer(load(url, model), pids, progress)).summary()
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _raise_file_limit(streams: int) -> None:
    """Raise the limit of open files for the streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + 64
    if needed > hard:
        raise ValueError(
            f"{streams} streams need {needed} open files, but the limit is {hard}: use fewer streams"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def _show(seen: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(box=None, show_header=False)
    for name in ("requests", "requests_per_second", "pieces_per_second"):
        table.add_row(name.replace("_", " "), f"{seen[name]:,}")
    for name, words in (("ttft_ms", "time to first token, ms"), ("between_pieces_ms", "between pieces, ms")):
        table.add_row(words, ", ".join(f"{at} {value:,.1f}" for at, value in seen[name].items()) or "none")
    table.add_row("first tokens, tenth by tenth", " ".join(map(str, seen["first_tokens_in_each_tenth"])))
    table.add_row("longest without a first token, s", f"{seen['longest_without_a_first_token_s']:g}")
    for name, grown in seen["memory_growth_mib"].items():
        sizes = [round(at[name]) for at in seen["memory_mib"]]
        table.add_row(
            f"memory of the {name}, MiB", f"{' '.join(map(str, sizes))}; {grown:+g} in the second half"
        )
    table.add_row("errors", f"{sum(seen['errors'].values()):,}")
    console.print(table)
    for error, count in seen["errors"].items():
        console.print(f"{count:,} times {error}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
