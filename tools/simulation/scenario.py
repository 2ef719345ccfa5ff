"""A scenario: the settings of an engine, and a list of operations. Both are plain data (JSON), made from a seed.

| operation             | effect                                                                           |
|-----------------------|----------------------------------------------------------------------------------|
| ["add", {...}]        | add a request                                                                    |
| ["steps", n]          | run n steps of the engine                                                        |
| ["cancel", i]         | cancel an unfinished request                                                     |
| ["faults", {...}]     | set the probability of each fault                                                |
| ["sleep", seconds]    | let time pass                                                                    |
| ["pin", i, seconds]   | pin the prompt of a request                                                      |
| ["session", verb, i]  | end or expect a session                                                          |
| ["restart", kind]     | "kill" the engine or "close" it, and open another one on the same disk and store |
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from .faults import NAMES
from .stand_in_model import LAYERS

__all__ = ["Operation", "Scenario", "make_scenario"]

Operation = list[Any]
STEMS = 5


@dataclass(frozen=True)
class Scenario:
    """A run of the simulation. `seed` decides the interleaving of threads, the delays and the faults. `world` is
    "engine" or "router"."""

    seed: int
    settings: dict[str, Any]
    operations: list[Operation]
    world: str = "engine"

    def with_operations(self, operations: list[Operation]) -> Scenario:
        return replace(self, operations=operations)

    def to_json(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "seed": self.seed,
            "settings": self.settings,
            "operations": self.operations,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Scenario:
        return cls(found["seed"], found["settings"], found["operations"], found.get("world", "engine"))


def make_scenario(seed: int, steps: int) -> Scenario:
    """Make a scenario of about `steps` engine steps."""
    chance = random.Random(f"scenario {seed}")
    settings = _settings(chance)
    operations: list[Operation] = []
    planned = count = 0
    while planned < steps:
        draw = chance.random()
        if draw < 0.42:
            for _ in range(chance.choice((1, 1, 1, 2, 6))):
                operations.append(["add", _request(chance, settings)])
                count += 1
        elif draw < 0.80:
            number = chance.choice((1, 1, 2, 3, 5, 10))
            operations.append(["steps", number])
            planned += number
        elif draw < 0.86:
            operations.append(["cancel", chance.randrange(8)])
        elif draw < 0.93:
            operations.append(["faults", _faults(chance)])
        elif draw < 0.96:
            operations.append(["sleep", round(10 ** chance.uniform(-3, 1.5), 4)])
        elif draw < 0.975:
            operations.append(["pin", chance.randrange(8), round(10 ** chance.uniform(-2, 1), 3)])
        elif draw < 0.993:
            operations.append(["session", chance.choice(("end", "expect")), chance.randrange(3)])
        else:
            operations.append(["restart", chance.choice(("kill", "close"))])
    return Scenario(seed, settings, operations)


def _settings(chance: random.Random) -> dict[str, Any]:
    tenants = chance.choice((0, 0, 2, 3))
    tiers = chance.choice(
        (
            [],
            ["host"],
            ["host", "disk"],
            ["host", "store"],
            ["host", "disk", "store"],
            ["disk"],
            ["store"],
            ["host", "disk"],
            ["host", "disk", "store"],
        )
    )
    return {
        "layers": chance.choice(sorted(LAYERS)),
        "block_tokens": chance.choice((16, 16, 16, 32)),
        "sequences": chance.choice((1.3, 2, 3, 5)),  # so many of the longest sequences fit into the pool
        "longest": chance.choice((96, 160, 240)),
        "max_running": chance.choice((2, 4, 8)),
        "token_budget": chance.choice((16, 32, 64, 128)),
        "ahead": chance.random() < 0.5,
        "speculate": chance.choice(("off", "off", "ngram", "suffix")),
        "checkpoint_every": chance.choice((0, 0, 32)),
        "policy": chance.choice(("lru", "lru", "adaptive", "learned")),
        "admission": chance.random() < 0.7,
        "tiers": tiers,
        "write": [chance.choice(("through", "second-use", "back")) for _ in range(3)],
        "host_blocks": chance.choice((8, 40, 200)),
        "load": chance.choice(("auto", "auto", "always", "never")),
        "copy_delay": chance.choice((0.0, 0.0005, 0.01, 0.2)),
        "compression": chance.choice(("none", "none", "lz4")),
        "tenants": [
            {
                "quota": chance.choice((None, None, 0.5)),
                "weight": chance.choice((0, 1, 2)),
                "firm": chance.random() < 0.5,
            }
            for _ in range(tenants)
        ],
    }


def _request(chance: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    longest = settings["longest"]
    answer = chance.choice((1, 2, 5, 12, 30))
    stem = chance.choice((0, 0, 16, 31, 32, 33, 48, 64, 100))
    own = chance.choice((1, 2, 7, 15, 16, 17, 40, 90))
    most = longest - answer
    stem = min(stem, most - 1)
    request: dict[str, Any] = {
        "stem": [chance.randrange(STEMS), stem],
        "own": [chance.randrange(12), max(1, min(own, most - stem))],
        "max_tokens": answer,
    }
    if settings["tenants"] and chance.random() < 0.9:
        request["tenant"] = chance.randrange(len(settings["tenants"]))
    if chance.random() < 0.15:
        request["priority"] = chance.randrange(-2, 3)
    if chance.random() < 0.1:
        request["n"] = chance.choice((2, 3))
    if chance.random() < 0.3:
        request["session"] = chance.randrange(3)
    if chance.random() < 0.06:
        request["read"] = False
    if chance.random() < 0.06:
        request["store"] = False
    if chance.random() < 0.5:
        request["ignore_eos"] = True
    if chance.random() < 0.15:  # a further turn of an earlier request
        request["follows"] = chance.randrange(6)
    return request


def _faults(chance: random.Random) -> dict[str, float]:
    if chance.random() < 0.3:
        return {}
    names = chance.sample(NAMES, chance.choice((1, 2, 4, 8)))
    rates = {}
    for name in names:
        rate = chance.choice((0.02, 0.1, 0.5, 1.0))
        if name.startswith(("step", "copy", "offload", "load")):
            rate = chance.choice((0.01, 0.05, 0.2))
        rates[name] = rate
    return rates
