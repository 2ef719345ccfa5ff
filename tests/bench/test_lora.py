"""`kvloom bench lora` on a tiny model."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import lora


@pytest.mark.slow
def test_every_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--batches 1,4 --prompt 20 --tokens 8 --rounds 1 --pool 64MiB --device cpu --rank 4 --json"
    assert lora.main(asked.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["streams"], row["case"]) for row in rows] == [
        (streams, case) for streams in (1, 4) for case in lora.CASES
    ]
    assert all(row["prompt"] > 0 and row["decode"] > 0 for row in rows)
    assert [row["decode_ratio"] for row in rows if row["case"] == "base"] == [1, 1]
