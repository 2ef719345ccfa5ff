"""Eviction: the order of each policy, what ranks before any policy, and no starvation."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from kvloom.core import (
    POLICIES,
    CacheControl,
    CheckpointPolicy,
    Cost,
    KVCache,
    OffloadBatch,
    PoolLayout,
    RetainRange,
    Tenant,
    VirtualClock,
    allocator as room_module,
    make_policy,
)
from kvloom.core.allocator import AHEAD, PIECES
from kvloom.models.specs import ModelSpec, load_spec, with_draft

from .world import LAYOUTS, Open, World, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))
every_layout = pytest.mark.parametrize("kind", sorted(LAYOUTS))


def press(world: World, tokens: int, seed: int = 99) -> Open:
    """Open a request that uses pages for `tokens` tokens, and keep it open."""
    item = start(world, prompt_of(4, seed))
    assert item.sequence.extend(tokens) == 0
    return item


def found(world: World, prompt: list[int]) -> int:
    return world.cache.match([*prompt, 0]).resume


# -- every policy --------------------------------------------------------------------------------------------


@every_layout
@every_policy
def test_all_cached_pages_can_be_evicted(kind: str, policy: str) -> None:
    slabs = slabs_for(kind, 52)
    empty = make_world(kind, slabs).cache
    probe = empty.open(empty.match([1]))
    most = next(n for n in range(1024, 0, -16) if probe.extend(n) == 0)
    world = make_world(kind, slabs, policy=policy)
    for i in range(12):
        cached(world, prompt_of(30 + 2 * i, seed=i % 4))
        world.clock.advance(1)
    world.run_copies()
    assert world.cache.stats()["in_use_pages"] == 0
    hog = press(world, most)
    assert world.cache.stats()["in_use_pages"] == empty.stats()["in_use_pages"]
    world.cache.check()
    finish(world, hog)
    assert world.cache.stats()["in_use_pages"] == 0


@every_policy
@pytest.mark.parametrize("kind", ["full", "sliding+full", "state+full"])
def test_prefixes_of_waiting_requests_are_evicted_last_by_turn(kind: str, policy: str) -> None:
    world = make_world(kind, slabs_for(kind, 320, 10), policy=policy)
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    for prompt in prompts:
        cached(world, prompt)
        world.clock.advance(1)
    whole = [found(world, prompt) for prompt in prompts]
    assert min(whole) >= 59
    turns = {2: (0, 1), 0: (0, 2), 1: (-1, 9)}  # who has priority comes first
    waiting = [
        world.cache.protect_queued(world.cache.match([*prompts[i], 0]), turn) for i, turn in turns.items()
    ]
    left: list[int] = []
    hog, size = press(world, 16), 16
    while len(left) < 3 and not hog.sequence.extend(size := size + 16):
        left += [i for i in range(4) if i not in left and found(world, prompts[i]) < whole[i]]
    assert left == [3, 0, 2], "first the entry without a waiting request, then the latest turn"
    for foreseen in (*waiting, *waiting):
        world.cache.unprotect(foreseen)
    finish(world, hog)
    world.cache.check()


@every_layout
@every_policy
@pytest.mark.few(27)
def test_pages_in_use_are_never_evicted(kind: str, policy: str) -> None:
    world = make_world(kind, 40, policy=policy)
    items = [serve(world, prompt_of(45, seed=i)) for i in range(2)]
    for i in range(20):
        other = start(world, prompt_of(60, seed=10 + i))
        if other.sequence.extend(60) == 0:
            world.step(other, other.prompt)
        finish(world, other)
        world.clock.advance(1)
        world.check()  # reads every byte of the open sequences
    assert [item.sequence.length for item in items] == [45, 45]


@every_policy
def test_children_are_evicted_before_parents(policy: str) -> None:
    world = make_world("full", 60, policy=policy)
    trunk = prompt_of(160)
    for i in range(4):
        cached(world, [*trunk, *prompt_of(80, seed=i + 1)])
        world.clock.advance(1)
    hog = start(world, prompt_of(4, seed=99))
    seen = [240] * 4
    for blocks in range(1, 59):
        assert hog.sequence.extend(16 * blocks) == 0
        now = [found(world, [*trunk, *prompt_of(80, seed=i + 1)]) for i in range(4)]
        if any(n > 160 for n in now):
            assert min(now) >= 160, "a parent left before its children"
        assert all(n <= before for n, before in zip(now, seen, strict=True))
        seen = now
    assert max(seen) < 160
    world.cache.check()


# -- one order each ------------------------------------------------------------------------------------------

A, B, C = 1, 2, 3
LENGTH = 64


def leaving_order(
    policy: str | object, requests: list[int], lengths: dict[int, int] | None = None
) -> list[int]:
    """Run one request a second, then allocate block by block; return the prompts in the order of eviction."""
    prompts = {seed: prompt_of((lengths or {}).get(seed, LENGTH), seed) for seed in requests}
    # One page more than they need: a prompt that comes again writes its last block to a copy first.
    world = make_world("full", 2 + sum(len(p) for p in prompts.values()) // 16, policy=policy)
    for seed in requests:
        cached(world, prompts[seed])
        world.clock.advance(1)
    return as_they_leave(world, prompts)


def as_they_leave(world: World, prompts: dict[int, list[int]]) -> list[int]:
    """Return the prompts in the order of eviction; a prompt counts as evicted when less than half of it is found."""
    assert world.cache.state.pool.free_slabs <= 1
    hog = start(world, [4])
    order: list[int] = []
    for blocks in range(1, world.cache.state.pool.slabs):
        assert hog.sequence.extend(16 * blocks) == 0
        order += [k for k, p in prompts.items() if k not in order and found(world, p) < len(p) // 2]
    assert len(order) == len(prompts)
    world.cache.check()
    return order


def test_lru_evicts_the_least_recently_used() -> None:
    assert leaving_order("lru", [A, B, C, A]) == [B, C, A]


def test_fifo_evicts_the_oldest() -> None:
    assert leaving_order("fifo", [A, B, C, A]) == [A, B, C]


def test_mru_evicts_the_most_recently_used() -> None:
    assert leaving_order("mru", [A, B, C]) == [C, B, A]


def test_lfu_evicts_the_least_hit() -> None:
    assert leaving_order("lfu", [A, A, A, A, C, C, B]) == [B, C, A]


def test_slru_evicts_what_was_never_hit_then_by_last_use() -> None:
    assert leaving_order("slru", [A, A, A, A, C, C, B]) == [B, A, C]


def test_cost_evicts_what_is_cheap_to_recompute() -> None:
    assert leaving_order("cost", [A, B, C], {A: 256, B: 64, C: 128}) == [B, C, A]
    assert leaving_order("lru", [A, B, C], {A: 256, B: 64, C: 128}) == [A, B, C]


def test_cost_weighs_uses_and_follows_the_given_cost() -> None:
    assert leaving_order("cost", [A, A, A, A, B, C], {A: 64, B: 256, C: 64}) == [C, B, A]
    flat = POLICIES["cost"](Cost(per_token=1.0, per_token_per_depth=0.0))  # type: ignore[call-arg]
    assert leaving_order(flat, [A, B, C], {A: 256, B: 64, C: 128}) == [A, B, C]


def retained(policy: str, wishes: dict[int, RetainRange | None], wait: float = 0.0) -> list[int]:
    world = make_world("full", 1 + len(wishes) * LENGTH // 16, policy=policy)
    for seed, wish in wishes.items():
        cached(world, prompt_of(LENGTH, seed), CacheControl(retain=() if wish is None else (wish,)))
        world.clock.advance(1)
    world.clock.advance(wait)
    return as_they_leave(world, {seed: prompt_of(LENGTH, seed) for seed in wishes})


@every_policy
def test_priorities_of_requests_rank_before_any_policy(policy: str) -> None:
    high, low = RetainRange(priority=2), RetainRange(priority=-1)
    assert retained(policy, {A: high, B: None, C: low}) == [C, B, A]
    assert retained(policy, {A: low, B: None, C: high}) == [A, B, C]


@every_policy
def test_a_priority_ends_with_its_ttl(policy: str) -> None:
    wishes = {A: RetainRange(priority=1, ttl=5.0), B: RetainRange(priority=1)}
    assert retained(policy, wishes, wait=10.0) == [A, B]


def test_priority_evicts_what_expires_first() -> None:
    wishes = {A: RetainRange(ttl=500.0), B: RetainRange(ttl=100.0), C: RetainRange()}
    assert retained("priority", wishes) == [B, A, C]
    assert retained("lru", wishes) == [A, B, C]


@every_policy
def test_a_node_is_queued_when_its_sequence_closes_and_while_its_tail_is_evicted(policy: str) -> None:
    world = make_world("full", 1 + 40, policy=policy)
    queue = world.cache.state.accounts[""].queue
    item = start(world, prompt_of(30 * 16))
    run(world, item)
    assert len(queue) == 0, "a sequence uses it"
    finish(world, item)
    assert len(queue) == 1
    hog = press(world, 20 * 16)
    (entry,) = world.cache.state.tree.roots[world.cache.root_hash(CacheControl())].children.values()
    assert entry.tokens < 30 * 16
    assert len(queue) == 1
    assert queue.next_victim(world.clock.now()) is entry
    finish(world, hog)
    world.cache.check()


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'belady'.*lru"):
        make_policy("belady")


# -- before any policy -----------------------------------------------------------------------------------------


@every_policy
def test_unneeded_window_pages_are_evicted_before_resumable_ones(policy: str) -> None:
    """25 + 3 blocks of which the windows (40 tokens) at 400 and 40 need 3 each."""
    world = make_world("sliding", 1 + 28, policy=policy)
    cached(world, prompt_of(40, A))
    world.clock.advance(1)
    cached(world, prompt_of(400, B))
    world.clock.advance(1)
    press(world, 22 * 16)
    assert [found(world, prompt_of(40, A)), found(world, prompt_of(400, B))] == [40, 400]
    world.check()


def test_a_leaf_that_is_not_resumable_is_evicted_first() -> None:
    """The newest request's answer is not resumable; it is evicted before an older, resumable prompt."""
    world = make_world("state+full", 1 + 8, checkpoint_policy=CheckpointPolicy(turn_end=False, branch=False))
    cached(world, prompt_of(48, A))
    world.clock.advance(1)
    finish(world, run(world, serve(world, prompt_of(48, B)), [7] * 160))
    world.clock.advance(1)
    stats = world.cache.stats()
    blocks = 6 * (int(stats["free_slabs"]) - 1) + int(stats["free_pages_in_occupied_slabs"])  # type: ignore[arg-type]
    press(world, 16 * (blocks + 1))  # a state, and one block more than is free
    assert found(world, prompt_of(48, A)) == 48
    assert found(world, prompt_of(48, B)) == 48
    assert world.cache.match([*prompt_of(48, B), *[7] * 160, 0]).matched < 208, "the answer left"
    world.check()


