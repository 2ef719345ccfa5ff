"""The script that trains an EAGLE-3 head, run for a few steps: what it writes loads, and the loss has fallen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "train_head.py"


@pytest.mark.slow
def test_a_short_training_learns(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--out",
            str(tmp_path),
            "--seconds",
            "800",
            "--steps",
            "12",
            "--tokens",
            "256",
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    losses = [float(found) for found in re.findall(r"%: ([\d.]+)", ran.stderr)]
    assert losses[-1] < losses[0] - 0.5
    measured = json.loads(ran.stdout.splitlines()[-1])
    assert len(measured["by_position"]) == 4
    assert measured["tokens_a_row"] >= 1
