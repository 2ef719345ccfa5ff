"""`kvloom bench disaggregation` with tiny sizes: both fleets answer, and pages are pulled."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import disaggregation


def test_times_between_tokens_count_only_inside_the_load() -> None:
    load = disaggregation._Load(None, "", "", [[0.0, 1.0, 1.5, 2.5, 9.0], [1.2]], [0.4])
    found = disaggregation._summary(load, 1.1, 3.0)
    assert (found["tokens"], found["max_tbt_ms"], found["mean_tbt_ms"]) == (2, 1000.0, 750.0)
    assert found["mean_ttft_ms"] == 400.0
    with pytest.raises(RuntimeError, match="no tokens"):
        disaggregation._summary(load, 3.0, 4.0)


@pytest.mark.slow
def test_both_fleets_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    sizes = ["--streams", "1", "--prompts", "2", "--tokens", "600", "--chunk", "128", "--rounds", "1"]
    assert disaggregation.main([*sizes, "--pin", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("mixed", "split"):
        assert found[name]["tokens"] > 0
        assert 0 < found[name]["p50_tbt_ms"] <= found[name]["p99_tbt_ms"] <= found[name]["max_tbt_ms"]
        assert found[name]["mean_ttft_ms"] > 0
    assert found["p99_ratio"] > 0
    (hand_over,) = found["hand_over"]
    assert hand_over["cached_tokens"] >= 512
    assert hand_over["exposed_ms"] >= 0
