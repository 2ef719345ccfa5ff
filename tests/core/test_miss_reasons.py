"""Miss reasons: each one comes from a real situation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom.core import MISS_REASONS, CacheControl, CheckpointPolicy, Match, Media, Miss

from .world import World, cached, finish, make_world, prompt_of, run, serve, start

Situation = tuple[World, Match]


def complete() -> Situation:
    world = make_world("full", 40)
    cached(world, prompt_of(40))
    return world, world.cache.match(prompt_of(40))


def never_seen() -> Situation:
    world = make_world("full", 40)
    cached(world, prompt_of(40))
    return world, world.cache.match([*prompt_of(21), *prompt_of(30, seed=1)])


def evicted() -> Situation:
    world = make_world("full", 1 + 4, policy="fifo")
    cached(world, prompt_of(64))
    world.clock.advance(7.5)
    assert start(world, prompt_of(4, seed=1)).sequence.extend(32) == 0
    world.clock.advance(100)
    return world, world.cache.match(prompt_of(64))


def other_tenant() -> Situation:
    world = make_world("full", 40)
    cached(world, prompt_of(40), CacheControl(tenant="gold"))
    cached(world, prompt_of(8), CacheControl(tenant="free"))
    return world, world.cache.match(prompt_of(40), CacheControl(tenant="free"))


def snapshot_missing() -> Situation:
    world = make_world("state+full", 60, checkpoint_policy=CheckpointPolicy(turn_end=False))
    finish(world, run(world, serve(world, prompt_of(50)), [7] * 40))
    return world, world.cache.match([*prompt_of(50), *[7] * 30])


def window_page_missing() -> Situation:
    world = make_world("sliding", 1 + 25)
    cached(world, prompt_of(400))
    assert start(world, prompt_of(4, seed=1)).sequence.extend(16 * 22) == 0
    return world, world.cache.match(prompt_of(300))


def media_missing() -> Situation:
    world = make_world("cross", 1 + 3 + 3)
    prompt, image = prompt_of(40), (Media(20, 21, b"a" * 16, tokens=48),)
    cached(world, prompt, media=image)
    holder = world.cache.open(world.cache.match(prompt, media=(Media(20, 21, b"a" * 16),)))
    assert holder.resumed == 39, "the text stays in use"
    assert start(world, prompt_of(4, seed=1)).sequence.extend(16) == 0
    return world, world.cache.match(prompt, media=image)


def reading_off() -> Situation:
    world = make_world("full", 40)
    cached(world, prompt_of(40))
    return world, world.cache.match(prompt_of(40), CacheControl(read=False))


SITUATIONS: dict[str, tuple[Callable[[], Situation], Miss]] = {
    "complete": (complete, Miss("complete", 39)),
    "never seen": (never_seen, Miss("never seen", 21)),
    "evicted": (evicted, Miss("evicted", 32, 7.5, "fifo")),
    "other tenant": (other_tenant, Miss("other tenant", 8)),
    "snapshot missing": (snapshot_missing, Miss("snapshot missing", 50)),
    "window page missing": (window_page_missing, Miss("window page missing", 0)),
    "media missing": (media_missing, Miss("media missing", 20)),
    "reading off": (reading_off, Miss("reading off", 0)),
}


def test_every_reason_has_a_situation() -> None:
    assert set(SITUATIONS) == set(MISS_REASONS)


@pytest.mark.parametrize("reason", sorted(SITUATIONS))
def test_a_real_situation_gives_its_reason_position_time_and_policy(reason: str) -> None:
    situation, expected = SITUATIONS[reason]
    world, match = situation()
    assert world.cache.explain(match) == expected
    assert match.resume == expected.position
    world.cache.check()


@pytest.mark.parametrize("reason", sorted(SITUATIONS))
def test_an_explanation_reads_as_a_sentence_with_its_facts(reason: str) -> None:
    situation, expected = SITUATIONS[reason]
    world, match = situation()
    text = str(world.cache.explain(match))
    assert str(expected.position) in text
    assert MISS_REASONS[reason] in text
    if expected.when is not None:
        assert "7.5" in text
        assert "fifo" in text


def test_opening_counts_the_reasons() -> None:
    world = make_world("full", 60)
    for _ in range(2):
        cached(world, prompt_of(40))
    cached(world, prompt_of(40, seed=1), CacheControl(read=False))
    assert world.cache.stats()["miss_reasons"] == {"never seen": 1, "complete": 1, "reading off": 1}


def test_looking_up_and_explaining_change_nothing() -> None:
    for situation, _ in SITUATIONS.values():
        world, match = situation()
        before = world.cache.stats()
        world.cache.explain(match)
        world.cache.match(prompt_of(64))
        assert world.cache.stats() == before


def test_an_evicted_prompt_that_was_computed_again_is_no_longer_called_evicted() -> None:
    world = make_world("full", 1 + 8)
    cached(world, prompt_of(64))
    hog = start(world, prompt_of(4, seed=1))
    assert hog.sequence.extend(128) == 0
    assert world.cache.explain(world.cache.match(prompt_of(64))).reason == "evicted"
    finish(world, hog)
    cached(world, prompt_of(64))
    stop = world.cache.explain(world.cache.match([*prompt_of(64), 1, 2]))
    assert stop == Miss("never seen", 64)


def test_the_only_prompt_of_a_tenant_is_called_evicted_when_it_was() -> None:
    """The tree has no node of the tenant any more; the reason must still be known."""
    world = make_world("full", 1 + 4)
    gold = CacheControl(tenant="gold")
    cached(world, prompt_of(64), gold)
    world.clock.advance(2.0)
    assert start(world, prompt_of(4, seed=1)).sequence.extend(64) == 0
    assert world.cache.explain(world.cache.match(prompt_of(64), gold)) == Miss("evicted", 0, 2.0, "adaptive")
