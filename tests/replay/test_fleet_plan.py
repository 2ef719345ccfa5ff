"""Plans of fleets: the smallest number of workers that meets the objectives, by role."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("msgspec")

from kvloom.cli import main
from kvloom.core import Objective
from kvloom.replay.fleet import replay_fleet
from kvloom.replay.fleet_plan import _fewest, excess_of, plan_fleet
from kvloom.replay.traffic import repeat

from .test_fleet import conversations, overload


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 31, 32])
def test_the_fewest_are_found_in_few_calls(needed: int) -> None:
    calls = []

    def is_enough(count: int) -> bool:
        calls.append(count)
        return count >= needed

    assert _fewest(is_enough, 1, 32) == needed
    assert len(calls) <= 11
    assert _fewest(lambda count: False, 1, 32) is None


def test_a_plan_meets_its_objectives_and_one_worker_fewer_does_not() -> None:
    traffic, objective = overload(120), Objective(ttft_ms=1000, tbt_ms=30)
    plan = plan_fleet(traffic, 1000, objective, limit=16, windows=2)
    assert plan.mixed is not None
    assert plan.split is not None
    for outcome in (plan.mixed, plan.split):
        assert max(excess_of(outcome, objective)) <= 1.0
    fewer = replay_fleet(traffic, plan.mixed.workers - 1, 1000)
    assert max(excess_of(fewer, objective)) > 1.0
    assert plan.split.prefill >= 1
    assert plan.split.hand_overs == len(traffic.requests)
    assert plan.answer.startswith("use ")
    assert [one.requests for one in plan.windows]
    assert sum(one.requests for one in plan.windows) == len(traffic.requests)
    assert "roles" in plan.switches


def test_an_objective_that_no_fleet_meets() -> None:
    plan = plan_fleet(overload(30), 1000, Objective(ttft_ms=1), limit=4)
    assert (plan.mixed, plan.split, plan.windows) == (None, None, ())
    assert "no fleet" in plan.answer
    with pytest.raises(ValueError, match="needs objectives"):
        plan_fleet(overload(30), 1000, Objective())


def test_repeated_traffic_is_that_of_other_users() -> None:
    one = conversations(3, 2)
    three = repeat(one, 3)
    assert len(three.requests) == 3 * len(one.requests)
    assert three.distinct == 3 * one.distinct
    assert three.seconds <= one.seconds + 60
    assert [r.at for r in three.requests] == sorted(r.at for r in three.requests)


def test_the_command_plans_and_simulates_roles(
    tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"  # type: ignore[operator]
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 4000,
            "output_length": 50,
            "hash_ids": [100 * i + j for j in range(8)],
        }
        for i in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    objectives = ["--slo-ttft", "500", "--slo-tbt", "30"]
    assert (
        main(
            [
                "replay", str(trace), "--plan", "--capacity", "500", *objectives, "--max-workers", "8",
                "--link", "50GB", "--json",
            ]
        )
        == 0
    )  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    assert plan["mixed"]["workers"] >= 1
    assert plan["answer"]
    fleet = ["replay", str(trace), "--workers", "3", "--prefill", "1", "--capacity", "500", "--route", "kv"]
    assert main([*fleet, *objectives, "--admission", "slo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["prefill"], found["admission"]) == (1, "slo")
    assert found["hand_overs"] + found["refused"] >= 40
    assert main([*fleet, *objectives]) == 0
    assert "goodput" in capsys.readouterr().out
    assert main(["replay", str(trace), "--prefill", "1"]) == 2
    assert "needs --workers" in capsys.readouterr().err
