"""Edge cases that failed once, each in its shortest form."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core import (
    BlockStored,
    CacheControl,
    CheckpointPolicy,
    Field,
    KVCache,
    LayerSpec,
    Media,
    PoolLayout,
    RetainRange,
    Visibility,
)

from .world import LAYOUTS, Open, World, attention, make_world, run, start, state


def serve(world: World, prompt: list[int], **control: object) -> Open:
    return run(world, start(world, prompt, CacheControl(**control)))  # type: ignore[arg-type]


def finish(world: World, item: Open) -> None:
    world.opened.remove(item)
    item.sequence.close()


def test_rolling_back_inside_a_block_that_a_fork_reads_copies_it_before_writing() -> None:
    world = make_world("full", 40)
    first = serve(world, [1] * 40)
    child = first.sequence.fork()
    assert child is not None
    other = Open(child, list(first.tokens), list(first.prompt), first.control)
    world.opened.append(other)
    first.tokens = first.tokens[: first.sequence.rollback(3)]
    run(world, first, [2, 2, 2])
    run(world, other, [1])
    world.check()


def test_rollback_inside_a_cached_tail_copies_it_before_writing() -> None:
    world = make_world("sliding", 40)
    item = serve(world, [1] * 37)  # the prompt's end is a resume point, so its tail is in the tree
    item.tokens = item.tokens[: item.sequence.rollback(2)]
    run(world, item, [2] * 5)
    again = start(world, [1] * 38)
    assert again.sequence.resumed == 37
    world.check()


def test_rollback_never_takes_a_snapshot_of_other_tokens() -> None:
    world = make_world("state+full", 90, checkpoint_policy=CheckpointPolicy(every_blocks=0))
    finish(world, serve(world, [7] * 32 + [1] + [2] * 7))  # a snapshot at 40, after 1, 2, 2…
    item = serve(world, [7] * 32)
    run(world, item, [1] + [3] * 12)
    reached = item.sequence.rollback(1)
    item.tokens = item.tokens[:reached]
    run(world, item, [4])
    world.check()
    assert reached <= 32 or reached == 44


def test_a_long_window_in_a_small_pool_closes() -> None:
    world = make_world("sliding", 12)
    item = start(world, [1])
    for _ in range(20):
        run(world, item, [1] * 16)
    finish(world, item)
    world.check()


def test_a_match_that_went_stale_is_looked_up_again() -> None:
    world = make_world("full", 60)
    finish(world, serve(world, [1] * 37))
    match = world.cache.match([1] * 39)
    finish(world, serve(world, [1] * 120, read=False))  # fills the partial block that the match had seen
    sequence = world.cache.open(match)
    world.opened.append(Open(sequence, [1] * sequence.length, [1] * 39, CacheControl()))
    world.check()


def test_a_media_run_evicted_after_the_match_is_no_error() -> None:
    world = make_world("cross", 8)
    image = (Media(2, 3, b"a" * 16, tokens=16),)
    sequence = world.cache.open(world.cache.match([1] * 16, media=image))
    assert sequence.extend(16) == 0
    sequence.commit([1] * 16)
    sequence.close()
    match = world.cache.match([1] * 17, media=image)
    press = world.cache.open(world.cache.match([9]))
    assert press.extend(16 * 7) == 0
    assert world.cache.open(match).resumed == 0
    world.cache.check()


def test_copies_to_pages_that_were_let_go_are_forgotten() -> None:
    world = make_world("state+full", 50)
    finish(world, serve(world, [1] * 88))
    cache, prompt = world.cache, [1] * 88 + [9]
    first = cache.open(cache.match(prompt))
    assert first.extend(1) == 0
    first.close()  # interrupted before its step ran
    second = cache.open(cache.match(prompt))
    assert second.extend(1) == 0
    written = [
        range(int(t) * batch.page_stride, (int(t) + 1) * batch.page_stride)
        for batch in cache.take_copies()
        for t in batch.target
    ]
    assert written
    for i, a in enumerate(written):
        assert all(a.stop <= b.start or b.stop <= a.start for b in written[:i]), (
            "two copies write the same bytes"
        )


@pytest.mark.slow
def test_more_than_32767_checkpoints_may_share_a_window() -> None:
    layout = PoolLayout.build({"s": attention(Visibility("sliding", 1024)), "f": attention()})
    cache = KVCache(layout, 200_000, max_tokens=64)
    for i in range(33_000):
        prompt = [1] * 16 + [i + 2]
        sequence = cache.open(cache.match(prompt))
        assert sequence.extend(len(prompt) - sequence.length) == 0
        cache.take_copies()
        sequence.commit(prompt[sequence.length :])
        sequence.close()
    cache.check()


def test_a_decode_step_lets_a_whole_chunk_go_at_once() -> None:
    world = make_world("chunked+full", 40)
    item = serve(world, [1] * 47)
    rows = np.array([item.sequence.row])
    assert world.cache.extend_many(rows) == 0
    world.cache.commit_many(rows, [1])
    assert not item.sequence.table(0).any()


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([0, 0], "row 0 is listed twice"),
        ([0, 3], "row 3 has no open"),
        ([-1], "row -1"),
        ([0.5], "integers"),
    ],
)
def test_bad_rows_are_refused_and_nothing_changes(rows: list[float], error: str) -> None:
    world = make_world("full", 40)
    serve(world, [1] * 16)
    for call in (world.cache.extend_many, lambda at: world.cache.commit_many(at, [1] * len(rows))):
        with pytest.raises(ValueError, match=error):
            call(np.array(rows))
    world.check()


def test_bad_numbers_are_refused_and_nothing_changes() -> None:
    world = make_world("state+full", 40)
    item = serve(world, [1] * 16)
    with pytest.raises(TypeError):
        item.sequence.extend(1.5)  # type: ignore[arg-type]
    assert world.cache.extend_many(np.array([item.sequence.row])) == 0
    for token in (2**32 + 5, -1, 3.9):
        with pytest.raises(ValueError, match="token"):
            world.cache.commit_many(np.array([item.sequence.row]), [token])
    with pytest.raises(KeyError, match="not a state group"):
        item.sequence.states(99)
    finish(world, item)
    with pytest.raises(ValueError, match="closed"):
        _ = item.sequence.length
    world.check()


def test_a_pool_that_cannot_hold_a_block_and_a_state_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a pool of 2 slabs of 6144 bytes cannot hold one block and one state"
    ):
        make_world("state+full", 2)


def test_a_priority_applies_to_blocks_cached_before() -> None:
    world = make_world("full", 9)  # eight blocks
    finish(world, serve(world, [1] * 64))
    world.clock.advance(1)
    finish(world, serve(world, [1] * 64 + [2], retain=(RetainRange(0, 64, 5),)))
    world.clock.advance(1)
    finish(world, serve(world, [3] * 32))
    world.clock.advance(1)
    finish(world, serve(world, [4] * 48))
    assert world.cache.match([1] * 65).resume == 64
    assert world.cache.match([3] * 33).resume < 32


def test_a_hit_takes_back_that_a_session_has_ended() -> None:
    world = make_world("full", 9)
    finish(world, serve(world, [1] * 64, session="a"))
    world.cache.end_session("a")
    world.clock.advance(1)
    finish(world, serve(world, [2] * 32))
    world.clock.advance(1)
    finish(world, serve(world, [1] * 64 + [5]))
    world.clock.advance(1)
    finish(world, serve(world, [3] * 48))
    assert world.cache.match([1] * 65).resume == 64


def test_layouts_for_elastic_memory_exist_for_odd_sizes() -> None:
    layers = {**{f"a{i}": state(6160) for i in range(25)}, **{f"b{i}": state(28368) for i in range(29)}}
    layout = PoolLayout.build(layers, granularity=2 << 20)
    assert layout.slab_bytes % (2 << 20) == 0
    assert all(layout.slab_bytes % g.page_stride == 0 for g in layout.groups)


@pytest.mark.slow
def test_a_late_listener_of_a_deep_tree_gets_hashes() -> None:
    cache = KVCache(PoolLayout.build(LAYOUTS["full"]), 3000, max_tokens=30_000)
    tokens = np.arange(20_000, dtype=np.int32)
    sequence = cache.open(cache.match(tokens))
    assert sequence.extend(tokens.size) == 0
    sequence.commit(tokens)
    sequence.close()
    for block in range(1, 1200):
        for offset in (3, 5):  # cuts that leave nodes without a whole grain
            cache.unpin(cache.pin(tokens[: 16 * block + offset], 1.0))
    heard: list[object] = []
    cache.events.subscribe(heard.append)
    more = np.concatenate([tokens, tokens[:32]])
    sequence = cache.open(cache.match(more))
    assert sequence.extend(more.size - sequence.length) == 0
    sequence.commit(more[sequence.length :])
    assert any(isinstance(event, BlockStored) for event in heard)


def test_stuck_pages_are_counted_and_nothing_is_evicted_in_vain() -> None:
    world = make_world("full", 19)
    finish(world, serve(world, [1] * 8))
    serve(world, [1] * 5 + [2] * 11)  # parts from the first inside a block, and stays
    finish(world, serve(world, [3] * 64))
    needy = start(world, [4])
    assert needy.sequence.extend(17 * 16) > 0
    assert world.cache.match([3] * 65).resume == 64
    assert needy.sequence.extend(16 * 16) == 0


def test_a_prefix_with_an_evicted_window_gets_a_checkpoint() -> None:
    """Many prompts share a prefix whose window pages were evicted: the request that recomputes it takes a checkpoint."""
    fields = (Field("k", (2, 8), "fp32"), Field("v", (2, 8), "fp32"))
    spans = {"layers.0.a": Visibility("full"), "layers.1.a": Visibility("sliding", 32)}
    layout = PoolLayout.build({name: LayerSpec("token", fields, span) for name, span in spans.items()}, 16)
    cache = KVCache(layout, slabs=40, max_tokens=512)

    def serve(tokens: list[int]) -> int:
        sequence = cache.open(cache.match(np.array(tokens, np.int32)))
        found = sequence.length
        assert not sequence.extend(len(tokens) - found)
        cache.take_copies()
        sequence.commit(np.array(tokens[found:], np.int32))
        sequence.close()
        cache.take_copies()
        return found

    shared = list(range(100, 164))
    assert serve([*shared, *[1] * 20]) == 0
    for other in range(30):
        if not cache.match(np.array([*shared, 9], np.int32)).resume:
            break
        serve([1000 + other] * 100)
    assert cache.explain(cache.match(np.array([*shared, 9], np.int32))).reason == "window page missing"
    assert serve([*shared, *[2] * 20]) == 0
    assert serve([*shared, *[3] * 20]) == len(shared)
    cache.check()
