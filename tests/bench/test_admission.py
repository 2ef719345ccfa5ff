"""`kvloom bench admission`: the load is exactly the given multiple of the measured capacity."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvloom.bench.admission import arrivals, main


def test_arrivals_have_an_exact_number_and_random_times() -> None:
    found = arrivals(200, 10.0, seed=1)
    assert len(found) == 200
    times = [one.at for one in found]
    assert times == sorted(times)
    assert 0 <= times[0]
    assert times[-1] < 10
    gaps = sorted(b - a for a, b in pairwise(times))
    assert gaps[0] < 0.01 < 0.1 < gaps[-1], "as in a Poisson process"
    assert arrivals(200, 10.0, seed=1) == found
    assert arrivals(200, 10.0, seed=2) != found


@pytest.mark.slow
def test_every_mode_gets_twice_the_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "1", "--rounds", "2", "--queue", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rate"] == pytest.approx([2 * one for one in found["capacity"]], rel=0.01)
    assert [one["admission"] for one in found["modes"]] == ["none", "slo", "queue 2"]
    requests = {one["requests"] for one in found["modes"]}
    assert len(requests) == 1, "the same requests in each mode"
    for one in found["modes"]:
        assert one["met"] + one["refused"] <= one["requests"]
    assert found["modes"][0]["refused"] == 0
