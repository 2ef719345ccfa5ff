"""Lines through what was seen: what is believed, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvloom.engine.offload import LoadEvent, PoolCopy, TimeModel
from kvloom.kernels.copy import Done


def test_a_line_goes_through_what_was_seen() -> None:
    line = TimeModel()
    assert not line.is_known
    assert line.seconds(5) == 0
    for amount in (10, 20, 30, 40):
        line.observe(amount, 0.5 + 0.1 * amount)
    assert line.seconds(100) == pytest.approx(10.5)


def test_one_sight_is_no_ground_to_refuse_anything() -> None:
    line = TimeModel()
    for seen in range(4):
        assert line.is_trusted == (seen >= 3)
        line.observe(1000, 0.01)


def test_what_was_refused_is_tried_again_by_and_by() -> None:
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


def test_a_moment_in_which_the_machine_did_something_else_says_little_and_a_slower_one_is_believed() -> None:
    line = TimeModel()
    for _ in range(20):
        line.observe(1000, 0.001)
    line.observe(1000, 5.0)
    assert line.seconds(1000) < 0.002
    for _ in range(40):
        line.observe(1000, 0.1)
    assert line.seconds(1000) == pytest.approx(0.1, rel=0.2)


def test_what_nothing_takes_tells_what_amounts_that_hardly_differ_do_not() -> None:
    line = TimeModel()
    for amount, seconds in ((96, 0.016), (96, 0.0158), (90, 0.0161), (96, 0.0155)):
        line.observe(amount, seconds)
    assert line.seconds(96) - line.seconds(32) < 0.002  # so much for the others' noise
    for _ in range(3):
        line.observe(0, 0.003)
    assert line.seconds(0) == pytest.approx(0.003)
    assert line.seconds(96) - line.seconds(32) == pytest.approx(64 / 96 * 0.0128, rel=0.05)


def test_nothing_alone_makes_no_line_and_one_that_takes_longer_than_something_is_not_believed() -> None:
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


def test_copies_to_a_device_take_what_its_clock_says_however_late_someone_looks() -> None:
    def between(begun: float, done: float) -> LoadEvent:
        moments: list[Any] = [Moment(begun), Moment(done)]
        return LoadEvent(*moments)

    reservation: Any = None
    copy = PoolCopy(reservation, resume=0, bytes=1, pages=1, started=1.0, leases=[], loaded=np.zeros(1))
    copy.events = [between(70.0, 72.5), between(72.5, 75.0)]
    assert copy.is_done
    assert copy.seconds(now=9.0) == pytest.approx(0.005)
    copy.events = [Done(), Done()]
    assert copy.seconds(now=9.0) == pytest.approx(8.0)
