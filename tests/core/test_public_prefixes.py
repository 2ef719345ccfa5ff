"""Public prefixes: tenants share exactly the blocks that they marked, and every page is charged to the right account."""

from __future__ import annotations

import pytest

from kvloom.core import PUBLIC_TENANT, CacheControl, Media, RetainRange, Tenant, private_mark, public_length

from .world import LAYOUTS, World, cached, finish, make_world, prompt_of, run, serve, start

SYSTEM = prompt_of(64)


def world_of(kind: str = "full", slabs: int = 400, public: int = 1 << 30, **options: object) -> World:
    return make_world(kind, slabs, public_bytes=public, **options)


def control(tenant: str, public: int = 64, **more: object) -> CacheControl:
    return CacheControl(tenant=tenant, public_tokens=public, **more)  # type: ignore[arg-type]


def test_the_public_length_is_whole_blocks_before_the_last_token() -> None:
    image = Media(40, 60, b"i" * 16)
    assert [public_length(n, 100, 16) for n in (0, 15, 16, 47, 96, 1000)] == [0, 0, 16, 32, 96, 96]
    assert public_length(64, 64, 16) == 48, "the last token of a prompt is private"
    assert public_length(64, 65, 16) == 64
    assert public_length(1000, 100, 64) == 64
    assert public_length(48, 100, 16, [image]) == 32, "a public prefix does not end inside an image"
    assert public_length(64, 100, 16, [image]) == 64
    assert public_length(32, 100, 16, [Media(32, 33, b"i" * 16)]) == 16, "the mark needs a token of its own"
    assert public_length(16, 100, 16, [Media(0, 50, b"i" * 16)]) == 0


def test_the_private_mark_covers_tenant_and_token() -> None:
    marks = [private_mark(16, token, root) for token in (1, 12) for root in (b"a" * 16, b"b" * 16)]
    assert len({mark.digest for mark in marks}) == 4


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_tenants_share_the_public_prefix_and_nothing_else(kind: str) -> None:
    world = world_of(kind)
    prompt = SYSTEM + prompt_of(50, 1)
    turn = [*prompt, 5]
    assert cached(world, prompt, control("red")) == 0
    assert cached(world, turn, control("red")) > 64, "a tenant hits its private blocks"
    assert cached(world, turn, control("blue")) == 64, "another tenant hits the public blocks"
    assert cached(world, [*turn, 6], control("blue")) > 64
    assert cached(world, turn, control("red", salt="s")) == 64, "a salt separates private blocks"
    assert cached(world, prompt, CacheControl(tenant="green")) == 0, "without a mark nothing is shared"
    assert cached(world, prompt, CacheControl()) == 0
    assert cached(world, prompt, control("red", adapter="lora")) == 0, "adapters have separate prefixes"
    assert cached(world, prompt, control("red", lossy=True)) == 0


def test_block_hashes_depend_on_the_tenant_only_after_the_public_prefix() -> None:
    cache, prompt = world_of().cache, SYSTEM + prompt_of(64, 1)
    public = cache.block_tokens * 2
    red, blue = (cache.block_hashes(prompt, control(tenant, public)) for tenant in ("red", "blue"))
    assert red[:2] == blue[:2]
    assert not set(red[2:]) & set(blue[2:])
    assert not set(red) & set(cache.block_hashes(prompt, CacheControl(tenant="red")))


def test_a_longer_mark_does_not_reveal_private_blocks() -> None:
    """A tenant that guesses the private tokens of another tenant, and marks them public, hits only what is public."""
    world = world_of()
    secret = SYSTEM + prompt_of(64, 7)
    cached(world, secret, control("red"))
    assert cached(world, secret, control("blue", public=112)) == 64
    assert cached(world, secret, control("blue", public=16)) == 16
    # From now on blue's own mark makes these tokens public.
    assert cached(world, secret, control("green", public=112)) == 112


def test_the_first_private_token_decides_the_private_blocks() -> None:
    world = world_of()
    one, other = [*SYSTEM, 1, *prompt_of(40, 1)], [*SYSTEM, 2, *prompt_of(40, 1)]
    cached(world, one, control("red"))
    assert cached(world, other, control("red")) == 64


