"""`kvloom serve --record`: a replay of the recording gives the server's hit rate."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.replay import read_traces
from tests.serve.running import MODEL, Running, running

BLOCK = 16
BLOCKS = 400
PAGE = 2 * 2 * 2 * 8 * 4 * BLOCK  # layers, K and V, heads, their size, float32


@pytest.fixture(scope="module")
def recording(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    pool = str((BLOCKS + 1) * PAGE)
    with running(folder, "--pool", pool, "--record", str(path)) as found:
        yield found, path


@pytest.mark.slow
def test_a_replayed_recording_hits_like_the_server(recording: tuple[Running, Path]) -> None:
    """Three conversations take turns, and begin again now and then."""
    server, path = recording
    client, numbers = server.client(), random.Random(3)
    talks: list[list[int]] = [[numbers.randrange(5, 300) for _ in range(50)] for _ in range(3)]
    for turn in range(24):
        talk = talks[numbers.randrange(3)]
        if len(talk) > 350:
            talk[:] = talk[:50]
        talk += [numbers.randrange(5, 300) for _ in range(numbers.randrange(10, 40))]
        if not len(talk) % BLOCK:  # a prompt's last token is always computed, a replayed block is hit whole
            talk.append(7)
        done = client.completions.create(
            model=MODEL,
            prompt=list(talk),
            max_tokens=numbers.randrange(5, 30),
            extra_body={"ignore_eos": True, "session_id": f"talk {turn}", "return_token_ids": True},
        )
        talk += done.choices[0].model_extra["token_ids"]
    told = server.send("GET", "/kvloom/requests?limit=100")[2]["requests"][::-1]
    counted = [one["cached_tokens"] // BLOCK for one in told]
    asked = sum(one["prompt_tokens"] // BLOCK for one in told)
    assert sum(counted) > asked // 4
    assert (
        server.metrics()["kvloom_evictions_total"] == 0
    )  # where pages are short, partial blocks take some of them

    command = [sys.executable, "-m", "kvloom.cli", "replay", str(path), "--capacity", str(BLOCKS), "--policy", "lru", "--json"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    (row,) = json.loads(done.stdout)
    assert row["hit_rate"] == pytest.approx(sum(counted) / asked)


def test_a_recording_contains_hashes_lengths_and_times_only(small: Running, traffic: Path) -> None:
    small.wait_for(small.idle)
    before = max(1, len(traffic.read_text().splitlines()))  # the first line is the head
    word = "unmistakable words"
    small.complete(prompt=word, max_tokens=3, session_id="my session", tenant="my tenant")
    small.complete(prompt=word, max_tokens=3, cache={"store": False})
    small.complete(prompt=word, max_tokens=3, cache={"read": False})
    text = traffic.read_text()
    head, *lines = [json.loads(line) for line in text.splitlines()]
    assert head["model"] == MODEL
    assert len(lines) + 1 == before + 1, "what leaves the cache alone is no traffic for it"
    assert set(lines[-1]) == {"at", "prompt", "output", "names", "tenant", "session", "ending"}
    assert lines[-1]["prompt"] == len(word)
    for said in (word, "my session", "my tenant"):
        assert said not in text
    assert read_traces([traffic]).requests[-1].prompt_tokens == len(word)
