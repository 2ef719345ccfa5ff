"""The Grafana dashboard loads, and every query names a served metric."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.running import Running

promql = pytest.importorskip(
    "promql_parser", reason="queries are read with the package promql-parser (extra dev)"
)

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "src" / "kvloom" / "serve" / "grafana.json"
PROMETHEUS = os.environ.get("KVLOOM_PROMETHEUS") or shutil.which("prometheus")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def asked(board: dict[str, Any]) -> list[str]:
    """Queries as Grafana sends them, its variables filled in."""
    return [query.replace("$__rate_interval", "10s").replace("$instance", ".*") for query in queries(board)]


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """The series that a query names, and the labels that it wants of them."""
    found: list[Any] = []

    def note(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        return True

    promql.parse(query)
    for side in re.split(
        r" / (?:ignoring\(\w+\) group_left )?", query
    ):  # each side groups by labels of its own
        found.clear()
        promql.walk(promql.parse(side), note)
        grouped = {label.strip() for part in re.findall(r"by \(([^)]*)\)", side) for label in part.split(",")}
        for one in found:
            yield one.name, grouped | set(re.findall(r"(\w+)=", str(one.matchers)))


def test_the_file_equals_the_tools_output(board: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("grafana_tool", ROOT / "tools" / "grafana.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    assert board == tool.dashboard(), "run `python tools/grafana.py`"


def test_the_dashboard_has_grafanas_required_fields(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 36
    assert 8 <= len(board["uid"]) <= 40
    assert board["title"]
    assert {one["name"] for one in board["templating"]["list"]} == {"datasource", "instance"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        places |= cells
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"


def test_grafanas_models_parse_it_without_loss(board: dict[str, Any]) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's models come with the extra dev")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    def contained(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return all(key in whole and contained(value, whole[key]) for key, value in part.items())
        if isinstance(part, list):
            return len(part) == len(whole) and all(map(contained, part, whole))
        return bool(part == whole)

    assert contained(board, again)


def test_every_query_names_series_and_labels_that_are_served(board: dict[str, Any], server: Running) -> None:
    """Of what no sample can be had here (tiers, tenants) the family must be there."""
    server.complete(prompt="something", max_tokens=2)
    text = server.send("GET", "/metrics")[2]
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        kind = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + end for end in kind}
        for sample in family.samples:
            labels.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    assert len(queries(board)) > 40
    for query in asked(board):
        for name, wanted in selectors(query):
            assert name in names, f"{name} is not served: {query}"
            assert name not in labels or wanted <= labels[name], query


@pytest.mark.server
@pytest.mark.skipif(
    PROMETHEUS is None, reason="no Prometheus here: install it, or name its program in KVLOOM_PROMETHEUS"
)
def test_a_real_prometheus_answers_every_query(
    board: dict[str, Any], server: Running, tmp_path: Path
) -> None:
    place = urlsplit(server.url).netloc
    job = f'{{job_name: kvloom, scrape_interval: 1s, static_configs: [{{targets: ["{place}"]}}]}}'
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n  - {job}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(query: str) -> list[Any]:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}", timeout=10) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success", query
        return list(told["data"]["result"])

    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            server.complete(prompt="again and again", max_tokens=3)
            try:
                if ask('count_over_time(kvloom_engine_up{job="kvloom"}[1m]) > 5'):
                    break
            except OSError:
                pass
            time.sleep(0.5)
        empty = [query for query in asked(board) if not ask(query)]
    finally:
        process.terminate()
        process.wait(20)
    assert not [query for query in empty if "kvloom_tier_" not in query or "kvloom_tier_hit" in query]
