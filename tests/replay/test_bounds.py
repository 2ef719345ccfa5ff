from __future__ import annotations

import pytest

from kvloom.replay.bounds import ideal_hits, min_hits
from kvloom.replay.traffic import Traffic

from .samples import random_traffic, traffic


def plain_min(sample: Traffic, capacity: int) -> tuple[list[int], int]:
    """Belady's MIN the slow way: block by block, looking ahead through the whole trace."""
    rows = [r.blocks.tolist()[:capacity] for r in sample.requests]
    inside: dict[int, int] = {}
    hits, gone = [], 0
    for now, row in enumerate(rows):
        leading = 0
        while leading < len(row) and row[leading] in inside:
            leading += 1
        hits.append(leading)
        inside |= {block: depth for depth, block in enumerate(row)}

        def wanted(block: int, now: int = now) -> float:
            return next((i for i in range(now + 1, len(rows)) if block in rows[i]), float("inf"))

        while len(inside) > capacity:
            del inside[max(inside, key=lambda block: (wanted(block), inside[block]))]
            gone += 1
    return hits, gone


def test_the_ideal_hits_every_earlier_block() -> None:
    assert ideal_hits(traffic([1, 2], [1, 2, 3], [4], [1, 9], [1, 2, 3])) == [0, 2, 0, 1, 3]


@pytest.mark.parametrize("capacity", [1, 5, 12, 30, 80, 1000])
@pytest.mark.parametrize("seed", [1, 2])
def test_min_equals_a_block_by_block_search(seed: int, capacity: int) -> None:
    sample = random_traffic(seed, requests=120)
    assert min_hits(sample, capacity) == plain_min(sample, capacity)


def test_min_with_space_for_all_equals_the_ideal() -> None:
    sample = random_traffic(3)
    assert min_hits(sample, sample.distinct) == (ideal_hits(sample), 0)


def test_min_of_a_request_longer_than_the_cache() -> None:
    assert min_hits(traffic([1, 2, 3, 4], [1, 2, 3, 4]), 3) == ([0, 3], 0)
