"""The Python that has another engine, for tests of its adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 600


@cache
def peer_python(peer: str, distribution: str) -> str | None:
    """A Python that has the engine: KVLOOM_{PEER}_PYTHON, this one, or that of `make test-{peer}`."""
    code = f"from importlib.metadata import version; version({distribution!r})"
    given = os.environ.get(f"KVLOOM_{peer.upper()}_PYTHON")
    for found in (given, sys.executable, str(ROOT / "build" / peer / "bin/python")):
        if found and Path(found).exists():
            done = subprocess.run([found, "-c", code], capture_output=True, timeout=120, check=False)
            if done.returncode == 0:
                return found
    return None


def run_peer(
    peer: str, distribution: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the Python that has the engine. Skips the test if there is none."""
    python = peer_python(peer, distribution)
    if python is None:
        pytest.skip(f"{distribution} is not installed: run `make test-{peer}`")
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


def run_units(peer: str, distribution: str, file: str) -> None:
    """Run a file of tests in the environment of the engine."""
    done = run_peer(peer, distribution, "-m", "pytest", "-q", "-p", "no:cacheprovider", file)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
