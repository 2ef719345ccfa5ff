"""The disk tier: the conformance suite with and without compression and O_DIRECT, restarts, eviction, bad disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.tiers import DiskConfig, DiskTier, Form, Objects, Outcome, TierError
from kvloom.tiers.disk import Files
from kvloom.tiers.disk.segment import Record
from kvloom.tiers.testing import Faults, FaultyFiles
from kvloom.tiers.testing.conformance import (
    FORM,
    PAGE,
    Harness,
    TierConformance,
    check_bytes,
    filled,
    get,
    memory,
    objects,
    open_files,
    put,
)

MIB = 1 << 20


def opened(folder: Path, **changes: object) -> DiskTier:
    settings: dict[str, object] = {"capacity": 8 * MIB, "segment_bytes": MIB, "durable": "process", **changes}
    return DiskTier(DiskConfig(folder, **settings))  # type: ignore[arg-type]


def broken(folder: Path, faults: Faults, **changes: object) -> DiskTier:
    settings: dict[str, object] = {"capacity": 8 * MIB, "segment_bytes": MIB, **changes}
    config = DiskConfig(folder, **settings)  # type: ignore[arg-type]
    return DiskTier(config, lambda directory: FaultyFiles(directory, faults))


def records(tier: DiskTier, wanted: Objects) -> list[Record]:
    stored = tier._with_stored_keys(wanted).keys
    return [tier._store.index[key] for key in stored if key in tier._store.index]


class DiskHarness(Harness):
    def bodies(self, wanted: Objects) -> list[tuple[Path, int, bytes]]:
        found = []
        for record in records(self.tier, wanted):
            path = Path(self.tier._path) / record.segment.file_name(record.segment.number)
            with path.open("rb") as file:
                file.seek(record.offset)
                found.append((path, record.offset, file.read(record.head.body_bytes)))
        return found

    @staticmethod
    def overwrite(path: Path, offset: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def flip(self, wanted: Objects) -> None:
        for path, offset, body in self.bodies(wanted):
            at = len(body) * 2 // 3
            self.overwrite(path, offset, body[:at] + bytes([body[at] ^ 32]) + body[at + 1 :])

    def swap(self, first: Objects, second: Objects) -> None:
        ((a, at, one),) = self.bodies(first)
        ((b, bt, two),) = self.bodies(second)
        size = min(len(one), len(two))
        self.overwrite(a, at, two[:size])
        self.overwrite(b, bt, one[:size])


class TestDirect(TierConformance):
    def make(self, folder: Path) -> Harness:
        return DiskHarness(opened(folder))


class TestBufferedAndDurable(TierConformance):
    def make(self, folder: Path) -> Harness:
        return DiskHarness(opened(folder, direct=False, durable="power"))


class TestLz4(TierConformance):
    def make(self, folder: Path) -> Harness:
        pytest.importorskip("lz4", reason="pip install lz4")
        return DiskHarness(opened(folder, compression="lz4"))


class TestZstd(TierConformance):
    def make(self, folder: Path) -> Harness:
        pytest.importorskip("zstandard", reason="pip install zstandard")
        return DiskHarness(opened(folder, compression="zstd"))


# --- restarts


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_restart_finds_pages_of_every_configuration(tmp_path: Path, compression: str) -> None:
    tier = opened(tmp_path, compression=compression)
    put(tier, range(40))
    tier.close()
    tier = opened(tmp_path, compression="none")
    assert tier.stats().objects == 40
    assert get(tier, range(40)).ok.all()
    put(tier, range(40, 50))
    tier.close()
    tier = opened(tmp_path)
    assert get(tier, range(50)).ok.all()
    tier.close()


def test_many_restarts_do_not_leave_many_files(tmp_path: Path) -> None:
    for number in range(8):
        tier = opened(tmp_path)
        put(tier, [number])
        tier.close()
    assert len(list(tmp_path.glob("*.seg"))) == 1
    tier = opened(tmp_path)
    assert get(tier, range(8)).ok.all()
    tier.close()


def test_a_dropped_page_stays_dropped_after_a_restart_and_can_be_written_again(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, range(6))
    tier.drop(objects([1, 2]))
    put(tier, [2])
    tier.close()
    for _ in range(2):
        tier = opened(tmp_path)
        assert tier.lookup(objects(range(6))).tolist() == [True, False, True, True, True, True]
        assert get(tier, [0, 2, 3]).ok.all()
        tier.close()


def test_a_page_written_again_after_two_drops_survives_restarts(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, [*range(1, 12), 0])
    tier.drop(objects([0]))
    put(tier, [*range(20, 34), 0])  # its second copy is far behind in the next segment …
    tier.drop(objects([0, *range(20, 34)]))  # … which is then empty and evicted
    tier.close()
    opened(tmp_path).close()
    tier = opened(tmp_path)
    assert put(tier, [0]).ok.all()
    tier.close()
    tier = opened(tmp_path)
    assert get(tier, [0]).ok.all()
    tier.close()


def test_a_page_dropped_while_it_is_copied_forward_stays_dropped(tmp_path: Path) -> None:
    carrying, go_on = threading.Event(), threading.Event()

    class Waiting(Files):
        def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
            if threading.current_thread().name == "kvloom-disk-append":
                carrying.set()
                go_on.wait(10)
            return super().read(fd, into, offset)

    tier = DiskTier(DiskConfig(tmp_path, 4 * MIB, MIB, durable="process", evict="oldest"), Waiting)
    put(tier, [0, 1])
    assert get(tier, [0, 1]).ok.all()
    numbers = range(2, 60)
    source = filled(numbers)
    writes = tier.write(objects(numbers), source)
    assert carrying.wait(10)
    assert tier.drop(objects([0])) == 1
    go_on.set()
    assert writes.wait(10)
    assert tier.lookup(objects([0, 1])).tolist() == [False, True]
    tier.close()
    tier = opened(tmp_path, capacity=4 * MIB)
    assert tier.lookup(objects([0, 1])).tolist() == [False, True]
    tier.close()


class Dying(Files):
    """A process that is killed inside a call of its appending thread."""

    def __init__(self, directory: int, fatal: threading.Event) -> None:
        super().__init__(directory)
        self.fatal, self.dead = fatal, False

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        self.last_words()
        if self.fatal.is_set():
            self.dead = True
            super().write(fd, [pieces[0], memoryview(pieces[1])[:4096]], offset)
        self.last_words()
        super().write(fd, pieces, offset)

    def truncate(self, fd: int, size: int) -> None:
        self.last_words()
        super().truncate(fd, size)

    def remove(self, name: str) -> None:
        self.last_words()
        super().remove(name)

    def last_words(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "dead")


def test_an_unfinished_copy_does_not_hide_an_acknowledged_one(tmp_path: Path) -> None:
    fatal = threading.Event()

    class Carrying(Dying):
        def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
            if threading.current_thread().name == "kvloom-disk-append":
                self.fatal.set()
            return super().read(fd, into, offset)

    config = DiskConfig(tmp_path, 4 * MIB, MIB, durable="process", evict="oldest")
    tier = DiskTier(config, lambda directory: Carrying(directory, fatal))
    put(tier, [0])
    assert get(tier, [0]).ok.all()
    put(tier, range(1, 60))
    assert fatal.is_set()
    tier.close()
    tier = opened(tmp_path, capacity=8 * MIB)
    assert get(tier, [0]).ok.all()
    tier.close()


def test_an_unfinished_page_is_written_again(tmp_path: Path) -> None:
    fatal = threading.Event()
    config = DiskConfig(tmp_path, 4 * MIB, MIB)
    tier = DiskTier(config, lambda directory: Dying(directory, fatal))
    put(tier, [0])
    fatal.set()
    assert put(tier, [1]).failed
    tier.close()
    tier = opened(tmp_path)
    assert tier.lookup(objects([0, 1])).all()  # according to its head
    assert put(tier, [0, 1]).ok.all()
    assert get(tier, [0, 1]).ok.all()
    tier.close()


def test_small_pages_fit_small_segments(tmp_path: Path) -> None:
    form = Form("bf16", "LKTHD", 512, 512)
    tier = opened(tmp_path, capacity=2 * MIB, segment_bytes=128 << 10)
    assert put(tier, range(200), form).ok.all()
    assert get(tier, range(200), form).ok.all()
    tier.close()


def test_compression_saves_space(tmp_path: Path) -> None:
    for compression in ("none", "lz4"):
        tier = opened(tmp_path / compression, compression=compression)
        put(tier, range(15))
        tier.close()
    size = {c: sum(f.stat().st_size for f in (tmp_path / c).glob("*.seg")) for c in ("none", "lz4")}
    assert size["lz4"] < 0.75 * size["none"]


def test_segments_of_other_versions_are_not_read_and_evicted_first(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, range(10))
    tier.close()
    (old,) = tmp_path.glob("*.seg")
    DiskHarness.overwrite(old, 6, b"\x63\x00")
    tier = opened(tmp_path)
    assert not tier.lookup(objects(range(10))).any()
    assert "another version" in tier.stats().notes[0]
    put(tier, range(20, 40))
    assert old.exists()
    for first in range(100, 260, 16):
        put(tier, range(first, first + 16))
    assert not old.exists()
    tier.close()


def test_a_damaged_frame_header_loses_only_its_frame(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for number in range(5):
        put(tier, [number])
    place = records(tier, objects([2]))[0]
    tier.close()
    (path,) = tmp_path.glob("*.seg")
    DiskHarness.overwrite(path, place.offset - 4096 + 60, b"\xff\xff")
    tier = opened(tmp_path)
    assert get(tier, range(5)).ok.tolist() == [True, True, False, True, True]
    tier.close()


def test_an_unreadable_segment_is_served_once_it_is_readable(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, range(60))
    tier.drop(objects([20]))
    tier.close()
    bad = (tmp_path / f"{1:012d}.seg").stat().st_ino

    class Failing(Files):
        def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
            if offset and os.fstat(fd).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, into, offset)

    tier = DiskTier(DiskConfig(tmp_path, 8 * MIB, MIB), Failing)
    assert 0 < tier.stats().objects < 59
    assert tier.stats().notes
    tier.close()
    tier = opened(tmp_path)
    found = tier.lookup(objects(range(60)))
    assert found.sum() == 59
    assert not found[20]
    tier.close()


def test_a_failed_opening_closes_all_files(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, range(60))
    tier.drop(objects(range(15)))  # a segment to be evicted
    tier.close()

    class Failing(Files):
        def remove(self, name: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(TierError, match="cannot read"):
        DiskTier(DiskConfig(tmp_path, 8 * MIB, MIB), Failing)
    assert not open_files(str(tmp_path))
    tier = opened(tmp_path)
    assert get(tier, range(15, 60)).ok.all()
    tier.close()


def test_a_truncated_file_serves_its_remaining_pages(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, range(10))
    place = records(tier, objects([6]))[0].offset
    tier.close()
    (path,) = tmp_path.glob("*.seg")
    os.truncate(path, place + 5000)
    tier = opened(tmp_path)
    transfer = get(tier, range(10))
    assert transfer.ok.tolist() == [True] * 6 + [False] * 4
    assert not tier.lookup(objects([6, 9])).any()
    tier.close()


def test_garbage_in_the_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "000000000003.seg").write_bytes(os.urandom(20_000))
    (tmp_path / "000000000004.seg").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "dropped").write_bytes(os.urandom(333))
    tier = opened(tmp_path)
    assert put(tier, range(3)).ok.all()
    assert get(tier, range(3)).ok.all()
    tier.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [b"of another program", bytes(6) + os.urandom(20_000)])
def test_a_file_that_is_no_segment_is_not_removed(tmp_path: Path, content: bytes) -> None:
    """Its name alone does not make it ours."""
    theirs, unfinished = tmp_path / "000000000000.seg", tmp_path / "000000000001.seg"
    theirs.write_bytes(content)
    unfinished.write_bytes(bytes(20_000))  # a crash before its header was written
    tier = opened(tmp_path)
    assert not unfinished.exists()
    assert any("is not a segment of a disk tier" in note for note in tier.stats().notes)
    for first in range(0, 300, 50):  # more than fits: segments are evicted
        put(tier, range(first, first + 50))
    tier.close()
    assert theirs.read_bytes() == content


def test_a_bad_sector_does_not_prevent_opening(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for first in range(0, 45, 15):
        put(tier, range(first, first + 15))
    tier.close()

    class BadSpot(Files):
        def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
            if offset > 300_000 and Path(f"/proc/self/fd/{fd}").readlink().name == "000000000001.seg":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(fd, into, offset)

    tier = DiskTier(DiskConfig(tmp_path, 8 * MIB, MIB), BadSpot)
    assert "in part only: Input/output error" in tier.stats().notes[0]
    transfer = get(tier, range(45))
    assert 20 <= transfer.ok.sum() < 45
    assert set(transfer.results.tolist()) <= {Outcome.OK, Outcome.MISSING, Outcome.FAILED}
    assert put(tier, range(100, 110)).ok.all()
    tier.close()
    tier = opened(tmp_path)
    assert get(tier, range(45)).ok.all(), "no file was truncated"
    tier.close()


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("direct", [True, False])
def test_a_large_page_is_ok_only_when_it_is_read_completely(tmp_path: Path, shift: int, direct: bool) -> None:
    class Slower(Files):
        """Each read takes longer than the one before."""

        reads, counting = 0, threading.Lock()

        def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
            with self.counting:
                self.reads += 1
                seconds = 0.05 * self.reads
            time.sleep(seconds)
            return super().read(fd, into, offset)

    form = Form("f32", "x", 2 * MIB, 64 << 10)
    config = DiskConfig(tmp_path, 64 * MIB, 8 * MIB, durable="process", direct=direct)
    tier = DiskTier(config, Slower)
    assert put(tier, [1], form).ok.all()
    got = memory(1, form.page_bytes, shift)
    transfer = tier.read(objects([1], form), got)
    assert transfer.wait(20)
    assert check_bytes(transfer, [1], got, form.page_bytes) == 1
    tier.close()


# --- eviction


def test_a_batch_larger_than_the_tier_serves_its_stored_pages(tmp_path: Path) -> None:
    tier = opened(tmp_path, durable="power")
    numbers = range(300)  # 19 MiB through 8
    transfer = put(tier, numbers)
    assert transfer.ok.all()
    here = tier.lookup(objects(numbers))
    assert 60 < here.sum() < 128
    assert here[-40:].all()
    assert get(tier, numbers).ok.tolist() == here.tolist()
    assert tier.stats().bytes <= tier.capacity
    tier.close()


def test_read_pages_are_copied_forward_and_others_evicted(tmp_path: Path) -> None:
    tier = opened(tmp_path, evict="oldest")
    put(tier, range(14))
    for first in range(100, 300, 10):
        get(tier, [3, 4])
        put(tier, range(first, first + 10))
    assert get(tier, [3, 4]).ok.all()
    assert not tier.lookup(objects([0, 1, 2, 5])).any()
    tier.close()
    tier = opened(tmp_path)
    assert get(tier, [3, 4]).ok.all()
    tier.close()


def test_without_copy_forward_the_oldest_pages_are_evicted(tmp_path: Path) -> None:
    tier = opened(tmp_path, evict="oldest", copy_forward=False)
    put(tier, range(14))
    for first in range(100, 300, 10):
        get(tier, [3, 4])
        put(tier, range(first, first + 10))
    assert not tier.lookup(objects(range(14))).any()
    tier.close()


def test_the_least_recently_used_segment_is_evicted_first(tmp_path: Path) -> None:
    tier = opened(tmp_path, evict="least-used", copy_forward=False)
    put(tier, range(14))
    for first in range(100, 300, 10):
        get(tier, [3])
        put(tier, range(first, first + 10))
    assert tier.lookup(objects(range(14))).all()
    tier.close()


def test_a_smaller_capacity_applies_at_the_next_opening(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for first in range(0, 96, 12):
        put(tier, range(first, first + 12))
    tier.close()
    tier = opened(tmp_path, capacity=3 * MIB)
    assert tier.stats().bytes <= 3 * MIB
    assert tier.stats().objects > 0
    tier.close()


def test_a_page_being_read_survives_eviction_of_its_segment(tmp_path: Path) -> None:
    faults = Faults(calls=frozenset({"read"}))
    tier = broken(tmp_path, faults, copy_forward=False, evict="oldest")
    put(tier, range(4))
    faults.hung = True
    got = memory(4)
    transfer = tier.read(objects(range(4)), got)
    for first in range(100, 260, 10):
        put(tier, range(first, first + 10))
    assert not tier.lookup(objects(range(4))).any()
    faults.release()
    assert transfer.wait(10)
    assert check_bytes(transfer, range(4), got) == 4
    tier.close()


# --- faulty disks


def test_a_full_disk_is_reported_and_stored_pages_stay_readable(tmp_path: Path) -> None:
    faults = Faults()
    tier = broken(tmp_path, faults)
    put(tier, range(12))
    faults.full = True
    transfer = put(tier, range(20, 40))
    assert (transfer.results == Outcome.FULL).all()
    assert "disk is full" in transfer.reason
    assert get(tier, range(12)).ok.sum() in (0, 12), "it may have evicted its own pages for space"
    faults.full = False
    assert put(tier, range(20, 40)).ok.all()
    assert get(tier, range(20, 40)).ok.all()
    tier.close()


def test_a_really_full_file_system(tmp_path: Path) -> None:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"needs a right to mount: {made.stderr.strip()}")
    try:
        tier = opened(tmp_path, capacity=64 * MIB, durable="power")
        outcomes = [put(tier, range(at, at + 8)) for at in range(0, 160, 8)]
        assert all(t.ok.all() or (t.results == Outcome.FULL).any() for t in outcomes)
        assert tier.stats().objects > 0
        for at in range(0, 160, 8):
            get(tier, range(at, at + 8))
        tier.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("call", ["read", "write", "sync", "open", "allocate"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENODEV, errno.EROFS])
def test_a_lost_disk_is_an_outcome_and_the_tier_recovers(tmp_path: Path, call: str, error: int) -> None:
    faults = Faults(calls=frozenset({call}), error=error)
    tier = broken(tmp_path, faults)
    put(tier, range(8))
    faults.failing = True
    for at in range(100, 140, 10):
        written = put(tier, range(at, at + 10))
        read = get(tier, range(8))
    failed = read if call == "read" else written
    assert (failed.results == Outcome.FAILED).any()
    assert os.strerror(error) in failed.reason
    faults.failing = False
    assert put(tier, range(200, 210)).ok.all()
    assert get(tier, range(200, 210)).ok.all()
    tier.close()
    tier = opened(tmp_path)
    assert get(tier, range(200, 210)).ok.all()
    tier.close()


@pytest.mark.parametrize("fault", ["flip", "short"])
def test_a_disk_with_silent_errors_causes_misses(tmp_path: Path, fault: str) -> None:
    faults = Faults()
    tier = broken(tmp_path, faults)
    put(tier, range(8))
    setattr(faults, fault, True)
    transfer = get(tier, range(8))
    assert not transfer.ok.all()
    setattr(faults, fault, False)
    put(tier, range(8))
    assert get(tier, range(8)).ok.all()
    tier.close()


def test_a_hung_disk_costs_bounded_waits_bounded_memory_and_a_bounded_close(tmp_path: Path) -> None:
    faults = Faults(calls=frozenset({"read", "write"}))
    tier = broken(tmp_path, faults, pending_bytes=4 * PAGE, close_seconds=0.2)
    put(tier, range(2))
    faults.hung = True
    before = threading.active_count()
    began = time.monotonic()
    reads = [tier.read(objects(range(2)), memory(2)) for _ in range(20)]
    writes = [tier.write(objects([n]), filled([n])) for n in range(50, 70)]
    assert not reads[0].wait(0.02)
    assert not writes[0].wait(0.02)
    assert sum((t.results == Outcome.BUSY).all() for t in reads) >= 17
    assert sum((t.results == Outcome.BUSY).all() for t in writes) >= 15
    assert threading.active_count() == before
    for transfer in reads + writes:
        transfer.cancel()
        assert transfer.done
    tier.close()
    assert time.monotonic() - began < 5
    with pytest.raises(TierError, match="in use"):
        opened(tmp_path)  # the hung calls may still write there
    faults.release()
    assert all(transfer.wait_released(5) for transfer in reads + writes)


def test_a_write_not_started_before_close_is_never_written(tmp_path: Path) -> None:
    faults = Faults(calls=frozenset({"write"}))
    tier = broken(tmp_path / "kv", faults, close_seconds=0.2)
    put(tier, [0])
    faults.hung = True
    sources = [filled([number]) for number in range(1, 12)]
    writes = [tier.write(objects([number]), source) for number, source in enumerate(sources, 1)]
    tier.close()
    quiet = [number for number, write in enumerate(writes, 1) if write.released]
    assert quiet
    assert all(write.failed for write in writes)
    for number in quiet:
        sources[number - 1].bytes[:] = 7  # it is the caller's again
    faults.release()
    assert all(write.wait_released(5) for write in writes)
    assert tier._writer.close(5)
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")  # the hung process keeps the lock
    again = opened(tmp_path / "copy")
    assert get(again, [0]).ok.all()
    assert not again.lookup(objects(quiet)).any()
    again.close()


def test_cancelled_reads_that_were_not_started_access_no_memory(tmp_path: Path) -> None:
    faults = Faults(calls=frozenset({"read"}))
    tier = broken(tmp_path, faults, readers=1)
    put(tier, range(2))
    faults.hung = True
    first, second = memory(1), memory(1)
    one, two = tier.read(objects([0]), first), tier.read(objects([1]), second)
    deadline = time.monotonic() + 5
    while one._accesses == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert two.cancel(), "quiet at once"
    second.bytes[:] = 7
    faults.release()
    assert one.wait(5)
    tier.close()
    assert (second.bytes == 7).all()
    assert check_bytes(one, [0], first) == 1


# --- directories


def test_one_process_per_directory(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
        opened(tmp_path)
    code = (
        "import sys; from kvloom.tiers import *\n"
        "try: DiskTier(DiskConfig(sys.argv[1], 8 << 20, 1 << 20))\n"
        "except TierError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert f"in use by process {os.getpid()}" in told.stdout
    tier.close()
    opened(tmp_path).close()


def test_an_unusable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"cannot use .*file"):
        opened(tmp_path / "file")
    with pytest.raises(TierError, match=r"cannot use .*Use a directory"):
        opened(tmp_path / "file" / "below")


def test_a_directory_without_permission_is_reported(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        code = (
            "import os, sys; from kvloom.tiers import *; os.setgid(65534); os.setuid(65534)\n"
            "try: DiskTier(DiskConfig(sys.argv[1], 8 << 20, 1 << 20))\n"
            "except TierError as error: print(error)"
        )
        tmp_path.chmod(0o755)
        run = [sys.executable, "-c", code, str(tmp_path)]
        told = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(TierError) as caught:
            opened(tmp_path)
        told = str(caught.value)
    assert "Permission denied" in told
    assert "Use a directory that this user may write to" in told


def test_a_read_only_disk_is_reported_at_opening(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="Read-only file system"):
        broken(tmp_path, Faults(failing=True, error=errno.EROFS))
    opened(tmp_path).close()  # and the lock was released


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": MIB, "segment_bytes": MIB}, "three segments"),
        ({"durable": "maybe"}, "durable='maybe'"),
        ({"evict": "random"}, "evict='random'"),
        ({"readers": 0}, "readers=0"),
        ({"compression": "gzip"}, "compression='gzip'"),
    ],
)
def test_an_invalid_configuration_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **changes)


def test_big_batches_and_big_pages(tmp_path: Path) -> None:
    form = Form("bf16", "x", 2 * MIB, MIB // 16)
    tier = opened(tmp_path, capacity=256 * MIB, segment_bytes=64 * MIB)
    assert put(tier, range(20), form).ok.all()
    assert get(tier, range(20), form).ok.all()
    small = Form("bf16", "x", 4096, 4096)
    assert put(tier, range(3000), small).ok.all()
    got = memory(3000, 4096)
    assert tier.read(objects(range(3000), small), got).wait(20)
    assert np.array_equal(got.bytes, filled(range(3000), 4096).bytes)
    assert FORM.fingerprint != small.fingerprint
    tier.close()


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("where", [0, 300 << 10, MIB - 1])
def test_a_page_of_several_reads_is_bad_if_one_read_is(tmp_path: Path, pages: int, where: int) -> None:
    form = Form("bf16", "LKTHD", MIB, 64 << 10)
    tier = opened(tmp_path, capacity=64 * MIB, segment_bytes=8 * MIB)
    try:
        put(tier, range(pages), form)
        assert get(tier, range(pages), form).ok.all()
        ((path, offset, body),) = DiskHarness(tier).bodies(objects([0], form))
        DiskHarness.overwrite(path, offset + where, bytes([body[where] ^ 1]))
        transfer = get(tier, range(pages), form)
        assert transfer.results.tolist() == [Outcome.CORRUPT] + [Outcome.OK] * (pages - 1)
        (segment,) = tier._store._segments.values()
        deadline = time.monotonic() + 10  # the threads release segments after settling
        while (tier._reader.pending or segment.readers) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (tier._reader.pending, segment.readers) == (0, 0)  # its file is closed
    finally:
        tier.close()


def test_a_file_system_smaller_than_the_capacity_is_reported_at_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskTier(DiskConfig(tmp_path / "fits", 8 * MIB)).close()
    assert not caplog.records
    DiskTier(DiskConfig(tmp_path / "large", 1 << 49)).close()
    assert "has a capacity of 512 TiB, but its file system has space for" in caplog.text
