"""`kvloom bench metrics` measures the cost of the server's metrics, request records, stats messages and scrapes (reads
of /metrics).

The benchmark has two results. For the first, each part is timed alone and multiplied by its rate under a load. For the
second, the same load runs on a server with metrics, which are scraped every second, and on a server without metrics
(`--no-metrics`). On a busy machine the second result has an error of several percent, so use the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request

from kvloom.arguments import Parser, number, whole
from kvloom.serve.http_client import open_url

from .serve import Load, offer, started

__all__ = ["Parts", "Turn", "main", "measure", "time_parts"]

TICKS = os.sysconf("SC_CLK_TCK")
STATS_A_SECOND = 4
PROGRESS_REPORTS = 3


@dataclass(frozen=True, slots=True)
class Parts:
    """The CPU time that metrics cost, in microseconds: per streamed token, per request with its progress messages, per
    stats message, and per scrape (read of /metrics)."""

    token: float
    request: float
    stats: float
    scrape: float

    def share(self, cpu_us_a_token: float, tokens_a_request: float, tokens_per_second: float) -> float:
        """Return the fraction of a load's CPU time that metrics use, with one scrape per second. The arguments describe
        the load: CPU microseconds per token, tokens per request, and tokens per second.
        """
        periodic = (STATS_A_SECOND * self.stats + self.scrape) / tokens_per_second
        return (self.token + self.request / tokens_a_request + periodic) / cpu_us_a_token


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one round of load on a server. `cpu_us_a_token` is the CPU time of the server process and the
    engine process together, in microseconds per token."""

    tokens_per_second: float
    cpu_us_a_token: float


def time_parts(engine: Any) -> Parts:
    """Time each part, with the counters of a used engine. Takes a few seconds."""
    import msgspec

    from kvloom.engine import SamplingParams
    from kvloom.serve.auth import RequestLimiter
    from kvloom.serve.metrics import Metrics, RequestObserver, ServerMetrics
    from kvloom.serve.worker import (
        Add,
        EngineClient,
        FromEngine,
        Outputs,
        Ready,
        RequestProgress,
        Start,
        engine_stats,
    )

    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
    encode = msgspec.msgpack.Encoder().encode
    open_requests = [("", True)] * 64
    stats = engine_stats(engine, 1, 1, 0, {}, open_requests)

    def make() -> tuple[Metrics, RequestObserver]:
        link = EngineClient(Start(""), print, print)
        link.stats = stats
        layout = engine.layout
        link.info = Ready("", "", 1, 1, {}, 1, layout.slab_bytes, layout.block_tokens, 1, layout.table(), 0.0)
        metrics = Metrics(link, "model")
        return metrics, RequestObserver(metrics)

    async def made() -> tuple[Metrics, RequestObserver]:
        return make()

    metrics, observer = asyncio.run(made())
    server = ServerMetrics(RequestLimiter(1))
    progress = RequestProgress(1, 1.0, 1.0, 1.0, 64, {"device": 64}, 64, "never seen")
    add = Add(1, [0] * 64, SamplingParams(), True)

    def request() -> None:
        record = observer.start("cmpl", "/v1/completions", [add], time.monotonic(), {})
        for _ in range(PROGRESS_REPORTS):
            message = decoder.decode(encode(Outputs(progress=[progress])))
            assert isinstance(message, Outputs)
            observer.record_progress(message.progress[0])
        record.first_token, record.output_tokens, record.finish_reasons = record.started, 24, ["length"]
        observer.finish(record)

    return Parts(
        token=_timed(lambda: metrics.inter_token.add(0.0123, 1), 20000),
        request=_timed(request, 500),
        stats=_timed(
            lambda: decoder.decode(encode(Outputs(stats=engine_stats(engine, 1, 1, 0, {}, open_requests)))),
            100,
        ),
        scrape=_timed(lambda: server.exposition_text([metrics], everyone=True), 20),
    )


