"""Objectives of requests, tenants and servers over HTTP: refused with 429, the prediction and the reason."""

from __future__ import annotations

import json

import pytest
from openai import RateLimitError

from kvloom.serve.explain_command import describe
from tests.serve.running import MODEL, Running

NEVER, ALWAYS = {"ttft_ms": 1e-4}, {"ttft_ms": 1e9, "tbt_ms": 1e9}


def test_a_request_that_cannot_meet_its_objective_is_refused(guarded: Running) -> None:
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 4, "slo": NEVER}
    for stream in (False, True):
        status, headers, found = guarded.send(
            "POST",
            "/v1/completions",
            {**body, "stream": stream},
            key="key-of-blue-1",
            headers={"x-request-id": f"no-{stream}"},
        )
        assert status == 429, found
        error = found["error"]
        assert (error["code"], error["param"], error["type"]) == ("slo_not_met", "slo", "rate_limit_error")
        assert "first token" in error["message"]
        assert error["slo"]["ttft_ms"] == 1e-4
        assert error["slo"]["predicted_ttft_ms"] > 1e-4
        assert "retry-after" not in headers  # no worker is fast enough
    _, _, record = guarded.send("GET", "/kvloom/requests/no-True", key="key-of-blue-1")
    assert (record["state"], record["finish_reason"]) == ("failed", "slo_not_met")
    assert record["slo"]["predicted_ttft_ms"] > 1e-4
    assert any("predicted" in line for line in describe(record))


def test_other_requests_are_served_and_their_predictions_recorded(guarded: Running) -> None:
    before = guarded.metrics("key-of-admin-1")
    found = guarded.complete(
        "key-of-blue-1", prompt="hello", max_tokens=5, ignore_eos=True, slo=ALWAYS | {"deadline_ms": 1e9}
    )
    assert len(found["choices"]) == 1
    _, _, record = guarded.send("GET", f"/kvloom/requests/{found['id']}", key="key-of-blue-1")
    slo = record["slo"]
    assert slo["predicted_ttft_ms"] > 0
    assert slo["actual_ttft_ms"] > 0
    assert slo["actual_tbt_ms"] > 0
    assert not slo["deferred"]
    assert any("Its first token: objective" in line for line in describe(record))
    guarded.wait_for(
        lambda: (
            guarded.metrics("key-of-admin-1")["kvloom_slo_ttft_ratio_count"]
            > before["kvloom_slo_ttft_ratio_count"]
        )
    )
    after = guarded.metrics("key-of-admin-1")
    assert after["kvloom_slo_admitted_total"] > before["kvloom_slo_admitted_total"]
    assert after["kvloom_slo_tbt_ratio_count"] > 0


def test_objectives_of_a_tenant_and_of_the_server(guarded: Running) -> None:
    before = guarded.metrics("key-of-admin-1")["kvloom_slo_refused_total"]
    client = guarded.client("key-of-late-1")
    with pytest.raises(RateLimitError, match="first token"):
        client.completions.create(model=MODEL, prompt="hello", max_tokens=4)
    served = client.completions.create(model=MODEL, prompt="hello", max_tokens=4, extra_body={"slo": ALWAYS})
    assert served.usage is not None
    assert guarded.metrics("key-of-admin-1")["kvloom_slo_refused_total"] > before
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, extra_body={"slo": ALWAYS}
    )
    assert chat.choices[0].finish_reason
    default = guarded.complete("key-of-blue-1", prompt="hello", max_tokens=3)
    _, _, record = guarded.send("GET", f"/kvloom/requests/{default['id']}", key="key-of-blue-1")
    assert record["slo"]["tbt_ms"] == 1e9
    assert record["slo"]["ttft_ms"] is None


def test_without_an_objective_nothing_is_predicted(server: Running) -> None:
    found = server.complete(prompt="hello", max_tokens=3)
    _, _, record = server.send("GET", f"/kvloom/requests/{found['id']}")
    assert record["slo"] is None


@pytest.mark.parametrize(
    "slo", [{"ttft_ms": 0}, {"tbt_ms": -1}, {"deadline_ms": "soon"}, {"first": 1}, {"ttft_ms": 1e400}]
)
def test_invalid_objectives(server: Running, slo: dict[str, object]) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "slo": slo}).replace("Infinity", "1e400")
    status, _, found = server.send("POST", "/v1/completions", body)
    assert status == 400
    assert found["error"]["param"] in ("slo", None)


def test_a_worker_reports_its_step_times_to_routers(guarded: Running) -> None:
    _, _, found = guarded.send("GET", "/kvloom/worker", key="key-of-admin-1")
    model = found["models"][0]
    assert len(model["step_times"]) == 5
    assert model["slo_tbt"] == 1e9
    assert model["token_budget"] > 0
