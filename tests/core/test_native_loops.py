"""The native loops and the numpy loops give the same counts, hashes and errors."""

from __future__ import annotations

import gc
from types import ModuleType

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvloom.core import PagePool
from kvloom.core.pool import counts, loops
from kvloom.core.prefix import block_hash

native = pytest.importorskip(
    "kvloom.core._native", reason="built without a C compiler; the plain loops serve alone"
)

PAGES = 12
calls = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "retain", "release", "add_cached", "drop_cached"]),
        st.lists(st.integers(0, PAGES - 1), max_size=8),
    ),
    max_size=12,
)


def run(loops: ModuleType, held: np.ndarray, kept: np.ndarray, verb: str, ids: list[int]) -> object:
    pages = np.array(ids, np.int32)
    out = np.zeros(PAGES, np.int32)
    try:
        if verb in ("allocate", "retain", "add_cached"):
            return getattr(loops, verb)(held, kept, pages)
        result = getattr(loops, verb)(held, kept, pages, out)
        return result, sorted(out[: result[1] if isinstance(result, tuple) else result].tolist())
    except ValueError as error:
        return str(error).split(" ", 2)[2]  # which of several wrong pages is named may differ


@pytest.mark.parametrize(
    "given_",
    [
        [], (), [5], (0, 2**31 - 1), list(range(300)), [True], [1, 2.0], ["7"], [None], [-1], [2**31], [2**70], [1, -(2**70)],
        [np.int64(3)], np.arange(3), "12", {1, 2}, range(3), None,
    ],
)  # fmt: skip
def test_plain_numbers_are_read_and_nothing_else_is(given_: object) -> None:
    found = native.plain_ids(given_)
    assert counts.plain_ids(given_) == found
    plain = isinstance(given_, list | tuple) and all(type(one) is int and 0 <= one < 2**31 for one in given_)
    assert (found is not None) == plain
    if found is not None:
        assert np.frombuffer(found, np.int32).tolist() == list(given_)  # type: ignore[call-overload]


def test_the_collector_walks_through_no_list_of_numbers() -> None:
    for numbers in ([1, 2, 3], tuple(range(4, 6))):
        again = native.unwatched(numbers)
        assert again is numbers
        assert counts.unwatched(numbers) is numbers
        assert not gc.is_tracked(numbers)
    tokens = native.unwatched([1])
    tokens += range(1000)
    gc.collect()
    assert tokens == [1, *range(1000)]


@given(calls, st.lists(st.integers(0, 2), min_size=PAGES, max_size=PAGES), st.integers(0, 2))
def test_native_and_plain_loops_agree(
    steps: list[tuple[str, list[int]]], start: list[int], keeps: int
) -> None:
    held, kept = np.array(start, np.int32), np.full(PAGES, keeps, np.int32)
    twin_held, twin_kept = held.copy(), kept.copy()
    for verb, ids in steps:
        assert run(loops, held, kept, verb, ids) == run(counts, twin_held, twin_kept, verb, ids)
        assert (held == twin_held).all()
        assert (kept == twin_kept).all()


@pytest.mark.parametrize("module", [loops, counts], ids=["native", "plain"])
@pytest.mark.parametrize("wrong", [[3, 4, 3], [3, 1], [3, 2]], ids=["twice", "held", "kept"])
def test_only_free_pages_are_allocated_and_a_refusal_changes_nothing(
    module: ModuleType, wrong: list[int]
) -> None:
    held, kept = np.zeros(6, np.int32), np.zeros(6, np.int32)
    held[1], kept[2] = 1, 1
    with pytest.raises(ValueError, match=f"page {wrong[-1]} is not free"):
        module.allocate(held, kept, np.array(wrong, np.int32))
    assert held.tolist() == [0, 1, 0, 0, 0, 0]
    module.allocate(held, kept, np.array([3, 0, 4], np.int32))
    assert held.tolist() == [0, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("loops", [native, counts], ids=["native", "plain"])
def test_a_page_is_cached_more_than_32767_times(loops: ModuleType) -> None:
    """A count of 16 bits wrapped from 32,767 to -32,768, and the page looked free to some checks."""
    pool = PagePool([1], slabs=4)
    ids = pool.allocate(0, 1)
    assert ids is not None
    page, c, times = int(ids[0]), pool.classes[0], 40_000
    many = np.repeat(ids, 1000)
    add = getattr(loops, "keep", None) or loops.add_cached
    drop = getattr(loops, "drop", None) or loops.drop_cached
    for _ in range(times // 1000):
        add(c.in_use, c.cached, many)
    assert c.cached[page] == times
    for _ in range(times // 1000):
        assert drop(c.in_use, c.cached, many, c.freed) == 0  # it is still in use
    assert c.cached[page] == 0


def test_native_loops_refuse_what_does_not_fit() -> None:
    held, kept = np.zeros(4, np.int32), np.zeros(4, np.int32)
    with pytest.raises(IndexError, match="page 4"):
        native.retain(held, kept, np.array([4], np.int32))
    with pytest.raises(TypeError, match="items of 8 bytes"):
        native.retain(held, kept, np.array([1], np.int64))
    with pytest.raises(ValueError, match="fit together"):
        native.release(held, kept, np.array([1, 2], np.int32), np.zeros(1, np.int32))


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, 2**31 - 1), max_size=70))
def test_native_hashes_are_those_of_the_standard_library(parent: bytes, tokens: list[int]) -> None:
    data = np.array(tokens, "<i4").tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "chain", None)
        plain = block_hash.hash_chain(parent, data)
    assert native.chain(parent, data) == plain


@given(st.lists(st.integers(-1, 8), max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
def test_native_and_plain_loops_find_the_same_wrong_row(rows: list[int], is_open: list[bool]) -> None:
    flags = np.array(is_open)
    at = np.array(rows, np.int64)
    assert native.wrong_row(at, flags) == counts.wrong_row(at, flags)
    assert flags.tolist() == is_open
    ids = np.array(rows, "<i4").tobytes()
    assert native.any_negative(ids) == counts.any_negative(ids)


@pytest.mark.parametrize("places", [0, 1, 7, 63, 64])
def test_leading_masks_are_counted_alike(places: int) -> None:
    from kvloom.core.pool import counts, loops

    rng = np.random.default_rng(places)
    for _ in range(20):
        lengths = rng.integers(0, 40, places).tolist()
        masks = [sum(1 << p for p, n in enumerate(lengths) if i < n or rng.random() < 0.1) for i in range(40)]
        expected = [next((i for i, m in enumerate(masks) if not m >> p & 1), 40) for p in range(places)]
        assert counts.leading(masks, places) == expected
        assert loops.leading(masks, places) == expected
        known = {i: mask for i, mask in enumerate(masks) if mask}
        for module in (counts, loops):
            assert module.leading_of(known, list(range(40)), places, 16) == [16 * n for n in expected]