# -- no starvation ---------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], ModelSpec]] = {
    "Nemotron-H": lambda: load_spec("nemotron-h-8b"),
    "Qwen3-Next": lambda: load_spec("qwen3-next-80b"),
    "DeepSeek-V3 with a Mamba-2 draft": lambda: with_draft(
        load_spec("deepseek-v3"), load_spec("mamba2-2.7b")
    ),
}
every_model = pytest.mark.parametrize("model", sorted(MODELS))


def hybrid(model: str, states: int, more: int, **options: object) -> World:
    """Return a pool with the slabs of `states` states, and `more`."""
    layout = PoolLayout.build(MODELS[model]().layers)
    clock = VirtualClock()
    slabs = 1 + states * layout.width("state") + more
    return World(KVCache(layout, slabs, clock=clock, max_sequences=32, max_tokens=1 << 18, **options), clock)  # type: ignore[arg-type]


def attention_per_slab(cache: KVCache) -> float:
    """Return the blocks of attention pages in a slab."""
    return cache.layout.of("token")[0].pages_per_slab / cache.layout.width("token")


def fill(world: World, tokens: int, seed: int) -> None:
    """Run a request without simulated bytes."""
    seq = world.cache.open(world.cache.match([seed]))
    assert seq.extend(tokens) == 0
    seq.commit([seed] * tokens)
    world.cache.take_copies()
    seq.close()
    world.clock.advance(1)


