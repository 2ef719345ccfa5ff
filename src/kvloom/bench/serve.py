"""Load on a server: many streams at once for some time, each begun again when it ends. `python -m kvloom.bench.serve`.

Without --url a server is started on the embedded model, and the memory of its processes is watched. The client reads bytes
and little else, as it shares the machine's cores with what it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Load", "Seen", "main", "offer", "started"]

STARTUP_SECONDS = 300
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` at once for `seconds`; prompts of random token ids below `vocabulary`, of which `shared` are the same for
    all; answers of up to `tokens`, and half of that at least; `key` is an API key."""

    url: str
    model: str
    streams: int = 200
    seconds: float = 60.0
    prompt: int = 64
    shared: int = 32
    tokens: int = 32
    vocabulary: int = 256
    key: str | None = None

    def body(self, numbers: random.Random) -> bytes:
        head = [3 + i % (self.vocabulary - 3) for i in range(self.shared)]
        own = [numbers.randrange(3, self.vocabulary) for _ in range(self.prompt - self.shared)]
        fields = {
            "model": self.model, "prompt": head + own, "max_tokens": numbers.randint(1 + self.tokens // 2, self.tokens), "ignore_eos": True, "stream": True,
        }  # fmt: skip
        return json.dumps(fields).encode()


@dataclass(slots=True)
class Seen:
    """What the streams brought. `arrivals` are the seconds of each first token since the beginning."""

    requests: int = 0
    pieces: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Figures for people and JSON; times in milliseconds."""
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
        }

    def _tenths(self) -> list[int]:
        counts = [0] * 10
        for second in self.arrivals:
            counts[min(9, int(10 * second / max(self.seconds, 1e-9)))] += 1
        return counts


async def offer(load: Load, processes: list[int] | None = None) -> Seen:
    """Put a load on a server. `processes` are watched for their memory."""
    seen = Seen()
    began = time.monotonic()
    end = began + load.seconds
    watch = asyncio.create_task(_watch(processes or [], load.seconds, seen))
    await asyncio.gather(*(_stream(load, i, began, end, seen) for i in range(load.streams)))
    seen.seconds = time.monotonic() - began
    watch.cancel()
    return seen


async def _stream(load: Load, number: int, began: float, end: float, seen: Seen) -> None:
    numbers = random.Random(number)
    place = urlsplit(load.url)
    writer = None
    while time.monotonic() < end:
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(_request(load, place.netloc, load.body(numbers)))
            await _answer(reader, began, seen)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            seen.errors[f"{type(error).__name__}: {error}"[:200]] += 1
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
    """Read one answer to its end. Raises ValueError with what the server said, if that is no stream."""
    asked = last = time.monotonic()
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        length = re.search(rb"content-length: (\d+)", head)
        said = await reader.readexactly(int(length[1])) if length else b""
        raise ValueError(f"{head.split(bytes(2), 1)[0][:40]!r} {said[:160]!r}")
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
        told = {"second": round(time.monotonic() - began, 1)}
        for name, pid in zip(("server", "engine"), processes, strict=False):
            told[name] = round(_resident(pid), 1)
        seen.memory.append(told)
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
    told = {
        f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in PERCENTS
    }
    return {**told, "max": round(1e3 * ordered[-1], 2)}


def started(arguments: list[str]) -> tuple[subprocess.Popen[str], str, str, int]:
    """A server of our own: its process, address, model's name and engine's process."""
    command = [sys.executable, "-m", "kvloom.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    engine, end = 0, time.monotonic() + STARTUP_SECONDS
    for line in process.stdout:
        if found := re.search(r"\(process (\d+)\)", line):
            engine = int(found[1])
        if found := re.search(r"kvloom serves (\S+) at (http://\S+);", line):
            return process, found[2], found[1], engine
        if time.monotonic() > end:
            break
    process.kill()
    raise RuntimeError(f"the server did not start (exit code {process.wait()})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvloom bench serve", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--url", help="a server that runs already (default: one is started on the embedded model)")
    add("--model", help="the model's name there")
    add("--key", help="an API key")
    add("--streams", type=int, default=200)
    add("--seconds", type=float, default=60.0)
    add("--prompt-tokens", type=int, default=64)
    add("--shared-tokens", type=int, default=32, help="of the prompt, the same for all")
    add("--max-tokens", type=int, default=32)
    add("--vocabulary", type=int, default=256, help="ids of prompts are below this")
    add("--serve", nargs=argparse.REMAINDER, default=[], help="arguments for the server that is started")
    add("--json", action="store_true")
    options = parser.parse_args(arguments)
    process, url, model, pids = None, options.url, options.model, []
    if url is None:
        process, url, model, engine = started(options.serve)
        pids = [process.pid, engine]
    load = Load(
        url, model or "", options.streams, options.seconds, options.prompt_tokens, options.shared_tokens,
        options.max_tokens, options.vocabulary, options.key,
    )  # fmt: skip
    try:
        seen = asyncio.run(offer(load, pids)).summary()
    finally:
        if process is not None:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
    if options.json:
        print(json.dumps(seen, indent=2))
    else:
        for name, value in seen.items():
            print(f"{name.replace('_', ' '):34} {value}")
    return int(bool(seen["errors"]))


if __name__ == "__main__":
    sys.exit(main())
