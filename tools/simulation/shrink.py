"""Shrinks a failing scenario: removes operations and settings while the same kind of failure remains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .scenario import Operation, Scenario

__all__ = ["failure_of", "shrink"]

Run = Callable[[Scenario], Any]
SIMPLEST: dict[str, Any] = {
    "tenants": [],
    "speculate": "off",
    "ahead": False,
    "copy_delay": 0.0,
    "compression": "none",
    "checkpoint_every": 0,
    "policy": "lru",
    "load": "always",
    "admission": True,
    "tiers": [],
    "block_tokens": 16,
    "layers": "full",
    "foreign": [False] * 4,
    "capacity": 60,
    "inflight": 8,
    "queue": 100,
    "attempts": 4,
    "deadline": 60,
    "silent": 10,
    "wait": 10,
    "route": "kv",
}
"""The simplest values of settings. A scenario has the settings of its world only."""


def failure_of(run: Run, scenario: Scenario) -> str | None:
    """Run a scenario. Return the kind of its failure, or None if it succeeds. Digits are not part of the kind."""
    try:
        run(scenario)
    except Exception as error:  # noqa: BLE001  every exception is a failure
        text = "".join(letter for letter in str(error) if not letter.isdigit())
        return f"{type(error).__name__}: {text[:40]}"
    return None


def shrink(run: Run, scenario: Scenario, seconds: float = 120.0) -> Scenario:
    """Return a smaller scenario with the same kind of failure. Stops after `seconds`."""
    kind = failure_of(run, scenario)
    if kind is None:
        return scenario
    end = time.monotonic() + seconds

    def fails(candidate: Scenario) -> bool:
        return time.monotonic() < end and failure_of(run, candidate) == kind

    scenario = _fewer_operations(scenario, fails)
    for name, value in SIMPLEST.items():
        if name in scenario.settings and scenario.settings[name] != value:
            simpler = replace(scenario, settings={**scenario.settings, name: value})
            if fails(simpler):
                scenario = simpler
    return _fewer_operations(_smaller_operations(scenario, fails), fails)


def _fewer_operations(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Remove operations in parts of decreasing size."""
    size = max(1, len(scenario.operations) // 2)
    while True:
        at = 0
        while at < len(scenario.operations):
            rest = scenario.operations[:at] + scenario.operations[at + size :]
            if fails(scenario.with_operations(rest)):
                scenario = scenario.with_operations(rest)
            else:
                at += size
        if size == 1:
            return scenario
        size = max(1, size // 2)


def _smaller_operations(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Remove optional fields of requests, and faults one by one."""
    for number, operation in enumerate(scenario.operations):
        if operation[0] not in ("add", "send", "faults"):
            continue
        for name in list(operation[1]):
            if name in ("stem", "own", "max_tokens"):
                continue
            smaller: Operation = [operation[0], {k: v for k, v in operation[1].items() if k != name}]
            changed = [*scenario.operations[:number], smaller, *scenario.operations[number + 1 :]]
            if fails(scenario.with_operations(changed)):
                scenario, operation = scenario.with_operations(changed), smaller
    return scenario
