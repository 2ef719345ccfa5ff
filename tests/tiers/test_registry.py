"""Tiers by URL: opening, write policies, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.tiers import (
    DiskTier,
    HostTier,
    TierError,
    check_tiers,
    open_tier,
    open_with_policy,
    parse_tier,
    split_write_policy,
)
from kvloom.tiers.registry import SCHEMES, Opener


def test_a_url_opens_its_tier(tmp_path: Path) -> None:
    host = open_tier("host:64MiB")
    assert isinstance(host, HostTier)
    assert host.capacity == 64 << 20
    disk = open_tier(f"disk:{tmp_path / 'a:b'}:1GiB?durable=process")
    assert isinstance(disk, DiskTier)
    assert (disk.capacity, disk.name) == (1 << 30, f"disk:{tmp_path / 'a:b'}")
    with pytest.raises(TierError):
        open_tier(f"disk:{tmp_path / 'a:b'}:1GiB")  # in use
    host.close()
    disk.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("tape:1GiB", "no known scheme.*host, disk"),
        ("host", "no known scheme"),
        ("host:many", "size 'many' is not understood"),
        ("host:0", "is nothing"),
        (
            "host:1GiB?speed=9",
            "unknown options speed; known: checked, exclusive, secret, share, tls, ttl, write",
        ),
        ("host:1GiB?checked=2", "must be 0 or 1"),
        ("host:1GiB?checked", "write options as"),
        ("disk:1GiB", "tier 'disk:1GiB': .*write disk:/path:1TiB"),
        ("disk:/x:1GiB?durable=maybe", "durable='maybe' is none of"),
        ("disk:/x:1KiB", "tier 'disk:/x:1KiB': .*does not fit three segments"),
        ("disk:/x:1GiB?compression=gzip", "compression='gzip' is none of none, lz4, zstd"),
        ("disk:/x:lots", "tier 'disk:/x:lots': size 'lots' is not understood"),
        ("nixl:///x?capacity=1GiB&backend=TAPE", "backend='TAPE' is none of"),
        ("peer://127.0.0.1", "write peer://host:port"),
        ("host:999999999TiB", "size '999999999TiB' is more than any machine has"),
        (
            "peer://127.0.0.1:1?timeout=nan",
            "tier 'peer://127.0.0.1:1.*timeout=nan is not a number of seconds",
        ),
        ("redis://127.0.0.1?capacity=1GiB&timeout=inf", "timeout=inf is not a number of seconds"),
        ("redis://127.0.0.1?capacity=1GiB&readers=0", "tier 'redis://127.0.0.1.*readers=0 must be positive"),
        ("redis://there:many?capacity=1GiB", "redis://there:many.*Port could not be cast"),
        ("peer://[::1:7373", r"tier 'peer://\[::1:7373': "),
        ("disk:/x:1GiB?compression=lz4?write=back", "several question marks"),
        ("redis://there/0:1GiB?capacity=1GiB", "'0:1GiB' is not a database number"),
        ("s3://pages?capacity=1GiB&endpoint=there:9000", "endpoint='there:9000' is not a URL; write http://"),
        ("disk:/x:1GiB?keys=", "keys= has no file name: give keys=FILE"),
        ("disk:/x:1GiB?protect=authenticate", "protect=authenticate needs keys: give keys=FILE"),
        ("disk:/x:1GiB?keys=/k&protect=hope", "protect='hope' is none of encrypt, authenticate"),
        ("redis://there?capacity=1GiB&keys=", "keys= has no file name: give keys=FILE"),
        ("redis://there?capacity=1GiB&protect=encrypt", "protect=encrypt needs keys: give keys=FILE"),
        ("nixl:///x?capacity=1GiB&protect=encrypt", "protect=encrypt needs keys: give keys=FILE"),
        ("host:1GiB?write=never", "write='never' is none of through, second-use, back"),
    ],
)
def test_a_bad_url_is_refused_with_the_value_and_a_remedy(url: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        open_with_policy(url)
    with pytest.raises(ValueError, match=error):
        check_tiers([url])


@pytest.mark.parametrize(
    "url",
    [
        "reddis://me:word@there?capacity=1GiB",
        "redis://me:word@there?capacity=1GiB&write=never",
        "redis://me:half@word@there?capacity=1GiB&speed=9",
        "redis://me:word@there:x?capacity=1GiB",
        "redis://me:word@[there?capacity=1GiB",
    ],
)
def test_an_error_never_contains_the_password(url: str) -> None:
    with pytest.raises(ValueError, match="//…@") as caught:
        check_tiers([url])
    assert "word" not in str(caught.value)


def test_checking_urls_opens_nothing(tmp_path: Path) -> None:
    check_tiers(
        [
            "host:64MiB?write=back",
            f"disk:{tmp_path / 'new'}:1GiB",
            "redis://127.0.0.1:1/0?capacity=1GiB",
            "peer://127.0.0.1:1?write=second-use",
            "mooncake://127.0.0.1:1?capacity=1GiB",
            f"nixl://{tmp_path / 'other'}?capacity=1GiB",
        ]
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="2 host tiers were given; the limit is one"):
        check_tiers(["host:64MiB", "host:1GiB?write=back"])


def test_the_write_policy_is_an_option_of_the_url(tmp_path: Path) -> None:
    assert open_with_policy("host:64MiB").write_policy == "back"
    assert open_with_policy("host:64MiB?write=through").write_policy == "through"
    assert split_write_policy("host:64MiB?share=7373") == ("host:64MiB?share=7373", "through")
    assert split_write_policy("host:64MiB?share=7373&write=back") == ("host:64MiB?share=7373", "back")
    assert split_write_policy("int8:host:64MiB")[1] == "through"
    assert open_with_policy("host:64MiB?write=back&checked=1").write_policy == "back"
    opened = open_with_policy(f"disk:{tmp_path}:1GiB?durable=process&write=second-use")
    assert opened.write_policy == "second-use"
    opened.tier.close()
    opened = open_with_policy(f"disk:{tmp_path}:1GiB")
    assert opened.write_policy == "through"
    opened.tier.close()


def parse_attic(url: str) -> Opener:
    return parse_tier("host:" + url.removeprefix("attic:"))


def test_a_new_scheme_is_one_registry_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "attic", f"{__name__}:parse_attic")
    assert open_tier("attic:32MiB").capacity == 32 << 20
