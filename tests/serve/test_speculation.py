"""Speculation through the server: tokens, metrics, records, `kvloom explain` and the dashboard."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser import missing, open_url
from tests.serve.running import Running, running

pytestmark = pytest.mark.slow

REPEATED = "one two three four five six seven eight nine ten " * 4


@pytest.fixture(scope="module")
def speculating(folder: Path) -> Iterator[Running]:
    with running(folder, "--speculate", "suffix", "--draft-tokens", "6") as server:
        for _ in range(3):
            server.complete(prompt=REPEATED, max_tokens=96, temperature=0, ignore_eos=True)
        yield server


def record_of(server: Running, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def finished() -> bool:
        found.update(server.send("GET", f"/kvloom/requests/{id_}")[2])
        return found["state"] == "finished"

    server.wait_for(finished)
    return found


def test_answers_are_those_without_speculation(speculating: Running, server: Running) -> None:
    """Greedy, sampled with a seed, and with several answers."""
    for more in (
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "n": 2, "frequency_penalty": 0.5},
    ):
        asked = {"prompt": REPEATED, "max_tokens": 48, "ignore_eos": True, **more}
        with_drafts, without = (one.complete(**asked) for one in (speculating, server))
        assert [one["text"] for one in with_drafts["choices"]] == [one["text"] for one in without["choices"]]


def test_a_record_and_explain_state_the_drafts(speculating: Running) -> None:
    found = speculating.complete(prompt=REPEATED, max_tokens=96, temperature=0, ignore_eos=True)
    record = record_of(speculating, found["id"])
    assert 0 < record["accepted_tokens"] <= record["draft_tokens"]
    command = [sys.executable, "-m", "kvloom.cli", "explain", found["id"], "--url", speculating.url]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert (
        f"Of its {record['draft_tokens']:,} draft tokens, {record['accepted_tokens']:,} were accepted" in text
    )


def test_metrics_and_dashboard_count_drafts(speculating: Running) -> None:
    def drafts() -> dict[str, Any]:
        return dict(speculating.send("GET", "/kvloom/state")[2]["totals"]["drafts"])

    speculating.wait_for(lambda: drafts()["count"] > 0)
    found, metrics = drafts(), speculating.metrics()
    assert metrics["kvloom_drafts_total"] >= found["count"]
    assert sum(found["accepted"]) <= sum(found["proposed"])
    assert found["decisions"].keys() == {"suffix"}


@pytest.mark.browser
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_page_has_a_panel(speculating: Running) -> None:
    with open_url() as browser:
        page = browser.new_page()
        page.goto(f"{speculating.url}/dashboard")
        page.wait_for_selector("#drafts-bars li")
        assert "drafts" in page.inner_text("#drafts-about")
        assert "suffix is" in page.inner_text("#drafts-decisions")
