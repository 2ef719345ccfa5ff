"""Parts of the server alone: messages, response streams, keys, limiter, watchdog, worker."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.core import Tenant
from kvloom.engine import Engine, SamplingParams
from kvloom.models.specs import embedded, folder_of
from kvloom.serve.auth.keys import permission_warning, read_keys
from kvloom.serve.auth.limits import Caps, Limits, RequestLimiter
from kvloom.serve.errors import ApiError, engine_died
from kvloom.serve.worker.engine_client import MAX_RESTARTS, WINDOW_SECONDS, Backoff
from kvloom.serve.worker.messages import (
    HEADER_BYTES,
    Add,
    Cancel,
    Delta,
    EngineStats,
    FromEngine,
    Heartbeat,
    Outputs,
    Ready,
    TenantConfig,
    TenantUsage,
    TierUsage,
    ToEngine,
    body_length,
    frame,
)
from kvloom.serve.worker.response_stream import ResponseStream
from kvloom.serve.worker.watchdog import Watchdog, WatchdogLimits
from kvloom.serve.worker.worker import Worker
from tests.engines import make_engine

READY = Ready("cpu", "float32", 320, 4096, {}, 1 << 20, 1 << 12, 16, 64, [], 1.0)


def test_messages_survive_encoding() -> None:
    params = SamplingParams(stop=["x"], logit_bias={3: -1.0}, json_schema={"type": "object"}, n=2, seed=1)
    for message, kind in (
        (Add(7, [1, 2, 3], params, stream=True, tenant="t", ttl=1.5), ToEngine),
        (Cancel(7), ToEngine),
        (Outputs([Delta(7, 0, "é", [3], 1, "stop", 2, [[(3, -0.5, 1)]])], [], EngineStats(tenants={"t": TenantUsage(1, 2)}, tiers=[TierUsage("host", 3)])), FromEngine),
    ):  # fmt: skip
        data = frame(message)  # type: ignore[arg-type]
        assert body_length(data[:HEADER_BYTES]) == len(data) - HEADER_BYTES
        assert msgspec.msgpack.decode(data[HEADER_BYTES:], type=kind) == message


def test_a_stream_interval_groups_tokens_but_not_the_first() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    worker = Worker(make_engine(LlamaForCausalLM(config).eval(), 1 << 22), stream_interval=4)
    params = SamplingParams(max_tokens=11, temperature=0, ignore_eos=True)
    worker.handle(Add(1, [3, 4, 5], params, stream=True))
    worker.handle(Add(2, [3, 4, 5], params))
    deltas: dict[int, list[Delta]] = {1: [], 2: []}
    while not (deltas[2] and deltas[1][-1].finish_reason):
        for delta in (worker.step() or Outputs([], [])).deltas:
            deltas[delta.id].append(delta)
    assert [len(delta.tokens) for delta in deltas[1]] == [1, 4, 4, 2]
    assert [token for delta in deltas[1] for token in delta.tokens] == deltas[2][0].tokens


def test_waiting_deltas_are_merged_and_errors_follow_them() -> None:
    async def talk() -> None:
        stream = ResponseStream([1, 2], max_characters=100)
        stream.put(Delta(1, 0, "a", [5]))
        stream.put(Delta(2, 0, "x", [9], 0, "stop"))
        stream.put(Delta(1, 0, "b", [6], 0, "length"))
        assert await stream.take() == [
            Delta(1, 0, "ab", [5, 6], 0, "length"),
            Delta(2, 0, "x", [9], 0, "stop"),
        ]
        assert await stream.take() == []
        stream = ResponseStream([3])
        stream.put(Delta(3, 0, "c", [7]))
        stream.fail(engine_died())
        assert len(await stream.take()) == 1
        with pytest.raises(ApiError, match="restarting"):
            await stream.take()

    asyncio.run(talk())


def test_an_unread_stream_is_bounded_and_a_disconnected_one_ends() -> None:
    async def talk() -> None:
        stream = ResponseStream([1], max_characters=10)
        for _ in range(11):
            stream.put(Delta(1, 0, "a", [5]))
        await stream.take()
        with pytest.raises(ApiError, match="too slowly"):
            await stream.take()
        stream = ResponseStream([1])
        stream.put(Delta(1, 0, "a", [5]))
        stream.disconnect()
        assert await stream.take() == []

    asyncio.run(talk())


def test_the_limiter_counts_answers_and_drains() -> None:
    limiter = RequestLimiter(2)
    with limiter.admit(2):
        with pytest.raises(ApiError, match="queue is full"), limiter.admit(1):
            pass
        assert not limiter.idle.is_set()
    assert limiter.idle.is_set()
    with pytest.raises(ApiError, match="request fewer"), limiter.admit(3):
        pass
    limiter.is_draining = True
    with pytest.raises(ApiError, match="shutting down"), limiter.admit(1):
        pass
    with pytest.raises(ValueError, match="body_bytes"):
        Limits(body_bytes=0)


def test_one_tenant_does_not_fill_a_limiter_that_others_share() -> None:
    limiter = RequestLimiter(100, shared=True)
    with ExitStack() as open_:
        for _ in range(80):  # 4 of 5 places
            open_.enter_context(limiter.admit(1, "flood"))
        with pytest.raises(ApiError, match="this tenant has 80") as caught, limiter.admit(1, "flood"):
            pass
        assert caught.value.status == 429
        for _ in range(10):
            open_.enter_context(limiter.admit(1, "calm"))
        with pytest.raises(ApiError, match="this tenant has 80"), limiter.admit(1, "flood"):
            pass
        for i in range(10):
            open_.enter_context(limiter.admit(1, f"other {i}"))
        with pytest.raises(ApiError, match="queue is full"), limiter.admit(1, "one more"):
            pass
    assert limiter.in_progress == limiter.requests == 0
    assert limiter.idle.is_set()
    with limiter.admit(100, "flood"):  # an idle server serves any request
        pass


def test_a_limiter_of_one_tenant_is_filled_and_max_open_holds() -> None:
    limiter = RequestLimiter(10)
    with ExitStack() as open_:
        for _ in range(10):
            open_.enter_context(limiter.admit(1))
    with limiter.admit(3, "red", 4):
        with pytest.raises(ApiError, match="3 of 4 open answers"), limiter.admit(2, "red", 4):
            pass
        with limiter.admit(1, "red", 4), limiter.admit(2, "blue", 4):
            pass


def test_the_smallest_limiter_admits_every_tenant() -> None:
    limiter = RequestLimiter(1, shared=True)
    for tenant in ("red", "blue"):
        with limiter.admit(1, tenant):
            pass


def test_restarts_back_off_and_are_bounded() -> None:
    backoff, now, starts = Backoff(), 100.0, []
    for _ in range(40):
        now += backoff.pause(now)
        starts.append(now)
        now += 0.01  # it dies at once
    pauses = [b - a for a, b in pairwise(starts)]
    assert pauses[0] < pauses[1] < pauses[2]
    assert all(
        sum(start <= other < start + WINDOW_SECONDS for other in starts) <= MAX_RESTARTS for start in starts
    )
    assert Backoff().pause(now) < 1
    now += 1000
    assert backoff.pause(now) < 1  # what was long ago is forgotten


def test_the_watchdog_detects_silence_and_long_steps() -> None:
    dog = Watchdog(WatchdogLimits(silent_seconds=5, step_seconds=20))
    assert [dog.tick(1.0) for _ in range(20)] == [
        None
    ] * 20  # it loads: torch alone may block its beats for long
    assert dog.tick(1.0) == "sent no message for 20 s"
    dog.received(READY)
    assert [dog.tick(1.0) for _ in range(5)] == [None] * 5
    assert dog.tick(1.0) == "sent no message for 5 s"
    dog.received(Heartbeat(7))
    for _ in range(20):  # a long step that beats
        dog.received(Heartbeat(7))
        assert dog.tick(1.0) is None
    dog.received(Heartbeat(7))
    assert dog.tick(1.0) == "spent more than 20 s in one step"
    dog.received(Heartbeat(8))
    assert dog.tick(1.0) is None
    for _ in range(100):  # nothing to do
        dog.received(Heartbeat(0))
        assert dog.tick(1.0) is None
    assert dog.tick(3600.0) is None  # this process slept, and the engine with it


def test_watchdog_limits_may_be_off_but_not_below_heartbeats() -> None:
    dog = Watchdog(WatchdogLimits(0, 0))
    dog.received(READY)
    dog.received(Heartbeat(1))
    assert [dog.tick(1.0) for _ in range(2000)] == [None] * 2000
    for wrong in ((1.0, 600.0), (-1.0, 600.0), (30.0, 0.5), (float("nan"), 600.0), (30.0, float("inf"))):
        with pytest.raises(ValueError, match="-seconds"):
            WatchdogLimits(*wrong)


def test_keys_are_read_from_lines_and_from_json(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\nkey-number-1 red\nkey-number-2 blue 2MiB # small\n")
    keys = read_keys(str(file))
    assert keys.authenticate("Bearer key-number-2") == "blue"
    assert keys.authenticate("bearer key-number-1") == "red"
    assert keys.tenants == (TenantConfig("red", None, 1.0, False), TenantConfig("blue", 2 << 20, 1.0, False))
    for wrong in (None, "", "Bearer ", "Bearer key-number-3", "key-number-1", "Basic key-number-1"):
        with pytest.raises(ApiError) as caught:
            keys.authenticate(wrong)
        assert caught.value.status == 401
    file.write_text(
        '{"key-number-1": {"tenant": "red", "quota": "1GiB", "weight": 2}, "key-number-2": "blue"}'
    )
    assert read_keys(str(file)).tenants == (
        TenantConfig("red", 1 << 30, 2.0),
        TenantConfig("blue", None, 1.0),
    )


def test_a_missing_weight_is_1_if_another_tenant_has_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "key-number-1 red\nkey-number-2 blue 2MiB 0.5\nkey-number-3 grey - 0\nkey-number-4 blue 2MiB 0.5"
    )
    assert read_keys(str(file)).tenants == (
        TenantConfig("red", None, 1.0), TenantConfig("blue", 2 << 20, 0.5), TenantConfig("grey", None, 0.0)
    )  # fmt: skip


def test_caps_are_read_from_lines_and_from_json_and_default_to_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "key-number-1= red - 2 max_open=64 max_ttl=0.5 admin\nkey-number-2 blue max_priority=-3\nkey-number-3 grey"
    )
    keys = read_keys(str(file), Caps(answers=9, ttl=60.0))
    assert keys.authenticate("Bearer key-number-1=") == "red"
    assert keys.caps("red") == Caps(answers=9, open=64, ttl=0.5)
    assert keys.caps("blue") == Caps(answers=9, ttl=60.0, priority=-3)
    assert keys.caps("grey") == keys.caps("unknown") == Caps(answers=9, ttl=60.0)
    file.write_text('{"key-number-1": {"tenant": "red", "max_answers": 4, "max_open": 8.0}}')
    assert read_keys(str(file)).caps("red") == Caps(answers=4, open=8)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ((5, None, None), "n", "5 answers exceed the limit of 4"),
        ((1, 61.0, None), "ttl", "61 exceeds the limit of 60"),
        ((1, None, 6), "priority", "6 exceeds the limit of 5"),
    ],
)
def test_a_request_above_a_cap_is_refused_and_one_at_it_is_not(asked: Any, param: str, said: str) -> None:
    caps = Caps(answers=8, open=4, ttl=60.0, priority=5)
    with pytest.raises(ApiError, match=said) as caught:
        caps.check(*asked)
    assert (caught.value.status, caught.value.param) == (400, param)
    caps.check(4, 60.0, 5)
    Caps().check(10**9, 1e300, 10**18)


def test_a_readable_key_file_causes_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-number-1 red")
    file.chmod(0o644)
    assert "mode 644" in (permission_warning(str(file)) or "")
    file.chmod(0o600)
    assert permission_warning(str(file)) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no keys"),
        ("short t", "8 characters"),
        ("key-number-1", "line 1"),
        ("key-number-1 t\nkey-number-1 u", "line 2"),
        ("key-number-1 t 1MiB\nkey-number-2 t 2MiB", "different quota"),
        ("key-number-1 t much", "much"),
        ("key-number-1 t - heavy", "'heavy' must be a number"),
        ("key-number-1 t 1MiB -1", "'-1' must be a number"),
        ("key-number-1 t 1MiB 1 2", "line 1"),
        ("key-number-1 t max_open=0", "max_open '0' must be a number above 0"),
        ("key-number-1 t max_open=few", "max_open 'few'"),
        ("key-number-1 t max_ttl=nan", "max_ttl 'nan'"),
        ("key-number-1 t max_ttl=inf", "max_ttl 'inf'"),
        ("key-number-1 t most=3", "unknown cap 'most'"),
        (
            "key-number-1 t max_open=3\nkey-number-2 t max_open=4",
            "different quota, weight, slo_…, max_… or public",
        ),
        ("key-number-1 t slo_ttft=0", "slo_ttft '0' must be a number above 0"),
        ('{"key-number-1": {"tenant": "t", "max_open": 1.5}}', "max_open 1.5"),
        ('{"key-number-1": {"tenant": "t", "max_answers": true}}', "max_answers True"),
        ('{"key-number-1": {"tenant": "t", "max_priority": 1e300}}', "max_priority 1e"),
        ('{"key-number-1": {"tenant": "t", "weight": "nan"}}', "must be a number"),
        ('{"key-number-1": {"tenant": "t", "weight": [1]}}', "must be a number"),
        ('{"key-number-1": 5}', "int"),
        ('{"key-number-1": {"quota": 5}}', "key 1"),
        ('{"key-number-1": {"tenant": "t", "color": 5}}', "key 1"),
        ('{"key-number-1": {"tenant": ""}}', "name"),
    ],
)
def test_invalid_keys_are_refused_without_showing_them(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_keys(str(file))
    assert "key-number-1" not in str(caught.value)


def engine(tenants: tuple[Tenant, ...] = ()) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return make_engine(LlamaForCausalLM(config), pool_bytes=4 << 20, tenants=tenants)


def drained(worker: Worker) -> list[Delta]:
    deltas: list[Delta] = []
    while worker.is_busy:
        outputs = worker.step()
        deltas += [] if outputs is None else outputs.deltas
    return deltas


def test_the_worker_sends_streams_per_step_and_others_at_the_end() -> None:
    worker = Worker(engine())
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    worker.handle(Add(1, [5, 6, 7], greedy, stream=True))
    worker.handle(Add(2, [5, 6, 7], greedy))
    deltas = drained(worker)
    assert [len(delta.tokens) for delta in deltas if delta.id == 1] == [1] * 5
    whole = [delta for delta in deltas if delta.id == 2]
    assert len(whole) == 1
    assert whole[0].tokens == [token for delta in deltas if delta.id == 1 for token in delta.tokens]
    assert whole[0].finish_reason == "length"


def test_the_worker_rejects_and_cancels() -> None:
    worker = Worker(engine())
    worker.handle(Add(1, [5] * 300, SamplingParams(max_tokens=5)))
    outputs = worker.step()
    assert outputs is not None
    assert [(refused.id, "exceed" in refused.reason) for refused in outputs.rejected] == [(1, True)]
    worker.handle(Add(2, [5, 6], SamplingParams(max_tokens=100, ignore_eos=True), stream=True))
    worker.step()
    worker.handle(Cancel(2))
    worker.handle(Cancel(99))
    assert drained(worker) == []
    assert worker.engine.cache.stats()["in_use_pages"] == 0
    worker.engine.cache.check()


def test_pages_of_an_ended_session_are_evicted_first() -> None:
    made = engine()
    worker = Worker(made)
    params = SamplingParams(max_tokens=2, temperature=0)
    for id_, (session, ends) in enumerate((("over", True), ("open", False))):
        prompt = [5 + id_ * 10 + i % 10 for i in range(40)]
        worker.handle(Add(id_, prompt, params, session=session, ends_session=ends))
        while worker.engine.busy:
            worker.step()
    (root,) = made.cache.state.tree.roots.values()
    assert {first: run.ended for first, run in root.children.items()} == {5: True, 15: False}


def test_a_tenant_at_its_quota_does_not_block_others() -> None:
    one = engine().layout.slab_bytes_for(8 + 24)
    made = engine((Tenant("small", one),))
    worker = Worker(made, (TenantConfig("small", one),))
    asked = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for id_ in range(3):
        worker.handle(Add(id_, [5 + id_] * 8, asked, tenant="small"))
    worker.handle(Add(3, [9] * 8, asked, tenant="free"))
    order: list[int] = []
    while worker.is_busy:
        outputs = worker.step()
        order += [] if outputs is None else [delta.id for delta in outputs.deltas]
        account = made.cache.state.accounts["small"]
        assert account.used <= one
        assert sum(r.control.tenant == "small" for r in made.scheduler.running) <= 1
    assert sorted(order) == [0, 1, 2, 3]
    assert order.index(3) < order.index(1)
    worker.handle(Add(4, [5] * 100, asked, tenant="small"))
    outputs = worker.step()
    assert outputs is not None
    assert "quota" in outputs.rejected[0].reason
    worker.handle(Add(5, [5] * 8, asked, tenant="small"))
    worker.handle(Add(6, [6] * 8, asked, tenant="small"))
    worker.handle(Cancel(6))
    assert [delta.id for delta in drained(worker)] == [5]


def test_embedded_models_are_found_by_name(tmp_path: Path) -> None:
    for name in ("llama", "hybrid", "draft"):
        assert folder_of(f"kvloom-{name}") == embedded(name)
    for other in (str(tmp_path), "org/name", "llama-3-70b"):
        assert folder_of(other) == other
    with pytest.raises(ValueError, match=r"kvloom-none.*it has kvloom-draft, kvloom-hybrid, kvloom-llama"):
        folder_of("kvloom-none")


def test_a_binary_key_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="keys is not UTF-8 text"):
        read_keys(str(file))
