"""NIXL: the disk tier's conformance with transfers by the POSIX plug-in, and a peer's by UCX."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.tiers import DiskConfig, DiskTier, HostConfig, HostTier, Objects, TierError, open_tier
from kvloom.tiers.peer import NixlArena, PeerConfig, PeerServer, open_peer
from kvloom.tiers.remote import RemoteConfig, make_agent, open_nixl
from kvloom.tiers.testing.conformance import Harness, TierConformance, get, put

from .test_disk_tier import DiskHarness
from .test_host_tier import HostHarness

pytestmark = pytest.mark.server
pytest.importorskip("nixl._api", reason="no NIXL: pip install --no-deps nixl nixl-cu12", exc_type=ImportError)

MIB = 1 << 20


def opened(folder: Path) -> DiskTier:
    return open_nixl(DiskConfig(folder / "tier", 8 * MIB, segment_bytes=MIB, durable="process"))


def gds_loads() -> bool:
    try:
        make_agent("GDS")
    except TierError:
        return False
    return True


class TestNixlFiles(TierConformance):
    def make(self, folder: Path) -> Harness:
        return DiskHarness(opened(folder))


def test_the_disk_tier_reads_pages_written_by_nixl(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    assert put(tier, range(8)).ok.all()
    assert get(tier, range(8)).ok.all()
    assert tier._files.moved >= 16 * 64 * 1024  # type: ignore[attr-defined]
    tier.close()
    plain = DiskTier(DiskConfig(tmp_path / "tier", 8 * MIB, segment_bytes=MIB))
    assert get(plain, range(8)).ok.all()
    plain.close()


def test_a_missing_plug_in_is_reported_and_bad_urls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'TAPE' is none of"):
        open_tier(f"nixl://{tmp_path}/t?capacity=1GiB&backend=TAPE")
    with pytest.raises(ValueError, match="unknown options color"):
        open_tier(f"nixl://{tmp_path}/t?capacity=1GiB&color=red")
    with pytest.raises(ValueError, match="write nixl:///directory"):
        open_tier("nixl://host/path?capacity=1GiB")
    if not gds_loads():
        with pytest.raises(TierError, match="plug-in GDS cannot be loaded"):
            open_tier(f"nixl://{tmp_path}/g?capacity=1GiB&backend=GDS")
    tier = open_tier(f"nixl://{tmp_path}/t?capacity=1GiB&compression=lz4")
    assert put(tier, range(2)).ok.all()
    tier.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[HostTier, PeerServer]]:
    tier = HostTier(HostConfig(4 * MIB, slab_bytes=256 << 10))
    server = PeerServer(tier, PeerConfig(), nixl=NixlArena(tier.arena))
    yield tier, server
    server.close()


class PeerHarness(HostHarness):
    host: HostTier

    def flip(self, wanted: Objects) -> None:
        HostHarness(self.host).flip(wanted)

    def swap(self, first: Objects, second: Objects) -> None:
        HostHarness(self.host).swap(first, second)


class TestPeerByNixl(TierConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared: tuple[HostTier, PeerServer]) -> None:
        self.host, self.peer = shared
        for key, slot in list(self.host.index.entries.items()):
            self.host.index.remove(key, slot)

    def make(self, folder: Path) -> Harness:
        config = RemoteConfig(1, readers=1, writers=1, timeout=10)
        harness = PeerHarness(open_peer(self.peer.address, by="nixl", config=config))
        harness.host = self.host
        return harness


def test_idle_agents_use_no_processor_time(shared: tuple[HostTier, PeerServer]) -> None:
    tier = open_peer(shared[1].address, by="nixl", config=RemoteConfig(1, timeout=10))
    assert put(tier, range(4)).ok.all()
    spent, began = time.process_time(), time.monotonic()
    time.sleep(1)
    assert time.process_time() - spent < 0.3 * (
        time.monotonic() - began
    )  # each thread that spins has nearly a core
    assert get(tier, range(4)).ok.all()
    tier.close()


def test_a_peer_without_nixl_reports_it() -> None:
    server = PeerServer(HostTier(HostConfig(MIB, slab_bytes=65536)), PeerConfig())
    with pytest.raises(TierError, match="does not offer NIXL"):
        open_peer(server.address, by="nixl")
    with pytest.raises(TierError, match="cannot be mapped"):
        open_peer(server.address, by="shared")
    server.close()
