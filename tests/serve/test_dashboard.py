"""/kvloom/state: its content and headers, privacy, and the state without an engine."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvloom.serve.dashboard import page_files
from tests.serve.running import MODEL, Running, running


def state(server: Running) -> dict[str, Any]:
    status, _, found = server.send("GET", "/kvloom/state")
    assert status == 200
    return dict(found)


def strings(found: Any) -> set[str]:
    """Every text in a JSON, names of fields left out."""
    if isinstance(found, dict):
        return set().union(*map(strings, found.values())) if found else set()
    if isinstance(found, list):
        return set().union(*map(strings, found)) if found else set()
    return {found} if isinstance(found, str) else set()


def test_the_state_matches_the_cache(server: Running) -> None:
    server.complete(prompt="the state of a cache, once more " * 4, max_tokens=8, ignore_eos=True)
    server.wait_for(server.idle)
    time.sleep(1.1)
    found = state(server)
    metrics = server.metrics()
    engine = found["engine"]
    assert found["server"]["status"] == "ok"
    assert found["server"]["model"] == MODEL
    assert engine["pool"]["cached_pages"] == metrics["kvloom_cached_pages"] > 0
    assert (
        sum(row["pages"] for row in engine["map"]["legend"] if row["state"] == "cached")
        == engine["pool"]["cached_pages"]
    )
    assert [group["kind"] for group in engine["groups"]] == ["full"]
    branches = engine["tree"]["branches"]
    assert (
        0 < len(branches) <= min(engine["tree"]["nodes"], 200)
    )  # one that does not fit with its parents is left out
    assert {branch["parent"] for branch in branches} <= {None, *(branch["id"] for branch in branches)}
    assert engine["tiers"] == []
    assert engine["running"] == engine["waiting"] == 0


def test_all_viewers_share_one_snapshot(server: Running) -> None:
    time.sleep(1.1)
    with ThreadPoolExecutor(16) as viewers:
        began = time.monotonic()
        found = list(viewers.map(lambda _: state(server)["engine_at"], range(64)))
        took = time.monotonic() - began
    assert len(set(found)) <= 2 + int(took)


def test_the_history_is_sampled_without_viewers(server: Running) -> None:
    server.complete(prompt="for the history", max_tokens=16, ignore_eos=True)
    server.wait_for(lambda: max(state(server)["history"]["series"]["output_rate"] or [0]) > 0)
    history = state(server)["history"]
    assert len({len(row) for row in history["series"].values()}) == 1
    assert any(rate is not None for rate in history["series"]["hit_rate"])


def test_the_state_has_totals_and_quantiles(server: Running) -> None:
    before = state(server)["totals"]
    for _ in range(3):
        server.complete(
            prompt="count the tokens of a tenant " * 4, max_tokens=8, tenant="crimson", ignore_eos=True
        )
    server.wait_for(lambda: state(server)["totals"]["cached_tokens"] > before["cached_tokens"])
    server.wait_for(lambda: state(server)["history"]["series"]["itl_p50"][-1:] not in ([], [None]))
    found = state(server)
    totals, metrics = found["totals"], server.metrics()
    assert totals["prompt_tokens"] == metrics["kvloom_prompt_tokens_total"]
    assert totals["cached_tokens"] == sum(totals["hit_tokens"].values())
    mine = totals["tenants"]["crimson"]
    assert mine["requests"] == 3
    assert 0 < mine["cached_tokens"] < mine["prompt_tokens"]
    for times in totals["latency"].values():
        assert 0 < times["p50"] <= times["p95"] <= times["p99"]
    series = found["history"]["series"]
    assert 0 < series["ttft_p50"][-1] <= series["ttft_p95"][-1] <= series["ttft_p99"][-1]
    ages = totals["ages"]
    assert len(ages["reused"]) == len(ages["bounds"]) + 1
    assert sum(ages["reused"]) == metrics["kvloom_reuse_seconds_count"] > 0
    # Without keys every tenant that a request names is on the map.
    server.wait_for(lambda: "crimson" in [tenant["name"] for tenant in state(server)["engine"]["tenants"]])


def test_the_state_contains_no_text_keys_or_token_ids(server: Running) -> None:
    secret = "plugh-xyzzy"
    server.complete(prompt=f"{secret} " * 6, max_tokens=4, session_id="session-plugh", ignore_eos=True)
    time.sleep(1.1)
    found = state(server)
    text = json.dumps(found)
    assert "plugh" not in text
    assert "xyzzy" not in text
    branches = {
        value for row in found["engine"]["tree"]["branches"] for value in (row["id"], row["parent"]) if value
    }
    known = {"ok", MODEL, "cpu", "float32", "full", "", "cached", "in use", "device"}
    del found["words"], found["totals"]["settings"]  # sentences of the program
    tenants = {tenant["name"] for tenant in found["engine"]["tenants"]}  # of other tests' requests, too
    assert not {name for name in tenants if "plugh" in name}
    assert strings(found) - branches - tenants <= known


def test_the_page_has_a_content_security_policy(server: Running) -> None:
    files = page_files()
    assert {"index.html", "style.css", "main.js"} <= set(files)
    for path, kind in (
        ("/dashboard", "html"),
        ("/dashboard/main.js", "javascript"),
        ("/dashboard/style.css", "css"),
        ("/kvloom/state", "json"),
    ):
        status, headers, _ = server.send("GET", path)
        assert status == 200
        assert kind in headers["content-type"]
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    for path in (
        "/dashboard/none.js",
        "/dashboard/../routes.py",
        "/dashboard/%2e%2e/routes.py",
        "/dashboard/page/main.js",
    ):
        assert server.send("GET", path)[0] == 404
    assert server.send("GET", "/dashboard/")[0] in (200, 307)
    assert server.send("GET", "/kvloom/state", headers={"Host": "evil.example"})[0] == 403


@pytest.mark.parametrize("name", sorted(page_files()))
def test_the_page_loads_nothing_from_other_hosts(name: str) -> None:
    text = page_files()[name].decode()
    for found in ("http://", "https://", "//cdn", "@import", "eval(", "innerHTML"):
        assert found not in text.replace("http://www.w3.org/2000/svg", ""), f"{name} has {found}"


@pytest.mark.slow
def test_a_snapshot_outlives_its_engine(folder: Path) -> None:
    with running(folder, "--pool", "16MiB") as server:
        server.complete(prompt="before the end", max_tokens=4, ignore_eos=True)
        server.wait_for(server.idle)
        time.sleep(1.1)
        before = state(server)
        assert before["engine"] is not None
        os.kill(server.engine, signal.SIGKILL)
        time.sleep(1.1)
        after = state(server)
        assert after["server"]["status"] == "loading"
        assert after["engine"] == before["engine"]
