"""`kvloom bench admission` measures goodput under overload in three modes: with SLO admission, with a bounded queue,
and with neither.

Goodput is the number of requests per second that meet their objectives. Each round first measures the capacity of the
engine in requests per second. Then requests arrive at random times, at `--load` times this rate, whether or not earlier
requests have finished. All modes get the same requests. The modes run one after the other, in a new order in each
round.

The clock is the CPU time of this process, so that other processes have little effect. While no request is open, the
clock jumps to the next arrival. With --trace, no engine runs: simulated workers replay a trace instead.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvloom.arguments import Parser, number, whole
from kvloom.core import CacheControl, Objective

if TYPE_CHECKING:
    from kvloom.engine import Engine, Request

__all__ = ["main"]

FIRST_ID, LAST_ID = 3, 250
PROMPTS, OUTPUTS = (16, 160), (8, 32)
"""Shortest and longest prompt and output, in tokens."""
SATURATED = 96
"""Number of simultaneous requests in the run that measures the engine's capacity."""
SLACK = (6.0, 4.0)
"""Default objectives, as multiples of the TTFT and TBT of an idle engine."""


class CpuClock:
    """A clock that shows the CPU seconds of this process, plus the idle time that the benchmark skipped."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self.skipped


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its arrival time, its prompt, and its number of output tokens."""

    at: float
    prompt: list[int]
    output: int


def arrivals(count: int, seconds: float, seed: int) -> list[Arrival]:
    """Return `count` requests with random lengths, at random times within `seconds`, as in a Poisson process."""
    draw = random.Random(seed)
    found = []
    for at in sorted(draw.uniform(0.0, seconds) for _ in range(count)):
        prompt = [draw.randint(FIRST_ID, LAST_ID) for _ in range(draw.randint(*PROMPTS))]
        found.append(Arrival(at, prompt, draw.randint(*OUTPUTS)))
    return found


@dataclass(slots=True)
class Served:
    """A request of a run, with its arrival time (`at`) and the times of its first and last token. `request` is None if
    it was refused because the queue was full.
    """

    at: float
    request: Request | None
    first: float = 0.0
    last: float = 0.0

    def meets(self, objective: Objective) -> bool:
        request = self.request
        if request is None or request.finish_reason != "length" or not self.first:
            return False
        ttft, count = 1e3 * (self.first - self.at), request.output_count
        tbt = 1e3 * (self.last - self.first) / (count - 1) if count > 1 else 0.0
        return ttft <= (objective.ttft_ms or math.inf) and tbt <= (objective.tbt_ms or math.inf)


def drive(
    engine: Engine,
    clock: CpuClock,
    work: Sequence[Arrival],
    salt: str,
    objective: Objective | None = None,
    queue: int | None = None,
) -> list[Served]:
    """Add requests when they arrive, and run steps until all have finished. Return the requests with their times.

    With `objective`, SLO admission may refuse requests. With `queue`, a request is refused if this many requests
    already wait. Requests share pages only with requests of the same `salt`.
    """
    from kvloom.engine import SamplingParams

    found: list[Served] = []
    open_: list[Served] = []
    began, next_ = clock.now(), 0
    while next_ < len(work) or engine.busy:
        now = clock.now() - began
        while next_ < len(work) and work[next_].at <= now:
            one = work[next_]
            next_ += 1
            request = None
            if queue is None or engine.scheduler.waiting < queue:
                params = SamplingParams(max_tokens=one.output, temperature=0, ignore_eos=True)
                control = CacheControl(salt=salt)
                request = engine.add(one.prompt, params, control, slo=objective, arrived=began + one.at)
            found.append(Served(began + one.at, request))
            if request is not None and request.finish_reason is None:
                open_.append(found[-1])
        if not engine.busy:
            if next_ < len(work):
                clock.skipped += max(0.0, work[next_].at - now)
            continue
        engine.step()
        now = clock.now()
        for served in open_:
            assert served.request is not None
            if not served.first and served.request.output_count:
                served.first = now
            served.last = now
        open_ = [s for s in open_ if s.request is not None and s.request.finish_reason is None]
    return found


