"""Resumable positions: partial blocks, windows, snapshots, images; and which pages are shared."""

from __future__ import annotations

import pytest

from kvloom.core import CheckpointPolicy, KVCache, Media, PoolLayout, VirtualClock
from kvloom.models.specs import load_spec

from .world import LAYOUTS, WITH_STATES, World, cached, finish, make_world, prompt_of, run, serve, start


def model_world(model: str, slabs: int, **options: object) -> World:
    layout = PoolLayout.build(load_spec(model).layers)
    clock = VirtualClock()
    cache = KVCache(layout, slabs, clock=clock, max_sequences=8, max_tokens=8192, **options)  # type: ignore[arg-type]
    return World(cache, clock)


def resume(world: World, prompt: list[int], media: tuple[Media, ...] = ()) -> int:
    return world.cache.match(prompt, media=media).resume


def fill(world: World, prompt: list[int], answer: int = 0, step: int = 512) -> None:
    """Run a request without simulated bytes, for long prompts and to fill the pool."""
    cache = world.cache
    seq = cache.open(cache.match(prompt))
    text = prompt + [7] * answer
    while seq.length < len(text):
        stop = len(prompt) if seq.length < len(prompt) else len(text)
        n = min(step, stop - seq.length, *([seq.next_checkpoint - seq.length] if seq.next_checkpoint else []))
        assert seq.extend(n) == 0
        seq.commit(text[seq.length : seq.length + n])
        cache.take_copies()
    seq.close()


# -- full attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 40, 47, 48, 59])
def test_a_partial_block_is_matched_token_by_token_and_copied_when_written(shared: int) -> None:
    world = make_world("full", 400)
    first = serve(world, prompt_of(60))
    finish(world, first)
    second = start(world, prompt_of(60)[:shared] + prompt_of(30, seed=1))
    assert second.sequence.resumed == shared
    assert second.sequence.extend(1) == 0
    copied = sum(batch.source.size for batch in world.cache.take_copies())
    assert copied == (1 if shared % 16 else 0)


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_two_readers_of_one_partial_block_write_to_their_own_copies(kind: str) -> None:
    world = make_world(kind, 900)
    cached(world, prompt_of(43))
    readers = [start(world, [*prompt_of(43), *prompt_of(30, seed=i)]) for i in (1, 2, 3)]
    assert [r.sequence.resumed for r in readers] == [43, 43, 43]
    for _ in range(3):
        for i, reader in enumerate(readers):
            run(world, reader, [i] * 5)
        world.check()
    for reader in readers:
        finish(world, reader)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    world = make_world("full", 400)
    cached(world, prompt_of(64))
    assert resume(world, prompt_of(64)) == 63
    assert resume(world, prompt_of(40)) == 39
    assert resume(world, prompt_of(1)) == 0
    assert resume(world, []) == 0


def test_a_prompt_is_findable_block_by_block_while_it_is_computed() -> None:
    world = make_world("full", 400)
    item = start(world, prompt_of(60))
    run(world, item, prompt_of(60)[:40])
    assert resume(world, prompt_of(60)) == 32, "full blocks at once, the partial one when the sequence closes"
    finish(world, item)
    assert resume(world, prompt_of(60)) == 40


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_sequences_that_compute_the_same_prompt_at_once_end_up_sharing_pages(kind: str) -> None:
    alone = make_world(kind, 900)
    serve(alone, prompt_of(64))
    world = make_world(kind, 900)
    items = [start(world, prompt_of(64)) for _ in range(3)]
    for first in range(0, 64, 16):
        for item in items:
            run(world, item, prompt_of(64)[first : first + 16])
    world.check()
    extra = world.cache.layout.width("state") * 2  # each has a state of its own
    held = int(world.cache.stats()["in_use_pages"]) - int(alone.cache.stats()["in_use_pages"])  # type: ignore[arg-type]
    assert held == extra
    for group in world.cache.layout.of("token"):
        for item in items[1:]:
            assert (item.sequence.table(group.index) == items[0].sequence.table(group.index)).all()
    for item in items:
        run(world, item, [item.sequence.row + 1] * 20)
    world.check()


# -- windows: Gemma-3 ----------------------------------------------------------------------------------


LONG = prompt_of(4096)


def test_gemma_3_resumes_at_4096_after_4096_and_64_tokens() -> None:
    world = model_world("gemma-3-12b", 3000)
    fill(world, LONG, answer=64)
    assert resume(world, [*LONG, *prompt_of(100, seed=1)]) == 4096
    assert resume(world, [*LONG, *[7] * 64, 8]) == 4160, "and where the turn ended"
    world.cache.check()


def test_gemma_3_bytes_are_right_after_resuming_at_a_window() -> None:
    world = model_world("gemma-3-12b", 2000)
    finish(world, run(world, serve(world, LONG[:2048]), [7] * 64))
    item = serve(world, [*LONG[:2048], *prompt_of(10, seed=1)])
    assert item.sequence.resumed == 2048
    world.verify(item)


