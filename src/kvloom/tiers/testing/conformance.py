"""The tests that every tier must pass, for tiers inside and outside this package. Needs pytest.

    class TestMyTier(TierConformance):
        def make(self, folder: Path) -> Harness:
            return MyHarness(open_tier(f"mine:{folder}?capacity=4MiB"))

A Harness opens the tier and damages its stored bytes. The functions below write and read pages with known bytes.
For detailed assertion messages call `pytest.register_assert_rewrite("kvloom.tiers.testing.conformance")` in
conftest.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvloom.tiers import Form, Objects, Outcome, Ranges, Tier, Transfer
from kvloom.tiers.aligned_memory import aligned_bytes

from .fault_injection import Faults, FaultyTier

__all__ = [
    "FORM",
    "PAGE",
    "RUN",
    "Harness",
    "TierConformance",
    "block_hash",
    "check_bytes",
    "filled",
    "get",
    "memory",
    "objects",
    "open_files",
    "page",
    "put",
]

PAGE, RUN = 64 << 10, 8 << 10
FORM = Form("bf16", "LKTHD", PAGE, RUN, layout="test")


def block_hash(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def page(number: int, size: int = PAGE) -> npt.NDArray[np.uint8]:
    """Return the bytes of page number `number`. The first half can be compressed, and the second half is random."""
    noise = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    noise[: size // 2] = np.arange(size // 2) % 7 + number % 50
    return noise


def objects(numbers: range | list[int], form: Form = FORM, group: int = 0) -> Objects:
    return Objects([block_hash(n) for n in numbers], group, form)


def memory(pages: int, size: int = PAGE, shift: int = 0) -> Ranges:
    """Return ranges for `pages` pages. Their memory starts `shift` bytes after an aligned address."""
    whole = np.frombuffer(aligned_bytes(pages * size + shift), np.uint8)
    return Ranges(whole[shift:], np.arange(pages) * size)


def filled(numbers: range | list[int], size: int = PAGE, shift: int = 0) -> Ranges:
    ranges = memory(len(numbers), size, shift)
    for at, number in zip(ranges.starts.tolist(), numbers, strict=True):
        ranges.bytes[at : at + size] = page(number, size)
    return ranges


def put(tier: Tier, numbers: range | list[int], form: Form = FORM) -> Transfer:
    transfer = tier.write(objects(numbers, form), filled(numbers, form.page_bytes))
    assert transfer.wait(20)
    return transfer


def check_bytes(transfer: Transfer, numbers: range | list[int], got: Ranges, size: int = PAGE) -> int:
    """Assert that every object with outcome OK has the right bytes. Return the number of these objects."""
    for at, number, ok in zip(got.starts.tolist(), numbers, transfer.ok.tolist(), strict=True):
        if ok:
            assert np.array_equal(got.bytes[at : at + size], page(number, size)), f"wrong bytes for {number}"
    return int(transfer.ok.sum())


def get(tier: Tier, numbers: range | list[int], form: Form = FORM) -> Transfer:
    """Read pages. Asserts the bytes of every object with outcome OK."""
    got = memory(len(numbers), form.page_bytes)
    transfer = tier.read(objects(numbers, form), got)
    assert transfer.wait(20)
    check_bytes(transfer, numbers, got, form.page_bytes)
    return transfer


def open_files(word: str) -> int:
    """Return how many open files of this process have `word` in their path."""
    paths = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            paths.append(str(fd.readlink()))
    return sum(word in path for path in paths)


@dataclass
class Harness:
    """A tier under test. The tier must have a capacity of at least 4 MiB, and accept pages of up to 256 KiB. The
    methods of the harness damage the stored bytes."""

    tier: Any

    def flip(self, wanted: Objects) -> None:
        """Flip one bit of each of these objects in the tier's medium."""
        raise NotImplementedError

    def swap(self, first: Objects, second: Objects) -> None:
        """Exchange the stored bytes of two objects in the tier's medium."""
        raise NotImplementedError


