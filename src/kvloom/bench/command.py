"""`kvloom bench`: which benchmark runs. Each reads its own arguments."""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=["index", "kernels", "engine", "serve", "metrics", "quality", "tiers"],
        help="index: names, match, allocate, publish, evict (CPU); kernels: attention, writes, copies (GPU); "
        "engine: whole workloads, beside Hugging Face and vLLM (both); serve: many streams on a server (both); metrics: what counting costs there (both); quality: perplexity under quantised KV (both); "
        "tiers: host, disk and stores against their media, beside LMCache (CPU)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the benchmark (try --help)")


def run(args: argparse.Namespace) -> int:
    return int(import_module(f"kvloom.bench.{args.benchmark}").main(args.arguments) or 0)
