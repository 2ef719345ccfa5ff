"""Events that the cache publishes, and that nothing is hashed without a listener."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvloom.core import (
    BlockRemoved,
    BlockStored,
    CacheControl,
    CheckpointPolicy,
    Event,
    hash_chain,
    tail_hash,
)

from .world import LAYOUTS, World, cached, finish, make_world, prompt_of, run, serve, slabs_for, start

every_layout = pytest.mark.parametrize("kind", sorted(LAYOUTS))


def listen(world: World) -> list[Event]:
    heard: list[Event] = []
    world.cache.events.subscribe(heard.append)
    return heard


def raw(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def names_of(world: World, tokens: list[int], control: CacheControl | None = None) -> list[bytes]:
    return hash_chain(world.cache.root_hash(control or CacheControl()), raw(tokens))


def busy(world: World) -> None:
    """Run prefill, decode, sharing, forks, rollbacks and evictions."""
    for i in range(12):
        trunk = prompt_of(48, seed=i % 3)
        item = serve(world, [*trunk, *prompt_of(20 + i, seed=i)])
        run(world, item, [7] * 20)
        if i % 4 == 0:
            fork = item.sequence.fork()
            if fork is not None:
                fork.close()
        item.tokens = item.tokens[: item.sequence.rollback(5)]
        finish(world, item)
        world.clock.advance(1)


@every_layout
def test_nothing_is_hashed_without_a_listener(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("a name was computed")

    for name, module in list(sys.modules.items()):
        if name.startswith("kvloom.core."):
            for function in ("chain", "tail_name"):
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, refuse)
    world = make_world(kind, slabs_for(kind, 100, states=3))
    busy(world)
    assert world.cache.stats()["evictions"]
    listen(world)
    with pytest.raises(AssertionError, match="a name was computed"):
        serve(world, prompt_of(40, seed=50))


def test_full_blocks_are_published_when_committed() -> None:
    world = make_world("full", 60)
    heard = listen(world)
    item = start(world, prompt_of(70))
    names = names_of(world, prompt_of(70))
    run(world, item, prompt_of(70)[:20])
    run(world, item, prompt_of(70)[20:64])
    assert heard == [
        BlockStored(item.sequence.root.hash, tuple(names[:1]), (0,), "device"),
        BlockStored(names[0], tuple(names[1:4]), (0,), "device"),
    ]
    run(world, item)
    assert len(heard) == 2, "six tokens are no block yet"
    finish(world, item)
    tail = tail_hash(names[3], raw(prompt_of(70)[64:]))
    assert heard[2:] == [BlockStored(names[3], (tail,), (0,), "device", tail_tokens=6)]


def test_the_root_of_published_hashes_covers_tenant_and_adapter() -> None:
    world = make_world("full", 60)
    heard = listen(world)
    control = CacheControl(tenant="gold", adapter="lora")
    cached(world, prompt_of(32), control)
    root = world.cache.root_hash(control)
    assert heard == [BlockStored(root, tuple(hash_chain(root, raw(prompt_of(32)))), (0,), "device")]
    assert root != world.cache.root_hash(CacheControl())


def test_a_cached_block_is_not_published_again() -> None:
    world = make_world("full", 60)
    heard = listen(world)
    cached(world, prompt_of(64))
    del heard[:]
    cached(world, prompt_of(64))
    assert not [e for e in heard if isinstance(e, BlockStored) and not e.tail_tokens]


def test_a_late_listener_gets_hashes_with_the_right_parent() -> None:
    world = make_world("full", 60)
    item = start(world, prompt_of(80))
    run(world, item, prompt_of(80)[:40])
    heard = listen(world)
    run(world, item)
    names = names_of(world, prompt_of(80))
    assert heard == [BlockStored(names[1], tuple(names[2:]), (0,), "device")]


def test_evicted_blocks_are_published_deepest_first_with_the_policy() -> None:
    world = make_world("full", 1 + 4, policy="fifo")
    heard = listen(world)
    cached(world, prompt_of(64))
    del heard[:]
    hog = start(world, prompt_of(4, seed=1))
    names = names_of(world, prompt_of(64))
    assert hog.sequence.extend(16) == 0
    assert heard == [BlockRemoved((names[3],), (0,), "device", "fifo")]
    assert hog.sequence.extend(64) == 0
    gone = [name for event in heard if isinstance(event, BlockRemoved) for name in event.hashes]
    assert gone == names[::-1]


@pytest.mark.parametrize("length", [64, 70])
def test_a_snapshot_is_published_with_its_group_and_position(length: int) -> None:
    world = make_world("state+full", 60, checkpoint_policy=CheckpointPolicy(turn_end=False))
    (states,) = (g.index for g in world.cache.layout.of("state"))
    heard = listen(world)
    serve(world, prompt_of(length))
    (told,) = (e for e in heard if isinstance(e, BlockStored) and states in e.groups)
    names = names_of(world, prompt_of(length))
    if length == 64:
        assert told == BlockStored(names[2], (names[3],), (states,), "device")
    else:
        tail = tail_hash(names[3], raw(prompt_of(70)[64:]))
        assert (told.parent, told.hashes, told.tail_tokens) == (names[3], (tail,), 6)


@every_layout
def test_events_are_consistent_no_unknown_parent_no_removal_before_storing(kind: str) -> None:
    world = make_world(kind, slabs_for(kind, 100, states=3))
    heard = listen(world)
    busy(world)
    roots = {world.cache.root_hash(CacheControl())}
    known: dict[bytes, set[int]] = {}
    dropped = 0
    for event in heard:
        assert event.hashes  # type: ignore[union-attr]
        if isinstance(event, BlockStored):
            assert event.parent in known or event.parent in roots
            for name in event.hashes:
                known.setdefault(name, set()).update(event.groups)
        elif isinstance(event, BlockRemoved):
            assert event.reason in ("adaptive", "adaptive (off: LRU)", "grown")
            for name in event.hashes:
                if name in known:
                    dropped += 1
                    known[name] -= set(event.groups)
    assert dropped


def test_unsubscribing_does_not_affect_other_listeners() -> None:
    world = make_world("full", 60)
    first: list[Event] = []
    stop = world.cache.events.subscribe(first.append)
    second = listen(world)
    cached(world, prompt_of(32))
    assert first == second
    stop()
    cached(world, prompt_of(32, seed=1))
    assert (len(first), len(second)) == (1, 2)
    assert world.cache.events.listening


def test_requests_with_store_off_publish_nothing() -> None:
    world = make_world("state+full", 60)
    heard = listen(world)
    cached(world, prompt_of(70), CacheControl(store=False))
    assert heard == []
