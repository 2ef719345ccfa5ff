"""A crash at every file operation of a disk tier, and inside every write. No acknowledged page is lost, no wrong page
is returned, and pages can be written again."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvloom.tiers import DiskConfig, DiskTier, Form, Share
from kvloom.tiers.disk import Files
from kvloom.tiers.testing.conformance import filled, get, objects

from .crash_images import POWER_CUTS, Crash, Log, Recording, Unsynced, crashes

FORM = Form("bf16", "LKTHD", 4096, 1024, layout="crash")
SEGMENT, CAPACITY = 64 << 10, 448 << 10  # seven segments of at most twelve pages
PAGES = range(110)
OWN = range(90, 110)  # pages of a tenant with a share, which has its own segments
SHARES = {"acme": Share(limit=0.43)}
NEW = [80, 81, 109]  # pages that the script does not write


def opened(
    folder: Path,
    files: Callable[[int], Files] = Unsynced,
    durable: str = "power",
    capacity: int = CAPACITY,
) -> DiskTier:
    config = DiskConfig(
        folder,
        capacity,
        SEGMENT,
        durable=durable,  # type: ignore[arg-type]
        evict="oldest",
        direct=False,
        readers=1,
    )
    tier = DiskTier(config, files)
    tier.set_shares(SHARES)
    return tier


def store(tier: DiskTier, pages: Sequence[int]) -> None:
    """Write pages for their tenants. All must be acknowledged."""
    for tenant, some in (("", [n for n in pages if n not in OWN]), ("acme", [n for n in pages if n in OWN])):
        if some:
            wanted = replace(objects(some, FORM), tenant=tenant)
            transfer = tier.write(wanted, filled(some, FORM.page_bytes))
            assert transfer.wait(20)
            assert transfer.ok.all(), transfer


class Script:
    """A run of a disk tier: frames of several sizes, rotation, eviction with copies, drops, writes after drops, closing
    and opening."""

    def __init__(self, folder: Path, durable: str) -> None:
        self.log, self._folder, self._durable = Log(), folder, durable
        self.step(self.open)
        self.step(lambda: self.write([0]))
        self.step(lambda: self.write(range(1, 5)))
        self.step(lambda: self.write(range(5, 18)))
        self.step(lambda: self.write(range(90, 95)))
        self.step(lambda: get(self.tier, [0, 2, 9, 91], FORM))
        self.step(lambda: self.drop([3]))
        for first in range(
            18, 58, 8
        ):  # beyond the capacity: segments are evicted, and pages that were read are copied
            self.step(lambda first=first: self.write(range(first, first + 8)))
        self.step(lambda: self.write(range(95, 104)))
        self.step(lambda: self.drop([50, 51, 92]))
        self.step(lambda: self.write([51, 3]))
        self.step(self.reopen)
        self.step(lambda: self.write(range(58, 63)))
        self.step(lambda: self.drop(range(40, 63)))
        self.step(self.reopen)
        self.step(self.reopen)  # the list of dropped pages is rewritten
        self.step(lambda: self.write([*range(60, 70), 104, 92]))
        self.step(self.close)

    def step(self, action: Callable[[], object]) -> None:
        self.log.steps.append(len(self.log.operations))
        action()
        if not self.tier.closed:
            here = self.tier.lookup(objects(PAGES, FORM))
            self.log.present.append(frozenset(page for page in PAGES if here[page]))
        else:
            self.log.present.append(self.log.present[-1])

    def open(self) -> None:
        self.tier = opened(self._folder, lambda directory: Recording(directory, self.log), self._durable)

    def close(self) -> None:
        self.tier.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def write(self, pages: Sequence[int]) -> None:
        store(self.tier, pages)
        done = len(self.log.operations)
        self.log.acknowledged += [(done, page) for page in pages]

    def drop(self, pages: range | list[int]) -> None:
        self.tier.drop(objects(pages, FORM))
        self.write([70 + len(self.log.steps) % 10])  # queued after the drop, which is then on disk


@cache
def recorded(durable: str) -> Log:
    with TemporaryDirectory() as folder:
        return Script(Path(folder), durable).log


def check_required(folder: Path, required: frozenset[int], where: str) -> None:
    """Open a copy of a directory, and read all pages. Each page that is found must have its bytes. The capacity is
    large enough for all files, because an opening at full capacity may evict a segment."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    tier = opened(copy, capacity=3 * CAPACITY)
    result = get(tier, PAGES, FORM).ok
    tier.close()
    shutil.rmtree(copy)
    lost = sorted(page for page in required if not result[page])
    assert not lost, f"{where}: acknowledged pages {lost} are lost"


