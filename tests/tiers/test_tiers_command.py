"""`kvloom tiers`: what it shows, that it finds damage, and that it drops what was asked for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.cli import main
from kvloom.core import HASH_BYTES
from kvloom.tiers import Form, Objects, Outcome, Ranges, Share, open_with_policy
from kvloom.tiers.remote.redis_protocol import RespConnection
from kvloom.tiers.remote.store_tier import PREFIX

from .servers import redis_server

PAGE = 16 << 10
FORM = Form("bf16", "LKTHD", PAGE, PAGE // 2)


def stored(url: str, tenant: str = "", count: int = 8, shares: Any = None, keep: bool = False) -> Any:
    tier = open_with_policy(url, shares).tier
    names = [f"{tenant}/{number}".encode().ljust(HASH_BYTES, b".") for number in range(count)]
    pages = np.random.default_rng(0).integers(0, 256, count * PAGE, dtype=np.uint8)
    objects = Objects(names, 3, FORM, tenant)
    transfer = tier.write(objects, Ranges(pages, np.arange(count) * PAGE))
    assert transfer.wait_released(20)
    assert (transfer.results == Outcome.OK).all()
    if keep:
        return tier, objects
    tier.close()
    return objects


def called(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main(["tiers", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def damage_disk(folder: Path) -> None:
    (segment,) = folder.glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-PAGE + 5] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize("options", ["", "?compression=lz4", "?keys"])
def test_a_disk_is_listed_checked_and_purged(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options == "?keys":
        keys = tmp_path / "keys.json"
        keys.write_text('{"*": "' + "5c" * 32 + '"}')
        keys.chmod(0o600)
        options = f"?keys={keys}&protect=authenticate"
    folder = tmp_path / "kv"
    url = f"disk:{folder}:64MiB{options}"
    objects = stored(url)
    code, listed = called(capsys, "ls", url)
    assert (code, listed["objects"], listed["version"]) == (0, 8, "1")
    assert sum(listed["formats"].values()) == 8
    assert listed["bytes"] >= 8 * PAGE
    assert listed["capacity"] == 64 << 20
    if "keys" not in options:
        assert next(iter(listed["formats"])).startswith(f"group 3 form {FORM.fingerprint[:4].hex()}")
    assert main(["tiers", "ls", url]) == 0
    text = capsys.readouterr().out
    assert "objects      8" in text
    assert "tenants      without a share: 8" in text
    assert called(capsys, "check", url)[1]["intact"] == 8
    damage_disk(folder)
    code, checked = called(capsys, "check", url)
    assert (code, checked["damaged"], checked["intact"]) == (1, 1, 7)
    assert main(["tiers", "check", url]) == 1
    assert "corrupt" in capsys.readouterr().out
    assert called(capsys, "purge", url)[1]["dropped"] == 0, "only with --yes"
    assert called(capsys, "ls", url)[1]["objects"] == 8
    code, purged = called(capsys, "purge", url, "--yes")
    assert (code, purged["dropped"]) == (0, 8)
    assert called(capsys, "ls", url)[1]["objects"] == 0
    assert not list(folder.glob("*.seg")), "files without pages are removed"
    tier = open_with_policy(url).tier
    assert not tier.lookup(objects).any()
    tier.close()


def test_purge_chooses_by_tenant_and_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"disk:{tmp_path}:64MiB"
    shares = {"a": Share(0.5)}
    stored(url, "a", 5, shares)
    stored(url, "b", 3, shares)
    listed = called(capsys, "ls", url)[1]
    assert sorted(listed["tenants"].values()) == [3, 5]
    assert called(capsys, "purge", url, "--older-than", "3600")[1]["chosen"] == 0
    for segment in tmp_path.glob("*.seg"):
        os.utime(segment, (time.time() - 7200,) * 2)
    assert called(capsys, "purge", url, "--older-than", "3600")[1]["chosen"] == 8
    assert called(capsys, "purge", url, "--tenant", "a", "--yes")[1]["dropped"] == 5
    assert list(called(capsys, "ls", url)[1]["tenants"].values()) == [3]


def test_a_disk_in_use_is_read_but_not_purged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"disk:{tmp_path}:64MiB"
    tier, objects = stored(url, keep=True)
    assert called(capsys, "ls", url)[1]["objects"] == 8
    code, checked = called(capsys, "check", url)
    assert (code, checked["intact"]) == (0, 8)
    assert main(["tiers", "purge", url, "--yes"]) == 2
    assert "in use by process" in capsys.readouterr().err
    assert tier.lookup(objects).all()
    tier.close()


def test_tiers_without_a_list_and_missing_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, text in (
        (["ls", f"disk:{tmp_path}/none:64MiB"], "cannot be read"),
        (["ls", "host:64MiB"], "memory of its server"),
        (["purge", "peer://127.0.0.1:1", "--yes"], "cannot be listed"),
        (["check", f"disk:{tmp_path}:64MiB", "--sample", "0"], "must be 1 or more"),
        (["ls", "tape:1"], "no known scheme"),
    ):
        assert main(["tiers", *argv]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "none").exists(), "listing creates nothing"


@pytest.mark.server
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_redis_server_is_listed_checked_and_purged(
    compression: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with redis_server(tmp_path) as (port, _):
        url = f"redis://127.0.0.1:{port}/0?capacity=64MiB&compression={compression}"
        tier, objects = stored(url, keep=True)
        code, listed = called(capsys, "ls", url)
        assert (code, listed["objects"], listed["version"]) == (0, 8, "1")
        assert called(capsys, "check", url)[1]["intact"] == 8
        assert called(capsys, "check", url, "--sample", "3")[1]["checked"] == 3
        client = RespConnection(("127.0.0.1", port), 5)
        client.call("SETRANGE", PREFIX + objects.keys[2], PAGE // 2, b"\x00\x01\x02\x03\x04\x05")
        code, checked = called(capsys, "check", url)
        assert (code, checked["damaged"]) == (1, 1)
        assert checked["damaged_pages"] == [f"{objects.keys[2].hex()}: corrupt"]
        assert called(capsys, "purge", url, "--older-than", "3600", "--yes")[1]["dropped"] == 0
        assert called(capsys, "purge", url, "--yes")[1]["dropped"] == 8
        assert not tier.lookup(objects).any()
        assert tier.stats().bytes == 0
        shares = {"a": Share(0.5)}
        stored(url, "a", 5, shares)
        stored(url, "b", 3, shares)
        assert sorted(called(capsys, "ls", url)[1]["tenants"].values()) == [3, 5]
        assert called(capsys, "purge", url, "--tenant", "a", "--yes")[1]["dropped"] == 5
        assert list(called(capsys, "ls", url)[1]["tenants"]) == ["without a share"]
        client.close()
        tier.close()
