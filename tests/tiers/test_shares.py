"""Shares of a tier: limits and guarantees of tenants, also after a restart."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.core import HASH_BYTES, Tenant
from kvloom.tiers import (
    DiskConfig,
    DiskTier,
    Form,
    HostConfig,
    HostTier,
    Objects,
    Outcome,
    Ranges,
    Share,
    Shares,
    SupportsShares,
    TierError,
    open_with_policy,
    tenant_shares,
)
from kvloom.tiers.disk import Files
from kvloom.tiers.host import MAX_TENANTS, SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from kvloom.tiers.remote import CapacityTracker, RemoteConfig, Usage, store_tier
from kvloom.tiers.remote.redis_protocol import RespConnection
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.testing import Faults, FaultyFiles

from .memory_store import MemoryStore
from .servers import redis_server

MIB = 1 << 20
PAGE = 16 << 10
FORM = Form("bf16", "LKTHD", PAGE, PAGE)
CAPACITY = 8 * MIB


def disk(folder: Path, shares: Shares, **changes: Any) -> DiskTier:
    tier = DiskTier(
        DiskConfig(folder, CAPACITY, segment_bytes=512 << 10, durable="process", direct=False, **changes)
    )
    tier.set_shares(shares)
    return tier


def host(folder: Path, shares: Shares) -> HostTier:
    tier = HostTier(HostConfig(CAPACITY, slab_bytes=256 << 10))
    tier.set_shares(shares)
    return tier


MAKERS = [host, disk]
Maker = Callable[[Path, Shares], Any]


def of(tenant: str, numbers: range, form: Form = FORM) -> Objects:
    names = [f"{tenant}/{number}".encode().ljust(HASH_BYTES, b".") for number in numbers]
    return Objects(names, 0, form, tenant)


def put(tier: Any, objects: Objects) -> list[int]:
    size = objects.form.page_bytes
    pages = np.repeat(np.array([name[-1] ^ name[0] for name in objects.block_hashes], np.uint8), size)
    transfer = tier.write(objects, Ranges(pages, np.arange(len(objects)) * size))
    assert transfer.wait_released(20)
    results: list[int] = transfer.results.tolist()
    return results


def there(tier: Any, objects: Objects) -> int:
    return int(tier.lookup(objects).sum())


@pytest.mark.parametrize("make", MAKERS)
def test_a_tenant_at_its_limit_evicts_its_own_oldest_pages(make: Maker, tmp_path: Path) -> None:
    tier = make(tmp_path, {"small": Share(limit=0.25)})
    assert isinstance(tier, SupportsShares)
    put(tier, of("other", range(100)))
    for first in range(0, 600, 20):
        put(tier, of("small", range(first, first + 20)))
        assert tier.used_by("small") <= CAPACITY // 4
    assert there(tier, of("other", range(100))) == 100, "other tenants lose no pages to it"
    assert there(tier, of("small", range(580, 600))) == 20
    assert 64 <= there(tier, of("small", range(600))) <= 128
    assert not there(tier, of("small", range(400)))
    tier.close()


@pytest.mark.parametrize("make", MAKERS)
def test_guaranteed_pages_are_not_evicted_for_others(make: Maker, tmp_path: Path) -> None:
    tier = make(tmp_path, {"sure": Share(guaranteed=0.5), "other": Share(guaranteed=0.25)})
    put(tier, of("sure", range(160)))
    assert tier.used_by("sure") <= CAPACITY // 2
    for first in range(0, 1500, 50):
        put(tier, of("other", range(first, first + 50)))
        put(tier, of("nobody", range(first, first + 20)))
    assert there(tier, of("sure", range(160))) == 160
    put(tier, of("sure", range(1000, 1600)))  # above its guarantee it evicts pages of others above theirs
    assert there(tier, of("sure", range(1000, 1600))) > 160
    assert tier.used_by("other") >= CAPACITY // 4 - 2 * (512 << 10)
    assert tier.stats().bytes <= CAPACITY
    tier.close()


@pytest.mark.parametrize("make", MAKERS)
def test_tenants_without_a_share_have_a_common_account(make: Maker, tmp_path: Path) -> None:
    tier = make(tmp_path, {"": Share(limit=0.25), "own": Share(limit=0.5)})
    for tenant in ("one", "two", "three"):
        put(tier, of(tenant, range(100)))
    put(tier, of("own", range(100)))
    assert tier.used_by("one") == tier.used_by("two") <= CAPACITY // 4
    assert there(tier, of("own", range(100))) == 100
    tier.close()


@pytest.mark.parametrize("make", MAKERS)
def test_a_share_smaller_than_a_page_stores_none_and_reports_full(make: Maker, tmp_path: Path) -> None:
    tier = make(tmp_path, {"none": Share(limit=0.0), "tiny": Share(limit=0.001)})
    for tenant in ("none", "tiny"):
        assert set(put(tier, of(tenant, range(20)))) == {Outcome.FULL}
        assert not there(tier, of(tenant, range(20)))
    assert set(put(tier, of("other", range(20)))) == {Outcome.OK}
    tier.close()


def test_more_owners_than_fit_the_disk_exceed_no_limit(tmp_path: Path) -> None:
    tenants = [f"t{number}" for number in range(20)]
    tier = disk(tmp_path, {tenant: Share(limit=0.5) for tenant in tenants})
    for round_ in range(6):
        for tenant in tenants:
            assert set(put(tier, of(tenant, range(round_ * 10, round_ * 10 + 10)))) == {Outcome.OK}
            assert sum(path.stat().st_size for path in tmp_path.glob("*.seg")) <= CAPACITY
    tier.close()


def test_shares_apply_after_a_restart_and_lowered_ones_immediately(tmp_path: Path) -> None:
    tier = disk(tmp_path, {"a": Share(limit=0.5)})
    put(tier, of("a", range(160)))
    put(tier, of("b", range(50)))
    before, kept = tier.used_by("a"), there(tier, of("a", range(160)))
    assert kept == 160
    tier.close()
    tier = disk(tmp_path, {"a": Share(limit=0.5)})
    assert there(tier, of("a", range(160))) == 160
    assert tier.used_by("a") <= max(before, CAPACITY // 2)
    tier.close()
    tier = disk(tmp_path, {"a": Share(limit=0.25)})
    assert tier.used_by("a") <= CAPACITY // 4
    assert there(tier, of("b", range(50))) == 50
    assert 0 < there(tier, of("a", range(160))) < 160
    tier.close()
    tier = disk(tmp_path, {})  # without shares all segments are shared
    assert there(tier, of("a", range(160)))
    assert there(tier, of("b", range(50))) == 50
    put(tier, of("c", range(2000)))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.seg")) <= CAPACITY
    tier.close()


def test_many_restarts_do_not_leave_a_tenant_many_files(tmp_path: Path) -> None:
    for number in range(20):
        tier = disk(tmp_path, {"a": Share(limit=0.5)})
        put(tier, of("a", range(number, number + 1)))
        tier.close()
    assert len(list(tmp_path.glob("*.seg"))) <= 2
    tier = disk(tmp_path, {"a": Share(limit=0.5)})
    assert there(tier, of("a", range(20))) == 20
    tier.close()


def test_large_pages_enlarge_a_tenants_segments(tmp_path: Path) -> None:
    tier = disk(tmp_path, {"a": Share(limit=0.125)})  # 1 MiB in segments of 256 KiB
    large = Form("bf16", "LKTHD", 300 << 10, 300 << 10)
    assert set(put(tier, of("a", range(6), large))) == {Outcome.OK}
    assert tier.used_by("a") <= MIB
    assert there(tier, of("a", range(5, 6), large)) == 1
    assert set(put(tier, of("a", range(3), Form("bf16", "LKTHD", 400 << 10, 400 << 10)))) == {Outcome.FULL}
    tier.close()


def test_host_accounts_stay_correct_under_random_tenants_and_sizes() -> None:
    rng = random.Random(7)
    tier = host(Path(), {"a": Share(0.25, 0.1), "b": Share(1.0, 0.4), "c": Share(0.5)})
    forms = [Form("bf16", "LKTHD", size << 10, size << 10) for size in (16, 48, 256)]
    leases = []
    for _ in range(1500):
        tenant, form = rng.choice("abcd"), rng.choice(forms)
        first = rng.randrange(300)
        some = of(tenant, range(first, first + rng.randrange(1, 12)), form)
        act = rng.random()
        if act < 0.6:
            lease = tier.reserve(some)
            lease.release(np.array([rng.random() < 0.9 for _ in some.block_hashes]))
        elif act < 0.8:
            leases.append(tier.acquire(some))
        elif act < 0.9:
            tier.drop(some)
        while len(leases) > 6:
            leases.pop(rng.randrange(len(leases))).release()
        assert tier.used_by("a") <= CAPACITY // 4
        assert tier.used_by("c") <= CAPACITY // 2
        used = sum(tier.used_by(one) for one in "abcd")
        assert used == tier.stats().bytes <= CAPACITY
    for lease in leases:
        lease.release()
    for account in tier.index.accounts:
        assert account.used == int(tier._slots.size[account.order.oldest(len(tier.index.entries))].sum())
    assert sum(len(account.order.oldest(1 << 20)) for account in tier.index.accounts) == len(
        tier.index.entries
    )
    assert tier.stats().evicted


def test_shares_are_computed_from_quotas_and_weights() -> None:
    tenants = [Tenant("", None, 1), Tenant("a", 256, 1), Tenant("b", 4096, 2), Tenant("c")]
    assert tenant_shares(tenants, 1024) == {"": Share(1, 0.25), "a": Share(0.25, 0.25), "b": Share(1, 0.5)}
    assert tenant_shares([Tenant("a", 256), Tenant("b")], 1024) == {"a": Share(0.25)}
    with pytest.raises(ValueError, match=r"limit=1\.5 is not a fraction"):
        Share(limit=1.5)


def test_shares_are_set_once_and_a_disk_error_is_reported(tmp_path: Path) -> None:
    tier = host(tmp_path, {"a": Share(0.5)})
    with pytest.raises(ValueError, match="once"):
        tier.set_shares({"a": Share(0.5)})
    first = disk(tmp_path, {"a": Share(1.0)})
    put(first, of("a", range(300)))
    first.close()
    faults = Faults()

    class Stubborn(FaultyFiles):
        def remove(self, name: str) -> None:
            if faults.failing:
                raise PermissionError(13, "Permission denied")
            super().remove(name)

    def files(directory: int) -> Files:
        return Stubborn(directory, Faults())

    again = DiskTier(DiskConfig(tmp_path, CAPACITY, segment_bytes=512 << 10), files)
    faults.failing = True
    with pytest.raises(TierError, match="cannot free space"):
        again.set_shares({"a": Share(0.1)})
    again.close()


def test_a_tier_opened_by_url_enforces_shares(tmp_path: Path) -> None:
    tier = open_with_policy(f"disk:{tmp_path}:64MiB?write=back", {"a": Share(0.5)}).tier
    assert isinstance(tier, DiskTier)
    put(tier, of("a", range(10)))
    assert 0 < tier.used_by("a") < tier.capacity // 2
    assert not tier.used_by("b")
    tier.close()


def test_space_freed_for_a_tenant_is_used_by_that_tenant() -> None:
    tier = HostTier(HostConfig(8192, slab_bytes=4096))
    tier.set_shares({"large": Share(1.0, 0.0), "small": Share(1.0, 0.3), "other": Share(1.0, 0.3)})
    small, large = (Form("bf16", "LKTHD", size, size) for size in (1536, 4096))
    assert put(tier, of("large", range(1), large)) == [Outcome.OK]
    assert put(tier, of("other", range(1), small)) == [Outcome.OK]
    # One page is free beside the other's; for the second the large page is evicted.
    assert put(tier, of("small", range(2), small)) == [Outcome.OK, Outcome.OK]


@contextlib.contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    with redis_server(folder) as (port, _):
        yield f"redis://127.0.0.1:{port}/0?capacity=8MiB"


@contextlib.contextmanager
def peer_url(folder: Path) -> Iterator[str]:
    memory = SharedMemory(CAPACITY)
    server = PeerServer(HostTier(HostConfig(CAPACITY, 256 << 10), buffer=memory.buffer), PeerConfig(), memory)
    yield "peer://{}:{}".format(*server.address)
    server.close()


@pytest.mark.server
@pytest.mark.parametrize("url_of", [redis_url, peer_url])
def test_a_tenant_stores_no_more_than_its_limit_in_a_store(url_of: Any, tmp_path: Path) -> None:
    limit = CAPACITY // 4
    pages = limit // PAGE
    with url_of(tmp_path) as url:
        tier = open_with_policy(url, {"a": Share(0.25)}).tier
        assert isinstance(tier, SupportsShares)
        put(tier, of("b", range(64)))
        for first in range(0, 2 * pages, 16):
            assert put(tier, of("a", range(first, first + 16))) == [Outcome.OK] * 16
            assert tier.used_by("a") <= limit
        kept = limit // (tier.used_by("a") // there(tier, of("a", range(2 * pages))))
        assert pages - 2 <= kept <= pages, "Redis also counts heads"
        assert there(tier, of("a", range(2 * pages))) == kept
        newest = there(tier, of("a", range(2 * pages - kept, 2 * pages)))
        assert newest >= kept - 16, "its newest pages remain; two threads write each batch"
        assert there(tier, of("b", range(64))) == 64, "no other tenant lost a page"
        before = tier.used_by("a")
        tier.drop(of("a", range(2 * pages - 8, 2 * pages)))
        assert tier.used_by("a") == before - before // kept * 8
        common = 64 * PAGE if url_of is peer_url else 0
        assert tier.used_by("b") == common, "a peer counts the common account, Redis does not"
        tier.close()


WRITER = """
import sys
from kvloom.tiers import Share, open_with_policy
from tests.tiers.test_shares import of, put
url, first = sys.argv[1], int(sys.argv[2])
tier = open_with_policy(url, {"a": Share(0.25)}).tier
for at in range(first, first + 512, 8):
    put(tier, of("a", range(at, at + 8)))
    print(tier.used_by("a"), flush=True)