@every_model
def test_a_pool_full_of_cached_attention_pages_still_gives_states(model: str) -> None:
    world = hybrid(
        model, states=1, more=200, checkpoint_policy=CheckpointPolicy(prompt_end=False, branch=False)
    )
    cache = world.cache
    fill(world, int(200 * attention_per_slab(cache)) // 1 * 16, seed=1)
    assert cache.state.pool.free_slabs <= 1
    could = (cache.state.pool.slabs - 1) // (cache.layout.width("state") + 1)
    for i in range(could):
        assert cache.open(cache.match([100 + i])).extend(16) == 0
    assert cache.stats()["evictions"]
    cache.check()


@every_model
def test_a_pool_full_of_cached_snapshots_still_gives_attention_pages(model: str) -> None:
    world = hybrid(model, states=6, more=1)
    cache = world.cache
    for seed in range(1, 12):
        fill(world, 16, seed)
    assert cache.stats()["cached_pages"] >= 5 * cache.layout.width("state")  # type: ignore[operator]
    assert cache.state.pool.free_slabs < cache.layout.width("state")
    slabs = cache.state.pool.slabs - 1 - cache.layout.width("state")
    hog = cache.open(cache.match([100]))
    assert hog.extend(int(slabs * attention_per_slab(cache)) * 16) == 0
    assert hog.extend(int(slabs * attention_per_slab(cache)) * 16 + 16) > 0
    cache.check()


@every_model
def test_live_pages_scattered_over_slabs_are_moved_together_for_a_state(model: str) -> None:
    """Three live sequences of one block have a slab each; a fourth fits only if these are emptied."""
    layout = PoolLayout.build(MODELS[model]().layers)
    attention = layout.of("token")[0]
    together = -(-4 * attention.runs // attention.pages_per_slab)
    none = CheckpointPolicy(prompt_end=False, turn_end=False, branch=False)
    world = hybrid(model, states=4, more=together, checkpoint_policy=none)
    live = [serve(world, prompt_of(16, seed=i)) for i in range(3)]
    pages = np.concatenate([item.sequence.table(attention.index).ravel() for item in live])
    assert len(set((pages // attention.pages_per_slab).tolist())) == 3 > together
    last = serve(world, prompt_of(16, seed=9))
    assert world.cache.stats()["moved_pages"]
    world.check()
    for item in [*live, last]:
        finish(world, item)


@every_model
@pytest.mark.few(1)
def test_pages_scattered_over_slabs_never_block_an_allocation(model: str) -> None:
    """Whatever is cached or live where: a request is refused only if it would not fit an empty pool
    beside the live pages. Bytes are checked after every step."""
    world = hybrid(model, states=5, more=4)
    cache = world.cache
    chance = np.random.default_rng(3)
    refused = 0
    for _ in range(60):
        world.clock.advance(1)
        item = start(world, prompt_of(int(chance.integers(17, 120)), seed=int(chance.integers(0, 6))))
        n = len(item.prompt) - len(item.tokens)
        blocks = (
            -(-(len(item.tokens) + n) // 16) - item.sequence.reserved_tokens // 16 + item.sequence.shared_tail
        )
        missing = item.sequence.extend(n)
        if missing:
            refused += 1
            needs = [0] * len(cache.state.pool.classes)
            for group in cache.layout.groups:
                wanted = group.runs * (1 if group.spec.unit == "state" else blocks)
                needs[cache.state.pool.class_of[group.index]] += wanted
            assert cache.state.pool.missing_slabs(needs) > 0, "it would have fitted"
            finish(world, item)
        else:
            world.step(item, item.prompt[len(item.tokens) :])
            world.check()
        while len(world.opened) > int(chance.integers(1, 6)):
            finish(world, world.opened[int(chance.integers(len(world.opened)))])
    assert refused < 30
    assert cache.stats()["evictions"]


def test_moved_snapshots_of_two_page_sizes_follow_their_own_numbers() -> None:
    """A page id means another page in every size: renumbering one size must not touch the other."""
    world = make_world("several pages a slab", 6)
    for length, seed in ((40, 5), (40, 4), (16, 4), (4, 0)):
        item = start(world, prompt_of(length, seed))
        assert item.sequence.extend(length - len(item.tokens)) == 0
        world.step(item, item.prompt[len(item.tokens) :])
        world.clock.advance(1)
        world.check()


def test_moved_pages_of_blocks_where_prompts_part_are_followed_in_every_node() -> None:
    """A run that grows out of a shared block leaves that block's page to its parent, also when pages move."""
    world = make_world("state+full", 7, checkpoint_policy=CheckpointPolicy(every_blocks=3))
    for length, seed, more in ((24, 1, 16), (14, 1, 18), (12, 1, 11), (49, 0, 9), (40, 1, 9), (11, 1, 21)):
        item = start(world, [*prompt_of(length, seed), *prompt_of(more, 5)])
        assert item.sequence.extend(len(item.prompt) - len(item.tokens)) == 0
        world.step(item, item.prompt[len(item.tokens) :])
        world.run_copies()
        finish(world, item)
        world.clock.advance(1)


# -- cost ------------------------------------------------------------------------------------------------------


def calls(work: Callable[[], object]) -> int:
    """Python and built-in calls made by `work`."""
    made = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.parametrize("kind", ["full", "sliding+full"])
@every_policy
def test_eviction_costs_the_same_in_a_pool_a_hundred_times_as_large(kind: str, policy: str) -> None:
    made = []
    for blocks in (1_000, 100_000):
        layout = PoolLayout.build(LAYOUTS[kind])
        row_slabs = sum(g.runs / g.pages_per_slab for g in layout.groups)
        clock = VirtualClock()
        cache = KVCache(
            layout, 1 + int(blocks * row_slabs), policy=policy, clock=clock, max_sequences=4, max_tokens=1024
        )
        seed = 0
        while not cache.stats()["evictions"]:
            seed += 1
            seq = cache.open(cache.match([seed]))
            assert seq.extend(1024) == 0
            seq.commit(np.full(1024, seed, np.int32))
            seq.close()
            clock.advance(1)
        for _ in range(64):  # settle: spares that are left over from filling
            seq = cache.open(cache.match([5]))
            seq.extend(1024)
            seq.close()
        seq = cache.open(cache.match([5]))
        made.append(calls(lambda seq=seq: seq.extend(1024)))  # type: ignore[misc]
        assert seq.reserved_tokens == 1024
    assert made[1] < 2 * made[0] + 100


# -- leaving ahead of need -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in sorted(LAYOUTS) if PoolLayout.build(LAYOUTS[kind]).of("token")]
)
def test_evict_ahead_evicts_a_few_pages_at_a_time_up_to_its_share(kind: str) -> None:
    world = make_world(kind, 1 + 20 * slabs_for(kind, 64))
    cache, room = world.cache, world.cache.state.allocator
    held = serve(world, prompt_of(64, seed=1))
    assert not room.evict_ahead(), "there is room"
    assert not room.evictions
    i = 2
    while not room.evictions:
        cached(world, prompt_of(48, seed=i))
        i += 1
    world.run_copies()
    size = cache.state.pages.row_bytes
    rows = (cache.state.pool.slabs - 1) * cache.layout.slab_bytes // size // AHEAD
    assert rows
    needs, calls = cache.state.pages.needs(rows), 0
    left, moves = room.evicted_bytes, cache.state.compaction.moved_pages
    part = (cache.state.pool.slabs - 1) * cache.layout.slab_bytes // AHEAD
    while cache.state.pool.slabs_short(needs) and free_bytes(cache) < part and calls < 64:
        assert room.evict_ahead()
        gone, left = room.evicted_bytes - left, room.evicted_bytes
        assert 0 < gone <= (-(-rows // PIECES) + cache.layout.slab_bytes // size + 4) * size
        calls += 1
    assert calls < 64
    assert not room.evict_ahead()
    assert (room.evicted_bytes, cache.state.compaction.moved_pages) == (left, moves)
    cache.check()
    world.verify(held)


def free_bytes(cache: KVCache) -> int:
    slab = cache.layout.slab_bytes
    return cache.state.pool.free_slabs * slab + sum(
        c.free_pages * slab // c.per_slab for c in cache.state.pool.classes
    )


def test_no_more_than_a_part_of_the_pool_is_free_ahead_of_need_where_slabs_are_not_emptied() -> None:
    """Unneeded window pages lie between others, so it takes long until a slab is empty."""
    world = make_world("several pages a slab, every kind", 700)
    cache, room, rng = world.cache, world.cache.state.allocator, random.Random(1)
    held, i = [], 0
    while room.evictions < 40:
        i += 1
        item = serve(world, prompt_of(rng.randrange(20, 150), seed=i))
        if len(held) < 7 and not i % 5:
            held.append(item)
        else:
            world.opened.remove(item)
            item.sequence.close()
        world.clock.advance(1)
    before = free_bytes(cache)
    for _ in range(500):
        room.evict_ahead()
    most = (cache.state.pool.slabs - 1) * cache.layout.slab_bytes // AHEAD
    assert before < free_bytes(cache) < most + 4 * cache.layout.slab_bytes
    world.check()


def test_evict_ahead_does_not_evict_tenants_below_their_share() -> None:
    shares = [Tenant("gold", weight=1), Tenant("free", weight=1)]
    world = make_world("full", 65, tenants=shares)
    room = world.cache.state.allocator
    for i in range(40):
        for name in ("gold", "free"):
            cached(world, prompt_of(40, seed=100 * i + len(name)), control=CacheControl(tenant=name))
    used = {name: account.used for name, account in world.cache.state.accounts.accounts.items()}
    for _ in range(50):
        room.evict_ahead()
    for name, account in world.cache.state.accounts.accounts.items():
        assert account.used >= min(used[name], account.guaranteed - world.cache.layout.slab_bytes)


@pytest.mark.parametrize("kind", ["full", "sliding+full", "state+full"])
def test_evict_ahead_does_not_evict_retained_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting pages in transfer frees nothing before the copies are done, and the next request would miss."""
    monkeypatch.setattr(room_module, "AHEAD", 4)
    world = make_world(kind, 1 + 20 * slabs_for(kind, 48))
    cache, room = world.cache, world.cache.state.allocator
    ended, lent = list[OffloadBatch](), list[OffloadBatch]()
    cache.loading.set_listener(ended.append, on_close=True)
    part = (cache.state.pool.slabs - 1) * cache.layout.slab_bytes // 4
    for seed in range(1000):
        if free_bytes(cache) < part or room.evictions:
            break
        cached(world, prompt_of(48, seed=seed))
        for batch in ended:
            cache.loading.retain_batch(batch)
            lent.append(batch)
        ended.clear()
    assert free_bytes(cache) < part
    assert not room.evictions
    nodes = cache.state.tree.nodes
    assert not room.evict_ahead()
    assert cache.state.tree.nodes == nodes
    for batch in lent:
        cache.loading.release_batch(batch)
    assert room.evict_ahead()
    cache.check()
