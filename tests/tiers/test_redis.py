"""The Redis tier, against a real server: the conformance suite, sharing, and a lost server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvloom.tiers import Form, Objects, Outcome, Ranges, TierError, open_tier
from kvloom.tiers.remote import RedisAddress, RemoteConfig, RemoteTier, open_redis
from kvloom.tiers.remote.redis import _INDEXES, RedisStore
from kvloom.tiers.remote.redis_protocol import RedisReplyError, RespConnection
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.testing.conformance import (
    FORM,
    PAGE,
    RUN,
    Harness,
    TierConformance,
    check_bytes,
    filled,
    get,
    memory,
    objects,
    page,
    put,
)

from .servers import free_port, redis_server, stopped

pytestmark = pytest.mark.server
MIB = 1 << 20
CAPACITY = 8 * MIB


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


class RedisHarness(Harness):
    client: RespConnection

    def values(self, wanted: Objects) -> list[tuple[bytes, bytearray]]:
        keys = self.tier._with_stored_keys(wanted).keys
        found = [(PREFIX + key, self.client.call("GET", PREFIX + key)) for key in keys]
        return [(key, bytearray(value)) for key, value in found if value]

    def flip(self, wanted: Objects) -> None:
        for key, value in self.values(wanted):
            value[len(value) * 2 // 3] ^= 8
            self.client.call("SET", key, bytes(value))

    def swap(self, first: Objects, second: Objects) -> None:
        ((a, one),), ((b, two),) = self.values(first), self.values(second)
        self.client.call("SET", a, bytes(two))
        self.client.call("SET", b, bytes(one))


def client(port: int) -> RespConnection:
    """A connection that takes whole pages as answers."""
    return RespConnection(("127.0.0.1", port), 5, limit=4 * MIB)


def harness_of(port: int, **options: object) -> RedisHarness:
    harness = RedisHarness(open_redis(RedisAddress(port=port), RemoteConfig(CAPACITY, **options)))  # type: ignore[arg-type]
    harness.client = client(port)
    return harness


class RedisConformance(TierConformance):
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(autouse=True)
    def server(self, port: int) -> None:
        RespConnection(("127.0.0.1", port), 5).call("FLUSHALL")
        self.port = port

    def make(self, folder: Path) -> Harness:
        return harness_of(self.port, **self.options)


class TestRedis(RedisConformance):
    pass


class TestCompressed(RedisConformance):
    options: ClassVar[dict[str, object]] = {"compression": "lz4"}


class TestEncrypted(RedisConformance):
    def make(self, folder: Path) -> Harness:
        keys = folder / "keys.json"
        keys.write_text('{"*": "' + "ab" * 32 + '"}')
        keys.chmod(0o600)
        return harness_of(self.port, keys=keys, compression="zstd")


@pytest.fixture
def tier(port: int) -> Iterator[RemoteTier]:
    RespConnection(("127.0.0.1", port), 5).call("FLUSHALL")
    tier = open_redis(RedisAddress(port=port), RemoteConfig(CAPACITY))
    yield tier
    tier.close()


def another(port: int, **options: object) -> RemoteTier:
    return open_redis(RedisAddress(port=port), RemoteConfig(CAPACITY, **options))  # type: ignore[arg-type]


def test_a_server_reads_pages_of_another_with_any_compression(tier: RemoteTier, port: int) -> None:
    put(tier, range(3))
    packed = another(port, compression="zstd")
    assert put(packed, range(3, 6)).ok.all()
    for reader in (tier, packed, again := another(port)):
        assert get(reader, range(6)).ok.all()
        got = memory(6)
        parts = [reader.read(objects(range(6)), got, (at, at + 2 * RUN)) for at in range(0, PAGE, 2 * RUN)]
        for transfer in parts:
            assert transfer.wait(20)
            assert transfer.ok.all()
        assert check_bytes(parts[-1], range(6), got) == 6
    packed.close()
    again.close()


def test_all_clients_of_a_server_share_its_capacity(tier: RemoteTier, port: int) -> None:
    other = another(port)
    for first in range(0, 512, 32):
        assert put(tier if first % 64 else other, range(first, first + 32)).ok.all()
    assert tier.stats().bytes == other.stats().bytes <= CAPACITY
    assert tier.stats().objects == other.stats().objects > 100
    memory_used = int(
        RespConnection(("127.0.0.1", port), 5)
        .call("INFO", "memory")
        .split(b"used_memory_dataset:")[1]
        .split(b"\r")[0]
    )
    assert memory_used < 2 * CAPACITY, "uncounted values are not on the server"
    other.close()


def test_read_pages_are_evicted_last(tier: RemoteTier) -> None:
    for first in range(0, 100, 20):
        put(tier, range(first, first + 20))
    for first in range(100, 200, 20):
        assert get(tier, range(4)).ok.all()
        put(tier, range(first, first + 20))
    assert tier.lookup(objects(range(4))).all()
    assert not tier.lookup(objects(range(4, 60))).any()


def test_a_reserved_value_that_was_never_filled_is_a_miss_and_can_be_written(
    tier: RemoteTier, port: int
) -> None:
    store = RedisStore(RedisAddress(port=port), CAPACITY, 2.0)
    key = PREFIX + objects([1]).keys[0]
    store._connection.call("EVALSHA", store._reserve, *_INDEXES, CAPACITY, "", 0, 0, key, 100)
    assert store._connection.call("EXISTS", key) == 1
    assert not tier.lookup(objects([1])).any()
    assert get(tier, [1]).results.tolist() == [Outcome.MISSING]
    assert put(tier, [1]).ok.all()
    assert get(tier, [1]).ok.all()
    assert 65536 < tier.stats().bytes < 2 * 65536, "counted once, with its size"
    store.close()


def test_a_value_evicted_before_it_is_filled_is_not_stored(tier: RemoteTier, port: int) -> None:
    tiny = RedisStore(RedisAddress(port=port), 1000, 2.0)
    assert tiny.put([(PREFIX + b"x", [bytes(2000)])]) == [Outcome.FULL]
    assert tiny._connection.call("EXISTS", PREFIX + b"x") == 0
    assert tiny.usage().bytes == 0
    tiny.close()


def test_a_server_out_of_memory_reports_full_and_recovers(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as (port, _):
        tier = open_redis(RedisAddress(port=port), RemoteConfig(64 * MIB))
        results = [put(tier, [number]).results[0] for number in range(80)]
        assert Outcome.FULL in results
        assert set(results) <= {Outcome.OK, Outcome.FULL}
        get(tier, range(80))
        tier.close()


def test_a_crashed_server_costs_misses_and_the_tier_reconnects(tmp_path: Path) -> None:
    port = free_port()
    with redis_server(tmp_path, port=port):
        tier = open_redis(RedisAddress(port=port), RemoteConfig(CAPACITY, timeout=1.0))
        assert put(tier, range(4)).ok.all()
    began = time.monotonic()
    transfer = get(tier, range(4))
    assert (transfer.results == Outcome.FAILED).all()
    assert transfer.reason
    assert not tier.lookup(objects(range(4))).any()
    assert (put(tier, range(4)).results == Outcome.FAILED).all()
    assert tier.drop(objects(range(4))) == 0
    assert tier.stats().capacity == CAPACITY
    assert time.monotonic() - began < 5
    with redis_server(tmp_path, port=port):
        deadline = time.monotonic() + 15
        while not put(tier, range(4)).ok.all() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert get(tier, range(4)).ok.any() or get(tier, range(4)).ok.any()
    tier.close()


def test_a_hung_server_costs_a_bounded_wait(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, process):
        tier = open_redis(RedisAddress(port=port), RemoteConfig(CAPACITY, timeout=0.3))
        put(tier, range(4))
        with stopped(process):
            began = time.monotonic()
            assert not tier.lookup(objects(range(4))).any()
            transfer = tier.read(objects(range(4)), memory(4))
            assert transfer.wait(8)
            assert (transfer.results == Outcome.FAILED).all()
            assert "0.3 s" in transfer.reason or "timed out" in transfer.reason
            for _ in range(50):
                assert not tier.lookup(objects(range(4))).any()
            assert time.monotonic() - began < 10, "not every call contacts the server"
        deadline = time.monotonic() + 10
        while not get(tier, range(4)).ok.all() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert get(tier, range(4)).ok.all()
        tier.close()


def test_wrong_passwords_and_unreachable_servers_are_reported_at_opening(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as (port, _):
        with pytest.raises(TierError, match="NOAUTH"):
            open_tier(f"redis://127.0.0.1:{port}/0?capacity=8MiB")
        with pytest.raises(TierError, match="WRONGPASS") as told:
            open_tier(f"redis://:guess@127.0.0.1:{port}/0?capacity=8MiB")
        assert "guess" not in str(told.value)
        tier = open_tier(f"redis://:secret@127.0.0.1:{port}/1?capacity=8MiB&compression=lz4")
        assert put(tier, range(2)).ok.all()
        assert tier.name == f"redis://127.0.0.1:{port}/1"
        tier.close()
    with pytest.raises(TierError, match="cannot be reached"):
        open_tier(f"redis://127.0.0.1:{port}/0?capacity=8MiB&timeout=0.5")


def test_a_unix_socket_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with redis_server(tmp_path, "--unixsocket", str(path)):
        tier = open_tier(f"redis://{path}?capacity=8MiB")
        assert put(tier, range(2)).ok.all()
        assert get(tier, range(2)).ok.all()
        tier.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis://127.0.0.1:1/0", r"give \?capacity=64GiB"),
        ("redis://127.0.0.1:1/0?capacity=8MiB&compresion=lz4", "unknown options compresion; known: capacity"),
        ("redis://127.0.0.1:1/0?capacity=8XB", "'8XB' is not understood"),
        ("redis://127.0.0.1:1/zero?capacity=8MiB", "'zero' is not a database number"),
        ("redis://127.0.0.1:99999/0?capacity=8MiB", "Port out of range"),
        ("redis://me:pw@127.0.0.1:1/0?readers=x&capacity=1G", r"//…@127.*readers='x'"),
        ("redis://127.0.0.1:1/0?capacity=8MiB&compression=gzip", "'gzip' is none of"),
    ],
)
def test_a_bad_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_tier(text)


def test_pages_of_another_key_have_other_stored_keys_and_remain(port: int, tmp_path: Path) -> None:
    RespConnection(("127.0.0.1", port), 5).call("FLUSHALL")
    for name, byte in (("one", "01"), ("two", "02")):
        (tmp_path / name).write_text('{"acme": "' + byte * 32 + '"}')
        (tmp_path / name).chmod(0o600)
    mine, theirs = another(port, keys=tmp_path / "one"), another(port, keys=tmp_path / "two")
    wanted = Objects(objects(range(3)).block_hashes, 0, FORM, tenant="acme")
    assert mine.write(wanted, filled(range(3))).wait(20)
    assert mine.lookup(wanted).all()
    raw = client(port).call("GET", PREFIX + mine._with_stored_keys(wanted).keys[0])
    assert page(0)[:64].tobytes() not in raw, "nothing in the clear"
    assert not theirs.lookup(wanted).any()
    for _ in range(2):
        transfer = theirs.read(wanted, memory(3))
        assert transfer.wait(20)
        assert (transfer.results == Outcome.MISSING).all()
    transfer = mine.read(wanted, got := memory(3))
    assert transfer.wait(20)
    assert check_bytes(transfer, range(3), got) == 3
    nobody = Objects(objects(range(3, 5)).block_hashes, 0, FORM, tenant="other")
    transfer = mine.write(nobody, filled(range(3, 5)))
    assert transfer.wait(20)
    assert (transfer.results == Outcome.FAILED).all()
    assert "not stored in the clear: tenant 'other' has no key" in transfer.reason
    assert not mine.lookup(nobody).any()
    assert mine.drop(nobody) == 0
    transfer = mine.read(nobody, memory(2))
    assert transfer.wait(20)
    assert (transfer.results == Outcome.LOCKED).all()
    mine.close()
    theirs.close()


def test_an_invalid_reply_ends_the_connection_only(port: int) -> None:
    resp = client(port)
    with pytest.raises(RedisReplyError, match="unknown command"):
        resp.call("NOSUCH")
    assert resp.call("PING") == b"PONG"
    big = np.arange(300_000, dtype=np.uint32).tobytes()
    assert resp.call("SET", "kvloom-test", [big[:10], memoryview(big)[10:]]) == b"OK"
    assert resp.call("GET", "kvloom-test") == big
    resp.send([("GET", "kvloom-test"), ("PING",)])
    assert resp.read_value_into(lambda length: None) == len(big)
    assert resp.read_reply() == b"PONG"
    resp.send([("PING",)])
    with pytest.raises(ValueError, match="not a Redis string"):
        resp.read_value_into(lambda length: None)
    resp.call("DEL", "kvloom-test")
    resp.close()


def test_a_form_too_large_for_the_store_is_refused(tier: RemoteTier) -> None:
    big = Form("f", "x", CAPACITY, CAPACITY)
    with pytest.raises(ValueError, match="does not fit redis://"):
        tier.write(objects([1], big), memory(1, CAPACITY))


def test_invalid_counts_of_a_server_are_clamped(port: int) -> None:
    with_counts = client(port)
    with_counts.call("FLUSHALL")
    with_counts.call("HSET", "kvloom/1:counts", "bytes", "9" * 40, "evicted", "-5")
    tier = another(port)
    assert tier.stats().bytes == (1 << 63) - 1
    assert tier.stats().evicted == 0
    tier.close()
    with_counts.call("FLUSHALL")
    with_counts.close()


def test_pages_that_are_not_used_expire(tier: RemoteTier, port: int) -> None:
    """Expiry is set by the test, so that the outcome does not depend on the machine's speed."""
    with pytest.raises(ValueError, match="ttl=-1 is not a number of seconds"):
        open_tier(f"redis://127.0.0.1:{port}/0?capacity=64MiB&ttl=-1")
    expiring = open_tier(f"redis://127.0.0.1:{port}/0?capacity=64MiB&ttl=3600")
    form = Form("bf16", "LKTHD", 4096, 4096)
    objects = Objects([bytes([number]) * 16 for number in range(4)], 0, form)
    pages = np.arange(4 * 4096, dtype=np.uint8)
    ranges = Ranges(pages, np.arange(4) * 4096)
    assert expiring.write(objects, ranges).wait(20)
    connection = client(port)
    names = [PREFIX + key for key in objects.keys]
    assert all(3_000_000 < connection.call("PTTL", name) <= 3_600_000 for name in names)
    for name in names:
        connection.call("PEXPIRE", name, 1_000_000)
    back = np.zeros_like(pages)
    one = Objects(objects.block_hashes[:1], 0, form)
    transfer = expiring.read(one, Ranges(back, [0]))
    assert transfer.wait_released(20)
    assert transfer.results.tolist() == [Outcome.OK]
    assert connection.call("PTTL", names[0]) > 3_000_000, "a read renews it"
    assert connection.call("PTTL", names[1]) <= 1_000_000
    for name in names[1:]:
        connection.call("PEXPIRE", name, 0)
    assert expiring.lookup(objects).tolist() == [True, False, False, False]
    again = Objects([b"x" * 16], 0, form)
    assert expiring.write(again, Ranges(pages, [0])).wait(20)
    assert expiring.stats().objects == 2, "expired pages are not counted after the next write"
    assert tier.write(Objects([b"y" * 16], 0, form), Ranges(pages, [0])).wait(20)
    assert connection.call("PTTL", PREFIX + Objects([b"y" * 16], 0, form).keys[0]) == -1
    connection.close()
    expiring.close()
