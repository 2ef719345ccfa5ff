"""`kvloom bench tiers` measures the throughput of every tier, of its medium without a tier, and of LMCache, with the
same bytes in one run.

The tier, its medium and LMCache alternate, and each figure is the best of its rounds. Tiers that are not available on
this machine are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloom.arguments import Parser, interpreter, size, whole
from kvloom.plan import format_bytes
from kvloom.tiers import TierError

from .tiers_media import Memory
from .tiers_work import WORKS, Work, folder_in

__all__ = ["Row", "main", "measure"]

_WORDS = ("tier", "verb", "medium", "LMCache's")  # columns that are not figures
GOALS = {"host": 0.85, "disk (power)": 0.9, "disk (process)": 0.9}
PEER_GOALS = {
    ("host", 2 << 20): 1.0,
    ("host", 64 << 10): 3.0,
    ("peer, same host", 0): 3.0,
    ("peer, by TCP", 0): 3.0,
}


@dataclass(frozen=True, slots=True)
class Row:
    """The speed of one operation on one tier.

    - `ours`, `medium_speed` and `lmcache` are in GB/s.
    - `share` is `ours` divided by `medium_speed`, and `times_lmcache` is `ours` divided by `lmcache`.
    - `goal` and `lmcache_goal` are the goals for these two ratios.
    - `backend` is the backend of LMCache, or "" if none ran.
    """

    tier: str
    page_bytes: int
    verb: str
    ours: float
    medium: str
    medium_speed: float
    share: float
    goal: float
    backend: str = ""
    lmcache: float | None = None
    times_lmcache: float | None = None
    lmcache_goal: float | None = None


class LMCache:
    """The process that runs LMCache, started in the interpreter in which LMCache is installed."""

    def __init__(self, python: str, folder: Path) -> None:
        script = Path(__file__).parent / "lmcache_process.py"
        environment = {**os.environ, "KVLOOM_BENCH_DIR": str(folder)}
        environment.pop("PYTHONPATH", None)
        self._log = folder / "lmcache.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=environment,
            )
        self.missing: dict[str, str] = {}
        """Backends that do not run here, and why."""
        self.version = str(self.ask({"backend": "version"})["version"])

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"LMCache's process has ended, code {self._process.wait(20)}: {last}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"LMCache: {reply['error']}")
        return reply

    def moved(self, backend: str, page: int, total: int) -> dict[str, float]:
        """Run one round in LMCache, and return its seconds by operation. The result is empty if the backend is
        unavailable."""
        if backend in self.missing:
            return {}
        try:
            reply = self.ask({"backend": backend, "page": page, "total": total})
        except RuntimeError as error:
            self.missing[backend] = str(error)
            return {}
        return {"write": reply["write"], "read": reply["read"]}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(work: Work, memory: Memory, rounds: int, lmcache: LMCache | None) -> list[Row]:
    """Return one `Row` per operation (write, read) and per backend of LMCache. Every round verifies the bytes that each
    side has read."""
    beside = work.lmcache if lmcache is not None else ()
    return [row for backend in beside or ("",) for row in _beside(work, memory, rounds, backend, lmcache)]


def _beside(work: Work, memory: Memory, rounds: int, backend: str, lmcache: LMCache | None) -> list[Row]:
    best: dict[tuple[str, str], float] = {}

    def note(side: str, verb: str, seconds: float) -> None:
        best[side, verb] = min(best.get((side, verb), seconds), seconds)

    for _ in range(rounds):
        memory.fresh()
        for side, verbs in (("medium", work.medium), ("ours", work.ours)):
            note(side, "write", _seconds(verbs.write))
            note(side, "read", _seconds(verbs.read))
            memory.check()
        if lmcache is not None and backend:
            for verb, seconds in lmcache.moved(backend, memory.page, memory.total).items():
                note(backend, verb, seconds)
    return [_row(work, memory, verb, backend, best) for verb in ("write", "read")]


def _row(work: Work, memory: Memory, verb: str, backend: str, best: dict[tuple[str, str], float]) -> Row:
    ours, medium = best["ours", verb], best["medium", verb]
    theirs = best.get((backend, verb))
    goal = PEER_GOALS.get((work.tier, memory.page), PEER_GOALS.get((work.tier, 0)))
    return Row(
        work.tier,
        memory.page,
        verb,
        memory.total / ours / 1e9,
        work.medium_name,
        memory.total / medium / 1e9,
        medium / ours,
        GOALS.get(work.tier, 0.85),
        "" if theirs is None else backend,
        None if theirs is None else memory.total / theirs / 1e9,
        None if theirs is None else theirs / ours,
        None if theirs is None else goal or 1.0,
    )


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench tiers",
        description="Measure host, disk and remote tiers against their media, in one run.",
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=list(WORKS),
        default=list(WORKS),
        metavar="TIER",
        help="tiers to measure: " + ", ".join(WORKS),
    )
    add(
        "--pages",
        nargs="+",
        type=size,
        default=[2 << 20, 64 << 10],
        metavar="SIZE",
        help="page sizes (default: 2MiB 64KiB)",
    )
    add("--total", type=size, default="128MiB", metavar="SIZE", help="bytes per round (default: 128MiB)")
    add(
        "--rounds",
        type=whole(1, 50),
        default=5,
        metavar="N",
        help="each figure is the best of N (default: 5)",
    )
    add(
        "--dir",
        type=Path,
        metavar="PATH",
        help="folder on the disk to measure (default: the system's temporary folder)",
    )
    add(
        "--lmcache-python",
        type=interpreter,
        metavar="PATH",
        help="interpreter with LMCache, to measure it, too",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return exit code 0, or 2 for invalid input."""
    args = _parser().parse_args(argv)
    try:
        pages, total = args.pages, args.total
        wrong = [page for page in pages if page % 4096 or total % page]
        if wrong:
            raise ValueError(f"page sizes {wrong} must be multiples of 4096 and divide --total {total}")
        if args.dir is not None and not args.dir.is_dir():
            raise ValueError(f"--dir {args.dir} is not a folder")
    except ValueError as error:
        print(f"kvloom bench tiers: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    missing: dict[str, str] = {}
    with folder_in(args.dir) as place:
        lmcache = LMCache(args.lmcache_python, Path(place)) if args.lmcache_python else None
        try:
            for name in args.only:
                for page in pages:
                    _measure(name, page, total, args, lmcache, Path(place), rows, missing)
        finally:
            if lmcache is not None:
                lmcache.close()
    _say("")
    versions = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    if lmcache is not None:
        versions["lmcache"] = lmcache.version
        missing |= {f"LMCache, {backend}": why for backend, why in lmcache.missing.items()}
    if args.json:
        reply = {"rows": [asdict(row) for row in rows], "missing": missing, "versions": versions}
        print(json.dumps(reply, indent=2))
    else:
        _show(rows, missing, versions, total, args.rounds)
    return 0


def _measure(
    name: str,
    page: int,
    total: int,
    args: argparse.Namespace,
    lmcache: LMCache | None,
    place: Path,
    rows: list[Row],
    missing: dict[str, str],
) -> None:
    folder = place / f"{name}-{page}"
    folder.mkdir()
    memory = Memory(page, total)
    try:
        with WORKS[name](memory, folder) as works:
            for work in works:
                _say(f"{work.tier}, pages of {format_bytes(page)}")
                rows += measure(work, memory, args.rounds, lmcache)
    except TierError as error:
        missing[name] = str(error)


def _say(text: str) -> None:
    """Show a progress message, if the output is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(
    rows: Sequence[Row], missing: dict[str, str], versions: dict[str, Any], total: int, rounds: int
) -> None:
    title = f"Tiers, GB/s: {format_bytes(total)} a round, the best of {rounds}"
    table = Table(title=title, title_justify="left")
    for heading in (
        "tier",
        "page",
        "verb",
        "kvloom",
        "medium",
        "its GB/s",
        "share",
        "goal",
        "LMCache's",
        "its GB/s",
        "times",
        "goal",
    ):
        table.add_column(heading, justify="left" if heading in _WORDS else "right")
    for row in rows:
        lmcache = (
            ("", "", "", "")
            if row.lmcache is None or row.times_lmcache is None
            else (row.backend, f"{row.lmcache:.2f}", f"{row.times_lmcache:.1f}", f"{row.lmcache_goal:g}")
        )
        table.add_row(
            row.tier,
            format_bytes(row.page_bytes),
            row.verb,
            f"{row.ours:.2f}",
            row.medium,
            f"{row.medium_speed:.2f}",
            f"{row.share:.0%}",
            f"{row.goal:.0%}",
            *lmcache,
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for name, why in missing.items():
        print(f"{name}: not measured: {why}")
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
