"""The operations of a sequence on every kind of layer: extend, commit, rollback, fork, close."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvloom.core import CheckpointPolicy, KVCache

from .world import (
    LAYOUTS,
    WITH_STATES,
    Open,
    World,
    cached,
    finish,
    make_world,
    prompt_of,
    run,
    serve,
    slabs_for,
    start,
)

every_layout = pytest.mark.parametrize("kind", sorted(LAYOUTS))
WITHOUT_STATES = sorted(set(LAYOUTS) - set(WITH_STATES))


def tables(cache: KVCache, item: Open) -> list[list[list[bool]]]:
    """Return which entries of a sequence's block tables have a page."""
    return [(item.sequence.table(g.index) > 0).tolist() for g in cache.layout.of("token")]


# -- basics on every layout ---------------------------------------------------------------------------


@every_layout
def test_a_sequence_computes_its_prompt_decodes_and_closes(kind: str) -> None:
    world = make_world(kind, 400)
    item = start(world, prompt_of(75))
    assert (item.sequence.length, item.sequence.resumed) == (0, 0)
    run(world, item)
    assert item.sequence.length == 75
    for token in range(30):
        run(world, item, [token])
        world.check()
    assert item.sequence.length == 105
    finish(world, item)
    assert not item.sequence.open
    assert world.cache.stats()["in_use_pages"] == 0


@every_layout
def test_a_second_turn_resumes_where_the_first_one_ended(kind: str) -> None:
    world = make_world(kind, 400)
    item = run(world, serve(world, prompt_of(75)), [5, 6, 7])
    finish(world, item)
    assert cached(world, [*prompt_of(75), 5, 6, 7, 8, 9]) == 78


@every_layout
def test_extend_reserves_whole_blocks_and_the_same_tokens_only_once(kind: str) -> None:
    world = make_world(kind, 400)
    item = start(world, prompt_of(40))
    assert item.sequence.extend(17) == 0
    assert item.sequence.reserved_tokens == 32
    before = world.cache.stats()["in_use_pages"]
    assert item.sequence.extend(32) == 0
    assert item.sequence.reserved_tokens == 32
    assert world.cache.stats()["in_use_pages"] == before
    assert item.sequence.extend(0) == 0
    world.check()


@every_layout
def test_extend_returns_the_missing_pages_and_changes_nothing(kind: str) -> None:
    world = make_world(kind, slabs_for(kind, 100))
    item = serve(world, prompt_of(33))
    seq, cache = item.sequence, world.cache
    before = (seq.length, seq.reserved_tokens, tables(cache, item), cache.stats())
    missing = seq.extend(900)
    if kind == "state":
        assert missing == 0, "a state does not grow"
        return
    assert missing > 0
    assert (seq.length, seq.reserved_tokens, tables(cache, item), cache.stats()) == before
    world.check()
    run(world, item, [1])


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked+full", "cross"])
def test_missing_pages_are_what_a_larger_pool_needs_more(kind: str) -> None:
    """With one page per slab the number is exact: with that many more slabs it fits, with one fewer it does not."""
    probe = make_world(kind, 6).cache
    missing = probe.open(probe.match([1])).extend(200)
    assert missing > 0
    for slabs, expected in ((6 + missing, 0), (6 + missing - 1, 1)):
        cache = make_world(kind, slabs).cache
        assert cache.open(cache.match([1])).extend(200) == expected


@every_layout
def test_a_draft_is_extended_and_what_was_accepted_is_committed(kind: str) -> None:
    world = make_world(kind, 400, checkpoint_policy=CheckpointPolicy(prompt_end=False, branch=False))
    item = serve(world, prompt_of(30))
    for accepted in (1, 5, 3, 2, 5):
        assert item.sequence.extend(5) == 0
        world.step(item, list(range(accepted)))
        world.check()
    assert item.sequence.length == 46
    assert item.tokens[30:] == [0, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4]


