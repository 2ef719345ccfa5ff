"""Encryption at rest: a sealed page opens only with its own key and under its own object key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.tiers import Compression, DiskConfig, DiskTier, Objects, Outcome, TierError
from kvloom.tiers.encoding import (
    Head,
    Keyring,
    NoKeyError,
    make_codec,
    max_sealed_bytes,
    parse_head,
    seal,
    unseal,
)
from kvloom.tiers.testing.conformance import (
    FORM,
    PAGE,
    RUN,
    Harness,
    TierConformance,
    check_bytes,
    filled,
    memory,
    objects,
    page,
)

from .test_disk_tier import DiskHarness

pytest.importorskip("cryptography", reason="pip install cryptography")
MIB = 1 << 20
KEY = objects([1]).keys[0]
OURS = Keyring({"acme": b"a" * 32, "*": b"o" * 32})
OTHER = replace(FORM, dtype="f16")
METHODS: list[Compression] = ["none", "lz4", "zstd"]


def sealed(compression: Compression = "none", tenant: str = "acme") -> tuple[Head, bytes]:
    head, pieces = seal(KEY, FORM, memoryview(page(1)), make_codec(compression, OURS), tenant)
    return head, b"".join(map(bytes, pieces))


def opened(head: Head, body: bytes, keys: Keyring | None = OURS, tenant: str = "acme") -> Outcome:
    out = bytearray(PAGE)
    outcome = unseal(head, memoryview(body), 0, memoryview(out), make_codec("none", keys), tenant)
    assert outcome != Outcome.OK or bytes(out) == page(1).tobytes()
    return outcome


@pytest.mark.parametrize("compression", METHODS)
def test_an_encrypted_page_opens_whole_and_by_runs_and_hides_its_bytes(compression: Compression) -> None:
    head, body = sealed(compression)
    assert parse_head(memoryview(head.pack() + body)) == (head, len(head.pack()))
    assert len(head.pack()) + len(body) <= max_sealed_bytes(FORM)
    assert opened(head, body) == Outcome.OK
    assert page(1)[:32].tobytes() not in body
    assert page(1)[-32:].tobytes() not in body
    for first, last in [(0, 1), (3, 6), (7, 8)]:
        out = memoryview(bytearray((last - first) * RUN))
        low, high = head.span(first, last)
        codec = make_codec("none", OURS)
        assert unseal(head, memoryview(body)[low:high], first, out, codec, "acme") == Outcome.OK
        assert out == page(1)[first * RUN : last * RUN].data


def test_the_same_page_is_never_sealed_to_the_same_bytes() -> None:
    assert sealed()[1] != sealed()[1]


def test_another_key_another_tenant_or_none_is_locked() -> None:
    head, body = sealed()
    assert opened(head, body, tenant="other") == Outcome.LOCKED
    assert opened(head, body, keys=Keyring({"acme": b"b" * 32})) == Outcome.LOCKED
    assert opened(head, body, keys=Keyring({"else": b"a" * 32})) == Outcome.LOCKED
    assert opened(head, body, keys=None) == Outcome.LOCKED


def test_keys_of_other_tenants_are_derived_from_the_common_key() -> None:
    head, body = sealed(tenant="small")
    assert opened(head, body, tenant="small") == Outcome.OK
    assert opened(head, body, tenant="tiny") == Outcome.LOCKED
    with pytest.raises(NoKeyError, match="'nobody' has no key"):
        seal(KEY, FORM, memoryview(page(1)), make_codec("none", Keyring({"acme": b"a" * 32})), "nobody")


def test_damage_is_distinguished_from_a_wrong_key_and_pages_are_bound_to_their_key() -> None:
    head, body = sealed()
    bad = bytearray(body)
    bad[100] ^= 1
    assert opened(head, bytes(bad)) == Outcome.CORRUPT
    assert opened(head, body[:-1]) == Outcome.SHORT
    assert opened(head._replace(key=objects([2]).keys[0]), body) == Outcome.LOCKED, "under another object key"
    assert opened(head._replace(key=objects([1], OTHER).keys[0]), body) == Outcome.LOCKED, "another layout"
    step = RUN + 16
    swapped = body[step : 2 * step] + body[:step] + body[2 * step :]
    checks = head.checksums[8:16] + head.checksums[:8] + head.checksums[16:]
    assert opened(head._replace(checksums=checks), swapped) == Outcome.LOCKED, (
        "runs are bound to their position"
    )


def test_any_flipped_bit_of_an_encrypted_head_is_detected() -> None:
    packed = sealed()[0].pack()
    for at in range(len(packed)):
        bad = bytearray(packed)
        bad[at] ^= 16
        assert isinstance(parse_head(memoryview(bad)), Outcome), f"byte {at}"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ('{"a": "' + "00" * 32 + '"}', 0o644, "chmod 600"),
        ("{}", 0o600, "is not a key file"),
        ('{"a": "00"}', 0o600, "is not a key file"),
        ('{"a": 7}', 0o600, "is not a key file"),
        ("[1]", 0o600, "is not a key file"),
        ("not json", 0o600, "is not a key file"),
    ],
)
def test_an_invalid_key_file_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(TierError, match=message):
        Keyring.read(path)
    with pytest.raises(TierError, match="cannot be read"):
        Keyring.read(tmp_path / "absent")


def keys_file(folder: Path, byte: str) -> Path:
    path = folder / f"keys-{byte}.json"
    path.write_text('{"*": "' + byte * 32 + '"}')
    path.chmod(0o600)
    return path


class TestEncryptedDisk(TierConformance):
    def make(self, folder: Path) -> Harness:
        keys = keys_file(folder, "ab")
        config = DiskConfig(folder / "t", 8 * MIB, segment_bytes=MIB, durable="process", keys=keys)
        return DiskHarness(DiskTier(config))


def test_a_page_of_another_key_is_a_miss_and_is_written_again(tmp_path: Path) -> None:
    wanted = Objects(objects(range(3)).block_hashes, 0, FORM, tenant="acme")

    def tier(byte: str) -> DiskTier:
        return DiskTier(
            DiskConfig(tmp_path / "t", 8 * MIB, segment_bytes=MIB, keys=keys_file(tmp_path, byte))
        )

    first = tier("01")
    assert first.write(wanted, filled(range(3))).wait(20)
    first.close()
    for file in (tmp_path / "t").glob("*.seg"):
        assert page(1)[:64].tobytes() not in file.read_bytes()
    second = tier("02")
    assert not second.lookup(wanted).any()
    transfer = second.read(wanted, memory(3))
    assert transfer.wait(20)
    assert (transfer.results == Outcome.MISSING).all()
    assert second.write(wanted, filled(range(3))).wait(20)
    transfer = second.read(wanted, got := memory(3))
    assert transfer.wait(20)
    assert check_bytes(transfer, range(3), got) == 3
    second.close()
    first = tier("01")
    transfer = first.read(wanted, got := memory(3))
    assert transfer.wait(20)
    assert check_bytes(transfer, range(3), got) == 3, "pages of the first key are not lost"
    first.close()
