"""Counters of a cache: idle time of evicted entries, time between hits, pages hit, tokens by tenant."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core import CacheControl, Histogram, Media, Tenant

from .world import cached, finish, make_world, prompt_of, serve, start


def test_a_value_counts_where_it_is_at_most_the_bound() -> None:
    spread = Histogram((1, 2.5, 10))
    assert spread.quantile(0.5) is None
    for value in (0, 1, 1.1, 2.5, 11):
        spread.add(value)
    spread.add(10, times=3)
    assert spread.counts == [2, 2, 3, 1]
    assert spread.count == 8
    assert spread.total == pytest.approx(45.6)


def test_a_quantile_is_interpolated_between_bounds() -> None:
    spread = Histogram((1, 2, 4))
    spread.add(0.5, 10)
    before = list(spread.counts)
    spread.add(3, 10)
    assert [spread.quantile(q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 3.0, 4.0]
    assert spread.since(before).quantile(0.5) == 3.0
    spread.add(100, 80)
    assert spread.quantile(0.99) == 4.0


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_must_rise(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        Histogram(bounds)


def test_evictions_are_counted_by_kind_and_idle_time() -> None:
    world = make_world("full", 1 + 4)
    cached(world, prompt_of(64))
    world.clock.advance(7.5)
    assert start(world, prompt_of(4, seed=1)).sequence.extend(64) == 0
    room = world.cache.state.allocator
    assert room.evictions == sum(room.evicted.values()) == room.idle_seconds.count > 0
    assert set(room.evicted) == {"blocks"}
    assert room.idle_seconds.total == pytest.approx(7.5 * room.evictions)
    assert world.cache.state.accounts[""].evictions == room.evictions


def test_a_hit_counts_once_with_the_time_since_the_last_use() -> None:
    world = make_world("full", 40)
    cached(world, prompt_of(40))
    assert world.cache.inspect.reuse_seconds.count == 0
    world.clock.advance(45)
    finish(world, serve(world, prompt_of(40)))
    assert (world.cache.inspect.reuse_seconds.count, world.cache.inspect.reuse_seconds.total) == (1, 45)
    finish(world, serve(world, prompt_of(40, seed=9)))
    assert world.cache.inspect.reuse_seconds.count == 1


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding+full", "chunked+full", "state+sliding+full"])
def test_the_pages_of_each_kind_that_hit_are_those_that_the_sequence_was_given(kind: str) -> None:
    world = make_world(kind, 400)
    prompt = prompt_of(190)
    cached(world, prompt)
    item = start(world, [*prompt, 1, 2, 3])
    cache, seq = world.cache, item.sequence
    assert seq.resumed > 0
    expected: dict[str, int] = {}
    for group in cache.layout.groups:
        if group.spec.unit == "state":
            pages = group.runs * (seq.state_source is not None)
        else:
            pages = int(np.count_nonzero(seq.table(group.index)))
        name = group.name.rsplit(" #", 1)[0]
        expected[name] = expected.get(name, 0) + pages
    assert cache.inspect.hit_pages() == expected


def test_the_pages_of_an_image_count_as_their_own_kind() -> None:
    world = make_world("cross", 60)
    prompt, image = prompt_of(40), (Media(20, 21, b"a" * 16, tokens=48),)
    cached(world, prompt, media=image)
    start(world, [*prompt, 1], media=image)
    assert world.cache.inspect.hit_pages() == {"full": 3, "cross": 3}


def test_tenants_have_counts_of_their_own() -> None:
    world = make_world("full", 40, tenants=[Tenant("gold")])
    for control in (CacheControl(tenant="gold"), CacheControl(tenant="gold"), CacheControl(tenant="someone")):
        cached(world, prompt_of(33), control)
    gold, rest = world.cache.state.accounts["gold"], world.cache.state.accounts[""]
    assert (gold.looked_up_tokens, gold.hit_tokens) == (66, 32)
    assert (rest.looked_up_tokens, rest.hit_tokens) == (33, 0)
    assert world.cache.inspect.looked_up_tokens == 99


def test_tokens_that_are_reserved_and_not_computed_are_counted_as_unused() -> None:
    world = make_world("full", 40)
    assert world.cache.inspect.unused_tokens() == 0
    one, two = serve(world, prompt_of(33)), serve(world, prompt_of(5, seed=1))
    assert world.cache.inspect.unused_tokens() == 15 + 11
    finish(world, one)
    finish(world, two)
    assert world.cache.inspect.unused_tokens() == 0
