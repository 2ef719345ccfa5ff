"""A scenario of the router: its settings and a list of operations. Both are plain data (JSON), made from a seed.

| operation                | effect                                                                        |
|--------------------------|-------------------------------------------------------------------------------|
| ["send", {...}]          | a client sends a request                                                      |
| ["sleep", seconds]       | let time pass                                                                 |
| ["faults", {...}]        | set the probability of each fault                                             |
| ["kill", i, seconds]     | worker i dies, and starts after so many seconds with an empty cache           |
| ["freeze", i, seconds]   | worker i stops for so many seconds, and then continues                        |
| ["remove", i, seconds]   | worker i is removed from the router, and is added again after so many seconds |
| ["evict", i]             | worker i evicts all its blocks                                                |
"""

from __future__ import annotations

import random
from typing import Any

from .scenario import Operation, Scenario
from .stand_in_worker import FAULTS, TICK

__all__ = ["make_router_scenario"]

IN_ANSWERS = ("reset", "cut", "stall", "engine_died", "slow")
"""Faults that can happen several times in one answer."""


def make_router_scenario(seed: int, steps: int) -> Scenario:
    """Make a scenario of `steps` operations."""
    chance = random.Random(f"router scenario {seed}")
    settings = _settings(chance)
    operations: list[Operation] = []
    while len(operations) < steps:
        draw, worker = chance.random(), chance.randrange(settings["workers"])
        seconds = chance.choice((1, 5, 16, 60, 300)) * TICK
        if draw < 0.5:
            operations += [["send", _request(chance)] for _ in range(chance.choice((1, 1, 2, 6)))]
        elif draw < 0.78:
            operations.append(["sleep", chance.choice((1, 2, 3, 8, 40, 160)) * TICK])
        elif draw < 0.86:
            operations.append(["faults", _faults(chance)])
        elif draw < 0.91:
            operations.append(["kill", worker, seconds])
        elif draw < 0.95:
            operations.append(["freeze", worker, seconds])
        elif draw < 0.97:
            operations.append(["remove", worker, seconds])
        else:
            operations.append(["evict", worker])
    return Scenario(seed, settings, operations, "router")


def _settings(chance: random.Random) -> dict[str, Any]:
    workers = chance.choice((1, 2, 3, 4))
    return {
        "workers": workers,
        "foreign": [chance.random() < 0.15 for _ in range(workers)],
        "capacity": chance.choice((4, 12, 60)),
        "inflight": chance.choice((1, 1, 2, 8)),
        "queue": chance.choice((1, 4, 100)),
        "attempts": chance.choice((1, 2, 4, 4)),
        "deadline": chance.choice((5, 20, 60)),
        "silent": chance.choice((2, 10)),
        "wait": chance.choice((0, 3, 10)),
        "route": chance.choice(("kv", "kv", "kv", "round-robin")),
    }


def _request(chance: random.Random) -> dict[str, Any]:
    request: dict[str, Any] = {
        "stem": [chance.randrange(4), chance.choice((0, 16, 40, 64))],
        "own": [chance.randrange(12), chance.choice((1, 16, 30))],
        "max_tokens": chance.choice((1, 3, 8, 20)),
    }
    if chance.random() < 0.75:
        request["stream"] = True
    if chance.random() < 0.5:
        request["tenant"] = chance.choice("abc")
    if chance.random() < 0.3:
        request["session"] = chance.choice("xyz")
    if chance.random() < 0.2:
        request["disconnect"] = chance.choice((0, 1, 2, 5, 20, 60)) * TICK
    if chance.random() < 0.25:
        request["slow"] = chance.choice((1, 4, 20)) * TICK
    return request


def _faults(chance: random.Random) -> dict[str, float]:
    if chance.random() < 0.3:
        return {}
    rates = {}
    for name in chance.sample(sorted(FAULTS), chance.choice((1, 2, 4, 8))):
        rates[name] = chance.choice((0.02, 0.1) if name in IN_ANSWERS else (0.05, 0.3, 1.0))
    return rates