def check_crash(crash: Crash, folder: Path, close_first: bool) -> None:
    """Check the acknowledged pages of a crash. Then writes pages and kills the process again: acknowledged pages
    must survive this, too. With `close_first`, a tier is opened and closed before: it repairs the directory, and the
    next tier must not take a damaged page for a complete one."""
    crash.write_to(folder)
    if close_first:
        opened(folder, capacity=3 * CAPACITY).close()
    check_required(folder, crash.required, crash.where)
    tier = opened(folder)
    torn = [n for n in PAGES if n not in crash.required and n not in NEW]
    pages = [*[n for n in torn if n not in OWN][:10], *[n for n in torn if n in OWN][:4], *NEW]
    store(tier, pages)
    here = tier.lookup(objects(pages, FORM))
    acknowledged = frozenset(page for at, page in enumerate(pages) if here[at])
    assert acknowledged.issuperset(NEW), crash.where
    check_required(folder, acknowledged, f"{crash.where}, after new writes")
    assert tier.stats().bytes <= CAPACITY
    tier.close()
    check_required(folder, acknowledged, f"{crash.where}, after new writes and a restart")
    shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one, because thousands of images are written."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as found:
        yield Path(found)


def check_every(durable: str, folder: Path, every: int) -> None:
    """Check one of `every` crashes, with and without a restart before new writes. If every crash is checked, each is
    checked in one of both ways: neighbouring crashes leave nearly the same files."""
    found = list(crashes(recorded(durable), power=durable == "power"))
    draw = random.Random(durable)
    for number, crash in enumerate(found[::every]):
        for close_first in (False, True) if every > 1 else (draw.random() < 0.5,):
            check_crash(crash, folder / f"{number}-{close_first}", close_first)


def test_the_script_has_every_operation_and_every_crash() -> None:
    calls = Counter(operation.call for operation in recorded("power").operations)
    assert set(calls) == {"create", "remove", "allocate", "truncate", "write", "sync", "sync_directory"}
    assert min(calls.values()) >= 4
    kinds = {crash.where.partition(" after")[0] for crash in crashes(recorded("power"), power=True)}
    assert kinds == {"killed", "torn", *(f"power cut, {kind}" for kind in POWER_CUTS)}


@pytest.mark.parametrize("durable", ["power", "process"])
@pytest.mark.few(1)
def test_a_crash_loses_no_acknowledged_page(folder: Path, durable: str) -> None:
    check_every(durable, folder, 17)


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["power", "process"])
def test_a_crash_at_any_point_loses_no_acknowledged_page(folder: Path, durable: str) -> None:
    check_every(durable, folder, 1)


@pytest.mark.parametrize("lock", [None, b"", b"12", b"123456\n", bytes(7)])
def test_a_crash_while_the_directory_is_created_does_not_prevent_opening(
    tmp_path: Path, lock: bytes | None
) -> None:
    folder = tmp_path / "parent" / "kv"
    (folder if lock is not None else folder.parent).mkdir(parents=True)
    if lock is not None:
        (folder / "lock").write_bytes(lock)
    tier = opened(folder)
    store(tier, NEW)
    tier.close()
    check_required(folder, frozenset(NEW), "after a crash in the first opening")
