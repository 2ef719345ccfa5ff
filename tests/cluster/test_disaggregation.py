"""Prefill and decode workers in processes: same tokens as one worker, also when the prefill worker is killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from tests.engine.made_tokenizers import byte_level
from tests.models.zoo import tiny
from tests.serve.running import MODEL, Running, running

from .fleet import started, until
from .toy_proxy import handed_over, handed_over_meanwhile

FAMILIES = ["llama", "gemma3_text", "qwen3_next"]
TOKENS = 1200


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def made_model(family: str, folder: Path) -> Path:
    path = folder / MODEL
    tiny(family, max_position_embeddings=2048).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


def drawn(seed: str, size: int = TOKENS) -> dict[str, Any]:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 64) for _ in range(size)]
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module", params=FAMILIES)
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A prefill worker, a decode worker, a worker that does both, and the address of the prefill worker's pages."""
    model = made_model(request.param, tmp_path_factory.mktemp(request.param))
    port = free_port()
    pool = ("--pool", "64MiB")
    with ExitStack() as stack:
        tier = f"host:64MiB?share={port}"
        small = ("--role", "prefill", "--token-budget", "64")  # many chunks
        prefill = stack.enter_context(running(model, *pool, "--tier", tier, *small))
        peer = f"peer://127.0.0.1:{port}?timeout=2"
        decode = stack.enter_context(
            running(model, *pool, "--tier", "host:64MiB", "--tier", peer, "--role", "decode")
        )
        alone = stack.enter_context(running(model, *pool))
        yield prefill, decode, alone, f"127.0.0.1:{port}"


@pytest.mark.slow
def test_hand_over_and_killed_prefill_worker(workers: tuple[Running, Running, Running, str]) -> None:
    prefill, decode, alone, address = workers
    assert prefill.send("GET", "/health")[2]["role"] == "prefill"
    assert decode.metrics()['kvloom_role{role="decode"}'] == 1
    assert any(line == "role: prefill" for line in prefill.said)
    assert any(f"peer://{address}" in line for line in prefill.said)
    # one call after the other, with the fields of the prefill worker's answer
    first = drawn("first")
    found = handed_over(prefill, decode, **first)
    assert tokens_of(found) == tokens_of(alone.complete(**first))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS - 17
    # both calls at once
    second = drawn("second")
    found = handed_over_meanwhile(prefill, decode, address, **second)
    assert tokens_of(found) == tokens_of(alone.complete(**second))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS - 17
    decode.wait_for(lambda: decode.metrics()["kvloom_hand_overs_total"] == 2)
    # the engine of the prefill worker is killed in the middle
    for attempt in range(5):
        third = drawn(f"third {attempt}")
        wanted = tokens_of(alone.complete(**third))
        answers: list[dict[str, Any]] = []

        def call(fields: dict[str, Any], answers: list[dict[str, Any]] = answers) -> None:
            answers.append(handed_over_meanwhile(prefill, decode, address, **fields))

        pages = decode.metrics()["kvloom_handed_over_pages_total"]
        thread = threading.Thread(target=call, args=(third,))
        thread.start()
        time.sleep(0.05 * (1 + attempt % 3))
        os.kill(engine_pid(prefill), signal.SIGKILL)
        thread.join(120)
        assert len(answers) == 1, "the request is not lost"
        assert tokens_of(answers[0]) == wanted
        prefill.wait_for(prefill.healthy, 120)
        if decode.metrics()["kvloom_cut_hand_overs_total"]:
            break
    assert decode.metrics()["kvloom_cut_hand_overs_total"], f"no kill was in the middle ({pages} pages)"
    # the prefill worker is back, and serves hand-overs again
    fourth = drawn("fourth")
    found = handed_over(prefill, decode, **fourth)
    assert tokens_of(found) == tokens_of(alone.complete(**fourth))


@pytest.mark.slow
def test_router_hands_prompts_over(tmp_path: Path) -> None:
    """The router lets the prefill worker compute long prompts; tokens are those of the decode worker alone."""
    model, port = made_model("gemma3_text", tmp_path), free_port()
    with ExitStack() as stack:
        pool = ("--pool", "64MiB")
        small = ("--role", "prefill", "--token-budget", "64")
        tier = f"host:64MiB?share={port}"
        prefill = stack.enter_context(running(model, *pool, "--tier", tier, *small))
        tiers = ("--tier", "host:64MiB", "--tier", f"peer://127.0.0.1:{port}?timeout=2")
        decode = stack.enter_context(running(model, *pool, *tiers, "--role", "decode"))
        flags = ("--worker", prefill.url, "--worker", decode.url)
        router = stack.enter_context(started(tmp_path / "router.log", "route", *flags))
        until(lambda: router.is_healthy() and len(router.send("GET", "/workers")[1]["workers"]) == 2)
        until(lambda: all(one["alive"] for one in router.send("GET", "/workers")[1]["workers"]))
        for name in ("whole", "streamed", "short", "killed"):
            fields = drawn(name, 60 if name == "short" else TOKENS)
            if name == "killed":
                os.kill(engine_pid(prefill), signal.SIGKILL)
            body = {"model": MODEL, **fields}
            if name == "streamed":
                events = list(router.stream("/v1/completions", body))
                found = [token for one in events for token in one["choices"][0].get("token_ids") or ()]
            else:
                status, answer = router.send("POST", "/v1/completions", body)
                assert status == 200, answer
                found = tokens_of(answer)
            again = {**fields, "cache": {"store": False, "read": False}}
            assert found == tokens_of(decode.complete(**again)), name
        assert decode.metrics()["kvloom_hand_overs_total"] == 2
        assert "kvloom_router_hand_overs_total" in router.send("GET", "/metrics")[1]
        assert decode.metrics()["kvloom_handed_over_pages_total"] > 0


def engine_pid(server: Running) -> int:
    """The engine process of a server: its child whose command is the engine's."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                stat = (process / "stat").read_text().rpartition(")")[2].split()
                command = (process / "cmdline").read_text()
            except OSError:
                continue
            if int(stat[1]) == server.process.pid and "engine_process" in command:
                return int(process.name)
    raise AssertionError("the server has no engine process")


@pytest.mark.slow
def test_role_changes_at_run_time(tmp_path: Path) -> None:
    model = made_model("llama", tmp_path)
    with running(model, "--pool", "16MiB", "--tier", "host:16MiB?share=0") as server:
        assert server.send("GET", "/admin/role")[2] == {"role": "both"}
        assert server.send("POST", "/admin/role", {"role": "prefill"})[2] == {"role": "prefill"}
        assert server.send("GET", "/health")[2] == {"status": "ok", "role": "prefill"}
        assert server.send("POST", "/admin/role", {"role": "other"})[0] == 400
        answer = server.complete(**{**drawn("role", 50), "kv_transfer_params": {"do_remote_decode": True}})
        params = answer["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, 50)
        server.wait_for(lambda: server.metrics()['kvloom_role{role="prefill"}'] == 1)
    with running(model, "--pool", "16MiB") as server:
        status, _, found = server.send("POST", "/admin/role", {"role": "prefill"})
        assert status == 400
        assert "share=" in found["error"]["message"]
