"""`kvloom bench memory` measures how fast memory moves from an idle model to a busy model.

    two models share the memory ──▶ one fills most of it, then is idle ──▶ the other gets a prompt larger than its pool

The result is the time from the arrival of the prompt to the first growth of the busy model's pool. To free memory, the
idle model evicts cached pages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvloom.arguments import Parser, progress_bar, whole
from kvloom.serve.http_client import fetch

from .serve import Load, offer, started

__all__ = ["main"]

NAMES = ("one", "other")
MEMORY = 32 << 20
FULL = 0.7
"""Fraction of the memory that a model fills before it becomes idle."""
REST_SECONDS = 1.0
POLL_SECONDS = 0.005
MAX_BURSTS = 60
LONGEST_SECONDS = 60.0


def _measure(
    rounds: int, arguments: list[str], progress: Callable[[int, int], None] | None
) -> dict[str, Any]:
    """Return a report with one value per round: the seconds from the arrival of a prompt until the pool of its model
    first grows. The busy and the idle model change places after each round."""
    named = [part for name in NAMES for part in ("--name", name)]
    process, url, _, _ = started(
        ["kvloom-llama", "kvloom-llama", *named, "--memory", str(MEMORY), "--token-budget", "128", *arguments]
    )
    try:
        seconds = []
        for number in range(rounds):
            if progress is not None:
                progress(number, rounds)
            idle, busy = NAMES[number % 2], NAMES[(number + 1) % 2]
            asyncio.run(_fill(url, idle, number))
            time.sleep(REST_SECONDS)
            seconds.append(asyncio.run(_growth(url, busy, number)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return {
        "memory_bytes": MEMORY,
        "rounds": rounds,
        "seconds": [round(each, 3) for each in seconds],
        "median_s": round(statistics.median(seconds), 3),
        "most_s": round(max(seconds), 3),
    }


async def _fill(url: str, model: str, seed: int) -> None:
    """Run requests on a model until it has most of the memory."""
    for number in range(MAX_BURSTS):
        await _offered(Load(url, model, 8, 0.5, 512, 0, 16, seed=1 + seed * MAX_BURSTS + number))
        if _pool_bytes(url, model) >= FULL * MEMORY:
            return
    raise ValueError(f"the pool of {model} has {_pool_bytes(url, model):,} bytes after {MAX_BURSTS} bursts")


async def _growth(url: str, model: str, seed: int) -> float:
    """Send one prompt that needs twice the model's pool, and return the seconds until this pool has grown."""
    before = _pool_bytes(url, model)
    longest = int(fetch(url, f"/v1/models/{model}")["max_model_len"])
    size = min(longest - 8, 2 * longest * before // (MEMORY // 2))
    load = Load(url, model, 1, 0.001, size, 0, 4, seed=seed)
    began = time.monotonic()
    request = asyncio.create_task(_offered(load))
    try:
        while await asyncio.to_thread(_pool_bytes, url, model) <= before:
            if time.monotonic() - began > LONGEST_SECONDS:
                raise ValueError(f"the pool of {model} did not grow within {LONGEST_SECONDS:g} s")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began
    finally:
        await request


async def _offered(load: Load) -> None:
    seen = await offer(load)
    if seen.errors:
        raise ValueError(f"requests failed: {dict(seen.errors)}")


def _pool_bytes(url: str, model: str) -> int:
    return int(fetch(url, f"/admin/pool?model={model}")["bytes"])


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench memory",
        description="Start two models with one memory, and measure how soon one uses the idle memory of the other.",
    )
    rounds = "measurements, in turn on either model (default: 6)"
    parser.add_argument("--rounds", type=whole(1), default=6, metavar="N", help=rounds)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    own = "further arguments of the started server"
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], metavar="...", help=own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        with progress_bar(f"{options.rounds} rounds", sys.stderr.isatty()) as progress:
            found = _measure(options.rounds, options.serve, progress)
    except (OSError, ValueError) as error:
        print(f"kvloom bench memory: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        each = ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])
        print(f"idle memory is used after {found['median_s']:.2f} s (median), in rounds: {each} s")
    return 0
