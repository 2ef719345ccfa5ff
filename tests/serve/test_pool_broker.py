"""One memory budget for the pools of several models: who gives, who takes, and that the sum holds."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from kvloom.serve.worker import PoolLoad, plan_pools
from kvloom.serve.worker.messages import EngineStats
from kvloom.serve.worker.pool_broker import _Activity

IDLE = PoolLoad(500, 500, 50, 1000, 1, is_busy=False, is_full=False)
FULL = replace(IDLE, free_bytes=0, is_busy=True, is_full=True)
BUSY = replace(IDLE, free_bytes=100, is_busy=True)


def test_without_pressure_nothing_changes() -> None:
    assert plan_pools({"a": IDLE, "b": BUSY}, 1000) == {}


def test_an_idle_model_gives_to_a_full_one() -> None:
    assert plan_pools({"a": FULL, "b": IDLE}, 1000) == {"a": 750, "b": 250}


def test_a_request_larger_than_the_pool_makes_it_full_at_once() -> None:
    stats = EngineStats(running=1, free_slabs=5)
    assert _Activity().observe(stats, True, 0.0) == (True, False)
    needs = EngineStats(running=1, free_slabs=5, needs_growth=True)
    assert _Activity().observe(needs, True, 0.0) == (True, True)


def test_unassigned_bytes_are_taken_first() -> None:
    assert plan_pools({"a": FULL, "b": IDLE}, 1300) == {"a": 750}


def test_a_busy_model_gives_only_unused_bytes() -> None:
    assert plan_pools({"a": FULL, "b": BUSY}, 1000) == {"a": 600, "b": 400}


def test_two_full_models_approach_equal_shares() -> None:
    found = plan_pools({"a": replace(FULL, pool_bytes=800), "b": replace(FULL, pool_bytes=200)}, 1000)
    assert found == {"a": 500, "b": 500}
    assert plan_pools({"a": FULL, "b": FULL}, 1000) == {}


def test_a_busy_model_above_its_share_gives_cached_pages_to_one_below() -> None:
    rich = replace(BUSY, pool_bytes=900, free_bytes=0)
    assert plan_pools({"a": replace(FULL, pool_bytes=100), "b": rich}, 1000) == {"a": 500, "b": 500}


def test_an_idle_model_keeps_its_minimum() -> None:
    idle = replace(IDLE, pool_bytes=60, free_bytes=60)
    assert plan_pools({"a": replace(FULL, pool_bytes=940), "b": idle}, 1000) == {"a": 950, "b": 50}


@given(
    st.lists(
        st.tuples(st.integers(10, 500), st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=5
    ),
    st.integers(0, 500),
)
def test_the_sum_stays_within_the_budget(pools: list[tuple[int, float, bool, bool]], spare: int) -> None:
    loads = {
        str(i): PoolLoad(size, int(size * free), 5, 2000, 1, busy, full and busy)
        for i, (size, free, busy, full) in enumerate(pools)
    }
    budget = sum(load.pool_bytes for load in loads.values()) + spare
    planned = {name: load.pool_bytes for name, load in loads.items()} | plan_pools(loads, budget)
    assert sum(planned.values()) <= budget
    for name, size in planned.items():
        assert 5 <= size <= 2000
        if loads[name].is_busy and not loads[name].is_full:
            unused_given = loads[name].pool_bytes - loads[name].free_bytes
            assert size >= min(unused_given, budget // len(loads))
