"""Offload batches and loads, with labels instead of bytes: every page that a prompt resumes on has the right label."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from kvloom.core import (
    WHOLE,
    Account,
    CacheControl,
    ContextPart,
    Field,
    KVCache,
    LayerSpec,
    Match,
    OffloadBatch,
    PoolLayout,
    Sequence,
    Tenant,
    Visibility,
    allocator as room,
    attention_fields,
)

FULL = LayerSpec("token", attention_fields(2, 16, "fp32"))
WINDOW = LayerSpec("token", attention_fields(2, 16, "fp32"), Visibility("sliding", 20))
CHUNK = LayerSpec("token", attention_fields(2, 16, "fp32"), Visibility("chunked", 24))
WIDE = LayerSpec("token", attention_fields(256, 16, "bf16"))
WIDE_WINDOW = LayerSpec("token", attention_fields(256, 16, "bf16"), Visibility("sliding", 40))
STATE = LayerSpec("state", (Field("ssm", (3, 40), "fp32"),))
KINDS = {
    "full": [FULL] * 2,
    "sliding": [FULL, *[WINDOW] * 3],
    "chunked": [FULL, *[CHUNK] * 2],
    "window alone": [WINDOW] * 2,
    "windows of two runs": [*[WIDE] * 2, *[WIDE_WINDOW] * 4],
    "hybrid": [FULL, *[STATE] * 3],
    "states alone": [STATE] * 2,
    "all": [FULL, *[WINDOW] * 2, *[STATE] * 2],
}


class World:
    """A cache, a label for every page's bytes, and a store below it. A page of tokens is labelled with the text it was
    written for, a state with the text it stands at."""

    def __init__(
        self,
        kind: str,
        slabs: int,
        block: int = 16,
        ends: bool = True,
        part: ContextPart = WHOLE,
        **options: object,
    ) -> None:
        layers = {f"layer {i}": spec for i, spec in enumerate(KINDS[kind])}
        self.layout = PoolLayout.build(layers, block, part=part)
        self.cache = KVCache(self.layout, slabs, max_tokens=1024, **options)  # type: ignore[arg-type]
        self.bytes: dict[tuple[int, int], tuple[int, ...]] = {}
        self.store: dict[tuple[int, int, bytes], tuple[int, ...]] = {}
        self.batches: list[OffloadBatch] = []
        self.cache.loading.set_listener(self.batches.append, ends)

    def classes(self, numbering: str) -> list[tuple[int, int, int, int]]:
        """(column, class, group, run) of every column."""
        return [
            (g.column + r, self.cache.state.pool.class_of[g.index], g.index, r)
            for g in self.layout.of(numbering)
            for r in range(g.runs)
        ]

    def settle(self) -> None:
        """Copy the pages of offload batches, then make the pending copies of the cache."""
        for batch in self.batches:
            for column, cls, group, run in self.classes(batch.numbering):
                for name, page in zip(batch.hashes, batch.pages[:, column].tolist(), strict=True):
                    if page:
                        self.store.setdefault((group, run, name), self.bytes[cls, page])
        self.batches.clear()
        strides = {self.layout.slab_bytes // c.per_slab: c.index for c in self.cache.state.pool.classes}
        for batch in self.cache.take_copies():
            cls = strides[batch.page_stride]
            moved = [self.bytes.get((cls, page), ()) for page in batch.source.tolist()]
            self.bytes.update(zip([(cls, page) for page in batch.target.tolist()], moved, strict=True))

    def compute(self, sequence: Sequence, text: list[int]) -> bool:
        """Write and commit tokens up to the end of `text`, in steps; False if pages are missing."""
        while sequence.length < len(text):
            stop = min(len(text), sequence.next_checkpoint or len(text), sequence.length + 40)
            if sequence.extend(stop - sequence.length):
                return False
            self.settle()
            rows, block = self.cache.block_tables, self.cache.block_tokens
            for b in range(sequence.length // block, -(-stop // block)):
                for column, cls, _, _ in self.classes("token"):
                    page = int(rows.tables[column, sequence.row, b])
                    assert page
                    self.bytes[cls, page] = tuple(text[: min(stop, (b + 1) * block)])
            for column, cls, _, _ in self.classes("state"):
                self.bytes[cls, int(rows.states[column, sequence.row])] = tuple(text[:stop])
            sequence.commit(text[sequence.length : stop])
        return True

    def load(self, match: Match, rng: random.Random, fails: float = 0.0) -> int:
        """Load pages from the store, some of which fail; return where the prompt can resume."""
        plan = self.cache.loading.plan(match)
        while questions := plan.next_queries():
            plan.answer(
                [np.array([(q.group, 0, n) in self.store for n in q.hashes], bool) for q in questions]
            )
        needs = plan.missing_pages()
        if not needs:
            return 0
        reservation = self.cache.loading.reserve(plan)
        if reservation is None:
            return 0
        self.settle()
        self.cache.check()
        came = np.zeros_like(reservation.to_load)
        states = True
        for group in self.layout.groups:
            for run, (names, pages) in enumerate(reservation.pages(group)):
                for name, page in zip(names, pages.tolist(), strict=True):
                    label = self.store.get((group.index, run, name))
                    if label is None or rng.random() < fails:
                        states &= group.spec.unit != "state"
                        continue
                    self.bytes[self.cache.state.pool.class_of[group.index], page] = label
                    if group.spec.unit == "token":
                        column = group.column + run
                        came[
                            (reservation.rows[:, column] == page) & reservation.to_load[:, column], column
                        ] = True
        return self.cache.loading.publish(reservation, came, states)

    def resumed(self, sequence: Sequence, text: list[int]) -> None:
        """Check that every page a resumed sequence will read has the right label."""
        point, block, rows = sequence.length, self.cache.block_tokens, self.cache.block_tables
        for group in self.layout.of("token"):
            for b in range(group.spec.visibility.first_visible(point) // block, -(-point // block)):
                for run in range(group.runs):
                    page = int(rows.tables[group.column + run, sequence.row, b])
                    stop = min(point, (b + 1) * block)
                    held = self.bytes[self.cache.state.pool.class_of[group.index], page]
                    assert held[:stop] == tuple(text[:stop]), (group.name, b)
        if point and sequence.state_source is not None:
            for column, cls, _, _ in self.classes("state"):
                assert self.bytes[cls, int(sequence.state_source[0, column])] == tuple(text[:point])


def texts(rng: random.Random, count: int) -> list[list[int]]:
    """Return texts that diverge from each other at any position."""
    made: list[list[int]] = [[rng.randrange(50) for _ in range(rng.randrange(1, 120))]]
    while len(made) < count:
        stem = rng.choice(made)
        made.append(
            [*stem[: rng.randrange(len(stem) + 1)], *(rng.randrange(50) for _ in range(rng.randrange(1, 90)))]
        )
    return made


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(8)
def test_loaded_pages_have_the_offloaded_bytes(
    kind: str, block: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = 0
    for seed in range(6):
        rng = random.Random(f"{kind} {block} {ends} {seed}")
        world = World(kind, slabs=rng.randrange(24, 60), block=block, ends=ends)
        cache = world.cache
        for text in texts(rng, 14):
            prompt = text[: rng.randrange(1, len(text) + 1)]
            match = cache.match(prompt)
            world.settle()
            before = cache.match(prompt).resume
            fails = rng.choice([0.0, 0.0, 0.1])
            point = world.load(cache.match(prompt), rng, fails)
            cache.check()
            sequence = cache.open(cache.match(prompt))
            # Windows' pages of an earlier point may have left for what did not come whole then.
            assert sequence.length >= max(0 if fails else before, min(point, match.limit))
            loaded += max(0, sequence.length - before)
            world.settle()
            world.resumed(sequence, text)
            world.compute(sequence, text)
            sequence.close()
            if rng.random() < 0.3:
                cache.grow(cache.shrink(cache.state.pool.slabs - 2).tolist())  # what is cached leaves
            elif rng.random() < 0.3:
                monkeypatch.setattr(room, "AHEAD", rng.randrange(1, 9))
                cache.state.allocator.evict_ahead()
            world.settle()
            cache.check()
        assert cache.stats()["in_use_pages"] == 0
    assert loaded


@pytest.mark.parametrize(("block", "part"), [(16, WHOLE), (32, WHOLE), (32, ContextPart(0, 4))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(7)
def test_a_miss_of_the_first_query_agrees_with_the_load_plan(
    kind: str, block: int, part: ContextPart
) -> None:
    asked = decided = gained = 0
    for seed in range(6):
        rng = random.Random(f"{kind} {block} {seed}")
        world = World(kind, slabs=rng.randrange(24, 60), block=block, ends=rng.random() < 0.5, part=part)
        cache = world.cache
        for text in texts(rng, 16):
            for prompt in (text, text[: rng.randrange(1, len(text) + 1)]):
                match = cache.match(prompt)
                question = cache.loading.first_query(match)
                plan = cache.loading.plan(match)
                while questions := plan.next_queries():
                    plan.answer(
                        [
                            np.array([(q.group, 0, n) in world.store for n in q.hashes], bool)
                            for q in questions
                        ]
                    )
                if question is None:
                    assert kind not in ("full", "sliding", "chunked") or match.resume < match.matched
                    continue
                asked += 1
                assert question.hashes == plan.hashes[match.matched // block :][:1]
                if any((question.group, 0, name) in world.store for name in question.hashes):
                    gained += plan.resume > match.resume
                else:
                    decided += 1
                    assert (plan.resume, plan.miss) == (match.resume, None)
            sequence = cache.open(cache.match(text))
            world.compute(sequence, text)
            sequence.close()
            if rng.random() < 0.4:
                cache.grow(cache.shrink(rng.randrange(cache.state.pool.slabs - 2)).tolist())
            world.settle()
            world.store = {key: label for key, label in world.store.items() if rng.random() < 0.95}
    if kind in ("full", "sliding", "chunked", "windows of two runs"):
        assert decided
        assert gained
    else:
        assert not asked, "a state, or a window alone, may need less than the next block"


def test_a_window_loads_its_window_and_a_state_group_one_snapshot() -> None:
    world = World("all", slabs=200)
    text = list(range(160))
    sequence = world.cache.open(world.cache.match(text))
    world.compute(sequence, text)
    sequence.close()
    world.settle()
    other = World("all", slabs=200)
    other.store = world.store
    plan = other.cache.loading.plan(other.cache.match([*text, 5]))
    while questions := plan.next_queries():
        plan.answer([np.array([(q.group, 0, n) in other.store for n in q.hashes]) for q in questions])
    assert plan.resume == 160
    full, window, state = plan.missing_pages()
    assert full.blocks == list(range(10))
    assert window.blocks == [8, 9]  # of its 20 tokens
    assert state.blocks == [-1]
    assert [n.blocks for n in plan.missing_pages(first=96)][:2] == [[6, 7, 8, 9], [8, 9]]


def test_a_reservation_that_does_not_fit_changes_nothing_and_quotas_hold() -> None:
    world = World("full", slabs=12, tenants=[Tenant("small", quota=4 * 4096 * 16)])
    layout = world.layout
    world.cache = KVCache(layout, 12, max_tokens=1024, tenants=[Tenant("small", quota=4 * layout.slab_bytes)])
    world.cache.loading.set_listener(world.batches.append, True)
    text = list(range(120))
    sequence = world.cache.open(world.cache.match(text))
    assert world.compute(sequence, text)
    small = CacheControl(tenant="small")
    mine = world.cache.open(world.cache.match(text[:60], small))
    world.batches.clear()
    mine.close()
    plan = world.cache.loading.plan(world.cache.match(text, small))
    for questions in iter(plan.next_queries, []):
        plan.answer([np.ones(len(q.hashes), bool) for q in questions])
    held = world.cache.stats()["in_use_pages"]
    assert world.cache.loading.reserve(plan) is None  # seven blocks, of a quota of four
    assert world.cache.stats()["in_use_pages"] == held
    world.cache.check()
    world.cache.state.tree.version += 1
    with pytest.raises(ValueError, match="make a new one"):
        world.cache.loading.reserve(plan)
    sequence.close()


def test_pages_that_are_written_to_do_not_move() -> None:
    world = World("hybrid", slabs=40)
    pool = world.cache.state.pool
    several = next((c for c in pool.classes if c.per_slab > 1), None)
    if several is None:
        pytest.skip("every slab of this layout is one page")
    ids = pool.allocate(several.index, 1)
    assert ids is not None
    more = pool.allocate(several.index, 2 * several.per_slab)
    assert more is not None
    pool.release(several.index, more[several.per_slab :])
    pool.pin_in_place(several.index, ids, 1)
    assert pool.movable(several.index) != int(ids[0]) // several.per_slab
    pool.pin_in_place(several.index, ids, -1)
    assert not several.fixed


def test_the_bytes_of_a_page_that_moved_twice_are_at_an_unknown_page() -> None:
    world = World("hybrid", slabs=40)
    pool, copies = world.cache.state.pool, world.cache.state.copies
    (column, cls, _, _), *_ = world.classes("state")
    each = pool.classes[cls].per_slab
    assert each > 1
    ids = pool.allocate(cls, 4 * each)
    assert ids is not None
    first, second, third, other = (ids[i * each : i * each + 1] for i in range(4))
    row = np.zeros((1, world.cache.state.states.width), np.int32)
    row[0, column] = third[0]
    copies.add_move(cls, first, second)
    copies.add(cls, other, first + 1)  # the slab that it left is written to: a batch of its own
    assert copies.current_pages(world.cache.state.states, row)[0, column] == third[0]
    copies.add_move(cls, second, third)
    assert copies.current_pages(world.cache.state.states, row)[0, column] == 0, (
        "they are on their way to where it was"
    )


@pytest.mark.parametrize("kind", ["sliding", "all"])
def test_pages_that_a_reservation_shares_may_move_while_it_evicts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(kind)
    world = World(kind, slabs=60)
    cache = world.cache
    make, moved = cache.state.allocator.free_pages, 0

    def making(account: Account, needs: list[int]) -> int:
        """Like `free_pages` when slabs are missing, but moves exactly the pages that the prompt hit."""
        nonlocal moved
        for cls, ids in cache.state.pages.by_class(cache.state.tree.rows(match.path, match.matched)):
            of = cache.state.pool.classes[cls]
            for slab in {int(page) // of.per_slab for page in ids.tolist() if page}:
                free = of.per_slab - int(of.used[slab]) if of.per_slab > 1 else 0
                if of.per_slab > 1 and of.free_pages - free >= of.per_slab - free:
                    cache.state.pool.move_out(cls, slab, partial(cache.state.compaction.renumber, cls))
                    moved += 1
                    return make(account, needs)
        return make(account, needs)

    for text in texts(rng, 40):
        prompt = text[: rng.randrange(1, len(text) + 1)]
        world.settle()
        with monkeypatch.context() as patched:
            patched.setattr(cache.state.allocator, "free_pages", making)
            match = cache.match(prompt)
            world.load(match, rng)  # (checks the cache while pages are on their way)
        sequence = cache.open(cache.match(prompt))
        world.settle()
        world.resumed(sequence, text)
        world.compute(sequence, text)
        sequence.close()
        if rng.random() < 0.5:
            cache.grow(cache.shrink(rng.randrange(30, 50)).tolist())  # leaves some slabs partly used
        world.settle()
        cache.check()
    assert moved
    assert cache.stats()["in_use_pages"] == 0
