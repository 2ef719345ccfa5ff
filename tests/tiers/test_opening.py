"""Tiers from a line of text: what opens, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.tiers import DiskTier, HostTier, TierError
from kvloom.tiers.opening import SCHEMES, check_tiers, open_place, open_tier, taken_write


def test_a_text_opens_the_tier_it_names(tmp_path: Path) -> None:
    host = open_tier("host:64MiB")
    assert isinstance(host, HostTier)
    assert host.capacity == 64 << 20
    disk = open_tier(f"disk:{tmp_path / 'a:b'}:1GiB?durable=process")
    assert isinstance(disk, DiskTier)
    assert (disk.capacity, disk.name) == (1 << 30, f"disk:{tmp_path / 'a:b'}")
    with pytest.raises(TierError):
        open_tier(f"disk:{tmp_path / 'a:b'}:1GiB")  # another has it open
    host.close()
    disk.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tape:1GiB", "no known kind.*host, disk"),
        ("host", "no known kind"),
        ("host:many", "size 'many' is not understood"),
        ("host:0", "is nothing"),
        ("host:1GiB?speed=9", "option 'speed' is not known; known: checked, share, secret, write"),
        ("host:1GiB?checked=2", "must be 0 or 1"),
        ("host:1GiB?checked", "write options like"),
        ("disk:1GiB", "like disk:/path:1TiB"),
        ("disk:/x:1GiB?durable=maybe", "durable='maybe' is none of"),
        ("disk:/x:1KiB", "tier 'disk:/x:1KiB': .*does not hold three segments"),
        ("disk:/x:1GiB?compression=gzip", "compression='gzip' is none of none, lz4, zstd"),
        ("disk:/x:lots", "tier 'disk:/x:lots': size 'lots' is not understood"),
        ("nixl:///x?capacity=1GiB&backend=TAPE", "backend='TAPE' is none of"),
        ("peer://127.0.0.1", "write peer://host:port"),
        ("host:999999999TiB", "size '999999999TiB' is more than any machine has"),
        ("peer://127.0.0.1:1?timeout=nan", "tier 'peer://127.0.0.1:1.*timeout=nan is no number of seconds"),
        ("redis://127.0.0.1?capacity=1GiB&timeout=inf", "timeout=inf is no number of seconds"),
        ("redis://127.0.0.1?capacity=1GiB&readers=0", "tier 'redis://127.0.0.1.*readers=0 must be positive"),
        ("redis://there:many?capacity=1GiB", "redis://there:many.*Port could not be cast"),
        ("peer://[::1:7373", r"tier 'peer://\[::1:7373': "),
        ("disk:/x:1GiB?compression=lz4?write=back", "one question mark"),
        ("redis://there/0:1GiB?capacity=1GiB", "'0:1GiB' is no number of a database"),
        ("s3://pages?capacity=1GiB&endpoint=there:9000", "endpoint='there:9000' is no URL; write http://"),
        ("disk:/x:1GiB?keys=", "keys= names no file: give keys=FILE"),
        ("disk:/x:1GiB?protect=authenticate", "protect=authenticate needs keys: give keys=FILE"),
        ("disk:/x:1GiB?keys=/k&protect=hope", "protect='hope' is none of encrypt, authenticate"),
        ("redis://there?capacity=1GiB&keys=", "keys= names no file: give keys=FILE"),
        ("redis://there?capacity=1GiB&protect=encrypt", "protect=encrypt needs keys: give keys=FILE"),
        ("nixl:///x?capacity=1GiB&protect=encrypt", "protect=encrypt needs keys: give keys=FILE"),
        ("host:1GiB?write=never", "write='never' is none of through, second-use, back"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value_and_the_way_out(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_place(text)
    with pytest.raises(ValueError, match=said):
        check_tiers([text])


@pytest.mark.parametrize(
    "text",
    [
        "reddis://me:word@there?capacity=1GiB",
        "redis://me:word@there?capacity=1GiB&write=never",
        "redis://me:half@word@there?capacity=1GiB&speed=9",
        "redis://me:word@there:x?capacity=1GiB",
        "redis://me:word@[there?capacity=1GiB",
    ],
)
def test_what_is_refused_is_told_without_its_password(text: str) -> None:
    with pytest.raises(ValueError, match="//…@") as told:
        check_tiers([text])
    assert "word" not in str(told.value)


def test_texts_are_checked_and_nothing_is_opened(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="2 host tiers were asked for"):
        check_tiers(["host:64MiB", "host:1GiB?write=back"])


def test_when_pages_are_written_is_said_with_the_tier(tmp_path: Path) -> None:
    assert open_place("host:64MiB").write == "back"
    assert open_place("host:64MiB?write=through").write == "through"
    assert taken_write("host:64MiB?share=7373") == ("host:64MiB?share=7373", "through")
    assert taken_write("host:64MiB?share=7373&write=back") == ("host:64MiB?share=7373", "back")
    assert taken_write("int8:host:64MiB")[1] == "through"
    assert open_place("host:64MiB?write=back&checked=1").write == "back"
    place = open_place(f"disk:{tmp_path}:1GiB?durable=process&write=second-use")
    assert place.write == "second-use"
    place.tier.close()
    place = open_place(f"disk:{tmp_path}:1GiB")
    assert place.write == "through"
    place.tier.close()


def test_a_scheme_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "attic", lambda text: SCHEMES["host"]("host:" + text.removeprefix("attic:")))
    assert open_tier("attic:32MiB").capacity == 32 << 20
