"""Traces of requests at a real OTLP/HTTP receiver."""

from __future__ import annotations

import pytest

from kvloom.serve.metrics.otel_traces import traces_url
from tests.serve.receiver import Receiver, attributes
from tests.serve.running import MODEL, Running

pytestmark = pytest.mark.slow

RED = "key-of-red-1"
Observed = tuple[Running, Receiver]


def test_a_request_has_a_span_per_phase(observed: Observed) -> None:
    server, receiver = observed
    prompt = [11 + i % 90 for i in range(120)]
    server.complete(RED, prompt=prompt, max_tokens=2)
    done = server.complete(RED, prompt=[*prompt, 4, 5], max_tokens=6, ignore_eos=True)
    server.wait_for(lambda: len(receiver.of(done["id"])) == 5)
    whole, *parts = receiver.of(done["id"])
    assert receiver.paths == {"/v1/traces"}
    assert whole.name == f"text_completion {MODEL}"
    found = attributes(whole)
    assert found["gen_ai.usage.input_tokens"] == 122
    assert found["gen_ai.usage.output_tokens"] == 6
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["kvloom.cached_tokens"] == found["kvloom.hit_tokens.device"] == 120
    assert found["kvloom.tenant"] == "red"
    assert [part.name for part in parts] == ["queue", "match", "prefill", "decode"]
    assert {part.trace_id for part in parts} == {whole.trace_id}
    assert (
        attributes(parts[1])["kvloom.miss_reason"]
        == attributes(parts[1])["kvloom.stop_reason"]
        == "never_seen"
    )
    assert attributes(parts[2])["kvloom.tokens"] == 2
    ends = [part.end_time_unix_nano for part in parts]
    starts = [part.start_time_unix_nano for part in parts]
    assert starts == [whole.start_time_unix_nano, *ends[:-1]]  # one after the other, without gaps
    assert ends[-1] == whole.end_time_unix_nano


def test_a_clients_trace_is_continued(observed: Observed) -> None:
    server, receiver = observed
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    done = server.client(RED).completions.create(
        model=MODEL, prompt="once", max_tokens=2, extra_headers={"traceparent": f"00-{trace}-{span}-01"}
    )
    server.wait_for(lambda: bool(receiver.of(done.id)))
    whole = receiver.of(done.id)[0]
    assert whole.trace_id.hex() == trace
    assert whole.parent_span_id.hex() == span


def test_a_trace_that_the_client_does_not_sample_is_not_sent(observed: Observed) -> None:
    server, receiver = observed
    header = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b7-00"}
    _, _, quiet = server.send("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}, header, key=RED)
    loud = server.complete(RED, prompt="a", max_tokens=2)
    server.wait_for(lambda: bool(receiver.of(loud["id"])))
    assert not receiver.of(quiet["id"])


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_a_receiver_address_gets_the_default_path(given: str, used: str) -> None:
    assert traces_url(given) == used


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://x:4317", "http://"])
def test_an_invalid_receiver_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of an OTLP/HTTP receiver"):
        traces_url(wrong)
