"""`kvloom replay`: command-line arguments, tables and JSON of the simulator."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvloom.arguments import number, parse_size, size, whole
from kvloom.core import Objective, PoolLayout, format_bytes
from kvloom.models.specs import folder_of, load_spec

from .cost import CostModel, Load, estimate
from .routes import ADMISSIONS, ROUTES
from .simulator import NAMES, Outcome, Tier, TierUse, replay
from .sizing import Sizing, size_cache, sizes_to_try
from .tier_rules import TIER_RULES
from .traces import read_traces
from .traffic import Traffic, repeat

if TYPE_CHECKING:
    from .fleet import FleetOutcome

__all__ = ["arguments", "run"]

DEFAULT_BYTES = 131072
"""Bytes per token of an 8B Llama 3 in bf16. Sizes in bytes are converted to blocks with this value if no model is
given.
"""
Row = tuple[Outcome, Load | None]


def arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="trace files (gzipped or not) or folders")
    add(
        "--capacity",
        action="append",
        default=[],
        metavar="C",
        help="cache size in blocks (10000), share of distinct blocks (10%%) or bytes (80GiB); repeatable (default: 10%%)",
    )
    add(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        help="eviction policy, or the bounds ideal and min; repeatable (default: ideal, min, lru, adaptive)",
    )
    add("--tier", action="append", default=[], metavar="NAME=C", help="tier and its size; repeatable")
    add(
        "--tier-rule",
        action="append",
        default=[],
        choices=TIER_RULES,
        help="with --tier: which blocks tiers store and evict; repeatable (default: through)",
    )
    add(
        "--model",
        metavar="MODEL",
        help="model that defines the bytes per token (default: the recording's, else an 8B Llama 3: 128 KiB per token)",
    )
    add(
        "--kv-dtype",
        metavar="D",
        help="dtype of the KV cache: bf16, fp16, fp32, int8 or fp8 (default: the model's)",
    )
    add(
        "--size",
        action="store_true",
        help="report the capacity of each tier that a hit rate needs, and the gain of one more GB",
    )
    add(
        "--target",
        type=number(0, 1, above=True),
        metavar="R",
        help="target hit rate of --size (default: 0.9 of the ideal)",
    )
    _add_cost_arguments(parser)
    _add_fleet_arguments(parser)
    add("--repeat", type=whole(1), default=1, metavar="N",
        help="replay N copies of the traces at once, as if they came from different users (default: 1)")  # fmt: skip
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of agent sessions' start times (default: 0)",
    )
    add(
        "--spread",
        type=number(0),
        default=3600.0,
        metavar="S",
        help="seconds over which agent sessions start (default: 3600)",
    )
    add("--ended", action="store_true", help="end each session after its last request")
    add("--plot", metavar="FILE", help="write hit-rate curves to this image (needs kvloom[plot])")
    add("--json", action="store_true", help="print JSON instead of tables")


def _add_cost_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--cost", action="store_true", help="estimate TTFT and throughput, too")
    add(
        "--parameters",
        type=number(0, above=True),
        default=8.0,
        metavar="N",
        help="billions of active parameters (default: 8)",
    )
    add(
        "--tflops",
        type=number(0, above=True),
        default=450.0,
        metavar="N",
        help="achieved TFLOP/s of one device (default: 450)",
    )
    add("--devices", type=whole(1), default=1, metavar="N", help="number of devices (default: 1)")


def _add_fleet_arguments(parser: ArgumentParser) -> None:
    """Add the options of several workers: routes, roles, objectives, and the search for the fewest workers."""
    add = parser.add_argument
    workers = "simulate N workers behind a router; --capacity is the size of each worker, whose eviction policy is lru"
    add("--workers", type=whole(1), metavar="N", help=workers)
    route = "with --workers: kv (the router's own scoring) or round-robin; repeatable (default: both)"
    add("--route", action="append", default=[], choices=ROUTES, help=route)
    speed = "with --workers: divide the times between arrivals by this; repeatable (default: 1)"
    add("--speed", action="append", default=[], type=number(0, above=True), metavar="X", help=speed)
    prefill = "with --workers: N of the workers only compute prompts, and the others only decode (default: 0, no roles)"
    add("--prefill", type=whole(0), default=0, metavar="N", help=prefill)
    link = "with --prefill or --plan: bytes per second from a prefill worker to decode workers (default: no limit)"
    add("--link", type=size, metavar="SIZE", help=link)
    ttft = "with --workers or --plan: objective of the time to first token, in milliseconds"
    add("--slo-ttft", type=number(0, above=True), metavar="MS", help=ttft)
    tbt = "with --workers or --plan: objective of the mean time between tokens, in milliseconds"
    add("--slo-tbt", type=number(0, above=True), metavar="MS", help=tbt)
    admission = "with --workers: refuse none, requests that miss their objective (slo), or those that find 16 waiting (queue)"
    add("--admission", action="append", default=[], choices=ADMISSIONS, help=admission)
    plan = "find the fewest workers, without roles and as prefill and decode workers, whose p99 meets the objectives"
    add("--plan", action="store_true", help=plan)
    most = "with --plan: largest number of workers (default: 256)"
    add("--max-workers", type=whole(2), default=256, metavar="N", help=most)
    windows = (
        "with --plan: parts of the trace for which a switch of roles is considered (default: 4; 1: none)"
    )
    add("--windows", type=whole(1), default=4, metavar="N", help=windows)


def run(args: Namespace) -> int:
    """Run the command. Raises ValueError for invalid arguments before replaying."""
    policies = _policies(args.policy)
    if args.plot is not None:
        from .plot import check_plot

        check_plot(args.plot)
    _say(f"reading {', '.join(args.traces)}")
    traffic = read_traces(args.traces, args.seed, args.spread)
    if not traffic.requests:
        raise ValueError("the traces contain no requests")
    traffic = repeat(traffic, args.repeat, args.seed) if args.repeat > 1 else traffic
    per_token = _bytes_per_token(args, traffic)
    block = per_token * traffic.block_tokens
    blocks = _Capacities(traffic, block)
    tiers = [blocks.tier(text) for text in args.tier]
    if args.tier_rule and (args.size or not tiers):
        raise ValueError("--tier-rule needs --tier NAME=C, and cannot be used with --size")
    if args.plan:
        return _plan(args, traffic, blocks, per_token)
    if args.workers is not None:
        return _run_fleet(args, traffic, blocks, per_token)
    for name in ("route", "speed", "prefill", "link", "slo_ttft", "slo_tbt", "admission"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} needs --workers N: it concerns several workers")
    cost = _cost(args, per_token, tiers) if args.cost else None
    if args.size:
        return _size(args, traffic, block, policies, tiers, blocks)
    capacities = [blocks.parse(text) for text in args.capacity]
    if not capacities:
        capacities = sizes_to_try(traffic) if args.plot else [max(1, traffic.distinct // 10)]
    rows: list[Row] = []
    for capacity, policy, rule in product(capacities, policies, args.tier_rule or ["through"]):
        shown = _Progress(f"{policy} at {capacity:,} blocks", len(traffic.requests))
        outcome = replay(
            traffic, capacity, policy, tiers=tiers, tier_rule=rule, ended=args.ended, progress=shown
        )
        rows.append((outcome, estimate(traffic, outcome, cost) if cost else None))
    _say("")
    if args.plot:
        from .plot import plot_curves

        plot_curves(traffic, [outcome for outcome, _ in rows], args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps([_plain(outcome, load, block) for outcome, load in rows], indent=2))
    else:
        _tables(traffic, rows, block)
    return 0


def _plan(args: Namespace, traffic: Traffic, blocks: _Capacities, per_token: int) -> int:
    """Find the smallest fleet for the traffic and print the plan: workers, roles, and whether to switch roles. Return
    the exit status.
    """
    from .fleet_plan import plan_fleet

    _exclude(args, "plan", ("policy", "tier", "size", "cost", "plot", "ended", "workers", "prefill", "route"))
    found = plan_fleet(
        traffic,
        blocks.parse((args.capacity or ["10%"])[0]),
        Objective(args.slo_ttft, args.slo_tbt),
        speed=(args.speed or [1.0])[0],
        link_tokens=_link_tokens(args, per_token),
        limit=args.max_workers,
        windows=args.windows,
        progress=_say,
    )
    _say("")
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    console = _console()
    console.print(_about(traffic))
    console.print(_fleet_table([one for one in (found.mixed, found.split) if one is not None]))
    for one in found.windows:
        console.print(
            f"{one.start:,.0f} to {one.end:,.0f} s: {one.requests:,} requests, best with {one.prefill} prefill workers "
            f"({one.excess:.2f} of the objectives; as planned {one.planned_excess:.2f})"
        )
    console.print(f"{found.answer}; {found.switches}")
    return 0


def _link_tokens(args: Namespace, per_token: int) -> float:
    """Return the speed of the link in tokens per second, from --link in bytes per second. Infinite without --link."""
    return math.inf if args.link is None else args.link / per_token


def _exclude(args: Namespace, option: str, names: Sequence[str]) -> None:
    for name in names:
        if getattr(args, name):
            raise ValueError(f"--{name} and --{option} exclude each other: use one of them")


def _run_fleet(args: Namespace, traffic: Traffic, blocks: _Capacities, per_token: int) -> int:
    """Replay over several workers, for every capacity, speed, route and admission, and print the results. Return the
    exit status.
    """
    from .fleet import replay_fleet

    _exclude(args, "workers", ("policy", "tier", "size", "cost", "plot", "ended"))
    found = []
    objective = Objective(args.slo_ttft, args.slo_tbt)
    for text in args.capacity or ["10%"]:
        for speed in args.speed or [1.0]:
            for route in dict.fromkeys(args.route or ROUTES):
                for admission in dict.fromkeys(args.admission or ["none"]):
                    capacity = blocks.parse(text)
                    what = f"{route} at {capacity:,} blocks, speed {speed:g}"
                    found.append(
                        replay_fleet(
                            traffic,
                            args.workers,
                            capacity,
                            route,
                            speed=speed,
                            prefill=args.prefill,
                            link_tokens=_link_tokens(args, per_token),
                            admission=admission,
                            objective=objective,
                            progress=_Progress(what, len(traffic.requests)),
                        )
                    )
    _say("")
    if args.json:
        print(json.dumps([outcome.to_dict() for outcome in found], indent=2))
        return 0
    console = _console()
    console.print(_about(traffic))
    console.print(_fleet_table(found, bool(objective)))
    return 0


def _fleet_table(found: Sequence[FleetOutcome], has_objective: bool = False) -> Table:
    table = Table("route", box=None)
    names = ["workers", "blocks each", "speed", "hit rate", "TTFT mean", "p50", "p99", "TBT mean", "p99"]
    if has_objective:
        names = [
            "workers",
            "speed",
            "hit rate",
            "TTFT mean",
            "p99",
            "TBT p99",
            "admission",
            "refused",
            "goodput",
        ]
    for name in names:
        table.add_column(name, justify="right")
    for one in found:
        workers = f"{one.prefill} + {one.workers - one.prefill}" if one.prefill else f"{one.workers}"
        cells = [
            workers,
            *([] if has_objective else [f"{one.blocks:,}"]),
            f"{one.speed:g}",
            f"{one.hit_rate:.2%}",
        ]
        times = [one.mean_ttft, one.p50_ttft, one.p99_ttft, one.mean_itl, one.p99_tbt]
        if has_objective:
            times = [one.mean_ttft, one.p99_ttft, one.p99_tbt]
        cells += [f"{1e3 * seconds:,.1f} ms" for seconds in times]
        if has_objective:
            cells += [one.admission, f"{one.refused:,}", f"{one.goodput:.2f}/s"]
        table.add_row(one.route, *cells)
    return table


def _bytes_per_token(args: Namespace, traffic: Traffic) -> int:
    """Return the KV bytes per token: those of --model, otherwise those that the recording states, otherwise those of an
    8B Llama 3."""
    model = args.model or (traffic.model if args.kv_dtype or traffic.bytes_per_token is None else "")
    if not model:
        return traffic.bytes_per_token or DEFAULT_BYTES
    try:
        return PoolLayout.build(load_spec(folder_of(model), args.kv_dtype).layers).bytes_per_token()
    except ValueError:
        if args.model is not None or args.kv_dtype is not None:
            raise
    _say("")
    print(
        f"the recording's model {model!r} is not known here: sizes assume {format_bytes(DEFAULT_BYTES)} per token; "
        "use --model with its folder",
        file=sys.stderr,
    )
    return DEFAULT_BYTES


def _policies(asked: Sequence[str]) -> list[str]:
    policies = list(dict.fromkeys(asked)) or ["ideal", "min", "lru", "adaptive"]
    for policy in policies:
        if policy not in NAMES:
            raise ValueError(f"unknown policy {policy!r}; known: {', '.join(NAMES)}")
    return policies


class _Capacities:
    """Parses cache sizes. A size is given in blocks, as a share of all distinct blocks, or in bytes."""

    def __init__(self, traffic: Traffic, block: int) -> None:
        self.traffic, self.block = traffic, block

    def parse(self, text: str) -> int:
        plain = text.replace(",", "").replace("_", "").strip()
        try:
            if plain.isdecimal():
                blocks = int(plain)
            elif plain.endswith("%"):
                blocks = round(float(plain[:-1]) / 100 * self.traffic.distinct)
            else:
                blocks = parse_size(plain) // self.block
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"capacity {text!r}: use blocks (10000), a share (10%) or bytes (80GiB); {error}"
            ) from None
        if not 1 <= blocks < 2**31:
            raise ValueError(
                f"capacity {text!r} is {blocks} blocks of {self.block} bytes; it must be 1 to 2^31 - 1"
            )
        return blocks

    def bytes(self, text: str) -> int:
        return self.parse(text) * self.block

    def tier(self, text: str) -> Tier:
        name, _, size = text.partition("=")
        if not name or not size:
            raise ValueError(f"tier {text!r}: use name and size, such as host=200GiB")
        return Tier(name, self.parse(size))


def _cost(args: Namespace, per_token: int, tiers: Sequence[Tier]) -> CostModel:
    model = CostModel(
        parameters=args.parameters * 1e9,
        flop_rate=args.tflops * 1e12,
        bytes_per_token=per_token,
        decode_seconds=12.1e-3 / 256 * args.parameters / 8,
        devices=args.devices,
    )
    for tier in tiers:
        model.read(tier.name, 0)  # raises if the rate of the tier is unknown
    return model


def _size(
    args: Namespace,
    traffic: Traffic,
    block: int,
    policies: Sequence[str],
    tiers: Sequence[Tier],
    blocks: _Capacities,
) -> int:
    """Print, for each policy, how large each tier must be for a given hit rate. Return the exit status."""
    named = args.capacity[-1:]
    device = blocks.bytes(named[0]) if named else None
    limits: list[tuple[str, int | None]] = [("device", device if tiers or named else None)]
    limits += [(tier.name, tier.blocks * block) for tier in tiers]
    asked = [policy for policy in policies if policy != "ideal"] if args.policy else ["lru"]
    found = []
    for policy in asked or ["lru"]:
        found.append(
            size_cache(
                traffic,
                block,
                policy=policy,
                target=args.target,
                limits=limits,
                progress=lambda n, policy=policy: _say(f"{policy} at {n:,} blocks"),  # type: ignore[misc]
            )
        )
    _say("")
    if args.json:
        print(json.dumps([sizing.to_dict() for sizing in found], indent=2))
    else:
        for sizing in found:
            _show_sizing(sizing, traffic, limits)
    return 0


def _plain(outcome: Outcome, load: Load | None, block: int) -> dict[str, Any]:
    plain: dict[str, Any] = outcome.to_dict()
    if len(outcome.tiers) > 1:
        plain["tier_rule"] = outcome.tier_rule
        plain["tiers"] = [_tier(use, outcome, block) for use in outcome.tiers]
    if load is not None:
        plain["cost"] = load.to_dict()
    return plain


def _tier(use: TierUse, outcome: Outcome, block: int) -> dict[str, Any]:
    return {
        "tier": use.name,
        "capacity_blocks": use.capacity_blocks,
        "hit_rate": use.hit_blocks / outcome.asked if outcome.asked else 0.0,
        "read_bytes": use.hit_blocks * block,
        "written_bytes": use.written_blocks * block,
        "resident_bytes": use.resident_blocks * block,
        "evictions": use.evictions,
    }


def _tables(traffic: Traffic, rows: Sequence[Row], block: int) -> None:
    console = _console()
    console.print(_about(traffic))
    table = Table("policy", box=None)
    for name in ("capacity", "size", "hit rate", "evictions"):
        table.add_column(name, justify="right")
    timed = any(load is not None for _, load in rows)
    for name in ("TTFT mean", "p50", "p99", "prefill", "busy", "requests/s") if timed else ():
        table.add_column(name, justify="right")
    for outcome, load in rows:
        cells = [
            f"{outcome.policy}, {outcome.tier_rule}" if len(outcome.tiers) > 1 else outcome.policy,
            f"{outcome.capacity_blocks:,}",
            format_bytes(outcome.capacity_blocks * block),
        ]
        cells += [f"{outcome.hit_rate:.2%}", f"{outcome.evictions:,}"]
        if load is not None:
            cells += [f"{t:.3g} s" for t in (load.mean_ttft, load.p50_ttft, load.p99_ttft)]
            cells += [f"{load.prefill_seconds:,.0f} s", f"{load.busy:.0%}", f"{load.requests_per_second:.3g}"]
        table.add_row(*cells)
        for use in outcome.tiers if len(outcome.tiers) > 1 else ():
            share = use.hit_blocks / outcome.asked if outcome.asked else 0.0
            size = format_bytes(use.capacity_blocks * block)
            table.add_row(
                f"  {use.name}", f"{use.capacity_blocks:,}", size, f"{share:.2%}", f"{use.evictions:,}"
            )
    console.print(table)


def _show_sizing(sizing: Sizing, traffic: Traffic, limits: Sequence[tuple[str, int | None]]) -> None:
    console = _console()
    console.print(_about(traffic))
    table = Table("capacity", box=None)
    for name in ("size", "hit rate", "gain of 1 GB more"):
        table.add_column(name, justify="right")
    for point in sizing.curve:
        buys = f"{100 * point.next_gigabyte:+.3f} points"
        table.add_row(f"{point.capacity_blocks:,}", format_bytes(point.bytes), f"{point.hit_rate:.2%}", buys)
    console.print(table)
    if sizing.capacity_blocks is None or sizing.bytes is None:
        console.print(f"{sizing.policy} does not reach {sizing.target:.2%}; the ideal is {sizing.ideal:.2%}.")
        return
    console.print(
        f"{sizing.policy} reaches {sizing.target:.2%} (ideal {sizing.ideal:.2%}) with {sizing.capacity_blocks:,} "
        f"blocks, {format_bytes(sizing.bytes)}; one more GB adds {100 * sizing.next_gigabyte:+.3f} points."
    )
    for tier in sizing.tiers:
        console.print(f"  {tier.name}: {format_bytes(tier.bytes)}, hit rate {tier.hit_rate:.2%}")
    if sizing.tiers[-1].bytes < sizing.bytes:
        names = ", ".join(name for name, _ in limits)
        console.print(f"  {names} are too small: one of them needs {format_bytes(sizing.bytes)}")


def _about(traffic: Traffic) -> str:
    return (
        f"{len(traffic.requests):,} requests in {traffic.seconds:,.0f} s, {traffic.asked:,} blocks of "
        f"{traffic.block_tokens} tokens looked up, {traffic.distinct:,} of them distinct"
    )


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 110)


class _Progress:
    """Shows the share of replayed requests on a terminal, at most every 0.2 seconds."""

    def __init__(self, words: str, total: int) -> None:
        self._words, self._total, self._shown = words, total, 0.0
        _say(words)

    def __call__(self, done: int) -> None:
        if (now := time.monotonic()) - self._shown > 0.2:
            self._shown = now
            _say(f"{self._words}: {done:,} of {self._total:,} requests ({done / self._total:.0%})")


def _say(text: str) -> None:
    """Show progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
