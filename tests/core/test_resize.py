"""A pool that grows and shrinks: what is evicted, what stays, and what pending copies may touch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvloom.core import CacheControl, KVCache, PagePool, PoolLayout, Tenant

from .world import LAYOUTS, World, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

GOLD, FREE = CacheControl(tenant="gold"), CacheControl(tenant="free")


def slab_bytes(kind: str) -> int:
    return PoolLayout.build(LAYOUTS[kind]).slab_bytes


def shrink_fully(world: World) -> None:
    """Shrink to the pages in use: they are compacted, and the emptied slabs are removed once the copies have run."""
    for _ in range(2):
        world.shrink(9999)
        world.run_copies()
    world.shrink(9999)
    assert world.cache.state.pool.slabs - 1 == least(world)


def least(world: World) -> int:
    return world.cache.state.pool.fewest_slabs([0] * len(world.cache.state.pool.classes))


# -- the pool alone -----------------------------------------------------------------------------------


def test_unbacked_slabs_are_never_used() -> None:
    pool = PagePool([1, 3], 4, reserved=10)
    assert pool.allocate(0, 4) is None
    assert pool.allocate(1, 10) is None
    pages = pool.allocate(1, 9)
    assert pages is not None
    assert pages.max() < 4 * 3
    assert pool.missing_slabs([1, 0]) == 1
    pool.check()


def test_added_slabs_are_used_and_removed_ones_are_not() -> None:
    pool = PagePool([1], 3, reserved=8)
    assert pool.unbacked_slabs(2).tolist() == [3, 4], "the lowest are named first"
    pool.grow([7, 4])
    assert (pool.slabs, pool.free_slabs) == (5, 4)
    assert sorted(pool.allocate(0, 4).tolist()) == [1, 2, 4, 7]  # type: ignore[union-attr]
    pool.check()
    pool.release(0, np.array([2, 7], np.int32))
    assert pool.shrink(1).tolist() == [7], "the highest go first"
    assert pool.unbacked_slabs(4).tolist() == [3, 5, 6, 7]
    assert pool.shrink(5, spared=[2]).size == 0
    assert pool.shrink(5).tolist() == [2]
    assert pool.allocate(0, 1) is None
    pool.check()


def test_a_pool_may_shrink_to_slab_0_and_grow_again() -> None:
    pool = PagePool([2], 6)
    assert pool.shrink(99).tolist() == [1, 2, 3, 4, 5]
    assert (pool.slabs, pool.free_slabs) == (1, 0)
    assert pool.allocate(0, 1) is None
    assert pool.missing_slabs([3]) == 2
    pool.check()
    pool.grow(pool.unbacked_slabs(5))
    assert pool.allocate(0, 10) is not None
    pool.check()


def test_any_order_of_lending_and_resizing_conserves_slabs() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        sizes = chance.sample([1, 2, 3, 5], chance.randint(1, 3))
        reserved = chance.randint(3, 30)
        pool = PagePool(sizes, chance.randint(2, reserved), reserved)
        lent: list[tuple[int, np.ndarray]] = []
        for _ in range(60):
            verb = chance.randrange(4)
            if verb == 0:
                pool.grow(pool.unbacked_slabs(chance.randint(0, pool.reserved - pool.slabs)))
            elif verb == 1:
                before, slabs = pool.free_slabs, pool.slabs
                taken = pool.shrink(chance.randint(0, 5))
                assert (pool.free_slabs, pool.slabs) == (before - taken.size, slabs - taken.size)
            elif verb == 2:
                cls = chance.randrange(len(sizes))
                needs = [chance.randint(1, 6) if c == cls else 0 for c in range(len(sizes))]
                pool.slabs_short(needs)
                if chance.random() < 0.3:
                    pool.shrink(1)
                pages = pool.allocate(cls, needs[cls])
                if pages is not None:
                    lent.append((cls, pages))
            elif lent:
                pool.release(*lent.pop(chance.randrange(len(lent))))
            pool.check()


def test_free_slabs_counted_before_shrinking_are_not_used_after() -> None:
    pool = PagePool([4], 9)
    pages = pool.allocate(0, 16)
    assert pages is not None
    pool.release(0, pages[pages % 4 > 0])
    assert pool.slabs_short([12]) == 0  # four slabs to spare for keeping pages together
    assert pool.shrink(3).size == 3
    assert pool.allocate(0, 12) is not None
    pool.check()


@pytest.mark.parametrize(
    ("slabs", "message"),
    [([3], "slab 3 is not unbacked"), ([8, 12], "slab 12"), ([0], "slab 0"), ([9, -1], "slab -1")],
)
def test_only_unbacked_slabs_can_be_added(slabs: list[int], message: str) -> None:
    pool = PagePool([1], 6, reserved=10)
    with pytest.raises(ValueError, match=message):
        pool.grow(slabs)
    assert (pool.slabs, pool.free_slabs) == (6, 5)
    pool.check()


def test_growth_beyond_the_reservation_is_refused_with_the_way_out() -> None:
    cache = make_world("full", 6, reserved=10).cache
    with pytest.raises(ValueError, match=r"by 5 slabs: 6 of 10 reserved .* 4 at most or reserve more"):
        cache.unbacked_slabs(5)
    with pytest.raises(ValueError, match="by -1 slabs"):
        cache.unbacked_slabs(-1)
    for what in (cache, cache.state.pool):
        with pytest.raises(ValueError, match="shrink by -1"):
            what.shrink(-1)
    with pytest.raises(ValueError, match="6 slabs do not fit 5 reserved"):
        make_world("full", 6, reserved=5)
    cache.check()


def test_the_check_sees_a_page_in_an_absent_slab() -> None:
    pool = PagePool([1], 4, reserved=6)
    pool.allocate(0, 1)
    pool.classes[0].in_use[[1, 5]] = 0, 1
    with pytest.raises(AssertionError, match="used, free and unbacked"):
        pool.check()


# -- growing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(set(LAYOUTS) - {"state"}))
def test_a_request_that_did_not_fit_fits_after_growing(kind: str) -> None:
    need = slabs_for(kind, 320, states=4)
    world = make_world(kind, slabs_for(kind, 64), reserved=need + 40)
    item = start(world, prompt_of(320))
    assert item.sequence.extend(320) > 0
    world.grow(need + 40 - world.cache.state.pool.slabs)
    run(world, item)
    world.check()
    finish(world, item)
    stats = world.cache.stats()
    assert stats["slabs"] == stats["reserved_slabs"] == need + 39


def test_a_fixed_pool_is_what_one_gets_by_default() -> None:
    cache = make_world("full", 6).cache
    assert cache.stats()["slabs"] == cache.stats()["reserved_slabs"] == 5
    assert cache.unbacked_slabs(0).size == 0


# -- shrinking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_free_slabs_go_first(kind: str) -> None:
    world = make_world(kind, 60)
    cached(world, prompt_of(64))
    world.run_copies()
    free = int(world.cache.stats()["free_slabs"])  # type: ignore[call-overload]
    kept = world.cache.stats()["cached_pages"]
    assert world.shrink(free) == free
    assert world.cache.stats()["cached_pages"] == kept
    assert not world.cache.stats()["evictions"]
    assert world.cache.match(prompt_of(65)).resume == 64, "what was cached is still found"
    world.check()


def test_shrink_evicts_by_policy_and_no_more_than_needed() -> None:
    world = make_world("full", 13)
    for seed in range(3):
        cached(world, prompt_of(64, seed))
        world.clock.advance(1)
    assert world.cache.stats()["free_slabs"] == 0
    assert world.shrink(5) == 5
    world.check()
    resumes = [world.cache.match(prompt_of(64, seed)).resume for seed in range(3)]
    assert resumes == [0, 48, 63], "the oldest run is gone, and the tail of the next"


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_shrink_never_takes_pages_in_use(kind: str) -> None:
    world = make_world(kind, 200)
    items = [serve(world, prompt_of(100, seed)) for seed in range(3)]
    for seed in range(3, 6):
        cached(world, prompt_of(100, seed))
    shrink_fully(world)
    assert world.cache.stats()["cached_pages"] == 0
    world.check()
    for item in items:
        finish(world, item)
    shrink_fully(world)
    assert world.cache.state.pool.slabs == 1, "nothing is held: only slab 0 stays"
    assert start(world, prompt_of(20)).sequence.extend(20) > 0, "and nothing fits"
    world.grow(150)
    run(world, world.opened[0])
    world.check()


def test_nothing_is_evicted_for_slabs_that_cannot_become_free() -> None:
    world = make_world("several pages a slab", 200)
    item = serve(world, prompt_of(16))
    shrink_fully(world)
    for seed in range(1, 9):  # what fits beside the held pages of their slabs
        other = start(world, prompt_of(16, seed))
        if other.sequence.extend(16) == 0:
            world.step(other, prompt_of(16, seed))
        finish(world, other)
    before = world.cache.stats()
    assert before["cached_pages"]
    assert world.shrink(5) == 0
    assert world.cache.stats() == before
    finish(world, item)


def test_pins_block_shrinking_until_they_expire() -> None:
    world = make_world("full", 13)
    cached(world, prompt_of(64))
    world.cache.pin(prompt_of(64), ttl=5.0)
    assert world.shrink(99) == 8
    world.clock.advance(10)
    assert world.shrink(99) == 4
    world.check()


def test_a_match_from_before_is_looked_up_again() -> None:
    world = make_world("full", 13)
    cached(world, prompt_of(64))
    match = world.cache.match(prompt_of(64))
    assert match.resume == 63
    world.shrink(11)
    sequence = world.cache.open(match)
    assert sequence.resumed <= 16
    world.cache.check()


# -- pending copies -----------------------------------------------------------------------------------


def test_compacted_slabs_can_be_removed_after_the_copies() -> None:
    world = make_world("several pages a slab", 200, tenants=[Tenant("gold", weight=1.0)])
    pool = world.cache.state.pool
    items = [serve(world, prompt_of(16, seed), CacheControl(store=False)) for seed in range(6)]
    for item in items[::2]:
        finish(world, item)
    free = pool.free_slabs
    assert pool.slabs - 1 - free > least(world), "the pages are scattered"
    assert world.shrink(999) == free, "slabs that pages are to be copied from stay"
    assert world.cache.stats()["moved_pages"], "held pages moved together"
    assert pool.slabs - 1 > least(world)
    world.check()  # shares are of what is left; this runs the copies
    world.shrink(999)
    assert pool.slabs - 1 == least(world)
    world.check()


def test_a_pending_copy_with_a_freed_target_still_blocks_its_slab() -> None:
    """The copy is in a batch that is already closed, so it will still be written."""
    world = make_world("full", 20)
    source, target = world.cache.state.pool.allocate(0, 2).tolist()  # type: ignore[union-attr]
    copies = world.cache.state.copies
    ids = [np.array([page], np.int32) for page in (source, target)]
    copies.add_move(0, *ids)
    copies._close_batch()
    for page in ids:
        world.cache.state.pool.release(0, page)
    assert copies.slabs() == {source, target}
    assert {source, target}.isdisjoint(world.cache.shrink(99).tolist())
    world.cache.take_copies()
    assert {source, target} == set(world.cache.shrink(99).tolist())


def test_the_source_of_a_snapshot_stays_in_use_until_its_copy() -> None:
    world = make_world("state", 40)
    item = serve(world, prompt_of(20))
    assert item.sequence.extend(4) == 0
    world.step(item, [1, 2, 3, 4])
    assert world.cache.checkpoint(item.sequence)
    world.opened.remove(item)
    item.sequence.close()
    busy = world.cache.state.copies.slabs()
    assert busy
    taken = set(world.cache.shrink(99).tolist())
    assert not busy & taken
    world.cache.check()


# -- tenants ------------------------------------------------------------------------------------------


def two_tenants(slabs: int, reserved: int | None = None, quota: int | None = None) -> World:
    quota_bytes = None if quota is None else quota * slab_bytes("full")
    tenants = [Tenant("gold", quota_bytes, weight=3.0), Tenant("free", weight=1.0)]
    return make_world("full", slabs, tenants=tenants, reserved=reserved)


def shares(cache: KVCache) -> dict[str, float]:
    return {name: a.guaranteed / cache.layout.slab_bytes for name, a in cache.state.accounts.accounts.items()}


def test_shares_follow_the_pool_and_quotas_do_not() -> None:
    world = two_tenants(41, reserved=81, quota=10)
    assert shares(world.cache) == {"gold": 30, "free": 10, "": 0}
    world.grow(40)
    assert shares(world.cache) == {"gold": 60, "free": 20, "": 0}
    assert world.shrink(72) == 72
    assert shares(world.cache) == {"gold": 6, "free": 2, "": 0}
    world.grow(72)
    item = start(world, prompt_of(200), GOLD)
    assert item.sequence.extend(11 * 16) > 0, "the quota is in bytes, whatever the pool"
    assert item.sequence.extend(10 * 16) == 0
    world.cache.check()


def test_tenants_above_their_new_share_are_evicted_first() -> None:
    world = two_tenants(41)
    cached(world, prompt_of(15 * 16), GOLD)  # half of its share, and older
    world.clock.advance(1)
    cached(world, prompt_of(20 * 16, 1), FREE)  # twice its share
    assert world.shrink(20) == 20, "5 are free, 15 must leave: what free has above its new share of 5"
    used = {name: a.used // slab_bytes("full") for name, a in world.cache.state.accounts.accounts.items()}
    assert used == {"gold": 15, "free": 5, "": 0}
    world.check()


def test_shrinking_outranks_shares_if_nothing_else_can_be_evicted() -> None:
    world = two_tenants(41)
    cached(world, prompt_of(15 * 16), GOLD)
    holding = serve(world, prompt_of(20 * 16, 1), FREE)
    assert world.shrink(99) == 20, "only what is held stays"
    assert shares(world.cache) == {"gold": 15, "free": 5, "": 0}, "of what is left"
    world.check()
    finish(world, holding)
