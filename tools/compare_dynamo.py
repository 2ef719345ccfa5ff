"""Compare kvloom's router with Dynamo's KV router: one trace, simulated workers, one cost model.

    python tools/compare_dynamo.py conversation_trace.jsonl.gz --dynamo build/dynamo/bin/python

Each router runs in the simulator of its own project: `kvloom.replay` and `dynamo.replay.run_trace_replay`. Both simulate
the same workers: pools of equal size with LRU eviction, steps of at most 8,192 tokens and 256 requests, and the step times
of Dynamo's default polynomials, which are also the defaults of `EngineModel`. kvloom's workers evict with `--policy`. Two checks show that the simulators agree: the time to
first token of single requests, and the rows with round robin. Dynamo's KV router has its default settings.

The trace is in Mooncake's format. `--dynamo` is a Python that has the packages ai-dynamo and ai-dynamo-runtime
(`make build/dynamo/bin/python`). The exit status is 1 if kvloom's router is not ahead of Dynamo's in hit rate, mean TTFT and p99
TTFT of every setting.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
SINGLE_PROMPTS = (100, 512, 1000, 4000, 8000, 8192, 9000, 20000, 60000)
"""Prompt tokens of the single requests. Each has 20 output tokens."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Blocks of each worker's pool, and the factor by which requests arrive faster than in the trace."""

    blocks: int
    speed: float

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read "1250x4": 1,250 blocks and speed 4."""
        blocks, _, speed = text.partition("x")
        return cls(int(blocks), float(speed))


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one simulation. Times are in milliseconds."""

    hit_rate: float
    mean_ttft: float
    p99_ttft: float

    def is_ahead_of(self, other: Result) -> bool:
        return (
            self.hit_rate > other.hit_rate
            and self.mean_ttft < other.mean_ttft
            and self.p99_ttft < other.p99_ttft
        )


