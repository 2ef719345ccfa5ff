"""The benchmark runs, measures what it says, and reports without its peers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvloom.bench import index, index_work


@pytest.mark.parametrize("layout", index_work.LAYOUTS)
def test_a_request_hits_cached_tokens(layout: str) -> None:
    figures = index_work.life(layout, tokens=2048, cached=1024, repeats=5)
    assert figures["hit"] == 1024
    assert figures["total"] >= figures["match"] > 0
    assert index_work.life(layout, tokens=2048, evicting=True, repeats=5)["hit"] == 0


def test_bookkeeping_stays_under_200_bytes_a_block() -> None:
    assert index_work.pool_scale(20_000, repeats=5)["bytes_per_block"] < 200


def test_ratios_compare_like_with_like() -> None:
    own = {
        "life": {layout: {"total": 100.0} for layout in index_work.LAYOUTS},
        "life_named": {layout: {"total": 200.0} for layout in index_work.LAYOUTS},
        "life_evicting": {layout: {"total": 50.0} for layout in index_work.LAYOUTS},
        "decode_step": {layout: {"total": 10.0} for layout in index_work.LAYOUTS},
        "tree": {"match": 1.0, "insert": 2.0, "evict": 4.0},
    }
    peers = {"vllm_life": {"full": {"total": 1000.0}}, "sglang_tree": {"rust": {"match": 3.0}}}
    rows = {(row["work"], row["peer"]): row for row in index.compare(own, peers)}
    assert rows["request of 8,192 tokens, half cached, full", "vLLM"]["ratio"] == 10
    assert rows["… with events published, full", "vLLM"]["ratio"] == 5
    assert rows["decode step of 256 sequences, full", "vLLM"]["ratio"] is None
    assert rows["prefix tree: match", "SGLang rust"]["ratio"] == 3


def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "kvloom.cli", "bench", "index", "--quick", "--no-peers", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(done.stdout)
    works = {row["work"] for row in report["comparison"]}
    assert works >= {"prefix tree: match", "decode step of 256 sequences, full"}
    assert "request and decode step" in done.stderr  # progress


@pytest.mark.parametrize("peers", [{}, {"sglang_tree": {"rust": {"match": 3.0}}}])
def test_the_table_has_columns_for_peers_only_if_one_was_measured(
    peers: dict[str, dict[str, dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    each = {layout: {"total": 100.0} for layout in index_work.LAYOUTS}
    phases = dict.fromkeys(("match", "allocate", "publish", "release", "total", "bytes_per_block"), 1.0)
    own = {
        **dict.fromkeys(("life", "life_named", "life_evicting", "decode_step"), each),
        "tree": {"match": 1.0, "insert": 2.0, "evict": 4.0},
        "pool": {"10000": phases, "100000": phases},
        "policies": {},
        "decode_scaling": {},
    }
    comparison, scale = index.compare(own, peers), index.scale_rows(own)
    index.render({"comparison": comparison, "scale": scale, "kvloom": own, "peers": peers})
    printed = capsys.readouterr().out
    assert ("time of the peer" in printed) == bool(peers)
    assert printed.count("prefix tree: match") == (2 if peers else 1)


def test_the_best_of_several_rounds_is_taken_figure_by_figure() -> None:
    rounds = [{"a": {"total": 3.0, "note": "x"}, "b": 1.0}, {"a": {"total": 2.0, "note": "x"}, "b": 4.0}]
    assert index.best(rounds) == {"a": {"total": 2.0, "note": "x"}, "b": 1.0}
