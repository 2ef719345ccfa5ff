"""Heads, checksums and compression: damaged bytes are never decoded."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from kvloom.tiers import Compression, Form, Outcome, TierError
from kvloom.tiers.encoding import Head, checksum, make_codec, parse_head, run_checksums, seal, unseal
from kvloom.tiers.encoding.codec import VERSION
from kvloom.tiers.testing.conformance import FORM, PAGE, RUN, objects, page

KEY = objects([1]).keys[0]
METHODS: list[Compression] = ["none", "lz4", "zstd"]


@pytest.fixture(params=METHODS)
def compression(request: pytest.FixtureRequest) -> Compression:
    method: Compression = request.param
    if method != "none":
        pytest.importorskip({"lz4": "lz4", "zstd": "zstandard"}[method])
    return method


def sealed(compression: Compression) -> tuple[Head, bytes]:
    head, pieces = seal(KEY, FORM, memoryview(page(1)), make_codec(compression))
    return head, b"".join(bytes(piece) for piece in pieces)


def test_a_sealed_page_is_decoded_whole_and_by_runs(compression: Compression) -> None:
    head, body = sealed(compression)
    assert (len(body) < PAGE) == (compression != "none")
    plain = make_codec()
    for first, last in [(0, 8), (0, 1), (3, 6), (7, 8)]:
        out = np.zeros((last - first) * RUN, np.uint8)
        low, high = head.span(first, last)
        assert unseal(head, memoryview(body)[low:high], first, memoryview(out), plain) == Outcome.OK
        assert np.array_equal(out, page(1)[first * RUN : last * RUN])


def test_a_parsed_head_equals_the_packed_one(compression: Compression) -> None:
    head, body = sealed(compression)
    packed = head.pack()
    parsed = parse_head(memoryview(packed + body))
    assert parsed == (head, len(packed))
    assert (head.key, head.runs, head.run_bytes, head.body_bytes) == (KEY, 8, RUN, len(body))


def test_any_flipped_bit_of_a_head_is_detected(compression: Compression) -> None:
    packed = sealed(compression)[0].pack()
    for at in range(len(packed)):
        for bit in (0, 7):
            bad = bytearray(packed)
            bad[at] ^= 1 << bit
            assert isinstance(parse_head(memoryview(bad)), Outcome), f"byte {at}"


def test_any_truncated_head_is_detected(compression: Compression) -> None:
    packed = sealed(compression)[0].pack()
    assert all(isinstance(parse_head(memoryview(packed)[:n]), Outcome) for n in range(len(packed)))


def test_flipped_bits_of_a_body_are_detected(compression: Compression) -> None:
    head, body = sealed(compression)
    codec, out = make_codec(), memoryview(bytearray(PAGE))
    for at in np.random.default_rng(0).integers(0, len(body), 150).tolist():
        bad = bytearray(body)
        bad[at] ^= 1 << at % 8
        # A bit of a compressed run that does not change the page is harmless.
        outcome = unseal(head, memoryview(bad), 0, out, codec)
        assert outcome == Outcome.CORRUPT or bytes(out) == page(1).tobytes()
        assert compression != "none" or outcome == Outcome.CORRUPT
    assert unseal(head, memoryview(body)[:-1], 0, out, codec) == Outcome.SHORT
    assert unseal(head, memoryview(body), 0, out, codec) == Outcome.OK, "the codec stays usable"


def test_runs_in_another_order_are_detected() -> None:
    head, body = sealed("none")
    swapped = body[RUN : 2 * RUN] + body[:RUN] + body[2 * RUN :]
    assert unseal(head, memoryview(swapped), 0, memoryview(bytearray(PAGE)), make_codec()) == Outcome.CORRUPT


def test_another_version_is_distinguished_from_damage() -> None:
    packed = bytearray(sealed("none")[0].pack())
    packed[4:6] = struct.pack("<H", VERSION + 3)
    assert parse_head(memoryview(packed)) == Outcome.VERSION


def test_the_stored_format_is_pinned() -> None:
    """A change here needs a new VERSION: others have files in the old one."""
    form = Form("bf16", "LKTHD", 16, 8, shard="0/2", layout="l")
    assert form.fingerprint.hex() == "933875c6a8abd71f1436fae568e6954d"
    key = bytes(range(16)) + (3).to_bytes(4, "little") + form.fingerprint
    head, _ = seal(key, form, memoryview(b"0123456789abcdef"), make_codec())
    assert head.stored_at > 1_700_000_000
    assert parse_head(memoryview(head.pack())) == (head, len(head.pack()))
    packed = head._replace(stored_at=0x12345678).pack()
    assert packed[44:56].hex() == "020000000800000078563412", (
        "the time is where earlier releases read nothing"
    )
    assert head._replace(stored_at=0).pack().hex() == (
        "4b564c5001000000000102030405060708090a0b0c0d0e0f03000000"
        + form.fingerprint.hex()
        + "02000000080000000000000046f623670de4081813aa4e189c9c373c1eecd159f9b458fe"
    )
    assert checksum(b"") == 0x2D06800538D394C2, "xxh3 as published"


def test_a_compressed_run_with_a_huge_length_allocates_nothing() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    head = Head(KEY, 2, RUN, run_checksums(memoryview(bytes(RUN)), RUN)[:8], (len(bomb),))
    out = memoryview(bytearray(RUN))
    assert unseal(head, memoryview(bomb), 0, out, make_codec()) == Outcome.CORRUPT
    assert make_codec().unpack(1, memoryview(bomb), out) is False


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TierError, match="'zstandard' is missing: pip install"):
        make_codec("zstd")
