"""Small traffic for the tests, and where the public traces lie if they are here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvloom.replay.traffic import Request, Traffic, number_blocks

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the public traces are not beside the repository"
)


def traffic(*rows: list[int], every: float = 1.0, block_tokens: int = 16) -> Traffic:
    """One request a row of block ids, `every` seconds apart."""
    blocks, distinct = number_blocks(rows)
    requests = tuple(Request(i * every, b, len(b), len(b) * block_tokens, 10) for i, b in enumerate(blocks))
    return Traffic(requests, block_tokens, distinct, "sample")


def random_traffic(seed: int, requests: int = 200, stems: int = 12) -> Traffic:
    """Conversations that branch: prefixes of a few stems, with ends of their own."""
    rng = np.random.default_rng(seed)
    rows = []
    fresh = 10**6
    for _ in range(requests):
        stem = int(rng.integers(stems))
        shared = [1000 * stem + i for i in range(int(rng.integers(1, 12)))]
        own = int(rng.integers(0, 4))
        rows.append(shared + list(range(fresh, fresh + own)))
        fresh += own
    return traffic(*rows)
