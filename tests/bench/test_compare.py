"""`kvloom bench compare`: peers that are found and missing, rows of each part, and the chart."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from kvloom.arguments import interpreter
from kvloom.bench import compare
from kvloom.bench.chart import Bar, bar_chart
from kvloom.bench.compare import (
    PEERS,
    bars_of,
    bookkeeping_rows,
    engine_rows,
    find_peers,
    router_rows,
    tier_rows,
)
from kvloom.bench.router_index import compare_lookups, make_work

ENGINE = {
    "runners": {"kvloom": {"error": None}, "Hugging Face": {"error": None}, "vLLM": {"error": "no memory"}},
    "rows": [
        {
            "what": "alone",
            "size": "1 request",
            "runs": {"kvloom": {"seconds": 2.0}, "Hugging Face": {"seconds": 5.0}},
        },
        {"what": "long", "size": "16 requests", "runs": {"Hugging Face": {"seconds": 5.0}}},
    ],
}
INDEX = {
    "comparison": [
        {"work": "life", "peer": "vLLM", "kvloom_us": 10.0, "peer_us": 40.0, "ratio": 4.0},
        {"work": "tree", "peer": "SGLang", "kvloom_us": 10.0, "peer_us": None, "ratio": None},
    ]
}
TIERS = {
    "rows": [
        {
            "tier": "host",
            "verb": "write",
            "backend": "cpu",
            "ours": 8.0,
            "lmcache": 4.0,
            "times_lmcache": 2.0,
        },
        {"tier": "disk", "verb": "read", "backend": "", "ours": 8.0, "lmcache": None, "times_lmcache": None},
    ]
}


def test_rows_have_the_ratio_of_peer_to_kvloom(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"lookup_us": 20.0, "store_us": 0.5}, {"lookup_us": 30.0, "store_us": 0.25}
    rows = [*engine_rows(ENGINE), *bookkeeping_rows(INDEX), *tier_rows(TIERS), *router_rows("1", *figures)]
    assert [(row.part, row.peer, row.ratio) for row in rows] == [
        ("engine", "Hugging Face", 2.5),
        ("bookkeeping", "vLLM", 4.0),
        ("tiers", "LMCache cpu", 2.0),
        ("router", "Dynamo", 1.5),
        ("router", "Dynamo", 0.5),
    ]
    assert "vLLM failed: no memory" in capsys.readouterr().err
    assert bars_of(rows)[0].words == "2.50 times  (2 against 5 s)"


def test_missing_peers_are_listed_with_the_way_to_install_them() -> None:
    found, missing = find_peers(dict.fromkeys(PEERS, sys.executable))
    assert "hf" in found
    assert found.keys() | missing.keys() == PEERS.keys()
    assert all("make" in line or "pip" in line for line in missing.values())


def test_an_interpreter_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are looked for in another working directory."""
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert interpreter("bin/python") == str(link)
    found, missing = find_peers({"hf": interpreter("bin/python")})
    assert "hf" in found.keys() | missing.keys()
    with pytest.raises(ArgumentTypeError, match="no interpreter 'bin/nothing'"):
        interpreter("bin/nothing")


def test_the_chart_is_valid_and_readable_without_seeing_it() -> None:
    svg = bar_chart(
        "title <&>",
        "told",
        [Bar("a & b", "x", 2.0, "2 times"), Bar("a & b", "y", 1.0), Bar("c", "x", 0.5)],
        1.0,
    )
    root = ET.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{name}rect")
    widths = [float(box.attrib["width"]) for box in boxes]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert widths[1] == pytest.approx(2 * widths[2])
    assert boxes[0].attrib["fill"] == boxes[2].attrib["fill"] != boxes[1].attrib["fill"]
    told = root.find(f"{name}desc")
    assert told is not None
    assert "a & b: x 2 times" in str(told.text)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    with pytest.raises(ValueError, match="at least one bar"):
        bar_chart("t", "s", [])
    with pytest.raises(ValueError, match="not positive"):
        bar_chart("t", "s", [Bar("a", "x", 0.0)])


def test_the_command_runs_the_parts_whose_peers_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []

    def report(benchmark: str, arguments: list[str]) -> dict[str, Any]:
        asked.append((benchmark, arguments))
        return ENGINE

    monkeypatch.setattr(compare, "_report", report)
    monkeypatch.setattr(compare, "_has_package", lambda python, package: package == "transformers")
    chart = tmp_path / "chart.svg"
    assert compare.main(["--svg", str(chart), "--json", "--rounds", "2"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [row["peer"] for row in found["rows"]] == ["Hugging Face"]
    assert set(found["not_installed"]) == {"vllm", "sglang", "lmcache", "dynamo"}
    assert "SGLang is not installed: make build/sglang" in said.err
    assert "part tiers: none of its peers is installed" in said.err
    assert [benchmark for benchmark, _ in asked] == ["engine"]
    assert asked[0][1][-2:] == ["--peers", "hf"]
    assert ET.parse(chart).getroot().tag.endswith("svg")
    assert compare.main(["--svg", str(tmp_path / "none" / "x.svg")]) == 2

    def broken(found: dict[str, str], args: Any) -> list[compare.Comparison]:
        raise RuntimeError("no tree")

    monkeypatch.setattr(compare, "_has_package", lambda python, package: True)
    monkeypatch.setitem(compare.RUN, "bookkeeping", broken)
    assert compare.main(["--parts", "engine", "bookkeeping", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == found["rows"]
    assert "part bookkeeping failed: RuntimeError: no tree" in said.err


DYNAMO = """
import json
import sys


class Scores:
    def __init__(self, scores):
        self.scores = scores


class RadixTree:
    def __init__(self):
        self.blocks = {}

    def apply_event(self, worker, payload):
        for block in json.loads(payload)["data"]["stored"]["blocks"]:
            self.blocks.setdefault(block["tokens_hash"], set()).add(worker)

    def find_matches(self, sequence):
        scores = {}
        for block in sequence:
            for worker in self.blocks.get(block, ()):
                scores[worker, 0] = scores.get((worker, 0), 0) + 1
        return Scores(scores)
"""


def test_both_indexes_find_the_blocks_of_every_worker(tmp_path: Path) -> None:
    """A stand-in with Dynamo's interface. A wrong answer of either index is an error."""
    (tmp_path / "dynamo").mkdir()
    (tmp_path / "dynamo" / "_core.py").write_text(DYNAMO)
    python = tmp_path / "python"
    # -B: stored bytecode of the first stand-in would hide the second one, written within the same second.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -B "$@"\n')
    python.chmod(0o755)
    work = make_work(workers=3, blocks=20, prompts=2, lookups=4)
    ours, theirs = compare_lookups(work, str(python), rounds=1)
    assert ours.keys() == theirs.keys() == {"store_us", "lookup_us"}
    assert min(*ours.values(), *theirs.values()) > 0
    (tmp_path / "dynamo" / "_core.py").write_text(DYNAMO.replace("+ 1", "+ 2"))
    with pytest.raises(RuntimeError, match="Dynamo found"):
        compare_lookups(work, str(python), rounds=1)


@pytest.mark.slow
def test_a_small_comparison_with_hugging_face(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--parts", "engine", "--shape", "tiny", "--only", "W5", "--scale", "0.0625", "--rounds", "1"]
    assert compare.main([*small, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    ours = next(row for row in rows if row["peer"] == "Hugging Face")
    assert ours["ratio"] == pytest.approx(ours["theirs"] / ours["kvloom"])
