"""`kvloom bench compare` runs kvloom and every installed peer (another system) on the same work, in turns, and draws
the ratios as a chart.

    part          work                    peers                                  where the peers are installed
    engine        whole requests          Hugging Face's generate(), vLLM        this interpreter, --vllm-python
    bookkeeping   the cache of a request  vLLM's block manager, SGLang's trees   --vllm-python, --sglang-python
    tiers         writes, reads of pages  LMCache's backends                     --lmcache-python
    router        the index of workers    Dynamo's indexer                       --dynamo-python

Each part is a benchmark of its own (`engine`, `index`, `tiers`, `router_index`). This module finds the peers, runs the
parts, and draws the chart. A ratio above 1 means that kvloom is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kvloom.arguments import Parser, interpreter, number, whole

from .chart import Bar, bar_chart
from .router_index import compare_lookups, make_work

__all__ = ["PEERS", "Comparison", "bars_of", "find_peers", "main"]

PARTS = ("engine", "bookkeeping", "tiers", "router")
WITH_PYTHON = ("vllm", "sglang", "lmcache", "dynamo")
"""Peers that may have an interpreter of their own."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: its name, its Python package, the parts in which it runs, and how to install it."""

    name: str
    package: str
    parts: tuple[str, ...]
    install: str


PEERS = {
    "hf": Peer("Hugging Face", "transformers", ("engine",), "pip install 'kvloom[engine]'"),
    "vllm": Peer("vLLM", "vllm", ("engine", "bookkeeping"), "make build/vllm/bin/vllm (CPU), or pip install vllm in an environment of its own and --vllm-python PATH"),
    "sglang": Peer("SGLang", "sglang", ("bookkeeping",), "make build/sglang/bin/sglang, or --sglang-python PATH"),
    "lmcache": Peer("LMCache", "lmcache", ("tiers",), "make build/lmcache/bin/lmcache, or --lmcache-python PATH"),
    "dynamo": Peer("Dynamo", "dynamo", ("router",), "make build/dynamo/bin/python, or --dynamo-python PATH"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison: the figures of kvloom and of a peer (`theirs`) for the same work, from one run. A `ratio` above 1
    means that kvloom is faster."""

    part: str
    work: str
    peer: str
    unit: str
    kvloom: float
    theirs: float
    ratio: float


# -- peers ------------------------------------------------------------------------------------------


def find_peers(pythons: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dictionaries, by the key in PEERS: the interpreter of each installed peer, and the install instruction
    of each missing peer. `pythons` has the interpreters in which to search, by the same key. The default is the running
    interpreter. Imports no peer.
    """
    found, missing = {}, {}
    for key, peer in PEERS.items():
        python = pythons.get(key, sys.executable)
        if _has_package(python, peer.package):
            found[key] = python
        else:
            missing[key] = peer.install
    return found, missing


def _has_package(python: str, package: str) -> bool:
    look = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({package!r}) is None)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-c", look], cwd="/", env=environment, check=False).returncode == 0


def _site_packages(python: str) -> str:
    look = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return subprocess.run([python, "-c", look], check=True, capture_output=True, text=True).stdout.strip()


# -- parts ------------------------------------------------------------------------------------------


def _report(benchmark: str, arguments: list[str]) -> dict[str, Any]:
    """Run a benchmark of this package and return its JSON report. Its progress goes to stderr."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        import_module(f"kvloom.bench.{benchmark}").main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def _engine(found: dict[str, str], args: argparse.Namespace) -> list[Comparison]:
    peers = [key for key in ("hf", "vllm") if key in found]
    shape = ["--shape", args.shape, "--scale", str(args.scale), "--requests", str(args.requests)]
    vllm = ["--vllm-python", found["vllm"]] if "vllm" in found else []
    more = ["--only", *args.only, "--rounds", str(args.rounds), "--peers", *peers]
    return engine_rows(_report("engine", [*shape, *vllm, *more]))


def engine_rows(report: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of a report of `kvloom bench engine`. A peer that failed is left out, and logged."""
    for name, ran in report["runners"].items():
        if ran["error"]:
            print(f"{name} failed: {ran['error']}", file=sys.stderr)
    rows = []
    for row in report["rows"]:
        ours = row["runs"].get("kvloom", {}).get("seconds")
        for name, figures in row["runs"].items():
            if name != "kvloom" and ours is not None:
                work, theirs = f"{row['what']} ({row['size']})", figures["seconds"]
                rows.append(Comparison("engine", work, name, "s", ours, theirs, theirs / ours))
    return rows


def _bookkeeping(found: dict[str, str], args: argparse.Namespace) -> list[Comparison]:
    python = found.get("vllm") or found["sglang"]
    apart = "sglang" in found and found["sglang"] != python
    path = ["--sglang-path", _site_packages(found["sglang"])] if apart else []
    return bookkeeping_rows(
        _report("index", ["--quick", "--rounds", str(args.rounds), "--peer-python", python, *path])
    )


def bookkeeping_rows(report: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of a report of `kvloom bench index`."""
    return [
        Comparison(
            "bookkeeping", row["work"], row["peer"], "µs", row["kvloom_us"], row["peer_us"], row["ratio"]
        )
        for row in report["comparison"]
        if row["ratio"] is not None
    ]


def _tiers(found: dict[str, str], args: argparse.Namespace) -> list[Comparison]:
    arguments = ["--lmcache-python", found["lmcache"], "--only", "host", "disk", "--rounds", str(args.rounds)]
    return tier_rows(_report("tiers", [*arguments, "--pages", "2MiB"]))


def tier_rows(report: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of a report of `kvloom bench tiers`."""
    return [
        Comparison("tiers", f"{row['tier']}: {row['verb']} pages", f"LMCache {row['backend']}", "GB/s", row["ours"], row["lmcache"], row["times_lmcache"])
        for row in report["rows"]
        if row["lmcache"] is not None
    ]  # fmt: skip


def _router(found: dict[str, str], args: argparse.Namespace) -> list[Comparison]:
    work = make_work()
    ours, theirs = compare_lookups(work, found["dynamo"], args.rounds)
    return router_rows(f"{work.blocks} blocks, {len(work.counts[0])} workers", ours, theirs)


def router_rows(size: str, ours: dict[str, float], theirs: dict[str, float]) -> list[Comparison]:
    """Return the comparisons of the part router."""
    works = {"lookup_us": f"find a prompt of {size}", "store_us": "store a block from an event"}
    return [
        Comparison("router", work, "Dynamo", "µs", ours[key], theirs[key], theirs[key] / ours[key])
        for key, work in works.items()
    ]


RUN: dict[str, Callable[[dict[str, str], argparse.Namespace], list[Comparison]]] = {
    "engine": _engine,
    "bookkeeping": _bookkeeping,
    "tiers": _tiers,
    "router": _router,
}


# -- the command ------------------------------------------------------------------------------------


def bars_of(rows: Sequence[Comparison]) -> list[Bar]:
    """Return the bars of the chart: one for each comparison, in the order of parts and works."""
    ordered = sorted(rows, key=lambda row: (PARTS.index(row.part), [r.work for r in rows].index(row.work)))
    return [
        Bar(
            row.work,
            row.peer,
            row.ratio,
            f"{row.ratio:.2f} times  ({row.kvloom:.3g} against {row.theirs:.3g} {row.unit})",
        )
        for row in ordered
    ]


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench compare",
        description="Run kvloom and every installed peer on the same work, in turns, and draw the ratios.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n  engine       requests on a model with random weights: Hugging Face, vLLM\n"
        "  bookkeeping  match, allocate and release of a request's blocks: vLLM, SGLang\n"
        "  tiers        pages written and read: LMCache\n"
        "  router       the router's index of workers: Dynamo\n\n"
        "A peer is looked for in this interpreter, and in build/NAME/bin/python, which `make` creates.",
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="parts to run: engine, bookkeeping, tiers, router (default: all)")  # fmt: skip
    for key in WITH_PYTHON:
        add(f"--{key}-python", type=interpreter, metavar="PATH", help=f"interpreter with {PEERS[key].name}")
    add("--shape", default="kvloom-llama", metavar="NAME", help="model shape of the part engine (default: kvloom-llama; see `kvloom bench engine --help`)")  # fmt: skip
    add("--only", nargs="+", default=["W1", "W3", "W5"], metavar="W", help="workloads of the part engine (default: W1 W3 W5)")  # fmt: skip
    add("--scale", type=number(0, 1, above=True), default=0.5, metavar="S", help="scale of their requests and lengths (default: 0.5)")  # fmt: skip
    add("--requests", type=whole(1), default=8, metavar="N", help="limit of requests per workload (default: 8)")  # fmt: skip
    add("--rounds", type=whole(1, 10), default=3, metavar="N", help="best of N rounds, in turns (default: 3)")
    add("--svg", type=Path, metavar="FILE", help="write the chart to FILE")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.svg is not None and not args.svg.absolute().parent.is_dir():
        print(f"kvloom bench compare: there is no folder for --svg {args.svg}", file=sys.stderr)
        return 2
    given = {key: vars(args)[f"{key}_python"] or _built(key) for key in WITH_PYTHON}
    found, missing = find_peers({"hf": sys.executable, **given})
    for key, install in missing.items():
        print(f"{PEERS[key].name} is not installed: {install}", file=sys.stderr)
    rows: list[Comparison] = []
    for part in args.parts:
        if not any(part in PEERS[key].parts for key in found):
            print(f"part {part}: none of its peers is installed", file=sys.stderr)
            continue
        try:
            rows += RUN[part](found, args)
        except Exception as error:  # noqa: BLE001 - one part's failure must not lose the figures of the others
            print(f"part {part} failed: {type(error).__name__}: {error}", file=sys.stderr)
        if args.svg is not None and rows:
            args.svg.write_text(_chart(rows, args.rounds), encoding="utf-8")
    if args.json:
        report = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps({**report, "not_installed": missing}, indent=2))
    else:
        _print(rows)
    return 0 if rows else 1


def _chart(rows: Sequence[Comparison], rounds: int) -> str:
    told = f"{platform.machine()}, {os.cpu_count()} cores; best of {rounds} rounds in turns, in one run"
    title = "How many times as fast as the peer (above 1: kvloom is faster)"
    return bar_chart(title, told, bars_of(rows), 1.0)


def _built(key: str) -> str:
    """Return the Python interpreter of the environment that `make build/KEY/bin/…` creates for a peer. If it does not
    exist, return this interpreter."""
    python = Path("build") / key / "bin" / "python"
    return str(python.absolute()) if python.exists() else sys.executable


def _print(rows: Sequence[Comparison]) -> None:
    head = ("part", "work", "peer", "kvloom", "peer's", "unit", "ratio")
    lines = [
        head,
        *(
            (r.part, r.work, r.peer, f"{r.kvloom:.3g}", f"{r.theirs:.3g}", r.unit, f"{r.ratio:.2f}")
            for r in rows
        ),
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
