"""`kvloom bench offload` on a tiny model: every part reports figures, and tokens are the same with tiers."""

from __future__ import annotations

import json

import pytest

from kvloom import cli
from kvloom.bench import load_or_recompute, offload
from kvloom.bench.offload import main


@pytest.mark.slow
def test_every_part_reports_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_CONVERSATIONS", 8)
    given = ["--prompt", "128", "--pool", "8MiB", "--host", "32MiB", "--rounds", "1", "--works", "W3", "W6"]
    assert main([*given, "--scale", "0.03", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first = report["ttft"]
    assert first["cached_tokens"] == {"host": 127, "disk": 127}
    assert first["bytes"] > 0
    assert set(first["gb_per_s"]) == {"host", "disk"}
    assert first["auto"]["relative"] == first["auto"]["auto"] / first["auto"]["computed"]
    assert "load_or_recompute" not in report
    assert all(row["same_tokens"] for row in report["workloads"])
    for row in report["workloads"]:
        (off,), (on,) = row["rounds"]["off"], row["rounds"]["on"]
        assert row["ratio"] == on / off
        assert row["drained_s"] >= 0
    assert 0.5 < report["hits"]["hit_share"]
    assert report["hits"]["small_pool"] < 0.5 * report["hits"]["pool"]
    assert [(row["tier"], row["evicted"] > 0) for row in report["offload_cost"]] == [
        ("not full", False),
        ("full", True),
    ]
    for row in report["offload_cost"]:
        assert row["pages"] == 4 * 40  # limited by the pool
        assert all(each > 0 for each in row["us_per_page"].values())
    for place in ("host", "disk"):
        assert report["layers"][place]["first"] < report["layers"][place]["whole"]


@pytest.mark.parametrize("known", ["unknown", "slower"])
def test_steps_and_cached_tokens_add_up_to_the_prompt(known: str) -> None:
    (row,) = load_or_recompute.measure_load_or_recompute([0.5], [known], rounds=1)
    assert (
        row["computed_s"] >= load_or_recompute.SECONDS
    )  # simulated step times do not depend on this machine
    assert sum(row["steps"][0]) + row["cached"][0] == load_or_recompute.PROMPT
    assert row["relative"] == row["auto_s"] / row["computed_s"]


def test_invalid_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "offload", "--prompt", "3"]) == 2
    assert "--prompt: 3 is out of range; it must be 64" in capsys.readouterr().err
    assert cli.main(["bench", "offload", "--disk", "/x:lots"]) == 2
    assert "tier 'disk:/x:lots': size 'lots' is not understood" in capsys.readouterr().err


def test_the_former_name_reports_the_new_one_and_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "below", "--prompt", "3"]) == 2
    shown = capsys.readouterr().err
    assert "kvloom bench below is now `kvloom bench offload`" in shown
    assert "kvloom bench offload: --prompt: 3 is out of range" in shown
