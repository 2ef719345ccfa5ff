"""API keys and tenants: no access without a key, separate pages, quotas under load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.bench.serve import Load, offer
from kvloom.serve.auth.keys import read_keys
from kvloom.serve.server import ModelOptions, ServerOptions
from kvloom.serve.worker.messages import Start
from tests.serve.running import MODEL, Running

RED, BLUE, SMALL, TWIN = "key-of-red-1", "key-of-blue-1", "key-of-small-1", "key-of-red-2"
QUOTA = 64 << 10
MODELS = (ModelOptions(Start("")),)
PROMPT = [5 + i % 200 for i in range(100)]


def test_requests_without_a_key_are_refused(guarded: Running) -> None:
    for key, path in ((None, "/v1/models"), ("wrong-key-123", "/v1/models"), ("", "/v1/models")):
        status, headers, told = guarded.send("GET", path, key=key)
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    status, _, told = guarded.send("POST", "/v1/completions", b"not even JSON")
    assert (status, told["error"]["code"]) == (401, "invalid_api_key")
    status, _, _ = guarded.send("GET", "/v1/models", headers={"Authorization": f"Basic {RED}"})
    assert status == 401
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong-key-123").models.list()
    assert guarded.client(RED).models.list().data[0].id == MODEL
    assert guarded.healthy()


def test_a_tenants_pages_serve_its_keys_only(guarded: Running) -> None:
    def cached(key: str, **more: Any) -> int:
        found = guarded.complete(key, prompt=PROMPT, max_tokens=2, **more)["usage"]["prompt_tokens_details"]
        return int(found["cached_tokens"])

    assert cached(RED) == 0
    assert cached(RED) == 99
    assert cached(TWIN) == 99
    assert cached(BLUE) == 0
    assert cached(RED, tenant="red") == 99
    status, _, told = guarded.send(
        "POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT, "tenant": "red"}, key=BLUE
    )
    assert (status, told["error"]["param"]) == (400, "tenant")


def test_a_tenant_sees_its_own_usage_only(guarded: Running) -> None:
    guarded.complete(RED, prompt=PROMPT, max_tokens=2)
    guarded.wait_for(lambda: guarded.metrics(RED)['kvloom_tenant_bytes{tenant="red",state="used"}'] > 0)
    assert not [name for name in guarded.metrics(RED) if "tenant=" in name and 'tenant="red"' not in name]


def test_metrics_need_a_key_where_other_machines_can_reach_them(guarded: Running, tmp_path: Path) -> None:
    for key, status in ((None, 401), ("wrong-key-123", 401), (RED, 200)):
        assert guarded.send("GET", "/metrics", key=key)[0] == status
    file = tmp_path / "keys"
    file.write_text(f"{RED} red\n")
    keys = read_keys(str(file))
    for host, asked, needed in (
        ("0.0.0.0", "auto", True),
        ("127.0.0.1", "auto", False),
        ("127.0.0.1", "key", True),
        ("0.0.0.0", "open", False),
    ):
        assert ServerOptions(MODELS, host, keys=keys, metrics_auth=asked).metrics_need_key == needed
    assert not ServerOptions(MODELS).metrics_need_key
    with pytest.raises(ValueError, match="--api-keys FILE"):
        ServerOptions(MODELS, metrics_auth="key")
    with pytest.raises(ValueError, match="'none'"):
        ServerOptions(MODELS, metrics_auth="none")


def test_a_quota_holds_under_load_and_blocks_no_other_tenant(guarded: Running) -> None:
    most = 0.0

    async def watch() -> None:
        nonlocal most
        while True:
            told = await asyncio.to_thread(guarded.metrics, SMALL)
            most = max(most, told['kvloom_tenant_bytes{tenant="small",state="used"}'])
            await asyncio.sleep(0.05)

    async def both(seconds: float) -> list[Any]:
        watcher = asyncio.create_task(watch())
        loads = [
            Load(guarded.url, MODEL, streams=12, seconds=seconds, prompt=64, shared=0, tokens=48, key=key)
            for key in (SMALL, BLUE)
        ]
        seen = await asyncio.gather(*map(offer, loads))
        watcher.cancel()
        return seen

    for seconds in (2.0, 10.0, 40.0):
        small, blue = asyncio.run(both(seconds))
        if blue.requests > 12:  # a busy machine may serve only the first request of each stream
            break
    assert not small.errors
    assert not blue.errors
    assert 0 < most <= QUOTA
    assert small.requests > 0
    assert blue.requests > small.requests  # whom no quota holds back


def test_requests_beyond_a_quota_are_refused(guarded: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3000}
    status, _, told = guarded.send("POST", "/v1/completions", asked, key=SMALL)
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    status, _, told = guarded.send("POST", "/v1/completions", {**asked, "max_tokens": 60, "n": 16}, key=SMALL)
    assert status == 400
    assert "quota" in told["error"]["message"]
    chat = guarded.client(SMALL).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "no limit given"}]
    )
    assert chat.usage is not None
    assert chat.usage.total_tokens <= 512
