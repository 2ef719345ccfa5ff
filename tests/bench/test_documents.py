"""`kvloom bench documents` on the embedded model, with few and short prompts."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import documents


@pytest.mark.slow
def test_quality_and_speed_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--cases 1 --documents 2 --tokens 64 --question 8 --shares 0 0.5 1 --threads 1 --pool 32MiB --json"
    )
    assert documents.main(asked.split()) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(row["share"], row["rule"]): row for row in report["rows"]}
    assert set(rows) == {(0, "first"), *((0.5, rule) for rule in documents.RULES), (1, "first")}
    assert rows[1, "first"]["kl"] == pytest.approx(0, abs=1e-4)
    assert rows[1, "first"]["same"] == 1
    assert rows[0, "first"]["kl"] > 1e-4
    assert rows[0.5, "first"]["seconds"] > 0
    assert 0 <= report["answers_without_documents"] < rows[1, "first"]["answers"] <= 1
    assert documents.main(["--shares", "0", "--documents", "2", "--tokens", "64", "no-such-model"]) == 2
