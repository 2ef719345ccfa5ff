"""Measured speeds are saved in the folder of a disk tier, and a restarted engine uses them from its first request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvloom.engine import Engine
from kvloom.engine.offload import TimeModel
from kvloom.engine.offload.load_or_recompute import Estimates, LoadOrRecompute, Progress
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, POOL, closed, drawn, offload_of, served


def started(folder: Path, block_tokens: int = 16) -> Engine:
    return make_engine(
        tiny("llama"), POOL, tiers=[f"disk:{folder}:64MiB"], offload=PATIENT, block_tokens=block_tokens
    )


@pytest.mark.parametrize("block_tokens", [16, 32], ids=["whole pages", "converted pages"])
def test_a_restarted_engine_knows_its_speeds(block_tokens: int, tmp_path: Path) -> None:
    prompts = drawn("speeds", 96, 64)
    wanted = expected(tiny("llama"), prompts, 4)
    for round_ in range(3):  # the second engine measures loads, the third one knows them
        engine = started(tmp_path, block_tokens)
        offload = offload_of(engine)
        rates = [queue.throughput.bytes_per_second for queue in offload.transfers.queues]
        assert offload._prefill_time.is_known == (round_ > 0)
        assert offload._pool.copy_time.is_known == (round_ > 1)
        assert all(rate > 0 for rate in rates) == (round_ > 1)
        assert [request.tokens for request in served(engine, prompts, 4)] == wanted
        last = offload._prefill_time.values
        closed(engine)
        assert json.loads((tmp_path / "speeds.json").read_text())["times"]["prefill"] == last


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", b'{"version": 1}', "times", "tiers", "negative"],
    ids=["empty", "cut", "list", "fields", "times", "tiers", "negative"],
)
def test_a_damaged_file_is_not_used(
    damage: bytes | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = drawn("damage", 64)
    engine = started(tmp_path)
    served(engine, prompts, 2)
    closed(engine)
    file = tmp_path / "speeds.json"
    if isinstance(damage, str):
        content = json.loads(file.read_text())
        if damage == "negative":
            content["times"]["prefill"][0] = -1.0
        else:
            content[damage] = {"prefill": [1.0]} if damage == "times" else {"disk": "fast"}
        damage = json.dumps(content).encode()
    file.write_bytes(damage)
    engine = started(tmp_path)
    assert not offload_of(engine)._prefill_time.is_known
    assert "damaged" in caplog.text
    assert [one.tokens for one in served(engine, prompts, 2)] == expected(tiny("llama"), prompts, 2)
    closed(engine)
    assert json.loads(file.read_text())["version"] == 1


def test_speeds_of_another_version_or_model_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(tmp_path)
    served(engine, drawn("owner", 64), 2)
    closed(engine)
    file = tmp_path / "speeds.json"
    for field, value in (("version", 2), ("owner", "another model")):
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
        engine = started(tmp_path)
        assert not offload_of(engine)._prefill_time.is_known
        closed(engine)
    assert "damaged" not in caplog.text


def test_the_policy_continues_with_what_it_has_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(tmp_path)
    served(engine, drawn("reuse", *[40 + i for i in range(8)]), 2)
    learned = engine.cache.save_policy()
    assert learned is not None
    closed(engine)
    engine = started(tmp_path)
    again = engine.cache.save_policy()
    assert again is not None
    assert len(again["away"]) == len(learned["away"]) > 0
    assert again["values"] == learned["values"]
    offload_of(engine)._save_at = 0.0  # ten minutes have passed
    (tmp_path / "reuse.msgpack").unlink()
    offload_of(engine).poll()
    assert (tmp_path / "reuse.msgpack").exists()
    closed(engine)
    (tmp_path / "reuse.msgpack").write_bytes(b"\x81\xa7version\x01")
    engine = started(tmp_path)
    assert engine.cache.save_policy()["away"] == b""  # type: ignore[index]
    assert "reuse.msgpack is damaged" in caplog.text
    closed(engine)


def test_the_first_request_waits_for_a_fast_tier_if_speeds_are_known() -> None:
    at = Progress(0, 1024, 1024, 16, 32)
    unknown = Estimates(None, None, None, max_lost_seconds=0.05)
    decision = LoadOrRecompute()
    assert decision.tokens_to_compute(at, unknown, 0.0) == 0
    assert decision.tokens_to_compute(at, unknown, 0.1) == 512  # half of the prompt, however fast the tier is
    prefill = TimeModel()
    prefill.values = [3.0, 3072.0, 3.0, 3 * 1024.0**2, 3072.0, 0.0, 0.0]  # 1,024 tokens take a second
    known = Estimates(prefill.seconds, lambda first: 2e-4 * (1024 - first), None, max_lost_seconds=0.05)
    decision = LoadOrRecompute()
    assert decision.tokens_to_compute(at, known, 0.0) < 256
