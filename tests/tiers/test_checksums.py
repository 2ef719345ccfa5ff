"""Checksums of runs: the native loops and the package agree, and neither takes what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from kvloom.tiers import aligned_bytes
from kvloom.tiers.disk import Files, SystemFiles
from kvloom.tiers.encoding import checksums


@pytest.fixture
def native() -> ModuleType:
    found: ModuleType = pytest.importorskip(
        "kvloom.tiers._native", reason="built without a C compiler; the package xxhash serves alone"
    )
    return found


def plain(data: bytes, run_bytes: int) -> bytes:
    """Return the checksums of the package xxhash, run by run."""
    runs = [data[at : at + run_bytes] for at in range(0, len(data), run_bytes)]
    return b"".join(xxhash.xxh3_64_intdigest(run).to_bytes(8, "little") for run in runs)


@settings(deadline=None, max_examples=60)
@given(
    run_bytes=st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 65536])),
    runs=st.integers(0, 4),
    seed=st.binary(min_size=1, max_size=8),
    offset=st.integers(0, 9),
)
def test_native_checksums_equal_those_of_the_package(
    run_bytes: int, runs: int, seed: bytes, offset: int
) -> None:
    data = (seed * (run_bytes * runs // len(seed) + 1))[: run_bytes * runs]
    page = memoryview(bytes(offset) + data)[offset:]
    assert checksums.run_checksums(page, run_bytes) == plain(data, run_bytes)


def test_native_checksums_of_every_length(native: ModuleType) -> None:
    data = os.urandom(5000)
    for length in (*range(600), 1024, 4096, 5000):
        assert native.checksum(data[:length]) == xxhash.xxh3_64_intdigest(data[:length]), length


def test_a_disk_tier_needs_no_package_for_its_checksums(native: ModuleType, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from kvloom.tiers import open_tier\n"
        f"tier = open_tier('disk:{tmp_path}:64MiB'); print(tier.name); tier.close()\n"
        f"tier = open_tier('disk:{tmp_path}:64MiB'); tier.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("wide", [True, False])
def test_a_copy_is_equal_with_and_without_native_code(
    native: ModuleType, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3 * 70_000)
    if not wide:
        monkeypatch.setattr(checksums, "_native", None)
    for arrived in (True, False):
        into = bytearray(len(data))
        sums = checksums.copy_checked(memoryview(into), memoryview(data), 70_000, arrived)
        assert into == data
        assert sums == plain(data, 70_000)


@pytest.mark.parametrize("files", [Files, SystemFiles])
def test_a_read_returns_its_length_and_checksums(files: type[Files], tmp_path: Path) -> None:
    data = os.urandom(300 << 10)  # more than is read at once
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        for run_bytes in (4096, 100 << 10):
            into = aligned_bytes(300 << 10)[: 300 << 10]
            told = files(-1).read_checked(fd, into, 0, run_bytes)
            assert told == (300 << 10, plain(data, run_bytes))
            assert into == data
        into = aligned_bytes(300 << 10)[: 300 << 10]
        came, sums = files(-1).read_checked(fd, into, 100 << 10, 100 << 10)  # the last third is not there
        assert came == 200 << 10
        assert sums[:16] == plain(data[100 << 10 :], 100 << 10)
        with pytest.raises(OSError, match="Bad file descriptor"):
            files(-1).read_checked(-1, into, 0, 4096)
    finally:
        os.close(fd)


def test_native_code_refuses_invalid_lengths(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="1000 bytes are not whole runs of 300"):
        native.checksums(bytes(1000), 300)
    with pytest.raises(ValueError, match="not whole runs of 0"):
        native.checksums(bytes(1000), 0)
    with pytest.raises(ValueError, match="1000 bytes do not go into 500"):
        native.copy(bytearray(500), bytes(1000), 500, True)
    with pytest.raises(ValueError, match="reads of 100 bytes"):
        native.read(0, bytearray(1000), 0, 500, 100)
    with pytest.raises(ValueError, match="pieces of 100 bytes"):
        native.send(0, bytes(1000), 500, 100, 0.0)
    with pytest.raises((TypeError, BufferError)):
        native.copy(bytes(500), bytes(500), 500, True)