# -- bad input ----------------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[[World, Open], object], str]] = {
    "commit without extend": (lambda w, i: i.sequence.commit([1] * 30), "commit of 30 tokens after 20"),
    "extend by a negative number": (lambda w, i: i.sequence.extend(-1), "-1"),
    "extend many by a negative number": (
        lambda w, i: w.cache.extend_many(np.array([i.sequence.row]), -2),
        "-2",
    ),
    "extend many by too few numbers": (
        lambda w, i: w.cache.extend_many(np.array([i.sequence.row]), np.array([1, 2])),
        "2 numbers of tokens for 1 sequences",
    ),
    "extend many by numbers of which one is negative": (
        lambda w, i: w.cache.extend_many(np.array([i.sequence.row]), np.array([-3])),
        "-3",
    ),
    "too long": (lambda w, i: i.sequence.extend(5000), r"20 \+ 5000 tokens exceed max_tokens 1024"),
    "too long together": (
        lambda w, i: w.cache.extend_many(np.array([i.sequence.row]), 5000),
        r"20 \+ 5000 tokens exceed max_tokens 1024",
    ),
    "prompt too long": (lambda w, i: w.cache.match([1] * 1025), "1025 tokens exceeds max_tokens 1024"),
    "rollback of too much": (lambda w, i: i.sequence.rollback(21), "21 of 20"),
    "rollback of a negative number": (lambda w, i: i.sequence.rollback(-1), "-1 of 20"),
    "a table of tokens": (lambda w, i: i.sequence.commit([[1, 2]]), r"shape \(1, 2\)"),
    "tokens that are no integers": (lambda w, i: w.cache.match([0.5]), "float64"),
    "token ids beyond 31 bits": (lambda w, i: w.cache.match([2**40]), str(2**40)),
    "a row without a sequence": (lambda w, i: w.cache.extend_many(np.array([7]), 1), "row 7"),
    "tokens and rows that differ": (
        lambda w, i: w.cache.commit_many(np.array([i.sequence.row]), [1, 2]),
        "2 tokens for 1 sequences",
    ),
    "commit many without extend": (
        lambda w, i: [w.cache.commit_many(np.array([i.sequence.row]), [1]) for _ in range(13)],
        f"row {0} has no page",
    ),
}


@every_layout
@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_refused_with_its_value_and_changes_nothing(kind: str, name: str) -> None:
    call, message = BAD[name]
    world = make_world(kind, 100)
    item = serve(world, prompt_of(20))
    if name == "commit many without extend":
        run(world, item, [1] * 12)  # fill the block, so that the next token has no page
    before = (item.sequence.length, item.sequence.reserved_tokens, tables(world.cache, item))
    with pytest.raises(ValueError, match=message):
        call(world, item)
    assert (item.sequence.length, item.sequence.reserved_tokens, tables(world.cache, item)) == before
    world.check()


@every_layout
@pytest.mark.parametrize("verb", ["extend", "commit", "rollback", "fork", "close"])
def test_a_closed_sequence_cannot_be_used_again(kind: str, verb: str) -> None:
    world = make_world(kind, 100)
    item = serve(world, prompt_of(20))
    finish(world, item)
    other = serve(world, prompt_of(20, seed=1))
    assert other.sequence.row == item.sequence.row, "its row has a new owner"
    arguments = {"extend": (1,), "commit": ([1],), "rollback": (1,)}.get(verb, ())
    with pytest.raises(ValueError, match="closed"):
        getattr(item.sequence, verb)(*arguments)
    world.check()
    assert other.sequence.length == 20


def test_a_sequence_of_another_cache_is_refused() -> None:
    one, two = make_world("full", 40), make_world("full", 40)
    item = serve(one, prompt_of(20))
    serve(two, prompt_of(20))
    with pytest.raises(ValueError, match="not open in this cache"):
        two.cache.extend(item.sequence, 1)
    with pytest.raises(ValueError, match="not open in this cache"):
        two.cache.close(item.sequence)
    one.check()
    two.check()


@pytest.mark.parametrize("group", [-1, 0, 2, 99])
def test_an_unknown_token_group_is_refused(group: int) -> None:
    cache = make_world("state+full", 40).cache
    with pytest.raises(KeyError, match=str(group)):
        cache.table(group)
    cache.check()


def test_more_sequences_than_rows_are_refused_and_the_cache_stays_whole() -> None:
    world = make_world("state+full", 100)
    cached(world, prompt_of(40))
    opened = [start(world, prompt_of(40)) for _ in range(8)]
    match = world.cache.match(prompt_of(40))
    with pytest.raises(RuntimeError, match="all 8 sequences"):
        world.cache.open(match)
    with pytest.raises(RuntimeError, match="all 8 sequences"):
        opened[0].sequence.fork()
    world.check()


