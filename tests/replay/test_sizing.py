from __future__ import annotations

import pytest

from kvloom.replay import replay, size_cache
from kvloom.replay.sizing import GIGABYTE, sizes_to_try

from .samples import random_traffic

SAMPLE = random_traffic(8, requests=300)


@pytest.mark.parametrize("policy", ["lru", "min", "adaptive"])
def test_the_answer_reaches_the_target_and_a_little_less_does_not(policy: str) -> None:
    sizing = size_cache(SAMPLE, 10**6, policy=policy, target=0.5)
    assert sizing.capacity_blocks is not None
    assert replay(SAMPLE, sizing.capacity_blocks, policy).hit_rate >= 0.5
    assert replay(SAMPLE, int(sizing.capacity_blocks * 0.9), policy).hit_rate < 0.5
    assert sizing.bytes == sizing.capacity_blocks * 10**6


def test_by_default_it_aims_at_nine_tenths_of_the_ideal() -> None:
    sizing = size_cache(SAMPLE, 1000)
    assert sizing.target == pytest.approx(0.9 * sizing.ideal)
    assert sizing.ideal == replay(SAMPLE, 1, "ideal").hit_rate


def test_the_gain_of_a_gigabyte_matches_a_replay() -> None:
    block = GIGABYTE // 5
    sizing = size_cache(SAMPLE, block, target=0.5)
    assert sizing.capacity_blocks is not None
    here, there = (replay(SAMPLE, sizing.capacity_blocks + n, "lru").hit_rate for n in (0, 5))
    assert sizing.next_gigabyte == pytest.approx(there - here)
    rates = [point.hit_rate for point in sizing.curve]
    assert rates == sorted(rates)
    assert {*sizes_to_try(SAMPLE), sizing.capacity_blocks} == {p.capacity_blocks for p in sizing.curve}


def test_tiers_are_filled_from_the_fastest() -> None:
    whole = size_cache(SAMPLE, 1000, target=0.5)
    assert whole.bytes is not None
    sizing = size_cache(
        SAMPLE, 1000, target=0.5, limits=[("device", 10_000), ("host", 10**9), ("disk", 10**12)]
    )
    assert [(t.name, t.bytes) for t in sizing.tiers] == [("device", 10_000), ("host", whole.bytes)]
    assert sizing.tiers[0].hit_rate == replay(SAMPLE, 10, "lru").hit_rate
    assert sizing.tiers[1].hit_rate >= 0.5


def test_a_target_above_the_ideal_is_not_reached() -> None:
    sizing = size_cache(SAMPLE, 1000, target=0.99)
    assert (sizing.capacity_blocks, sizing.bytes) == (None, None)
    assert sizing.ideal < 0.99


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target hit rate 1\.5"):
        size_cache(SAMPLE, 1000, target=1.5)
    with pytest.raises(ValueError, match="block_bytes 0"):
        size_cache(SAMPLE, 0)
    with pytest.raises(ValueError, match="at least one tier"):
        size_cache(SAMPLE, 1000, limits=[])
