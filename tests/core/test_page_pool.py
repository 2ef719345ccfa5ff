"""The page pool alone: a page is free, cached or in use, is allocated once, and slabs become free whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvloom.core import PagePool

from .world import make_world


def counts(pool: PagePool, cls: int = 0) -> tuple[int, int, int]:
    """Return the pages in use, the cached pages and the free slabs."""
    c = pool.classes[cls]
    return c.in_use_pages, c.cached_pages, pool.free_slabs


def picture(pool: PagePool) -> list[object]:
    """Return all the pool's records of its pages."""
    known: list[object] = [pool.free_slabs]
    for c in pool.classes:
        known += [
            c.in_use.tobytes(),
            c.cached.tobytes(),
            c.in_use_pages,
            c.cached_pages,
            c.free_pages,
            c.slabs_in_use,
        ]
    return known


def take(pool: PagePool, n: int, cls: int = 0, near: int = 0) -> np.ndarray:
    pages = pool.allocate(cls, n, near)
    assert pages is not None
    return pages


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


# -- the states of a page -------------------------------------------------------------------------


@pytest.mark.parametrize("per_slab", [1, 3])
def test_a_page_goes_from_free_to_in_use_to_cached_to_free(per_slab: int) -> None:
    pool = PagePool([per_slab], 4)
    pages = take(pool, per_slab)
    assert counts(pool) == (per_slab, 0, 2)
    pool.add_cached(0, pages)
    assert counts(pool) == (per_slab, 0, 2), "kept and held counts as held"
    assert pool.release(0, pages) == (per_slab, 0)
    assert counts(pool) == (0, per_slab, 2)
    assert pool.retain(0, pages) == per_slab
    assert counts(pool) == (per_slab, 0, 2)
    pool.release(0, pages)
    assert pool.drop_cached(0, pages) == per_slab
    assert counts(pool) == (0, 0, 3)
    pool.check()


@pytest.mark.parametrize("per_slab", [1, 3])
def test_a_page_is_free_only_after_its_last_holder_and_keeper(per_slab: int) -> None:
    pool = PagePool([per_slab], 4)
    page = take(pool, 1)
    assert pool.retain(0, page) == 0, "it was in use already"
    pool.add_cached(0, page)
    pool.add_cached(0, page)
    assert pool.drop_cached(0, page) == 0
    assert pool.release(0, page) == (0, 0)
    assert pool.release(0, page) == (1, 0), "no longer in use, but still cached"
    pool.check()
    assert pool.drop_cached(0, page) == 1
    assert pool.free_slabs == 3
    pool.check()


def test_dropping_a_page_in_use_frees_it_at_the_last_release() -> None:
    pool = PagePool([1], 4)
    page = take(pool, 1)
    pool.add_cached(0, page)
    assert pool.drop_cached(0, page) == 0
    assert pool.release(0, page) == (1, 1)
    assert pool.free_slabs == 3
    pool.check()


