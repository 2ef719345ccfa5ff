"""Two real workers and a router on loopback: hits, failover, registration, degraded routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.running import MODEL, model_folder

PROMPT = [(7 * i) % 250 + 20 for i in range(160)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


def start_worker(stack: ExitStack, folder: Path, log: Path, *flags: str) -> Process:
    ports = free_port(), free_port()
    events = [f"tcp://127.0.0.1:{port}" for port in ports]
    command = [
        "serve", str(folder), "--device", "cpu", "--pool", "32MiB", "-q", "--drain-seconds", "0",
        "--kv-events", events[0], "--kv-events-replay", events[1], *flags,
    ]  # fmt: skip
    worker = stack.enter_context(started(log, *command))
    worker.more["command"] = command
    return worker


@pytest.fixture
def fleet(folder: Path, tmp_path: Path) -> Iterator[tuple[Process, list[Process]]]:
    """A router and two workers, all ready."""
    with ExitStack() as stack:
        workers = [start_worker(stack, folder, tmp_path / f"w{i}.log") for i in range(2)]
        flags = [word for worker in workers for word in ("--worker", worker.url)]
        router = stack.enter_context(started(tmp_path / "router.log", "route", "--wait-seconds", "0", *flags))
        until(lambda: router.is_healthy() and alive(router) == 2)
        yield router, workers


def alive(router: Process) -> int:
    return sum(one["alive"] for one in router.send("GET", "/workers")[1]["workers"])


def cached(router: Process, tokens: list[int]) -> dict[str, int]:
    _, found = router.send("POST", "/query", {"model_name": MODEL, "token_ids": tokens})
    return {name: one["gpu"] for name, one in found["instances"].items()}


def metrics(router: Process) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in router.send("GET", "/metrics")[1].splitlines() if line[0] != "#")
    return {name: float(value) for name, value in rows}


def test_events_with_a_key_reach_only_routers_with_the_key(folder: Path, tmp_path: Path) -> None:
    zmq_auth = pytest.importorskip("zmq.auth")
    zmq_auth.create_certificates(tmp_path, "events")
    (tmp_path / "events.key_secret").chmod(0o600)
    key = ("--kv-events-key", str(tmp_path / "events.key_secret"))
    with ExitStack() as stack:
        worker = start_worker(stack, folder, tmp_path / "worker.log", *key)
        routers = [
            stack.enter_context(started(tmp_path / name, "route", "--worker", worker.url, *flags))
            for name, flags in (("with", key), ("without", ()))
        ]
        until(lambda: worker.is_healthy() and all(one.is_healthy() and alive(one) == 1 for one in routers))
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        assert worker.send("POST", "/v1/completions", body)[0] == 200
        until(lambda: cached(routers[0], PROMPT) == {worker.url: 160})
        assert cached(routers[1], PROMPT) == {worker.url: 0}
        assert "need a key" in (tmp_path / "without").read_text()
        assert routers[1].send("POST", "/v1/completions", body)[0] == 200, "requests need no events"


def test_prompts_go_where_their_prefix_is(fleet: tuple[Process, list[Process]]) -> None:
    router, workers = fleet
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    status, first = router.send("POST", "/v1/completions", body)
    assert status == 200, first
    until(lambda: max(cached(router, PROMPT).values()) >= 160)
    assert sorted(cached(router, PROMPT).values()) == [0, 160], "one worker has it"
    for _ in range(3):
        _, again = router.send("POST", "/v1/completions", body)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a" * 200}],
        "max_tokens": 4,
        "temperature": 0,
    }
    router.send("POST", "/v1/chat/completions", chat)
    status, second = router.send("POST", "/v1/chat/completions", chat)
    assert status == 200
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    found = metrics(router)
    assert found["kvloom_router_failovers_total"] == 0
    assert found["kvloom_router_untokenised_prompts_total"] == 0
    assert router.send("GET", "/v1/models")[1]["data"][0]["id"] == MODEL
    assert router.send("POST", "/v1/completions", {"model": "other", "prompt": "x"})[0] == 404
    assert (
        router.send("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "temperature": -1})[0] == 400
    )
    assert router.send("POST", "/v1/completions", {}, {"Host": "evil.example"})[0] == 403
    workers[0].kill()
    workers[1].kill()
    until(lambda: not router.is_healthy())
    assert router.send("POST", "/v1/completions", body)[0] == 503


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0}),
    ("/v1/completions", {"prompt": PROMPT, "temperature": 1.0, "seed": 11}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 20}], "temperature": 0}),
]


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0] if event["choices"] else {}
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


@pytest.mark.parametrize(("path", "fields"), CALLS)
def test_a_stream_continues_when_its_worker_is_killed(
    fleet: tuple[Process, list[Process]], path: str, fields: dict[str, Any]
) -> None:
    router, workers = fleet
    body = {"model": MODEL, "max_tokens": 600, "ignore_eos": True, **fields}
    _, whole = workers[1].send("POST", path, body)
    choice = whole["choices"][0]
    expected = choice.get("text") or choice["message"]["content"]
    got, victim = "", None
    ids = set()
    ends = []
    for event in router.stream(path, {**body, "stream_options": {"include_usage": True}}):
        assert "error" not in event, event
        got += text_of(event)
        ids.add(event["id"])
        if event["choices"]:
            assert "token_ids" not in event["choices"][0]
            ends.append(event["choices"][0]["finish_reason"])
        else:
            assert event["usage"]["completion_tokens"] == 600
        if victim is None and len(got) > 40:
            busy = [
                one
                for one in router.send("GET", "/workers")[1]["workers"]
                if one["models"][MODEL]["requests"]
            ]
            assert len(busy) == 1
            victim = next(worker for worker in workers if worker.url == busy[0]["url"])
            victim.kill()
    assert victim is not None
    assert got == expected
    assert len(ids) == 1
    assert [end for end in ends if end] == ["length"]
    found = metrics(router)
    assert found["kvloom_router_continued_streams_total"] == 1
    assert found["kvloom_router_diverged_streams_total"] == 0


def test_workers_come_and_go_and_a_restarted_router_finds_their_pages(folder: Path, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with ExitStack() as stack:
        worker = start_worker(stack, folder, tmp_path / "w.log")
        until(worker.is_healthy)
        assert worker.send("POST", "/v1/completions", body)[0] == 200
        with started(tmp_path / "first.log", "route") as router:
            until(lambda: router.send("GET", "/health")[0] == 503 if listens(router) else False)
            assert router.send("POST", "/register", {"url": worker.url, "instance_id": "a"})[0] == 201
            until(router.is_healthy)
            until(lambda: cached(router, PROMPT) == {"a": 160})  # by a snapshot: it was computed before
            assert router.send("POST", "/unregister", {"instance_id": "a"})[0] == 200
            assert router.send("POST", "/unregister", {"instance_id": "a"})[0] == 404
            assert router.send("POST", "/v1/completions", body)[0] == 503
        with started(tmp_path / "second.log", "route", "--worker", worker.url, "--no-tokenize") as router:
            until(router.is_healthy)
            until(lambda: cached(router, PROMPT) == {worker.url: 160})
            text = {"model": MODEL, "prompt": "plain text " * 20, "max_tokens": 2}
            for _ in range(2):
                assert router.send("POST", "/v1/completions", text)[0] == 200
            assert metrics(router)["kvloom_router_untokenised_prompts_total"] == 2
            assert metrics(router)["kvloom_router_expected_hit_tokens_total"] > 0


def listens(router: Process) -> bool:
    try:
        router.send("GET", "/health")
    except OSError:
        return False
    return True


def test_the_router_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kvloom.cluster.router.command, kvloom.cluster.router.application, kvloom.cluster.router.proxy;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_keys_pass_through_two_routers(folder: Path, tmp_path: Path) -> None:
    """Workers with API keys, found by a host name; two routers; tenants stay apart; both routers see all blocks."""
    keys = tmp_path / "keys"
    keys.write_text("key-of-routers routers\nkey-of-tenant-a a\nkey-of-tenant-b b\n")
    keys.chmod(0o600)
    port = free_port()
    ports = [free_port() for _ in range(2)]
    flags = ["--device", "cpu", "--pool", "32MiB", "-q", "--drain-seconds", "0", "--api-keys", str(keys)]
    flags += [f"--kv-events=tcp://127.0.0.1:{ports[0]}", f"--kv-events-replay=tcp://127.0.0.1:{ports[1]}"]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with ExitStack() as stack:
        worker = stack.enter_context(started(tmp_path / "w.log", "serve", str(folder), *flags, port=port))
        more = ["--discover", f"http://localhost:{port}", "--worker-key", "key-of-routers"]
        routers = [stack.enter_context(started(tmp_path / f"r{i}.log", "route", *more)) for i in range(2)]
        for router in routers:
            until(lambda router=router: router.is_healthy())
            assert router.send("POST", "/v1/completions", body)[0] == 401
            assert router.send("POST", "/v1/completions", body, key("wrong"))[0] == 401
        status, first = routers[0].send("POST", "/v1/completions", body, key("key-of-tenant-a"))
        assert status == 200, first
        for router in routers:  # the second one by the worker's events
            until(lambda router=router: max(tenant_blocks(router, "a")) >= 160)
            assert max(tenant_blocks(router, "b")) == 0
        _, again = routers[1].send("POST", "/v1/completions", body, {"x-api-key": "key-of-tenant-a"})
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
        assert again["choices"] == first["choices"]
        _, other = routers[1].send("POST", "/v1/completions", body, key("key-of-tenant-b"))
        assert (other["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
        assert metrics(routers[1])["kvloom_router_expected_hit_tokens_total"] >= 144
        worker.kill()
        until(lambda: not routers[0].is_healthy())
        until(lambda: routers[0].send("GET", "/workers")[1]["workers"][0]["alive"] is False)


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def tenant_blocks(router: Process, tenant: str) -> list[int]:
    asked = {"model_name": MODEL, "token_ids": PROMPT, "tenant_id": tenant}
    _, found = router.send("POST", "/query", asked)
    return [one["gpu"] for one in found.get("instances", {}).values()] or [0]


def test_a_request_waits_for_a_worker_that_comes_back(folder: Path, tmp_path: Path) -> None:
    """The only worker dies during a request; the request continues when it is back."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    with ExitStack() as stack:
        worker = start_worker(stack, folder, tmp_path / "w.log")
        port = int(worker.url.rpartition(":")[2])
        router = stack.enter_context(
            started(tmp_path / "r.log", "route", "--worker", worker.url, "--wait-seconds", "100")
        )
        until(router.is_healthy)
        _, whole = worker.send("POST", "/v1/completions", body)
        text = ""
        for event in router.stream("/v1/completions", body):
            assert "error" not in event, event
            if len(text) <= 40 < len(text) + len(text_of(event)):
                worker.kill()
                stack.enter_context(started(tmp_path / "again.log", *worker.more["command"], port=port))
            text += text_of(event)
        assert text == whole["choices"][0]["text"]
        found = metrics(router)
        assert found["kvloom_router_continued_streams_total"] == 1
        _, late = router.send("POST", "/v1/completions", {**body, "stream": False})
        assert late["choices"][0]["text"] == text


@pytest.mark.parametrize("kills", [6])
def test_kills_under_load_lose_and_change_no_answer(kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvloom bench kills --kills 50` is the same with more kills."""
    import json

    from kvloom.cli import main

    flags = ["--workers", "2", "--clients", "2", "--tokens", "24", "--json"]
    code = main(["bench", "kills", "--kills", str(kills), *flags])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert sum(found["kills"].values()) == kills
    assert found["answers"] > 0
