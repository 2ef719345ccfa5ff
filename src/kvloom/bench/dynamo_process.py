"""Measures Dynamo's index of workers in Dynamo's own interpreter, which may lack kvloom.

Reads the work (`router_index.Work`) as JSON from standard input. Prints the medians as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Store the blocks of all workers, look every prompt up, and print the microseconds."""
    from dynamo._core import RadixTree  # type: ignore[import-not-found, unused-ignore]

    work = json.load(sys.stdin)
    tree = RadixTree()
    storing, lookups = [], []
    for prompt, counts in enumerate(work["counts"]):
        hashes = range(prompt * work["blocks"] + 1, (prompt + 1) * work["blocks"] + 1)
        for worker, count in enumerate(counts):
            event = _stored(prompt * len(counts) + worker, list(hashes[:count]))
            began = time.perf_counter()
            tree.apply_event(worker, event)
            storing.append((time.perf_counter() - began) / count)
    for turn in range(work["lookups"]):
        prompt = turn % len(work["counts"])
        hashes = range(prompt * work["blocks"] + 1, (prompt + 1) * work["blocks"] + 1)
        sequence = list(hashes)
        began = time.perf_counter()
        scores = dict(tree.find_matches(sequence).scores)
        lookups.append(time.perf_counter() - began)
        found = [scores.get((worker, 0), 0) for worker in range(len(work["counts"][prompt]))]
        if found != work["counts"][prompt]:
            raise SystemExit(f"prompt {prompt}: Dynamo found {found}, expected {work['counts'][prompt]}")
    print(
        json.dumps(
            {"store_us": 1e6 * statistics.median(storing), "lookup_us": 1e6 * statistics.median(lookups)}
        )
    )


def _stored(number: int, hashes: list[int]) -> bytes:
    blocks = [{"block_hash": one, "tokens_hash": one} for one in hashes]
    data: dict[str, Any] = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


if __name__ == "__main__":
    main()
