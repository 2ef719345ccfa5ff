"""Objectives at the router: workers that cannot meet them are left out, and a request that none can meet is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("aiohttp")

from kvloom.cluster.router.call import Call
from kvloom.cluster.router.fleet import Fleet, Offer, Worker, now
from kvloom.cluster.router.objectives import objective_of
from kvloom.cluster.router.prompt_keys import PromptKeys
from kvloom.cluster.router.proxy import Proxy
from kvloom.core import Objective
from kvloom.serve.errors import ApiError

TIMES = (0.01, 1e-3, 0.0, 0.0, 0.0)
"""A step takes 10 ms and 1 ms per prompt token."""


def proxy_of(**workers: dict[str, Any]) -> Proxy:
    fleet = Fleet(session=None)  # type: ignore[arg-type]
    for name, more in workers.items():
        worker = fleet.workers[name] = Worker(name, f"http://{name}", is_alive=True, is_kvloom=True)
        offer = Offer(**{"hash_model": "m", "step_times": TIMES, "token_budget": 2048, **more})
        fleet._offer(worker, "m", offer)
    return Proxy(fleet, reader=None)  # type: ignore[arg-type]


def call_of(tokens: int, **body: Any) -> Call:
    call = Call("/v1/completions", {}, body, b"", model="m")
    call.keys = PromptKeys(bytes(4 * tokens), [], tokens)
    return call


def busy(proxy: Proxy, name: str, tokens: int) -> None:
    proxy.fleet.models["m"].scorer.loads[name].speed.per_token = 1e-3
    proxy.fleet.models["m"].scorer.loads[name].sent(object(), tokens, tokens, now())


def test_a_worker_that_cannot_meet_the_objective_is_left_out() -> None:
    proxy = proxy_of(a={}, b={})
    busy(proxy, "a", 5000)
    for _ in range(4):
        assert proxy.choose(call_of(100, slo={"ttft_ms": 1000}))[0].name == "b"


def test_a_request_that_no_worker_can_serve_in_time_is_refused() -> None:
    proxy = proxy_of(a={}, b={})
    busy(proxy, "a", 5000)
    busy(proxy, "b", 8000)
    with pytest.raises(ApiError) as caught:
        proxy.choose(call_of(100, slo={"ttft_ms": 1000}))
    error = caught.value
    assert (error.status, error.code) == (429, "slo_not_met")
    assert error.retry_after is not None
    assert 2 <= error.retry_after <= 6
    assert error.slo is not None
    assert 4000 < error.slo["predicted_ttft_ms"] < 6000, "that of the best worker"
    assert proxy.counts.slo_refused == 1
    proxy.choose(call_of(100))
    proxy.choose(call_of(100, slo={"ttft_ms": 60_000}))
    proxy.choose(call_of(100, slo={"ttft_ms": 1000, "deadline_ms": 60_000}))  # it may wait on a worker
    proxy.choose(call_of(100, slo={"ttft_ms": "soon"}))  # a worker answers with 400


def test_objectives_of_workers_and_unmeasured_workers() -> None:
    strict = Objective(ttft_ms=10)
    proxy = proxy_of(a={"objective": strict}, b={"objective": strict})
    with pytest.raises(ApiError):
        proxy.choose(call_of(1000))
    proxy.choose(call_of(1000, slo={"ttft_ms": 60_000}))
    fresh = proxy_of(a={"objective": strict}, b={"objective": strict, "step_times": ()})
    assert fresh.choose(call_of(1000))[0].name == "b", "it may be fast enough"
    assert objective_of({"slo": {"tbt_ms": 5}}, strict) == Objective(10, 5)


def test_a_prefill_worker_predicts_the_first_token() -> None:
    proxy = proxy_of(p={"role": "prefill", "peer": "127.0.0.1:1"}, d={"role": "decode", "token_budget": 256})
    assert proxy.choose(call_of(1000, slo={"ttft_ms": 1500}))[0].name == "d"
    busy(proxy, "p", 9000)
    with pytest.raises(ApiError, match="first token"):
        proxy.choose(call_of(1000, slo={"ttft_ms": 1500}))
    assert proxy.choose(call_of(100, slo={"ttft_ms": 1500}))[0].name == "d", (
        "it computes short prompts itself"
    )
