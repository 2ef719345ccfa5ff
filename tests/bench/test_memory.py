"""`kvloom bench memory`: the memory of an idle model is used, within a bound that a busy machine meets."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("msgspec")

from kvloom.bench.memory import main


@pytest.mark.slow
def test_idle_memory_is_used_soon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "2", "--json", "--serve", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == 2
    assert 0 < found["median_s"] < 20