def run_dynamo(python: str, jobs: Sequence[dict[str, Any]]) -> list[Result]:
    """Run simulations with Dynamo's packages, in one process of the Python `python`."""
    done = subprocess.run(
        [python, __file__, "--as-dynamo"],
        input=json.dumps(list(jobs)),
        env={**os.environ, "DYN_LOG": "error"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Result(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def as_dynamo() -> None:
    """Run the simulations that stdin names, and print their results. This function runs in Dynamo's Python."""
    run_trace_replay = import_module("dynamo.replay").run_trace_replay

    found = []
    for job in json.load(sys.stdin):
        summary = run_trace_replay(
            [job["trace"]],
            extra_engine_args={"engine": {"num_gpu_blocks": job["blocks"], "block_size": BLOCK_TOKENS}},
            num_workers=job["workers"],
            router_mode=job["route"],
            arrival_speedup_ratio=job["speed"],
            trace_block_size=BLOCK_TOKENS,
        ).summary
        found.append(
            {
                "hit_rate": summary["prefix_cache_reused_ratio"],
                "mean_ttft": summary["mean_ttft_ms"],
                "p99_ttft": summary["p99_ttft_ms"],
            }
        )
    print(json.dumps(found))


def run_kvloom(trace: Path, workers: int, setting: Setting, route: str, policy: str = "lru") -> Result:
    from kvloom.replay import read_traces
    from kvloom.replay.fleet import replay_fleet

    traffic = read_traces([trace])
    outcome = replay_fleet(traffic, workers, setting.blocks, route, speed=setting.speed, policy=policy)
    return Result(outcome.hit_rate, 1e3 * outcome.mean_ttft, 1e3 * outcome.p99_ttft)


def single_requests(folder: Path) -> list[Path]:
    """Write one trace for each of SINGLE_PROMPTS, with a single request."""
    paths = []
    for tokens in SINGLE_PROMPTS:
        line = {
            "timestamp": 0,
            "input_length": tokens,
            "output_length": 20,
            "hash_ids": list(range(-(-tokens // BLOCK_TOKENS))),
        }
        paths.append(folder / f"single-{tokens}.jsonl")
        paths[-1].write_text(json.dumps(line) + "\n")
    return paths


def compare_single_requests(python: str, folder: Path) -> float:
    """Print the TTFT of single requests in both simulators. Return the largest difference in milliseconds."""
    traces = single_requests(folder)
    setting = Setting(1250, 1.0)
    theirs = run_dynamo(python, [job(trace, 1, setting, "round_robin") for trace in traces])
    largest = 0.0
    print(f"{'single prompt':>16} {'Dynamo TTFT':>12} {'kvloom TTFT':>12}")
    for tokens, trace, other in zip(SINGLE_PROMPTS, traces, theirs, strict=True):
        ours = run_kvloom(trace, 1, setting, "round-robin")
        print(f"{tokens:>9,} tokens {other.mean_ttft:9,.2f} ms {ours.mean_ttft:9,.2f} ms")
        largest = max(largest, abs(ours.mean_ttft - other.mean_ttft))
    return largest


def job(trace: Path, workers: int, setting: Setting, route: str) -> dict[str, Any]:
    return {
        "trace": str(trace),
        "workers": workers,
        "blocks": setting.blocks,
        "speed": setting.speed,
        "route": route,
    }


def compare_routers(python: str, trace: Path, workers: int, settings: Sequence[Setting], policy: str) -> bool:
    """Print a row for each router and setting. Return whether kvloom's KV router is ahead in every setting."""
    is_ahead = True
    print(f"\n{'blocks':>7} {'speed':>6}  {'router':22}{'hit rate':>9}{'TTFT mean':>12}{'TTFT p99':>12}")
    for setting in settings:
        rows = {
            "Dynamo, round robin": run_dynamo(python, [job(trace, workers, setting, "round_robin")])[0],
            "kvloom, round robin": run_kvloom(trace, workers, setting, "round-robin", policy),
            "Dynamo, KV router": run_dynamo(python, [job(trace, workers, setting, "kv_router")])[0],
            "kvloom, KV router": run_kvloom(trace, workers, setting, "kv", policy),
        }
        for name, one in rows.items():
            print(
                f"{setting.blocks:>7,} {setting.speed:>6g}  {name:22}{one.hit_rate:>9.1%}"
                f"{one.mean_ttft:>9,.0f} ms{one.p99_ttft:>9,.0f} ms",
                flush=True,
            )
        is_ahead &= rows["kvloom, KV router"].is_ahead_of(rows["Dynamo, KV router"])
    return is_ahead


def main() -> int:
    if sys.argv[1:] == ["--as-dynamo"]:
        as_dynamo()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--dynamo", required=True, metavar="PYTHON", help="a Python with Dynamo's packages")
    parser.add_argument("--workers", type=int, default=8)
    policy = "eviction policy of kvloom's workers (default: lru, as Dynamo's workers)"
    parser.add_argument("--policy", default="lru", help=policy)
    parser.add_argument("--setting", action="append", type=Setting.parse, metavar="BLOCKSxSPEED",
        help="repeatable (default: 1250x1, 1250x4, 6250x1 and 6250x4)")  # fmt: skip
    options = parser.parse_args()
    settings = options.setting or [Setting(blocks, speed) for blocks in (1250, 6250) for speed in (1.0, 4.0)]
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.jsonl"
        data = options.trace.read_bytes()
        trace.write_bytes(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        largest = compare_single_requests(options.dynamo, Path(name))
        print(f"largest difference: {largest:.2f} ms")
        is_ahead = compare_routers(options.dynamo, trace, options.workers, settings, options.policy)
    print("\nkvloom's KV router is", "ahead in every cell" if is_ahead else "NOT ahead in every cell")
    return 0 if is_ahead else 1


if __name__ == "__main__":
    sys.exit(main())
