"""A bucket as a tier, by NIXL's object backend, on a real server of S3's protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.tiers import Objects, TierError, open_tier
from kvloom.tiers.remote import RemoteConfig, RemoteTier, S3Bucket, ValueRange, open_s3, s3
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.testing.conformance import Harness, TierConformance, get, objects, put

from .servers import s3_server, slow_gets, stopped

pytestmark = pytest.mark.server
CAPACITY = 8 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with s3_server(tmp_path_factory.mktemp("s3")) as (port, process):
            import boto3

            url = f"http://127.0.0.1:{port}"
            client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
            client.create_bucket(Bucket="kvpages")
            yield url, client, process


def opened(url: str, **options: Any) -> RemoteTier:
    config = RemoteConfig(CAPACITY, **{"timeout": 5.0, **options})
    return open_s3(S3Bucket("kvpages", "ours/", url), config)


class S3Harness(Harness):
    def __init__(self, tier: RemoteTier, client: Any) -> None:
        self.tier, self.client = tier, client

    def values(self, wanted: Objects) -> list[tuple[str, bytearray]]:
        found = []
        for key in wanted.keys:
            name = f"ours/{(PREFIX + key).hex()}"
            try:
                body = self.client.get_object(Bucket="kvpages", Key=name)["Body"].read()
            except self.client.exceptions.NoSuchKey:
                continue
            found.append((name, bytearray(body)))
        return found

    def replace(self, key: str, value: bytes) -> None:
        self.client.put_object(Bucket="kvpages", Key=key, Body=bytes(value))

    def flip(self, wanted: Objects) -> None:
        for key, value in self.values(wanted):
            value[len(value) * 2 // 3] ^= 8
            self.replace(key, value)

    def swap(self, first: Objects, second: Objects) -> None:
        ((a, one),), ((b, two),) = self.values(first), self.values(second)
        self.replace(a, two)
        self.replace(b, one)


@pytest.mark.slow  # other tiers run these tests in `make test`
class TestS3(TierConformance):
    @pytest.fixture(autouse=True)
    def bucket(self, server: Any) -> None:
        self.url, self.client, _ = server
        for item in self.client.list_objects_v2(Bucket="kvpages").get("Contents", ()):
            self.client.delete_object(Bucket="kvpages", Key=item["Key"])

    def make(self, folder: Path) -> Harness:
        return S3Harness(opened(self.url), self.client)


def test_two_servers_share_a_bucket_and_prefixes_separate_them(server: Any) -> None:
    url, *_ = server
    one, two = opened(url), opened(url, compression="lz4")
    other = open_s3(S3Bucket("kvpages", "theirs/", url), RemoteConfig(CAPACITY, timeout=5.0))
    assert put(one, range(3)).ok.all()
    assert put(two, range(3, 6)).ok.all()
    for reader in (one, two):
        assert get(reader, range(6)).ok.all()
    assert not other.lookup(objects(range(6))).any()
    for tier in (one, two, other):
        tier.close()


def test_a_hung_store_costs_a_bounded_wait_and_recovers(server: Any) -> None:
    url, _, process = server
    tier = opened(url, timeout=1.0)
    assert put(tier, range(2)).ok.all()
    with stopped(process):
        began = time.monotonic()
        transfer = get(tier, range(2))
        assert not transfer.ok.any()
        assert time.monotonic() - began < 10
    deadline = time.monotonic() + 40
    while not get(tier, range(2)).ok.all() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert get(tier, range(2)).ok.all()
    tier.close()


def test_an_opening_error_states_the_reason(server: Any) -> None:
    url, *_ = server
    with pytest.raises(TierError, match="cannot be reached: the bucket 'nobodys' does not exist"):
        open_tier(f"s3://nobodys?capacity=8MiB&endpoint={url}&timeout=2")
    with pytest.raises(ValueError, match="the bucket is missing"):
        open_tier("s3:///prefix?capacity=8MiB")
    with pytest.raises(ValueError, match="bukket"):
        open_tier("s3://kvpages?capacity=8MiB&bukket=1")


@pytest.mark.parametrize(
    "lengths", [(500,), (499, 500, 501, 508, 4000, 1), (500, None, 500), (0, 500), (8, 9)]
)
def test_values_of_any_length_are_read_despite_another_expected_length(
    server: Any, lengths: tuple[int | None, ...]
) -> None:
    url, client, _ = server
    tier = opened(url)
    store = tier._control._store.store  # type: ignore[union-attr]
    values = [None if n is None else bytes(i % 251 + 1 for i in range(n)) for n in lengths]
    keys = [f"length {n} {i} of {lengths}".encode() for i, n in enumerate(lengths)]
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            client.put_object(Bucket="kvpages", Key=f"ours/{key.hex()}", Body=value)
    for likely in (500, 8, 0):
        store.exists(keys)  # the store is there
        came: dict[int, bytearray] = {}

        def place(number: int, length: int, came: dict[int, bytearray] = came) -> list[memoryview]:
            came[number] = bytearray(length)
            return [memoryview(came[number])[: length // 2], memoryview(came[number])[length // 2 :]]

        got = store.get([ValueRange(key, max_bytes=5000, expected_bytes=likely) for key in keys], place)
        assert got == [len(value) if value else -1 for value in values]
        assert came == {i: value for i, value in enumerate(values) if value}
    tier.close()


def test_a_late_value_beside_a_missing_one_never_overwrites_another_page(server: Any) -> None:
    """NIXL reports a failed transfer while it still writes parts of it: here after later reads use the buffer."""
    url, client, _ = server
    names = [b"late", b"next", b"more", b"last"]
    for name in names:
        client.put_object(Bucket="kvpages", Key=f"ours/{name.hex()}", Body=name * 1250)
    waits = {b"late".hex(): [0.5], b"last".hex(): [1.0]}
    with slow_gets(int(url.rpartition(":")[2]), waits) as port:
        tier = opened(f"http://127.0.0.1:{port}")
        store = tier._control._store.store  # type: ignore[union-attr]
        store.exists(names)  # the store is there
        for asked in ([b"gone", b"late"], names[1:]):
            came: dict[bytes, bytearray] = {}

            def place(
                number: int, length: int, asked: list[bytes] = asked, came: dict[bytes, bytearray] = came
            ) -> list[memoryview]:
                came[asked[number]] = bytearray(length)
                return [memoryview(came[asked[number]])]

            got = store.get([ValueRange(name, max_bytes=6000, expected_bytes=5000) for name in asked], place)
            assert got == [-1 if name == b"gone" else 5000 for name in asked]
            assert came == {name: name * 1250 for name in asked if name != b"gone"}
        assert not any(waits.values())
        tier.close()


def test_a_read_from_an_unreachable_store_fails_immediately(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL alone would try for longer than anybody waits."""
    with s3_server(tmp_path) as (port, process):
        import boto3

        url = f"http://127.0.0.1:{port}"
        boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="kvpages")
        tier = opened(url)
        assert put(tier, range(4)).ok.all()
        assert get(tier, range(4)).ok.all()
        process.terminate()
        process.wait(5)
        monkeypatch.setattr(s3, "_RECENT_SECONDS", 0.0)  # no contact since
        began = time.monotonic()
        assert get(tier, range(4)).failed
        assert time.monotonic() - began < 15  # NIXL alone tries for 26 s
        tier.close()
