"""Settings that measurements change while the engine runs, and how to fix them. Step times are given, not measured."""

from __future__ import annotations

import pytest

from kvloom.core import Objective, SloAdmission, StepTimes
from kvloom.engine import Engine, MeasuredSetting, SamplingParams, measured_settings
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import drawn


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times stay as a test sets them."""
    monkeypatch.setattr(SloAdmission, "observe_step", lambda *_, **__: None)


def engine_with(token: float, **settings: object) -> Engine:
    """An engine whose steps take 20 ms, and `token` seconds more for each prompt token."""
    engine = make_engine(tiny("llama", max_position_embeddings=1024), 1 << 22, token_budget=512, **settings)
    engine.scheduler.slo.admission.times = StepTimes((0.02, token, 0.0, 0.0, 0.0))
    return engine


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def setting(engine: Engine, name: str) -> MeasuredSetting:
    return next(one for one in measured_settings(engine) if one.name == name)


def largest_step(engine: Engine, objective: Objective | None) -> int:
    """Run a decoding request with an objective beside a prompt of 400 tokens. Return the largest number of prompt tokens
    that a step computed while the first request decoded."""
    short, long = drawn("chunk", 20, 400)
    decoding = engine.add(short, greedy(40), slo=objective)
    while not decoding.output_count:
        engine.step()
    prompt, largest = engine.add(long, greedy(2)), 0
    while prompt.output_count == 0:
        before = prompt.computed
        engine.step()
        assert decoding.finish_reason is None
        largest = max(largest, prompt.computed - before)
    engine.run()
    wanted = expected(tiny("llama", max_position_embeddings=1024), [short], 40)[0]
    assert decoding.tokens == wanted, "the size of a step does not change tokens"
    return largest


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    ("tbt_ms", "largest"),
    [
        (200, 128),  # 0.9 * 200 ms - 20 ms leave time for 160 prompt tokens of 1 ms
        (110, 64),  # 79 tokens
        (60, 64),  # 34 tokens, but prompts must go on
        (2000, 400),
    ],
)
def test_steps_meet_the_smallest_objective_of_decoding_requests(tbt_ms: float, largest: int) -> None:
    engine = engine_with(0.001)
    assert largest_step(engine, Objective(tbt_ms=tbt_ms)) == largest


@pytest.mark.usefixtures("timed")
def test_the_reason_of_the_size_is_reported() -> None:
    engine = engine_with(0.001)
    assert setting(engine, "chunk") == MeasuredSetting(
        "chunk", 512, "tokens", "no decoding request has an objective for the time between tokens"
    )
    decoding = engine.add(drawn("reason", 20)[0], greedy(30), slo=Objective(tbt_ms=200))
    while not decoding.output_count:
        engine.step()
    engine.step()
    found = setting(engine, "chunk")
    assert (found.value, found.is_fixed) == (128, False)
    assert "1 decoding requests takes 20.0 ms" in found.reason
    assert "objective is 200.0 ms" in found.reason
    engine.run()


@pytest.mark.usefixtures("timed")
def test_steps_keep_the_whole_budget_without_objectives_and_with_a_fixed_chunk() -> None:
    assert largest_step(engine_with(0.001), None) == 400
    engine = engine_with(0.001, fixed=["chunk"])
    assert largest_step(engine, Objective(tbt_ms=200)) == 400
    assert setting(engine, "chunk").is_fixed


def test_drafts_can_be_fixed() -> None:
    free = make_engine(tiny("llama"), 1 << 22, speculate="suffix", draft_tokens=5)
    assert free.speculation is not None
    assert free.speculation.controller is not None
    assert setting(free, "drafts").reason == "nothing is measured yet"
    fixed = make_engine(tiny("llama"), 1 << 22, speculate="suffix", draft_tokens=5, fixed=["drafts"])
    assert fixed.speculation is not None
    assert fixed.speculation.controller is None
    assert setting(fixed, "drafts") == MeasuredSetting("drafts", 5, "tokens", "fixed", is_fixed=True)


@pytest.mark.parametrize(
    ("settings", "tokens", "is_fixed"),
    [({}, 0, False), ({"fixed": ["snapshots"]}, 0, True), ({"checkpoint_every": 64}, 64, True)],
)
def test_the_interval_of_snapshots_can_be_fixed(
    settings: dict[str, object], tokens: int, is_fixed: bool
) -> None:
    engine = make_engine(tiny("qwen3_next"), 1 << 22, **settings)
    found = setting(engine, "snapshots")
    assert (found.value, found.is_fixed) == (tokens, is_fixed)
    assert all(one.name != "snapshots" for one in measured_settings(make_engine(tiny("llama"), 1 << 22)))


def test_an_elastic_pool_is_listed() -> None:
    engine = make_engine(tiny("llama"), 1 << 20, max_pool_bytes=1 << 22)
    assert engine.pool_size is not None
    assert setting(engine, "pool").reason == "no change was necessary"
    engine.resize_pool(1 << 21)
    found = setting(engine, "pool")
    assert (found.value, found.reason, found.is_fixed) == (
        engine.pool_size.pool_bytes,
        "set by an operator",
        True,
    )
