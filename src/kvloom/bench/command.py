"""`kvloom bench` selects a benchmark, and passes the arguments after its name to it."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module

__all__ = ["arguments", "run"]

TERMINATED = 143
RENAMED = {"below": "offload"}
"""Former names of benchmarks, accepted for one version."""
BENCHMARKS = {
    "index": "cache bookkeeping: hash, match, allocate, publish, evict (CPU)",
    "kernels": "attention, writes, copies (GPU)",
    "compare": "kvloom and every installed peer on the same work, with a chart (CPU or GPU)",
    "engine": "whole workloads, compared with Hugging Face and vLLM (CPU or GPU)",
    "serve": "many concurrent streams on a server (CPU or GPU)",
    "online": "servers under the same request rates: latency, requests within an objective (CPU or GPU)",
    "admission": "requests per second within their objective under overload (CPU)",
    "metrics": "cost of the server's metrics (CPU or GPU)",
    "memory": "how soon a busy model uses the memory of an idle one (CPU)",
    "quality": "perplexity under quantised KV (CPU or GPU)",
    "documents": "quality and time to first token if the K and V of documents are reused (CPU or GPU)",
    "tiers": "throughput of tiers and their media, compared with LMCache (CPU)",
    "router": "cost of the router: events, scoring, added latency (CPU)",
    "routing": "hits and time to first token of agent sessions over four workers, by router (CPU)",
    "disaggregation": "prefill and decode workers against workers that do both: time between tokens, hand-over (CPU)",
    "encoding": "an encode worker against workers that also encode images: time between tokens, first token (CPU)",
    "kills": "kill -9 of workers, engines and routers under load: wrong and lost answers (CPU)",
    "offload": "an engine with tiers: time to first token, hits, cost (CPU or GPU)",
    "speculation": "tokens per second with and without drafts (CPU or GPU)",
    "lora": "cost of LoRA adapters in a batch (CPU or GPU)",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks, and where they run:\n" + "\n".join(
        f"  {name:14} {what}" for name, what in BENCHMARKS.items()
    )
    parser.add_argument(
        "benchmark",
        type=_current_name,
        choices=tuple(BENCHMARKS),
        nargs="?",
        metavar="BENCHMARK",
        help="one of the benchmarks listed here",
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="arguments of the benchmark: see `kvloom bench BENCHMARK --help`",
    )


def run(args: argparse.Namespace) -> int:
    if args.benchmark is None:
        raise ValueError(f"no benchmark given: use one of {', '.join(BENCHMARKS)}")
    benchmark = import_module(f"kvloom.bench.{args.benchmark}")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return int(benchmark.main(args.arguments) or 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def _current_name(text: str) -> str:
    """Return the current name of a benchmark. If `text` is a former name, report the current name on stderr."""
    name = RENAMED.get(text, text)
    if name != text:
        print(f"kvloom bench {text} is now `kvloom bench {name}`", file=sys.stderr)
    return name


def _end(*_: object) -> None:
    """Exit on SIGTERM in the same way as on Ctrl-C, so that child processes also end."""
    raise SystemExit(TERMINATED)
