from __future__ import annotations

import pytest

from kvloom.replay import CostModel, Tier, estimate, replay

from .samples import random_traffic, traffic


def test_computing_costs_by_weights_and_by_the_tokens_before() -> None:
    model = CostModel(parameters=1e9, flop_rate=1e12, attention_flops=0.0)
    assert model.prefill(1000, 0) == pytest.approx(2.0)
    more = CostModel(parameters=1e9, flop_rate=1e12, attention_flops=1e6)
    assert more.prefill(1000, 4000) == pytest.approx(2.0 + 1000 * 4500 * 1e6 / 1e12)


def test_a_hit_shortens_the_wait() -> None:
    sample = traffic([1, 2, 3, 4], [1, 2, 3, 4], every=1000.0)
    model = CostModel(attention_flops=0.0, decode_seconds=0.0)
    cold, warm = (estimate(sample, replay(sample, n, "lru"), model) for n in (1, 100))
    assert warm.mean_ttft < cold.mean_ttft
    whole, last = model.prefill(64, 0), model.prefill(1, 63)
    assert warm.mean_ttft == pytest.approx((whole + last) / 2)
    assert warm.busy == pytest.approx((whole + last) / 1000.0)
    assert warm.requests_per_second > cold.requests_per_second


def test_blocks_in_a_tier_are_read() -> None:
    sample = traffic([1, 2, 3], [7, 8, 9], [1, 2, 3], every=1000.0)
    model = CostModel(bytes_per_token=1e6, read_rates={"host": 1e9}, decode_seconds=0.0)
    outcome = replay(sample, 3, "lru", tiers=[Tier("host", 100)])
    load = estimate(sample, outcome, model)
    fresh, reading = model.prefill(48, 0), 48 * 1e6 / 1e9
    assert load.mean_ttft == pytest.approx((2 * fresh + reading + model.prefill(1, 47)) / 3)


def test_requests_queue_for_devices() -> None:
    sample = traffic([1], [2], [3], every=0.0)
    model = CostModel(attention_flops=0.0, decode_seconds=0.0)
    one = model.prefill(16, 0)
    alone = estimate(sample, replay(sample, 10, "lru"), model)
    assert alone.p50_ttft == pytest.approx(2 * one)
    three = estimate(
        sample, replay(sample, 10, "lru"), CostModel(attention_flops=0.0, decode_seconds=0.0, devices=3)
    )
    assert three.p99_ttft == pytest.approx(one)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="flop_rate 0"):
        CostModel(flop_rate=0)
    with pytest.raises(ValueError, match="devices 0"):
        CostModel(devices=0)
    with pytest.raises(ValueError, match="no read rate for tier 'tape'"):
        CostModel().read("tape", 1)
    sample = random_traffic(1)
    with pytest.raises(ValueError, match="no read rate"):
        estimate(sample, replay(sample, 5, "lru", tiers=[Tier("tape", 50)]), CostModel())
