from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvloom.replay import Recorder, read_traces, replay


def record(path: Path) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50_000, 400).astype(np.int32)
    other = rng.integers(0, 50_000, 100).astype(np.int32)
    requests = [text[:200], text[:330], other, text[:330], text[:200]]
    with Recorder(path, block_tokens=32, model="m") as recorder:
        recorder.add(1.5, requests[0], 150, session="secret session", ending="stop")
        recorder.add(2.5, requests[1], 300, session="secret session", ending="tool_calls")
        recorder.add(3.5, requests[2], 100)
        recorder.add(4.5, requests[3], 330, tenant="secret tenant")
        recorder.add(9.0, requests[4], 200)
    return requests


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_recording_is_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    requests = record(path)
    found = read_traces([path])
    assert found.block_tokens == 32
    assert [r.at for r in found.requests] == [1.5, 2.5, 3.5, 4.5, 9.0]
    assert [r.prompt_tokens for r in found.requests] == [150, 300, 100, 330, 200]
    assert [r.prompt_tokens + r.output_tokens for r in found.requests] == [len(r) for r in requests]
    assert [r.asked for r in found.requests] == [4, 9, 3, 10, 6]
    assert [len(r.blocks) for r in found.requests] == [6, 10, 3, 10, 6]
    assert [r.ending for r in found.requests] == ["stop", "tool_calls", None, None, None]
    assert found.requests[0].session == found.requests[1].session != None  # noqa: E711
    one, two, three, four, five = (r.blocks.tolist() for r in found.requests)
    assert one == two[:6] == five
    assert not set(four) & set(one), "another tenant has other names"
    assert not set(three) & set(one)


def test_a_recording_replays_answers_included(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path)
    outcome = replay(read_traces([path]), 1000, "lru")
    assert outcome.hits == [0, 6, 0, 0, 6]


def test_a_recording_has_no_text_and_keyed_hashes(tmp_path: Path) -> None:
    names = []
    for i in range(2):
        path = tmp_path / f"{i}.jsonl.gz"
        record(path)
        text = gzip.decompress(path.read_bytes()).decode()
        assert "secret" not in text
        names.append([json.loads(line)["names"] for line in text.splitlines()[1:]])
    assert names[0] != names[1], "names are keyed: the same text gets others in another recording"


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Recorder(tmp_path / "t.jsonl", block_tokens=20)
    assert not (tmp_path / "t.jsonl").exists()
    with Recorder(tmp_path / "t.jsonl") as recorder:
        recorder.flush()
        before = (tmp_path / "t.jsonl").read_bytes()
        with pytest.raises(ValueError, match="prompt is 9 tokens, but the request has 3"):
            recorder.add(0.0, [1, 2, 3], 9)
        recorder.flush()
        assert (tmp_path / "t.jsonl").read_bytes() == before
    recorder.close()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_recording_is_never_overwritten(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()  # nothing is lost with it
    record(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"{name} exists.*choose another name or remove"):
        Recorder(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_an_empty_recording_leaves_no_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    recorder = Recorder(path)
    recorder.flush()
    assert path.exists()
    recorder.close()
    assert not path.exists()
    record(path)
    recorder.close()
    assert read_traces([path]).requests


@pytest.mark.parametrize(
    ("head", "line", "message"),
    [
        ({"version": 2}, {}, "version 2"),
        ({"block_tokens": 0}, {}, "block_tokens 0"),
        ({}, {"names": "zz"}, "line 2: not a recorded request"),
        ({}, {"names": "00" * 8}, "1 block hashes for 60 . 40 tokens"),
        ({}, {"prompt": None}, "line 2: not a recorded request"),
    ],
)
def test_an_invalid_recording_is_refused(
    tmp_path: Path, head: dict[str, object], line: dict[str, object], message: str
) -> None:
    path = tmp_path / "t.jsonl"
    first = {"kvloom": "traffic", "version": 1, "block_tokens": 32, "model": "", **head}
    second = {"at": 0.0, "prompt": 60, "output": 40, "names": "00" * 24, **line}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_traces([path])


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize("exists", [False, True])
def test_only_the_owner_can_read_a_recording(tmp_path: Path, name: str, exists: bool) -> None:
    path = tmp_path / name
    if exists:
        path.touch(0o644)
    with Recorder(path) as recorder:
        recorder.add(0.0, [1, 2, 3], 2)
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size
