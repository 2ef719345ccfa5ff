"""SLO admission: what it learns from steps, what it predicts, and what it decides."""

from __future__ import annotations

import math
import random

import pytest

from kvloom.core import (
    Backlog,
    Decoding,
    Objective,
    PromptWork,
    SloAdmission,
    StepSize,
    StepTimes,
    Verdict,
)

STEP, TOKEN, ROW, POSITION = 0.005, 1e-4, 2e-4, 1e-7


def seconds(size: StepSize) -> float:
    return STEP + TOKEN * size.prompt_tokens + ROW * size.rows + POSITION * size.context


def admission(**more: float) -> SloAdmission:
    return SloAdmission(StepTimes((STEP, TOKEN, ROW, POSITION, more.get("pair", 0.0))))


def sizes(count: int, seed: int = 0) -> list[StepSize]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        rows = draw.randrange(60)
        tokens = draw.choice([0, 0, draw.randrange(2000)])
        found.append(StepSize(tokens, rows, rows * draw.uniform(100, 2000), tokens * draw.uniform(0, 3000)))
    return found


def test_step_times_learn_what_each_part_costs() -> None:
    times, draw = StepTimes(), random.Random(1)
    for size in sizes(400):
        times.observe(size, seconds(size) * draw.uniform(0.9, 1.1))
    for size in sizes(50, seed=2):
        assert times.seconds(size) == pytest.approx(seconds(size), rel=0.1)


def test_more_work_never_takes_less_time() -> None:
    times = StepTimes()
    for number, size in enumerate(sizes(200)):  # times that fall with the work
        times.observe(size, 0.5 / (1 + number % 7 + size.rows))
    assert all(one >= 0 for one in times.coefficients)


def test_step_times_follow_a_worker_that_becomes_slower() -> None:
    times = StepTimes()
    size = StepSize(512, 10, 5000)
    for _ in range(200):
        times.observe(size, 0.1)
    for _ in range(1500):
        times.observe(size, 0.3)
    assert times.seconds(size) == pytest.approx(0.3, rel=0.1)


def test_one_slow_step_changes_little() -> None:
    times = StepTimes()
    for size in sizes(200):
        times.observe(size, seconds(size))
    before = times.seconds(StepSize(512, 10, 5000))
    times.observe(StepSize(512, 10, 5000), 60.0)
    for size in sizes(16, seed=5):
        times.observe(size, seconds(size))
    assert times.seconds(StepSize(512, 10, 5000)) == pytest.approx(before, rel=0.2)


def test_without_measurements_every_request_is_admitted() -> None:
    fresh = SloAdmission()
    own = PromptWork(10**6, 100, 10**6)
    assert fresh.predict(own, Backlog()) is None
    assert fresh.decide(Objective(ttft_ms=1), None, own).verdict is Verdict.ADMIT


def test_an_idle_worker_computes_the_prompt_at_once() -> None:
    found = admission().predict(PromptWork(1000, 50, 1000), Backlog(token_budget=2048))
    assert found is not None
    assert found.ttft == pytest.approx(STEP + 1000 * TOKEN)
    assert found.tbt == pytest.approx(STEP + ROW + 1000 * POSITION)
    assert (found.ttft, found.tbt) == pytest.approx((found.idle_ttft, found.idle_tbt))


def test_prompts_ahead_and_running_decodes_delay_the_first_token() -> None:
    own = PromptWork(1000, 50, 1000)
    ahead = [PromptWork(3000, 50, 3000)]
    found = admission().predict(own, Backlog(ahead, [Decoding(500, 1000)] * 10, token_budget=1000))
    assert found is not None
    assert found.ttft >= 4 * (STEP + 10 * ROW + 5000 * POSITION) + 4000 * TOKEN
    assert found.tbt >= STEP + 12 * ROW  # ten decode already, and the one ahead


def test_tokens_behind_fill_the_last_step() -> None:
    own = PromptWork(100, 50, 100)
    alone = admission().predict(own, Backlog(token_budget=2048))
    shared = admission().predict(own, Backlog(token_budget=2048, behind=10_000))
    assert alone is not None
    assert shared is not None
    assert shared.ttft - alone.ttft == pytest.approx(1948 * TOKEN)


