"""The transfer manager and its queues: order, budget, policies, logged faults, a tier that hangs and recovers."""

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
        self.path, self.managers = path, list[TransferManager]()

    def __call__(
        self,
        faults: Faults | None = None,
        write: WritePolicy = "through",
        host: int = 1 << 20,
        budget: int = 1 << 20,
    ) -> tuple[TransferManager, DiskTier]:
        disk = DiskTier(DiskConfig(self.path, 64 << 20, segment_bytes=1 << 20))
        tier: Tier = disk if faults is None else FaultyTier(disk, faults)
        queue = TierQueueConfig(max_inflight_bytes=budget, batch_bytes=4 * PAGE, breaker=QUICK)
        manager = TransferManager(
            HostTier(HostConfig(host, 16 * PAGE)),
            [OpenTier(tier, write)],
            TransferConfig(lookup_seconds=0.2, queue=queue),
        )
        self.managers.append(manager)
        return manager, disk


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    for manager in made.managers:
        manager.close(2)


def test_pages_of_a_tier_are_found_and_loaded_into_host_memory(setting: Setting) -> None:
    manager, disk = setting()
    filled(disk, 0, 10)
    filled(manager.host, 5, 3)
    lookup = manager.lookup([objects(0, 12)])
    assert over(lookup)
    assert lookup.found[0].tolist() == [True] * 10 + [False] * 2
    assert lookup.in_host[0].tolist() == [False] * 5 + [True] * 3 + [False] * 4
    fetch = manager.fetch([objects(0, 12)], lookup.queue_of, time.monotonic() + 5)
    assert over(fetch)
    assert fetch.loaded == fetch.requested == 7
    assert np.array_equal(content(manager.host, 0, 10), pages(0, 10))
    assert manager.queues[0].throughput.bytes_per_second > 0
    assert not manager.fault_log.counts


def test_a_slow_tier_is_used_again_and_a_hung_tier_opens_the_breaker(setting: Setting) -> None:
    gate = threading.Semaphore(2)
    manager, disk = setting(Faults(tamper=lambda objects: gate.acquire() and None))
    queue = manager.queues[0]
    filled(disk, 0, 40)
    try:
        slow = manager.fetch(
            [objects(0, 20)], dict.fromkeys(objects(0, 20).keys, 0), time.monotonic() + 0.5
        )  # two of its five batches load
        assert until(lambda: slow.loaded == 8)
        assert over(slow)
        assert until(lambda: bool(manager.fault_log.counts))
        time.sleep(0.1)
        assert queue.breaker.is_closed
        gate.release(3)
        assert until(lambda: not queue._cancelled)
        hung = manager.fetch(
            [objects(20, 20)], dict.fromkeys(objects(20, 20).keys, 0), time.monotonic() + 0.5
        )  # none of them
        assert over(hung)
        assert until(lambda: not queue.breaker.is_closed)
        assert hung.loaded == 0
    finally:
        gate.release(100)


@pytest.mark.parametrize(("write", "used", "stored"), [
    ("through", False, True), ("second-use", False, False), ("second-use", True, True), ("back", True, False),
])  # fmt: skip
def test_the_write_policy_decides_when_a_tier_is_written(
    setting: Setting, write: WritePolicy, used: bool, stored: bool
) -> None:
    manager, disk = setting(write=write)
    filled(manager.host, 0, 6)
    manager.write_to_tiers(objects(0, 6), used)
    until(lambda: bool(disk.lookup(objects(0, 6)).all()), 5.0 if stored else 0.1)
    assert disk.lookup(objects(0, 6)).all() == stored


def test_write_back_writes_the_oldest_pages_when_host_memory_fills_and_the_rest_at_close(
    setting: Setting, tmp_path: Path
) -> None:
    manager, disk = setting(write="back", host=64 * PAGE)
    for first in range(0, 60, 4):
        filled(manager.host, first, 4)
        manager._last_check = 0.0
        manager.write_to_tiers(objects(first, 4), False)
    assert until(lambda: bool(disk.lookup(objects(0, 4)).all()))
    assert not disk.lookup(objects(56, 4)).any()
    manager.close(5)
    again = DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20))
    assert again.lookup(objects(0, 60)).all()
    again.close()


