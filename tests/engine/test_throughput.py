"""Lines through what was seen: what is believed, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvloom.engine.offload import LoadEvent, PoolCopy, TimeModel
from kvloom.kernels.copy import FinishedEvent


def test_time_model_fits_a_line() -> None:
    line = TimeModel()
    assert not line.is_known
    assert line.seconds(5) == 0
    for amount in (10, 20, 30, 40):
        line.observe(amount, 0.5 + 0.1 * amount)
    assert line.seconds(100) == pytest.approx(10.5)


def test_time_model_needs_three_measurements_to_be_trusted() -> None:
    line = TimeModel()
    for seen in range(4):
        assert line.is_trusted == (seen >= 3)
        line.observe(1000, 0.01)


def test_doubt_lowers_the_estimate() -> None:
    line = TimeModel()
    for _ in range(5):
        line.observe(1000, 1.0)
    refused = 0
    while line.seconds(1000) > 0.01:
        line.doubt()
        refused += 1
    assert 30 < refused < 60
    line.observe(1000, 0.001)
    assert line.seconds(1000) < 0.01


def test_outlier_counts_little_and_a_slowdown_soon() -> None:
    line = TimeModel()
    for _ in range(20):
        line.observe(1000, 0.001)
    line.observe(1000, 5.0)
    assert line.seconds(1000) < 0.002
    for _ in range(40):
        line.observe(1000, 0.1)
    assert line.seconds(1000) == pytest.approx(0.1, rel=0.2)


def test_measurement_of_amount_0_sets_the_base() -> None:
    line = TimeModel()
    for amount, seconds in ((96, 0.016), (96, 0.0158), (90, 0.0161), (96, 0.0155)):
        line.observe(amount, seconds)
    assert line.seconds(96) - line.seconds(32) < 0.002  # so much for the others' noise
    for _ in range(3):
        line.observe(0, 0.003)
    assert line.seconds(0) == pytest.approx(0.003)
    assert line.seconds(96) - line.seconds(32) == pytest.approx(64 / 96 * 0.0128, rel=0.05)


def test_amount_0_alone_gives_no_estimate() -> None:
    line = TimeModel()
    line.observe(0, 0.01)
    assert not line.is_known
    assert line.seconds(10) == 0
    for amount in (10, 20, 30):
        line.observe(amount, 0.001 * amount)
    line.observe(0, 1.0)
    assert line.seconds(40) == pytest.approx(0.04)


@dataclass
class Moment:
    at: float

    def elapsed_time(self, later: Any) -> float:
        return float(later.at - self.at)

    def query(self) -> bool:
        return True


def test_copy_seconds_use_the_devices_clock() -> None:
    def between(begun: float, done: float) -> LoadEvent:
        moments: list[Any] = [Moment(begun), Moment(done)]
        return LoadEvent(*moments)

    reservation: Any = None
    copy = PoolCopy(reservation, resume=0, bytes=1, pages=1, started=1.0, leases=[], loaded=np.zeros(1))
    copy.events = [between(70.0, 72.5), between(72.5, 75.0)]
    assert copy.is_done
    assert copy.seconds(now=9.0) == pytest.approx(0.005)
    copy.events = [FinishedEvent(), FinishedEvent()]
    assert copy.seconds(now=9.0) == pytest.approx(8.0)
