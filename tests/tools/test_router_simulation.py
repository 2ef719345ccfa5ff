"""The simulation of the router: seeds pass, a run depends on its seed alone, and planted defects are found."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tools.simulation.engine_world import InvariantError
from tools.simulation.router_scenario import make_router_scenario
from tools.simulation.router_world import run_router_scenario
from tools.simulation.scenario import Scenario
from tools.simulation.shrink import failure_of, shrink
from tools.simulation.virtual_loop import VirtualLoop
from tools.simulation.virtual_threads import DeadlockError

from kvloom.cluster.router.answer_stream import AnswerStream
from kvloom.cluster.router.fair_queue import FairQueue
from kvloom.cluster.router.fleet_index import FleetIndex

SETTINGS: dict[str, Any] = {
    "workers": 2,
    "foreign": [False, False],
    "capacity": 60,
    "inflight": 8,
    "queue": 100,
    "attempts": 4,
    "deadline": 60,
    "silent": 10,
    "wait": 10,
    "route": "kv",
}
STREAMS = [["send", {"stem": [i, 32], "own": [i, 16], "max_tokens": 20, "stream": True}] for i in range(4)]
FAILOVER = Scenario(1, SETTINGS, [*STREAMS, ["sleep", 1.0], ["kill", 0, 20.0], ["sleep", 1.0]], "router")
"""A worker dies in its streams, and restarts with an empty cache."""


@pytest.mark.parametrize("seed", range(5))
def test_invariants_hold_under_faults(seed: int) -> None:
    assert run_router_scenario(make_router_scenario(seed, 40)).requests > 1


@pytest.mark.slow
def test_invariants_hold_under_more_faults() -> None:
    for seed in range(100, 200):
        run_router_scenario(make_router_scenario(seed, 120))


def test_streams_continue_on_another_worker() -> None:
    outcome = run_router_scenario(FAILOVER)
    assert outcome.continued_streams > 0
    assert outcome.finished == {"complete": len(STREAMS) + 1}


def test_a_run_depends_on_its_seed_alone() -> None:
    first = run_router_scenario(make_router_scenario(7, 60))
    assert run_router_scenario(make_router_scenario(7, 60)) == first
    other = make_router_scenario(7, 60)
    other = Scenario(8, other.settings, other.operations, "router")
    assert run_router_scenario(other).digest != first.digest


def test_repeated_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerStream, "_trim", lambda *_: True)
    with pytest.raises(InvariantError, match="an answer is"):
        run_router_scenario(FAILOVER)


def test_blocks_of_a_restarted_worker_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetIndex, "clear", lambda *_: None)
    with pytest.raises(InvariantError, match="the index has a block"):
        run_router_scenario(FAILOVER)


def test_a_wrong_count_of_the_queue_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FairQueue.leave

    def leave(self: FairQueue, tenant: str) -> None:
        plain(self, tenant)
        self.running += self.running > 2

    monkeypatch.setattr(FairQueue, "leave", leave)
    kind = failure_of(run_router_scenario, FAILOVER)
    assert kind is not None
    assert "the queue counts" in kind
    small = shrink(run_router_scenario, FAILOVER, seconds=600)
    assert failure_of(run_router_scenario, small) == kind
    assert {operation[0] for operation in small.operations} == {"send"}


def test_tasks_that_wait_for_ever_are_a_deadlock() -> None:
    loop = VirtualLoop()
    future = loop.create_future()
    with pytest.raises(DeadlockError):
        loop.run_until_complete(future)
    loop.close()
