"""Pages that leave the pool are copied beside the step in flight where they were there before it, and after it where they were
not: checked with recorded copies, and with a device that executes its work as late as possible."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import (
    Field,
    KVCache,
    LayerSpec,
    PageGroup,
    PoolLayout,
    Sequence,
    VirtualClock,
    Visibility,
    attention_fields,
)
from kvloom.engine import Engine, SamplingParams, engine as engine_module
from kvloom.engine.offload import HostPages, PageOffloader, form_of, manager as offload_manager, open_host
from kvloom.kernels.copy import FinishedEvent
from kvloom.tiers.host import copy_pages
from kvloom.tiers.transfers import TransferManager
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, POOL, LateCopy, closed, drawn, greedy, leave_early, offload_of

FULL = LayerSpec("token", attention_fields(2, 16, "fp32"))
STATE = LayerSpec("state", (Field("ssm", (3, 40), "fp32"),))
SLABS = {
    "llama": 12, "gemma3_text": 10, "llama4_text": 10, "mamba2": 12, "jamba": 8, "bamba": 10, "qwen3_next": 4,
}  # fmt: skip
"""Slabs of a pool that is far too small."""


class Told(HostPages):
    """Records the age and the page ids of every copy."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.marks, self.copies = 0, list[tuple[int, set[int]]]()
        self.late = False

    def mark(self, moved: bool = False) -> None:
        self.marks += 1

    def offload(self, group: PageGroup, pages: Any, offsets: Any, age: int = 0) -> Any:
        self.copies.append((age, set(pages.tolist())))
        done = super().offload(group, pages, offsets, age)
        return LateCopy(lambda: None, 4) if self.late else done

    def wait(self, event: Any) -> None:
        event.synchronize()


class Desk:
    """A cache with an offload store, and a clock that does not advance."""

    def __init__(self, *layers: LayerSpec, writes: str = "back") -> None:
        layout = PoolLayout.build({f"layer {i}": spec for i, spec in enumerate(layers)})
        self.clock = VirtualClock()
        self.cache = KVCache(layout, 40, max_tokens=256, clock=self.clock)
        buffer = torch.zeros(40 * layout.slab_bytes, dtype=torch.uint8)
        host, _ = open_host(layout, 4 << 20, False, buffer.device)
        forms = {g.index: [form_of(g, run) for run in range(g.runs)] for g in layout.groups}
        self.pages = Told(layout, buffer, host.arena)
        self.keeping = PageOffloader(
            self.cache, self.pages, TransferManager(host, ()), forms, forms, {writes}
        )

    def computed(self, first: int) -> Sequence:
        """Compute three blocks of a prompt of four."""
        sequence = self.cache.open(self.cache.match(np.arange(first, first + 64, dtype=np.int32)))
        assert not sequence.extend(48)
        sequence.commit(range(first, first + 48))
        return sequence

    def left(self) -> list[tuple[int, set[int]]]:
        """Evict everything that can be evicted; return the copies."""
        self.cache.grow(self.cache.shrink(39).tolist())
        self.keeping.flush()
        self.cache.take_copies()
        copies, self.pages.copies = self.pages.copies, []
        return copies


def pages_of(sequence: Sequence) -> set[int]:
    return set(sequence.table(0).ravel()[:3].tolist())


def test_pages_cached_before_the_mark_are_old() -> None:
    desk = Desk(FULL, FULL)
    before, used = desk.computed(0), desk.computed(1000)
    old = pages_of(before) | pages_of(used)
    before.close()
    desk.keeping.before_step()
    after = desk.computed(2000)
    young = pages_of(after)
    after.close()
    used.close()  # which changes nothing of when it was written
    assert desk.left() == [(1, old), (0, young)], "old ones first, in any order of eviction"
    again = desk.computed(3000)
    young = pages_of(again)
    again.close()
    assert desk.left() == [(0, young)]
    assert desk.pages.marks == 1


