"""The mover and its lanes: order, budget, policies, faults that are counted and told once, a tier that hangs and recovers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom.tiers import (
    DiskConfig,
    DiskTier,
    Form,
    HostConfig,
    HostTier,
    Objects,
    OpenTier,
    Ranges,
    Tier,
    TierStats,
    Transfer,
    WritePolicy,
)
from kvloom.tiers.testing import Faults, FaultyTier
from kvloom.tiers.transfers import (
    CircuitBreaker,
    CircuitBreakerConfig,
    FaultLog,
    FetchJob,
    TierLookup,
    TierQueueConfig,
    TransferConfig,
    TransferManager,
)

PAGE = 4096
FORM = Form("u8", "plain", PAGE, PAGE)
QUICK = CircuitBreakerConfig(max_failures=2, first_pause=0.05, max_pause=0.2, probe_seconds=0.3)


def objects(first: int, count: int) -> Objects:
    return Objects([number.to_bytes(16, "little") for number in range(first, first + count)], 0, FORM)


def pages(first: int, count: int) -> np.ndarray:
    numbers = np.arange(first, first + count, dtype=np.int64)[:, None]
    return ((numbers + np.arange(PAGE)) % 251).astype(np.uint8)


def filled(tier: Tier, first: int, count: int) -> None:
    data = pages(first, count).ravel()
    transfer = tier.write(objects(first, count), Ranges(data, np.arange(count) * PAGE))
    assert transfer.wait(5)
    assert not transfer.failed


def content(host: HostTier, first: int, count: int) -> np.ndarray:
    back = np.zeros(count * PAGE, np.uint8)
    transfer = host.read(objects(first, count), Ranges(back, np.arange(count) * PAGE))
    assert not transfer.failed
    return back.reshape(count, PAGE)


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if true():
            return True
        time.sleep(0.002)
    return False


def over(work: TierLookup | FetchJob) -> bool:
    return until(lambda: work.done)


class Setting:
    def __init__(self, path: Path) -> None:
        self.path, self.movers = path, list[TransferManager]()

    def __call__(
        self,
        faults: Faults | None = None,
        write: WritePolicy = "through",
        host: int = 1 << 20,
        budget: int = 1 << 20,
    ) -> tuple[TransferManager, DiskTier]:
        disk = DiskTier(DiskConfig(self.path, 64 << 20, segment_bytes=1 << 20))
        tier: Tier = disk if faults is None else FaultyTier(disk, faults)
        lane = TierQueueConfig(max_inflight_bytes=budget, batch_bytes=4 * PAGE, breaker=QUICK)
        mover = TransferManager(
            HostTier(HostConfig(host, 16 * PAGE)),
            [OpenTier(tier, write)],
            TransferConfig(lookup_seconds=0.2, queue=lane),
        )
        self.movers.append(mover)
        return mover, disk


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    for mover in made.movers:
        mover.close(2)


def test_what_is_below_is_found_and_comes_into_host_memory(setting: Setting) -> None:
    mover, disk = setting()
    filled(disk, 0, 10)
    filled(mover.host, 5, 3)
    finding = mover.lookup([objects(0, 12)])
    assert over(finding)
    assert finding.found[0].tolist() == [True] * 10 + [False] * 2
    assert finding.in_host[0].tolist() == [False] * 5 + [True] * 3 + [False] * 4
    fetch = mover.fetch([objects(0, 12)], finding.queue_of, time.monotonic() + 5)
    assert over(fetch)
    assert fetch.loaded == fetch.requested == 7
    assert np.array_equal(content(mover.host, 0, 10), pages(0, 10))
    assert mover.queues[0].throughput.bytes_per_second > 0
    assert not mover.fault_log.counts


def test_a_tier_that_is_slow_is_asked_again_and_one_that_hangs_is_left_alone(setting: Setting) -> None:
    gate = threading.Semaphore(2)
    mover, disk = setting(Faults(tamper=lambda objects: gate.acquire() and None))
    lane = mover.queues[0]
    filled(disk, 0, 40)
    try:
        slow = mover.fetch(
            [objects(0, 20)], dict.fromkeys(objects(0, 20).keys, 0), time.monotonic() + 0.5
        )  # two of its five pieces come
        assert until(lambda: slow.loaded == 8)
        assert over(slow)
        assert until(lambda: bool(mover.fault_log.counts))
        time.sleep(0.1)
        assert lane.breaker.is_closed
        gate.release(3)
        assert until(lambda: not lane._given_up)
        hung = mover.fetch(
            [objects(20, 20)], dict.fromkeys(objects(20, 20).keys, 0), time.monotonic() + 0.5
        )  # none of its
        assert over(hung)
        assert until(lambda: not lane.breaker.is_closed)
        assert hung.loaded == 0
    finally:
        gate.release(100)


@pytest.mark.parametrize(("write", "used", "stored"), [
    ("through", False, True), ("second-use", False, False), ("second-use", True, True), ("back", True, False),
])  # fmt: skip
def test_a_policy_says_when_a_tier_is_written(
    setting: Setting, write: WritePolicy, used: bool, stored: bool
) -> None:
    mover, disk = setting(write=write)
    filled(mover.host, 0, 6)
    mover.write_to_tiers(objects(0, 6), used)
    until(lambda: bool(disk.lookup(objects(0, 6)).all()), 5.0 if stored else 0.1)
    assert disk.lookup(objects(0, 6)).all() == stored


def test_back_writes_what_came_first_before_host_memory_is_full_and_the_rest_at_the_end(
    setting: Setting, tmp_path: Path
) -> None:
    mover, disk = setting(write="back", host=64 * PAGE)
    for first in range(0, 60, 4):
        filled(mover.host, first, 4)
        mover._looked = 0.0
        mover.write_to_tiers(objects(first, 4), False)
    assert until(lambda: bool(disk.lookup(objects(0, 4)).all()))
    assert not disk.lookup(objects(56, 4)).any()
    mover.close(5)
    again = DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20))
    assert again.lookup(objects(0, 60)).all()
    again.close()


def test_a_store_that_ends_while_the_lane_is_closed_ends_the_wait(tmp_path: Path) -> None:
    class SlowToBegin(FaultyTier):
        def write(self, objects: Objects, source: Ranges) -> Transfer:
            begun.set()
            time.sleep(0.1)  # who closes begins to wait before the lane's thread does
            return super().write(objects, source)

    begun = threading.Event()
    tier = SlowToBegin(DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20)), Faults(slow=0.1))
    mover = TransferManager(HostTier(HostConfig(1 << 20, 16 * PAGE)), [OpenTier(tier)])
    filled(mover.host, 0, 4)
    mover.write_to_tiers(objects(0, 4), False)
    assert begun.wait(5)
    began = time.monotonic()
    mover.close(30)
    assert time.monotonic() - began < 15
    again = DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20))
    assert again.lookup(objects(0, 4)).all()
    again.close()


def test_the_nearest_deadline_goes_first_and_loads_before_stores(setting: Setting) -> None:
    faults = Faults()
    mover, disk = setting(faults, budget=4 * PAGE)
    filled(disk, 0, 40)
    order: list[int] = []
    tier = mover.tiers[0].tier
    read, write = tier.read, tier.write

    def noted_read(some: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        order.append(int.from_bytes(some.block_hashes[0], "little"))
        return read(some, into, part)

    def noted_write(some: Objects, source: Ranges) -> Transfer:
        order.append(-1)
        return write(some, source)

    tier.read, tier.write = noted_read, noted_write  # type: ignore[method-assign]
    faults.slow = 0.05
    filled(mover.host, 100, 8)
    below = dict.fromkeys(objects(0, 40).keys, 0)
    now = time.monotonic()
    fetches = [mover.fetch([objects(0, 4)], below, now + 5)]  # holds the whole budget
    until(lambda: bool(order))
    mover.write_to_tiers(objects(100, 8), False)
    fetches += [
        mover.fetch([objects(first, 4)], below, now + late) for first, late in ((8, 4), (16, 2), (24, 3))
    ]
    assert until(lambda: all(fetch.done for fetch in fetches))
    assert until(lambda: order.count(-1) == 2)
    assert order == [0, 16, 24, 8, -1, -1]


def test_a_tier_that_hangs_costs_a_bounded_wait_and_its_places_are_not_reused(setting: Setting) -> None:
    faults = Faults()
    mover, disk = setting(faults, host=16 * PAGE)
    filled(disk, 0, 4)
    faults.hung = True
    began = time.monotonic()
    below = dict.fromkeys(objects(0, 4).keys, 0)
    fetch = mover.fetch([objects(0, 4)], below, began + 0.2)
    assert over(fetch)
    assert time.monotonic() - began < 5
    assert fetch.loaded == 0
    lease = mover.host.reserve(objects(50, 16))  # all there is, but for what the tier still has
    assert (lease.offsets >= 0).sum() == 12
    lease.release(False)
    late = (mover.tiers[0].tier.name, "read", "late")
    assert until(lambda: mover.fault_log.counts[late] == 4)  # let go sooner, it would come after all
    faults.release()
    assert until(lambda: mover.host.stats().bytes == 0)
    lease = mover.host.reserve(objects(50, 16))
    assert (lease.offsets >= 0).all()
    lease.release(False)
    assert mover.fault_log.counts[late] == 4


def test_a_call_that_never_returns_is_left_alone_and_comes_back(setting: Setting) -> None:
    mover, disk = setting()
    filled(disk, 0, 4)
    gate = threading.Event()
    lookup = disk.lookup

    def stuck(some: Objects) -> np.ndarray:
        gate.wait()
        return lookup(some)

    disk.lookup = stuck  # type: ignore[method-assign]
    for _ in range(3):
        began = time.monotonic()
        finding = mover.lookup([objects(0, 4)])
        assert over(finding)
        assert not finding.found[0].any()
        assert time.monotonic() - began < 5
    assert mover.fault_log.counts[disk.name, "lookup", "late"] >= 2
    assert mover.lookup([objects(0, 4)]).done  # it is not even asked
    gate.set()
    disk.lookup = lookup  # type: ignore[method-assign]

    def found() -> bool:
        finding = mover.lookup([objects(0, 4)])
        over(finding)
        return bool(finding.found[0].all())

    assert until(found)


def test_faults_are_counted_and_told_once_a_burst(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    mover, disk = setting(faults)
    filled(disk, 0, 8)
    faults.failing = True
    below = dict.fromkeys(objects(0, 8).keys, 0)
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        for _ in range(3):
            fetch = mover.fetch([objects(0, 8)], below, time.monotonic() + 1)
            assert over(fetch)
            assert fetch.loaded == 0
    assert len(caplog.records) == 1
    assert "computed instead" in caplog.text
    assert mover.fault_log.counts[mover.tiers[0].tier.name, "read", "failed"] == 24
    assert not mover.queues[0].breaker.is_closed
    faults.failing = False

    def works() -> bool:
        finding = mover.lookup([objects(0, 8)])
        over(finding)
        fetch = mover.fetch([objects(0, 8)], finding.queue_of, time.monotonic() + 1)
        return over(fetch) and fetch.loaded == 8

    assert until(works)
    assert mover.queues[0].breaker.is_closed


@pytest.mark.parametrize("gone", [True, False])
def test_a_try_that_tells_nothing_lets_the_next_follow_at_once(setting: Setting, gone: bool) -> None:
    """The one try after a fault is a store whose page has left, or one that a full disk refuses."""
    faults = Faults()
    mover, disk = setting(faults)
    lane = mover.queues[0]
    filled(disk, 50, 1)
    filled(mover.host, 0, 8)
    faults.failing = True
    for number in range(2):
        mover.write_to_tiers(objects(number, 1), False)
    assert until(lambda: not lane.breaker.is_closed and not lane.pending_store_bytes)
    faults.failing, faults.full = False, True
    time.sleep(QUICK.first_pause + 0.01)
    if gone:
        mover.host.drop(objects(2, 1))
    mover.write_to_tiers(objects(2, 1), False)
    assert until(lambda: not lane.pending_store_bytes)
    assert lane.breaker.state == "open"
    finding = mover.lookup([objects(50, 1)])
    assert over(finding)
    assert finding.found[0].all()


def test_a_store_that_finds_its_page_gone_or_too_many_waiting_is_counted_and_no_more(
    setting: Setting,
) -> None:
    mover, disk = setting()
    mover.queues[0].queue_store(objects(0, 3))  # never in host memory
    assert until(lambda: mover.queues[0].skipped_stores == 3)
    assert not disk.lookup(objects(0, 3)).any()


def test_a_breaker_opens_tries_once_and_waits_longer_each_time() -> None:
    breaker = CircuitBreaker(
        CircuitBreakerConfig(max_failures=2, first_pause=1.0, max_pause=3.0, probe_seconds=10.0)
    )
    breaker.record_failure(0.0)
    assert breaker.allow_request(0.0)
    breaker.record_success()
    breaker.record_failure(0.0)
    breaker.record_failure(0.0)
    assert not breaker.is_closed
    assert not breaker.allow_request(0.9)
    assert breaker.allow_request(1.0)
    assert not breaker.allow_request(1.1)  # one try at a time
    breaker.record_failure(1.2)
    assert not breaker.allow_request(3.1)
    assert breaker.allow_request(3.3)
    breaker.record_inconclusive()
    assert breaker.allow_request(3.4)
    assert not breaker.allow_request(13.0)
    assert not breaker.allow_request(13.5)  # a try that nobody heard of again has failed
    assert breaker.allow_request(17.0)
    breaker.record_success()
    assert breaker.is_closed
    assert breaker.allow_request(17.1)
    assert breaker.times_opened == 3


def test_a_new_burst_is_told_with_what_was_not(caplog: pytest.LogCaptureFixture) -> None:
    told = FaultLog()
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        for now in (0.0, 1.0, 2.0, 100.0):
            told.add("disk", "read", "corrupt", 2, "", now)
    assert [("4 more" in record.getMessage()) for record in caplog.records] == [False, True]
    assert told.counts["disk", "read", "corrupt"] == 8


def test_a_tier_that_does_not_say_what_it_has_holds_nobody_up(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, disk = setting(Faults())
    filled(disk, 0, 8)
    lane = mover.queues[0]
    assert until(lambda: lane.stats().objects == 8)
    ended = threading.Event()
    really = lane.tier.stats

    def hangs() -> TierStats:
        assert ended.wait(20)
        return really()

    monkeypatch.setattr(lane.tier, "stats", hangs)
    filled(disk, 8, 4)
    began = time.monotonic()
    assert {lane.stats().objects for _ in range(50)} == {8}
    assert time.monotonic() - began < 1
    ended.set()
    assert until(lambda: lane.stats().objects == 12)

    def fails() -> TierStats:
        raise OSError("the disk is gone")

    monkeypatch.setattr(lane.tier, "stats", fails)
    lane.stats()
    time.sleep(0.05)
    assert lane.stats().objects == 12
    found = mover.lookup([objects(0, 12)])
    assert until(lambda: found.done)
