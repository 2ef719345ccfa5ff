"""The disk tier's directory and files against other users: symbolic links, foreign owners, modes."""

from __future__ import annotations

import logging
import os
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvloom.tiers import TierError
from kvloom.tiers.encoding import checksum
from kvloom.tiers.testing.conformance import get, put

from .test_disk_tier import opened

PRECIOUS = b"a file that no tier may touch\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.mark.parametrize("name", ["lock", "dropped"])
def test_a_symbolic_link_is_refused_and_its_target_stays_unchanged(
    tmp_path: Path, precious: Path, name: str
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(precious)
    with pytest.raises(TierError, match=f"'{name}' is a symbolic link: remove it"):
        opened(folder)
    assert precious.read_bytes() == PRECIOUS
    (folder / name).unlink()
    opened(folder).close()


def test_a_dangling_symbolic_link_creates_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    for name in ("lock", "dropped"):
        (folder / name).symlink_to(tmp_path / "created")
        with pytest.raises(TierError, match="is a symbolic link"):
            opened(folder)
        (folder / name).unlink()
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "directory"])
def test_a_segment_that_is_not_a_regular_file_is_neither_read_nor_removed(
    tmp_path: Path, precious: Path, kind: str
) -> None:
    folder = tmp_path / "kv"
    first = opened(folder)
    assert put(first, range(4)).ok.all()
    first.close()
    planted = folder / "000000000777.seg"
    if kind == "link":
        planted.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious, planted)
    elif kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    tier = opened(folder)
    assert any("000000000777.seg" in note for note in tier.stats().notes)
    assert get(tier, range(4)).ok.all()
    for start in range(10, 300, 50):  # more than fits: segments are evicted
        assert put(tier, range(start, start + 50)).wait(20)
    tier.close()
    assert os.path.lexists(planted)
    assert precious.read_bytes() == PRECIOUS


def test_a_foreign_file_named_lock_is_not_truncated(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    (folder / "lock").write_bytes(PRECIOUS)
    with pytest.raises(TierError, match="'lock' is not the lock of a disk tier"):
        opened(folder)
    assert (folder / "lock").read_bytes() == PRECIOUS
    (folder / "lock").write_text("4194304\n")  # as a killed process leaves it
    opened(folder).close()


def test_a_hard_link_named_lock_is_refused(tmp_path: Path, precious: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    os.link(precious, folder / "lock")
    with pytest.raises(TierError, match="2 hard links"):
        opened(folder)
    assert precious.read_bytes() == PRECIOUS


def test_files_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv"
    opened(folder).close()
    stranger = os.geteuid() + 1000
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(TierError, match=f"'lock' belongs to user .*, not to user {stranger}"):
        opened(folder)


def test_a_world_writable_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "kvloom.tiers"):
        opened(folder).close()  # our own: a warning
    assert f"run chmod 700 {folder}" in caplog.text
    (folder / "lock").unlink()
    (folder / "dropped").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(
        TierError, match=r"every user may replace its files \(mode 777\). Use a directory inside"
    ):
        opened(folder)
    assert not list(folder.iterdir())


def test_a_directory_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link = tmp_path / "kv", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    opened(link).close()  # a link of this user: a usual path of a disk
    if os.geteuid() == 0:
        os.chown(link, 54321, 54321, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(TierError, match="created this symbolic link"):
        opened(link)


def test_directories_and_files_are_private_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = opened(tmp_path / "a" / "b" / "kv")
        assert put(tier, range(4)).ok.all()
        tier.close()
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "kv"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list((tmp_path / "a" / "b" / "kv").iterdir())
    assert {"lock", "dropped"} < {file.name for file in files}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


@pytest.mark.parametrize("name", [f"{(1 << 64) - 1}.seg", "9" * 200 + ".seg", "999999999999999.seg"])
def test_a_planted_segment_number_does_not_end_writes(tmp_path: Path, name: str) -> None:
    """The number of a new segment must neither follow it nor exceed its field."""
    (tmp_path / name).symlink_to("nowhere")
    (tmp_path / "000000000000.seg").symlink_to("nowhere")
    for start in (0, 10):
        tier = opened(tmp_path)
        assert put(tier, range(start, start + 10)).ok.all()
        assert get(tier, range(start + 10)).ok.all()
        tier.close()
    assert max(len(path.name) for path in tmp_path.glob("*.seg") if path.is_file()) == len("000000000000.seg")


def test_a_tombstone_with_an_excessive_number_does_not_end_writes(tmp_path: Path) -> None:
    opened(tmp_path).close()
    line = struct.pack("<36sQQ", bytes(36), (1 << 64) - 1, 0)
    (tmp_path / "dropped").write_bytes(line + checksum(line).to_bytes(8, "little"))
    tier = opened(tmp_path)
    assert put(tier, range(10)).ok.all()
    tier.close()


AS_NOBODY = """
import os, sys
from pathlib import Path
from kvloom.tiers import DiskConfig, DiskTier
from kvloom.tiers.testing.conformance import get, put
os.setgroups([]); os.setgid(65534); os.setuid(65534)
tier = DiskTier(DiskConfig(Path(sys.argv[1]), 64 << 20, durable="process"))
print(tier.stats().notes, bool(put(tier, range(10)).ok.all()), bool(get(tier, range(10)).ok.all()))
tier.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_an_unreadable_file_of_another_user_is_not_evicted() -> None:
    """It neither counts as a segment nor fills the capacity; in a sticky directory it could not be removed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        planted = Path(folder) / "000000000000.seg"
        planted.touch(mode=0o600)
        os.truncate(planted, 1 << 40)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, folder], capture_output=True, text=True, timeout=60, check=False
        )
        assert "belongs to user 0, not to user 65534" in done.stdout, done.stdout + done.stderr
        assert done.stdout.endswith("True True\n")
        assert planted.exists()
