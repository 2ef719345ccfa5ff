"""Run the tests that need a GPU, many processes at once: `python tools/gpu_tests.py [--jobs N] [--seconds S] [FILE ...]`.

Most of such a test's time is compiling, on one core. Files are cut into parts of a few tests, those that take longest first; tests
that look at the whole device's memory run by themselves at the end. Needs pytest alone, and no kvloom installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).parent.parent
ALONE = ("tests/kernels/test_memory.py", "tests/engine/test_sizing.py")
SIZES = {"tests/models": 4, "tests/engine": 4, "tests/kernels": 25}
"""Tests of a part, by folder."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short")
OUTCOMES = {
    "passed": "passed", "xfailed": "passed", "skipped": "skipped",
    "failed": "failed", "xpassed": "failed", "error": "failed", "errors": "failed",
}  # fmt: skip
Part = tuple[str, list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all ran and none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files (default: all that know a GPU)")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--seconds", type=float, default=1800, help="what has not ended by then is ended")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.jobs) as pool:
        named = args.files or _known()
        collected = list(pool.map(_collect, named))
        parts = [part for found in collected for part in found if part[0] not in ALONE]
        done = list(pool.map(lambda part: _run(part, deadline), parts))
    done += [_run(part, deadline) for found in collected for part in found if part[0] in ALONE]
    total: Counter[str] = sum(done, Counter())
    print(", ".join(f"{total[name]} {name}" for name in ("passed", "failed", "skipped")))
    empty = [file for file, found in zip(named, collected, strict=True) if not found]
    if empty:
        print(f"nothing to run in: {' '.join(empty)}")
    return int(bool(total["failed"] or empty))


def _known() -> list[str]:
    """Test files, those first whose tests take longest."""
    found = [path for folder in SIZES for path in (ROOT / folder).glob("test_*_gpu.py")]
    found += sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [
        *(str(path.relative_to(ROOT)) for path in found if str(path.relative_to(ROOT)) not in ALONE),
        *ALONE,
    ]


def _collect(file: str) -> list[Part]:
    told = _pytest([file, "--collect-only"], 300.0)
    tests = [f"{file}::{name}" for name in re.findall(r"^[^ :]+\.py::(.+)$", told, re.MULTILINE)]
    size = next((count for folder, count in SIZES.items() if file.startswith(folder)), 25)
    return [(file, tests[at : at + size]) for at in range(0, len(tests), size)]


def _run(part: Part, deadline: float) -> Counter[str]:
    """Run a part's tests; how many passed, failed (those that did not run among them) and were skipped."""
    (file, tests), began = part, time.monotonic()
    told = _pytest(tests, deadline - began)
    last = told.strip().rpartition("\n")[2]
    counts: Counter[str] = Counter()
    for count, name in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0]):
        counts[OUTCOMES.get(name, "")] += int(count)
    counts["failed"] += max(0, len(tests) - counts["passed"] - counts["failed"] - counts["skipped"])
    print(f"{time.monotonic() - began:6.1f} s  {file}: {last}", flush=True)
    if counts["failed"]:
        print(told[-6000:], flush=True)
    return counts


def _pytest(arguments: list[str], seconds: float) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*PYTEST, *arguments], cwd=ROOT, env=environment, timeout=max(1.0, seconds), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode()}\nended after {seconds:.0f} s"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
