"""Requests with objectives: admitted, deferred or refused before they join the queue. Step times are given, not measured."""

from __future__ import annotations

import pytest

from kvloom.core import CacheControl, Objective, SloAdmission, StepTimes, Tenant, Verdict
from kvloom.engine import LLM, Engine, SamplingParams
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import drawn

STEP, TOKEN = 1.0, 0.01


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 1 s, and 10 ms more for each prompt token: so the predictions say, whatever the machine does."""
    monkeypatch.setattr(SloAdmission, "observe_step", lambda *_, **__: None)


def engine_with(**settings: object) -> Engine:
    model = tiny("llama", max_position_embeddings=1024)
    engine = make_engine(model, 1 << 22, token_budget=64, **settings)
    engine.scheduler.slo.admission.times = StepTimes((STEP, TOKEN, 0.0, 0.0, 0.0))
    return engine


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def counts(engine: Engine) -> list[int]:
    return [engine.scheduler.slo.admission.counts[one] for one in Verdict]


def test_steps_are_measured() -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    for prompt in drawn("measured", *[30] * 6):
        engine.add(prompt, greedy(8))
    engine.run()
    times = engine.scheduler.slo.admission.times
    assert times.is_known
    assert times.steps >= 8
    assert sum(times.coefficients) > 0


@pytest.mark.usefixtures("timed")
def test_a_request_that_cannot_meet_its_objective_finishes_at_once() -> None:
    engine = engine_with()
    prompt = drawn("refused", 60)[0]
    refused = engine.add(prompt, greedy(4), slo=Objective(ttft_ms=1000))
    assert refused.finish_reason == "slo"
    assert not engine.busy
    assert refused.slo is not None
    report = refused.slo.report(0)
    assert report["predicted_ttft_ms"] == pytest.approx(1600, rel=0.1)
    assert "even without other requests" in report["refusal"]
    assert report["retry_after_s"] is None
    admitted = engine.add(prompt, greedy(4), slo=Objective(ttft_ms=5000))
    without = engine.add(prompt, greedy(4))
    engine.run()
    assert admitted.tokens == without.tokens == expected(tiny("llama"), [prompt], 4)[0]
    assert counts(engine) == [1, 0, 1]


@pytest.mark.usefixtures("timed")
def test_requests_ahead_count_and_cached_tokens_do_not() -> None:
    engine = engine_with()
    first, second = drawn("ahead", 64, 64)
    engine.add(first, greedy(2))
    engine.run()
    again = engine.add(first, greedy(2), slo=Objective(ttft_ms=1400))  # one step of the last token
    assert again.finish_reason is None
    for prompt in drawn("crowd", *[64] * 4):
        engine.add(prompt, greedy(2))
    behind = engine.add(second, greedy(2), slo=Objective(ttft_ms=5000))
    assert behind.finish_reason == "slo"
    assert behind.slo is not None
    assert behind.slo.refusal is not None
    assert behind.slo.refusal.retry_after is not None
    assert 1 <= behind.slo.refusal.retry_after <= 8
    engine.run()
    later = engine.add(second, greedy(2), slo=Objective(ttft_ms=5000))
    engine.run()
    assert later.finish_reason == "length"


@pytest.mark.usefixtures("timed")
def test_a_high_priority_counts_only_work_at_or_above_it() -> None:
    engine = engine_with()
    for prompt in drawn("low", *[64] * 4):
        engine.add(prompt, greedy(2))
    prompt = drawn("high", 32)[0]
    objective = Objective(ttft_ms=3000)
    assert engine.add(prompt, greedy(2), slo=objective).finish_reason == "slo"
    assert engine.add(prompt, greedy(2), priority=1, slo=objective).finish_reason is None
    engine.run()


@pytest.mark.usefixtures("timed")
def test_a_request_with_a_deadline_waits_and_runs() -> None:
    engine = engine_with(max_running=1)
    running = engine.add(drawn("running", 20)[0], greedy(30))
    engine.step()
    prompt = drawn("deferred", 20)[0]
    deferred = engine.add(prompt, greedy(3), slo=Objective(ttft_ms=5000, deadline_ms=3_600_000))
    assert deferred.slo is not None
    assert deferred.slo.is_deferred
    assert deferred in engine.scheduler.open
    assert engine.scheduler.waiting == 1
    engine.run()
    assert (running.finish_reason, deferred.finish_reason) == ("length", "length")
    assert deferred.tokens == expected(tiny("llama"), [prompt], 3)[0]
    assert counts(engine) == [0, 1, 0]


@pytest.mark.usefixtures("timed")
def test_a_deferred_request_can_be_cancelled() -> None:
    engine = engine_with(max_running=1)
    engine.add(drawn("running", 20)[0], greedy(10))
    engine.step()
    deferred = engine.add([5, 6, 7], greedy(3), slo=Objective(ttft_ms=2000, deadline_ms=3_600_000))
    engine.cancel(deferred)
    engine.run()
    assert deferred.finish_reason == "cancelled"
    assert not engine.scheduler.slo.held
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.usefixtures("timed")
def test_a_deadline_that_passes_refuses_a_deferred_request() -> None:
    engine = engine_with(max_running=1)
    engine.add(drawn("running", 20)[0], greedy(40))
    engine.step()
    now = engine.cache.clock.now()
    objective = Objective(ttft_ms=2000, deadline_ms=100_000)
    deferred = engine.add([5, 6, 7], greedy(3), slo=objective, arrived=now - 20.0)
    assert deferred.slo is not None
    assert deferred.slo.is_deferred
    deferred.slo.arrived = now - 99.0  # as if time had passed
    while deferred.finish_reason is None:
        updated = engine.step()
    assert deferred.finish_reason == "slo"
    assert deferred in updated
    assert deferred.slo.refusal is not None
    assert "deadline" in deferred.slo.refusal.reason
    engine.run()


@pytest.mark.usefixtures("timed")
def test_objectives_of_engine_and_tenant() -> None:
    tenants = (Tenant("red", weight=1, objective=Objective(ttft_ms=500)), Tenant("blue", weight=1))
    engine = engine_with(tenants=tenants, slo_ttft=60_000)
    prompt = drawn("tenants", 20)[0]
    red, blue = CacheControl(tenant="red"), CacheControl(tenant="blue")
    assert engine.add(prompt, greedy(2), red).finish_reason == "slo"
    own = engine.add(prompt, greedy(2), red, slo=Objective(ttft_ms=10_000))
    default = engine.add(prompt, greedy(2), blue)
    assert default.slo is not None
    assert default.slo.objective == Objective(ttft_ms=60_000)
    engine.run()
    assert (own.finish_reason, default.finish_reason) == ("length", "length")


@pytest.mark.usefixtures("timed")
def test_predictions_are_compared_with_the_outcome() -> None:
    engine = engine_with()
    request = engine.add(drawn("outcome", 20)[0], greedy(5), slo=Objective(ttft_ms=60_000))
    engine.run()
    assert request.slo is not None
    report = request.slo.report(request.output_count)
    assert report["actual_ttft_ms"] > 0
    assert report["actual_tbt_ms"] > 0
    admission = engine.scheduler.slo.admission
    assert (admission.ttft_ratio.count, admission.tbt_ratio.count) == (1, 1)


@pytest.mark.usefixtures("timed")
def test_pages_in_host_memory_need_not_be_computed() -> None:
    model = tiny("llama", max_position_embeddings=1024)
    layout = make_engine(model, 1 << 22).layout
    engine = make_engine(
        model, layout.slab_bytes_for(400) + 4 * layout.slab_bytes, token_budget=64, tiers=["host:16MiB"]
    )
    engine.scheduler.slo.admission.times = StepTimes((STEP, TOKEN, 0.0, 0.0, 0.0))
    first, *others = drawn("host", 300, 300, 300)
    for prompt in (first, *others):  # the last two evict the first
        engine.add(prompt, greedy(2))
        engine.run()
    objective = Objective(ttft_ms=4000)
    assert engine.add(drawn("unseen", 300)[0], greedy(2), slo=objective).finish_reason == "slo"
    loaded = engine.add(first, greedy(2), slo=objective)
    assert loaded.finish_reason is None
    engine.run()
    assert loaded.hits.get("host", 0) > 200
    engine.close()


def test_the_llm_reports_refused_prompts() -> None:
    llm = LLM(tiny("llama"), pool_bytes=1 << 22)
    prompts = drawn("llm", 20, 20)
    llm.generate(prompts, greedy(12))
    results = llm.generate(prompts, greedy(4), slo=Objective(ttft_ms=1e-6))
    for result in results:
        assert [one.finish_reason for one in result.outputs] == ["slo"]
        assert result.outputs[0].token_ids == []
        assert result.slo is not None
        assert "objective cannot be met" in result.slo["refusal"]
    assert [d.finish_reason for d in llm.stream(prompts[0], greedy(4), slo=Objective(ttft_ms=1e-6))] == [
        "slo"
    ]
    served = llm.generate(prompts, greedy(4), slo=Objective(ttft_ms=1e9))
    assert all(result.slo is not None and result.slo["actual_ttft_ms"] > 0 for result in served)
    assert llm.generate(prompts, greedy(4))[0].slo is None