# -- fork -----------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("length", [32, 39])
def test_both_sides_of_a_fork_go_on_with_their_own_bytes(kind: str, length: int) -> None:
    world = make_world(kind, 400)
    parent = serve(world, prompt_of(length))
    child_sequence = parent.sequence.fork()
    assert child_sequence is not None
    child = Open(child_sequence, list(parent.tokens), parent.prompt, parent.control)
    world.opened.append(child)
    assert child.sequence.length == length
    for i in range(20):
        run(world, child, [1000 + i])
        run(world, parent, [2000 + i])
        world.check()
    finish(world, parent)
    run(world, child, [1, 2, 3])
    finish(world, child)


@pytest.mark.parametrize("length", [32, 39])
def test_a_fork_shares_full_blocks_and_copies_only_the_partial_one(length: int) -> None:
    world = make_world("full", 400)
    parent = serve(world, prompt_of(length))
    held = world.cache.stats()["in_use_pages"]
    child = parent.sequence.fork()
    assert child is not None
    assert world.cache.stats()["in_use_pages"] == held, "sharing takes no page"
    assert child.extend(1) == 0
    copies = sum(batch.source.size for batch in world.cache.take_copies())
    assert copies == (length % 16 > 0)
    mine, theirs = parent.sequence.table(0)[0], child.table(0)[0]
    assert (mine[:2] == theirs[:2]).all()
    assert len(theirs) == 3
    assert len(mine) == 2 or mine[2] != theirs[2]
    world.check()


@pytest.mark.parametrize("kind", ["state", "state+full", "state+sliding+full", "several pages a slab"])
def test_a_fork_whose_states_do_not_fit_is_none_and_changes_nothing(kind: str) -> None:
    world = make_world(kind, 5)
    item = serve(world, prompt_of(20))
    forks = []
    while True:
        held = world.cache.stats()["in_use_pages"]
        child = item.sequence.fork()
        if child is None:
            break
        forks.append(child)
        world.run_copies()
    assert world.cache.stats()["in_use_pages"] == held
    world.check()
    forks.pop().close()
    assert item.sequence.fork() is not None


