"""The host tier: the conformance suite, leases, eviction order, page sizes of one arena."""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvloom.tiers import Form, HostConfig, HostTier, Objects, Outcome
from kvloom.tiers.host import arena, copy_pages, host_index
from kvloom.tiers.host.arena import Arena
from kvloom.tiers.host.host_index import HostIndex
from kvloom.tiers.testing.conformance import (
    FORM,
    PAGE,
    Harness,
    TierConformance,
    filled,
    get,
    objects,
    page,
    put,
)

MIB = 1 << 20


class HostHarness(Harness):
    def offsets(self, wanted: Objects) -> list[int]:
        lease = self.tier.acquire(wanted)
        lease.release()
        return [int(offset) for offset in lease.offsets if offset >= 0]

    def flip(self, wanted: Objects) -> None:
        for offset in self.offsets(wanted):
            self.tier.arena[offset + 777] ^= 16

    def swap(self, first: Objects, second: Objects) -> None:
        (a,), (b,) = self.offsets(first), self.offsets(second)
        pages, size = self.tier.arena, first.form.page_bytes
        kept = pages[a : a + size].copy()
        pages[a : a + size] = pages[b : b + size]
        pages[b : b + size] = kept


class TestHostTier(TierConformance):
    def make(self, folder: Path) -> Harness:
        return HostHarness(HostTier(HostConfig(4 * MIB, slab_bytes=256 << 10, checked=True)))


def plain(pages: int) -> HostTier:
    return HostTier(HostConfig(pages * PAGE, slab_bytes=PAGE))


def test_the_least_recently_used_page_is_evicted_first() -> None:
    tier = plain(4)
    put(tier, range(4))
    get(tier, [0])
    put(tier, [9])
    assert tier.lookup(objects([0, 1, 2, 3, 9])).tolist() == [True, False, True, True, True]


def test_a_demoted_page_is_evicted_first() -> None:
    tier = plain(4)
    put(tier, range(4))
    for page_numbers in ([2], [3]):
        lease = tier.acquire(objects(page_numbers))
        tier.demote(lease)
        lease.release()
    put(tier, [9])
    assert tier.lookup(objects([0, 1, 2, 3, 9])).tolist() == [True, True, True, False, True]
    get(tier, [2])  # a use ends the demotion
    put(tier, [10])
    assert tier.lookup(objects([0, 1, 2, 9, 10])).tolist() == [False, True, True, True, True]


def test_a_page_used_after_the_lease_began_is_not_demoted() -> None:
    tier = plain(4)
    put(tier, range(4))
    lease = tier.acquire(objects([2]))
    get(tier, [2])
    tier.demote(lease)
    lease.release()
    put(tier, [9])
    assert tier.lookup(objects([0, 2])).tolist() == [False, True]


def test_a_lease_that_is_no_use_keeps_the_order() -> None:
    tier = plain(4)
    put(tier, range(4))
    tier.acquire(objects([0]), is_use=False).release()
    put(tier, [9])
    assert tier.lookup(objects([0, 1])).tolist() == [False, True]


def test_leased_pages_are_not_evicted_and_a_tier_full_of_them_reports_full() -> None:
    tier = plain(4)
    put(tier, range(4))
    lease = tier.acquire(objects(range(3)))
    assert put(tier, [7, 8]).results.tolist() == [Outcome.OK, Outcome.FULL], (
        "a batch does not push itself out"
    )
    assert put(tier, [8]).ok.all()
    assert tier.lookup(objects([0, 1, 2, 3, 7, 8])).tolist() == [True, True, True, False, False, True]
    with_all = tier.acquire(objects([8]))
    transfer = put(tier, [20])
    assert transfer.results.tolist() == [Outcome.FULL]
    assert "in use" in transfer.reason
    lease.release()
    lease.release()
    with_all.release()
    assert put(tier, [20]).ok.all()


def test_a_large_batch_examines_leased_pages_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = []
    victim = HostIndex._victim
    monkeypatch.setattr(HostIndex, "_victim", lambda *args: looked.append(1) or victim(*args))
    tier = plain(300)
    first = tier.reserve(objects(range(300)))
    second = tier.reserve(objects(range(300, 700)))
    assert (second.results == Outcome.FULL).all()
    assert (second.offsets == -1).all()
    assert len(looked) < 10
    first.release(True)
    assert tier.lookup(objects(range(300))).all()


