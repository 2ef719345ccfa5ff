"""The comparison with Dynamo's router: both simulators agree on single requests, and kvloom's router is ahead."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVLOOM_DYNAMO_PYTHON", ROOT / "build/dynamo/bin/python"))


def has_simulator() -> bool:
    command = [str(PYTHON), "-c", "import dynamo.replay"]
    return PYTHON.exists() and not subprocess.run(command, capture_output=True, check=False).returncode


def conversations(path: Path) -> Path:
    """Write 23 conversations of 6 turns, interleaved. Each turn repeats the turns before."""
    with path.open("w") as file:
        for turn in range(6):
            for chat in range(23):
                blocks = [1000 * chat + block for block in range(6 * (turn + 1))]
                request = {
                    "timestamp": 20_000 * turn + 400 * chat,
                    "input_length": 512 * len(blocks) - 100,
                    "output_length": 40,
                    "hash_ids": blocks,
                }
                file.write(json.dumps(request) + "\n")
    return path


@pytest.mark.slow
def test_both_simulators_agree_and_the_exit_status_names_the_winner(tmp_path: Path) -> None:
    if not has_simulator():
        pytest.skip("Dynamo's simulator is not installed: make build/dynamo/bin/python")
    trace = conversations(tmp_path / "trace.jsonl")
    command = [sys.executable, "tools/compare_dynamo.py", str(trace), "--dynamo", str(PYTHON)]
    ran = subprocess.run(
        [*command, "--workers", "4", "--setting", "300x1"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "largest difference: 0.0" in ran.stdout, ran.stderr
    rates = {
        name: float(rate)
        for name, rate in re.findall(r"((?:Dynamo|kvloom), (?:KV router|round robin)) +([\d.]+)%", ran.stdout)
    }
    assert len(rates) == 4
    assert rates["kvloom, KV router"] > 2 * rates["kvloom, round robin"]
    assert abs(rates["kvloom, round robin"] - rates["Dynamo, round robin"]) < 5
    is_ahead = "is ahead in every cell" in ran.stdout
    assert ran.returncode == (0 if is_ahead else 1)