def _timed(what: Callable[[], object], times: int) -> float:
    """Return CPU microseconds per call, as the smallest value of several rounds."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times):
            what()
        rounds.append((time.thread_time() - began) / times)
    return 1e6 * min(rounds)


def measure(load: Load, processes: list[int], scrape: bool) -> Turn:
    """Put a load on a server, and measure its throughput and CPU time. With `scrape`, also read /metrics every second.
    Raises RuntimeError if a request fails."""

    async def run() -> tuple[int, float]:
        scraper = asyncio.create_task(_scrape(load.url)) if scrape else None
        seen = await offer(load)
        if scraper is not None:
            scraper.cancel()
            with suppress(asyncio.CancelledError):
                await scraper
        if seen.errors:
            raise RuntimeError(f"requests failed: {dict(seen.errors)}")
        return seen.pieces, seen.seconds

    before = sum(map(_cpu_seconds, processes))
    pieces, seconds = asyncio.run(run())
    spent = sum(map(_cpu_seconds, processes)) - before
    return Turn(pieces / seconds, 1e6 * spent / max(1, pieces))


async def _scrape(url: str) -> None:
    while True:
        await asyncio.to_thread(_get, f"{url}/metrics")
        await asyncio.sleep(1.0)


def _get(url: str) -> bytes:
    with open_url(Request(url)) as answer:
        return bytes(answer.read())


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def _turns(options: argparse.Namespace) -> list[tuple[Turn, Turn]]:
    """Start a server with metrics and one without. Return pairs of measurements: with metrics, without metrics.

    The servers alternate. The first pair warms them up and is not returned."""
    servers = []
    turns = []
    try:
        for extra in ([], ["--no-metrics"]):
            servers.append(started([*extra, *options.serve]))
        for number in range(options.turns + 1):
            pair: dict[int, Turn] = {}
            for side in (0, 1) if number % 2 else (1, 0):
                process, url, model, engine = servers[side]
                load = Load(
                    url,
                    model,
                    streams=options.streams,
                    seconds=options.seconds if number else 2.0,
                    prompt=options.prompt_tokens,
                    shared=options.prompt_tokens // 2,
                    tokens=options.max_tokens,
                )
                pair[side] = measure(load, [process.pid, engine], scrape=side == 0)
            if number:  # the first warms up
                turns.append((pair[0], pair[1]))
    finally:
        for process, *_ in servers:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
    return turns


def _summary(turns: list[tuple[Turn, Turn]], parts: Parts, tokens_a_request: float) -> dict[str, Any]:
    """Return the median speed and CPU time with and without metrics, and the cost that is estimated from `parts`. Also
    return two ratios of each pair of turns, and their medians. Each ratio is a time per token with metrics, divided by
    the time without metrics: one for wall-clock time, and one for CPU time. A ratio above 1 means that metrics cost
    time.
    """
    speed = sorted(off.tokens_per_second / on.tokens_per_second for on, off in turns)
    cpu = sorted(on.cpu_us_a_token / off.cpu_us_a_token for on, off in turns)
    middle = {
        name: Turn(
            statistics.median(t[i].tokens_per_second for t in turns),
            statistics.median(t[i].cpu_us_a_token for t in turns),
        )
        for i, name in enumerate(("with_metrics", "without_metrics"))
    }
    off = middle["without_metrics"]
    return {
        "parts_us": {name: round(getattr(parts, name), 2) for name in Parts.__slots__},
        "share_by_parts": round(
            parts.share(off.cpu_us_a_token, tokens_a_request, off.tokens_per_second), 5
        ),
        **{
            name: {"tokens_per_second": round(t.tokens_per_second, 1), "cpu_us_a_token": round(t.cpu_us_a_token, 1)}
            for name, t in middle.items()
        },
        "turns": len(turns),
        "time_ratio": round(statistics.median(speed), 4),
        "time_ratios": [round(value, 3) for value in speed],
        "cpu_ratio": round(statistics.median(cpu), 4),
        "cpu_ratios": [round(value, 3) for value in cpu],
    }  # fmt: skip


def _parser() -> Parser:
    parser = Parser(prog="kvloom bench metrics", description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--turns", type=whole(1), default=8, metavar="N", help="pairs of turns (default: 8)")
    add(
        "--seconds",
        type=number(0, above=True),
        default=6.0,
        metavar="S",
        help="seconds per turn (default: 6)",
    )
    add("--streams", type=whole(1), default=16, metavar="N", help="concurrent streams (default: 16)")
    add("--prompt-tokens", type=whole(1), default=64, metavar="N", help="tokens per prompt (default: 64)")
    add("--max-tokens", type=whole(1), default=32, metavar="N", help="tokens per answer (default: 32)")
    add(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="further arguments of both servers",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    from kvloom.models.specs import folder_of
    from kvloom.serve.worker import Start, load_engine

    engine = load_engine(
        Start(folder_of("kvloom-llama"), cpu_dtype="float32", settings={"pool_bytes": 64 << 20})
    )
    for seed in range(32):
        engine.add([5 + (seed * i) % 200 for i in range(64)])
    engine.run()
    parts = time_parts(engine)
    found = _summary(_turns(options), parts, 0.75 * options.max_tokens)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' '):16} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