def test_many_leased_pages_do_not_prevent_eviction_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_index, "_MAX_TRIES", 8)
    tier = plain(64)
    put(tier, range(64))
    lease = tier.acquire(objects(range(40)))
    put(tier, range(40, 64))  # stored already: used after the leased ones
    assert put(tier, range(100, 104)).ok.all()
    assert tier.lookup(objects(range(40))).all()
    lease.release(np.ones(40, bool))
    lease.release(np.ones(40, bool))
    assert put(tier, range(200, 264)).ok.all()


@pytest.mark.slow
def test_pages_used_in_one_batch_are_evicted_one_by_one() -> None:
    tier = plain(1000)
    put(tier, range(1000))
    for i in range(1000):
        assert put(tier, [1000 + i]).ok.all()
        assert not tier.lookup(objects([i]))[0]
        assert tier.lookup(objects(range(i + 1, 1001 + i))).all()


def test_a_batch_evicts_only_pages_without_a_lease() -> None:
    tier = plain(64)
    put(tier, range(64))
    lease = tier.acquire(objects(range(0, 64, 2)))  # every other
    offsets = lease.offsets.copy()
    assert put(tier, range(100, 132)).ok.all()
    assert tier.lookup(objects(range(64))).tolist() == [True, False] * 32
    assert put(tier, [200]).ok.all(), "earlier pages are evictable"
    lease.release()
    again = tier.acquire(objects(range(0, 64, 2)))
    assert (again.offsets == offsets).all()
    again.release()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.few(2)
def test_batches_are_evicted_in_the_order_of_their_last_use(seed: int) -> None:
    rng, tier, model = np.random.default_rng(seed), plain(20), OrderedDict[int, None]()
    for _ in range(200):
        some = rng.integers(0, 40, rng.integers(1, 12)).tolist()
        there = [number for number in some if number in model]
        verb = rng.choice(["put", "get", "drop"], p=[0.6, 0.3, 0.1])
        if verb == "drop":
            assert tier.drop(objects(some)) == len(set(there))
            for number in set(there):
                del model[number]
            continue
        # Stored objects are touched first, so they are not evicted for the others.
        for number in dict.fromkeys(there):
            model.move_to_end(number)
        if verb == "put":
            assert put(tier, some).ok.all()
            for number in dict.fromkeys(some):
                if number not in model:
                    model[number] = None
            while len(model) > 20:
                model.popitem(last=False)
        else:
            get(tier, some)
        assert np.flatnonzero(tier.lookup(objects(range(40)))).tolist() == sorted(model)
        assert tier.stats().bytes == len(model) * PAGE


def test_an_object_twice_in_a_batch_has_one_page() -> None:
    tier = plain(4)
    twice = tier.reserve(objects([1, 2, 1]))
    assert twice.results.tolist() == [Outcome.PENDING, Outcome.PENDING, Outcome.OK]
    assert twice.offsets[2] == -1
    twice.release()
    both = tier.acquire(objects([1, 1, 2]))
    assert both.offsets[0] == both.offsets[1]
    assert tier.drop(objects([1])) == 1
    both.release()
    assert tier.stats().bytes == PAGE, "it was freed once"
    assert put(tier, range(10, 14)).ok.all()


def test_a_page_dropped_during_a_lease_keeps_its_bytes_until_release() -> None:
    tier = plain(2)
    put(tier, [0, 1])
    lease = tier.acquire(objects([0]))
    assert tier.drop(objects([0])) == 1
    put(tier, [2, 3])
    at = int(lease.offsets[0])
    assert np.array_equal(tier.arena[at : at + PAGE], page(0))
    assert tier.stats().objects == 1, "one page is in use, so one of the two could be stored"
    lease.release()
    put(tier, [4])
    assert tier.stats().objects == 2
    assert tier.stats().bytes == 2 * PAGE


def test_a_reserved_page_is_found_only_after_it_is_filled() -> None:
    tier = plain(4)
    lease = tier.reserve(objects(range(2)))
    assert lease.results.tolist() == [Outcome.PENDING] * 2
    assert not tier.lookup(objects(range(2))).any()
    assert tier.drop(objects(range(2))) == 0
    copy_pages(tier.arena, lease.offsets, (source := filled(range(2))).bytes, source.starts, PAGE)
    lease.release()
    assert get(tier, range(2)).ok.all()


def test_a_reserved_page_that_was_not_filled_is_freed() -> None:
    tier = plain(2)
    tier.reserve(objects(range(2))).release(written=False)
    assert tier.stats().bytes == 0
    assert put(tier, [5, 6]).ok.all()


