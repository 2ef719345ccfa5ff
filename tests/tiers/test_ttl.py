"""The time to live of pages: an expired page is a miss in every tier, and its bytes are freed."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvloom.cli import main
from kvloom.core import HASH_BYTES
from kvloom.core.prefix.block_hash import hash_chain, root_hash, token_bytes
from kvloom.tiers import DiskConfig, DiskTier, Form, HostConfig, HostTier, Objects, Outcome, Ranges, Tier
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer, open_peer
from kvloom.tiers.registry import open_tier
from kvloom.tiers.remote import RemoteConfig, store_tier

from .memory_store import MemoryStore
from .test_stored_segments import SEGMENTS

PAGE = 16 << 10
FORM = Form("bf16", "LKTHD", PAGE, PAGE // 2)
TTL = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(at=1_800_000_000.0)
    fake.time = lambda: fake.at
    monkeypatch.setattr("kvloom.tiers.ttl.time", fake)
    return fake


def objects_of(label: str, count: int = 4) -> Objects:
    return Objects([f"{label}/{n}".encode().ljust(HASH_BYTES, b".") for n in range(count)], 0, FORM)


PAGES = np.random.default_rng(0).integers(0, 256, 4 * PAGE, dtype=np.uint8)
STARTS = np.arange(4) * PAGE


def store(tier: Tier, objects: Objects, pages: np.ndarray[Any, Any] = PAGES) -> None:
    transfer = tier.write(objects, Ranges(pages, STARTS))
    assert transfer.wait_released(20)
    assert transfer.ok.all(), transfer


def outcomes(tier: Tier, objects: Objects, expected: np.ndarray[Any, Any] = PAGES) -> set[Outcome]:
    back = np.zeros_like(PAGES)
    transfer = tier.read(objects, Ranges(back, STARTS))
    assert transfer.wait_released(20)
    assert not transfer.ok.all() or np.array_equal(back, expected)
    return {Outcome(result) for result in transfer.results.tolist()}


def remote(values: dict[bytes, bytes], ttl: float = TTL) -> Tier:
    return store_tier("memory", RemoteConfig(64 << 20, ttl=ttl), lambda: MemoryStore(values))


@pytest.mark.parametrize("kind", ["host", "disk", "store", "lz4"])
def test_an_expired_page_is_a_miss_and_can_be_stored_again(
    kind: str, clock: SimpleNamespace, tmp_path: Path
) -> None:
    values: dict[bytes, bytes] = {}
    opened: dict[str, Callable[[], Tier]] = {
        "host": lambda: HostTier(HostConfig(64 << 20, ttl=TTL)),
        "disk": lambda: DiskTier(DiskConfig(tmp_path, 64 << 20, ttl=TTL)),
        "lz4": lambda: DiskTier(DiskConfig(tmp_path, 64 << 20, ttl=TTL, compression="lz4")),
        "store": lambda: remote(values),
    }
    tier, objects = opened[kind](), objects_of("a")
    store(tier, objects)
    clock.at += TTL - 1
    assert tier.lookup(objects).all()
    assert outcomes(tier, objects) == {Outcome.OK}
    clock.at += 2
    assert outcomes(tier, objects) == {Outcome.MISSING}
    assert not tier.lookup(objects).any()
    newer = PAGES[::-1].copy()
    store(tier, objects, newer)
    assert outcomes(tier, objects, newer) == {Outcome.OK}
    assert tier.stats().objects == 4
    clock.at += TTL + 1
    assert not tier.lookup(objects).any()
    store(tier, objects)  # without a read in between
    assert outcomes(tier, objects) == {Outcome.OK}
    tier.close()


def test_expired_bytes_are_freed_at_lookup(clock: SimpleNamespace) -> None:
    values: dict[bytes, bytes] = {}
    host, shared, objects = HostTier(HostConfig(64 << 20, ttl=TTL)), remote(values), objects_of("a")
    for tier in (host, shared):
        store(tier, objects)
    assert values
    clock.at += TTL + 1
    for tier in (host, shared):
        assert not tier.lookup(objects).any()
    assert (host.stats().bytes, host.stats().objects, values) == (0, 0, {})
    host.close()
    shared.close()


def test_a_read_removes_an_expired_page_of_a_store(clock: SimpleNamespace) -> None:
    values: dict[bytes, bytes] = {}
    tier, objects = remote(values), objects_of("a")
    store(tier, objects)
    clock.at += TTL + 1
    assert outcomes(tier, objects) == {Outcome.MISSING}
    assert not values
    tier.close()


def test_a_store_without_ttl_keeps_its_pages(clock: SimpleNamespace) -> None:
    values: dict[bytes, bytes] = {}
    tier, objects = remote(values, ttl=0), objects_of("a")
    store(tier, objects)
    clock.at += 1e6
    assert outcomes(tier, objects) == {Outcome.OK}
    tier.close()


def test_ages_and_freed_files_survive_a_restart(clock: SimpleNamespace, tmp_path: Path) -> None:
    config = DiskConfig(tmp_path, 64 << 20, ttl=TTL)
    tier = DiskTier(config)
    store(tier, objects_of("old"))
    clock.at += TTL - 10
    tier.close()
    tier = DiskTier(config)
    assert outcomes(tier, objects_of("old")) == {Outcome.OK}
    store(tier, objects_of("new"))  # the same file
    clock.at += 20
    assert not tier.lookup(objects_of("old")).any()
    assert tier.lookup(objects_of("new")).all()
    store(tier, objects_of("next"))  # a new file, because the first has expired pages
    assert len(list(tmp_path.glob("*.seg"))) == 2
    tier.close()
    clock.at += TTL - 5
    tier = DiskTier(config)
    assert not tier.lookup(objects_of("new")).any()
    assert tier.lookup(objects_of("next")).all()
    assert len(list(tmp_path.glob("*.seg"))) == 1, "a file without unexpired pages is removed"
    tier.close()


def test_an_idle_disk_removes_expired_files(tmp_path: Path) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20, ttl=0.5))
    store(tier, objects_of("a"))
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("*.seg")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.glob("*.seg"))
    assert tier.stats().objects == 0
    store(tier, objects_of("b"))
    tier.close()


def test_pages_of_an_earlier_release_have_the_age_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "000000000000.seg"
    path.write_bytes(zlib.decompress(base64.b85decode(SEGMENTS["none"])))
    hashes = hash_chain(root_hash("a-model"), token_bytes(np.arange(32)))
    objects = Objects(hashes, 0, Form("bf16", "LKTHD", 2048, 512))
    os.utime(path, (time.time() - 1000,) * 2)
    for ttl, found in ((0, True), (2000, True), (2000, True), (500, False)):
        tier = DiskTier(DiskConfig(tmp_path, 64 << 20, ttl=ttl))
        assert tier.lookup(objects).all() == found
        tier.close()
    assert not path.exists()


def test_a_peer_does_not_serve_expired_pages(clock: SimpleNamespace) -> None:
    memory = SharedMemory(64 << 20)
    host = HostTier(HostConfig(64 << 20, ttl=TTL), buffer=memory.buffer)
    server = PeerServer(host, PeerConfig("127.0.0.1", 0), memory)
    tier, objects = open_peer(server.address), objects_of("a")
    store(tier, objects)
    assert outcomes(tier, objects) == {Outcome.OK}
    clock.at += TTL + 1
    assert not tier.lookup(objects).any()
    assert outcomes(tier, objects) == {Outcome.MISSING}
    tier.close()
    server.close()


def test_the_command_shows_and_purges_expired_pages(
    clock: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*argv: str) -> Any:
        assert main(["tiers", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    url = f"disk:{tmp_path}:64MiB?ttl={TTL:g}"
    tier = open_tier(url)
    store(tier, objects_of("old"))
    clock.at += TTL - 10
    store(tier, objects_of("new"))
    tier.close()
    assert called("ls", url)["expired"] == 0
    clock.at += 20
    assert (called("ls", url)["objects"], called("ls", url)["expired"]) == (8, 4)
    assert called("ls", url.partition("?")[0])["expired"] == 0
    checked = called("check", url)
    assert (checked["intact"], checked["expired"]) == (8, 4)
    assert called("purge", url, "--expired")["chosen"] == 4
    assert called("purge", url, "--expired", "--yes")["dropped"] == 4
    assert (called("ls", url)["objects"], called("ls", url)["expired"]) == (4, 0)


@pytest.mark.parametrize(
    "url", ["host:64MiB?ttl=-1", "disk:/nowhere:64MiB?ttl=-1", "s3://b?capacity=1GiB&ttl=1e12"]
)
def test_a_bad_ttl_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a number of seconds"):
        open_tier(url)
