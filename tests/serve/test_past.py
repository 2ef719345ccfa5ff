"""The past hour of the dashboard: frames and samples are bounded, and found by time."""

from __future__ import annotations

import math
import random
from typing import Any

from kvloom.core import Histogram
from kvloom.serve.dashboard.history import MAX_SAMPLES, OVERVIEW, SHOWN_SAMPLES, Samples
from kvloom.serve.dashboard.past import FRAME_SECONDS, PAST_SECONDS, Past
from tests.serve.running import Running


def test_a_frame_is_found_by_its_time() -> None:
    past = Past()
    assert past.find(5.0) is None
    assert past.to_dict()["from"] is None
    for i in range(10):
        past.add(100.0 + 15 * i, f"document {i}".encode())
    assert past.find(0.0) == (100.0, b"document 0")  # the oldest one
    assert past.find(129.9) == (115.0, b"document 1")
    assert past.find(130.0) == (130.0, b"document 2")
    assert past.find(1e9) == (235.0, b"document 9")
    assert (past.to_dict()["from"], past.to_dict()["until"]) == (100.0, 235.0)


def test_frames_older_than_an_hour_are_dropped() -> None:
    past = Past()
    for i in range(1000):
        past.add(FRAME_SECONDS * i, b"x" * i)
    assert len(past) == PAST_SECONDS / FRAME_SECONDS + 1
    assert past.to_dict()["from"] == FRAME_SECONDS * 999 - PAST_SECONDS


def test_the_bytes_of_frames_are_bounded_and_repeated_frames_are_free() -> None:
    past, draw = Past(max_bytes=50_000), random.Random(0)
    for i in range(200):
        past.add(float(i), draw.randbytes(1000))
        assert past.to_dict()["bytes"] <= 50_000
    assert 40 <= len(past) <= 50
    before = past.to_dict()["bytes"]
    for i in range(200, 300):
        past.repeat(float(i))
    assert past.to_dict()["bytes"] == before
    assert past.find(299.0) == (299.0, past.find(199.0)[1])  # type: ignore[index]
    big = Past(max_bytes=10)  # one frame is always kept
    big.add(0.0, draw.randbytes(500))
    assert len(big) == 1
    for i in range(20):
        past.add(300 + PAST_SECONDS + i, b"new")
    assert past.to_dict()["bytes"] < 20 * 50  # nothing of the dropped frames is counted


def test_samples_end_at_a_chosen_time() -> None:
    samples = Samples(("rate",), (Histogram((1.0,)),), 2.0)
    for i in range(MAX_SAMPLES + 100):
        samples.increments(2.0 * i, {})
        samples.add([None if i % 7 == 0 else float(i)])
    now = samples.to_dict()
    assert len(now["series"]["rate"]) == SHOWN_SAMPLES
    assert now["until"] == 2.0 * (MAX_SAMPLES + 99)
    then = samples.to_dict(2001.0)
    assert (then["until"], then["series"]["rate"][-1]) == (2000.0, 1000.0)
    assert then["series"]["rate"][-6:-4] == [995.0, 996.0]
    assert None in then["series"]["rate"]
    assert samples.to_dict(0.0)["series"]["rate"] == []
    load = samples.overview("rate", 200.0, 200.0 + 2 * MAX_SAMPLES)
    assert len(load) == OVERVIEW
    assert len(samples.overview("rate", 200.0, 260.0)) == 15
    numbers = [value for value in load if value is not None]
    assert numbers == sorted(numbers)
    assert not any(math.isnan(value) for value in numbers)


def test_the_state_of_a_past_moment(server: Running) -> None:
    server.complete(prompt="a moment of the past " * 3, max_tokens=4, ignore_eos=True)

    def past() -> dict[str, Any]:
        return dict(server.send("GET", "/kvloom/state")[2]["past"])

    server.wait_for(lambda: past()["from"] is not None, 60)
    at = int(past()["until"])
    status, _, then = server.send("GET", f"/kvloom/state?at={at + 5}")
    assert status == 200
    _, _, now = server.send("GET", "/kvloom/state")
    assert set(then) == set(now) | {"tier_rates"}
    assert then["now"] == then["engine_at"] <= now["now"]
    assert then["engine"]["map"]["cells"] > 0
    assert then["history"]["until"] <= at + 5
    assert then["totals"]["prompt_tokens"] <= now["totals"]["prompt_tokens"]
    assert past()["bytes"] > 0
    for wrong in ("-5", "now", "1e9", ""):
        assert server.send("GET", f"/kvloom/state?at={wrong}")[0] == 400
    _, _, all_ = server.send("GET", "/kvloom/requests")
    oldest = all_["requests"][-1]["arrived"]
    earlier = server.send("GET", f"/kvloom/requests?until={int(oldest) - 1}")[2]["requests"]
    assert all(one["arrived"] <= int(oldest) - 1 for one in earlier)
    assert server.send("GET", "/kvloom/requests?until=1")[2]["requests"] == []
    assert server.send("GET", "/kvloom/requests?until=x")[0] == 400
