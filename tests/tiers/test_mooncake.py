"""The Mooncake tier, against a real master: the conformance suite, and its faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.tiers import Objects, Outcome, TierError, open_tier
from kvloom.tiers.remote import (
    CapacityTracker,
    MooncakeConfig,
    RemoteConfig,
    RemoteTier,
    StoreError,
    mooncake,
    mooncake_client,
    open_mooncake,
    store_tier,
)
from kvloom.tiers.remote.bounded_calls import BoundedCalls, StillRunningError
from kvloom.tiers.remote.mooncake import MooncakeStore
from kvloom.tiers.remote.mooncake_client import MooncakeClient
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.testing.conformance import (
    PAGE,
    RUN,
    Harness,
    TierConformance,
    check_bytes,
    filled,
    get,
    memory,
    objects,
    put,
)

from .servers import mooncake_master, stopped

pytestmark = [pytest.mark.server, pytest.mark.slow]
MIB = 1 << 20
CAPACITY = 8 * MIB


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as (port, _):
        yield port


class MooncakeHarness(Harness):
    @property
    def client(self) -> object:
        return self.tier._control._store.store._client

    def values(self, wanted: Objects) -> list[tuple[str, bytearray]]:
        found = [((PREFIX + key).hex(), self.client.get((PREFIX + key).hex())) for key in wanted.keys]  # type: ignore[attr-defined]
        return [(key, bytearray(value)) for key, value in found if value]

    def replace(self, key: str, value: bytes) -> None:
        """Replace the bytes: a `put` alone would keep the old ones and report success."""
        assert self.client.put(key, b"other") == 0  # type: ignore[attr-defined]
        assert self.client.get_size(key) == len(value)  # type: ignore[attr-defined]
        assert self.client.remove(key, True) == 0  # type: ignore[attr-defined]
        assert self.client.put(key, value) == 0  # type: ignore[attr-defined]

    def flip(self, wanted: Objects) -> None:
        for key, value in self.values(wanted):
            value[len(value) * 2 // 3] ^= 8
            self.replace(key, bytes(value))

    def swap(self, first: Objects, second: Objects) -> None:
        ((a, one),), ((b, two),) = self.values(first), self.values(second)
        self.replace(a, bytes(two))
        self.replace(b, bytes(one))


def opened(port: int, **options: object) -> RemoteTier:
    config = RemoteConfig(CAPACITY, **{"timeout": 5.0, **options})  # type: ignore[arg-type]
    return open_mooncake(MooncakeConfig(f"127.0.0.1:{port}", segment=64 * MIB), config)


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[MooncakeClient]:
    """One for many tiers: the end of each takes seconds."""
    client = MooncakeClient(MooncakeConfig(f"127.0.0.1:{port}", segment=64 * MIB), 5.0)
    yield client
    client.close()


class TestMooncake(TierConformance):
    @pytest.fixture(autouse=True)
    def server(self, client: MooncakeClient) -> None:
        client.get().remove_all(True)
        self.client = client

    def make(self, folder: Path) -> Harness:
        config = RemoteConfig(CAPACITY, timeout=5.0)
        return MooncakeHarness(
            store_tier("mooncake", config, lambda: MooncakeStore(self.client, 5.0, "mooncake"))
        )


class TestMooncakeStraight(TestMooncake):
    """Pages move directly between registered memory and the store; above they are too few to register."""

    @pytest.fixture(autouse=True)
    def lent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mooncake_client, "_MIN_REGISTERED_BYTES", PAGE)
        monkeypatch.setattr(mooncake, "_MIN_PIECE", PAGE)
        monkeypatch.setattr(mooncake_client, "_MAX_REGISTERED", 1 << 20)


@pytest.fixture
def tier(port: int) -> Iterator[RemoteTier]:
    tier = opened(port)
    yield tier
    tier.close()


def test_another_process_reads_written_pages(tier: RemoteTier, port: int) -> None:
    put(tier, range(3))
    packed = opened(port, compression="lz4")
    assert put(packed, range(3, 6)).ok.all()
    for reader in (tier, packed):
        assert get(reader, range(6)).ok.all()
        got = memory(6)
        parts = [reader.read(objects(range(6)), got, (at, at + 4 * RUN)) for at in range(0, PAGE, 4 * RUN)]
        for transfer in parts:
            assert transfer.wait(20)
            assert transfer.ok.all()
        assert check_bytes(parts[-1], range(6), got) == 6
    packed.close()


def test_a_segment_of_an_ended_process_costs_misses(tier: RemoteTier, port: int) -> None:
    """Pages of a disconnected client are missing or empty, never wrong."""
    other = opened(port)
    put(other, range(20))
    other.close()
    transfer = get(tier, range(20))
    assert transfer.done
    deadline = time.monotonic() + 20
    while not put(tier, range(20)).ok.all() and time.monotonic() < deadline:
        time.sleep(0.5)
    get(tier, range(20))


def test_pages_with_two_replicas_survive_the_end_of_any_segment(tmp_path: Path) -> None:
    with mooncake_master(tmp_path) as (port, _):
        holders = [opened(port), opened(port)]
        config = MooncakeConfig(f"127.0.0.1:{port}", replicas=2)
        tier = open_mooncake(config, RemoteConfig(CAPACITY, timeout=5.0))
        assert put(tier, range(20)).ok.all()
        holders.pop().close()
        assert get(tier, range(20)).ok.all()
        holders.pop().close()
        tier.close()
    with pytest.raises(ValueError, match="replicas 0 must be 1 or more"):
        MooncakeConfig("127.0.0.1:1", replicas=0)


def test_a_crashed_master_costs_misses_and_a_bounded_wait_and_recovers(tmp_path: Path) -> None:
    with mooncake_master(tmp_path) as (port, _):
        tier = opened(port, timeout=1.0)
        put(tier, range(4))
    began = time.monotonic()
    assert not tier.lookup(objects(range(4))).any()
    transfer = tier.read(objects(range(4)), memory(4))
    assert transfer.wait(10)
    assert not transfer.ok.any()
    assert time.monotonic() - began < 15
    with mooncake_master(tmp_path, port):
        deadline = time.monotonic() + 25
        while not put(tier, range(4)).ok.all() and time.monotonic() < deadline:
            time.sleep(0.2)
        while not get(tier, range(4)).ok.all() and time.monotonic() < deadline:
            put(tier, range(4))
        assert get(tier, range(4)).ok.all()
        tier.close()


def test_a_client_with_a_running_call_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "_CLOSE_SECONDS", 0.1)
    with mooncake_master(tmp_path) as (port, _):
        client = MooncakeClient(MooncakeConfig(f"127.0.0.1:{port}", segment=64 * MIB), 0.1)
        library, inside, gate = client.get(), threading.Event(), threading.Event()
        waiting = threading.Thread(target=lambda: client.run(lambda: (inside.set(), gate.wait(20))))
        waiting.start()
        assert inside.wait(20)
        with pytest.raises(TimeoutError, match="a call hangs"):
            client.close()
        with pytest.raises(StoreError, match="is closed"):
            client.run(lambda: None)
        assert library.is_exist("nothing") == 0, "the running call continues"
        gate.set()
        waiting.join(20)
        library.close()


def test_a_hung_master_costs_a_bounded_wait(tmp_path: Path) -> None:
    with mooncake_master(tmp_path) as (port, process):
        tier = opened(port, timeout=0.5)
        put(tier, range(2))
        with stopped(process):
            began = time.monotonic()
            assert not tier.lookup(objects(range(2))).any()
            transfer = tier.read(objects(range(2)), memory(2))
            assert transfer.wait(8)
            assert (transfer.results == Outcome.FAILED).all()
            assert transfer.released, "the call never used the caller's memory"
            assert "did not answer within 0.5 s" in transfer.reason
            assert time.monotonic() - began < 10
        tier.close()


def test_a_page_of_a_hung_call_is_released_only_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_MIN_PIECE", PAGE)
    with mooncake_master(tmp_path) as (port, process):
        tier = opened(port, timeout=0.5)
        assert put(tier, range(32)).ok.all()
        into = memory(32)
        assert tier.read(objects(range(32)), into).wait(5)  # its memory is registered from here on
        with stopped(process):
            transfer = tier.read(objects(range(32)), into)
            assert transfer.wait(5)
            assert (transfer.results == Outcome.FAILED).all()
            assert not transfer.released, "the store may still write there"
        assert transfer.wait_released(40)
        tier.close()


def test_pages_compressed_by_another_server_are_read(
    tier: RemoteTier, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_MIN_PIECE", PAGE)
    other = opened(port, compression="zstd")
    assert put(other, range(40)).ok.all()
    assert get(tier, range(40)).ok.all()
    assert put(tier, range(40, 80)).ok.all()
    assert get(tier, range(20, 60)).ok.all()
    other.close()


def test_memory_is_registered_once_and_within_a_limit(tier: RemoteTier) -> None:
    batches = [list(range(at, at + 16)) for at in range(0, 96, 16)] * 2
    kept = [filled(numbers) for numbers in batches]
    for numbers, source in zip(batches, kept, strict=True):
        for _ in range(2):
            assert tier.write(objects(numbers), source).wait(5)
    lent = tier._control._store.store._mooncake._registered  # type: ignore[union-attr]
    assert list(lent) == [(source.address, len(source.bytes)) for source in kept[:8]]
    assert get(tier, range(96)).ok.all()


def test_an_unreachable_master_is_reported_at_opening() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with pytest.raises(TierError, match="cannot be reached"):
        open_tier("mooncake://127.0.0.1:1?capacity=8MiB&timeout=1")
    with pytest.raises(ValueError, match="unknown options sgment"):
        open_tier("mooncake://127.0.0.1:1?capacity=8MiB&sgment=1GiB")
    with pytest.raises(ValueError, match="the master is missing"):
        open_tier("mooncake:?capacity=8MiB")


def test_values_of_this_process_are_counted_least_recently_used_first() -> None:
    counted = CapacityTracker(100)
    assert counted.reserve({b"a": 40, b"b": 40}) == ({b"a": False, b"b": False}, {})
    counted.touch([b"a", b"x"])
    assert list(counted.reserve({b"c": 40})[1]) == [b"b"]
    assert not counted.reserve({b"a": 30})[1]
    counted.remove([b"c", b"y"])
    assert counted.usage().bytes == 30
    assert (counted.usage().objects, counted.usage().evicted) == (1, 1)


def test_a_hung_call_is_abandoned_and_its_result_ignored() -> None:
    bounded = BoundedCalls(0.05, "the sea")
    assert bounded.call(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        bounded.call(lambda: 1 // 0)
    over = threading.Event()
    with pytest.raises(StillRunningError, match="the sea did not answer") as hung:
        bounded.call(lambda: time.sleep(0.3), uses_caller_memory=True)
    assert BoundedCalls._stuck == 1
    assert hung.value.uses_caller_memory
    hung.value.on_finished(over.set)
    assert over.wait(10)
    assert BoundedCalls._stuck == 0
    again: list[int] = []
    hung.value.on_finished(lambda: again.append(1))
    assert again == [1]
