"""Options of requests, tenants and operators: isolation, quotas, shares, pins, retention, sessions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvloom.core import POLICIES, CacheControl, CheckpointPolicy, Media, RetainRange, Tenant

from .world import LAYOUTS, Open, World, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

every_layout = pytest.mark.parametrize("kind", sorted(LAYOUTS))
GOLD, FREE = CacheControl(tenant="gold"), CacheControl(tenant="free")


def found(world: World, prompt: list[int], control: CacheControl | None = None) -> int:
    return world.cache.match([*prompt, 0], control).resume


def press(world: World, tokens: int, control: CacheControl | None = None, seed: int = 99) -> Open:
    """Open a request that uses pages for `tokens` tokens, and keep it open."""
    item = start(world, prompt_of(4, seed), control)
    assert item.sequence.extend(tokens) == 0
    return item


# -- isolation -------------------------------------------------------------------------------------------


@every_layout
def test_a_prompt_of_another_tenant_is_never_hit(kind: str) -> None:
    world = make_world(kind, 400)
    cached(world, prompt_of(80), GOLD)
    assert found(world, prompt_of(80), GOLD) == 80
    for other in (
        FREE,
        CacheControl(),
        CacheControl(tenant="gold", adapter="lora"),
        CacheControl(adapter="gold"),
        CacheControl(tenant="gold", salt="lora"),
        CacheControl(salt="gold"),
    ):
        match = world.cache.match(prompt_of(80), other)
        assert (match.matched, match.resume) == (0, 0)
        assert world.cache.explain(match).reason == "other tenant"
        assert world.cache.explain(match, across_tenants=False).reason == "never seen"


@every_layout
def test_tenants_with_the_same_prompt_share_no_page(kind: str) -> None:
    world = make_world(kind, 400)
    items = [serve(world, prompt_of(60), control) for control in (GOLD, FREE)]
    for group in world.cache.layout.of("token"):
        ours, theirs = (set(item.sequence.table(group.index).ravel().tolist()) - {0} for item in items)
        assert not ours & theirs
    world.check()


# -- quotas ------------------------------------------------------------------------------------------------


def with_quota(kind: str, slabs: int, quota_slabs: int) -> World:
    slab = make_world(kind, 40).cache.layout.slab_bytes
    return make_world(kind, slabs, tenants=[Tenant("gold", quota=quota_slabs * slab), Tenant("free")])


@every_layout
@pytest.mark.parametrize("more", [0, 5])
def test_a_quota_is_never_exceeded(kind: str, more: int) -> None:
    quota = slabs_for(kind, 60) + more
    world = with_quota(kind, 200, quota)
    limit = quota * world.cache.layout.slab_bytes
    account = world.cache.state.accounts["gold"]
    chance = random.Random(5)
    for _ in range(40):
        world.clock.advance(1)
        item = start(world, prompt_of(chance.randint(5, 60), seed=chance.randint(0, 5)), GOLD)
        if item.sequence.extend(len(item.prompt) - len(item.tokens)) == 0:
            world.step(item, item.prompt[len(item.tokens) :])
        assert account.used <= limit
        world.check()
        while len(world.opened) > 2:
            finish(world, world.opened[0])
        assert account.used <= limit
    world.run_copies()
    assert account.used > limit // 2, "and it was worth holding"


def test_a_quota_evicts_only_its_own() -> None:
    world = with_quota("full", 30, 8)
    cached(world, prompt_of(160, seed=1), FREE)
    world.clock.advance(1)
    for seed in range(2, 8):
        cached(world, prompt_of(64, seed), GOLD)
        world.clock.advance(1)
    assert found(world, prompt_of(160, seed=1), FREE) == 160
    assert found(world, prompt_of(64, seed=2), GOLD) == 0
    assert found(world, prompt_of(64, seed=7), GOLD) == 64
    assert world.cache.stats()["free_slabs"] == 29 - 10 - 8


def test_beyond_the_quota_pages_are_missing_and_nothing_changes() -> None:
    world = with_quota("full", 30, 8)
    item = start(world, prompt_of(4), GOLD)
    before = world.cache.stats()
    assert item.sequence.extend(16 * 11) == 3
    assert world.cache.stats() == before
    assert item.sequence.extend(16 * 8) == 0
    world.check()


def test_undeclared_tenants_share_one_account_but_no_pages() -> None:
    world = make_world("full", 30, tenants=[Tenant("", quota=5 * 2048)])
    cached(world, prompt_of(64, seed=1), CacheControl(tenant="a"))
    cached(world, prompt_of(64, seed=1), CacheControl(tenant="b"))
    assert world.cache.stats()["free_slabs"] == 29 - 5
    assert found(world, prompt_of(64, seed=1), CacheControl(tenant="b")) == 64
    assert found(world, prompt_of(64, seed=1), CacheControl(tenant="a")) <= 16


@pytest.mark.parametrize(("quota", "weight"), [(-1, 0.0), (None, -2.0)])
def test_negative_quotas_and_weights_are_refused(quota: int | None, weight: float) -> None:
    with pytest.raises(ValueError, match=r"'gold'.*-[12]"):
        Tenant("gold", quota, weight)


# -- fair shares ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_evicts_another_tenant_down_to_its_share_and_not_below(policy: str) -> None:
    """Shares of 30 and 10 pages of 40."""
    world = make_world(
        "full", 41, policy=policy, tenants=[Tenant("gold", weight=3.0), Tenant("free", weight=1.0)]
    )
    for seed in range(9):
        cached(world, prompt_of(64, seed), GOLD)
    gold = world.cache.state.accounts["gold"]
    assert gold.used == 36 * 2048
    world.clock.advance(1)
    for seed in range(40):
        cached(world, prompt_of(64, seed), FREE)
        world.clock.advance(1)
        assert gold.used >= 30 * 2048
        world.cache.check()
    assert gold.used == 30 * 2048 or policy == "mru", "mru takes from the flood itself"
    press(world, 30 * 16, GOLD)  # within its share it gets what it asks for


def test_an_idle_pool_is_anyones() -> None:
    world = make_world("full", 41, tenants=[Tenant("gold", weight=3.0), Tenant("free", weight=1.0)])
    assert start(world, prompt_of(4), FREE).sequence.extend(40 * 16) == 0


def test_a_ttl_or_a_priority_does_not_outrank_another_tenant() -> None:
    """Shares of 20 pages each; the other tenant wants all 40 pages for ever, and its entries were used last."""
    world = make_world("full", 41, tenants=[Tenant("gold", weight=1.0), Tenant("free", weight=1.0)])
    keep = CacheControl(tenant="free", retain=(RetainRange(priority=1 << 20, ttl=1e9),))
    for seed in range(30):
        cached(world, prompt_of(64, seed), keep)
        world.clock.advance(1)
    assert world.cache.state.accounts["free"].used == 40 * 2048
    for turn in range(3):
        for seed in range(4):
            resumed = cached(world, prompt_of(64, seed + 100), GOLD)
            assert resumed == (63 if turn else 0)
            world.clock.advance(1)
        for seed in range(10):
            cached(world, prompt_of(64, 50 * turn + seed + 200), keep)
            world.clock.advance(1)
    world.check()


def test_above_their_shares_the_policy_decides_between_tenants_whatever_they_retain() -> None:
    world = make_world("full", 41, tenants=[Tenant("gold"), Tenant("free")])
    keep = CacheControl(tenant="free", retain=(RetainRange(priority=5, ttl=1e9),))
    cached(world, prompt_of(320, 1), keep)
    world.clock.advance(1)
    cached(world, prompt_of(320, 2), GOLD)
    world.clock.advance(1)
    press(world, 10 * 16, CacheControl())
    assert found(world, prompt_of(320, 2), GOLD) == 320
    assert found(world, prompt_of(320, 1), keep) < 320


def with_default_shares(slabs: int, *names: str) -> World:
    return make_world("full", slabs, tenants=[Tenant(name, weight=1.0, firm=False) for name in names])


def test_a_default_share_protects_half_and_the_other_half_is_anyones() -> None:
    world = with_default_shares(41, "gold", "free")
    for seed in range(10):
        cached(world, prompt_of(64, seed), GOLD)
        world.clock.advance(1)
    first, second = (start(world, prompt_of(4, seed), FREE) for seed in (98, 99))
    assert first.sequence.extend(30 * 16) == 0
    assert world.cache.state.accounts["gold"].used == 10 * 2048
    assert second.sequence.extend(2 * 16) > 0, "two sequences of one tenant respect the share of another"
    world.check()


def test_the_only_sequence_of_a_tenant_may_take_cached_pages_of_default_shares() -> None:
    world = with_default_shares(41, "gold", "free")
    cached(world, prompt_of(160, 1), GOLD)
    item = press(world, 35 * 16, FREE)
    assert world.cache.state.accounts["gold"].used == 5 * 2048
    world.check()
    finish(world, item)
    firm = make_world("full", 41, tenants=[Tenant("gold", weight=1.0), Tenant("free", weight=1.0)])
    cached(firm, prompt_of(160, 1), GOLD)
    assert start(firm, prompt_of(4, 99), FREE).sequence.extend(35 * 16) > 0


# -- pins ------------------------------------------------------------------------------------------------------


@every_layout
def test_a_pin_survives_pressure_and_ends_with_its_ttl(kind: str) -> None:
    world = make_world(kind, 12)
    cached(world, prompt_of(40))
    world.run_copies()
    assert world.cache.pin([*prompt_of(40), 0], ttl=10.0).length == 40
    for seed in range(1, 12):
        item = start(world, prompt_of(30, seed))
        if item.sequence.extend(30) == 0:
            world.step(item, item.prompt)
        finish(world, item)
        world.run_copies()
        assert found(world, prompt_of(40)) == 40
    world.clock.advance(11)
    everything = start(world, prompt_of(4, seed=50))
    most = next(n for n in range(1024, 0, -16) if everything.sequence.extend(n) == 0)
    world.cache.check()
    empty = make_world(kind, 12).cache
    probe = empty.open(empty.match([1]))
    assert most == next(n for n in range(1024, 0, -16) if probe.extend(n) == 0), (
        "the pin gave everything back"
    )


@pytest.mark.parametrize(("slabs", "quota"), [(13, None), (40, 12 * 2048)])
def test_many_extend_together_where_a_pin_ends_at_that_moment(slabs: int, quota: int | None) -> None:
    world = make_world("full", slabs, tenants=[Tenant("acme", quota=quota)])
    cache, control = world.cache, CacheControl(tenant="acme")
    prompt = prompt_of(97, seed=1)
    cached(world, prompt, control)
    cache.pin(prompt, 10.0, control)
    items = [serve(world, prompt_of(size, seed=size), control) for size in (64, 16)]
    rows = np.array([item.sequence.row for item in items])
    assert cache.extend_many(rows), "the pin has what they need"
    world.clock.advance(20)
    assert cache.extend_many(rows) == 0
    assert [item.sequence.reserved_tokens for item in items] == [80, 32]
    for item in items:
        world.step(item, [7])
        finish(world, item)


def test_a_pin_has_the_length_of_its_prefix() -> None:
    world = make_world("full", 40)
    cached(world, prompt_of(40))
    assert world.cache.pin(prompt_of(40), 1.0).length == 40
    assert world.cache.pin(prompt_of(100), 1.0).length == 40
    assert world.cache.pin(prompt_of(40)[:21], 1.0).length == 21
    assert world.cache.pin(prompt_of(40, seed=1), 1.0).length == 0
    world.check()


@every_layout
def test_unpinning_twice_is_harmless(kind: str) -> None:
    world = make_world(kind, 60)
    cached(world, prompt_of(40))
    world.run_copies()
    pin = world.cache.pin(prompt_of(40), 5.0)
    world.cache.unpin(pin)
    world.cache.unpin(pin)
    world.check()
    assert world.cache.stats()["in_use_pages"] == 0
    world.clock.advance(6)
    assert found(world, prompt_of(40)) == 40
    press(world, 64)
    world.check()


def test_a_pin_of_a_prompt_pins_its_media_run() -> None:
    world = make_world("cross", 20)
    image = (Media(2, 3, b"a" * 16, tokens=48),)
    cached(world, prompt_of(40), media=image)
    assert world.cache.pin(prompt_of(40), 10.0, media=image).length == 40
    world.clock.advance(1)
    press(world, (19 - 3 - 3) * 16)
    assert world.cache.match(prompt_of(40), media=image).resume == 39
    too_much = start(world, prompt_of(4, seed=5))
    assert too_much.sequence.extend(16) > 0
    assert world.cache.match(prompt_of(40), media=image).resume == 39
    world.check()


@pytest.mark.parametrize("ttl", [0.0, -3.0])
def test_a_pin_needs_a_positive_ttl(ttl: float) -> None:
    world = make_world("full", 10)
    with pytest.raises(ValueError, match=str(ttl)):
        world.cache.pin([1, 2, 3], ttl)
    with pytest.raises(ValueError, match=str(ttl)):
        RetainRange(ttl=ttl)
    world.check()


# -- retention ---------------------------------------------------------------------------------------------------


def test_token_ranges_are_evicted_by_priority() -> None:
    """The system prompt stays; the document after it is evicted first if it has no child nodes."""
    world = make_world("full", 1 + 4 + 4 + 4)
    keep = CacheControl(retain=(RetainRange(0, 32, priority=5), RetainRange(32, None, priority=-1)))
    cached(world, prompt_of(64, seed=1), keep)
    world.clock.advance(1)
    cached(world, prompt_of(64, seed=2))
    cached(world, prompt_of(64, seed=3))
    hog = start(world, prompt_of(4, seed=9))
    sizes = []
    for blocks in (2, 10):
        assert hog.sequence.extend(16 * blocks) == 0
        sizes.append([found(world, prompt_of(64, seed)) for seed in (1, 2, 3)])
    assert sizes == [[32, 64, 64], [32, 0, 0]]
    world.check()


def test_a_range_protects_only_until_its_ttl() -> None:
    for wait, left in ((0.0, [64, 0]), (10.0, [0, 64])):
        world = make_world("full", 1 + 8)
        cached(world, prompt_of(64, seed=1), CacheControl(retain=(RetainRange(ttl=5.0),)))
        world.clock.advance(1)
        cached(world, prompt_of(64, seed=2))
        world.clock.advance(wait)
        press(world, 4 * 16)
        assert [found(world, prompt_of(64, seed)) for seed in (1, 2)] == left


def test_empty_ranges_are_refused() -> None:
    for start_, stop in ((-1, 5), (5, 5), (7, 3)):
        with pytest.raises(ValueError, match=rf"\[{start_}, {stop}\)"):
            RetainRange(start_, stop)


# -- store and read ------------------------------------------------------------------------------------------------


@every_layout
def test_a_request_with_store_off_caches_nothing(kind: str) -> None:
    world = make_world(kind, 200, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    item = serve(world, prompt_of(60), CacheControl(store=False))
    run(world, item, [7] * 40)
    assert found(world, prompt_of(60)) == 0, "nor while it runs"
    finish(world, item)
    world.run_copies()
    stats = world.cache.stats()
    assert (stats["free_slabs"], stats["cached_pages"], stats["nodes"]) == (199, 0, 0)


@every_layout
def test_a_request_that_stores_nothing_still_reads(kind: str) -> None:
    world = make_world(kind, 200)
    cached(world, prompt_of(60))
    item = serve(world, [*prompt_of(60), *prompt_of(30, seed=1)], CacheControl(store=False))
    assert item.sequence.resumed == 60
    run(world, item, [7] * 40)
    finish(world, item)
    assert found(world, [*prompt_of(60), *prompt_of(30, seed=1)]) == 60


@every_layout
def test_a_request_that_does_not_read_computes_everything_and_stores_it(kind: str) -> None:
    world = make_world(kind, 200)
    no_read = CacheControl(read=False)
    assert cached(world, prompt_of(60)) == 0
    match = world.cache.match(prompt_of(60), no_read)
    assert (match.resume, match.miss.reason) == (0, "reading off")
    assert cached(world, prompt_of(60), no_read) == 0
    assert cached(world, prompt_of(60, seed=1), no_read) == 0
    assert found(world, prompt_of(60, seed=1)) == 60
    world.check()


# -- sessions --------------------------------------------------------------------------------------------------------


def test_an_ended_session_is_evicted_first_but_shared_blocks_stay() -> None:
    world = make_world("full", 1 + 4 + 6 + 8)
    trunk = prompt_of(64)
    cached(world, prompt_of(64, seed=3))
    world.clock.advance(1)
    ended, other = [*trunk, *prompt_of(64, seed=1)], [*trunk, *prompt_of(64, seed=2)]
    cached(world, other)
    cached(world, ended, CacheControl(session="chat"))
    world.clock.advance(1)
    assert world.cache.end_session("chat") == 64
    press(world, 16 * (world.cache.state.pool.free_slabs + 4))
    assert found(world, ended) == 64, "its own part left, the trunk stays"
    assert found(world, other) == 128
    assert found(world, prompt_of(64, seed=3)) == 64, "the oldest of all stays"
    world.check()


@every_layout
def test_ending_a_session_is_a_hint_only(kind: str) -> None:
    world = make_world(kind, 200)
    cached(world, prompt_of(60), CacheControl(session="chat"))
    world.cache.end_session("chat")
    assert found(world, prompt_of(60)) == 60, "there is room, so nothing leaves"
    assert world.cache.end_session("chat") == 0
    assert world.cache.end_session("never heard of") == 0
    world.check()


def test_a_session_that_returns_is_not_ended_any_more() -> None:
    world = make_world("full", 1 + 5 + 5 + 1)
    cached(world, prompt_of(64, seed=1), CacheControl(session="chat"))
    world.cache.end_session("chat")
    world.clock.advance(1)
    cached(world, prompt_of(64, seed=2))
    world.clock.advance(1)
    cached(world, [*prompt_of(64, seed=1), *prompt_of(16, seed=5)], CacheControl(session="chat"))
    world.clock.advance(1)
    press(world, 16 * (world.cache.state.pool.free_slabs + 4))
    assert found(world, [*prompt_of(64, seed=1), *prompt_of(16, seed=5)]) == 80
    assert found(world, prompt_of(64, seed=2)) == 0, "used longer ago"
    world.check()


def test_protected_shares_are_counted_before_anything_is_evicted() -> None:
    tenants = [Tenant("", weight=1.0), Tenant("gold", weight=1.0)]
    world = make_world("full", 41, tenants=tenants)  # twenty blocks each
    cached(world, prompt_of(20 * 16, 1), CacheControl(tenant="gold"))
    cached(world, prompt_of(15 * 16, 2))
    needy = start(world, [1])
    assert needy.sequence.extend(21 * 16) > 0
    assert world.cache.match([*prompt_of(15 * 16, 2), 9]).resume == 15 * 16
    assert needy.sequence.extend(20 * 16) == 0
    assert world.cache.match([*prompt_of(20 * 16, 1), 9], CacheControl(tenant="gold")).resume == 20 * 16
