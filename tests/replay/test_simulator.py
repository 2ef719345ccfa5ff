from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from kvloom.core import POLICIES, Tenant
from kvloom.replay import NAMES, Tier, Traffic, read_traces, replay
from kvloom.replay.traffic import Request

from .samples import TRACES, needs_traces, random_traffic, traffic

CONVERSATION = "mooncake/conversation_trace.jsonl.gz"


def plain_lru(sample: Traffic, capacity: int) -> list[int]:
    """Least recently used over single blocks: whole requests inserted, deeper blocks leave first."""
    inside: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in sample.requests:
        row = request.blocks.tolist()
        leading = 0
        while leading < len(row) and row[leading] in inside:
            leading += 1
        hits.append(leading)
        for block in reversed(row):
            inside[block] = None
            inside.move_to_end(block)
        while len(inside) > capacity:
            inside.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [15, 40, 90, 10_000])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lru_through_the_core_is_lru_over_single_blocks(seed: int, capacity: int) -> None:
    sample = random_traffic(seed)
    assert replay(sample, capacity, "lru").hits == plain_lru(sample, capacity)


@pytest.mark.parametrize("policy", NAMES)
def test_with_space_for_all_every_policy_is_ideal(policy: str) -> None:
    sample = random_traffic(4)
    outcome = replay(sample, sample.distinct, policy)
    assert outcome.hits == replay(sample, 1, "ideal").hits
    assert outcome.evictions == 0


@pytest.mark.parametrize("policy", [*POLICIES, "min"])
def test_no_policy_beats_min(policy: str) -> None:
    sample = random_traffic(5)
    outcome = replay(sample, 40, policy)
    assert 0 < sum(outcome.hits) <= sum(replay(sample, 40, "min").hits)
    if policy != "min":
        (device,) = outcome.tiers
        assert device.written_blocks - outcome.evictions == device.resident_blocks == 40


def test_requests_of_one_instant_come_in_order() -> None:
    sample = traffic([1, 2, 3], [4, 5], [1, 2, 3], [4, 5], every=0.0)
    assert replay(sample, 5, "lru").hits == [0, 0, 3, 2]


def test_only_leading_blocks_count_and_a_whole_prompt_may_hit() -> None:
    assert replay(traffic([1, 2], [1, 2], [9, 2]), 10, "lru").hits == [0, 2, 0]


def test_of_a_request_longer_than_the_cache_the_beginning_is_cached() -> None:
    assert replay(traffic([1, 2, 3, 4], [1, 2, 3, 4]), 3, "lru").hits == [0, 3]


def test_tiers_add_hits_that_faster_ones_miss() -> None:
    sample = random_traffic(6)
    tiers = (Tier("host", 60), Tier("disk", 200))
    outcome = replay(sample, 25, "lru", tiers=tiers)
    assert outcome.hits == plain_lru(sample, 25)
    together = [sum(hits) for hits in zip(outcome.hits, *outcome.tier_hits, strict=True)]
    assert together == plain_lru(sample, 200)
    assert [use.name for use in outcome.tiers] == ["device", "host", "disk"]
    assert outcome.hit_rate == sum(together) / sample.asked
    assert all(use.resident_blocks <= use.capacity_blocks for use in outcome.tiers)


def test_device_and_an_exclusive_tier_hit_like_one_cache_of_their_sum() -> None:
    sample = random_traffic(6)
    outcome = replay(sample, 25, "lru", tiers=(Tier("host", 60),), tier_rule="exclusive")
    assert outcome.hits == plain_lru(sample, 25)
    together = [sum(hits) for hits in zip(outcome.hits, *outcome.tier_hits, strict=True)]
    assert sum(together) == pytest.approx(sum(plain_lru(sample, 85)), rel=0.02)
    back = replay(sample, 25, "lru", tiers=(Tier("host", 60),), tier_rule="back")
    assert outcome.hit_rate > back.hit_rate > replay(sample, 25, "lru", tiers=(Tier("host", 60),)).hit_rate
    assert [use.resident_blocks for use in outcome.tiers] == [25, 60]


def test_a_tier_with_second_use_gets_blocks_of_two_requests_only() -> None:
    sample = traffic([1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 9, 10], [1, 2, 3])
    outcome = replay(sample, 3, "lru", tiers=(Tier("host", 10),), tier_rule="second-use")
    assert outcome.tier_hits == ([0, 0, 0, 0, 2],)
    assert outcome.tiers[1].written_blocks == 3  # 1 and 2 after the second request, 3 after the last


def test_blocks_evicted_from_one_tier_enter_the_next() -> None:
    sample = traffic([1, 2], [3, 4], [5, 6], [1, 2])
    tiers = (Tier("host", 2), Tier("disk", 2))
    outcome = replay(sample, 2, "lru", tiers=tiers, tier_rule="back")
    assert [hits[-1] for hits in (outcome.hits, *outcome.tier_hits)] == [0, 0, 2]