tier.close()
"""


@pytest.mark.server
def test_processes_that_share_a_redis_server_share_a_quota(tmp_path: Path) -> None:
    """Each process stores more than the quota, at the same time."""
    limit = CAPACITY // 4
    with redis_url(tmp_path) as url:
        tier = open_with_policy(url, {"a": Share(0.25)}).tier
        assert isinstance(tier, SupportsShares)
        put(tier, of("b", range(32)))
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, url, str(first)], stdout=subprocess.PIPE, text=True
            )
            for first in (0, 1000)
        ]
        seen = [int(line) for writer in writers for line in writer.communicate(timeout=120)[0].split()]
        assert [writer.returncode for writer in writers] == [0, 0]
        assert len(seen) == 2 * 512 // 8
        assert limit // 2 < max(seen) <= limit
        stored = [there(tier, of("a", range(first, first + 512))) for first in (0, 1000)]
        assert sum(stored) * PAGE <= limit < (sum(stored) + 4) * PAGE
        assert there(tier, of("b", range(32))) == 32, "no other tenant lost a page"
        tier.close()


@pytest.mark.server
def test_a_redis_server_guarantees_a_tenants_part(tmp_path: Path) -> None:
    shares = {"sure": Share(guaranteed=0.25)}
    with redis_url(tmp_path) as url:
        tier, other = open_with_policy(url, shares).tier, open_with_policy(url).tier
        assert isinstance(tier, SupportsShares)
        pages = CAPACITY // PAGE
        for at in range(0, pages // 2, 16):
            put(tier, of("sure", range(at, at + 16)))
        for at in range(0, 2 * pages, 16):  # a server without shares honours them, too
            assert put(other, of("flood", range(at, at + 16))) == [Outcome.OK] * 16
        kept = there(tier, of("sure", range(pages // 2)))
        assert pages // 4 - 2 <= kept <= pages // 4, "what is above the guarantee was evicted"
        assert there(tier, of("flood", range(2 * pages - 64, 2 * pages))) == 64
        assert tier.stats().bytes <= CAPACITY
        tier.drop(of("sure", range(pages // 2)))
        assert tier.used_by("sure") == 0
        tier.close()
        other.close()


@pytest.mark.server
def test_a_redis_server_with_clients_of_an_earlier_release_stays_consistent(tmp_path: Path) -> None:
    """Such a client evicts pages without counting them for their tenant."""
    with redis_server(tmp_path) as (port, _):
        tier = open_with_policy(f"redis://127.0.0.1:{port}/0?capacity=8MiB", {"a": Share(0.25)}).tier
        assert isinstance(tier, SupportsShares)
        put(tier, of("a", range(8)))
        put(tier, of("a", range(8, 16)))
        client = RespConnection(("127.0.0.1", port), 5)
        for key in of("a", range(8)).keys:
            assert client.call("UNLINK", PREFIX + key) == 1
            client.call("ZREM", "kvloom/1:used", PREFIX + key)
        before = tier.used_by("a")
        put(tier, of("a", range(100, 101)))
        assert tier.used_by("a") == before // 16 * 9
        client.close()
        tier.close()


def reserved(tracker: CapacityTracker, tenant: str, *names: int) -> tuple[list[int], list[int]]:
    """Reserve values of 10 bytes. Return the refused and the evicted names."""
    keys = {bytes([name]): 10 for name in names}
    accepted, evicted = tracker.reserve(keys, tenant)
    return [key[0] for key in keys if key not in accepted], [key[0] for key in evicted]


def test_a_tracker_evicts_the_oldest_value_within_shares() -> None:
    tracker = CapacityTracker(100)
    tracker.set_shares({"gold": Share(guaranteed=0.5), "small": Share(limit=0.3)})
    assert reserved(tracker, "gold", *range(7)) == ([], [])
    assert reserved(tracker, "small", *range(10, 13)) == ([], [])
    assert reserved(tracker, "small", 13) == ([], [10]), "at its limit a tenant evicts its own value"
    tracker.touch([bytes([0])])
    assert reserved(tracker, "other", 20, 21) == ([], [1, 2]), "gold is above its guarantee"
    assert reserved(tracker, "other", 22, 23) == ([], [11, 12]), "gold is within its guarantee"
    assert (tracker.used_by("gold"), tracker.used_by("small")) == (50, 10)
    assert tracker.used_by("other") == tracker.used_by("") == 40
    tracker.remove([bytes([3])])
    assert reserved(tracker, "gold", 7) == ([], []), "there is space"
    tracker.remove([bytes([0]), bytes([4])])
    assert reserved(tracker, "other", 24, 25) == ([], [])
    assert reserved(tracker, "gold", 8, 9) == ([], [13, 20]), "below its guarantee gold evicts only others"
    assert tracker.usage() == Usage(10, 100, 7, {"gold": 50, "small": 0})
    with pytest.raises(ValueError, match="once, before the first page"):
        tracker.set_shares({})


def test_a_tracker_refuses_values_that_fit_no_share() -> None:
    tracker = CapacityTracker(100)
    tracker.set_shares({"gold": Share(guaranteed=1.0), "small": Share(limit=0.2)})
    assert reserved(tracker, "small", *range(5)) == ([0, 1, 2], []), "more than its limit in one batch"
    assert reserved(tracker, "gold", *range(10, 20)) == ([], [3, 4])
    assert reserved(tracker, "small", 5) == ([5], [])
    assert reserved(tracker, "other", 6) == ([6], [])
    assert tracker.used_by("gold") == tracker.usage().bytes == 100


def test_a_tracker_marks_no_more_than_the_guaranteed_bytes() -> None:
    """A store that evicts by itself gets the mark, and evicts these values last."""
    tracker = CapacityTracker(100)
    tracker.set_shares({"gold": Share(guaranteed=0.2)})
    keys = [bytes([name]) for name in range(5)]
    accepted, _ = tracker.reserve(dict.fromkeys(keys, 10), "gold")
    assert accepted == {keys[0]: True, keys[1]: True, keys[2]: False, keys[3]: False, keys[4]: False}
    assert tracker.reserve({b"x": 10})[0] == {b"x": False}, "the common account has no guarantee"
    tracker.remove(keys[:1])
    assert tracker.reserve({b"y": 10, b"z": 10}, "gold")[0] == {b"y": True, b"z": False}


def test_values_that_could_not_be_evicted_are_evicted_first_later() -> None:
    tracker = CapacityTracker(30)
    reserved(tracker, "", 0, 1, 2)
    _, evicted = tracker.reserve({b"x": 20})
    tracker.remove([b"x"])
    tracker.restore(evicted)
    assert tracker.usage() == Usage(3, 30, 0)
    assert reserved(tracker, "", 3) == ([], [0])


class FailingStore(MemoryStore):
    fails = ""

    def evict(self, keys: Sequence[bytes]) -> None:
        if self.fails == "evict":
            raise OSError("no route")
        super().evict(keys)

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        if self.fails == "put":
            raise OSError("no route")
        return super().put(items, tenant)


@pytest.mark.parametrize("fails", ["evict", "put"])
def test_a_store_that_fails_is_counted_correctly(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that may still be in the store is counted. A value that was not stored is not."""
    values: dict[bytes, bytes] = {}
    config = RemoteConfig(MIB, writers=1, readers=1, pending_bytes=CAPACITY)
    tier = store_tier("memory", config, lambda: FailingStore(values))
    for at in range(0, 80, 4):
        put(tier, of("a", range(at, at + 4)))
    stored = sum(map(len, values.values()))
    assert tier.stats().bytes == stored <= MIB
    monkeypatch.setattr(FailingStore, "fails", fails)
    assert put(tier, of("a", range(100, 104))) == [Outcome.FAILED] * 4
    assert tier.stats().bytes == sum(map(len, values.values()))
    monkeypatch.setattr(FailingStore, "fails", "")
    deadline = time.monotonic() + 60
    while put(tier, of("a", range(100, 104))) != [Outcome.OK] * 4:  # it pauses after a failure
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tier.stats().bytes == sum(map(len, values.values())) <= MIB
    tier.close()


def test_shares_of_a_host_tier_may_be_set_later() -> None:
    tier = HostTier(HostConfig(CAPACITY, 256 << 10))
    put(tier, of("a", range(4)))
    assert tier.set_account("a", CAPACITY // 4, CAPACITY)
    assert tier.used_by("a") == 0, "earlier pages stay in the common account"
    assert tier.set_account("b", CAPACITY, CAPACITY // 2)
    put(tier, of("b", range(CAPACITY // PAGE)))
    for at in range(0, 2 * CAPACITY // PAGE, 16):
        put(tier, of("a", range(at, at + 16)))
    assert tier.used_by("a") == CAPACITY // 4
    assert tier.used_by("b") == CAPACITY // 4 * 3, (
        "all was guaranteed to the first, so this tenant has no guarantee"
    )
    tier.end_guarantee("a")
    for number in range(MAX_TENANTS - 2):
        assert tier.set_account(f"t{number}", CAPACITY, 1)
    assert not tier.set_account("one more", CAPACITY, 1)
    tier.drop(of("a", range(2 * CAPACITY // PAGE)))
    assert tier.set_account("one more", CAPACITY, 1), "takes the place of a tenant without pages"
    assert "a" not in tier.stats().tenants
