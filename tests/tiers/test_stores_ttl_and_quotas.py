"""Time to live and quotas over real servers: S3's protocol, Mooncake's master, NIXL's files, Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvloom.tiers import Objects, Outcome, Share, Tier, open_with_policy
from kvloom.tiers.testing.conformance import FORM, PAGE, block_hash, filled, get, memory, objects, put

from .servers import mooncake_master, redis_server, s3_bucket

pytestmark = pytest.mark.server
MIB = 1 << 20
CAPACITY = 8 * MIB
TTL = 100.0


def s3_url(folder: Path) -> AbstractContextManager[str]:
    return s3_bucket(folder, CAPACITY)


@contextlib.contextmanager
def mooncake_url(folder: Path) -> Iterator[str]:
    with mooncake_master(folder) as (port, _):
        from kvloom.tiers.remote import MooncakeConfig
        from kvloom.tiers.remote.mooncake_client import MooncakeClient

        storage = MooncakeClient(MooncakeConfig(f"127.0.0.1:{port}", segment=64 * MIB), 20.0)
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