class TierConformance:
    """The test suite. Subclass it as `Test…` and implement `make`."""

    def make(self, folder: Path) -> Harness:
        """Return a harness with an open, empty tier. `folder` is an empty directory."""
        raise NotImplementedError

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        harness = self.make(tmp_path)
        yield harness
        harness.tier.close()

    @pytest.fixture
    def tier(self, harness: Harness) -> Tier:
        tier: Tier = harness.tier
        return tier

    # --- write and read

    def test_written_pages_are_found_and_read(self, tier: Tier) -> None:
        assert not tier.lookup(objects(range(5))).any()
        assert put(tier, range(5)).ok.all()
        assert tier.lookup(objects(range(7))).tolist() == [True] * 5 + [False] * 2
        assert get(tier, range(5)).ok.all()

    def test_a_batch_reports_missing_objects(self, tier: Tier) -> None:
        put(tier, [1, 3])
        transfer = get(tier, [0, 1, 2, 3])
        assert transfer.results.tolist() == [Outcome.MISSING, Outcome.OK, Outcome.MISSING, Outcome.OK]
        assert transfer.failed
        assert transfer.done
        assert transfer.released

    def test_an_empty_batch_is_done_immediately(self, tier: Tier) -> None:
        nothing = Objects([], 0, FORM)
        for transfer in (tier.read(nothing, Ranges(bytearray(8), [])), tier.write(nothing, Ranges(b"", []))):
            assert transfer.poll()
            assert not transfer.failed
        assert tier.drop(nothing) == 0

    def test_pages_of_several_sizes_coexist(self, tier: Tier) -> None:
        sizes = [Form("f32", "x", size, size // 4) for size in (4096, 12288, 20000, 262144)]
        for form in sizes:
            assert put(tier, range(3), form).ok.all()
        for form in sizes:
            assert get(tier, range(3), form).ok.all()

    def test_unaligned_memory_is_supported(self, tier: Tier) -> None:
        numbers = range(4)
        assert tier.write(objects(numbers), filled(numbers, shift=13)).wait(20)
        got = memory(4, shift=5)
        transfer = tier.read(objects(numbers), got)
        assert transfer.wait(20)
        assert check_bytes(transfer, numbers, got) == 4

    def test_runs_load_in_the_requested_order(self, tier: Tier) -> None:
        put(tier, range(3))
        got = memory(3)
        for first in range(0, PAGE, 2 * RUN):
            transfer = tier.read(objects(range(3)), got, (first, first + 2 * RUN))
            assert transfer.wait(20)
            assert transfer.ok.all()
            for number in range(3):
                upto = got.bytes[number * PAGE : number * PAGE + first + 2 * RUN]
                assert np.array_equal(upto, page(number)[: first + 2 * RUN])
                assert not got.bytes[number * PAGE + first + 2 * RUN : (number + 1) * PAGE].any()

    def test_offsets_may_be_in_any_order(self, tier: Tier) -> None:
        put(tier, range(6))
        ranges = memory(6)
        got = Ranges(ranges.buffer, ranges.starts[::-1].copy())
        transfer = tier.read(objects(range(6)), got)
        assert transfer.wait(20)
        assert check_bytes(transfer, range(6), got) == 6

    def test_the_same_object_twice_in_a_batch(self, tier: Tier) -> None:
        assert put(tier, [4, 4]).ok.all()
        assert get(tier, [4, 4, 4]).ok.all()

    def test_writing_again_is_harmless(self, tier: Tier) -> None:
        put(tier, range(3))
        assert put(tier, range(4)).ok.all()
        assert get(tier, range(4)).ok.all()
        assert tier.stats().objects == 4

    def test_a_finished_write_does_not_use_the_callers_memory(self, tier: Tier) -> None:
        source = filled(range(3))
        assert tier.write(objects(range(3)), source).wait(20)
        source.bytes[:] = 0
        assert get(tier, range(3)).ok.all()

    # --- groups and forms

    @pytest.mark.parametrize(
        "other",
        [
            Form("f16", "LKTHD", PAGE, RUN, layout="test"),
            Form("bf16", "KLTHD", PAGE, RUN, layout="test"),
            Form("bf16", "LKTHD", PAGE, RUN, layout="other"),
            Form("bf16", "LKTHD", PAGE, RUN, shard="0/2", layout="test"),
            Form("bf16", "LKTHD", PAGE, RUN, layout="test", exact=False),
            Form("bf16", "LKTHD", PAGE, 2 * RUN, layout="test"),
        ],
    )
    def test_another_form_finds_nothing(self, tier: Tier, other: Form) -> None:
        put(tier, range(2))
        assert not tier.lookup(objects(range(2), other)).any()
        assert not get(tier, range(2), other).ok.any()

    def test_groups_are_separate(self, tier: Tier) -> None:
        put(tier, [1])
        assert not tier.lookup(objects([1], group=1)).any()

    # --- drop and evict

    def test_dropped_pages_are_misses(self, tier: Tier) -> None:
        put(tier, range(4))
        assert tier.drop(objects([1, 2, 9])) == 2
        assert tier.lookup(objects(range(4))).tolist() == [True, False, False, True]
        assert put(tier, [1]).ok.all()
        assert get(tier, [0, 1, 3]).ok.all()

    def test_writes_above_capacity_evict_old_pages_and_never_corrupt(self, tier: Tier) -> None:
        pages = 3 * tier.capacity // PAGE
        for first in range(0, pages, 16):
            assert put(tier, range(first, first + 16)).ok.all()
        stats = tier.stats()
        assert stats.bytes <= tier.capacity
        assert stats.evicted > 0
        assert get(tier, range(pages - 16, pages)).ok.all()
        for first in range(0, pages, 16):
            get(tier, range(first, first + 16))

    def test_capacity_holds_for_mixed_page_sizes(self, tier: Tier) -> None:
        forms = [Form("f32", "x", size, size) for size in (8192, 65536, 200704)]
        for step in range(60):
            form = forms[step * step % 3]
            numbers = range(step * 10, step * 10 + 10)
            assert put(tier, numbers, form).ok.all()
            assert get(tier, numbers, form).ok.all()
            assert tier.stats().bytes <= tier.capacity

    # --- invalid input

    def test_invalid_batches_are_refused(self, tier: Tier) -> None:
        with pytest.raises(ValueError, match="3 ranges for 2 objects"):
            tier.write(objects(range(2)), filled(range(3)))
        with pytest.raises(ValueError, match="do not fit"):
            tier.read(objects(range(2)), Ranges(bytearray(PAGE), [0, 1]))
        with pytest.raises(ValueError, match="do not fit"):
            tier.read(objects([1]), Ranges(bytearray(PAGE), [-1]))
        with pytest.raises(ValueError, match="read-only"):
            tier.read(objects([1]), Ranges(bytes(PAGE), [0]))
        with pytest.raises(ValueError, match="whole runs"):
            tier.read(objects([1]), memory(1), (0, RUN + 1))
        with pytest.raises(ValueError, match="does not fit"):
            tier.write(
                objects([1], Form("f", "x", 1 << 30, 1 << 30)), Ranges(np.empty(1 << 30, np.uint8), [0])
            )
        assert tier.stats().objects == 0

    # --- damage and faults of the medium

    def test_flipped_bits_are_a_counted_miss(self, harness: Harness) -> None:
        tier = harness.tier
        put(tier, range(4))
        harness.flip(objects([1, 2]))
        transfer = get(tier, range(4))
        assert transfer.results.tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]
        assert tier.stats().reads["corrupt"] == 2
        assert not tier.lookup(objects([1, 2])).any(), "a damaged page is not found again"
        assert put(tier, [1, 2]).ok.all()
        assert get(tier, range(4)).ok.all()

    def test_another_pages_bytes_are_a_miss(self, harness: Harness) -> None:
        put(harness.tier, range(3))
        harness.swap(objects([0]), objects([1]))
        assert get(harness.tier, range(3)).results.tolist() == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]

    def test_faults_cause_misses_and_never_wrong_bytes(self, harness: Harness) -> None:
        faults = Faults()
        faulty = FaultyTier(harness.tier, faults)
        for step in range(40):
            numbers = range(step, step + 6)
            faults.failing, faults.full = step % 5 == 1, step % 5 == 2
            faults.slow = 0.002 if step % 5 == 3 else 0
            faults.tamper = harness.flip if step % 5 == 4 else None
            put(faulty, numbers)
            get(faulty, numbers)
        faults.failing = faults.full = False
        faults.tamper, faults.slow = None, 0
        assert put(faulty, range(6)).ok.all(), "the tier recovers by itself"
        assert get(faulty, range(6)).ok.all()
        counted = faulty.stats().reads
        assert {"ok", "failed", "corrupt"} <= set(counted)
        faulty.close()

    def test_a_hung_medium_costs_a_bounded_wait_and_its_pages_stay_in_use(self, harness: Harness) -> None:
        put(harness.tier, range(2))
        faults = Faults(hung=True)
        faulty = FaultyTier(harness.tier, faults)
        began = time.monotonic()
        got = memory(2)
        transfer = faulty.read(objects(range(2)), got)
        assert not transfer.wait(0.05)
        deadline = time.monotonic() + 5
        while faults.hung_calls == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not transfer.cancel(), "the medium still uses the memory"
        assert time.monotonic() - began < 5
        assert transfer.done
        assert (transfer.results == Outcome.LATE).all()
        assert not transfer.released
        faults.release()
        assert transfer.wait_released(5)
        assert (transfer.results == Outcome.LATE).all(), "an outcome never changes"
        assert get(faulty, range(2)).ok.all()
        faulty.close()

    def test_many_threads_use_the_tier_concurrently(self, tier: Tier) -> None:
        wrong: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(15):
                    numbers = random.integers(0, 120, 8).tolist()
                    verb = random.integers(0, 4)
                    if verb == 0:
                        tier.drop(objects(numbers))
                    elif verb == 1:
                        get(tier, numbers)
                    else:
                        put(tier, numbers)
                        get(tier, numbers)
            except BaseException as error:  # noqa: BLE001  raised in the main thread
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert tier.stats().bytes <= tier.capacity

    # --- close

    def test_after_close_every_method_misses(self, tier: Tier) -> None:
        put(tier, range(2))
        tier.close()
        tier.close()
        assert not tier.lookup(objects(range(2))).any()
        assert (get(tier, range(2)).results == Outcome.FAILED).all()
        transfer = put(tier, range(2))
        assert (transfer.results == Outcome.FAILED).all()
        assert "closed" in transfer.reason
        assert tier.drop(objects(range(2))) == 0
