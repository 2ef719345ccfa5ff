"""`kvloom bench router` measures the cost of the router itself.

events    blocks per second that one process decodes from batches of events and adds to its index
score     time to find the cached prefix of a prompt on all workers, and to choose a worker
latency   time that the router adds to a request, at a fixed rate. The same load runs directly on a worker and
          through the router. The worker answers at once, so that its own time does not count
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import whole

from .fleet import Process, free_port, ready
from .router_load import loop_factory, send_load

__all__ = ["main"]

BLOCKS_PER_EVENT = 32
EVENTS_PER_BATCH = 16


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvloom bench router", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=whole(1), default=64, metavar="N", help="workers in the index (default: 64)")
    add(
        "--blocks", type=whole(1), default=512, metavar="N", help="blocks of the scored prompt (default: 512)"
    )
    rate = "requests per second; may be given several times (default: 500)"
    add("--rate", type=whole(1), action="append", metavar="N", help=rate)
    add("--seconds", type=whole(1), default=10, metavar="S", help="seconds of load (default: 10)")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "events": measure_events(args.workers),
        "score": measure_score(args.workers, args.blocks),
    }
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found["latency"] = runner.run(measure_latency(args.rate or [500], args.seconds))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    events, score, latency = found["events"], found["score"], found["latency"]
    print(
        f"events   {events['blocks_per_second'] / 1e6:.2f} million blocks/s ({events['workers']} workers, batched)"
    )
    print(
        f"score    {score['microseconds']:.0f} µs for {score['blocks']} blocks over {score['workers']} workers "
        f"(hashing the prompt: {score['hash_microseconds']:.0f} µs more)"
    )
    for one in latency:
        print(
            f"latency  {one['rate']} requests/s: added p50 {one['added_p50_ms']:.2f} ms, p99 {one['added_p99_ms']:.2f} ms "
            f"(straight p99 {one['direct_p99_ms']:.2f} ms, through the router {one['routed_p99_ms']:.2f} ms), "
            f"{one['cpu_ms_per_request']:.2f} ms of the router's CPU per request"
        )
    return 0


def measure_events(workers: int, batches: int = 400) -> dict[str, Any]:
    """Measure how fast encoded batches are decoded and applied to the index. Each batch stores blocks and then removes
    half of them."""
    from kvloom.cluster.router import FleetIndex
    from kvloom.events_wire import (
        BlockRemoved,
        BlockStored,
        EventBatch,
        EventDecoder,
        WireEvent,
        encode_batch,
        raw_tokens,
    )

    rng = np.random.default_rng(0)
    index, decoder = FleetIndex(), EventDecoder()
    tokens = raw_tokens(np.arange(BLOCKS_PER_EVENT * 16, dtype="<i4").tobytes())
    payloads = []
    for number in range(batches):
        hashes = rng.integers(-(2**63), 2**63, (EVENTS_PER_BATCH, BLOCKS_PER_EVENT)).tolist()
        stored: list[WireEvent] = [
            BlockStored(chain, chain[0] - 1 if chain[0] > 0 else None, tokens, 16, medium="GPU", group_idx=0)
            for chain in hashes
        ]
        removed: list[WireEvent] = [
            BlockRemoved(chain, "GPU", 0) for chain in hashes[: EVENTS_PER_BATCH // 2]
        ]
        payloads.append((f"w{number % workers}", encode_batch(EventBatch(0.0, stored + removed))))
    for number in range(workers):
        index.add(f"w{number}")
    blocks = batches * EVENTS_PER_BATCH * BLOCKS_PER_EVENT * 3 // 2
    began = time.perf_counter()
    for worker, payload in payloads:
        index.apply(worker, decoder.decode(payload))
    seconds = time.perf_counter() - began
    return {"blocks_per_second": blocks / seconds, "blocks": blocks, "workers": workers}


def measure_score(workers: int, blocks: int, rounds: int = 300) -> dict[str, Any]:
    """Measure two times: to find how many tokens of a prompt each worker has cached, and to choose a worker. Each
    worker has four open requests. Return medians over many prompts."""
    from kvloom.cluster.router import FleetIndex, Scorer, SpeedModel, WorkerLoad
    from kvloom.core import hash_chain, root_hash, token_bytes
    from kvloom.events_wire import BlockStored, EventBatch, raw_tokens, wire_hashes

    rng = np.random.default_rng(0)
    index, scorer, speed = FleetIndex(), Scorer(), SpeedModel()
    names = [f"w{i}" for i in range(workers)]
    for name in names:
        index.add(name)
        scorer.loads[name] = load = WorkerLoad(1_000_000, speed)
        for number, tokens in enumerate(rng.integers(16, 16 * blocks, 4).tolist()):
            load.sent(number, tokens, tokens, 0.0)
        load.first_token(0, 0.0)  # the other requests wait
    root, none = root_hash("m"), raw_tokens(b"")
    prompts = [rng.integers(0, 100_000, blocks * 16).astype(np.int32) for _ in range(8)]
    hashes = [wire_hashes(hash_chain(root, token_bytes(prompt))) for prompt in prompts]
    for chain in hashes:
        for name in names:
            count = int(rng.integers(0, blocks + 1))
            index.apply(
                name, EventBatch(0.0, [BlockStored(list(chain[:count]), None, none, 16, medium="GPU")])
            )
    times, hashing = [], []
    for i in range(rounds):
        chain = hashes[i % len(hashes)]
        began = time.perf_counter()
        lengths = index.lengths(chain)
        scorer.choose(blocks * 16, lengths, names, 1e-3 * i)
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
        wire_hashes(hash_chain(root, token_bytes(prompts[i % len(hashes)])))
        hashing.append(time.perf_counter() - began)
    return {
        "microseconds": 1e6 * float(np.median(times)),
        "p99_microseconds": 1e6 * float(np.quantile(times, 0.99)),
        "hash_microseconds": 1e6 * float(np.median(hashing)),
        "blocks": blocks,
        "workers": workers,
    }


async def measure_latency(rates: list[int], seconds: int) -> list[dict[str, Any]]:
    """Send requests at fixed rates to a worker that answers at once, directly and through a router. Return one entry
    per rate."""
    import aiohttp

    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        for port in ports[:2]:
            stack.enter_context(Process([sys.executable, "-m", "kvloom.bench.router_load", str(port)]))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        flags = [word for url in urls[:2] for word in ("--worker", url)]
        command = [
            sys.executable,
            "-m",
            "kvloom.cli",
            "route",
            "--port",
            str(ports[2]),
            "--log-level",
            "error",
        ]
        router = stack.enter_context(Process([*command, *flags]))
        async with aiohttp.ClientSession() as session:
            for url in urls:
                await ready(session, f"{url}/health")
        await asyncio.sleep(1.5)
        return [await _at_rate(rate, seconds, urls[0], urls[2], router.pid) for rate in rates]


async def _at_rate(rate: int, seconds: int, worker: str, router: str, pid: int) -> dict[str, Any]:
    direct = np.quantile(await send_load(worker, rate, seconds), (0.5, 0.99)) * 1e3
    before = _cpu_seconds(pid)
    began = time.perf_counter()
    routed = np.quantile(await send_load(router, rate, seconds), (0.5, 0.99)) * 1e3
    took, requests = time.perf_counter() - began, rate * (seconds + 1)
    return {
        "rate": rate,
        "reached_rate": requests / took,
        "cpu_ms_per_request": 1e3 * (_cpu_seconds(pid) - before) / requests,
        "direct_p50_ms": float(direct[0]),
        "direct_p99_ms": float(direct[1]),
        "routed_p50_ms": float(routed[0]),
        "routed_p99_ms": float(routed[1]),
        "added_p50_ms": float(routed[0] - direct[0]),
        "added_p99_ms": float(routed[1] - direct[1]),
    }


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, or NaN on a system without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
