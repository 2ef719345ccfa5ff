"""Several simulated workers behind the router's own classes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("msgspec")

from kvloom.cluster.router import Choice
from kvloom.core import Objective
from kvloom.replay.fleet import EngineModel, _Router, _Worker, replay_fleet
from kvloom.replay.traffic import Request, Traffic, number_blocks

BLOCK = 512


def traffic_of(rows: list[tuple[float, list[int], int, int]]) -> Traffic:
    """Requests of (time, block ids, prompt tokens, output tokens)."""
    blocks, distinct = number_blocks([ids for _, ids, _, _ in rows])
    requests = tuple(
        Request(at, b, len(b), prompt, output)
        for (at, _, prompt, output), b in zip(rows, blocks, strict=True)
    )
    return Traffic(requests, BLOCK, distinct, "sample")


def conversations(count: int = 13, turns: int = 6) -> Traffic:
    """Conversations whose turns repeat all blocks before, interleaved."""
    rows = []
    for turn in range(turns):
        for chat in range(count):
            ids = [chat * 1000 + i for i in range(8 * (turn + 1))]
            rows.append((turn * 40.0 + chat * 2.0, ids, len(ids) * BLOCK - 100, 20))
    return traffic_of(rows)


@pytest.mark.parametrize("tokens", [100, 4000, 8192, 8193, 20000])
def test_an_idle_worker_needs_the_time_of_its_steps(tokens: int) -> None:
    model = EngineModel()
    ids = list(range(-(-tokens // BLOCK)))
    one = replay_fleet(traffic_of([(0.0, ids, tokens, 3)]), 1, 100)
    chunks = [min(8192, tokens - done) for done in range(0, tokens, 8192)]
    assert one.mean_ttft == pytest.approx(sum(model.prefill(chunk) for chunk in chunks))
    assert one.hit_rate == 0


def test_requests_share_steps_and_decode_while_others_prefill() -> None:
    model = EngineModel()
    two = traffic_of([(0.0, list(range(8)), 4000, 3), (0.0, list(range(100, 108)), 4000, 3)])
    assert replay_fleet(two, 1, 100).mean_ttft == pytest.approx(model.prefill(8000))
    later = traffic_of([(0.0, [0], 100, 100), (0.2, list(range(8)), 4000, 3)])
    ttft = [model.prefill(100), model.prefill(4000) + model.decode(0.0)]
    assert replay_fleet(later, 1, 1000).p99_ttft == pytest.approx(max(ttft), abs=0.006)


def test_kv_routing_finds_what_round_robin_misses() -> None:
    traffic = conversations()
    ours = replay_fleet(traffic, 4, 400, "kv")
    other = replay_fleet(traffic, 4, 400, "round-robin")
    assert ours.hit_rate > other.hit_rate + 0.2
    assert ours.mean_ttft < other.mean_ttft


def test_the_index_has_what_the_caches_have(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: dict[str, _Worker] = {}
    original, init = _Router.choose, _Worker.__init__
    seen = [0]

    def remember(self, name, *rest) -> None:
        init(self, name, *rest)
        fleet[name] = self

    def compare(self, job, scale, now, tried) -> Choice:
        found = self.index.lengths(job.hashes)
        for name, worker in fleet.items():
            if not worker.events:  # those of a step in progress are not published yet
                assert found[name][0] >= worker.cache.match(job.ids).resume // 16 * 16
                seen[0] += 1
        return original(self, job, scale, now, tried)

    monkeypatch.setattr(_Worker, "__init__", remember)
    monkeypatch.setattr(_Router, "choose", compare)
    replay_fleet(conversations(), 3, 150, "kv", speed=4)
    assert seen[0] > 50
    for worker in fleet.values():
        worker.cache.check()
        assert not worker.running
        assert sum(worker.cache.inspect.evicted.values()) > 0


def test_a_pool_that_is_too_small_preempts_and_serves_all() -> None:
    rng = np.random.default_rng(1)
    rows = [
        (0.01 * i, [1000 * i + j for j in range(9)], 4500, int(rng.integers(600, 2000))) for i in range(12)
    ]
    outcome = replay_fleet(traffic_of(rows), 1, 40, "kv")
    assert outcome.preemptions > 0
    assert outcome.mean_ttft > 0


def overload(count: int = 240) -> Traffic:
    """Prompts of 8,000 tokens, three per second: one worker computes about six per second, less while it decodes."""
    rng = np.random.default_rng(3)
    rows, at = [], 0.0
    for i in range(count):
        at += float(rng.exponential(0.1))
        rows.append((at, [100 * i + j for j in range(16)], 8000, int(rng.integers(50, 300))))
    return traffic_of(rows)


def test_slo_admission_serves_more_requests_within_their_objective() -> None:
    traffic, objective = overload(), Objective(ttft_ms=2000, tbt_ms=150)
    none = replay_fleet(traffic, 1, 1000, objective=objective)
    queue = replay_fleet(traffic, 1, 1000, objective=objective, admission="queue", queue_limit=8)
    slo = replay_fleet(traffic, 1, 1000, objective=objective, admission="slo")
    assert slo.met > 1.5 * none.met
    assert slo.met >= queue.met
    assert none.refused == 0 < slo.refused
    assert slo.met > 0.8 * (len(traffic.requests) - slo.refused)


def test_a_refused_request_goes_to_another_worker() -> None:
    traffic, objective = overload(), Objective(ttft_ms=2000)
    one = replay_fleet(traffic, 1, 1000, "round-robin", objective=objective, admission="slo")
    three = replay_fleet(traffic, 3, 1000, "round-robin", objective=objective, admission="slo")
    assert three.refused == 0 < one.refused


def test_prefill_workers_keep_long_prompts_away_from_decoding() -> None:
    traffic = overload()
    mixed = replay_fleet(traffic, 4, 1000)
    split = replay_fleet(traffic, 4, 1000, prefill=2)
    assert split.hand_overs == len(traffic.requests)
    assert split.p99_tbt < mixed.p99_tbt
    assert (split.prefill, mixed.prefill) == (2, 0)


def test_a_slow_link_delays_first_tokens() -> None:
    one = traffic_of([(0.0, list(range(16)), 8000, 3)])
    fast = replay_fleet(one, 2, 1000, prefill=1)
    slow = replay_fleet(one, 2, 1000, prefill=1, link_tokens=8000.0)
    assert slow.mean_ttft == pytest.approx(fast.mean_ttft + 1.0, rel=0.01)


def test_a_decode_worker_computes_short_prompts_itself() -> None:
    short = traffic_of([(0.0, [0], 200, 3), (1.0, [1], 200, 3)])
    assert replay_fleet(short, 2, 100, prefill=1).hand_overs == 0


def test_invalid_arguments() -> None:
    traffic = conversations(1, 1)
    with pytest.raises(ValueError, match="unknown route"):
        replay_fleet(traffic, 1, 100, "fastest")
    with pytest.raises(ValueError, match="exceeds a pool"):
        replay_fleet(traffic, 1, 4)
    with pytest.raises(ValueError, match="one must decode"):
        replay_fleet(traffic, 2, 100, prefill=2)
    with pytest.raises(ValueError, match="needs an objective"):
        replay_fleet(traffic, 1, 100, admission="slo")
    with pytest.raises(ValueError, match="unknown admission"):
        replay_fleet(traffic, 1, 100, admission="some")
