"""The deterministic simulation: seeds pass, a run depends on its seed alone, and planted defects are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.simulation import faults, stand_in_model
from tools.simulation.command import run_scenario
from tools.simulation.engine_world import InvariantError, run_engine_scenario
from tools.simulation.scenario import Scenario, make_scenario
from tools.simulation.shrink import failure_of, shrink
from tools.simulation.virtual_threads import DeadlockError, VirtualThreads

SCENARIOS = Path(__file__).parent / "scenarios"
SETTINGS: dict[str, Any] = {
    **make_scenario(0, 1).settings,
    "layers": "full+window+state",
    "tiers": ["host", "disk"],
    "write": ["through", "through", "through"],
    "host_blocks": 40,
    "load": "always",
    "longest": 160,
    "sequences": 1.3,
    "tenants": [],
    "copy_delay": 0.01,
}
HITS = [["add", {"stem": [0, 64], "own": [i, 17], "max_tokens": 2}] for i in range(2)]
OTHERS = [["add", {"stem": [1 + i, 100], "own": [i, 40], "max_tokens": 2}] for i in range(2)]
LOADS = Scenario(1, SETTINGS, [*HITS, ["steps", 12], *OTHERS, ["steps", 20], *HITS])
"""Requests whose pages are evicted, and loaded again from host memory."""


@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_under_faults(seed: int) -> None:
    outcome = run_engine_scenario(make_scenario(seed, 25))
    assert outcome.requests > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_invariants_hold_under_more_faults(seed: int) -> None:
    run_engine_scenario(make_scenario(seed, 60))


def test_a_run_depends_on_its_seed_alone() -> None:
    first, second = run_engine_scenario(LOADS), run_engine_scenario(LOADS)
    assert first == second
    assert first.loaded_tokens > 0
    assert first.switches > 20
    assert run_engine_scenario(Scenario(2, SETTINGS, LOADS.operations)).digest != first.digest


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.json")), ids=lambda path: path.stem)
def test_a_scenario_that_failed_once_passes(path: Path) -> None:
    run_scenario(Scenario.from_json(json.loads(path.read_text())))


def test_a_copy_to_the_wrong_page_gives_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = faults.DeviceCopies._start

    def start(self: Any, verb: str, stride: int, pages: Any, offsets: Any) -> Any:
        return plain(self, verb, stride, pages, offsets[::-1] if verb == "load" else offsets)

    monkeypatch.setattr(faults.DeviceCopies, "_start", start)
    with pytest.raises(InvariantError, match="has token"):
        run_engine_scenario(LOADS)


def test_a_failure_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stand_in_model.StandInRunner._compute

    def compute(self: Any, work: Any) -> Any:
        return plain(self, work) + (len(work.tokens) == 1 and work.sequence.length > 120)

    monkeypatch.setattr(stand_in_model.StandInRunner, "_compute", compute)
    scenario = Scenario(1, {**SETTINGS, "tiers": []}, LOADS.operations)
    kind = failure_of(run_engine_scenario, scenario)
    assert kind is not None
    small = shrink(run_engine_scenario, scenario, seconds=600)
    assert failure_of(run_engine_scenario, small) == kind
    assert [operation[0] for operation in small.operations] == ["add"]


def test_threads_that_wait_for_each_other_are_a_deadlock() -> None:
    world = VirtualThreads(0)
    with world.installed():
        first, second = world.threading.Lock(), world.threading.Lock()

        def take(one: Any, other: Any) -> None:
            with one:
                world.sleep(0.1)
                with other:
                    pass

        threads = [
            world.threading.Thread(target=take, args=pair) for pair in ((first, second), (second, first))
        ]
        for thread in threads:
            thread.start()
        with pytest.raises(DeadlockError):
            threads[0].join()


@pytest.mark.slow
def test_the_command_prints_a_summary(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.simulation",
            "--seeds",
            "1",
            "--steps",
            "10",
            "--json",
            "--output",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) == {"engine", "router"}
    for world in summary.values():
        assert world["scenarios"] == 1
        assert world["failures"] == []
