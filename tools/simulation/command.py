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
from .router_scenario import make_router_scenario
from .router_world import RouterOutcome, run_router_scenario
from .scenario import Scenario, make_scenario
from .shrink import shrink

__all__ = ["main", "run_scenario"]

MAKERS = {"engine": make_scenario, "router": make_router_scenario}
"""For each world, the function that makes a scenario from a seed."""


def main() -> int:
    """Run the command. Return 1 if a scenario failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument(
        "--world",
        choices=sorted(MAKERS),
        action="append",
        help="what to simulate; repeatable (default: both)",
    )
    parser.add_argument("--seeds", type=int, default=50, help="number of scenarios (default %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=120,
        help="length of a scenario: engine steps without its drain, or operations of a router (default %(default)s)",
    )
    parser.add_argument("--seconds", type=float, help="start no further scenario of a world after this time")
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
        print(json.dumps(asdict(run_scenario(scenario))))
        return 0
    return _run_seeds(given)


def run_scenario(scenario: Scenario) -> Outcome | RouterOutcome:
    """Run a scenario in its world."""
    return run_router_scenario(scenario) if scenario.world == "router" else run_engine_scenario(scenario)


def _run_seeds(given: argparse.Namespace) -> int:
    """Run the seeds in each world, and print a summary. Return 1 if a scenario failed."""
    summaries = {world: _run_world(given, world) for world in given.world or MAKERS}
    if given.json:
        print(json.dumps(summaries))
    return 1 if any(summary["failures"] for summary in summaries.values()) else 0


def _run_world(given: argparse.Namespace, world: str) -> dict[str, Any]:
    began, failures = time.monotonic(), list[dict[str, Any]]()
    total: dict[str, Any] = {}
    count = 0
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        if given.seconds is not None and time.monotonic() - began > given.seconds:
            break
        scenario = MAKERS[world](seed, given.steps)
        count += 1
        try:
            found = run_scenario(scenario)
        except Exception as error:  # noqa: BLE001  every exception is a failure
            failures.append(_report(given, scenario, error))
            if not given.keep_going:
                break
            continue
        _add(total, asdict(found))
    seconds = time.monotonic() - began
    if not given.json:
        print(f"{world}: {count} scenarios in {seconds:.0f} s, {len(failures)} failed")
        for name, value in total.items():
            if isinstance(value, dict):
                print(f"  {name:26} {sum(value.values()):>12,}")
                for part, number in sorted(value.items()):
                    print(f"    {part:24} {number:>12,}")
            else:
                print(f"  {name.replace('_', ' '):26} {round(value):>12,}")
    return {"scenarios": count, "seconds": round(seconds, 1), "failures": failures, **total}


def _add(total: dict[str, Any], found: dict[str, Any]) -> None:
    """Add the numbers of an outcome to `total`."""
    for name, value in found.items():
        if isinstance(value, dict):
            total[name] = dict(Counter(total.get(name, {})) + Counter(value))
        elif not isinstance(value, str):
            total[name] = total.get(name, 0) + value


def _report(given: argparse.Namespace, scenario: Scenario, error: Exception) -> dict[str, Any]:
    """Shrink a failing scenario, store it in a file, and print how to run it again."""
    print(f"{scenario.world}: seed {scenario.seed} failed: {type(error).__name__}: {error}", file=sys.stderr)
    traceback.print_exception(error, limit=-4, file=sys.stderr)
    small = shrink(run_scenario, scenario, given.shrink_seconds)
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"{scenario.world}-seed-{scenario.seed}.json"
    path.write_text(json.dumps(small.to_json(), indent=1))
    print(
        f"shrunk from {len(scenario.operations)} to {len(small.operations)} operations: "
        f"python -m tools.simulation --replay {path}",
        file=sys.stderr,
    )
    return {"seed": scenario.seed, "error": f"{type(error).__name__}: {error}", "replay": str(path)}
