"""Records of requests: hits and miss reasons, visible to their tenant and to admins, without text."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvloom import cli
from kvloom.core import MISS_REASONS
from kvloom.engine import Request, SamplingParams
from kvloom.serve.explain_command import describe
from kvloom.serve.metrics.metrics import Metrics
from kvloom.serve.metrics.observer import RequestObserver
from kvloom.serve.metrics.request_records import RequestRecord, RequestRecords, explain_miss
from kvloom.serve.metrics.trace_recorder import Recorder
from kvloom.serve.worker.engine_client import EngineClient
from kvloom.serve.worker.messages import MAX_CHUNKS, Add, RequestProgress, Start
from kvloom.serve.worker.worker import _OpenRequest
from tests.serve.receiver import Receiver
from tests.serve.running import MODEL, Running

RED, BLUE, ADMIN = "key-of-red-1", "key-of-blue-1", "key-of-admin-1"
FIELDS = {
    "id", "request_id",
    "model", "adapter", "tenant", "state", "arrived", "queue_s", "ttft_s", "total_s", "prompts", "answers", "prompt_tokens", "output_tokens",
    "cached_tokens", "computed_tokens", "hits", "stopped", "preemptions", "draft_tokens", "accepted_tokens",
    "reused_tokens", "approximate", "finish_reason", "slo",
}  # fmt: skip

Observed = tuple[Running, Receiver]


def prompt(seed: int, length: int = 100) -> list[int]:
    return [5 + (seed * 37 + i * (1 + seed % 7)) % 300 for i in range(length)]


def record_of(server: Running, id_: str, key: str | None = None) -> dict[str, Any]:
    status, _, found = server.send("GET", f"/kvloom/requests/{id_}", key=key)
    assert status == 200, found
    assert set(found) == FIELDS | {"waterfall"}
    return dict(found)


def test_a_hit_and_a_miss_are_explained(observed: Observed) -> None:
    server, _ = observed
    first = server.complete(RED, prompt=prompt(1), max_tokens=5, ignore_eos=True)
    again = server.complete(RED, prompt=[*prompt(1), 7, 8, 9], max_tokens=5, ignore_eos=True)
    miss, hit = record_of(server, first["id"], RED), record_of(server, again["id"], RED)
    assert (miss["cached_tokens"], miss["hits"]) == (0, [])
    assert (miss["stopped"]["reason"], miss["stopped"]["at_token"]) == ("never_seen", 0)
    assert hit["hits"] == [{"tier": "device", "tokens": 100}]
    assert hit["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
    assert hit["stopped"]["at_token"] == 100
    assert hit["stopped"]["text"] == (
        "The lookup ended at token 100 of 103: no earlier request went on with these tokens."
    )
    for record in (miss, hit):
        assert record["state"] == "finished"
        assert (record["tenant"], record["finish_reason"], record["output_tokens"]) == ("red", "length", 5)
        assert 0 < record["queue_s"] <= record["ttft_s"] <= record["total_s"] < 60


def test_an_eviction_is_explained_with_age_and_policy(observed: Observed) -> None:
    server, _ = observed
    server.complete(RED, prompt=prompt(50), max_tokens=2, ignore_eos=True)
    for seed in range(60, 82):  # 22 times 7 blocks: more than the pool has
        server.complete(RED, prompt=prompt(seed), max_tokens=2, ignore_eos=True)
    late = server.complete(RED, prompt=prompt(50), max_tokens=2, ignore_eos=True)
    stopped = record_of(server, late["id"], RED)["stopped"]
    assert stopped["reason"] == "evicted"
    assert "earlier by policy adaptive" in stopped["text"]


def test_records_are_listed_newest_first_up_to_the_limit(observed: Observed) -> None:
    server, _ = observed
    ids = [server.complete(RED, prompt=[9, 9, i + 5], max_tokens=1)["id"] for i in range(4)]
    status, _, found = server.send("GET", "/kvloom/requests?limit=3", key=RED)
    assert status == 200
    assert [one["id"] for one in found["requests"]] == ids[:0:-1]
    assert len(server.send("GET", "/kvloom/requests", key=RED)[2]["requests"]) >= 4
    for wrong in ("0", "-1", "1001", "many", "%C2%B2", "%D9%A3", "9" * 5000, ""):
        status, _, told = server.send("GET", f"/kvloom/requests?limit={wrong}", key=RED)
        assert (status, told["error"]["param"]) == (400, "limit")


def test_a_tenant_sees_its_own_records_and_an_admin_all(observed: Observed) -> None:
    server, _ = observed
    mine = server.complete(RED, prompt=prompt(5), max_tokens=2)["id"]
    theirs = server.complete(BLUE, prompt=prompt(5), max_tokens=2)["id"]
    assert server.send("GET", f"/kvloom/requests/{theirs}", key=RED)[0] == 404
    assert server.send("GET", "/kvloom/requests")[0] == 401
    assert server.send("GET", f"/kvloom/requests/{mine}")[0] == 401
    seen = {
        key: {
            one["tenant"] for one in server.send("GET", "/kvloom/requests?limit=50", key=key)[2]["requests"]
        }
        for key in (RED, BLUE, ADMIN)
    }
    assert (seen[RED], seen[BLUE]) == ({"red"}, {"blue"})
    assert seen[ADMIN] >= {"red", "blue"}
    # That another tenant has this prompt is the operator's to know.
    assert record_of(server, theirs, BLUE)["stopped"]["reason"] == "never_seen"
    assert record_of(server, theirs, ADMIN)["stopped"]["reason"] == "other_tenant"


def test_an_admin_key_sees_every_tenants_metrics(observed: Observed) -> None:
    server, _ = observed
    server.complete(RED, prompt=prompt(6), max_tokens=2)
    server.wait_for(
        lambda: server.metrics(ADMIN)['kvloom_tenant_looked_up_tokens_total{tenant="red"}'] >= 100
    )
    assert 'kvloom_tenant_bytes{tenant="blue",state="used"}' in server.metrics(ADMIN)
    assert 'kvloom_tenant_bytes{tenant="blue",state="used"}' not in server.metrics(RED)


def test_a_record_shows_running_and_cancelled_requests(observed: Observed) -> None:
    server, _ = observed
    stream = server.client(BLUE).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    id_ = next(iter(stream)).id
    assert id_.startswith("chatcmpl-")
    running = record_of(server, id_, BLUE)
    assert running["state"] == "running"
    assert running["ttft_s"] > 0
    assert running["finish_reason"] is None
    stream.close()
    server.wait_for(lambda: record_of(server, id_, BLUE)["state"] == "finished")
    assert record_of(server, id_, BLUE)["finish_reason"] == "cancelled"


def test_several_prompts_and_answers_are_one_record(observed: Observed) -> None:
    server, _ = observed
    found = server.complete(BLUE, prompt=[prompt(7, 40), prompt(8, 70)], n=2, max_tokens=3, ignore_eos=True)
    record = record_of(server, found["id"], BLUE)
    assert (record["prompts"], record["answers"]) == (2, 4)
    assert (record["prompt_tokens"], record["output_tokens"]) == (110, 12)


def test_observations_contain_no_text_or_keys(observed: Observed) -> None:
    server, receiver = observed
    word, session = "xylophonequark", "sessionquark"
    chat = server.client(RED).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": word}],
        max_tokens=8,
        extra_body={"session_id": session},
    )
    server.wait_for(lambda: bool(receiver.of(chat.id)))
    told = [
        server.send("GET", "/metrics", key=ADMIN)[2],
        json.dumps(server.send("GET", "/kvloom/requests?limit=50", key=ADMIN)[2]),
        repr(receiver.raw),
    ]
    answer = chat.choices[0].message.content or ""
    for text in told:
        assert not [secret for secret in (word, session, RED, ADMIN) if secret in text]
        assert len(answer) < 3 or answer not in text


def explain(server: Running, *arguments: str, key: str | None = RED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvloom.cli", "explain", *arguments, "--url", server.url]
    env = {**os.environ, **({} if key is None else {"KVLOOM_API_KEY": key})}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=env)


def test_a_missing_key_is_reported_with_the_option_to_set_it(
    observed: Observed, capsys: pytest.CaptureFixture[str]
) -> None:
    url = observed[0].url.removeprefix("http://")  # an address needs no scheme
    for command in ("top", "explain"):
        assert cli.main([command, "--url", url]) == 2
        assert "API key required: use --api-key, or set $KVLOOM_API_KEY" in capsys.readouterr().err
    assert cli.main(["top", "--url", url, "--api-key", "key-of-red-1"]) == 2
    assert "admin key required" in capsys.readouterr().err
    assert cli.main(["top", "--once", "--url", url, "--api-key", "key-of-admin-1"]) == 0


def test_explain_describes_a_request(observed: Observed) -> None:
    server, _ = observed
    id_ = server.complete(RED, prompt=prompt(9), max_tokens=2, ignore_eos=True)["id"]
    done = explain(server, id_)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        f"{id_} of tenant red: finished (length), 2 output tokens.",
        "Of its 100 prompt tokens, 100 were computed.",
        "The lookup ended at token 0 of 100: no earlier request began with these tokens.",
    ]
    assert json.loads(explain(server, id_, "--json").stdout) == record_of(server, id_, RED)
    listed = explain(server)
    assert listed.stdout.splitlines()[1].startswith(id_)


def test_the_waterfall_of_a_request_covers_its_phases(observed: Observed) -> None:
    server, _ = observed
    id_ = server.complete(RED, prompt=prompt(23, 200), max_tokens=4, ignore_eos=True)["id"]
    record = record_of(server, id_, RED)
    phases = record["waterfall"]
    assert [phase["phase"] for phase in phases][:2] == ["queue", "prefill"]
    assert phases[-1]["phase"] == "decode"
    assert sum(phase["tokens"] for phase in phases if phase["phase"] == "prefill") == 200
    assert phases[-1]["tokens"] == 4
    ends = [0.0, *(phase["end_s"] for phase in phases)]
    assert all(phase["start_s"] >= end - 1e-5 for phase, end in zip(phases, ends, strict=False))
    assert ends[-1] <= record["total_s"] + 1e-5
    text = explain(server, id_).stdout
    assert re.search(r"^  prefill .* \d+ tokens .*█", text, re.MULTILINE), text


def test_phases_of_loads_and_of_open_requests() -> None:
    now = time.monotonic()
    record = RequestRecord("cmpl-1", "", {1: 100, 2: 40}, 2, 8, True, time.time(), now - 10)
    progress = RequestProgress(1, now - 9, now - 8, 0.0, 64, {"host": 64}, 64, "never seen")
    loads = [("host", now - 9, now - 8.5, 64)]
    record.progress[1] = msgspec.structs.replace(
        progress, loads=loads, chunks=[(now - 8, now - 7, 20), (now - 5, now - 4, 10)]
    )
    found = [
        (x["prompt"], x["phase"], x["tier"], x["start_s"], x["end_s"], x["tokens"])
        for x in record.waterfall()
    ]
    assert found[:4] == [
        (0, "queue", "", 0.0, 1.0, None),
        (0, "load", "host", 1.0, 1.5, 64),
        (0, "prefill", "", 2.0, 3.0, 20),
        (0, "prefill", "", 5.0, 6.0, 10),
    ]
    assert [one[:4] for one in found[4:]] == [(0, "prefill", "", 6.0), (1, "queue", "", 0.0)]
    assert all(10.0 <= one[4] < 60.0 for one in found[4:])


def test_the_chunks_of_a_prompt_are_bounded_and_keep_their_sum() -> None:
    one = _OpenRequest(Add(1, [0], SamplingParams(), True), Request(0, (0,), SamplingParams()), 0)
    for i in range(1000):
        one.add_chunk(i - 0.5, i + 1.0, 3)  # launched before the previous chunk ended
        assert len(one.chunks) <= MAX_CHUNKS
    assert sum(tokens for *_, tokens in one.chunks) == 3000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(one.chunks))
    assert (one.chunks[0][0], one.chunks[-1][1]) == (-0.5, 1000.0)


def test_explain_reports_errors(observed: Observed) -> None:
    server, _ = observed
    for arguments, key, said in ((("cmpl-none",), RED, "no record of request 'cmpl-none'"), ((), None, "API key required")):  # fmt: skip
        done = explain(server, *arguments, key=key)
        assert done.returncode == 2
        assert said in done.stderr
    command = [sys.executable, "-m", "kvloom.cli", "explain", "x", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no server at http://127.0.0.1:9" in done.stderr


def made(id_: str, tenant: str = "") -> RequestRecord:
    return RequestRecord(id_, tenant, {1: 100}, 1, 16, False, 1000.0, 50.0)


def test_records_are_bounded_and_drop_the_oldest() -> None:
    records = RequestRecords(max_records=3)
    for i in range(5):
        records.add(made(f"r{i}", "red" if i % 2 else "blue"))
    assert len(records) == 3
    assert records.find("r1", None) is None
    assert [one.id for one in records.latest(10, None)] == ["r4", "r3", "r2"]
    assert [one.id for one in records.latest(10, "red")] == ["r3"]
    assert records.find("r3", "blue") is None


def test_a_waiting_request_is_described() -> None:
    shape = made("r").to_dict(operator=True)
    assert (shape["state"], shape["stopped"], shape["ttft_s"]) == ("waiting", None, None)
    assert describe(shape)[1] == "It has 100 prompt tokens, which have not been looked up yet."


@pytest.mark.parametrize("at", [0, 64])
@pytest.mark.parametrize("reason", MISS_REASONS)
def test_every_miss_reason_has_a_sentence(reason: str, at: int) -> None:
    story = RequestProgress(1, 51.0, 51.0, 52.0, at, {"device": at} if at else {}, at, reason, 45.0, "lru")
    word, text = explain_miss(story, 100, operator=True)
    assert word == reason.replace(" ", "_")
    assert text.endswith(".")
    assert text != f"{reason}."
    if reason == "evicted":
        assert "6.0 s earlier" in text


@pytest.mark.parametrize("reason", ["never seen", "evicted", "snapshot missing"])
def test_the_account_of_a_loaded_prompt_adds_up(reason: str) -> None:
    record = made("r")
    hits = {"device": 16, "disk": 32, "host": 16}
    record.progress[1] = RequestProgress(1, 51.0, 51.0, 52.0, 64, hits, 80, reason)
    shape = record.to_dict(operator=True)
    assert shape["cached_tokens"] + shape["computed_tokens"] == shape["prompt_tokens"]
    assert (shape["stopped"]["at_token"], shape["stopped"]["reason"]) == (80, reason.replace(" ", "_"))
    _, account, end, *_ = describe(shape)
    assert account == (
        "Of its 100 prompt tokens, 16 were in the pool, 32 were loaded from disk, 16 were loaded from host and 36 were computed (64% cached)."
    )
    assert end.startswith("The lookup ended at token 80 of 100: ")
    assert end.endswith("Of the tokens before it, 16 were computed while pages of the others were loaded.")
    assert ("no tier supplied them" in end) == (reason != "snapshot missing")


def test_a_request_that_ends_while_it_loads_has_no_miss_reason() -> None:
    record = made("r")
    record.progress[1] = RequestProgress(1, 51.0, 51.0, 0.0, 64, {"disk": 64}, 0, "")
    assert describe(record.to_dict(operator=True))[2] == "It is loading pages; its lookup has not ended yet."


def test_preemptions_are_described() -> None:
    record = made("r")
    record.progress[1] = RequestProgress(
        1, 51.0, 51.0, 52.0, 64, {"device": 48, "host": 16}, 64, "evicted", preemptions=2
    )
    record.finished, record.finish_reasons = 60.0, ["stop"]
    lines = describe(record.to_dict(operator=False))
    assert "48 were in the pool, 16 were loaded from host and 36 were computed" in lines[1]
    assert lines[-1] == "It was preempted 2 times."


def test_drafts_are_described() -> None:
    record = made("r")
    record.progress[1] = RequestProgress(
        1, 51.0, 51.0, 52.0, 64, {"device": 64}, 64, "not cached", draft_tokens=40, accepted_tokens=30
    )
    record.finished, record.finish_reasons = 60.0, ["stop"]
    assert describe(record.to_dict(operator=False))[-1] == "Of its 40 draft tokens, 30 were accepted (75%)."


def test_a_request_without_answer_counts_as_failed() -> None:
    metrics = Metrics(EngineClient(Start(""), print, print))
    observer = RequestObserver(metrics)
    add = Add(1, [1, 2, 3], SamplingParams())
    record = observer.start("cmpl-1", "/v1/completions", [add], time.monotonic(), {})
    observer.finish(record)
    shape = record.to_dict(operator=True)
    assert (shape["state"], shape["finish_reason"]) == ("failed", "interrupted")
    assert metrics.finish_reasons["failed"] == 1
    assert observer.records.find("cmpl-1", None) is record


def test_without_metrics_no_records_are_kept() -> None:
    observer = RequestObserver(Metrics(EngineClient(Start(""), print, print), is_enabled=False))
    record = observer.start("cmpl-1", "/v1/completions", [Add(1, [1], SamplingParams())], 0.0, {})
    observer.finish(record)
    assert len(observer.records) == 0
    assert observer.metrics.request_time.count == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here to stand for a full disk")
def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    observer = RequestObserver(Metrics(EngineClient(Start(""), print, print)), recorder=Recorder("/dev/full"))
    for id_ in range(2):
        add = Add(id_, [1, 2, 3], SamplingParams())
        record = observer.start(f"cmpl-{id_}", "/v1/completions", [add], time.monotonic(), {})
        observer.record_progress(RequestProgress(id_, 1.0, 1.0, 1.0, 0, {}, 0, "never seen"))
        record.finish_reasons = ["stop"]
        observer.finish(record)
    assert [line.getMessage() for line in caplog.records] == [
        "recording stopped: [Errno 28] No space left on device"
    ]
    assert len(observer.records) == 2
    observer.close()