def test_tenants_share_nothing_and_keep_to_their_quota() -> None:
    def asked(tenant: str, at: float) -> Request:
        return Request(at, traffic([1, 2, 3]).requests[0].blocks, 3, 48, 1, tenant=tenant)

    sample = Traffic((asked("a", 0.0), asked("b", 1.0), asked("a", 2.0), asked("b", 3.0)), 16, 3)
    assert replay(sample, 100, "lru").hits == [0, 0, 3, 3]
    quotas = (Tenant("a", quota=2 * 16), Tenant("b", quota=10 * 16))
    assert replay(sample, 100, "lru", tenants=quotas).hits == [0, 0, 0, 3]


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_blocks_of_an_ended_session_are_evicted_first(policy: str) -> None:
    plain = traffic([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3])
    sessions = [replace(r, session=s) for r, s in zip(plain.requests, "abca", strict=True)]
    sample = Traffic(tuple(sessions), plain.block_tokens, plain.distinct)
    assert replay(sample, 6, policy).hits == [0, 0, 0, 0]
    assert replay(sample, 6, policy, ended=True).hits == [0, 0, 0, 3]


def test_bad_input_is_refused() -> None:
    sample = traffic([1])
    with pytest.raises(ValueError, match="capacity 0 must be"):
        replay(sample, 0)
    with pytest.raises(ValueError, match="unknown policy 'belady'; known: ideal, min, lru"):
        replay(sample, 1, "belady")
    with pytest.raises(ValueError, match="unknown tier rule 'write'; known: through, second-use"):
        replay(sample, 1, tier_rule="write")
    with pytest.raises(ValueError, match="tier 'host': capacity 0"):
        Tier("host", 0)


# -- the public traces -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation() -> Traffic:
    return read_traces([TRACES / CONVERSATION])


@needs_traces
@pytest.mark.parametrize(
    ("policy", "capacity", "percent"),
    [
        ("ideal", 1000, 36.64),
        ("lru", 1000, 4.45),
        ("lru", 10_000, 21.16),
        ("lru", 50_000, 35.46),
        ("min", 1000, 19.07),
        ("min", 10_000, 36.64),
    ],
)
@pytest.mark.few(2)
def test_known_hit_rates_of_the_conversation_trace(
    conversation: Traffic, policy: str, capacity: int, percent: float
) -> None:
    assert round(100 * replay(conversation, capacity, policy).hit_rate, 2) == percent


@needs_traces
@pytest.mark.parametrize(
    ("policy", "capacity", "percent"),
    [("ideal", 1000, 37.99), ("lru", 1000, 28.27), ("lru", 10_000, 37.86), ("min", 1000, 36.33)],
)
def test_known_hit_rates_of_the_first_thousand_requests_of_the_arxiv_trace(
    policy: str, capacity: int, percent: float
) -> None:
    sample = read_traces([TRACES / "dynamo/mooncake_trace_1000.jsonl"])
    assert round(100 * replay(sample, capacity, policy).hit_rate, 2) == percent


@needs_traces
@pytest.mark.slow
def test_the_learning_policy_beats_lru_in_small_caches(conversation: Traffic) -> None:
    lru, adaptive = (replay(conversation, 5484, policy).hit_rate for policy in ("lru", "adaptive"))
    assert adaptive > lru + 0.03


@needs_traces
@pytest.mark.parametrize(("policy", "times"), [("lru", 45), ("adaptive", 70)])
@pytest.mark.slow
def test_a_learning_request_costs_a_bounded_multiple(conversation: Traffic, policy: str, times: int) -> None:
    """The core against a loop over one dictionary, in turns: what a machine's speed cannot decide.
    On a machine where that loop takes half a second for a million blocks, the aim of ten seconds is 20 times it."""
    part = Traffic(conversation.requests[:2000], 512, conversation.distinct)

    def spent(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    rounds = [
        (spent(lambda: replay(part, 10_000, policy)), spent(lambda: plain_lru(part, 10_000)))
        for _ in range(4)
    ]
    assert min(ours for ours, _ in rounds) < times * min(plain for _, plain in rounds)


@pytest.mark.parametrize(("policy", "most"), [("lru", 185), ("adaptive", 310)])
def test_a_request_takes_a_bounded_number_of_calls(policy: str, most: int) -> None:
    """Counted, not timed, so that no machine decides: what a request costs is mostly the core's own functions."""
    sample = random_traffic(6)
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        evictions = replay(sample, 60, policy).evictions
    finally:
        sys.setprofile(None)
    assert evictions > len(sample.requests), "there was nothing to make room for"
    assert calls / len(sample.requests) < most
