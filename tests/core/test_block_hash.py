"""Block hashes are equal everywhere, and an index filled from events finds what the tree finds."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from kvloom.core import (
    HASH_BYTES,
    BlockRemoved,
    BlockStored,
    CacheControl,
    CheckpointPolicy,
    Event,
    HashIndex,
    KVCache,
    Media,
    PoolLayout,
    hash_chain,
    root_hash,
    tail_hash,
)

from .world import LAYOUTS, World, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

TEXT_LAYOUTS = sorted(set(LAYOUTS) - {"cross"})
ROOT = "f18d0ab795167dd5bd8c38fabda53052"
GRAINS = ["5dfe921c3cd2cf0f5db4d8080c1498bd", "0a1a80fb603c818c3b4b6fc27672f932"]
TAIL = "cc55f31f2dbe10f5d0aceb431e1ba62d"


def raw(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def digest_of(media_id: int) -> bytes:
    return bytes([-media_id]) * 16


# -- what a name is -----------------------------------------------------------------------------------------


def test_hashes_never_change() -> None:
    """A change here makes every stored page of every deployment unreachable."""
    root = root_hash("llama")
    data = raw(list(range(40)))
    assert root.hex() == ROOT
    assert root_hash("llama", "gold", "lora").hex() == "2ee6919f89e422bf38dac06abbe3eae4"
    assert [name.hex() for name in hash_chain(root, data)] == GRAINS
    assert tail_hash(hash_chain(root, data)[-1], data[2 * 64 :]).hex() == TAIL
    assert len(root) == HASH_BYTES


def test_hashes_of_media_never_change() -> None:
    data = raw([1, 2, -1, -1, -1, 5, *[7] * 12])
    root = root_hash("llama")
    assert [n.hex() for n in hash_chain(root, data, lambda _: b"a" * 16)] == [
        "6c079ef2736ebe0c2d1effc6b5524f21"
    ]
    assert tail_hash(root, data[:24], lambda _: b"a" * 16).hex() == "76eff28589d0a6d1cf3a53fa1632ec8b"


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_hashes_are_equal_in_another_process(hash_seed: str) -> None:
    code = (
        "from kvloom.core import hash_chain, root_hash, tail_hash; import numpy as np;"
        "root = root_hash('llama'); data = np.arange(40, dtype='<i4').tobytes();"
        "hashes = hash_chain(root, data); print(root.hex(), *(h.hex() for h in hashes), tail_hash(hashes[-1], data[128:]).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [ROOT, *GRAINS, TAIL]


def test_hashes_are_equal_with_and_without_the_native_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    data = raw(prompt_of(1000))
    names = hash_chain(root_hash("llama"), data)
    monkeypatch.setattr("kvloom.core.pool.loops.chain", None)
    assert hash_chain(root_hash("llama"), data) == names


@pytest.mark.parametrize("block", [16, 32, 64])
def test_hashes_do_not_depend_on_the_block_size(block: int) -> None:
    cache = KVCache(
        PoolLayout.build(LAYOUTS["full"], block), 100, model="llama", max_sequences=2, max_tokens=512
    )
    told: list[Event] = []
    cache.events.subscribe(told.append)
    seq = cache.open(cache.match(prompt_of(200)))
    assert seq.extend(200) == 0
    seq.commit(prompt_of(200))
    seq.close()
    grains = [n for e in told if isinstance(e, BlockStored) and not e.tail_tokens for n in e.hashes]
    tails = [n for e in told if isinstance(e, BlockStored) and e.tail_tokens for n in e.hashes]
    names = hash_chain(root_hash("llama"), raw(prompt_of(200)))
    assert grains == names
    assert tails == [tail_hash(names[-1], raw(prompt_of(200)[192:]))]


def test_model_tenant_and_adapter_have_their_own_hashes() -> None:
    roots = [
        root_hash(*parts)
        for parts in (
            ("m",),
            ("m", "t"),
            ("m", "", "t"),
            ("mt",),
            ("m", "t", "a"),
            ("m", "t", "", "a"),
            ("m", "", "", "t"),
            ("m", "ta"),
            ("", "m", "t"),
            ("n",),
        )
    ]
    assert len(set(roots)) == len(roots)
    data = raw(prompt_of(32))
    assert len({name for root in roots for name in hash_chain(root, data)}) == 2 * len(roots)


def test_a_hash_covers_all_tokens_before_it() -> None:
    one, two = prompt_of(64), prompt_of(64)
    two[3] += 1
    assert not set(hash_chain(root_hash("m"), raw(one))) & set(hash_chain(root_hash("m"), raw(two)))
    assert hash_chain(root_hash("m"), raw(one))[:2] == hash_chain(root_hash("m"), raw(one[:47]))


def test_media_are_hashed_by_content_extent_and_position_never_by_id() -> None:
    root = root_hash("m")

    def name(tokens: list[int], table: dict[int, bytes]) -> bytes:
        return hash_chain(root, raw((tokens + [5] * 16)[:16]), table.__getitem__)[0]

    first = name([1, -1, -1, 2], {-1: b"a" * 16})
    assert first == name([1, -9, -9, 2], {-9: b"a" * 16}), "the id is this process's own"
    others = [
        name([1, -1, -1, 2], {-1: b"b" * 16}),
        name([1, -1, 2, 2], {-1: b"a" * 16}),
        name([-1, -1, 2, 2], {-1: b"a" * 16}),
        name([1, -1, -2, 2], {-1: b"a" * 16, -2: b"a" * 15 + b"b"}),
        name([1, 7, 7, 2], {}),
    ]
    assert len({first, *others}) == 6


@pytest.mark.parametrize("tokens", [0, 16, 17])
def test_a_tail_is_shorter_than_a_grain(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"got {tokens}$"):
        tail_hash(root_hash("m"), raw([1] * tokens))


# -- an index filled from events --------------------------------------------------------------------------------


def follow(world: World) -> HashIndex:
    """Follow a worker's events, like a router."""
    index = HashIndex(world.cache.layout.groups)

    def listen(event: Event) -> None:
        if isinstance(event, BlockStored):
            index.stored(event.parent, event.hashes, event.groups, event.medium, event.tail_tokens)
        elif isinstance(event, BlockRemoved):
            index.dropped(event.hashes, event.groups, event.medium)

    world.cache.events.subscribe(listen)
    return index


