"""Time to live, quotas and weights over real servers: S3's protocol, Mooncake's master, NIXL's files, Redis, peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvloom.tiers import (
    HostConfig,
    HostTier,
    Objects,
    Outcome,
    Share,
    SupportsShares,
    Tier,
    open_with_policy,
)
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from kvloom.tiers.testing.conformance import FORM, PAGE, block_hash, filled, get, memory, objects, put

from .servers import mooncake_master, redis_server, s3_bucket

pytestmark = [pytest.mark.server, pytest.mark.slow]
MIB = 1 << 20
CAPACITY = 8 * MIB
TTL = 100.0


def s3_url(folder: Path) -> AbstractContextManager[str]:
    return s3_bucket(folder, CAPACITY)


@contextlib.contextmanager
def mooncake_url(folder: Path, segment: int = 64 * MIB) -> Iterator[str]:
    with mooncake_master(folder) as (port, _):
        from kvloom.tiers.remote import MooncakeConfig
        from kvloom.tiers.remote.mooncake_client import MooncakeClient

        storage = MooncakeClient(MooncakeConfig(f"127.0.0.1:{port}", segment=segment), 20.0)
        storage.get()
        yield f"mooncake://127.0.0.1:{port}?capacity={CAPACITY}&timeout=20"
        storage.close()


@contextlib.contextmanager
def nixl_url(folder: Path) -> Iterator[str]:
    pytest.importorskip("nixl._api", reason="pip install --no-deps nixl nixl-cu12", exc_type=ImportError)
    yield f"nixl://{folder}/kv?capacity={CAPACITY}&durable=process"


@contextlib.contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    with redis_server(folder) as (port, _):
        yield f"redis://127.0.0.1:{port}/0?capacity={CAPACITY}&timeout=20"


@contextlib.contextmanager
def peer_url(folder: Path) -> Iterator[str]:
    memory = SharedMemory(CAPACITY)
    server = PeerServer(HostTier(HostConfig(CAPACITY, MIB), buffer=memory.buffer), PeerConfig(), memory)
    yield "peer://{}:{}?timeout=20".format(*server.address)
    server.close()


SHARED = [s3_url, mooncake_url, redis_url]
Url = Callable[[Path], AbstractContextManager[str]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of tiers that store the time in the value. Redis has its own."""
    fake = SimpleNamespace(at=1_800_000_000.0)
    fake.time = lambda: fake.at
    monkeypatch.setattr("kvloom.tiers.ttl.time", fake)
    return fake


@pytest.mark.parametrize("url_of", [s3_url, mooncake_url, nixl_url])
def test_an_expired_page_is_a_miss_and_can_be_stored_again(
    url_of: Url, clock: SimpleNamespace, tmp_path: Path
) -> None:
    with url_of(tmp_path) as url:
        tier = open_with_policy(f"{url}&ttl={TTL:g}").tier
        assert put(tier, range(4)).ok.all()
        clock.at += TTL - 1
        assert get(tier, range(4)).ok.all()
        if url_of is not nixl_url:  # a second process may read, too; a directory has one owner
            other = open_with_policy(f"{url}&ttl={TTL:g}").tier
            assert get(other, range(4)).ok.all()
            other.close()
        clock.at += 2
        assert get(tier, range(4)).results.tolist() == [Outcome.MISSING] * 4
        assert not tier.lookup(objects(range(4))).any()
        assert put(tier, range(4)).ok.all()
        assert get(tier, range(4)).ok.all()
        tier.close()


def put_for(tier: Tier, tenant: str, numbers: range) -> None:
    wanted = Objects([block_hash(n) for n in numbers], 0, FORM, tenant)
    for at in range(len(numbers)):
        one = Objects(wanted.block_hashes[at : at + 1], 0, FORM, tenant)
        transfer = tier.write(one, filled(numbers[at : at + 1]))
        assert transfer.wait_released(60)
        assert transfer.ok.all(), transfer


def found_of(tier: Tier, tenant: str, numbers: range) -> list[bool]:
    wanted = Objects([block_hash(n) for n in numbers], 0, FORM, tenant)
    transfer = tier.read(wanted, memory(len(numbers)))
    assert transfer.wait_released(60)
    return list(np.asarray(transfer.ok).tolist())


@pytest.mark.parametrize("url_of", [*SHARED, nixl_url])
def test_a_tenant_above_its_quota_loses_its_oldest_pages_only(url_of: Url, tmp_path: Path) -> None:
    with url_of(tmp_path) as url:
        quota = 8 * PAGE / CAPACITY if url_of is not nixl_url else 0.5  # segments of files are larger
        tier = open_with_policy(url, {"small": Share(limit=quota)}).tier
        put_for(tier, "large", range(100, 116))
        most = int(quota * CAPACITY) // PAGE
        put_for(tier, "small", range(2 * most))
        found = found_of(tier, "small", range(2 * most))
        assert 0 < sum(found) <= most
        assert found == sorted(found), "the oldest pages are lost"
        assert all(found_of(tier, "large", range(100, 116)))
        tier.close()


def put_batches(tier: Tier, tenant: str, numbers: range, step: int = 8) -> None:
    for at in range(0, len(numbers), step):
        some = numbers[at : at + step]
        transfer = tier.write(Objects([block_hash(n) for n in some], 0, FORM, tenant), filled(some))
        assert transfer.wait_released(60)


