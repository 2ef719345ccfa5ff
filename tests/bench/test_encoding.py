"""`kvloom bench encoding` with tiny sizes: both fleets answer, and the encode worker encodes."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import encoding


@pytest.mark.slow
def test_both_fleets_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("PIL")
    sizes = ["--streams", "1", "--images", "2", "--turns", "1", "--layers", "2", "--pixels", "56"]
    assert encoding.main([*sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("mixed", "split"):
        assert found[name]["tokens"] > 0
        assert 0 < found[name]["p50_tbt_ms"] <= found[name]["p99_tbt_ms"] <= found[name]["max_tbt_ms"]
        assert found[name]["mean_ttft_ms"] > 0
    assert found["encoded_images"] + found["fallbacks"] >= 4
    with pytest.raises(ValueError, match="multiple of 14"):
        encoding.main(["--pixels", "15"])