def agree(world: World, index: HashIndex, text: list[int], n: int) -> None:
    """Check that the index finds the tree's resumable position; without states, in whole HASH_TOKENS units only."""
    match = world.cache.match([*text[:n], 0])
    found = world.cache.state.lookup.resumable_with(match, index)
    if world.cache.has_states or match.resume % 16 == 0:
        assert found == match.resume, f"of {n} tokens the tree gives {match.resume}, the index {found}"
    else:
        assert found <= match.resume


@pytest.mark.parametrize("kind", TEXT_LAYOUTS)
@pytest.mark.parametrize("before_last", [False, True])
def test_an_index_filled_from_events_finds_what_the_tree_finds(kind: str, before_last: bool) -> None:
    world = make_world(kind, 900, checkpoint_policy=CheckpointPolicy(before_last=before_last))
    index = follow(world)
    text = prompt_of(200)
    finish(world, run(world, serve(world, text[:150]), text[150:]))
    finish(world, serve(world, [*text[:85], *prompt_of(50, seed=1)]))
    for n in range(1, 201):
        agree(world, index, text, n)
        agree(world, index, [*text[:85], *prompt_of(120, seed=1)], n)


@pytest.mark.parametrize("kind", TEXT_LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_index_still_finds_what_the_tree_finds_after_evictions(kind: str, seed: int) -> None:
    world = make_world(
        kind, slabs_for(kind, 120, states=3), checkpoint_policy=CheckpointPolicy(every_blocks=3)
    )
    index = follow(world)
    chance = random.Random(seed)
    texts = []
    for _ in range(15):
        text = [*prompt_of(chance.randint(5, 50), chance.randint(0, 1)), *prompt_of(chance.randint(5, 50), 5)]
        item = start(world, text)
        if item.sequence.extend(len(item.prompt) - len(item.tokens)) == 0:
            world.run_copies()
            item.sequence.commit(item.prompt[len(item.tokens) :])
            world.run_copies()
        world.opened.remove(item)
        item.sequence.close()
        world.clock.advance(1)
        texts.append(text)
        for old in texts:
            for n in (16, 17, 33, 48, len(old)):
                agree(world, index, old, n)
    assert world.cache.stats()["evictions"]


@pytest.mark.parametrize("seed", range(3))
def test_no_hash_is_left_whose_pages_are_evicted(seed: int) -> None:
    world = make_world("full", 20)
    index = follow(world)
    chance = random.Random(seed)
    texts = []
    for _ in range(30):
        text = [*prompt_of(chance.randint(1, 40), chance.randint(0, 1)), *prompt_of(64, chance.randint(5, 8))]
        text = text[: len(text) // 16 * 16]  # no tails: every name is a grain's
        texts.append(text)
        cached(world, text)
        world.clock.advance(1)
        there = {
            name
            for old in texts
            for i, name in enumerate(hash_chain(world.cache.root_hash(CacheControl()), raw(old)))
            if world.cache.match([*old[: 16 * i + 16], 0]).matched == 16 * i + 16
        }
        assert len(index) == len(there)
        assert all(name in index for name in there)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_an_index_is_empty_when_everything_is_evicted(kind: str) -> None:
    world = make_world(kind, slabs_for(kind, 40, states=3))
    index = follow(world)
    for i in range(6):
        finish(world, run(world, serve(world, [*prompt_of(20, i % 2), *prompt_of(9, i)]), [7] * 9))
        world.clock.advance(1)
    world.run_copies()
    assert len(index)
    for _ in range(7):
        hog = world.cache.open(world.cache.match([4]))
        next(n for n in range(1024, -1, -16) if hog.extend(n) == 0)
    cached_pages = int(world.cache.stats()["cached_pages"])  # type: ignore[arg-type]
    assert cached_pages <= 1, "a page may be left that is too small for anyone"
    assert len(index) <= cached_pages


def test_a_snapshot_inside_a_longer_node_is_found_by_hash() -> None:
    """A prompt that is a prefix of a stored text has its snapshot inside that run, at a partial tail."""
    world = make_world("state+full", 60)
    index = follow(world)
    cached(world, prompt_of(80))
    cached(world, prompt_of(53))
    agree(world, index, prompt_of(80), 53)


def test_a_tail_is_found_by_its_tokens_alone() -> None:
    groups = PoolLayout.build(LAYOUTS["state"]).groups
    index = HashIndex(groups)
    root = root_hash("m")
    text = prompt_of(40)
    names = hash_chain(root, raw(text))
    index.stored(root, names, (), "w1")
    index.stored(names[-1], [tail_hash(names[-1], raw(text[32:37]))], [0], "w1", tail_tokens=5)

    def tail(parent: bytes, start: int, length: int) -> bytes:
        return tail_hash(parent, raw(text[start : start + length]))

    assert index.match(names, 39, root=root, tail=tail) == 37
    assert index.match(names, 36, root=root, tail=tail) == 0
    assert index.match(names, 39, root=root) == 0, "no hash covers its tokens"


# -- places ---------------------------------------------------------------------------------------------------


def two_workers() -> tuple[HashIndex, list[bytes]]:
    index = HashIndex(PoolLayout.build(LAYOUTS["full"]).groups)
    names = hash_chain(root_hash("m"), raw(prompt_of(64)))
    index.stored(root_hash("m"), names, [0], "w1")
    index.stored(root_hash("m"), names[:2], [0], "w2")
    return index, names


def test_a_router_asks_for_one_worker_or_for_all() -> None:
    index, names = two_workers()
    assert index.match(names, 64) == 64
    assert index.match(names, 50) == 50
    assert index.match(names, 64, places=["w2"]) == 32
    assert index.match(names, 64, places=["w3"]) == 0
    assert index.places(names[0]) == {"w1": (0,), "w2": (0,)}
    assert index.places(names[3]) == {"w1": (0,)}
    assert (index.parent(names[1]), index.parent(b"?")) == (names[0], None)


def test_pages_in_different_places_complete_one_prompt() -> None:
    index = HashIndex(PoolLayout.build(LAYOUTS["full"]).groups)
    names = hash_chain(root_hash("m"), raw(prompt_of(64)))
    index.stored(root_hash("m"), names[:2], [0], "host")
    index.stored(names[1], names[2:], [0], "disk")
    assert index.match(names, 64) == 64
    assert index.match(names, 64, places=["disk"]) == 0


def test_forgetting_a_place_forgets_what_only_it_had() -> None:
    index, names = two_workers()
    index.forget("w1")
    assert index.match(names, 64) == 32
    assert len(index) == 2
    index.forget("w2")
    index.forget("never heard of")
    assert len(index) == 0


def test_removed_hashes_are_dropped_with_their_last_group() -> None:
    layout = PoolLayout.build(LAYOUTS["sliding+full"])
    index = HashIndex(layout.groups)
    names = hash_chain(root_hash("m"), raw(prompt_of(160)))
    index.stored(root_hash("m"), names, [0, 1], "w1")
    assert index.match(names, 160) == 160
    index.dropped(names[8:9], [0], "w1")
    assert index.match(names, 160) == 128, "the window at 160 is broken, the text goes on"
    assert names[8] in index
    index.dropped(names[8:9], [1], "w1")
    assert names[8] not in index
    index.dropped(names[8:9], [1], "w1")
    index.dropped([b"never heard of"], [0], "w9")
    assert len(index) == 9


def test_unknown_groups_and_bad_tails_are_refused() -> None:
    index, names = two_workers()
    with pytest.raises(ValueError, match="7"):
        index.stored(root_hash("m"), names, [7], "w1")
    with pytest.raises(ValueError, match="16"):
        index.stored(root_hash("m"), names[:1], [0], "w1", tail_tokens=16)
    with pytest.raises(ValueError, match="2 of 3"):
        index.stored(root_hash("m"), names[:2], [0], "w1", tail_tokens=3)
    assert index.match(names, 64) == 64


def test_two_images_have_two_hashes_in_events() -> None:
    stored = []
    for which in (1, 2):
        world = make_world("full", 40)
        told: list[Event] = []
        world.cache.events.subscribe(told.append)
        cached(world, prompt_of(32), media=(Media(4, 9, digest_of(-which)),))
        (event,) = told
        assert isinstance(event, BlockStored)
        stored.append(event.hashes)
    assert not set(stored[0]) & set(stored[1])