# -- rollback -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITHOUT_STATES)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 20, 60])
def test_rollback_across_block_boundaries_and_another_way_on(kind: str, n: int) -> None:
    world = make_world(kind, 400)
    item = serve(world, prompt_of(72))
    assert item.sequence.rollback(n) == 72 - n
    assert item.sequence.length == 72 - n
    assert item.sequence.reserved_tokens == -(-(72 - n) // 16) * 16, "pages beyond are given back"
    item.tokens = item.tokens[: 72 - n]
    world.check()
    run(world, item, [9] * 40)
    finish(world, item)


@pytest.mark.parametrize("kind", WITH_STATES)
def test_rollback_returns_to_a_snapshot_where_there_are_states(kind: str) -> None:
    world = make_world(kind, 400, checkpoint_policy=CheckpointPolicy(every_blocks=2))
    item = serve(world, prompt_of(72))
    run(world, item, [9] * 30)
    assert item.sequence.length == 102
    for n, reached in ((0, 102), (5, 96), (1, 72), (2, 64), (3, 32), (32, 0)):
        assert item.sequence.rollback(n) == reached
        item.tokens = item.tokens[:reached]
        world.check()
        assert item.sequence.extend(1) == 0
        world.run_copies()
        world.verify(item)
        item.sequence.rollback(0)
    run(world, item, prompt_of(50, seed=3))
    finish(world, item)


@every_layout
def test_rollback_to_nothing_starts_again(kind: str) -> None:
    world = make_world(kind, 400)
    item = serve(world, prompt_of(50))
    assert item.sequence.rollback(50) == 0
    assert item.sequence.reserved_tokens == 0
    item.tokens = []
    run(world, item, prompt_of(50, seed=2))
    finish(world, item)


@every_layout
def test_rollback_of_a_fork_does_not_change_the_other(kind: str) -> None:
    world = make_world(kind, 400)
    parent = serve(world, prompt_of(50))
    child = parent.sequence.fork()
    assert child is not None
    world.opened.append(Open(child, list(parent.tokens), parent.prompt, parent.control))
    parent.tokens = parent.tokens[: parent.sequence.rollback(30)]
    run(world, parent, [3] * 30)
    world.check()
    run(world, world.opened[1], [4] * 30)
    world.check()


# -- many at once -----------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("counts", [(1, 5), (0, 16), (3, 50)])
def test_rows_are_extended_by_different_numbers(kind: str, counts: tuple[int, int]) -> None:
    world = make_world(kind, 400)
    items = [serve(world, prompt_of(20, seed)) for seed in (1, 2)]
    block = world.cache.block_tokens
    rows = np.array([item.sequence.row for item in items])
    assert world.cache.extend_many(rows, np.array(counts)) == 0
    world.run_copies()
    for item, count in zip(items, counts, strict=True):
        assert 20 + count <= item.sequence.reserved_tokens < 20 + count + block
    world.check()


def decode_one_by_one(world: World, items: list[Open], token: int) -> None:
    for item in items:
        run(world, item, [token + item.sequence.row])


def decode_together(world: World, items: list[Open], token: int) -> None:
    rows = np.array([item.sequence.row for item in items])
    assert world.cache.extend_many(rows, 1) == 0
    world.run_copies()
    world.cache.commit_many(rows, rows.astype(np.int32) + token)
    for item in items:
        item.tokens.append(token + item.sequence.row)


@every_layout
@pytest.mark.parametrize("every", [0, 1])
def test_extend_many_and_commit_many_equal_one_by_one(kind: str, every: int) -> None:
    results = []
    for decode in (decode_one_by_one, decode_together):
        world = make_world(kind, 900, checkpoint_policy=CheckpointPolicy(every_blocks=every))
        items = [serve(world, prompt_of(20 + 5 * i, seed=i % 2)) for i in range(4)]
        for step in range(50):
            decode(world, items, step)
        shapes = [tables(world.cache, item) for item in items]
        world.cache.check()
        texts = [item.tokens for item in items]
        for item in items:
            item.sequence.close()
        world.cache.check()
        points = [
            world.cache.match([*text[:n], 0]).resume for text in texts for n in range(10, len(text) + 1, 3)
        ]
        results.append((shapes, points, world.cache.stats()["cached_pages"]))
    assert results[0] == results[1]


@every_layout
def test_extend_many_that_lacks_pages_extends_none(kind: str) -> None:
    world = make_world(kind, 20)
    items = []
    for i in range(4):
        item = start(world, prompt_of(32, seed=i))
        if item.sequence.extend(32):
            finish(world, item)
            break
        world.step(item, item.prompt)
        items.append(item)
    rows = np.array([item.sequence.row for item in items])
    for _ in range(400):
        before = [item.sequence.reserved_tokens for item in items]
        missing = world.cache.extend_many(rows, 1)
        if missing:
            assert [item.sequence.reserved_tokens for item in items] == before
            world.cache.check()
            return
        world.run_copies()
        world.cache.commit_many(rows, np.zeros(rows.size, np.int32))
    assert kind in ("state", "sliding"), "only what does not grow fits for ever"


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding+full", "chunked+full"])
def test_a_decode_step_costs_by_crossings_not_by_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are processed one by one only if they cross a block or window boundary."""
    world = make_world(kind, 4000)
    cache = KVCache(world.cache.layout, 4000, max_sequences=64, max_tokens=512)
    sequences = []
    for i in range(64):
        seq = cache.open(cache.match(prompt_of(48 + i % 16, seed=i)))
        assert seq.extend(48 + i % 16) == 0
        seq.commit(prompt_of(48 + i % 16, seed=i))
        sequences.append(seq)
    rows = np.array([seq.row for seq in sequences])
    cache.extend_many(rows, 1)
    cache.commit_many(rows, np.zeros(64, np.int32))  # past the prompts' end

    class Counted(list):  # type: ignore[type-arg]
        looked_at = 0

        def __getitem__(self, row: int) -> object:  # type: ignore[override]
            Counted.looked_at += 1
            return list.__getitem__(self, row)

    monkeypatch.setattr(cache.block_tables, "sequences", Counted(cache.block_tables.sequences))
    for batch in (64, 16):
        some = rows[:batch]
        for _ in range(20):
            lengths = cache.block_tables.length[some]
            crossings = int((lengths % 16 == 0).sum() + (lengths % 16 == 15).sum())
            for span in cache.state.tree.windows:
                crossings += sum(
                    span.first_visible(n + 1) // 16 > span.first_visible(n) // 16 for n in lengths.tolist()
                )
            Counted.looked_at = 0
            assert cache.extend_many(some, 1) == 0
            cache.commit_many(some, np.zeros(batch, np.int32))
            assert Counted.looked_at <= 2 + 3 * crossings
            assert crossings < batch
    cache.check()
