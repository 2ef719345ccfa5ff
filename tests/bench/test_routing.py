"""The load and the figures of `kvloom bench routing`."""

from __future__ import annotations

import json

import pytest

from kvloom.bench import routing
from kvloom.bench.agent_sessions import AgentLoad, shared_tokens

LOAD = AgentLoad(sessions=12, turns=8, fork_share=0.3, edit_share=0.2)


def test_a_seed_determines_the_sessions() -> None:
    assert LOAD.draw(3, "run 1:") == LOAD.draw(3, "run 1:")
    assert LOAD.draw(3) != LOAD.draw(4)
    same = [turn.prompt for session in LOAD.draw(3, "run 2:") for turn in session.walk()]
    assert [prompt.removeprefix("run 2:") for prompt in same] == [
        turn.prompt for session in LOAD.draw(3) for turn in session.walk()
    ]


def test_sessions_share_tools_and_projects_and_have_branches_and_edits() -> None:
    sessions = LOAD.draw(0)
    firsts = {session.turns[0].prompt[: 2 * 768] for session in sessions}
    assert len(firsts) == 1, "all sessions begin with the same tools"
    projects = {session.turns[0].prompt[2 * 768 : 2 * 800] for session in sessions}
    assert 1 < len(projects) < len(sessions)
    branches = edits = 0
    for session in sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            edits += not after.prompt.startswith(before.prompt)
        for turn in session.turns:
            branches += sum(branch[0].prompt.startswith(turn.prompt) for branch in turn.branches if branch)
    assert branches
    assert edits
    assert max(len(turn.prompt) // 2 for session in sessions for turn in session.walk()) <= LOAD.longest


def test_the_ideal_counts_the_longest_prefix_of_an_earlier_prompt() -> None:
    assert shared_tokens([" a b c d", " a b x", " a b x", " q"]) == (0 + 2 + 2 + 0, 4 + 3 + 3 + 1)
    prompts = [turn.prompt for session in LOAD.draw(0) for turn in session.walk()]
    hits, total = shared_tokens(prompts)
    assert routing._one_pool(prompts, 100_000) == pytest.approx(hits / total, abs=0.02)
    assert routing._one_pool(prompts, 100) < hits / total - 0.02


def test_routers_are_compared_within_a_round() -> None:
    zero = dict.fromkeys((*routing.MEANS, "requests", "errors", "hand_overs"), 0)
    rounds = [
        {**zero, "router": router, "hit_rate": base + gain, "mean_ttft": 1.0}
        for base, gain in ((0.1, 0.2), (0.7, 0.1))
        for router, gain in (("kv", 0.0), ("smg", gain))
    ]
    first, second = routing._summary(rounds)
    assert first["hit_rate_difference"] == (0.0, 0.0)
    assert second["hit_rate_difference"] == pytest.approx((0.15, 0.05))
    assert second["hit_rate"] == pytest.approx(0.55)


@pytest.mark.slow
def test_routers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    sizes = ["--workers", "2", "--sessions", "3", "--turns", "2", "--seconds", "1", "--idle", "0"]
    assert routing.main([*sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["summary"]
    assert [one["router"] for one in found] == ["kv", "round-robin"]
    for one in found:
        assert (one["errors"], one["requests"]) == (0, found[0]["requests"])
        assert 0 < one["hit_rate"] <= one["ideal_hit_rate"] + 0.01
        assert 0 < one["mean_ttft"]
