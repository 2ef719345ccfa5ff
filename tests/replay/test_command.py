"""`kvloom replay` as a user runs it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.replay import Recorder

ROWS = [
    {"timestamp": 1000 * i, "input_length": 1024, "output_length": 5, "hash_ids": ids}
    for i, ids in enumerate([[0, 1], [0, 1, 2], [9, 8], [0, 1, 2], [9, 8], [5, 6, 7]])
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))
    return str(path)


def test_json_has_a_row_per_policy_and_capacity(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--capacity",
        "3",
        "--capacity",
        "100%",
        "--policy",
        "ideal",
        "--policy",
        "lru",
        "--policy",
        "min",
    ]
    assert main(["replay", trace, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["capacity_blocks"]) for row in found] == [
        (policy, capacity) for capacity in (3, 8) for policy in ("ideal", "lru", "min")
    ]
    assert all(set(row) == {"policy", "capacity_blocks", "hit_rate", "evictions"} for row in found)
    assert found[0]["hit_rate"] == found[4]["hit_rate"] == 7 / 15
    assert found[1]["hit_rate"] < found[2]["hit_rate"]


def test_sizes_in_bytes_are_the_models(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--capacity", "320MiB", "--policy", "lru", "--model", "llama-3.1-8b", "--json"]
    assert main(["replay", trace, *asked]) == 0
    assert json.loads(capsys.readouterr().out)[0]["capacity_blocks"] == 5


def test_each_tier_rule_gets_its_row(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--capacity", "2", "--tier", "host=8", "--policy", "lru", "--json"]
    rules = ["--tier-rule", "exclusive", "--tier-rule", "through"]
    assert main(["replay", trace, *asked, *rules]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tier_rule"] for row in rows] == ["exclusive", "through"]


def test_tiers_and_cost_add_their_parts(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--capacity", "2", "--tier", "host=8", "--policy", "lru", "--cost"]
    assert main(["replay", trace, *asked, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert [tier["tier"] for tier in row["tiers"]] == ["device", "host"]
    assert row["hit_rate"] == pytest.approx(sum(tier["hit_rate"] for tier in row["tiers"]))
    assert row["tiers"][1]["resident_bytes"] == 8 * 512 * 131072
    assert row["cost"]["mean_ttft"] > 0
    assert main(["replay", trace, *asked]) == 0
    assert "  host" in capsys.readouterr().out


def test_tables_describe_the_traffic(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace]) == 0
    out = capsys.readouterr().out
    assert "6 requests in 5 s, 15 blocks of 512 tokens looked up, 8 of them distinct" in out
    assert all(policy in out for policy in ("ideal", "min", "lru", "adaptive"))
    assert "46.67%" in out


def test_size_reports_as_text_and_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--size", "--target", "0.4"]) == 0
    assert "lru reaches 40.00% (ideal 46.67%) with" in capsys.readouterr().out
    assert main(["replay", trace, "--size", "--target", "0.9", "--policy", "adaptive"]) == 0
    assert "adaptive does not reach 90.00%; the ideal is 46.67%" in capsys.readouterr().out
    asked = ["--size", "--target", "0.4", "--capacity", "2", "--tier", "host=50", "--policy", "lru", "--json"]
    assert main(["replay", trace, *asked]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [tier["tier"] for tier in found["tiers"]] == ["device", "host"]


def test_plot_writes_an_image(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["replay", trace, "--policy", "lru", "--policy", "ideal", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert f"wrote {path}" in shown.err
    assert shown.out.count("lru") >= 4, "with --plot the sizes are chosen"
    assert main(["replay", trace, "--plot", str(tmp_path / "no" / "out.png")]) == 2
    assert "cannot write the plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "belady"], "unknown policy 'belady'"),
        (["--capacity", "0"], "capacity '0' is 0 blocks"),
        (["--capacity", "lots"], "capacity 'lots': use blocks"),
        (["--capacity", "1KiB"], "is 0 blocks of 67108864 bytes"),
        (["--tier", "host"], "tier 'host': use name and size"),
        (["--tier-rule", "back"], "--tier-rule needs --tier NAME=C"),
        (["--tier", "tape=5", "--cost"], "no read rate for tier 'tape'"),
        (["--size", "--target", "7"], "--target: 7 is out of range"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--spread", "-1"], "--spread: -1 is out of range"),
        (["--cost", "--tflops", "0"], "--tflops: 0 is out of range"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(
    trace: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("kvloom replay: ")
    assert captured.out == ""


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err


def test_a_terminal_shows_progress(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["replay", trace, "--policy", "lru"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["replay", trace, "--policy", "lru", "--capacity", "4"]) == 0
    shown = capsys.readouterr().err
    assert f"reading {trace}" in shown
    assert "lru at 4 blocks: 6 of 6 requests (100%)" in shown


def test_one_more_gigabyte_adds_at_most_what_is_missing(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, "--size", "--target", "0.2", "--model", "kvloom-llama", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["curve"][0]["next_gigabyte"] > 0
    for point in [*found["curve"], {"hit_rate": found["target"], **found}]:
        assert point["next_gigabyte"] <= found["ideal"] - point["hit_rate"] + 1e-9
    assert main(["replay", trace, "--size", "--target", "0.2"]) == 0
    gains = [float(word[1:]) for word in capsys.readouterr().out.split() if word.startswith("+")]
    assert gains
    assert max(gains) <= 46.67


def test_a_recording_sizes_its_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recorded(name: str, model: str, per_token: int | None) -> str:
        path = tmp_path / f"{name}.jsonl"
        with Recorder(path, block_tokens=16, model=model) as recorder:
            recorder.bytes_per_token = per_token
            recorder.add(0.0, list(range(64)), 64)
            recorder.add(1.0, list(range(64)), 64)
        return str(path)

    def blocks(*arguments: str) -> int:
        assert main(["replay", *arguments, "--capacity", "1MiB", "--policy", "lru", "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)[0]["capacity_blocks"])

    stated = recorded("stated", "any", 1024)
    assert blocks(stated) == 64
    assert blocks(stated, "--model", "llama-3.2-1b") == 2
    assert blocks(recorded("named", "llama-3.2-1b", None)) == 2
    unknown = recorded("unknown", "any", None)
    assert main(["replay", unknown, "--capacity", "2MiB", "--policy", "lru"]) == 0
    assert "the recording's model 'any' is not known here" in capsys.readouterr().err
