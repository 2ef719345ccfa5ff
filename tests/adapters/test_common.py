"""What the adapters share: URLs of tiers, tested versions, and pages in tiers for threads that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvloom.adapters.common import (
    EngineVersion,
    TierPages,
    WaitingPages,
    check_tier_urls,
    host_url,
    number,
    of_rank,
    tier_list,
    weights_digest,
)
from kvloom.tiers import Form, Objects, OpenTier, open_tier
from kvloom.tiers.testing import Faults, FaultyTier

SIZE = 4096
FORM = Form(dtype="bytes", order="test", page_bytes=SIZE, run_bytes=SIZE)


def objects(*numbers: int) -> Objects:
    return Objects([n.to_bytes(16, "little") for n in numbers], 0, FORM)


def content(number: int) -> npt.NDArray[np.uint8]:
    return np.full(SIZE, number % 251 + 1, np.uint8)


@contextmanager
def opened(host: str, *others: OpenTier, seconds: float = 5.0) -> Iterator[WaitingPages]:
    pages = WaitingPages(TierPages([host], SIZE, others=list(others)), seconds)
    try:
        yield pages
    finally:
        pages.close()


def store(pages: WaitingPages, *numbers: int) -> list[bool]:
    def copy(at: Any, offsets: Any) -> None:
        for i, offset in zip(at.tolist(), offsets.tolist(), strict=True):
            pages.tiers.arena[offset : offset + SIZE] = content(numbers[i])

    found: list[bool] = pages.store(objects(*numbers), copy).tolist()
    return found


def load(pages: WaitingPages, *numbers: int) -> list[bool]:
    """Load pages and compare their bytes."""

    def copy(at: Any, offsets: Any) -> None:
        for i, offset in zip(at.tolist(), offsets.tolist(), strict=True):
            assert (pages.tiers.arena[offset : offset + SIZE] == content(numbers[i])).all()

    found: list[bool] = pages.load(objects(*numbers), copy).tolist()
    return found


def wait_for(is_true: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'kv'}:16MiB"
    with opened("host:1MiB", OpenTier(open_tier(url))) as pages:
        assert store(pages, 1, 2, 3) == [True] * 3
        assert pages.counts.stored == 3
        assert load(pages, 1, 2, 3) == [True] * 3
    with opened("host:1MiB", OpenTier(open_tier(url))) as pages:
        assert [m.tolist() for m in pages.lookup([objects(1, 9), objects(3)])] == [[True, False], [True]]
        assert load(pages, 3, 9, 1) == [True, False, True]
        assert (pages.counts.loaded, pages.counts.missed) == (2, 1)


def test_a_batch_may_be_larger_than_host_memory(tmp_path: Path) -> None:
    many = range(1000)  # 4 MiB
    url = f"disk:{tmp_path / 'kv'}:64MiB"
    with opened("host:512KiB", OpenTier(open_tier(url)), seconds=60) as pages:
        assert all(store(pages, *many))
    with opened("host:512KiB", OpenTier(open_tier(url)), seconds=60) as pages:
        assert all(load(pages, *many))


def test_stores_wait_for_a_slower_tier(tmp_path: Path) -> None:
    """Without the wait, host memory would evict pages before they are written."""
    faults = Faults(slow=0.02)
    url = f"disk:{tmp_path / 'kv'}:64MiB"
    with opened("host:512KiB", OpenTier(FaultyTier(open_tier(url), faults)), seconds=60) as pages:
        for first in range(0, 500, 20):
            assert all(store(pages, *range(first, first + 20)))
        assert pages.tiers.manager.queues[0].skipped_stores == 0
    with opened("host:512KiB", OpenTier(open_tier(url)), seconds=60) as pages:
        assert all(load(pages, *range(500)))


@pytest.mark.parametrize("fault", [{"failing": True}, {"hung": True}, {"slow": 2.0}])
def test_a_faulty_tier_is_a_miss(fault: dict[str, Any], tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'kv'}:16MiB"
    with opened("host:1MiB", OpenTier(open_tier(url))) as pages:
        store(pages, 1, 2)
    faults = Faults(**fault)
    with opened("host:1MiB", OpenTier(FaultyTier(open_tier(url), faults)), seconds=0.3) as pages:
        assert load(pages, 1, 2) == [False, False]
        wait_for(lambda: sum(pages.tiers.manager.fault_log.counts.values()) > 0)
        assert store(pages, 3) == [True]  # in host memory
        assert load(pages, 3) == [True]
        faults.release()


def test_several_threads_store_and_load(tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'kv'}:64MiB?write=back"
    tier = OpenTier(open_tier(url.removesuffix("?write=back")), "back")
    errors: list[BaseException] = []
    with opened("host:512KiB", tier, seconds=60) as pages:

        def work(thread: int) -> None:
            try:
                for turn in range(30):
                    numbers = [(thread % 2) * 1000 + turn * 8 + i for i in range(8)]
                    assert all(store(pages, *numbers))
                    load(pages, *numbers)
                    pages.lookup([objects(*numbers)])
            except BaseException as error:  # noqa: BLE001  reported below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not errors


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["disk:/kv:1GiB"], "write {rank} into the path"),
        (["int8:disk:/kv:1GiB"], "remove int8:"),
        (["host:1GiB?share=7000"], "cannot be shared"),
        (["nothing:/kv"], "no known scheme"),
    ],
)
def test_unusable_tiers_are_refused(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tier_urls(urls, "an engine", 2)


def test_settings() -> None:
    assert tier_list({"tiers": ["host:1GiB"]}, "x") == ("host:1GiB",)
    for wrong in (None, [], "host:1GiB", [1]):
        with pytest.raises(ValueError, match="x needs tiers"):
            tier_list({"tiers": wrong}, "x")
    assert number({}, "n", 2) == 2
    for value in (-1, True, "1"):
        with pytest.raises(ValueError, match=r"n .* must be a number"):
            number({"n": value}, "n", 2)
    assert of_rank(["disk:/kv-{rank}:1GiB"], 3) == ["disk:/kv-3:1GiB"]
    assert host_url(["disk:/kv:1GiB", "host:2GiB"]).capacity == 2 << 30
    assert host_url(["disk:/kv:1GiB"]).capacity == 1 << 30


def test_a_page_must_fit_into_host_memory() -> None:
    with pytest.raises(ValueError, match="no space for a page"):
        TierPages(["host:64KiB"], 1 << 20)


@pytest.mark.parametrize(
    ("tested", "found", "outcome"),
    [
        ("0.32", "0.32.7", "same"),
        ("0.32", "0.33.0rc1", "newer"),
        ("0.32", "0.31.2", "older"),
        ("0.32", None, "missing"),
        ("0.5.23", "0.5.23.post1", "same"),
        ("0.5.23", "0.5.24", "newer"),
        ("0.5.23", "0.6", "newer"),
        ("0.5.23", "0.5.9", "older"),
    ],
)
def test_versions(
    tested: str,
    found: str | None,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    version = EngineVersion("Engine", "kvloom.adapters.engine", ("engine",), tested)
    monkeypatch.setattr(EngineVersion, "installed", lambda _: found)
    if outcome in ("older", "missing"):
        with pytest.raises(ImportError, match=f"needs Engine {tested}"):
            version.check()
    else:
        version.check()
        assert (f"is tested with Engine {tested}, found {found}" in caplog.text) == (outcome == "newer")


def test_weights_are_identified_by_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1000))
    before = weights_digest(str(tmp_path), None)
    assert before == weights_digest(str(tmp_path), None)
    file.write_bytes(bytes(999) + b"\1")
    assert before != weights_digest(str(tmp_path), None)
    with pytest.raises(ValueError, match="not found"):
        weights_digest("no/such-model", None)
