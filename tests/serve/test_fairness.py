"""One tenant floods a real server; another is served beside it. No quota or weight is configured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.running import MODEL, Running, running

pytestmark = pytest.mark.slow

RED, BLUE = "key-of-red-1", "key-of-blue-1"
LONG = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({RED: "red", BLUE: "blue"}))
    limits = ("--max-running", "8", "--max-queue", "42", "--max-priority", "1000000000")
    with running(folder, "--pool", "4MiB", "--api-keys", str(keys), *limits) as found:
        yield found


def begun(server: Running, open_: ExitStack, **more: Any) -> None:
    """Send a request of red whose answer is not read; it is closed with `open_`."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    open_.callback(connection.close)
    told = {"Content-Type": "application/json", "Authorization": f"Bearer {RED}"}
    connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, **LONG, **more}), told)


@pytest.mark.parametrize("attack", [{}, {"priority": 10**9}, {"n": 8}], ids=["streams", "priority", "n"])
@pytest.mark.slow
def test_a_flood_of_one_tenant_neither_stops_nor_refuses_another(
    shared: Running, attack: dict[str, Any]
) -> None:
    with ExitStack() as open_:
        for _ in range(60 // attack.get("n", 1)):
            begun(shared, open_, **attack)
        shared.wait_for(lambda: shared.metrics()["kvloom_running"] == 8)
        answered = shared.metrics().get('kvloom_finished_answers_total{reason="length"}', 0)
        for _ in range(5):
            assert shared.complete(BLUE, prompt="me, too", max_tokens=3)["usage"]["completion_tokens"] <= 3
        after = shared.metrics()
        assert after["kvloom_open_requests"] > 1, "the flood is still there"
        assert after.get('kvloom_finished_answers_total{reason="length"}', 0) <= answered + 5
    shared.wait_for(shared.idle, 30)


@pytest.mark.slow
def test_a_tenant_that_keeps_pages_for_long_leaves_those_of_another_cached(
    folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({RED: "red", BLUE: "blue"}))
    own = [[5 + (i * 37 + seed * 11) % 200 for i in range(100)] for seed in range(8)]
    with running(folder, "--pool", "1MiB", "--api-keys", str(keys)) as server:

        def hits() -> int:
            told = [server.complete(BLUE, prompt=prompt, max_tokens=2)["usage"] for prompt in own]
            return sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)

        hits()
        alone = hits()
        assert alone >= 8 * 90
        for turn in range(2):
            for seed in range(12):
                prompts = [
                    [5 + (i * 29 + (60 * turn + 5 * seed + k) * 13) % 211 for i in range(100)]
                    for k in range(5)
                ]
                server.complete(RED, prompt=prompts, max_tokens=2, ttl=80_000, priority=9)  # fmt: skip
            assert hits() >= 0.9 * alone
        server.wait_for(server.idle, 20)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"ttl": 1e9}, "ttl", "86400 seconds"),
        ({"n": 17}, "n", "limit of 16"),
        ({"best_of": 17}, "n", "limit of 16"),
        ({"prompt": ["a"] * 17}, "n", "limit of 16"),
        ({"priority": 10**9 + 1}, "priority", "1000000000"),
    ],
)
def test_what_exceeds_a_cap_is_refused_with_the_limit(
    guarded: Running, asked: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2, **asked}
    status, _, told = guarded.send("POST", "/v1/completions", body, key=RED)
    assert (status, told["error"]["param"]) == (400, param)
    assert said in told["error"]["message"]
    assert guarded.complete(RED, prompt="hi", max_tokens=2)["usage"]["completion_tokens"] <= 2
