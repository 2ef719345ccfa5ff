"""Computing a prompt's head while its tail loads, on a simulated clock, for any speeds and any estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from kvloom.engine.offload import Estimates, LoadOrRecompute, Progress

BLOCK, LENGTH, BUDGET = 16, 4096, 2048
EACH, BASE = 0.001, 0.02  # seconds of a token, of a step
RATIOS = [0.0, 0.05, 0.1, 0.3, 0.6, 1.0, 3.0, 10.0]


def computing(tokens: int) -> float:
    return BASE + EACH * tokens


ALL = 2 * computing(BUDGET)


@dataclass
class Run:
    """A prompt of LENGTH tokens, on a device that computes tokens and a disk that loads `ratio` times as many in the
    same time, in chunks. `believed` is the assumed speed of the disk before the first chunk, or None if it is unknown.
    Measured speeds count over a quarter of a second, as in a tier queue. `at_once` tokens are cached."""

    ratio: float
    believed: float | None
    ahead: bool = False
    at_once: int = 0
    now: float = 0.0
    computed: list[int] = field(default_factory=list)
    waited: float = 0.0

    def came(self, now: float) -> int:
        exact = self.at_once + self.ratio * now / EACH
        return min(LENGTH, int(exact) // (LENGTH // 32) * (LENGTH // 32))

    def speed(self) -> float | None:
        came = self.came(self.now)
        if self.believed is None:
            return came / self.now if came and self.now else None
        weight = 0.25 * math.exp(-self.now / 0.25)
        return (weight * self.believed / EACH + came) / (weight + self.now)

    def seconds(self) -> float:
        """Return the seconds until the first token. The last token of the prompt is always computed."""
        decision, front, lands = LoadOrRecompute(), 0, None
        while front < (low := LENGTH - self.came(self.now)):
            assert self.now < 20 * ALL
            speed = self.speed()
            load = None
            if speed is not None:
                load = lambda first, low=low, speed=speed: (low - first) / speed  # noqa: E731
            inflight = None if lands is None else lands - self.now
            tokens = decision.tokens_to_compute(
                Progress(front, low, LENGTH, BLOCK, min_step=LENGTH // 32),
                Estimates(computing, load, inflight, 0.04 * ALL),
                self.now,
            )
            took = min(tokens, BUDGET)
            if lands is not None:
                before, lands = lands, lands + computing(took) if took else None
                self.now = before
            elif not took:
                self.now += 0.002
                self.waited += 0.002
            elif self.ahead:
                lands = self.now + computing(took)
            else:
                self.now += computing(took)
            if took:
                front += took
                self.computed.append(took)
        if lands is not None:
            self.now = lands
        return self.now + (computing(1) if front < LENGTH else 0.0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("belief", ["right", "unknown", "3 times", "30 times", "a third", "cached"])
def test_decision_is_never_much_slower_than_recomputing(ratio: float, belief: str, ahead: bool) -> None:
    wrong = {"3 times": 3.0, "30 times": 30.0, "a third": 1 / 3}.get(belief, 1.0)
    believed = None if belief == "unknown" else max(ratio, 0.01) * wrong
    run = Run(ratio, believed, ahead, LENGTH // 4 if belief == "cached" else 0)
    assert run.seconds() <= 1.07 * ALL
    assert sum(run.computed) <= LENGTH


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ratio", RATIOS[2:])
def test_known_throughput_meets_nearly_optimally(ratio: float, ahead: bool) -> None:
    run = Run(ratio, ratio, ahead)
    best = ALL / (1 + ratio)
    steps = 3 * BASE + 2 * EACH * LENGTH / 32  # a chunk, and the steps in between
    assert run.seconds() <= best + steps
    assert run.waited <= EACH * LENGTH / 16 if ratio < 1 else True


def test_fast_disk_is_waited_for() -> None:
    run = Run(40.0, 40.0)
    assert run.seconds() < 0.06 * ALL
    assert run.computed == []


@pytest.mark.parametrize("believed", [0.5, 1.0, 10.0, 100.0, 1000.0])
def test_hung_disk_costs_a_few_percent(believed: float) -> None:
    run = Run(0.0, believed)
    assert run.seconds() <= 1.07 * ALL
    assert run.waited <= 0.04 * ALL + 0.003


def test_step_close_to_the_end_of_the_prompt_reaches_it() -> None:
    """The loaded tail saves less time than the step after it costs."""
    found = LoadOrRecompute().tokens_to_compute(
        Progress(3840, 4080, LENGTH, BLOCK, min_step=128),
        Estimates(computing, lambda first: 9.0, None, 0.1),
        0.0,
    )
    assert found == LENGTH - 3840


def test_waiting_is_free_during_the_inflight_step() -> None:
    """Pages expected before the step ends are not computed; without estimates nothing is launched either."""
    decision = LoadOrRecompute()

    def asked(busy: float | None, seconds: float | None) -> int:
        loading = None if seconds is None else lambda first: seconds * (3072 - first) / 1024
        return decision.tokens_to_compute(
            Progress(2048, 3072, LENGTH, BLOCK, min_step=128), Estimates(computing, loading, busy, 0.0), 0.0
        )

    assert asked(1.0, 0.9) == asked(1.0, None) == 0
    assert decision.seconds_lost == 0
    assert 128 <= asked(1.0, 2.0) < 1024  # the rest of the gap comes while this is computed
    assert asked(None, 0.01) == 0
