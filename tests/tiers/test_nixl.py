"""NIXL: the disk tier's conformance with its pages travelling by the POSIX plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.tiers import DiskConfig, DiskTier, TierError

from .conformance import Harness, TierConformance, get, put
from .test_disk import DiskHarness

pytestmark = pytest.mark.server
pytest.importorskip("nixl._api", reason="no NIXL: pip install --no-deps nixl nixl-cu12", exc_type=ImportError)
from kvloom.tiers.nixl import make_agent, open_from, open_nixl  # noqa: E402

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


def test_pages_travel_by_nixl_and_the_disk_tier_reads_them_without(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    assert put(tier, range(8)).ok.all()
    assert get(tier, range(8)).ok.all()
    assert tier._files.moved >= 16 * 64 * 1024  # type: ignore[attr-defined]
    tier.close()
    plain = DiskTier(DiskConfig(tmp_path / "tier", 8 * MIB, segment_bytes=MIB))
    assert get(plain, range(8)).ok.all()
    plain.close()


def test_a_plug_in_that_does_not_load_is_said_and_an_address_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'TAPE' is none of"):
        open_from(f"nixl://{tmp_path}/t?capacity=1GiB&backend=TAPE")
    with pytest.raises(ValueError, match="unknown color"):
        open_from(f"nixl://{tmp_path}/t?capacity=1GiB&color=red")
    with pytest.raises(ValueError, match="write nixl:///directory"):
        open_from("nixl://host/path?capacity=1GiB")
    if not gds_loads():
        with pytest.raises(TierError, match="plug-in GDS does not load"):
            open_from(f"nixl://{tmp_path}/g?capacity=1GiB&backend=GDS")
    tier = open_from(f"nixl://{tmp_path}/t?capacity=1GiB&compression=lz4")
    assert put(tier, range(2)).ok.all()
    tier.close()
