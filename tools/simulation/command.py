"""`python -m tools.simulation`: runs seeds until one fails, then shrinks it. `--replay FILE` runs a scenario again.

The command starts itself again with PYTHONHASHSEED=0, because the order of sets of bytes must not change between
runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .engine_world import Outcome, run_engine_scenario
from .scenario import Scenario, make_scenario
from .shrink import shrink

__all__ = ["main"]


def main() -> int:
    """Run the command. Return 1 if a scenario failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="number of scenarios (default %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        help="engine steps of a scenario, without its drain (default %(default)s)",
    )
    parser.add_argument("--seconds", type=float, help="start no further scenario after this time")
    parser.add_argument(
        "--shrink-seconds", type=float, default=120, help="time to shrink a failure (default 120)"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--replay", type=Path, help="run the scenario of a file instead")
    parser.add_argument(
        "--output", type=Path, default=Path("build/simulation"), help="folder of failing scenarios"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tools.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    logging.disable(logging.CRITICAL)  # faults are expected
    if given.replay is not None:
        scenario = Scenario.from_json(json.loads(given.replay.read_text()))
        print(json.dumps(asdict(run_engine_scenario(scenario))))
        return 0
    return _run_seeds(given)


def _run_seeds(given: argparse.Namespace) -> int:
    began, failures = time.monotonic(), list[dict[str, Any]]()
    total = Outcome()
    injected: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    count = 0
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        if given.seconds is not None and time.monotonic() - began > given.seconds:
            break
        scenario = make_scenario(seed, given.steps)
        count += 1
        try:
            found = run_engine_scenario(scenario)
        except Exception as error:  # noqa: BLE001  every exception is a failure
            failures.append(_report(given, scenario, error))
            if not given.keep_going:
                break
            continue
        for name in (
            "steps",
            "switches",
            "requests",
            "tokens",
            "virtual_seconds",
            "loaded_tokens",
            "preemptions",
            "restarts",
        ):
            setattr(total, name, getattr(total, name) + getattr(found, name))
        injected.update(found.injected)
        finished.update(found.finished)
    total.injected, total.finished = dict(sorted(injected.items())), dict(finished)
    seconds = time.monotonic() - began
    summary = {"scenarios": count, "seconds": round(seconds, 1), "failures": failures, **asdict(total)}
    if given.json:
        print(json.dumps(summary))
    else:
        print(f"{count} scenarios in {seconds:.0f} s, {len(failures)} failed")
        rows = {
            "engine steps": total.steps,
            "thread switches": total.switches,
            "virtual seconds": round(total.virtual_seconds),
            "requests": total.requests,
            "tokens": total.tokens,
            "tokens loaded from tiers": total.loaded_tokens,
            "preemptions": total.preemptions,
            "restarts": total.restarts,
            "injected faults": sum(injected.values()),
        }
        for name, value in rows.items():
            print(f"  {name:26} {value:>12,}")
        for name, value in total.injected.items():
            print(f"    {name:24} {value:>12,}")
    return 1 if failures else 0


def _report(given: argparse.Namespace, scenario: Scenario, error: Exception) -> dict[str, Any]:
    """Shrink a failing scenario, store it in a file, and print how to run it again."""
    print(f"seed {scenario.seed} failed: {type(error).__name__}: {error}", file=sys.stderr)
    traceback.print_exception(error, limit=-4, file=sys.stderr)
    small = shrink(run_engine_scenario, scenario, given.shrink_seconds)
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"seed-{scenario.seed}.json"
    path.write_text(json.dumps(small.to_json(), indent=1))
    print(
        f"shrunk from {len(scenario.operations)} to {len(small.operations)} operations: "
        f"python -m tools.simulation --replay {path}",
        file=sys.stderr,
    )
    return {"seed": scenario.seed, "error": f"{type(error).__name__}: {error}", "replay": str(path)}