@pytest.mark.parametrize("steps", [(32,), (16, 16), (5, 27), (1, 15, 16)])
@pytest.mark.parametrize("first", [48, 41])
def test_only_the_growth_of_a_run_since_the_mark_is_young(first: int, steps: tuple[int, ...]) -> None:
    desk = Desk(FULL)
    text = np.arange(first + 32, dtype=np.int32)
    sequence = desk.cache.open(desk.cache.match(text))
    for size, marked in ((first, True), *((size, False) for size in steps)):
        assert not sequence.extend(size)
        sequence.commit(text[sequence.length : sequence.length + size])
        if marked:
            desk.keeping.before_step()
    pages = sequence.table(0).ravel()[: -(-len(text) // 16)].tolist()
    sequence.close()
    whole = first // 16  # a block that was partial is written on
    assert desk.left() == [(1, set(pages[:whole])), (0, set(pages[whole:]))]


def test_split_runs_keep_their_age() -> None:
    desk = Desk(FULL)
    text = np.arange(96, dtype=np.int32)
    sequence = desk.cache.open(desk.cache.match(text))
    for size in (48, 48):
        assert not sequence.extend(size)
        sequence.commit(text[sequence.length : sequence.length + size])
        desk.keeping.before_step() if sequence.length == 48 else None
    pages = sequence.table(0).ravel()[:6].tolist()
    sequence.close()
    for at in (70, 20):  # in what is young, and in what is old
        other = desk.cache.open(desk.cache.match(np.append(text[:at], np.arange(500, 520, dtype=np.int32))))
        assert other.length == at
        other.close()
    assert desk.cache.state.tree.nodes > 2
    found = desk.left()
    assert set().union(*(some for age, some in found if age)) == set(pages[:3])
    assert set().union(*(some for age, some in found if not age)) >= set(pages[3:])


def test_replaced_partial_block_is_not_retained() -> None:
    """The same text twice: after the shorter one has closed and was offloaded, the longer one extends its last block."""
    desk = Desk(FULL, writes="through")
    text = np.arange(40, dtype=np.int32)
    shorter, longer = (desk.cache.open(desk.cache.match(text[:size])) for size in (24, 40))
    assert not shorter.extend(24)
    assert not longer.extend(40)
    shorter.commit(text[:24])
    shorter.close()
    longer.commit(text)
    desk.pages.late = True
    desk.keeping.flush()
    desk.cache.check()
    longer.close()
    desk.keeping.flush()
    while desk.keeping.busy:
        desk.keeping.poll()
    desk.cache.check()
    assert desk.cache.stats()["in_use_pages"] == 0


def test_run_does_not_grow_by_a_block_without_its_window_page() -> None:
    """Like loaded pages that a later window does not need: its checkpoint would lose its own pages."""
    desk = Desk(FULL, replace(FULL, visibility=Visibility("sliding", 20)))
    cache, text = desk.cache, np.arange(32, dtype=np.int32)
    shorter, longer = (cache.open(cache.match(text[:size])) for size in (24, 32))
    for sequence, size in ((shorter, 24), (longer, 32)):
        assert not sequence.extend(size)
    shorter.commit(text[:24])
    shorter.close()
    assert cache.match(text[:25]).resume == 24
    rows = np.stack([longer.table(group)[0, :2] for group in (0, 1)], 1).astype(np.int32)
    rows[1, 1] = 0
    root = cache.state.tree.roots[cache.match(text).root_hash]
    cache.state.tree.publish(root, text.tobytes(), rows, desk.clock.now(), last=True)
    cache.check()
    assert cache.match(text[:25]).resume == 24
    longer.close()
    cache.check()


def test_pages_become_old_with_a_later_mark() -> None:
    desk = Desk(FULL)
    desk.computed(0).close()
    assert [age for age, _ in desk.left()] == [0]
    desk.keeping.before_step()
    desk.computed(1000).close()
    desk.keeping.before_step()
    assert [age for age, _ in desk.left()] == [1]


@pytest.mark.parametrize("moved", [(), (0,), (1,), (2,)])
def test_age_counts_marks_since_a_page_was_cached_or_moved(
    moved: tuple[int, ...],
) -> None:
    desk, ages = Desk(FULL), dict[int, int]()
    sequences = []
    for step in range(3):
        sequences.append(desk.computed(1000 * step))
        desk.keeping.before_step(moved=step in moved)
    sequences.append(desk.computed(3000))
    pages = [pages_of(sequence) for sequence in sequences]
    for sequence in sequences:
        sequence.close()
    for age, some in desk.left():
        ages.update(dict.fromkeys(some, age))
    found = [{ages[page] for page in some} for some in pages]
    assert found == [{2}, {2}, {2 if 2 in moved else 1}, {0}]


def test_growth_between_two_marks_is_younger_than_the_rest() -> None:
    desk = Desk(FULL)
    text = np.arange(96, dtype=np.int32)
    sequence = desk.cache.open(desk.cache.match(text))
    for size in (32, 32, 32):
        assert not sequence.extend(size)
        sequence.commit(text[sequence.length : sequence.length + size])
        desk.keeping.before_step() if sequence.length < 96 else None
    pages = sequence.table(0).ravel()[:6].tolist()
    sequence.close()
    found = desk.left()
    assert [(age, some) for age, some in found if age] == [(1, set(pages[:4]))]
    text += 1000
    sequence = desk.cache.open(desk.cache.match(text))
    for size in (32, 32):
        assert not sequence.extend(size)
        sequence.commit(text[sequence.length : sequence.length + size])
        desk.keeping.before_step()
    pages = sequence.table(0).ravel()[:4].tolist()
    sequence.close()
    assert desk.left() == [(2, set(pages[:2])), (1, set(pages[2:]))]


def test_failed_mark_makes_no_page_old(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(FULL)
    desk.computed(0).close()

    def fails(_: HostPages, moved: bool) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Told, "mark", fails)
    with pytest.raises(RuntimeError, match="gone"):
        desk.keeping.before_step()
    assert [age for age, _ in desk.left()] == [0]


def test_states_have_the_age_of_their_snapshot() -> None:
    desk = Desk(FULL, STATE)
    sequence = desk.computed(0)
    desk.clock.advance(1)
    desk.keeping.before_step()
    desk.clock.advance(1)
    assert desk.cache.checkpoint(sequence, 48)  # of a run that was there before
    desk.cache.state.tree.drop_checkpoint(sequence.node.checkpoints[-1], "for a test")
    desk.keeping.flush()
    assert [age for age, _ in desk.pages.copies] == [0]


def test_steps_and_copies_inside_the_pool_set_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_manager, "HostPages", Told)
    engine = crowded("bamba", ahead=False)
    pages = offload_of(engine)._pages
    assert isinstance(pages, Told)
    engine.add(drawn("marks", 20)[0], greedy(4))
    engine.step()
    assert pages.marks == 1
    engine.apply_copies()  # the snapshot at the prompt's end
    assert pages.marks == 2
    engine.apply_copies()
    assert pages.marks == 2, "there was nothing to copy"
    engine.run()
    closed(engine)


class Late(HostPages):
    """A device that does nothing before it must: what was launched after a mark is not done when copies of pages that are as old
    are made."""

    counts: dict[int, int]
    then: tuple[Any, ...] = ()

    def mark(self, moved: bool = False) -> None:
        now = self.buffer.numpy().copy()
        self.then = (now, now if moved or not self.then else self.then[0])

    def offload(self, group: PageGroup, pages: Any, offsets: Any, age: int = 0) -> Any:
        self.counts[age] += len(pages)
        if not age:
            return super().offload(group, pages, offsets)
        then, stride = self.then[age - 1], group.page_stride
        copy_pages(self._arena, offsets, then, np.asarray(pages, np.int64) * stride, stride)
        return FinishedEvent()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Count copied pages by age, on such a device."""
    Late.counts = dict.fromkeys(range(3), 0)
    monkeypatch.setattr(offload_manager, "HostPages", Late)
    leave_early(monkeypatch)
    return Late.counts


def storm(family: str) -> list[list[int]]:
    rng = random.Random(family)
    roots = drawn((family, "early roots"), 40, 33, 20)
    tails = drawn((family, "early"), *range(1, 25))
    return [[*rng.choice(roots)[: rng.randrange(10, 40)], *tail] for tail in tails]


def crowded(family: str, ahead: bool) -> Engine:
    """Return an engine in which pages are evicted while others are written, and requests are preempted."""
    slab = make_engine(tiny(family), POOL).layout.slab_bytes
    engine = make_engine(
        tiny(family), SLABS[family] * slab, token_budget=24, max_running=5, ahead=ahead, offload=PATIENT,
        tiers=[f"host:{16 * slab}?exclusive=0"], eviction_policy="lru",
    )  # fmt: skip
    engine.scheduler.admission = None
    return engine


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "llama4_text", "mamba2", "jamba", "bamba", "qwen3_next"]
)
@pytest.mark.few(1)
def test_old_pages_are_complete_before_the_inflight_step(
    family: str, ahead: bool, counts: dict[int, int]
) -> None:
    prompts = storm(family)
    wanted = expected(tiny(family), prompts, 6)
    engine = crowded(family, ahead)
    for _ in range(3):
        requests = [engine.add(prompt, greedy(6)) for prompt in prompts]
        engine.run()
        assert [request.tokens for request in requests] == wanted
    assert counts[1] or not ahead
    assert counts[2]
    assert offload_of(engine).stats.loaded_tokens
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.slow
def test_pages_evicted_after_growth_are_complete(family: str, counts: dict[int, int]) -> None:
    """Outputs of several blocks, whose pages are evicted in the step after their last token, or while they are written."""
    prompts = storm(family)[::2]
    wanted = expected(tiny(family), prompts, 40)
    engine = crowded(family, ahead=True)
    engine.scheduler.token_budget = 64
    for _ in range(2):
        requests = [engine.add(prompt, greedy(40)) for prompt in prompts]
        engine.run()
        assert [request.tokens for request in requests] == wanted
    assert counts[1]
    assert counts[2]
    for _ in range(2):  # they come back with what was said
        more = [[*request.tokens, 5, 6, 7] for request in requests]
        again = [engine.add(prompt, greedy(3)) for prompt in more]
        engine.run()
        assert [request.tokens for request in again] == expected(tiny(family), more, 3)
    assert offload_of(engine).stats.loaded_tokens
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.few(1)
def test_forks_and_beams_load_their_pages_again(family: str, width: int, counts: dict[int, int]) -> None:
    """Forks copy pages inside the pool while pages are evicted."""
    params = SamplingParams(max_tokens=8, temperature=0 if width > 1 else 1.0, seed=3, n=3, beam_width=width)
    prompts = storm(family)[::2]
    plain = make_engine(tiny(family), POOL * 4, token_budget=24, ahead=True)
    wanted = [plain.add(prompt, params) for prompt in prompts]
    plain.run()
    engine = crowded(family, ahead=True)
    for _ in range(3):
        found = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        for one, other in zip(wanted, found, strict=True):
            assert [best.output for best in other.returned_samples] == [
                best.output for best in one.returned_samples
            ]
    assert counts[1]
    assert counts[2]
    closed(engine)


def stepped(engine: Engine) -> int:
    """Step until all requests have finished, even if steps fail; return how many failed."""
    failed = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            failed += 1
            assert failed < 1000
    return failed


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["gemma3_text", "bamba", "jamba"])
@pytest.mark.few(1)
def test_failed_copies_inside_the_pool_are_retried_first(
    family: str, ahead: bool, counts: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = storm(family)
    wanted = expected(tiny(family), prompts, 6)
    engine, rng, failed = crowded(family, ahead), random.Random(family), 0
    really = engine_module.copy_pages

    def flaky(*given: Any) -> None:
        if rng.random() < 0.2:
            raise RuntimeError("no memory for ids")
        really(*given)

    monkeypatch.setattr(engine_module, "copy_pages", flaky)
    for _ in range(2):
        requests = [engine.add(prompt, greedy(6)) for prompt in prompts]
        failed += stepped(engine)
        assert [request.tokens for request in requests] == wanted
    assert failed or family == "gemma3_text"  # which copies little
    monkeypatch.setattr(engine_module, "copy_pages", really)
    engine.apply_copies()
    closed(engine)


def test_uncopied_pages_are_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no memory for ids")

    engine = make_engine(tiny("bamba"), POOL, tiers=["host:64MiB?write=through"], offload=PATIENT)
    engine.add(drawn("lost", 40)[0], greedy(2))
    engine.step()
    monkeypatch.setattr(engine_module, "copy_pages", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    offload = offload_of(engine)
    engine.close()
    assert offload.stats.offloaded_pages == 0


@pytest.mark.parametrize("family", ["llama", "bamba"])
@pytest.mark.few(1)
def test_failed_offloads_and_loads_change_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, failed = random.Random(family), {"down": 0, "up": 0}

    class Flaky(HostPages):
        def offload(self, *given: Any) -> Any:
            return self._may("down", super().offload, given)

        def load(self, *given: Any) -> Any:
            return self._may("up", super().load, given)

        def _may(self, which: str, call: Any, given: Any) -> Any:
            if rng.random() < 0.1:
                failed[which] += 1
                raise RuntimeError("no memory for ids")
            return call(*given)

    monkeypatch.setattr(offload_manager, "HostPages", Flaky)
    prompts = storm(family)
    wanted = expected(tiny(family), prompts, 6)
    engine, rounds = crowded(family, ahead=True), 0
    while rounds < 4 or not all(failed.values()):
        requests = [engine.add(prompt, greedy(6)) for prompt in prompts]
        stepped(engine)
        assert [request.tokens for request in requests] == wanted
        rounds += 1
        assert rounds < 20, failed
    monkeypatch.setattr(rng, "random", lambda: 1.0)
    offload = offload_of(engine)
    engine.apply_copies()
    while offload.is_retaining_pages:
        offload.poll()
    assert offload.host.index.loading == 0
    assert not offload.host._slots.refs.any(), "some slots are still leased"
    closed(engine)