def test_the_arena_uses_a_given_buffer() -> None:
    memory = np.zeros(4 * PAGE, np.uint8)
    tier = HostTier(HostConfig(4 * PAGE, slab_bytes=PAGE), buffer=memory)
    put(tier, [3])
    assert any(np.array_equal(memory[at : at + PAGE], page(3)) for at in range(0, 4 * PAGE, PAGE))
    with pytest.raises(ValueError, match="have 262144 bytes; it has 100"):
        HostTier(HostConfig(4 * PAGE, slab_bytes=PAGE), buffer=bytearray(100))


def test_a_capacity_above_system_memory_is_refused_with_its_size() -> None:
    with pytest.raises(
        ValueError, match=f"cannot map {1 << 60:,} bytes of host memory .*: use a smaller capacity"
    ):
        Arena(1 << 60, 1 << 56)


def test_a_new_arena_allocates_a_batch_as_one_run() -> None:
    tier = HostTier(HostConfig(8 * MIB, slab_bytes=MIB))
    lease = tier.reserve(objects(range(64)))
    assert (np.diff(lease.offsets) == PAGE).all()


def test_another_page_size_evicts_whole_slabs() -> None:
    tier = HostTier(HostConfig(4 * MIB, slab_bytes=MIB))
    put(tier, range(64))
    get(tier, range(16))  # the first slab is used last
    big = Form("f32", "x", MIB, MIB)
    assert put(tier, [100], big).ok.all()
    assert tier.stats().evicted == 16
    assert tier.lookup(objects(range(16))).all()


def test_an_arena_allocates_every_page_once_and_frees_it() -> None:
    arena = Arena(4 * MIB, MIB)
    pages = [*arena.allocate(300_000, 5), *arena.allocate(300_000, 9)]
    assert len(set(pages)) == len(pages) == 12
    assert arena.allocate(300_000, 1) == arena.allocate(4096, 1) == []
    for offset in pages[3:6]:
        arena.free(300_000, offset)
    assert arena.allocate(4096, 1000) == list(range(MIB, 2 * MIB, 4096)), "an empty slab fits any page size"
    assert arena.allocate(4096, 1) == []
    assert arena.used_bytes() == 9 * 300_000 + 256 * 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HostConfig(PAGE, slab_bytes=MIB), "less than one slab"),
        (HostConfig(MIB, slab_bytes=1000), "multiple of 4096"),
    ],
)
def test_an_invalid_configuration_is_refused(config: HostConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostTier(config)


def test_an_unchecked_tier_needs_no_checksums_and_refuses_large_pages() -> None:
    tier = HostTier(HostConfig(MIB, slab_bytes=PAGE))
    with pytest.raises(ValueError, match=r"raise HostConfig\.slab_bytes"):
        tier.reserve(objects([1], Form("f", "x", 2 * PAGE, PAGE)))
    assert put(tier, range(3), FORM).ok.all()


def test_a_large_copy_uses_a_second_thread_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MIN_SHARED_BYTES", 1)
    monkeypatch.setattr(arena, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(arena, "_cores", lambda: 2)
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 64 * 4096, dtype=np.uint8)
    failed: list[int] = []

    def many(seed: int) -> None:
        mine = np.random.default_rng(seed)
        for _ in range(50):
            pages = int(mine.integers(1, 64))
            to, at = mine.permutation(64)[:pages] * 4096, mine.permutation(64)[:pages] * 4096
            to, at = (np.sort(to), np.sort(at)) if mine.integers(2) else (to, at)
            target, wanted = np.zeros_like(source), np.zeros_like(source)
            for one, other in zip(to.tolist(), at.tolist(), strict=True):
                wanted[one : one + 4096] = source[other : other + 4096]
            arena.copy_pages(target, to, source, at, 4096)
            if not np.array_equal(target, wanted):
                failed.append(seed)

    threads = [
        threading.Thread(target=many, args=(seed,)) for seed in range(3)
    ]  # one has the helper, the others none
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_MIN_SHARED_BYTES", 1)
    monkeypatch.setattr(arena, "_cores", lambda: 2)
    source = np.arange(1 << 16, dtype=np.uint8)

    def copied() -> bool:
        target = np.zeros_like(source)
        arena.copy_pages(target, np.array([0]), source, np.array([0]), len(source))
        return np.array_equal(target, source)

    assert copied()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if copied() else 1)
    assert os.waitpid(child, 0)[1] == 0