# Slow over S3: its many small writes take half a minute, and all stores share this code.
@pytest.mark.parametrize(
    "url_of", [pytest.param(s3_url, marks=pytest.mark.slow), mooncake_url, redis_url, peer_url]
)
def test_tenants_divide_a_full_store_by_weight(url_of: Url, tmp_path: Path) -> None:
    """Weights 3:1. Both tenants write more than the capacity. Each keeps its part, whoever writes last."""
    pages = CAPACITY // PAGE
    shares = {"gold": Share(guaranteed=0.75), "free": Share(guaranteed=0.25)}
    with url_of(tmp_path) as url:
        tier = open_with_policy(url, shares).tier
        assert isinstance(tier, SupportsShares)
        put_batches(tier, "free", range(1000, 1000 + pages))
        alone = sum(found_of(tier, "free", range(1000, 1000 + pages)))
        assert alone > 0.9 * pages, "alone it uses all of the capacity"
        put_batches(tier, "gold", range(2 * pages))
        put_batches(tier, "free", range(2000, 2000 + 2 * pages))
        gold = sum(found_of(tier, "gold", range(2 * pages)))
        free = sum(found_of(tier, "free", range(1000, 2000 + 2 * pages)))
        assert 0.7 * pages < gold <= 0.75 * pages + 8
        assert 0.2 * pages < free <= 0.25 * pages + 8
        assert tier.stats().bytes <= CAPACITY
        assert tier.used_by("gold") + tier.used_by("free") <= CAPACITY
        assert tier.used_by("gold") >= gold * PAGE
        assert tier.stats().tenants == {name: tier.used_by(name) for name in shares}
        put_batches(tier, "", range(5000, 5000 + pages // 2))
        assert sum(found_of(tier, "gold", range(2 * pages))) >= gold - 8, (
            "a tenant without a share evicts none of it"
        )
        tier.close()


@pytest.mark.parametrize("url_of", [mooncake_url, redis_url, peer_url])
def test_a_tenant_that_stores_less_often_still_reaches_its_part(url_of: Url, tmp_path: Path) -> None:
    pages = CAPACITY // PAGE
    with url_of(tmp_path) as url:
        tier = open_with_policy(url, {"calm": Share(guaranteed=0.5)}).tier
        for number in range(pages // 2 - 8):
            put_batches(tier, "flood", range(1000 + 8 * number, 1008 + 8 * number))
            put_batches(tier, "calm", range(number, number + 1))
        assert all(found_of(tier, "calm", range(pages // 2 - 8)))
        tier.close()


def test_a_mooncake_master_evicts_pages_within_a_weight_last(tmp_path: Path) -> None:
    """The capacity of the tier is larger than the store, so the master evicts."""
    with mooncake_url(tmp_path, segment=16 * MIB) as url:
        url = url.replace(f"capacity={CAPACITY}", f"capacity={32 * MIB}")
        tier = open_with_policy(url, {"gold": Share(guaranteed=0.125)}).tier
        pages = 4 * MIB // PAGE
        put_batches(tier, "plain", range(1000, 1000 + pages - 4))
        put_batches(tier, "gold", range(pages - 4))
        put_batches(tier, "flood", range(2000, 2000 + 6 * pages))
        plain, gold = (
            found_of(tier, "plain", range(1000, 1000 + pages - 4)),
            found_of(tier, "gold", range(pages - 4)),
        )
        assert sum(plain) < pages // 4, "the master evicts old pages"
        assert sum(gold) > 3 * pages // 4, "a soft pin is a strong hint"
        tier.close()


def test_clients_of_a_peer_share_quotas_and_weights(tmp_path: Path) -> None:
    pages = CAPACITY // PAGE
    shares = {"small": Share(limit=0.25), "sure": Share(guaranteed=0.25)}
    with peer_url(tmp_path) as url:
        one, other = (open_with_policy(url, shares).tier for _ in range(2))
        plain = open_with_policy(url).tier
        assert isinstance(one, SupportsShares)
        assert isinstance(other, SupportsShares)
        put_batches(one, "small", range(pages // 4))
        put_batches(other, "small", range(1000, 1000 + pages // 4))
        assert sum(found_of(one, "small", range(1000 + pages // 4))) <= pages // 4
        assert 0 < one.used_by("small") == other.used_by("small") <= CAPACITY // 4
        put_batches(one, "sure", range(2000, 2000 + pages // 4))
        put_batches(plain, "flood", range(3000, 3000 + 2 * pages))
        assert all(found_of(other, "sure", range(2000, 2000 + pages // 4)))
        one.close()  # the only client that wrote for this tenant
        stored = other.used_by("sure")
        deadline = time.monotonic() + 60
        while other.used_by("sure") == stored:
            assert time.monotonic() < deadline, "its guarantee has ended, so other pages evict it"
            put_batches(plain, "flood", range(9000, 9000 + pages))
            plain.drop(Objects([block_hash(n) for n in range(9000, 9000 + pages)], 0, FORM, "flood"))
            put_batches(plain, "flood", range(3000, 3000 + pages))
        other.close()
        plain.close()