def test_public_blocks_are_charged_to_the_public_account_and_borrowed_by_tenants() -> None:
    world = world_of(tenants=[Tenant("red"), Tenant("blue")])
    cache, block = world.cache, world.cache.block_bytes
    red, blue, public = (cache.account(name) for name in ("red", "blue", PUBLIC_TENANT))
    item = serve(world, SYSTEM + prompt_of(40, 1), control("red"))
    assert (public.used, red.borrowed) == (4 * block, 4 * block)
    assert red.used == 3 * block
    other = serve(world, SYSTEM + prompt_of(20, 2), control("blue"))
    assert (public.used, blue.borrowed, blue.used) == (4 * block, 4 * block, 2 * block)
    assert public.in_use == 4 * block
    finish(world, item)
    assert (public.in_use, red.borrowed) == (4 * block, 0)
    finish(world, other)
    assert (public.in_use, blue.borrowed, public.used) == (0, 0, 4 * block)


def test_the_quota_of_a_tenant_counts_the_public_blocks_that_it_uses() -> None:
    """A tenant cannot use the pool without limit by marking everything public."""
    world = world_of(slabs=400)
    block = world.cache.block_bytes
    world = world_of(slabs=400, tenants=[Tenant("red", quota=6 * block), Tenant("blue")])
    prompt = prompt_of(200)
    item = start(world, prompt, control("red", public=192))
    assert item.sequence.extend(96) == 0
    assert item.sequence.extend(200) > 0, "12 public blocks exceed a quota of 6 blocks"
    assert world.cache.exceeds_quota(item.sequence, 200)
    world.opened.remove(item)
    item.sequence.close()
    # Cached public blocks are charged to no tenant.
    finish(world, run(world, start(world, prompt[:90], control("red", public=80))))
    assert world.cache.account("red").used <= world.cache.block_bytes
    world.check()


def test_the_limit_of_public_prefixes_evicts_cached_prefixes() -> None:
    block = world_of().cache.block_bytes
    world = world_of(public=8 * block)
    public = world.cache.account(PUBLIC_TENANT)
    for seed in range(6):
        world.clock.advance(1.0)
        cached(world, prompt_of(65, seed), control("red"))
        assert public.used <= 8 * block
    assert cached(world, prompt_of(65, 5), control("blue")) == 64
    assert cached(world, prompt_of(65, 0), control("blue")) == 0, "the first prefix was evicted"


def test_cached_private_blocks_do_not_protect_public_blocks_from_other_tenants() -> None:
    """Blue gets its share of the pool, even if red's cached private blocks keep public blocks in the tree."""
    world = world_of(slabs=24, tenants=[Tenant("red", weight=1), Tenant("blue", weight=1)])
    pages = (world.cache.usable_slabs * world.cache.layout.slab_bytes) // world.cache.block_bytes
    cached(world, prompt_of((pages - 4) * 16 + 20), control("red", public=(pages - 4) * 16))
    assert world.cache.account("red").used <= world.cache.account("red").guaranteed
    item = serve(world, prompt_of(pages // 2 * 16 - 8, 3), CacheControl(tenant="blue"))
    world.check()
    finish(world, item)


def test_priorities_and_ended_sessions_of_a_tenant_leave_public_blocks_alone() -> None:
    world = world_of()
    options = {"retain": (RetainRange(0, None, 3),), "session": "s"}
    cached(world, SYSTEM + prompt_of(40, 1), control("red", **options))
    nodes = [node for root in world.cache.state.tree.roots.values() for node in root.children.values()]
    assert [(node.priority, node.end) for node in nodes] == [(0, 64)]
    assert {child.priority for child in nodes[0].children.values()} == {3}
    assert 0 < world.cache.end_session("s") <= 40
    assert not nodes[0].ended


def test_a_tenant_borrows_a_public_page_once() -> None:
    world = world_of("several pages a slab, every kind")
    cache = world.cache
    item = serve(world, SYSTEM + prompt_of(40, 1), control("red"))
    child = item.sequence.fork()
    assert child is not None
    borrowed = cache.account("red").borrowed
    pin = cache.pin(SYSTEM + prompt_of(40, 1), 5.0, control("red"))
    assert cache.account("red").borrowed == borrowed, "a page counts once"
    world.run_copies()
    child.close()
    cache.check()
    finish(world, item)
    cache.unpin(pin)
    world.check()
    assert cache.account("red").borrowed == 0


def test_bad_marks_are_refused() -> None:
    world = make_world("full", 40)
    with pytest.raises(ValueError, match="public prefixes are off: set public_bytes"):
        world.cache.match(SYSTEM, control("red"))
    with pytest.raises(ValueError, match="-1 is negative"):
        control("red", -1)
    with pytest.raises(ValueError, match="is reserved"):
        CacheControl(tenant=PUBLIC_TENANT)
    with pytest.raises(ValueError, match="is reserved"):
        world_of(tenants=[Tenant(PUBLIC_TENANT)])
    with pytest.raises(ValueError, match="is negative"):
        world_of(public=-1)