def test_a_store_that_ends_during_close_ends_the_wait(tmp_path: Path) -> None:
    class SlowToBegin(FaultyTier):
        def write(self, objects: Objects, source: Ranges) -> Transfer:
            begun.set()
            time.sleep(0.1)  # `close` waits before the queue's thread does
            return super().write(objects, source)

    begun = threading.Event()
    tier = SlowToBegin(DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20)), Faults(slow=0.1))
    manager = TransferManager(HostTier(HostConfig(1 << 20, 16 * PAGE)), [OpenTier(tier)])
    filled(manager.host, 0, 4)
    manager.write_to_tiers(objects(0, 4), False)
    assert begun.wait(5)
    began = time.monotonic()
    manager.close(30)
    assert time.monotonic() - began < 15
    again = DiskTier(DiskConfig(tmp_path, 64 << 20, segment_bytes=1 << 20))
    assert again.lookup(objects(0, 4)).all()
    again.close()


def test_the_earliest_deadline_runs_first_and_loads_before_stores(setting: Setting) -> None:
    faults = Faults()
    manager, disk = setting(faults, budget=4 * PAGE)
    filled(disk, 0, 40)
    order: list[int] = []
    tier = manager.tiers[0].tier
    read, write = tier.read, tier.write

    def noted_read(some: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        order.append(int.from_bytes(some.block_hashes[0], "little"))
        return read(some, into, part)

    def noted_write(some: Objects, source: Ranges) -> Transfer:
        order.append(-1)
        return write(some, source)

    tier.read, tier.write = noted_read, noted_write  # type: ignore[method-assign]
    faults.slow = 0.05
    filled(manager.host, 100, 8)
    below = dict.fromkeys(objects(0, 40).keys, 0)
    now = time.monotonic()
    fetches = [manager.fetch([objects(0, 4)], below, now + 5)]  # uses the whole budget
    until(lambda: bool(order))
    manager.write_to_tiers(objects(100, 8), False)
    fetches += [
        manager.fetch([objects(first, 4)], below, now + late) for first, late in ((8, 4), (16, 2), (24, 3))
    ]
    assert until(lambda: all(fetch.done for fetch in fetches))
    assert until(lambda: order.count(-1) == 2)
    assert order == [0, 16, 24, 8, -1, -1]


def test_a_hung_tier_costs_a_bounded_wait_and_its_pages_are_not_reused(setting: Setting) -> None:
    faults = Faults()
    manager, disk = setting(faults, host=16 * PAGE)
    filled(disk, 0, 4)
    faults.hung = True
    began = time.monotonic()
    below = dict.fromkeys(objects(0, 4).keys, 0)
    fetch = manager.fetch([objects(0, 4)], below, began + 0.2)
    assert over(fetch)
    assert time.monotonic() - began < 5
    assert fetch.loaded == 0
    lease = manager.host.reserve(objects(50, 16))  # all of it, except pages the tier still uses
    assert (lease.offsets >= 0).sum() == 12
    lease.release(False)
    late = (manager.tiers[0].tier.name, "read", "late")
    assert until(lambda: manager.fault_log.counts[late] == 4)  # released sooner, it would load after all
    faults.release()
    assert until(lambda: manager.host.stats().bytes == 0)
    lease = manager.host.reserve(objects(50, 16))
    assert (lease.offsets >= 0).all()
    lease.release(False)
    assert manager.fault_log.counts[late] == 4


def test_a_stuck_tier_is_skipped_and_recovers(setting: Setting) -> None:
    manager, disk = setting()
    filled(disk, 0, 4)
    gate = threading.Event()
    original = disk.lookup

    def stuck(some: Objects) -> np.ndarray:
        gate.wait()
        return original(some)

    disk.lookup = stuck  # type: ignore[method-assign]
    for _ in range(3):
        began = time.monotonic()
        lookup = manager.lookup([objects(0, 4)])
        assert over(lookup)
        assert not lookup.found[0].any()
        assert time.monotonic() - began < 5
    assert manager.fault_log.counts[disk.name, "lookup", "late"] >= 2
    assert manager.lookup([objects(0, 4)]).done  # the tier is not called
    gate.set()
    disk.lookup = original  # type: ignore[method-assign]

    def found() -> bool:
        lookup = manager.lookup([objects(0, 4)])
        over(lookup)
        return bool(lookup.found[0].all())

    assert until(found)


def test_faults_are_counted_and_logged_once_per_burst(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    manager, disk = setting(faults)
    filled(disk, 0, 8)
    faults.failing = True
    below = dict.fromkeys(objects(0, 8).keys, 0)
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        for _ in range(3):
            fetch = manager.fetch([objects(0, 8)], below, time.monotonic() + 1)
            assert over(fetch)
            assert fetch.loaded == 0
    assert len(caplog.records) == 1
    assert "recomputed" in caplog.text
    assert manager.fault_log.counts[manager.tiers[0].tier.name, "read", "failed"] == 24
    assert not manager.queues[0].breaker.is_closed
    faults.failing = False

    def works() -> bool:
        lookup = manager.lookup([objects(0, 8)])
        over(lookup)
        fetch = manager.fetch([objects(0, 8)], lookup.queue_of, time.monotonic() + 1)
        return over(fetch) and fetch.loaded == 8

    assert until(works)
    assert manager.queues[0].breaker.is_closed


@pytest.mark.parametrize("gone", [True, False])
def test_an_inconclusive_probe_allows_the_next_immediately(setting: Setting, gone: bool) -> None:
    """The probe after a fault is a store of an evicted page, or one that a full disk refuses."""
    faults = Faults()
    manager, disk = setting(faults)
    queue = manager.queues[0]
    filled(disk, 50, 1)
    filled(manager.host, 0, 8)
    faults.failing = True
    for number in range(2):
        manager.write_to_tiers(objects(number, 1), False)
    assert until(lambda: not queue.breaker.is_closed and not queue.pending_store_bytes)
    faults.failing, faults.full = False, True
    time.sleep(QUICK.first_pause + 0.01)
    if gone:
        manager.host.drop(objects(2, 1))
    manager.write_to_tiers(objects(2, 1), False)
    assert until(lambda: not queue.pending_store_bytes)
    assert queue.breaker.state == "open"
    lookup = manager.lookup([objects(50, 1)])
    assert over(lookup)
    assert lookup.found[0].all()


def test_a_store_of_an_evicted_page_or_on_a_full_queue_is_counted_as_skipped(
    setting: Setting,
) -> None:
    manager, disk = setting()
    manager.queues[0].queue_store(objects(0, 3))  # never in host memory
    assert until(lambda: manager.queues[0].skipped_stores == 3)
    assert not disk.lookup(objects(0, 3)).any()


def test_a_circuit_breaker_probes_once_with_growing_pauses() -> None:
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
    assert not breaker.allow_request(13.5)  # a probe without a result has failed
    assert breaker.allow_request(17.0)
    breaker.record_success()
    assert breaker.is_closed
    assert breaker.allow_request(17.1)
    assert breaker.times_opened == 3


def test_a_new_burst_is_logged_with_the_suppressed_count(caplog: pytest.LogCaptureFixture) -> None:
    told = FaultLog()
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        for now in (0.0, 1.0, 2.0, 100.0):
            told.add("disk", "read", "corrupt", 2, "", now)
    assert [("4 more" in record.getMessage()) for record in caplog.records] == [False, True]
    assert told.counts["disk", "read", "corrupt"] == 8


def test_a_tier_with_hung_stats_does_not_block_the_caller(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, disk = setting(Faults())
    filled(disk, 0, 8)
    queue = manager.queues[0]
    assert until(lambda: queue.stats().objects == 8)
    ended = threading.Event()
    really = queue.tier.stats

    def hangs() -> TierStats:
        assert ended.wait(20)
        return really()

    monkeypatch.setattr(queue.tier, "stats", hangs)
    filled(disk, 8, 4)
    began = time.monotonic()
    assert {queue.stats().objects for _ in range(50)} == {8}
    assert time.monotonic() - began < 1
    ended.set()
    assert until(lambda: queue.stats().objects == 12)

    def fails() -> TierStats:
        raise OSError("the disk is lost")

    monkeypatch.setattr(queue.tier, "stats", fails)
    queue.stats()
    time.sleep(0.05)
    assert queue.stats().objects == 12
    found = manager.lookup([objects(0, 12)])
    assert until(lambda: found.done)