def test_a_page_is_allocated_once_and_never_page_0() -> None:
    pool = PagePool([1, 2, 5], 20)
    bytes_taken: set[tuple[int, int]] = set()
    for cls, n in ((0, 3), (1, 5), (2, 12), (1, 4), (2, 3)):
        per_slab = pool.classes[cls].per_slab
        for page in take(pool, n, cls).tolist():
            assert page >= per_slab, "slab 0 is never lent"
            # A page of class c covers 10 / per_slab tenths of its slab.
            width = 10 // per_slab
            span = {(page // per_slab, page % per_slab * width + i) for i in range(width)}
            assert not span & bytes_taken
            bytes_taken |= span
    pool.check()


# -- refusals ---------------------------------------------------------------------------------------


def refused(pool: PagePool, call: Callable[[], object], page: int) -> None:
    before = picture(pool)
    with pytest.raises(ValueError, match=rf"(?<!\w){page}\b"):
        call()
    assert picture(pool) == before, "a refused call changed something"
    pool.check()


@pytest.mark.parametrize("per_slab", [1, 3])
def test_a_double_free_is_refused(per_slab: int) -> None:
    pool = PagePool([per_slab], 6)
    a, b, c = take(pool, 3).tolist()
    pool.release(0, ids(b))
    refused(pool, lambda: pool.release(0, ids(a, b, c)), b)
    pool.add_cached(0, ids(a))
    refused(pool, lambda: pool.drop_cached(0, ids(a, c)), c)


@pytest.mark.parametrize("per_slab", [1, 3])
@pytest.mark.parametrize("verb", ["release", "drop_cached"])
def test_a_page_released_or_dropped_too_often_is_refused(verb: str, per_slab: int) -> None:
    pool = PagePool([per_slab], 6)
    a, b = take(pool, 2).tolist()
    pool.add_cached(0, ids(a, b))
    refused(pool, lambda: getattr(pool, verb)(0, ids(b, a, b)), b)


@pytest.mark.parametrize("per_slab", [1, 3])
def test_every_listing_of_a_page_counts_once(per_slab: int) -> None:
    pool = PagePool([per_slab], 6)
    page = int(take(pool, 1)[0])
    pool.add_cached(0, ids(page, page))
    assert pool.release(0, ids(page)) == (1, 0)
    assert pool.retain(0, ids(page, page)) == 1, "one page that was not in use"
    assert counts(pool)[:2] == (1, 0)
    assert pool.release(0, ids(page, page)) == (1, 0)
    assert pool.drop_cached(0, ids(page, page)) == 1
    assert counts(pool) == (0, 0, 5)
    pool.check()


@pytest.mark.parametrize("verb", ["retain", "add_cached"])
def test_a_free_page_cannot_be_retained_or_cached(verb: str) -> None:
    pool = PagePool([1], 6)
    page, gone = take(pool, 2).tolist()
    pool.release(0, ids(gone))
    refused(pool, lambda: getattr(pool, verb)(0, ids(page, gone)), gone)


@pytest.mark.parametrize("verb", ["retain", "release", "add_cached", "drop_cached"])
def test_page_0_is_no_page(verb: str) -> None:
    pool = PagePool([1], 6)
    before = picture(pool)
    getattr(pool, verb)(0, ids(0, 0))
    assert picture(pool) == before


def test_pools_without_usable_slabs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b1 slabs"):
        PagePool([1], 1)
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        PagePool([1, 0], 4)
    pool = PagePool([1], 4)
    refused(pool, lambda: pool.allocate(0, -3), -3)


@pytest.mark.parametrize("per_slab", [1, 3])
def test_out_of_pages_is_none_and_changes_nothing(per_slab: int) -> None:
    pool = PagePool([per_slab], 4)
    take(pool, 2 * per_slab)
    before = picture(pool)
    assert pool.allocate(0, per_slab + 1) is None
    assert picture(pool) == before
    take(pool, per_slab)
    assert pool.allocate(0, 1) is None
    assert take(pool, 0).size == 0
    pool.check()


# -- several pages a slab -----------------------------------------------------------------------------


def test_a_slab_has_one_page_size_and_is_free_when_its_pages_are() -> None:
    pool = PagePool([2, 1], 3)
    pages = take(pool, 2)
    take(pool, 1, cls=1)
    assert pool.allocate(1, 1) is None
    pool.release(0, pages[:1])
    assert pool.allocate(1, 1) is None, "half a slab is no slab"
    pool.release(0, pages[1:])
    take(pool, 1, cls=1)
    pool.check()


def test_the_slab_of_a_neighbour_is_filled_first() -> None:
    pool = PagePool([4], 10)
    mine = take(pool, 3)
    take(pool, 3)
    more = take(pool, 1, near=int(mine[0]))
    assert more[0] // 4 == mine[0] // 4
    pool.check()


def test_a_newcomer_gets_a_slab_of_its_own_while_slabs_are_plenty_and_packs_when_they_are_not() -> None:
    for slabs, apart in ((20, True), (2, False)):
        pool = PagePool([4], slabs)
        first = take(pool, 1)
        pool.slabs_short([1])
        second = take(pool, 1)
        assert bool(first[0] // 4 != second[0] // 4) is apart
        pool.check()


def test_sequences_that_grow_in_turns_have_their_pages_together() -> None:
    world = make_world("several pages a slab", 40)
    cache = world.cache
    sequences = [cache.open(cache.match([i] * 9)) for i in range(2)]
    for _ in range(12):
        for seq in sequences:
            assert seq.extend(16) == 0
            seq.commit([seq.row] * 16)
            cache.take_copies()
    groups = cache.layout.of("token")
    per_slab = groups[0].pages_per_slab
    slabs = [
        set(np.concatenate([seq.table(g.index).ravel() for g in groups]) // per_slab) for seq in sequences
    ]
    assert not slabs[0] & slabs[1]
    assert [len(s) for s in slabs] == [2, 2], "24 pages of 12 a slab"
    cache.check()


def test_move_out_preserves_counts_and_renumbers() -> None:
    pool = PagePool([4, 1], 4)
    near = take(pool, 4)
    far = take(pool, 4)
    pool.release(0, near[2:])
    pool.release(0, far[1:])
    pool.retain(0, far[:1])
    pool.add_cached(0, far[:1])
    assert pool.movable(0) == far[0] // 4, "the emptier slab is the cheaper"
    told: list[tuple[list[int], list[int]]] = []
    pool.move_out(0, int(far[0] // 4), lambda old, new: told.append((old.tolist(), new.tolist())))
    assert told == [([int(far[0])], [told[0][1][0]])]
    moved = ids(told[0][1][0])
    assert moved[0] // 4 == near[0] // 4
    pool.check()
    assert pool.free_slabs == 2
    assert pool.release(0, moved) == (0, 0), "it was held twice"
    assert pool.release(0, moved) == (1, 0), "and kept once"
    assert pool.drop_cached(0, moved) == 1
    pool.check()


def test_no_slab_is_movable_when_the_others_are_full() -> None:
    pool = PagePool([4], 4)
    take(pool, 4)
    alone = take(pool, 3)
    assert pool.movable(0) is None
    pool.release(0, alone)
    assert pool.movable(0) is None
    pool.check()


# -- what fits ------------------------------------------------------------------------------------------


def fits(held: list[int], needs: list[int], sizes: list[int], slabs: int) -> bool:
    """Return whether a new pool, without fragmentation, has pages for all of it."""
    pool = PagePool(sizes, slabs)
    return all(pool.allocate(c, h + n) is not None for c, (h, n) in enumerate(zip(held, needs, strict=True)))


def test_missing_slabs_is_exact() -> None:
    chance = random.Random(7)
    for _ in range(300):
        sizes = chance.sample([1, 2, 3, 5], chance.randint(1, 3))
        slabs = chance.randint(2, 7)
        pool = PagePool(sizes, slabs)
        for _ in range(chance.randint(0, 12)):
            cls = chance.randrange(len(sizes))
            pages = pool.allocate(cls, chance.randint(0, 4))
            if pages is None:
                continue
            gone = pages[[chance.random() < 0.4 for _ in pages]]
            if chance.random() < 0.5:
                pool.add_cached(cls, gone)
            pool.release(cls, gone)
        pool.check()
        needs = [chance.randint(0, 8) for _ in sizes]
        held = [c.in_use_pages for c in pool.classes]
        missing = next(k for k in range(99) if fits(held, needs, sizes, slabs + k))
        assert pool.missing_slabs(needs) == missing


def test_slabs_short_is_0_if_allocate_can_serve() -> None:
    chance = random.Random(8)
    for _ in range(300):
        sizes = chance.sample([1, 2, 3, 5], chance.randint(1, 3))
        pool = PagePool(sizes, chance.randint(2, 7))
        for cls in range(len(sizes)):
            pages = pool.allocate(cls, chance.randint(0, 5))
            if pages is not None:
                pool.release(cls, pages[[chance.random() < 0.4 for _ in pages]])
        needs = [chance.randint(0, 6) for _ in sizes]
        lacking = pool.slabs_short(needs)
        served = [pool.allocate(c, n) is not None for c, n in enumerate(needs)]
        assert (lacking == 0) == all(served)
        pool.check()
