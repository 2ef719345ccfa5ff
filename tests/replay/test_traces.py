from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvloom.replay import read_traces

from .samples import TRACES, needs_traces

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 4000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]},
]
AGENT = {
    "id": "s1",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 128, "out": 3, "hash_ids": [1, 2], "stop": "tool_use"},
        {"t": 2.0, "type": "subagent", "requests": [{"t": 1.0, "in": 64, "out": 1, "hash_ids": [9]}]},
        {"t": 5.0, "in": 192, "out": 3, "hash_ids": [1, 2, 3], "stop": "end_turn"},
    ],
}
DYNAMO = {
    "timestamp": 1,
    "event": {
        "event_type": "request_end",
        "agent_context": {"session_id": "x"},
        "request": {
            "input_tokens": 20,
            "output_tokens": 4,
            "request_received_ms": 5000,
            "replay": {"trace_block_size": 16, "input_sequence_hashes": [2**63 + 5, 4]},
        },
    },
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,600,44\n2023-11-16 18:15:50.9951690,100,9\n"


def lines(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(MOONCAKE))
    found = read_traces([path])
    assert (found.block_tokens, found.distinct, found.asked) == (512, 3, 5)
    assert [r.at for r in found.requests] == [0.0, 3.0]
    assert [(r.prompt_tokens, r.output_tokens) for r in found.requests] == [(1000, 5), (1500, 7)]


def test_gzip_is_seen_from_the_bytes_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "plainly-named"
    path.write_bytes(gzip.compress(lines(MOONCAKE)))
    assert len(read_traces([path]).requests) == 2


def test_agent_sessions_start_at_drawn_times_and_share_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(AGENT).encode()))
    found = read_traces([tmp_path], seed=3, spread=100.0)
    assert (len(found.requests), found.block_tokens, found.distinct) == (6, 64, 8)
    assert {r.ending for r in found.requests} == {"tool_use", "end_turn", None}
    times = [r.at for r in found.requests]
    assert times == sorted(times)
    assert times == [r.at for r in read_traces([tmp_path], seed=3, spread=100.0).requests]
    assert times != [r.at for r in read_traces([tmp_path], seed=4, spread=100.0).requests]
    assert max(times) <= 105.0
    sub = next(r for r in found.requests if r.ending is None)
    assert any(r.at == pytest.approx(sub.at - 3.0) and r.ending == "tool_use" for r in found.requests)
    assert sub.session is not None
    assert sub.session.rpartition("/")[0] in {r.session for r in found.requests if r is not sub}


def test_azure_traces_have_lengths_only(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE, encoding="utf-8")
    found = read_traces([path])
    assert [len(r.blocks) for r in found.requests] == [2, 1]
    assert found.distinct == 3
    assert found.requests[1].at == pytest.approx(4.314, abs=0.001)


def test_dynamo_has_large_hashes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines([DYNAMO]))
    found = read_traces([path])
    assert (found.block_tokens, found.distinct, found.requests[0].session) == (16, 2, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "not a trace"),
        (b"", "not a trace"),
        (b'{"timestamp": 0, "hash_ids": [1]', "line 1"),
        (b'{"hash_ids": [1]}', "timestamp must be a number"),
        (b'{"colour": 1}', "no known trace format"),
        (b"\x1f\x8b\x00broken", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (lines([{**MOONCAKE[0], "hash_ids": [1, "x"]}]), "block ids must be whole"),
        (lines([{**MOONCAKE[0], "input_length": -4}]), "input_length must be a number"),
        (lines(MOONCAKE) + b"[1]\n", "line 3: an object was expected"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        (json.dumps({"requests": [], "block_size": 0}).encode(), "block_tokens 0"),
    ],
)
def test_an_invalid_trace_is_refused_with_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_traces([path])


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_traces([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="no trace in this folder"):
        read_traces([tmp_path])
    with pytest.raises(ValueError, match="spread -1"):
        read_traces([], spread=-1)


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests", "blocks", "distinct", "block_tokens"),
    [
        ("mooncake/conversation_trace.jsonl.gz", 12031, 288500, 182790, 512),
        ("agent/trace_0001.json.gz", 41, None, None, 64),
        ("azure/AzureLLMInferenceTrace_code.csv", 8819, 40014, 40014, 512),
        ("dynamo/mooncake_trace_1000.jsonl", 1000, 19686, 12207, 512),
        ("dynamo/pi_request_trace.jsonl.gz", 17, 4163, 1183, 16),
    ],
)
def test_public_traces(
    name: str, requests: int, blocks: int | None, distinct: int | None, block_tokens: int
) -> None:
    found = read_traces([TRACES / name])
    assert (len(found.requests), found.block_tokens) == (requests, block_tokens)
    assert blocks in (None, found.asked)
    assert distinct in (None, found.distinct)