def test_gemma_3_resumes_at_4096_after_all_unneeded_window_pages_are_evicted() -> None:
    """Of 260 blocks, 68 are in the windows of the two checkpoints (64 blocks each, overlapping)."""
    stored, needed = 260 * 6, 260 + 68 * 5
    world = model_world("gemma-3-12b", 1 + stored)
    fill(world, LONG, answer=64)
    cache = world.cache
    assert cache.state.pool.free_slabs == 0
    hog = cache.open(cache.match(prompt_of(9, seed=5)))
    assert hog.extend((stored - needed) // 6 * 16) == 0
    cache.check()
    assert resume(world, [*LONG, *prompt_of(100, seed=1)]) == 4096
    assert resume(world, [*LONG, *[7] * 64, 8]) == 4160
    assert resume(world, LONG[:3000]) == 0, "no window inside the prompt is whole any more"
    assert hog.extend((stored - needed) // 6 * 16 + 16) == 0
    left = resume(world, [*LONG, *prompt_of(100, seed=1)]), resume(world, [*LONG, *[7] * 64, 8])
    assert left != (4096, 4160), "only then a resume point had to go"
    cache.check()


def test_windows_at_checkpoints_are_evicted_last() -> None:
    world = make_world("sliding", 1 + 32 + 10)
    text = prompt_of(400)
    finish(world, run(world, serve(world, text), [7] * 100))
    branch = [*text[:208], *prompt_of(150, seed=1)]
    finish(world, serve(world, branch))
    assert world.cache.state.pool.free_slabs == 0
    assert resume(world, [*text[:304], 1]) == 304
    # Windows of 40 tokens in blocks of 16: 3 pages at 208 and 400, 4 at 500 and 358. The rest is spare.
    hog = start(world, prompt_of(600, seed=2))
    assert hog.sequence.extend((42 - 14) * 16) == 0
    assert resume(world, [*text[:208], 1, 2]) == 208, "branch"
    assert resume(world, [*text, 1, 2]) == 400, "prompt end"
    assert resume(world, [*text, *[7] * 100, 1]) == 500, "turn end"
    assert resume(world, [*branch, 1]) == 358, "the other prompt's end"
    assert resume(world, [*text[:304], 1]) == 208, "an ordinary position"
    world.check()


def test_a_chunked_layer_resumes_at_a_chunk_boundary_without_any_page_of_it() -> None:
    world = make_world("chunked+full", 1 + 25 * 2 + 26)
    text = prompt_of(400)
    finish(world, serve(world, text))
    assert resume(world, [*text[:200], 1]) == 200
    hog = start(world, prompt_of(9, seed=1))
    assert hog.sequence.extend(25 * 16) == 0  # all that is left: 25 full pages and one of the last chunk
    assert resume(world, [*text[:200], 1]) == 192, "4 chunks of 48: a query there sees nothing of them"
    assert resume(world, [*text, 1]) == 400
    world.check()


# -- states: Qwen3-Next ----------------------------------------------------------------------------------


def qwen(**options: object) -> World:
    return model_world("qwen3-next-80b", 3000, **options)


def test_qwen3_next_resumes_at_prompt_ends_and_turn_ends() -> None:
    world = qwen(checkpoint_policy=CheckpointPolicy(branch=False))
    finish(world, run(world, serve(world, prompt_of(100)), [7] * 30))
    assert resume(world, [*prompt_of(100), *prompt_of(50, seed=1)]) == 100
    assert resume(world, [*prompt_of(100), *[7] * 30, 8]) == 130
    assert resume(world, [*prompt_of(100), *[7] * 20, 8]) == 100
    assert resume(world, [*prompt_of(90), 8]) == 0
    item = serve(world, [*prompt_of(100), *prompt_of(50, seed=1)])
    assert item.sequence.resumed == 100
    world.verify(item)


@pytest.mark.parametrize("off", ["prompt_end", "turn_end"])
def test_a_snapshot_that_is_not_wanted_is_not_taken(off: str) -> None:
    world = qwen(checkpoint_policy=CheckpointPolicy(**{off: False, "branch": False}))  # type: ignore[arg-type]
    finish(world, run(world, serve(world, prompt_of(100)), [7] * 30))
    assert resume(world, [*prompt_of(100), 8]) == (0 if off == "prompt_end" else 100)
    assert resume(world, [*prompt_of(100), *[7] * 30, 8]) == (100 if off == "turn_end" else 130)


def test_qwen3_next_resumes_at_every_nth_block() -> None:
    world = qwen(checkpoint_policy=CheckpointPolicy(every_blocks=3, branch=False))
    finish(world, serve(world, prompt_of(200)))
    for n, point in ((47, 0), (48, 48), (95, 48), (96, 96), (199, 192)):
        assert resume(world, [*prompt_of(n), 3]) == point


def test_qwen3_next_takes_a_snapshot_where_a_second_prompt_diverges() -> None:
    world = qwen()
    finish(world, serve(world, prompt_of(200)))
    other = [*prompt_of(120), *prompt_of(50, seed=1)]
    assert resume(world, other) == 0, "nothing was kept there"
    finish(world, serve(world, other))
    third = [*prompt_of(120), *prompt_of(50, seed=2)]
    assert resume(world, third) == 112, "the block boundary before the branch"
    item = serve(world, third)
    world.verify(item)


@pytest.mark.parametrize("kind", WITH_STATES)
@pytest.mark.parametrize("length", [96, 100])
def test_the_very_same_prompt_resumes_before_its_last_token(kind: str, length: int) -> None:
    for before_last, point in ((True, length - 1), (False, 0)):
        world = make_world(
            kind, 400, checkpoint_policy=CheckpointPolicy(before_last=before_last, turn_end=False)
        )
        finish(world, run(world, serve(world, prompt_of(length)), [7] * 30))
        assert resume(world, prompt_of(length)) == point
        item = serve(world, prompt_of(length))
        world.verify(item)


def test_a_checkpoint_can_be_taken_explicitly() -> None:
    world = make_world(
        "state+full", 400, checkpoint_policy=CheckpointPolicy(prompt_end=False, turn_end=False, branch=False)
    )
    item = start(world, prompt_of(50))
    run(world, item, prompt_of(50)[:33])
    assert world.cache.checkpoint(item.sequence)
    assert not world.cache.checkpoint(item.sequence), "there is one"
    assert not world.cache.checkpoint(item.sequence, 20), "that state is gone"
    finish(world, run(world, item))
    assert resume(world, prompt_of(50)) == 33


def test_a_checkpoint_can_be_requested_ahead() -> None:
    world = make_world(
        "state+full", 400, checkpoint_policy=CheckpointPolicy(prompt_end=False, turn_end=False, branch=False)
    )
    item = start(world, prompt_of(90))
    assert world.cache.checkpoint(item.sequence, 48)
    with pytest.raises(ValueError, match="outside 0 to max_tokens"):
        world.cache.checkpoint(item.sequence, world.cache.max_tokens + 1)
    finish(world, run(world, item))
    other = [*prompt_of(60), *prompt_of(30, seed=1)]
    assert resume(world, other) == 48
    world.verify(serve(world, other))


# -- images ------------------------------------------------------------------------------------------------


def image(which: int, start: int = 4, length: int = 8, tokens: int = 0) -> tuple[Media, ...]:
    return (Media(start, start + length, bytes([which]) * 16, tokens),)


@pytest.mark.parametrize("kind", ["full", "sliding+full", "state+full", "cross"])
def test_two_images_never_match_by_their_placeholders(kind: str) -> None:
    world = make_world(kind, 400, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    prompt = [1, 2, 3, 4, *[999] * 8, *prompt_of(60)]
    tokens = 20 if kind == "cross" else 0
    finish(world, serve(world, prompt, media=image(1, tokens=tokens)))
    assert world.cache.match(prompt, media=image(1, tokens=tokens)).matched == len(prompt) - 1
    assert world.cache.match(prompt, media=image(2, tokens=tokens)).matched == 4
    assert world.cache.match(prompt).matched == 4, "nor the placeholder as text"


def test_media_that_overlap_or_lie_outside_are_refused() -> None:
    world = make_world("cross", 40)
    for media in ((Media(0, 3, b"a" * 16), Media(2, 5, b"b" * 16)), (Media(8, 12, b"a" * 16),)):
        with pytest.raises(ValueError, match=rf"\[{media[-1].start}, {media[-1].stop}\)"):
            world.cache.match([1] * 10, media=media)
    world.check()


def vision(slabs: int = 4000) -> World:
    return model_world("llama-3.2-11b-vision", slabs)


def test_an_image_is_computed_once_for_two_prompts() -> None:
    world = vision()
    first = serve(world, [1, *prompt_of(40)], media=image(1, 0, 1, tokens=1601))
    second = start(world, [5, 1, *prompt_of(40, seed=1)], media=image(1, 1, 1, tokens=1601))
    assert second.sequence.resumed == 0, "the texts differ"
    free = world.cache.stats()["free_slabs"]
    assert second.sequence.extend(42) == 0
    assert free - world.cache.stats()["free_slabs"] == 3 * 4, "three blocks of text, no page for the image"  # type: ignore[operator]
    digest = image(1)[0].digest
    assert (first.sequence.media_rows(digest) == second.sequence.media_rows(digest)).all()
    finish(world, first)
    world.cache.check()


def test_a_missing_media_run_limits_the_hit() -> None:
    world = vision(slabs=1 + 101 + 4 * 4)
    prompt = [*prompt_of(20), 1, *prompt_of(30, seed=1)]
    media = image(1, 20, 1, tokens=1601)
    finish(world, serve(world, prompt, media=media))
    assert resume(world, prompt, media) == 50
    cache = world.cache
    holder = cache.open(cache.match(prompt, media=image(1, 20, 1)))  # the text of it, not the image
    assert holder.resumed == 50
    hog = cache.open(cache.match(prompt_of(9, seed=4)))
    assert hog.extend(16) == 0
    match = cache.match(prompt, media=media)
    assert match.matched >= 48, "the text is there"
    assert (match.resume, match.miss.reason) == (20, "media missing")
    cache.check()
