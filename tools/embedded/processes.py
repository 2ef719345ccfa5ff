"""Trainings side by side: a process each, bounded in time, the draft's second phase as soon as its teacher is ready.

Knows processes and plans, nothing of what they compute.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from .training import Plan

__all__ = ["run"]

GRACE = 120.0
"""A process may take so much longer than its seconds (loading, the last measure) before it is told to stop."""
PATIENCE = 30.0
"""And so long to save what it has, before it is ended."""


def run(plans: Mapping[str, Plan], after: Mapping[str, set[str]]) -> set[str]:
    """Run every plan, each in a process that is started when those in `after` have ended well; the names of those that
    failed or never began. Told to stop (SIGTERM, SIGINT), it tells them all."""
    waiting = dict(plans)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    done: set[str] = set()
    failed: set[str] = set()

    def stop(_number: int, _frame: FrameType | None) -> None:
        waiting.clear()
        for process, _ in running.values():
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while waiting or running:
            for name in list(waiting):
                needed = after.get(name, set()) & set(plans)
                if needed & failed:
                    failed.add(name)
                    del waiting[name]
                elif needed <= done:
                    running[name] = _start(waiting.pop(name)), time.monotonic()
            for name, (process, began) in list(running.items()):
                if process.poll() is None:
                    _bound(process, time.monotonic() - began - plans[name].seconds)
                    continue
                del running[name]
                (failed if process.returncode else done).add(name)
            time.sleep(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return set(plans) - done


def _start(plan: Plan) -> subprocess.Popen[bytes]:
    script = Path(__file__).resolve().parent.parent / "train_embedded.py"
    return subprocess.Popen([sys.executable, str(script), "one", json.dumps(asdict(plan))])


def _bound(process: subprocess.Popen[bytes], over: float) -> None:
    if over > GRACE + PATIENCE:
        process.kill()
    elif over > GRACE:
        process.terminate()
