"""Compares the router's index of workers with Dynamo's on the same work, for `kvloom bench compare`.

Every worker has the first blocks of every prompt, and each number of blocks is random. Events arrive encoded, as on the
wire: msgpack in kvloom, JSON in Dynamo. A lookup returns for each worker how much of a prompt it has. Both sides are
checked for the right answer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

__all__ = ["Work", "compare_lookups", "make_work"]

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one run. `counts[prompt][worker]` is the number of blocks of the prompt that the worker has."""

    blocks: int
    counts: list[list[int]]
    lookups: int


def make_work(workers: int = 64, blocks: int = 512, prompts: int = 8, lookups: int = 200) -> Work:
    """Return work with random numbers of blocks, from 1 to `blocks`, the same in every call."""
    counts = np.random.default_rng(0).integers(1, blocks + 1, (prompts, workers)).tolist()
    return Work(blocks, counts, lookups)


def compare_lookups(work: Work, python: str, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run kvloom and Dynamo in turns. Return the smallest microseconds of kvloom and of Dynamo: `store_us` per stored
    block, and `lookup_us` per prompt. `python` is an interpreter with Dynamo."""
    ours: list[Mapping[str, float]] = []
    theirs: list[Mapping[str, float]] = []
    for _ in range(rounds):
        ours.append(_measure(work))
        theirs.append(_measure_dynamo(work, python))
    return _smallest(ours), _smallest(theirs)


def _smallest(found: list[Mapping[str, float]]) -> dict[str, float]:
    return {name: min(one[name] for one in found) for name in found[0]}


def _measure(work: Work) -> dict[str, float]:
    from kvloom.cluster.router import FleetIndex
    from kvloom.events_wire import BlockStored, EventBatch, EventDecoder, encode_batch, raw_tokens

    index, decoder, none = FleetIndex(), EventDecoder(), raw_tokens(b"")
    names = [f"w{worker}" for worker in range(len(work.counts[0]))]
    for name in names:
        index.add(name)
    storing, lookups = [], []
    for prompt, counts in enumerate(work.counts):
        hashes = _hashes(work, prompt)
        for name, count in zip(names, counts, strict=True):
            stored = BlockStored([*hashes[:count]], None, none, BLOCK_TOKENS, medium="GPU", group_idx=0)
            payload = encode_batch(EventBatch(0.0, [stored]))
            began = time.perf_counter()
            index.apply(name, decoder.decode(payload))
            storing.append((time.perf_counter() - began) / count)
    for turn in range(work.lookups):
        prompt = turn % len(work.counts)
        hashes = _hashes(work, prompt)
        began = time.perf_counter()
        lengths = index.lengths(hashes)
        lookups.append(time.perf_counter() - began)
        found = [lengths[name][0] // BLOCK_TOKENS for name in names]
        if found != work.counts[prompt]:
            raise RuntimeError(f"prompt {prompt}: kvloom found {found}, expected {work.counts[prompt]}")
    return {"store_us": 1e6 * statistics.median(storing), "lookup_us": 1e6 * statistics.median(lookups)}


def _hashes(work: Work, prompt: int) -> list[int]:
    return list(range(prompt * work.blocks + 1, (prompt + 1) * work.blocks + 1))


def _measure_dynamo(work: Work, python: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("dynamo_process.py")
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Dynamo failed: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
