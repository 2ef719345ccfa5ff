"""`kvloom bench`: which benchmark, and its own arguments after it. What each does is in its own file."""

from __future__ import annotations

import argparse
import signal
from importlib import import_module

__all__ = ["arguments", "run"]

TERMINATED = 143
BENCHMARKS = {
    "index": "names, match, allocate, publish, evict (CPU)",
    "kernels": "attention, writes, copies (GPU)",
    "engine": "whole workloads, beside Hugging Face and vLLM (both)",
    "serve": "many streams on a server (both)",
    "metrics": "what counting costs a server (both)",
    "quality": "perplexity under quantised KV (both)",
    "tiers": "host, disk and stores against their media, beside LMCache (CPU)",
    "below": "tiers under an engine: first tokens, hits, what they cost (both)",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"  {name:8} {what}" for name, what in BENCHMARKS.items())
    parser.add_argument(
        "benchmark", choices=BENCHMARKS, nargs="?", metavar="BENCHMARK", help="one of those below"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its own: `kvloom bench BENCHMARK --help`"
    )


def run(args: argparse.Namespace) -> int:
    if args.benchmark is None:
        raise ValueError(f"which benchmark? One of {', '.join(BENCHMARKS)}")
    benchmark = import_module(f"kvloom.bench.{args.benchmark}")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return int(benchmark.main(args.arguments) or 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    """Ends what a benchmark has started, too, as Ctrl-C does."""
    raise SystemExit(TERMINATED)
