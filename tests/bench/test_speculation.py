"""`kvloom bench speculation` on tiny models."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import speculation


@pytest.mark.slow
def test_a_shape_with_drafts_of_known_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--shape tiny --batches 1,3 --tokens 24 --rounds 1 --pool 64MiB --device cpu --acceptance 1 --json"
    )
    assert speculation.main(asked.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["streams"], row["speculate"]) for row in rows] == [
        (streams, how) for streams in (1, 3) for how in ("always", "controller")
    ]
    for row in rows:
        assert row["plain"] > 0
        assert row["drafted"] > 0
    always = rows[0]
    assert always["acceptance"] == 1  # every draft token is correct
    assert always["tokens_per_row"] > 3


@pytest.mark.slow
def test_forced_outputs_and_a_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        speculation.main(["--tokens", "12", "--prompts", "1", "--rounds", "1", "--streams", "2", "--json"])
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"], row["streams"]) for row in rows] == [
        ("continue", 1), ("continue", 1), ("edit", 1), ("continue", 2), ("continue", 2)
    ]  # fmt: skip
    assert all(row["ratio"] > 0 for row in rows)
