"""The pool map agrees with the cache, and stays small."""

from __future__ import annotations

import json
import time
from collections import Counter

import numpy as np
import pytest

from kvloom.core import CacheControl, KVCache, PoolLayout, Sequence, Tenant, VirtualClock
from kvloom.core.inspect.pool_map import STATES
from tests.core.world import LAYOUTS, attention


def cache_of(layout: str = "full", slabs: int = 64, **more: object) -> KVCache:
    return KVCache(PoolLayout.build(LAYOUTS[layout]), slabs, max_tokens=4096, **more)  # type: ignore[arg-type]


def grown(cache: KVCache, tokens: list[int], tenant: str = "") -> Sequence:
    match = cache.match(tokens, CacheControl(tenant=tenant))
    seq = cache.open(match)
    start = match.resume
    assert cache.extend(seq, len(tokens) - start) == 0
    cache.commit(seq, tokens[start:])
    cache.take_copies()
    return seq


def pages(seen: dict, **what: object) -> int:
    return sum(row["pages"] for row in seen["map"]["legend"] if all(row[k] == v for k, v in what.items()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_map_counts_every_page_by_state_and_kind(layout: str) -> None:
    cache = cache_of(layout, slabs=256)
    survey = cache.inspect.pool_map()
    held = grown(cache, list(range(100)))
    cache.close(grown(cache, [*range(60), *range(500, 560)]))
    for _ in range(2):
        seen = survey.look(1.0)
        stats = cache.stats()
        assert pages(seen, state="in use") == stats["in_use_pages"]
        assert pages(seen, state="cached") == stats["cached_pages"]
        assert pages(seen, group=None) == 0
        assert {row["tenant"] for row in seen["map"]["legend"]} == {0}
        cache.close(held) if held.row >= 0 and cache.block_tables.sequences[held.row] is held else None
    kinds = {group["kind"] for group in seen["groups"]}
    assert kinds == {group.spec.kind for group in cache.layout.groups}


def test_the_shares_of_a_cell_are_those_of_its_slabs() -> None:
    cache = cache_of(slabs=41)
    survey = cache.inspect.pool_map(cells=8)
    seq = grown(cache, list(range(160)))
    seen = survey.look()["map"]
    assert seen["cells"] == 8
    assert seen["slabs"] == 40
    shares = Counter[int]()
    for cell, share in zip(seen["at"], seen["share"], strict=True):
        shares[cell] += share
    held = cache.stats()["in_use_pages"]
    assert max(shares.values()) <= 1000
    assert sum(shares.values()) * 5 / 1000 == held  # five slabs a cell, one page a slab
    cache.close(seq)


def test_the_map_separates_pins_and_tenants_and_has_names_only() -> None:
    cache = cache_of(tenants=[Tenant("red", quota=1 << 20), Tenant("blue")])
    survey = cache.inspect.pool_map()
    cache.close(grown(cache, list(range(1000, 1064)), "red"))
    cache.close(grown(cache, list(range(2000, 2032)), "blue"))
    pin = cache.pin(list(range(1000, 1064)), 60, CacheControl(tenant="red"))
    seen = survey.look(1.0)
    names = [tenant["name"] for tenant in seen["tenants"]]
    assert names == ["red", "blue", ""]
    assert seen["tenants"][0]["quota"] == 1 << 20
    assert pages(seen, state="pinned", tenant=0) == pages(seen, tenant=0) > 0
    assert pages(seen, state="cached", tenant=1) == pages(seen, tenant=1) > 0
    cache.unpin(pin)
    assert pages(survey.look(1.0), state="pinned") == 0


def test_undeclared_tenants_are_shown_by_name() -> None:
    cache = cache_of(tenants=[])
    seen = cache.inspect.pool_map()
    for name, start in (("red", 0), ("blue", 1000)):
        cache.close(grown(cache, list(range(start, start + 64)), name))
    open_ = grown(cache, list(range(5000, 5032)), "blue")
    found = seen.look()
    named = {tenant["name"]: (place, tenant) for place, tenant in enumerate(found["tenants"])}
    assert set(named) == {"", "red", "blue"}
    (_, none), (at, red), (_, blue) = named[""], named["red"], named["blue"]
    assert none["used"] == 0
    assert pages(found, tenant=at) > 0
    assert blue["used"] > red["used"] > red["in_use"] == 0
    assert 0 < blue["in_use"] < blue["used"]
    assert red["used"] + blue["used"] == cache.inspect.accounts[""].used
    assert {branch["tenant"] for branch in found["tree"]["branches"]} == {1, 2}
    cache.close(open_)


def test_more_tenants_than_places_are_others_together() -> None:
    cache = cache_of(slabs=128, tenants=[Tenant(f"t{i}") for i in range(50)])
    survey = cache.inspect.pool_map()
    cache.close(grown(cache, list(range(40)), "t49"))
    seen = survey.look(1.0)
    assert len(seen["tenants"]) == 30
    assert {row["tenant"] for row in seen["map"]["legend"]} == {30}
    assert {branch["tenant"] for branch in seen["tree"]["branches"]} == {30}


def test_the_branches_are_the_hottest_and_hang_together() -> None:
    clock = VirtualClock()
    cache = cache_of(slabs=2048, clock=clock)
    survey = cache.inspect.pool_map(branches=20)
    for i in range(60):
        cache.close(grown(cache, [*range(64), *range(1000 + 50 * i, 1048 + 50 * i)]))
    for _ in range(5):
        clock.advance(1)
        cache.close(grown(cache, [*range(64), *range(1500, 1548), 7, 8, 9]))
    seen = survey.look(1.0)["tree"]
    branches = {branch["id"]: branch for branch in seen["branches"]}
    assert seen["nodes"] == cache.state.tree.nodes
    assert len(branches) == 20
    assert all(one["parent"] is None or one["parent"] in branches for one in branches.values())
    top = max(branches.values(), key=lambda one: one["hits"])
    assert (top["depth"], top["tokens"], top["hits"]) == (0, 64, 64)
    hot = [one for one in branches.values() if one["parent"] == top["id"] and one["hits"] >= 4]
    assert [(one["depth"], one["tokens"]) for one in hot] == [(64, 48)]
    assert hot[0]["idle"] == 0
    assert all(0 <= cell < 2047 for one in branches.values() for cell in one["cells"])
    assert top["cells"]


def test_evicted_nodes_leave_the_picture() -> None:
    cache = cache_of(slabs=12)
    survey = cache.inspect.pool_map()
    cache.close(grown(cache, list(range(100))))
    before = survey.look(1.0)["tree"]["branches"]
    cache.close(grown(cache, list(range(500, 660))))
    after = survey.look(1.0)
    assert before
    assert {one["id"] for one in after["tree"]["branches"]} != {one["id"] for one in before}
    assert pages(after, state="cached") == cache.stats()["cached_pages"]


def test_slabs_without_memory_are_absent() -> None:
    cache = cache_of(slabs=11, reserved=31)
    seen = cache.inspect.pool_map(cells=10).look()
    assert pages(seen, state="unbacked") == 20
    assert {seen["map"]["at"][i] for i in range(len(seen["map"]["at"]))} <= set(range(3, 10))


def test_no_token_is_in_the_picture() -> None:
    cache = cache_of(slabs=128)
    tokens = [123_456_700 + i for i in range(64)]
    cache.close(grown(cache, tokens))
    text = json.dumps(cache.inspect.pool_map().look(1.0))
    assert "1234567" not in text
    assert set(STATES) >= {row["state"] for row in json.loads(text)["map"]["legend"]}


def test_a_million_pages_cost_milliseconds_and_a_hundred_kilobytes() -> None:
    layout = PoolLayout.build({"a": attention(), "b": attention()})
    cache = KVCache(layout, 1_000_001, max_sequences=4, max_tokens=1 << 18)
    rng = np.random.default_rng(0)
    for _ in range(40):
        cache.close(grown(cache, rng.integers(0, 30_000, 1 << 17).tolist()))
    survey = cache.inspect.pool_map()
    survey.look()
    spent = []
    for _ in range(9):
        began = time.thread_time()
        seen = survey.look()
        spent.append(time.thread_time() - began)
    assert sorted(spent)[4] < 0.05, spent  # some 5 ms on an idle machine
    assert pages(seen) == cache.stats()["cached_pages"] == 40 << 13
    assert len(json.dumps(seen)) < 250_000
    assert len(seen["map"]["at"]) <= 2 * 4096


@pytest.mark.parametrize(("cells", "branches"), [(0, 1), (1, 0)])
def test_a_picture_of_nothing_is_refused(cells: int, branches: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        cache_of().inspect.pool_map(cells, branches)
