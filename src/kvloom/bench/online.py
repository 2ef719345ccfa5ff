"""`kvloom bench online` sends requests at given rates to one or more servers, in turns, and compares their latency.

Requests arrive at random times (a Poisson process), whether or not earlier requests have ended. All servers get the
same requests at the same times. Several client processes share the load, so that the client is not the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvloom.arguments import Parser, number, server, whole
from kvloom.serve.http_client import KEY

from .online_client import FIRST_ID, Answer, ClientWork, Plan
from .serve import served_model

__all__ = ["OnlineLoad", "main", "measure", "plan_requests", "summary"]

WORK = {
    "chat": "independent questions with about 220 prompt tokens and 200 output tokens; both lengths are log-normal",
    "sessions": "64 conversations of 8 turns; turn n has 2,048 + 256 n prompt tokens and 128 output tokens",
}
SESSIONS, TURNS, FIRST_TURN_TOKENS, TURN_TOKENS, TURN_OUTPUT = 64, 8, 2048, 256, 128
DRAIN_SECONDS = 60.0
"""Longest time that clients wait for answers after the last request."""
START_SECONDS = 0.3
"""Time between the command to start and the first request."""
PERCENTS = (50, 99)


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """The load that servers get, without its rate. The command line explains the fields. `seconds` is the length of a
    load with a finite rate, and `requests` the number of requests at an infinite rate."""

    work: str
    seconds: float = 20.0
    requests: int = 500
    clients: int = 4
    ttft_ms: float = 500.0
    tbt_ms: float = 50.0
    tokenizer: Path | None = None
    vocabulary: int = 4096
    seed: int = 0
    model: str | None = None
    key: str = ""


def plan_requests(work: str, rate: float, count: int, seed: int) -> list[Plan]:
    """Return `count` requests at `rate` requests per second. If the rate is infinite, all are sent at once."""
    rng = np.random.default_rng(seed)
    times = np.zeros(count) if math.isinf(rate) else np.cumsum(rng.exponential(1 / rate, count))
    if work == "chat":
        prompts = np.clip(rng.lognormal(4.9, 1.0, count), 4, 2048).astype(int)
        outputs = np.clip(rng.lognormal(4.9, 0.9, count), 4, 1024).astype(int)
        lengths = zip(times, prompts, outputs, strict=True)
        return [
            Plan(float(at), i, int(prompt), int(tokens)) for i, (at, prompt, tokens) in enumerate(lengths)
        ]
    plans = []
    for i, at in enumerate(times):
        turn, round_ = i // SESSIONS % TURNS, i // (SESSIONS * TURNS)
        conversation = round_ * SESSIONS + i % SESSIONS
        plans.append(Plan(float(at), conversation, FIRST_TURN_TOKENS + TURN_TOKENS * turn, TURN_OUTPUT))
    return plans


def run_clients(work: ClientWork, clients: int) -> list[Answer]:
    """Run a work with several client processes. Each sends a part of the requests at their planned times."""
    processes = []
    try:
        for i in range(clients):
            process = subprocess.Popen(
                [sys.executable, "-m", "kvloom.bench.online_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            processes.append(process)
            assert process.stdin is not None
            part = msgspec.structs.replace(work, plans=work.plans[i::clients])
            process.stdin.write(msgspec.json.encode(part) + b"\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise ValueError("a client process did not start; see its output above")
        start = time.monotonic() + START_SECONDS
        answers: list[Answer] = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"%f\n" % start)
            process.stdin.close()
        for process in processes:
            assert process.stdout is not None
            found = process.stdout.read()
            if process.wait():
                raise ValueError(f"a client process ended with {process.returncode}; see its output above")
            answers += msgspec.json.decode(found, type=list[Answer])
        return answers
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary(answers: list[Answer], ttft_ms: float, tbt_ms: float) -> dict[str, Any]:
    """Return the figures of one server at one rate. A request meets the objective if its first token took at most
    `ttft_ms`, and the mean time between its tokens was at most `tbt_ms`. Times are in milliseconds.
    """
    ended = [one for one in answers if not one.error]
    if not ended:
        return {"requests": 0, "errors": dict(Counter(one.error for one in answers))}
    spans = [sum(one.gaps) for one in ended]
    took = max(one.asked + one.first + span for one, span in zip(ended, spans, strict=True))
    mean = [span / max(1, one.tokens - 1) for one, span in zip(ended, spans, strict=True)]
    met = sum(
        1e3 * one.first <= ttft_ms and 1e3 * per <= tbt_ms for one, per in zip(ended, mean, strict=True)
    )
    return {
        "requests": len(ended),
        "requests_per_second": round(len(ended) / took, 2),
        "output_tokens_per_second": round(sum(one.tokens for one in ended) / took, 1),
        "met_per_second": round(met / took, 2),
        "met_share": round(met / len(answers), 4),
        "ttft_ms": _percentiles([one.first for one in ended]),
        "tbt_ms": _percentiles(list(chain.from_iterable(one.gaps for one in ended))),
        "mean_tbt_ms": _percentiles(mean),
        "errors": dict(Counter(one.error for one in answers if one.error)),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(seconds, PERCENTS)
    return {f"p{p}": round(1e3 * float(value), 2) for p, value in zip(PERCENTS, values, strict=True)}


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench online",
        description="Compare servers under the same load: latency at given request rates, and requests within an objective.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="work:\n" + "".join(f"  {name:9} {what}\n" for name, what in WORK.items()) + "\nexamples:\n"
        "  kvloom bench online kvloom=127.0.0.1:8000 vllm=127.0.0.1:8001 --rates inf 10 20\n"
        "  kvloom bench online kvloom=127.0.0.1:8000 --work sessions --rates 5 --tokenizer MODEL/tokenizer.json --json\n\n"
        "The exit code is 1 if a request failed.",
    )
    add = parser.add_argument
    add("servers", type=_named_server, nargs="+", metavar="NAME=URL", help="servers with /v1/completions")
    add("--model", metavar="NAME", help="model name (default: the first that a server lists)")
    add("--api-key", metavar="KEY", help=f"API key (default: ${KEY})")
    add("--work", choices=tuple(WORK), default="chat", help="prompts and lengths (default: chat)")
    add(
        "--rates",
        type=_rate,
        nargs="+", default=[math.inf], metavar="R",
        help="requests per second, several rates one after the other; inf sends all at once (default: inf)",
    )  # fmt: skip
    add(
        "--seconds",
        type=number(0, above=True),
        default=20.0,
        metavar="S",
        help="length of one load (default: 20)",
    )
    add("--requests", type=whole(1), default=500, metavar="N", help="requests of rate inf (default: 500)")
    add("--clients", type=whole(1), default=4, metavar="N", help="client processes (default: 4)")
    add(
        "--ttft",
        type=number(0, above=True),
        default=500.0,
        metavar="MS",
        help="objective: first token (default: 500)",
    )
    add(
        "--tbt",
        type=number(0, above=True),
        default=50.0,
        metavar="MS",
        help="objective: mean time between tokens (default: 50)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, to send text (default: send token ids)",
    )
    add(
        "--vocabulary",
        type=whole(FIRST_ID + 1),
        default=4096,
        metavar="N",
        help="prompt ids are below N (default: 4096)",
    )
    add(
        "--seed", type=whole(0), default=0, metavar="N", help="seed of prompts and arrival times (default: 0)"
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _named_server(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} must be like NAME=URL")
    return name, server(url)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else number(0, above=True)(text)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.tokenizer is not None and not options.tokenizer.is_file():
            raise ValueError(f"--tokenizer {options.tokenizer}: no such file")
        load = OnlineLoad(
            options.work, options.seconds, options.requests, options.clients, options.ttft, options.tbt,
            options.tokenizer, options.vocabulary, options.seed, options.model,
            options.api_key or os.environ.get(KEY) or "",
        )  # fmt: skip
        rows = measure(options.servers, load, options.rates)
    except (ValueError, OSError) as error:
        print(f"kvloom bench online: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows)
    return int(any(row["errors"] for row in rows))


def measure(
    servers: Sequence[tuple[str, str]], load: OnlineLoad, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Measure servers, given as (name, URL), at each rate. Return one row per rate and server. Prints a line to stderr
    after each measurement."""
    models = {name: load.model or served_model(url, load.key or None) for name, url in servers}
    rows = []
    for turn, rate in enumerate(rates):
        count = load.requests if math.isinf(rate) else max(1, round(rate * load.seconds))
        seed, shown = load.seed + turn, "inf" if math.isinf(rate) else rate
        plans = plan_requests(load.work, rate, count, seed)
        limit = plans[-1].at + DRAIN_SECONDS
        for name, url in servers:
            work = ClientWork(
                url, models[name], limit, plans, str(load.tokenizer or ""), load.vocabulary, seed, load.key
            )
            answers = run_clients(work, min(load.clients, count))
            rows.append({"server": name, "rate": shown, **summary(answers, load.ttft_ms, load.tbt_ms)})
            failed = sum(rows[-1]["errors"].values())
            print(
                f"{name}, {load.work}, {shown} requests per second: {len(answers)} sent, {failed} failed",
                file=sys.stderr,
                flush=True,
            )
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    for column in (
        "rate",
        "server",
        "requests/s",
        "tokens/s",
        "met/s",
        "TTFT p50, p99 ms",
        "TBT p50, p99 ms",
        "errors",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        times = [
            " ".join(f"{value:,.1f}" for value in row.get(name, {}).values())
            for name in ("ttft_ms", "tbt_ms")
        ]
        figures = [
            f"{row.get(name, 0):,.1f}"
            for name in ("requests_per_second", "output_tokens_per_second", "met_per_second")
        ]
        table.add_row(str(row["rate"]), row["server"], *figures, *times, str(sum(row["errors"].values())))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
