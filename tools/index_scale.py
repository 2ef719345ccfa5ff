"""Measures the router's index by its number of workers: bytes per block, blocks per second, time of a lookup.

python tools/index_scale.py 10000 2        10,000 workers, every block on two of them; CPU time
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import msgspec

from kvloom.cluster.router import FleetIndex
from kvloom.events_wire import GPU, BlockStored, EventBatch

BLOCKS, PROMPT, PER_EVENT = 640_000, 512, 32
NO_TOKENS = msgspec.Raw(b"\x90")


def resident() -> int:
    """Return the memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def batch(hashes: list[int]) -> EventBatch:
    starts = range(0, len(hashes), PER_EVENT)
    return EventBatch(
        0.0,
        [
            BlockStored(
                list(hashes[at : at + PER_EVENT]), hashes[at - 1] if at else None, NO_TOKENS, 16, medium=GPU
            )
            for at in starts
        ],
    )


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(63) for _ in range(count)]


def measure(workers: int, copies: int) -> None:
    draw, index = random.Random(0), FleetIndex()
    for number in range(workers):
        index.add(f"w{number}")
    each, before, seconds = max(1, BLOCKS // workers), resident(), 0.0
    for number in range(workers):
        stored = batch(drawn(draw, each))
        began = time.process_time()
        for copy in range(copies):
            index.apply(f"w{(number + copy) % workers}", stored)
        seconds += time.process_time() - began
    total = each * workers
    used = (resident() - before) / total
    prompt = drawn(draw, PROMPT)
    for number in (0, workers - 1):
        index.apply(f"w{number}", batch(prompt))
    began = time.process_time()
    for _ in range(20):
        index.lengths(prompt)
    lookup = 1e6 * (time.process_time() - began) / 20
    print(
        f"{workers:,} workers, {copies} per block: {used:.0f} bytes per block, {copies * total / seconds:,.0f} blocks/s, "
        f"lookup of {PROMPT} blocks {lookup:,.0f} µs"
    )


if __name__ == "__main__":
    measure(int(sys.argv[1]), int(sys.argv[2]))
