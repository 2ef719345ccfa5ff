"""What a tenant sends does not depend, in time, on what another tenant has sent: on a virtual clock, without chance.

The simulation (`tools/simulation`) runs the real scheduler, prefix cache, offload manager and tiers. Every use of a
lock, a queue or the clock costs virtual time and may hand the turn to another thread, so a run with one operation more
ends at another time. Each seed gives a pair of runs, which differ in one prompt: a prompt that the victim has sent, or
a new one of the same length. The attacker sends it, and may first announce the session of the victim. Both runs must
then take the same steps and end at the same time, to the microsecond.

In the control, the attacker has the tenant of the victim, and the times differ.

$KVLOOM_TIMING_SAMPLES is the number of pairs (default: 20).
"""

from __future__ import annotations

import os
import random
from typing import Any

from tools.simulation.engine_world import Outcome, run_engine_scenario
from tools.simulation.scenario import Operation, Scenario, make_scenario

SAMPLES = int(os.environ.get("KVLOOM_TIMING_SAMPLES", "20"))
VICTIM, ATTACKER = 0, 1
NEW = 1_000_000
"""Number of a prompt that no operation of a scenario uses."""


def run_pair(seed: int, attacker: int) -> tuple[Outcome, Outcome]:
    """Run a scenario in which `attacker` sends a prompt of the victim, and the same scenario with a new prompt."""
    chance = random.Random(f"timing {seed}")
    made = make_scenario(seed, 12)
    tenant = {"quota": None, "weight": chance.choice((0, 1, 2)), "firm": chance.random() < 0.5}
    settings = {
        **made.settings,
        "tenants": [tenant, tenant],
        "compression": "none",  # otherwise the sizes of compressed pages depend on the tokens
        "tiers": chance.choice(([], ["host"], ["host", "disk"], ["disk"], ["host", "disk", "store"])),
        "load": "always",
    }
    operations = [["add", {"stem": [0, 64], "own": [0, 17], "max_tokens": 2}], ["steps", 4]]
    operations += [one for one in made.operations if one[0] != "restart"]
    for one in operations:
        if one[0] == "add":
            one[1]["tenant"] = VICTIM
            one[1].pop("follows", None)
    added = [place for place, one in enumerate(operations) if one[0] == "add"]
    sent = chance.choice(added)
    guess = operations[sent][1]
    at = chance.randrange(sent + 1, len(operations) + 1)
    prefetch: list[Operation] = [
        ["session", "expect", guess.get("session", 0)],
        ["sleep", 0.05],
        ["steps", 1],
    ]
    length = guess["stem"][1] + guess["own"][1]
    known, new = (
        Scenario(
            seed, settings, [*operations[:at], *prefetch, ["add", asked], ["steps", 5], *operations[at:]]
        )
        for asked in (
            request(attacker, guess["stem"], guess["own"]),
            request(attacker, [0, 0], [NEW, length]),
        )
    )
    return run_engine_scenario(known), run_engine_scenario(new)


def request(tenant: int, stem: list[int], own: list[int]) -> dict[str, Any]:
    return {"stem": stem, "own": own, "tenant": tenant, "max_tokens": 1, "ignore_eos": True}


def observed(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.virtual_seconds, outcome.switches, outcome.steps, outcome.injected, outcome.preemptions


def test_a_run_does_not_depend_on_what_another_tenant_sent() -> None:
    pairs = [run_pair(seed, ATTACKER) for seed in range(SAMPLES)]
    differ = [seed for seed, (known, new) in enumerate(pairs) if observed(known) != observed(new)]
    assert not differ
    assert sum(known.loaded_tokens > 0 for known, _ in pairs) >= SAMPLES // 10, "tiers are used"


def test_the_clock_shows_whether_a_prompt_of_the_same_tenant_is_cached() -> None:
    pairs = [run_pair(seed, VICTIM) for seed in range(10)]
    assert sum(known.virtual_seconds != new.virtual_seconds for known, new in pairs) >= 7
