"""Attacks on tiers with keys by a writer of the store that has no key: no wrong page is read, and every attempt is counted."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloom.tiers import DiskConfig, DiskTier, Objects, Outcome, TierError, aligned_bytes, open_tier
from kvloom.tiers.aligned_memory import aligned
from kvloom.tiers.disk.segment import Frame
from kvloom.tiers.encoding import (
    LEGACY_CIPHER,
    Head,
    Keyring,
    Protect,
    checksum,
    make_codec,
    parse_head,
    seal,
    unseal,
)
from kvloom.tiers.encoding.encryption import SALT_BYTES
from kvloom.tiers.remote import RemoteTier
from kvloom.tiers.remote.redis_protocol import RespConnection
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.testing.conformance import (
    FORM,
    PAGE,
    RUN,
    Harness,
    TierConformance,
    block_hash,
    check_bytes,
    filled,
    get,
    memory,
    objects,
    page,
    put,
)

from .servers import redis_server
from .test_disk_tier import DiskHarness

pytest.importorskip("cryptography", reason="pip install cryptography")
MIB = 1 << 20
PAGES = range(6)
PROTECTS: list[Protect] = ["encrypt", "authenticate"]
RING = {"*": b"\xab" * 32}


def keys_file(folder: Path) -> Path:
    path = folder / "keys.json"
    path.write_text('{"*": "' + "ab" * 32 + '"}')
    path.chmod(0o600)
    return path


def disk(folder: Path, options: str = "") -> DiskTier:
    tier = open_tier(f"disk:{folder}/kv:64MiB?durable=process{options}")
    assert isinstance(tier, DiskTier)
    return tier


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


@contextmanager
def redis(port: int, options: str = "") -> Iterator[tuple[RemoteTier, RespConnection]]:
    client = RespConnection(("127.0.0.1", port), 5, limit=4 * MIB)
    client.call("FLUSHALL")
    tier = open_tier(f"redis://127.0.0.1:{port}/0?capacity=16MiB{options}")
    assert isinstance(tier, RemoteTier)
    yield tier, client
    tier.close()
    client.close()


def forged(value: bytes) -> bytes:
    """A plain page with valid checksums under the same key, as a writer without keys can make it."""
    parsed = parse_head(memoryview(value))
    assert not isinstance(parsed, Outcome)
    head, pieces = seal(parsed[0].key, FORM, memoryview(page(99)), make_codec("none"))
    return head.pack() + b"".join(map(bytes, pieces))


# --- plain pages


@pytest.mark.server
@pytest.mark.parametrize("part", [None, (RUN, 3 * RUN)], ids=["whole", "part"])
@pytest.mark.parametrize("protect", PROTECTS)
def test_a_plain_page_in_redis_is_refused_counted_and_replaced(
    port: int, tmp_path: Path, protect: Protect, part: tuple[int, int] | None
) -> None:
    with redis(port, f"&keys={keys_file(tmp_path)}&protect={protect}") as (tier, client):
        assert put(tier, PAGES).ok.all()
        for key in client.call("KEYS", PREFIX + b"*"):
            client.call("SET", key, forged(client.call("GET", key)))
        transfer = tier.read(objects(PAGES), memory(6), part)
        assert transfer.wait(20)
        assert (transfer.results == Outcome.UNTRUSTED).all()
        assert "plain page in a tier with keys" in transfer.reason
        assert tier.stats().reads == {"untrusted": 6}
        assert not tier.lookup(objects(PAGES)).any(), "a good copy can be stored again"
        assert put(tier, PAGES).ok.all()
        assert get(tier, PAGES).ok.all()


@pytest.mark.parametrize("protect", PROTECTS)
def test_a_plain_page_on_the_disk_is_refused_counted_and_replaced(tmp_path: Path, protect: Protect) -> None:
    options = f"&keys={keys_file(tmp_path)}&protect={protect}"
    tier = disk(tmp_path, options)
    assert put(tier, PAGES).ok.all()
    stored = tier._with_stored_keys(objects(PAGES))
    tier.close()
    attacker = disk(tmp_path)
    assert attacker.drop(stored) == 6
    assert attacker.write(stored, filled([n + 50 for n in PAGES])).wait(20)
    attacker.close()
    tier = disk(tmp_path, options)
    transfer = get(tier, PAGES)
    assert (transfer.results == Outcome.UNTRUSTED).all()
    assert "plain page in a tier with keys" in transfer.reason
    assert tier.stats().reads == {"untrusted": 6}
    assert put(tier, PAGES).ok.all()
    assert get(tier, PAGES).ok.all()
    tier.close()


def test_a_codec_with_keys_opens_no_plain_page_compressed_or_not() -> None:
    ours = make_codec("none", Keyring(RING))
    for compression in ("none", "lz4", "zstd"):
        head, pieces = seal(objects([1]).keys[0], FORM, memoryview(page(1)), make_codec(compression))  # type: ignore[arg-type]
        body, out = memoryview(b"".join(map(bytes, pieces))), memoryview(bytearray(PAGE))
        assert unseal(head, body, 0, out, make_codec("none")) == Outcome.OK
        assert unseal(head, body, 0, out, ours) == Outcome.UNTRUSTED
        salted = head._replace(
            salt=bytes(SALT_BYTES), stored_lengths=head.stored_lengths or (RUN,) * FORM.runs, cipher=3
        )
        assert unseal(salted, body, 0, out, ours) != Outcome.OK, "nor one that claims to be sealed"


def test_plain_pages_written_without_keys_are_misses_and_remain(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    assert put(tier, PAGES).ok.all()
    tier.close()
    tier = disk(tmp_path, f"&keys={keys_file(tmp_path)}")
    assert not tier.lookup(objects(PAGES)).any()
    assert (get(tier, PAGES).results == Outcome.MISSING).all()
    tier.close()
    tier = disk(tmp_path)
    assert get(tier, PAGES).ok.all()
    tier.close()


# --- valid pages under another key


@pytest.mark.server
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("protect", PROTECTS)
def test_a_valid_page_under_another_key_or_tenant_does_not_open(
    port: int, tmp_path: Path, protect: Protect, compression: str
) -> None:
    options = f"&keys={keys_file(tmp_path)}&protect={protect}&compression={compression}"
    with redis(port, options) as (tier, client):
        theirs = Objects([block_hash(1)], 0, FORM, tenant="other")
        assert put(tier, range(2)).ok.all()
        assert tier.write(theirs, filled([7])).wait(20)
        here = [*tier._with_stored_keys(objects(range(2))).keys, *tier._with_stored_keys(theirs).keys]
        assert len(set(here)) == 3, "stored keys of tenants differ"
        values = [client.call("GET", PREFIX + key) for key in here]
        for source, target in ((1, 0), (2, 1)):
            parsed = parse_head(memoryview(values[source]))
            assert not isinstance(parsed, Outcome)
            head = parsed[0]._replace(key=here[target])
            client.call("SET", PREFIX + here[target], head.pack() + values[source][parsed[1] :])
        assert (get(tier, range(2)).results == Outcome.LOCKED).all()
        assert not tier.lookup(objects(range(2))).any(), "a good copy can be stored again"


@pytest.mark.parametrize("protect", PROTECTS)
def test_every_field_of_a_sealed_page_is_bound(protect: Protect) -> None:
    """Each change has correct checksums, which need no key."""
    ours = make_codec("lz4", Keyring(RING, protect))
    head, pieces = seal(objects([1]).keys[0], FORM, memoryview(page(1)), ours)
    body = b"".join(map(bytes, pieces))

    def outcome(head: Head, body: bytes) -> Outcome:
        assert head.stored_lengths is not None
        at, sums = 0, []
        for length in head.stored_lengths:
            sums.append(checksum(body[at : at + length]))
            at += length
        head = head._replace(checksums=struct.pack(f"<{len(sums)}Q", *sums))
        parsed = parse_head(memoryview(head.pack()))
        if isinstance(parsed, Outcome):
            return parsed
        return unseal(parsed[0], memoryview(body), 0, memoryview(bytearray(PAGE)), ours)

    assert outcome(head, body) == Outcome.OK
    for at in range(0, len(body), 997):
        assert outcome(head, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]) == Outcome.LOCKED
    other = seal(objects([1]).keys[0], FORM, memoryview(page(1)), ours)[0]
    for changed in (
        {"key": objects([2]).keys[0]},
        {"key": objects([1], group=1).keys[0]},
        {"method": 2},
        {"salt": other.salt},
        {"cipher": 5 - head.cipher},
        {"cipher": LEGACY_CIPHER},
    ):
        assert outcome(head._replace(**changed), body) != Outcome.OK, changed
    assert head.stored_lengths is not None
    assert (
        outcome(
            head._replace(
                stored_lengths=(
                    head.stored_lengths[0] - 1,
                    head.stored_lengths[1] + 1,
                    *head.stored_lengths[2:],
                )
            ),
            body,
        )
        != 1
    )
    assert outcome(head, b"".join([*map(bytes, pieces[1:]), bytes(pieces[0])])) != Outcome.OK


# --- stored keys


@pytest.mark.server
@pytest.mark.parametrize("protect", PROTECTS)
def test_a_reader_of_a_store_cannot_confirm_a_guessed_block_hash(
    port: int, tmp_path: Path, protect: Protect
) -> None:
    """Nothing that is stored, not even an index, has the block hash or the layout's fingerprint in it."""
    options = f"&keys={keys_file(tmp_path)}&protect={protect}"
    guesses = [n for number in PAGES for n in (block_hash(number), block_hash(number).hex().encode())]
    guesses.append(FORM.fingerprint)
    tier = disk(tmp_path, options)
    assert put(tier, PAGES).ok.all()
    assert tier.drop(objects([5])) == 1
    tier.close()
    files = [path.read_bytes() for path in (tmp_path / "kv").iterdir()]
    with redis(port, options) as (remote, client):
        assert put(remote, PAGES).ok.all()
        assert remote.lookup(objects(PAGES)).all()
        names = client.call("KEYS", "*")
        pages = [client.call("GET", key) for key in names if key.startswith(PREFIX)]
        assert len(pages) == 6
        indexes = client.call("ZRANGE", b"kvloom/1:used", 0, -1) + client.call("HKEYS", b"kvloom/1:sizes")
    for stored in (*files, *names, *pages, *indexes):
        assert not any(guess in stored for guess in guesses)


