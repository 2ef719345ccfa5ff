"""Steps laid out in fixed buffers: the device's block tables equal the cache's, and padding belongs to no sequence."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvloom.core import WHOLE, ContextPart, Field, KVCache, LayerSpec, PoolLayout, Sequence, Visibility
from kvloom.models.paged import Batch, BatchBuilder, Work

BLOCK, FULL_GROUP = 16, 0


def make_cache(part: ContextPart = WHOLE) -> KVCache:
    fields = (Field("k", (2, 8), "fp32"), Field("v", (2, 8), "fp32"))
    layers = {
        f"layers.{i}.attn": LayerSpec(
            "token", fields, Visibility("sliding", 24) if i % 2 else Visibility("full")
        )
        for i in range(4)
    }
    layout = PoolLayout.build(layers, BLOCK, part=part)
    return KVCache(layout, slabs=60 * part.count, max_sequences=6, max_tokens=256)


def equal(a: Batch, b: Batch) -> None:
    for name in ("tokens", "positions", "starts", "lengths", "last"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for group, table in a.tables.items():
        assert torch.equal(a.slots[group], b.slots[group])
        rows = torch.arange(table.shape[1])
        for run in range(table.shape[0]):
            for row in rows.tolist():
                here, there = a.tables[group][run, row], b.tables[group][run, row, : table.shape[2]]
                seen = here > 0  # pages outside a window may still be in the copy: no kernel reads them
                used = -(-int(a.lengths[row]) // BLOCK)
                assert torch.equal(here[seen][:used], there[seen][:used])
    assert (a.bounds, a.sizes, a.fresh) == (b.bounds, b.sizes, b.fresh)


@pytest.mark.parametrize(
    ("seed", "part"), [*((seed, WHOLE) for seed in range(6)), (6, ContextPart(0, 2)), (7, ContextPart(1, 2))]
)
def test_tables_of_the_device_follow_those_of_the_cache(seed: int, part: ContextPart) -> None:
    rng, cache = random.Random(seed), make_cache(part)
    copied, plain = BatchBuilder(cache, "cpu", 200, 6, mirrored=True), BatchBuilder(cache, "cpu", 200, 6)
    open_: list[Sequence] = []
    for _ in range(120):
        choice = rng.random()
        if choice < 0.25 and len(open_) < 6:
            prompt = [rng.choice((3, 4)) for _ in range(rng.randrange(1, 60))]  # many share what comes first
            open_.append(cache.open(cache.match(np.array(prompt, dtype=np.int32))))
        elif choice < 0.35 and open_:
            open_.pop(rng.randrange(len(open_))).close()
        elif choice < 0.42 and open_ and len(open_) < 6:
            child = cache.fork(rng.choice(open_))
            if child is not None:
                open_.append(child)
        elif choice < 0.5 and open_:
            sequence = rng.choice(open_)
            cache.rollback(sequence, rng.randrange(0, min(20, sequence.length) + 1))
        works = []
        for sequence in open_:
            count = rng.choice((1, 1, 1, rng.randrange(1, 30)))
            if sequence.length + count <= 250 and rng.random() < 0.7 and not sequence.extend(count):
                works.append(Work(sequence, np.array([rng.choice((3, 4)) for _ in range(count)])))
        cache.take_copies()
        if works:
            batch = plain.lay_out(works)
            equal(batch, copied.lay_out(works))
            stored = part.places(batch.positions.numpy(), BLOCK)
            np.testing.assert_array_equal(batch.slots[FULL_GROUP][0] < 0, stored < 0)
        for work in works:
            work.sequence.commit(work.tokens.astype(np.int32))


def test_what_is_replayed_is_worked_out_from_what_was_sent() -> None:
    cache = make_cache()
    stage = BatchBuilder(cache, "cpu", 8, 6, mirrored=True)
    chosen = torch.tensor([7, 8, 9, 10, 11, 12])
    works = []
    for i in range(3):
        sequence = cache.open(cache.match(np.arange(3 + i, 20 + i, dtype=np.int32)))
        sequence.extend(18)
        sequence.commit(np.arange(3 + i, 20 + i, dtype=np.int32))
        works.append(Work(sequence, np.array([-1 if i else 5]), source=i - 1))
    cache.take_copies()
    plain = BatchBuilder(cache, "cpu", 8, 6).lay_out(works, chosen)
    stage.send_singles(works, 5)
    found = stage.replayed(5, chosen)
    assert found.tokens.tolist() == [5, 7, 8, 0, 0]
    assert found.positions.tolist() == [17, 17, 17, 0, 0]
    assert found.lengths.tolist() == [18, 18, 18, 0, 0]
    for group, slots in found.slots.items():
        assert torch.equal(slots[:, :3], plain.slots[group])
        assert (slots[:, 3:] < BLOCK).all(), "padded rows write to page 0"


@pytest.mark.parametrize("seed", range(4))
def test_single_tokens_upload_changed_table_entries(seed: int) -> None:
    rng, cache = random.Random(seed), make_cache()
    copied, plain = BatchBuilder(cache, "cpu", 200, 6, mirrored=True), BatchBuilder(cache, "cpu", 200, 6)
    chosen, open_ = torch.arange(6) + 50, list[Sequence]()
    replays = 0
    for _ in range(150):
        if rng.random() < 0.15 and len(open_) < 6:
            prompt = np.array([rng.choice((3, 4)) for _ in range(rng.randrange(1, 60))], dtype=np.int32)
            open_.append(cache.open(cache.match(prompt)))
        elif rng.random() < 0.05 and open_:
            open_.pop(rng.randrange(len(open_))).close()
        elif rng.random() < 0.1 and open_ and len(open_) < 6:
            child = cache.fork(rng.choice(open_))
            if child is not None:
                open_.append(child)
        single = rng.random() < 0.8
        works = []
        for sequence in open_:
            count = 1 if single else rng.randrange(1, 40)
            if sequence.length + count <= 250 and not sequence.extend(count):
                works.append(Work(sequence, np.full(count, 3), rng.randrange(-1, 6) if single else -1))
        cache.take_copies()
        if works and single:
            wanted = plain.lay_out(works, chosen)
            copied.send_singles(works, 6)
            found, count = copied.replayed(6, chosen), len(works)
            replays += 1
            for name in ("tokens", "positions", "lengths", "last", "places"):
                assert torch.equal(getattr(found, name)[:count], getattr(wanted, name)), name
            assert torch.equal(found.starts[: count + 1], wanted.starts)
            for group, table in wanted.tables.items():
                assert torch.equal(found.slots[group][:, :count], wanted.slots[group])
                assert torch.equal(found.pages[group][:, :count], wanted.pages[group])
                for row, length in enumerate(wanted.sizes):
                    here = table[:, row, : -(-length // BLOCK)]
                    there = found.tables[group][:, row, : here.shape[1]]
                    assert torch.equal(here[here > 0], there[here > 0])
        elif works:
            copied.lay_out(works)
        for work in works:
            work.sequence.commit(work.tokens.astype(np.int32))
    assert replays > 50


def test_a_step_needs_pages_and_tokens() -> None:
    cache = make_cache()
    stage = BatchBuilder(cache, "cpu", 64, 6)
    sequence = cache.open(cache.match(np.arange(3, 9, dtype=np.int32)))
    with pytest.raises(ValueError, match="at least one sequence"):
        stage.lay_out([])
    with pytest.raises(ValueError, match="has no tokens"):
        stage.lay_out([Work(sequence, np.array([], dtype=np.int64))])
    with pytest.raises(ValueError, match="extend the sequence first"):
        stage.lay_out([Work(sequence, np.arange(3, 9))])


def test_padding_does_not_change_a_step() -> None:
    cache = make_cache()
    stage, chosen = BatchBuilder(cache, "cpu", 200, 6, mirrored=True), torch.arange(6) + 1000
    works = []
    for i, count in enumerate((16, 1, 20)):
        sequence = cache.open(cache.match(np.arange(30 + i, dtype=np.int32)))
        assert not sequence.extend(count)
        works.append(Work(sequence, np.arange(count) + 100 * i, source=3 if count == 1 else -1))
    plain = stage.lay_out(works, chosen)
    for size in (37, 64, 128):
        stage.send(works, 7, size)
        filled = stage.packed(size, chosen)
        for here, there in ((filled.tokens, plain.tokens), (filled.positions, plain.positions)):
            assert torch.equal(here[:37], there)
            assert not here[37:].any()
        for group in plain.slots:
            assert torch.equal(filled.slots[group][:, :37], plain.slots[group])
            assert (filled.slots[group][:, 37:] < BLOCK).all(), "padding writes to page 0"
            assert torch.equal(
                filled.tables[group][:, :3, : plain.tables[group].shape[2]], plain.tables[group]
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device that falls behind")
def test_steps_reach_a_device_that_is_behind_as_they_were_sent() -> None:
    cache = make_cache()
    stage = BatchBuilder(cache, "cuda", 200, 6)
    sequence = cache.open(cache.match(np.zeros(0, np.int32)))
    torch.cuda._sleep(1 << 28)  # a tenth of a second or more
    came = []
    for step in range(6):
        assert not sequence.extend(3)
        came.append(stage.lay_out([Work(sequence, np.full(3, step + 7))]))
        torch.cuda._sleep(1 << 24)
        sequence.commit(np.full(3, step + 7, np.int32))
    for step, batch in enumerate(came):
        assert batch.tokens.tolist() == [step + 7] * 3
        assert batch.positions.tolist() == list(range(3 * step, 3 * step + 3))


def slots_of(batch: Batch) -> list[int]:
    """The adapter slot of each token, from the rows on a device or on a host."""
    rows = batch.adapters
    assert rows is not None
    found = [0] * rows.count
    for slot, at in rows.groups:
        for token in range(rows.count)[at] if isinstance(at, slice) else at.tolist():
            found[token] = slot
    if rows.order is not None and rows.slots is not None:
        for token, slot in zip(rows.order.tolist(), rows.slots.tolist(), strict=True):
            found[token] = slot
    return found


def test_each_token_has_the_adapter_of_its_sequence() -> None:
    """Tokens before an activation, and padding, have none, also after a step with more adapters."""
    cache = make_cache()
    stage = BatchBuilder(cache, "cpu", 200, 6, mirrored=True, adapted=True)
    plain, chosen = BatchBuilder(cache, "cpu", 200, 6, adapted=True), torch.arange(6) + 1000
    sequences = [cache.open(cache.match(np.arange(30 + i, dtype=np.int32))) for i in range(3)]
    steps = [
        ((5, 1, 9), (2, 0, 1), 7),
        ((1, 1, 1), (2, 0, 1), 10),
        ((2, 3, 1), (0, 0, 3), 0),
        ((1, 2, 1), (0, 0, 0), 0),
    ]
    for counts, adapters, active in steps:
        works = []
        for i, (count, adapter) in enumerate(zip(counts, adapters, strict=True)):
            assert not sequences[i].extend(count)
            start = active if i == 2 else 0
            works.append(Work(sequences[i], np.arange(count), adapter=adapter, active_from=start))
        wanted = [
            work.adapter if work.sequence.length + place >= work.active_from else 0
            for work in works
            for place in range(len(work.tokens))
        ]
        used = len(wanted)
        for batch in (plain.lay_out(works, chosen), stage.lay_out(works, chosen)):
            if any(wanted):
                assert slots_of(batch) == wanted
            else:
                assert batch.adapters is None
        stage.send(works, 7, 40)
        assert slots_of(stage.packed(40, chosen)) == wanted + [0] * (40 - used)
        stage.send_drafted(works, 32)
        assert slots_of(stage.drafted(32, 64, chosen)) == wanted + [0] * (32 - used)
        if used == 3:
            stage.send_singles(works, 6)
            assert slots_of(stage.replayed(6, chosen, adapted=True)) == wanted + [0] * 3
            assert stage.replayed(6, chosen).adapters is None
        for work in works:
            work.sequence.commit(work.tokens.astype(np.int32))


@pytest.mark.parametrize("width", [BLOCK, 2 * BLOCK + 1])
def test_a_step_with_drafts_equals_a_plain_step(width: int) -> None:
    cache = make_cache()
    stage, chosen = BatchBuilder(cache, "cpu", 200, 6, mirrored=True), torch.arange(6) + 1000
    plain = BatchBuilder(cache, "cpu", 200, 6)
    sequences = [cache.open(cache.match(np.arange(30 + i, dtype=np.int32))) for i in range(3)]
    for step in range(6):
        works = []
        for i, count in enumerate((3, 1, width if step == 2 else 5)):
            assert not sequences[i].extend(count)
            drafts = count - 1
            works.append(Work(sequences[i], np.arange(count) + 100 * i + step, drafts=drafts))
        used = sum(len(work.tokens) for work in works)
        expected = plain.lay_out(works, chosen)
        stage.send_drafted(works, used + 4)
        found = stage.drafted(used + 4, 64, chosen)
        assert torch.equal(found.tokens[:used], expected.tokens)
        assert torch.equal(found.positions[:used], expected.positions)
        assert torch.equal(found.starts[:4], expected.starts)
        assert found.starts[3:].tolist() == [*range(used, used + 4), *[used + 4] * (used - 2)]
        assert torch.equal(found.lengths[:3], expected.lengths)
        for group in expected.slots:
            assert torch.equal(found.slots[group][:, :used], expected.slots[group])
            assert (found.slots[group][:, used:] < BLOCK).all(), "padding writes to page 0"
            table, blocks = expected.tables[group], expected.tables[group].shape[2]
            readable = table > 0  # blocks before a window have no page
            assert torch.equal(found.tables[group][:, :3, :blocks][readable], table[readable])
        for group in expected.states:
            assert torch.equal(found.states[group][:, :3], expected.states[group])
        if expected.states:
            assert found.stored is not None
            assert found.stored[:3].tolist() == [len(work.tokens) - work.drafts for work in works]
        for work in works:
            work.sequence.commit(work.tokens.astype(np.int32))


def test_a_replayed_step_with_trees_equals_a_plain_step() -> None:
    cache = make_cache()
    stage = BatchBuilder(cache, "cpu", 200, 6, mirrored=True, tree_columns=8)
    plain, chosen = BatchBuilder(cache, "cpu", 200, 6), torch.arange(6) + 1000
    sequences = [cache.open(cache.match(np.arange(30 + i, dtype=np.int32))) for i in range(3)]
    works = []
    for sequence, parents in zip(sequences, ((-1, -1, 0, 1, 1), (), (-1, 0)), strict=True):
        assert not sequence.extend(1 + len(parents))
        works.append(Work(sequence, np.arange(1 + len(parents)), drafts=len(parents), parents=parents))
    expected = plain.lay_out(works, chosen)
    assert expected.trees is not None
    assert expected.previous is not None
    assert expected.positions[:6].tolist() == [0, 1, 1, 2, 2, 2]
    assert expected.previous[:6].tolist() == [-1, 0, 0, 1, 2, 2]
    assert expected.trees[5, :6].tolist() == [1, 0, 2, 0, 0, 3]
    stage.send_drafted(works, 12)
    found = stage.drafted(12, 8, chosen)
    assert found.trees is not None
    assert found.previous is not None
    assert torch.equal(found.trees[:10], expected.trees)
    assert found.trees[10:, 0].all(), "padding sees itself"
    assert torch.equal(found.positions[:10], expected.positions)
    assert torch.equal(found.previous[:10], expected.previous)
    for group in expected.slots:
        assert torch.equal(found.slots[group][:, :10], expected.slots[group])
    eager = stage.lay_out(works, chosen)
    assert eager.trees is not None
    assert eager.previous is not None
    assert torch.equal(eager.trees, expected.trees)
    assert torch.equal(eager.positions, expected.positions)
    assert torch.equal(eager.previous, expected.previous)
    stage.send_drafted([work._replace(parents=()) for work in works], 12)  # chains need no second graph
    found = stage.drafted(12, 8, chosen)
    assert found.trees is not None
    assert found.positions[:6].tolist() == list(range(6))
    assert found.trees[5, :6].tolist() == list(range(1, 7))