@pytest.mark.parametrize("limit", [{"max_running": 4}, {"capacity": 4500}])
def test_a_request_waits_for_a_place_or_for_pages(limit: dict[str, int]) -> None:
    own = PromptWork(1000, 50, 1000)
    decoding = [Decoding(1000, left) for left in (300, 100, 200, 400)]
    free = admission().predict(own, Backlog(decoding=decoding))
    full = admission().predict(own, Backlog(decoding=decoding, **limit))
    assert free is not None
    assert full is not None
    assert full.ttft - free.ttft >= 100 * STEP  # the shortest has 100 tokens left


def test_loads_from_tiers_bound_the_first_token() -> None:
    found = admission().predict(PromptWork(10, 50, 4000, load_seconds=3.0), Backlog())
    assert found is not None
    assert found.ttft == 3.0


def test_prompts_in_recent_decode_steps_lengthen_the_time_between_tokens() -> None:
    one = admission()
    own = PromptWork(100, 50, 100)
    before = one.predict(own, Backlog())
    for _ in range(100):
        size = StepSize(1000, 10, 1000)
        one.observe_step(size, seconds(size))
    after = one.predict(own, Backlog())
    assert before is not None
    assert after is not None
    assert after.tbt - before.tbt == pytest.approx(1000 * TOKEN, rel=0.2)
    one.observe_idle(100.0)
    assert one.prompt_delay < 0.001


def decided(objective: Objective, backlog: Backlog, waited: float = 0.0, output: int = 50):
    one, own = admission(), PromptWork(1000, output, 1000)
    return one.decide(objective, one.predict(own, backlog), own, waited), one


def test_a_request_that_misses_its_first_token_is_refused_with_the_reason() -> None:
    busy = Backlog([PromptWork(20_000, 50, 20_000)])
    found, one = decided(Objective(ttft_ms=500), busy)
    assert found.verdict is Verdict.REFUSE
    assert "first token" in found.reason
    assert "500 ms" in found.reason
    assert found.retry_seconds == pytest.approx(2.1 - 0.5, abs=0.3)
    assert one.counts[Verdict.REFUSE] == 1
    assert decided(Objective(ttft_ms=5000), busy)[0].verdict is Verdict.ADMIT
    assert decided(Objective(ttft_ms=5000), busy, waited=4.0)[0].verdict is Verdict.REFUSE


def test_an_objective_that_no_worker_can_meet_has_no_time_to_retry() -> None:
    assert decided(Objective(ttft_ms=20), Backlog())[0].retry_seconds is None
    assert decided(Objective(tbt_ms=1), Backlog())[0].retry_seconds is None


def test_time_between_tokens_falls_when_requests_end() -> None:
    crowd = Backlog(decoding=[Decoding(100, 10 * (i + 1)) for i in range(100)])
    found, _ = decided(Objective(tbt_ms=15), crowd)
    assert found.verdict is Verdict.REFUSE
    assert "apart" in found.reason
    assert found.retry_seconds is not None
    assert 1.0 < found.retry_seconds < 25.0
    assert decided(Objective(tbt_ms=15), crowd, output=1)[0].verdict is Verdict.ADMIT


def test_a_request_with_a_deadline_waits_until_the_last_moment() -> None:
    busy = Backlog([PromptWork(20_000, 50, 20_000)])
    objective = Objective(ttft_ms=500, deadline_ms=60_000)
    assert decided(objective, busy)[0].verdict is Verdict.DEFER
    needed = 2.1 + 50 * 0.006
    assert decided(objective, busy, waited=60 - 1.1 * needed)[0].verdict is Verdict.ADMIT
    late, _ = decided(objective, busy, waited=59.0)
    assert late.verdict is Verdict.REFUSE
    assert "deadline" in late.reason
    assert decided(objective, Backlog(), waited=30.0)[0].verdict is Verdict.ADMIT  # from the end of the wait


def test_objectives_have_defaults() -> None:
    default = Objective(ttft_ms=500, tbt_ms=50)
    assert Objective(tbt_ms=20).over(default) == Objective(500, 20)
    assert not Objective()
    assert default
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive number"):
            Objective(ttft_ms=bad)


def test_predictions_are_compared_with_what_happened() -> None:
    one = admission()
    found = one.predict(PromptWork(1000, 50, 1000), Backlog())
    assert found is not None
    one.observe_request(found, 2 * found.ttft, None, 1)
    one.observe_request(found, found.ttft, found.tbt, 50)
    assert one.ttft_ratio.count == 2
    assert one.tbt_ratio.count == 1
    assert one.ttft_ratio.total == pytest.approx(3.0)