def test_stored_keys_differ_by_secret_and_tenant_and_are_stable() -> None:
    def names(ring: dict[str, bytes], tenant: str) -> list[bytes]:
        return Keyring(ring).with_stored_keys(Objects([block_hash(1)], 0, FORM, tenant)).keys

    assert names(RING, "a") == names(RING, "a")
    rings = [RING, {"*": b"c" * 32}, {"a": b"\xab" * 32, "*": b"c" * 32}, {"a": b"d" * 32, "*": b"c" * 32}]
    found = [names(ring, tenant)[0] for ring in rings for tenant in ("", "a", "b", "*")]
    distinct = set(found)
    assert objects([1]).keys[0] not in distinct
    assert len(distinct) == 4 + 4 + 1 + 1, "the third and fourth ring share what `*` makes with the second"


# --- the older format, and the package


def test_encrypted_pages_of_the_legacy_format_are_read_from_disk(tmp_path: Path) -> None:
    """They are stored under their plain keys and bound to them: reads find them, writes use derived keys."""
    ring, wanted = Keyring(RING), objects([1, 2])
    tier = disk(tmp_path)
    for number, key in zip([1, 2], wanted.keys, strict=True):
        salt = os.urandom(SALT_BYTES)
        cipher, data = ring.page_cipher("", salt), page(number).tobytes()
        context = key + b"\0" + RUN.to_bytes(4, "little")
        runs = [cipher.encrypt(at // RUN, data[at : at + RUN], context) for at in range(0, PAGE, RUN)]
        checks = struct.pack(f"<{len(runs)}Q", *map(checksum, runs))
        head = Head(key, 0, RUN, checks, tuple(map(len, runs)), salt, LEGACY_CIPHER)
        assert head.pack()[4:8] == b"\x02\x00\x00\x01"
        body = aligned_bytes(head.body_bytes)
        body[: head.body_bytes] = b"".join(runs)
        frame = Frame([head], [body], aligned(head.body_bytes))
        tier._store.append(frame)
        tier._store.publish(frame.records())
    tier.close()
    tier = disk(tmp_path)
    assert (get(tier, [1]).results == Outcome.LOCKED).all()
    tier.close()
    tier = disk(tmp_path, f"&keys={keys_file(tmp_path)}")
    assert tier.lookup(wanted).all()
    transfer = tier.read(wanted, got := memory(2))
    assert transfer.wait(20)
    assert check_bytes(transfer, [1, 2], got) == 2
    assert put(tier, [1]).ok.all()
    assert tier._with_stored_keys(wanted).keys[0] in tier._store.index
    assert get(tier, [1, 2]).ok.all()
    tier.drop(wanted)
    assert not tier.lookup(wanted).any()
    tier.close()


def test_authentication_needs_no_package_and_encryption_reports_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    path = keys_file(tmp_path)
    with pytest.raises(TierError, match=r"kvloom\[encryption\].*protect=authenticate"):
        disk(tmp_path, f"&keys={path}")
    tier = disk(tmp_path, f"&keys={path}&protect=authenticate")
    assert put(tier, PAGES).ok.all()
    assert get(tier, PAGES).ok.all()
    tier.close()
    monkeypatch.undo()
    tier = disk(tmp_path, f"&keys={path}")
    assert get(tier, PAGES).ok.all(), "a tier that encrypts trusts pages that the same keys authenticate"
    tier.close()


@pytest.mark.server
def test_a_process_without_the_package_removes_no_encrypted_page_of_others(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keys_file(tmp_path)
    with redis(port, f"&keys={path}") as (tier, _):
        assert put(tier, PAGES).ok.all()
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
        other = open_tier(f"redis://127.0.0.1:{port}/0?capacity=16MiB&keys={path}&protect=authenticate")
        assert (get(other, PAGES).results == Outcome.VERSION).all()
        other.close()
        assert get(tier, PAGES).ok.all()


class TestAuthenticatedDisk(TierConformance):
    def make(self, folder: Path) -> Harness:
        config = DiskConfig(
            folder / "t", 8 * MIB, MIB, "process", keys=keys_file(folder), protect="authenticate"
        )
        return DiskHarness(DiskTier(config))
