"""A tier of another package: found by its entry point, conforming, and used by an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from kvloom.tiers import Objects, OpenTier, check_tiers, known_schemes, open_tier, open_with_policy
from kvloom.tiers.testing.conformance import Harness, TierConformance
from tests.engine.test_offload import PATIENT, POOL, closed, drawn, served
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

SOURCE = Path(__file__).parent / "toy_tier.py"


def install(folder: Path, entry_points: str, package: str = "toy") -> None:
    """Write what an installer writes: a module and its metadata."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvloom.tiers]\n{entry_points}\n")


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of packages on sys.path, with the toy tier installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy_package.py").write_text(SOURCE.read_text())
    install(folder, "toy = toy_package:parse_url")
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("toy_package", None)


class ToyHarness(Harness):
    def flip(self, wanted: Objects) -> None:
        for key in wanted.keys:
            if key in self.tier.pages:
                page, checksum = self.tier.pages[key]
                self.tier.pages[key] = bytes([page[0] ^ 1]) + page[1:], checksum

    def swap(self, first: Objects, second: Objects) -> None:
        for one, other in zip(first.keys, second.keys, strict=True):
            pages = self.tier.pages
            pages[one], pages[other] = pages[other], pages[one]
            assert crc32(pages[one][0]) != crc32(pages[other][0])


class TestToyTier(TierConformance):
    @pytest.fixture(autouse=True)
    def installed(self, site: Path) -> None:
        pass

    def make(self, folder: Path) -> Harness:
        return ToyHarness(open_tier("toy:?capacity=4MiB"))


@pytest.mark.usefixtures("site")
def test_an_entry_point_adds_a_scheme_and_is_imported_on_first_use() -> None:
    assert "toy" in known_schemes()
    assert "toy_package" not in sys.modules
    check_tiers(["host:64MiB", "disk:/nowhere:1GiB", "toy:?capacity=1MiB&write=second-use"])
    opened = open_with_policy("toy:?capacity=1MiB&write=second-use")
    assert (opened.tier.name, opened.write_policy, opened.is_lossy) == ("toy", "second-use", False)
    with pytest.raises(
        ValueError, match=r"toy:\?capacity=1MiB&speed=9: unknown options speed; known: capacity"
    ):
        check_tiers(["toy:?capacity=1MiB&speed=9"])


@pytest.mark.usefixtures("site")
def test_a_tier_of_another_package_works_inside_a_lossy_tier() -> None:
    tier = open_tier("int8:toy:?capacity=1MiB")
    assert tier.name == "int8:toy"
    tier.close()


def test_an_entry_point_that_cannot_be_imported_is_reported(site: Path) -> None:
    install(site, "broken = absent_package:parse_url", "broken")
    with pytest.raises(ValueError, match=r"'broken'.*'absent_package:parse_url' cannot be loaded.*reinstall"):
        open_tier("broken:1MiB")


def test_two_packages_with_one_scheme_are_refused_and_own_schemes_take_precedence(site: Path) -> None:
    install(site, "toy = other_package:parse_url\nhost = other_package:parse_url", "other")
    with pytest.raises(ValueError, match="'toy' needs one entry point"):
        open_tier("toy:?capacity=1MiB")
    assert open_tier("host:64MiB").name == "host"


@pytest.mark.usefixtures("site")
def test_an_engine_offloads_to_and_loads_from_a_tier_of_another_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = drawn("toy", 70, 50)
    wanted = expected(tiny("llama"), prompts, 8)
    engine = make_engine(tiny("llama"), POOL, tiers=["toy:?capacity=64MiB"], offload=PATIENT)
    assert engine.offload is not None
    store: Any = engine.offload.transfers.tiers[0].tier
    monkeypatch.setattr(store, "close", lambda: None)  # as a remote store: pages outlive the engine
    assert [request.tokens for request in served(engine, prompts)] == wanted
    closed(engine)
    assert store.stats().writes["ok"] > 0
    engine = make_engine(tiny("llama"), POOL, tiers=[OpenTier(store)], offload=PATIENT)
    requests = served(engine, prompts)
    assert [request.tokens for request in requests] == wanted
    assert all(request.cached_tokens >= 32 for request in requests)
    closed(engine)
