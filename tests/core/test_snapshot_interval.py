"""The interval between state snapshots follows the prompts that were looked up."""

from __future__ import annotations

import random

import pytest

from kvloom.core import CheckpointPolicy
from kvloom.core.prefix import SnapshotInterval

from .world import World, make_world, prompt_of

MEASURED = CheckpointPolicy(is_measured=True, before_last=True)


def cached(world: World, prompt: list[int]) -> int:
    """Run a prompt without simulated bytes. Return where it resumed."""
    cache = world.cache
    seq = cache.open(cache.match(prompt))
    while seq.length < len(prompt):
        end = min(seq.next_checkpoint or len(prompt), len(prompt))
        assert seq.extend(end - seq.length) == 0
        seq.commit(prompt[seq.length : end])
        cache.take_copies()
    resumed = seq.resumed
    seq.close()
    return resumed


def edited_prompts(world: World, count: int) -> list[int]:
    """Run pairs of prompts: a prompt of 900 tokens, and the same prompt edited at a random place. Return the tokens that
    each edited prompt computed although they were cached."""
    rng = random.Random(3)
    lost = []
    for number in range(count):
        place = rng.randrange(300, 880)
        cached(world, prompt_of(900, seed=2 * number))
        edited = [*prompt_of(place, seed=2 * number), *prompt_of(900 - place, seed=2 * number + 1)]
        lost.append(place - cached(world, edited))
    return lost


def test_edited_prompts_get_snapshots_at_an_interval() -> None:
    world = make_world("state+full", 4000, checkpoint_policy=MEASURED)
    interval = world.cache.snapshot_interval
    assert interval is not None
    assert "too few prompts" in interval.reason
    before = edited_prompts(world, 16)
    assert min(before) >= 300
    assert interval.tokens == 256
    assert "save" in interval.reason
    assert world.cache.checkpoint_policy.every_blocks == 16
    later = edited_prompts(world, 40)[16:]
    assert max(later) < 256
    world.cache.check()
    assert interval.tokens == 256, "hits of periodic snapshots count as gain of the interval"


def test_snapshots_that_cost_more_than_they_save_are_not_taken() -> None:
    world = make_world("state+full", 4000, checkpoint_policy=MEASURED)
    interval = world.cache.snapshot_interval
    assert interval is not None
    interval.step_tokens = 5000.0
    edited_prompts(world, 40)
    assert interval.tokens == 0
    assert "no interval saves more" in interval.reason


def test_conversations_that_only_grow_need_no_interval() -> None:
    world = make_world("state+full", 4000, checkpoint_policy=MEASURED)
    interval = world.cache.snapshot_interval
    assert interval is not None
    for number in range(12):
        for turn in range(1, 5):
            cached(world, prompt_of(200 * turn, seed=number))
    assert interval.tokens == 0
    assert "compute 0 cached tokens again" in interval.reason


@pytest.mark.parametrize("every", [0, 4])
def test_a_fixed_interval_never_changes(every: int) -> None:
    world = make_world("state+full", 4000, checkpoint_policy=CheckpointPolicy(every_blocks=every))
    interval = world.cache.snapshot_interval
    assert interval is not None
    edited_prompts(world, 20)
    assert (interval.tokens, interval.reason) == (16 * every, "fixed")
    assert world.cache.checkpoint_policy.every_blocks == every


def test_models_without_states_have_no_interval() -> None:
    assert make_world("sliding+full", 400, checkpoint_policy=MEASURED).cache.snapshot_interval is None


def test_a_full_pool_counts_the_hits_that_snapshots_displace() -> None:
    """Half of the prompts hit 8,000 tokens. A snapshot has the bytes of 1,000 tokens, and saves 200 tokens."""

    def decided(is_full: bool) -> int:
        interval = SnapshotInterval(0, state_bytes=1000, token_bytes=1.0, is_fixed=False)
        for number in range(32):
            hit = 8000 * (number % 2)
            interval.observe(hit + 3000, hit + 456 * (1 - number % 2), hit, hit, is_full)
        return interval.tokens

    assert decided(is_full=False) == 256
    assert decided(is_full=True) == 0