@dataclass(slots=True)
class Tally:
    """The results of one mode over all rounds."""

    requests: int = 0
    refused: int = 0
    met: int = 0
    ttft: list[float] = field(default_factory=list)
    """Times to first token of the served requests, in seconds."""

    def add(self, seen: list[Served], objective: Objective) -> None:
        """Add the requests of a run."""
        served = [one for one in seen if one.request is not None and one.request.finish_reason == "length"]
        self.requests += len(seen)
        self.refused += len(seen) - len(served)
        self.met += sum(one.meets(objective) for one in seen)
        self.ttft += [one.first - one.at for one in served]

    def to_dict(self, name: str, seconds: float) -> dict[str, Any]:
        return {
            "admission": name,
            "requests": self.requests,
            "refused": self.refused,
            "met": self.met,
            "goodput": round(self.met / seconds, 3),
            "ttft_p99_ms": round(1e3 * _quantile(self.ttft, 0.99), 1),
        }


def measure_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three modes (see the module docstring) on an engine in this process."""
    from kvloom.engine import LLM

    llm = LLM(options.model, pool_bytes=256 << 20, token_budget=256, threads=options.threads or 1)
    engine, clock = llm.engine, CpuClock()
    engine.cache.clock = clock
    idle = [Arrival(0.0, one.prompt, one.output) for one in arrivals(12, 1.0, seed=1)]
    drive(engine, clock, idle, "warm up")
    alone = [drive(engine, clock, [one], "alone")[0] for one in idle]
    ttft = sorted(one.first - one.at for one in alone)[len(alone) // 2]
    tbt = sorted(
        (one.last - one.first) / max(1, (one.request.output_count if one.request else 1) - 1) for one in alone
    )[len(alone) // 2]
    objective = Objective(options.ttft or 1e3 * SLACK[0] * ttft, options.tbt or 1e3 * SLACK[1] * tbt)
    modes: list[tuple[str, Objective | None, int | None]] = [("none", None, None), ("slo", objective, None)]
    modes += [(f"queue {limit}", None, limit) for limit in options.queue]
    tallies = {name: Tally() for name, *_ in modes}
    rates: list[float] = []
    seconds = 0.0
    for round_ in range(options.rounds):
        _say(f"round {round_ + 1} of {options.rounds}: capacity")
        rate = options.load * _capacity(engine, clock, round_)
        count = round(rate * options.seconds)
        seconds += count / rate
        work = arrivals(count, count / rate, seed=100 + round_)
        rates.append(round(rate, 2))
        for turn in range(len(modes)):
            name, given, queue = modes[(turn + round_) % len(modes)]
            _say(f"round {round_ + 1} of {options.rounds}: {name}, {count} requests")
            tallies[name].add(drive(engine, clock, work, f"{name} {round_}", given, queue), objective)
    ratio = engine.scheduler.slo.admission.ttft_ratio.quantile(0.5)
    llm.close()
    return {
        "capacity": [round(rate / options.load, 2) for rate in rates],
        "rate": rates,
        "ttft_ms": round(objective.ttft_ms or 0, 1),
        "tbt_ms": round(objective.tbt_ms or 0, 1),
        "ttft_ratio_p50": ratio,
        "modes": [tally.to_dict(name, seconds) for name, tally in tallies.items()],
    }


def _capacity(engine: Engine, clock: CpuClock, round_: int) -> float:
    """Return how many requests per second the engine finishes if SATURATED requests arrive at once."""
    at_once = [Arrival(0.0, one.prompt, one.output) for one in arrivals(SATURATED, 1.0, seed=2)]
    began = clock.now()
    drive(engine, clock, at_once, f"capacity {round_}")
    return len(at_once) / (clock.now() - began)


def measure_trace(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three modes (see the module docstring) on simulated workers that replay a trace."""
    from kvloom.replay.fleet import replay_fleet
    from kvloom.replay.traces import read_traces

    traffic = read_traces([options.trace])
    objective = Objective(options.ttft or 2000.0, options.tbt or 80.0)
    modes = [("none", 0), ("slo", 0), *(("queue", limit) for limit in options.queue)]
    rows = []
    for name, limit in modes:
        _say(f"{name}: {len(traffic.requests)} requests")
        seen = replay_fleet(
            traffic, options.workers, options.capacity, speed=options.speed, admission=name, objective=objective,
            queue_limit=limit, prefill=options.prefill,
        )  # fmt: skip
        rows.append(
            {
                "admission": f"{name} {limit}" if limit else name,
                "requests": len(traffic.requests),
                "refused": seen.refused,
                "met": seen.met,
                "goodput": round(seen.goodput, 3),
                "ttft_p99_ms": round(1e3 * seen.p99_ttft, 1),
            }
        )
    rate = len(traffic.requests) / max(1e-9, traffic.seconds / options.speed)
    return {
        "capacity": [],
        "rate": [round(rate, 2)],
        "ttft_ms": objective.ttft_ms,
        "tbt_ms": objective.tbt_ms,
        "modes": rows,
    }


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(prog="kvloom bench admission", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="kvloom-llama", metavar="MODEL", help="model (default: kvloom-llama)")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: 1)")
    load = "arrivals as a multiple of the measured capacity (default: 2)"
    add("--load", type=number(0, above=True), default=2.0, metavar="X", help=load)
    add(
        "--seconds",
        type=number(0, above=True),
        default=30.0,
        metavar="S",
        help="time of arrivals (default: 30)",
    )
    add("--ttft", type=number(0, above=True), metavar="MS",
        help="objective of the first token (default: 6 times that of an idle engine; 2000 with --trace)")  # fmt: skip
    add("--tbt", type=number(0, above=True), metavar="MS",
        help="objective between tokens (default: 4 times that of an idle engine; 80 with --trace)")  # fmt: skip
    queue = "most waiting requests of the mode with a bounded queue; several are possible (default: 2 8)"
    add("--queue", type=whole(1), nargs="+", default=[2, 8], metavar="N", help=queue)
    add("--trace", metavar="FILE", help="replay this trace on simulated workers instead")
    add("--workers", type=whole(1), default=2, metavar="N", help="with --trace: workers (default: 2)")
    add("--prefill", type=whole(0), default=0, metavar="N", help="with --trace: prefill workers among them")
    add(
        "--capacity",
        type=whole(1),
        default=1250,
        metavar="N",
        help="with --trace: blocks of a worker (default: 1250)",
    )
    add("--speed", type=number(0, above=True), default=2.0, metavar="X",
        help="with --trace: divide the times between arrivals by this (default: 2)")  # fmt: skip
    add("--rounds", type=whole(1), default=1, metavar="N", help="rounds of all modes, in turn (default: 1)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    found = measure_engine(options) if options.trace is None else measure_trace(options)
    _say("")
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    console = Console(highlight=False)
    for round_, rate in enumerate(found["rate"]):
        about = f"; measured capacity {found['capacity'][round_]} requests/s" if found["capacity"] else ""
        console.print(f"round {round_ + 1}: {rate} requests/s arrive{about}")
    console.print(f"objectives: TTFT {found['ttft_ms']:,.0f} ms, TBT {found['tbt_ms']:,.1f} ms")
    table = Table("admission", box=None)
    for name in ("requests", "refused", "met", "goodput /s", "TTFT p99"):
        table.add_column(name, justify="right")
    for row in found["modes"]:
        cells = [str(row[name]) for name in ("requests", "refused", "met")]
        table.add_row(row["admission"], *cells, f"{row['goodput']:.2f}", f"{row['ttft_p99_ms']:,.0f} ms")
    console.print(table)
    return 0
