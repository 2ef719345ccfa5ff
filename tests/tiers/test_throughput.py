"""Measured throughput of a tier."""

from __future__ import annotations

import pytest

from kvloom.tiers.transfers import Throughput


def test_throughput_is_that_of_all_batches_in_any_order_of_their_ends() -> None:
    """Sixteen at a time that end together are not one slow one and fifteen that took no time."""
    rate, now = Throughput(), 1000.0
    for _ in range(8):
        began, now = now, now + 0.16
        for _ in range(16):
            rate.record(1_000_000, began, now)
        assert rate.bytes_per_second == pytest.approx(100e6, rel=0.01)
    for _ in range(100):  # it becomes ten times slower, and is believed within a second
        rate.record(100_000, now, now + 0.01)
        now += 0.01
    assert rate.bytes_per_second == pytest.approx(10e6, rel=0.3)
    rate.raise_estimate()
    assert rate.bytes_per_second > 10.9e6


def test_one_hang_lowers_throughput_for_a_short_time_only() -> None:
    rate, now = Throughput(), 1000.0
    for _ in range(50):
        rate.record(1_000_000, now, now + 0.01)
        now += 0.01
    rate.record(1_000_000, now, now + 60.0)
    now += 60.0
    for _ in range(100):
        rate.record(1_000_000, now, now + 0.01)
        now += 0.01
    assert rate.bytes_per_second == pytest.approx(100e6, rel=0.1)
