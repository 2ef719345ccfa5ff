"""The fleet page of a router in a real browser, and the same in a terminal, with prefill and decode workers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

from kvloom.cli import main
from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.browser import AUDIT, Seen, missing, open_url
from tests.serve.running import MODEL, model_folder

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
WHY = missing()
in_browser = pytest.mark.skipif(bool(WHY), reason=WHY)
KEY = "the admin key"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, list[Process]]]:
    """A router with an admin key, one prefill and two decode workers, after some traffic."""
    logs = tmp_path_factory.mktemp("logs")
    folder = model_folder(tmp_path_factory.mktemp("models"))
    shared = free_port()
    roles = [["--role", "prefill", "--tier", f"host:32MiB?share={shared}"]]
    roles += 2 * [
        ["--role", "decode", "--tier", "host:32MiB", "--tier", f"peer://127.0.0.1:{shared}?optional=1"]
    ]
    with ExitStack() as stack:
        workers = []
        for number, role in enumerate(roles):
            events = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            flags = ["--device", "cpu", "--pool", "32MiB", "-q", "--drain-seconds", "0", *role]
            flags += ["--kv-events", events[0], "--kv-events-replay", events[1]]
            workers.append(stack.enter_context(started(logs / f"{number}.log", "serve", str(folder), *flags)))
        named = [word for worker in workers for word in ("--worker", worker.url)]
        router = stack.enter_context(started(logs / "router.log", "route", "--admin-key", KEY, *named))
        until(lambda: router.is_healthy() and sum(one["alive"] for one in state(router)["workers"]) == 3)
        talk(router)
        yield router, workers


def state(router: Process) -> dict[str, Any]:
    status, found = router.send("GET", "/kvloom/state", headers={"Authorization": f"Bearer {KEY}"})
    assert status == 200
    return dict(found)


def talk(router: Process) -> None:
    for start in range(4):
        prompt = [(start + 7 * i) % 250 + 20 for i in range(400)]
        for _ in range(2):
            for event in router.stream(
                "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 8}
            ):
                assert "error" not in event


def opened(page: Page, url: str) -> None:
    page.goto(f"{url}/dashboard")
    page.wait_for_selector("#signin:not([hidden])")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")


def test_the_state_has_workers_flows_and_history(fleet: tuple[Process, list[Process]]) -> None:
    router, workers = fleet
    assert router.send("GET", "/kvloom/state")[0] == 401
    until(lambda: sum(one["cached_tokens"] for one in state(router)["workers"]) > 0)
    until(lambda: any(state(router)["history"]["series"]["request_rate"]))
    found = state(router)
    assert [one["url"] for one in found["workers"]] == [worker.url for worker in workers]
    assert [one["role"] for one in found["workers"]] == ["prefill", "decode", "decode"]
    first, *others = found["workers"]
    assert sum(first["hand_overs"].values()) == found["totals"]["hand_overs"] >= 4
    assert set(first["hand_overs"]) <= {worker.url for worker in workers[1:]}
    assert sum(one["requests"] for one in others) == 8
    assert first["blocks"]["GPU"] >= 4 * 25
    assert first["tiers"][0]["name"] == "host"
    until(lambda: state(router)["workers"][0]["tiers"][0]["pages"] > 0)
    assert any(one["ttft"]["p50"] for one in others)
    assert 0 < found["totals"]["cached_tokens"] < found["totals"]["prompt_tokens"]
    assert 0 < found["totals"]["latency"]["overhead"]["p50"] < found["totals"]["latency"]["ttft"]["p50"]
    assert found["totals"]["requests"] == 8
    lines = router.send("GET", "/metrics")[1].splitlines()
    assert "kvloom_router_ttft_seconds_count 8" in lines
    assert 'kvloom_router_overhead_seconds_bucket{le="+Inf"} 8' in lines


@in_browser
def test_the_page_shows_the_fleet(fleet: tuple[Process, list[Process]]) -> None:
    router, _ = fleet
    with open_url() as browser:
        one = Seen(browser)
        page = one.page
        opened(page, router.url)
        rows = page.locator("#workers-table tbody tr")
        rows.nth(2).wait_for()
        words = [row.split("\t") for row in rows.all_inner_texts()]
        assert [row[1] for row in words] == ["prefill", "decode", "decode"]
        assert [row[2].strip() for row in words] == ["alive"] * 3
        assert page.locator("#flows-body svg .box").count() == 4
        lines = page.locator("#flows-body path.flow-line")
        assert lines.count() >= 4
        assert any(
            key.startswith("h ")
            for key in page.eval_on_selector_all("path.flow-line", "all => all.map(e => e.dataset.key)")
        )
        assert re.search(r"\d+ handed over", page.inner_text("#flows-about"))
        talk(router)
        end = time.monotonic() + 60
        while page.locator("path.flow-line.on").count() == 0 or "s" not in page.inner_text(
            "#curve-ttft strong"
        ):
            assert time.monotonic() < end
            page.wait_for_timeout(100)
        page.click("summary >> text=The past ten minutes as a table")
        page.wait_for_selector("#past-table tbody tr")
        assert page.evaluate(AUDIT) == []
        assert [url for url in one.asked if not url.startswith(router.url + "/")] == []
        assert [text for text in one.complaints if "401" not in text] == []
        one.context.close()
        for scheme, width in (("dark", 1280), ("light", 390)):
            one = Seen(browser, color_scheme=scheme, viewport={"width": width, "height": 900})
            opened(one.page, router.url)
            one.page.wait_for_selector("#workers-table tbody tr")
            assert one.page.evaluate(AUDIT) == []
            assert one.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            one.context.close()


def test_top_shows_the_fleet(
    fleet: tuple[Process, list[Process]], capsys: pytest.CaptureFixture[str]
) -> None:
    router, workers = fleet
    assert main(["top", "--url", router.url, "--api-key", KEY, "--once"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "3 of 3 workers alive",
        "prefill",
        "decode",
        "hit rate",
        "TTFT p50",
        "handed over",
        *(w.url[7:] for w in workers),
    ):
        assert word in shown, shown
    assert main(["top", "--url", router.url, "--api-key", KEY, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["workers"]) == 3
    assert main(["top", "--url", router.url, "--api-key", "wrong", "--once"]) == 2
    assert "admin key" in capsys.readouterr().err


def test_a_dead_worker_is_shown(
    fleet: tuple[Process, list[Process]], capsys: pytest.CaptureFixture[str]
) -> None:
    router, workers = fleet  # the last test: it ends a worker
    workers[2].kill()
    until(lambda: not state(router)["workers"][2]["alive"])
    assert state(router)["totals"]["deaths"] == 1
    assert main(["top", "--url", router.url, "--api-key", KEY, "--once"]) == 0
    assert "2 of 3 workers alive" in capsys.readouterr().out
