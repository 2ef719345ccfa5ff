"""The stored format of a page: a header, a checksum per layer run, optional compression and encryption.

    header "KVLP"  version u16  method u8  cipher u8       little endian; version 1 unsealed, 3 sealed, 2 legacy sealed
           block hash 16  group u32  form 16
           runs u32  run_bytes u32  stored at u32          seconds since 1970; 0: written by an earlier release
           runs x checksum u64                             xxh3 of the run as in the pool; sealed: as stored
           runs x stored length u32                        only if compressed or sealed
           salt 16                                         only if sealed
           checksum u64                                    xxh3 of the header up to here
    body   the runs, one after the other: compressed unless that saves nothing, then sealed (16 bytes more)

A run is a layer run. A run is sealed if it is encrypted or authenticated with a tenant's key. A page is plain if it is
neither compressed nor sealed. The cipher is 0 (not sealed), 2 (AES-256-GCM) or 3 (readable, with HMAC-SHA-256). Cipher
1 is AES-256-GCM of format version 2, whose pages are stored under `Objects.keys`. Such pages are still read, but no
longer written.

A codec with keys refuses pages that are not sealed. If a page fails verification, the result is an Outcome. No
exception is raised, and no bytes are returned. This module does not depend on files or stores.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from kvloom.tiers.tier import KEY_BYTES, MAX_RUNS, Form, TierError
from kvloom.tiers.transfer import Outcome
from kvloom.tiers.ttl import now

from .checksums import checksum, copy_checked, run_checksums
from .encryption import SALT_BYTES, TAG_BYTES, Keyring, NoKeyError, Protect

__all__ = [
    "FIXED_HEAD_BYTES",
    "LEGACY_CIPHER",
    "VERSION",
    "Codec",
    "Compression",
    "Head",
    "make_codec",
    "max_head_bytes",
    "max_sealed_bytes",
    "parse_head",
    "plain_head_bytes",
    "plain_heads",
    "seal",
    "stored_time",
    "unseal",
]

VERSION = 1
LEGACY_CIPHER = 1
"""The cipher of format version 2, whose pages are stored under `Objects.keys`."""
_MAX_PAGE_BYTES = 1 << 31
_PROTECTS: dict[Protect, int] = {"encrypt": 2, "authenticate": 3}
_VERSIONS = {0: VERSION, LEGACY_CIPHER: 2, **dict.fromkeys(_PROTECTS.values(), 3)}  # by cipher
_MAGIC = b"KVLP"
_FIXED = struct.Struct(f"<4sHBB{KEY_BYTES}sIII")
FIXED_HEAD_BYTES = _FIXED.size
_CHECK = struct.Struct("<Q")
Compression = Literal["none", "lz4", "zstd"]
"""Method by which stored pages are compressed."""
_METHODS: tuple[Compression, ...] = ("none", "lz4", "zstd")
_MIN_WINDOW = 1 << 10  # the smallest window that zstd allows
Bytes = memoryview | bytes


class Head(NamedTuple):
    """The parsed header of a stored page.

    - `method`: the compression: 0 none, 1 lz4, 2 zstd.
    - `checksums`: 8 bytes per layer run.
    - `stored_lengths`: the lengths of the layer runs in the body, or None if layer runs are stored unchanged.
    - `salt`, `cipher`: set if layer runs are sealed.
    - `stored_at`: the time of the write, or 0 if it is unknown.
    """

    key: bytes
    method: int
    run_bytes: int
    checksums: bytes
    stored_lengths: tuple[int, ...] | None = None
    salt: bytes = b""
    cipher: int = 0
    stored_at: int = 0

    @property
    def runs(self) -> int:
        return len(self.checksums) // 8

    @property
    def body_bytes(self) -> int:
        return (
            len(self.checksums) // 8 * self.run_bytes
            if self.stored_lengths is None
            else sum(self.stored_lengths)
        )

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the byte range of the layer runs [first, last) in the body."""
        if self.stored_lengths is None:
            return first * self.run_bytes, last * self.run_bytes
        edges = [0, *accumulate(self.stored_lengths)]
        return edges[first], edges[last]

    def pack(self) -> bytes:
        version, runs = _VERSIONS[self.cipher], len(self.checksums) // 8
        fixed = _FIXED.pack(
            _MAGIC, version, self.method, self.cipher, self.key, runs, self.run_bytes, self.stored_at
        )
        head = fixed + self.checksums
        if self.stored_lengths is not None:
            head += struct.pack(f"<{len(self.stored_lengths)}I", *self.stored_lengths) + self.salt
        return head + _CHECK.pack(checksum(head))


def plain_head_bytes(form: Form) -> int:
    """Return the length of the header of a plain page, which is neither compressed nor sealed."""
    return _FIXED.size + 8 * form.runs + _CHECK.size


def max_head_bytes(form: Form) -> int:
    """Return the largest length of a header for pages of this form."""
    return _FIXED.size + 12 * form.runs + SALT_BYTES + _CHECK.size


def max_sealed_bytes(form: Form) -> int:
    """Return the largest size of a stored page with its header, for any compression and encryption."""
    # A run that compression does not shrink is stored unchanged.
    return max_head_bytes(form) + TAG_BYTES * form.runs + form.page_bytes


def parse_head(data: memoryview) -> tuple[Head, int] | Outcome:
    """Return the header at the beginning of `data` and its length. Return an Outcome if the header is invalid."""
    if len(data) < _FIXED.size:
        return Outcome.SHORT
    magic, version, method, cipher, key, runs, run_bytes, stored_at = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        return Outcome.CORRUPT
    if version not in _VERSIONS.values():
        return Outcome.VERSION
    if not 0 < runs <= MAX_RUNS or method >= len(_METHODS) or _VERSIONS.get(cipher) != version:
        return Outcome.CORRUPT
    if not 0 < runs * run_bytes < _MAX_PAGE_BYTES:
        return Outcome.CORRUPT
    lengths = _FIXED.size + runs * 8
    salted = lengths + (runs * 4 if method or cipher else 0)
    end = salted + (SALT_BYTES if cipher else 0)
    if len(data) < end + _CHECK.size:
        return Outcome.SHORT
    if _CHECK.unpack_from(data, end)[0] != checksum(data[:end]):
        return Outcome.CORRUPT
    checks = bytes(data[_FIXED.size : lengths])
    stored = struct.unpack_from(f"<{runs}I", data, lengths) if salted > lengths else None
    if stored is not None and max(stored) > run_bytes + (TAG_BYTES if cipher else 0):
        return Outcome.CORRUPT  # no writer stores a longer run, so allocate no memory for it
    salt = bytes(data[salted:end])
    return Head(key, method, run_bytes, checks, stored, salt, cipher, stored_at), end + _CHECK.size


def stored_time(data: memoryview) -> int:
    """Return the write time from the first FIXED_HEAD_BYTES bytes of a header, without verifying the header. 0 means
    unknown."""
    if len(data) < _FIXED.size or bytes(data[:4]) != _MAGIC:
        return 0
    return int(_FIXED.unpack_from(data)[-1])


class Codec:
    """Compresses and decompresses single layer runs. Use one instance per thread, because compression contexts are not
    thread-safe. With `keys`, `seal` seals every page, and `unseal` refuses pages that are not sealed."""

    def __init__(self, method: int, keys: Keyring | None = None) -> None:
        self.method, self.keys = method, keys
        self._zstd_out: Any = None
        self._zstd_in: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether the codec stores pages unchanged."""
        return self.method == 0 and self.keys is None

    def pack(self, run: memoryview) -> Bytes:
        """Return the compressed layer run, or the layer run itself if compression does not make it smaller."""
        if self.method == 0:
            return run
        if self.method == 1:
            packed = _library("lz4.block").compress(run, store_size=False)
        else:
            if self._zstd_out is None:
                self._zstd_out = _library("zstandard").ZstdCompressor(level=1)
            packed = self._zstd_out.compress(run)
        return packed if len(packed) < len(run) else run

    def unpack(self, method: int, packed: memoryview, into: memoryview) -> bool:
        """Decompresse `packed` into `into`. Return False if the data is damaged or does not have exactly
        `len(into)` bytes."""
        try:
            if method == 1:
                plain = _library("lz4.block").decompress(packed, uncompressed_size=len(into))
                if len(plain) != len(into):
                    return False
                into[:] = plain
                return True
            zstd = _library("zstandard")
            frame = zstd.get_frame_parameters(packed)
            if frame.content_size != len(into) or frame.window_size > max(len(into), _MIN_WINDOW):
                return False  # the window of this frame would need more memory than a layer run of this size
            if self._zstd_in is None:
                self._zstd_in = zstd.ZstdDecompressor(max_window_size=_MAX_PAGE_BYTES)
            with self._zstd_in.stream_reader(packed) as reader:
                done = 0
                while done < len(into):
                    got = reader.readinto(into[done:])
                    if not got:
                        return False
                    done += got
                return True
        except TierError:
            raise
        except Exception:  # noqa: BLE001  any library error means damaged bytes
            return False


def _library(module: str) -> Any:
    """Import a compression package when it is needed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise TierError(
            f"the package with the module {module!r} is missing: pip install 'kvloom[tiers]'"
        ) from error


def make_codec(compression: Compression = "none", keys: Keyring | None = None) -> Codec:
    """Return a codec that writes with `compression` and can read every compression. With `keys` the codec seals
    pages. Raises TierError if a package is missing.
    """
    if compression not in _METHODS:
        raise ValueError(f"compression={compression!r} is none of {_METHODS}")
    checksum(b"")
    if compression != "none":
        _library({"lz4": "lz4.block", "zstd": "zstandard"}[compression])
    return Codec(_METHODS.index(compression), keys)


def plain_heads(keys: Sequence[bytes], form: Form, pages: memoryview) -> list[Head]:
    """Return the headers of consecutive pages in `pages`, which are neither compressed nor sealed. `seal` returns
    equal headers, one page at a time. This function computes all of them in one call."""
    sums, each, stored_at = run_checksums(pages, form.run_bytes), 8 * form.runs, now()
    return [
        Head(key, 0, form.run_bytes, sums[number * each : (number + 1) * each], stored_at=stored_at)
        for number, key in enumerate(keys)
    ]


def seal(
    key: bytes, form: Form, page: memoryview, codec: Codec, tenant: str = ""
) -> tuple[Head, list[Bytes]]:
    """Return the header of a page, and its stored body as a list of pieces. If the codec neither compresses nor
    has keys, the body is the caller's memory as one piece. Raises NoKeyError if the codec has keys but no key
    for the tenant."""
    step, stored_at = form.run_bytes, now()
    if codec.is_plain:
        return Head(key, 0, step, run_checksums(page, step), stored_at=stored_at), [page]
    pieces = [codec.pack(page[at : at + step]) for at in range(0, form.page_bytes, step)]
    if codec.keys is None:
        lengths = tuple(map(len, pieces))
        head = Head(key, codec.method, step, run_checksums(page, step), lengths, stored_at=stored_at)
        return head, pieces
    salt = os.urandom(SALT_BYTES)
    kind, number = codec.keys.protect, _PROTECTS[codec.keys.protect]
    cipher = codec.keys.page_cipher(tenant, salt, kind)
    context = _context(key, codec.method, form.runs, step, number)
    sealed = [cipher.encrypt(at, piece, context) for at, piece in enumerate(pieces)]
    checks = struct.pack(f"<{len(sealed)}Q", *map(checksum, sealed))
    lengths = tuple(map(len, sealed))
    return Head(key, codec.method, step, checks, lengths, salt, number, stored_at), list(sealed)


def _context(key: bytes, method: int, runs: int, run_bytes: int, cipher: int) -> bytes:
    """Return the context with which the layer runs of a page are sealed. The context contains `key` (block hash, group
    and form) and the format of the page. The tag of a layer run authenticates this context, the number of the layer run
    and the salt of the page. A layer run therefore cannot be moved to another page or position."""
    bound = key + bytes([method]) + run_bytes.to_bytes(4, "little")
    return bound if cipher == LEGACY_CIPHER else bound + runs.to_bytes(4, "little") + bytes([cipher])


def unseal(
    head: Head, body: memoryview, first: int, into: memoryview, codec: Codec, tenant: str = ""
) -> Outcome:
    """Verify layer runs from number `first` on, and decode as many as fit into `into`. Return the outcome. `head`
    is the header of the stored page, and `body` begins with layer run `first`. `body` and `into` may be the same memory
    if nothing is compressed.

    If the outcome is not OK, the bytes of `into` are undefined. If the codec has keys, a page that is not sealed is
    UNTRUSTED.
    """
    step = head.run_bytes
    last = first + len(into) // step
    low, high = head.span(first, last)
    if len(body) < high - low:
        return Outcome.SHORT
    if codec.keys is not None and not head.cipher:
        return Outcome.UNTRUSTED
    if head.cipher:
        return _unseal_protected(head, body, first, into, codec, tenant)
    if head.stored_lengths is None and body is not into:
        sums = copy_checked(into, body[: high - low], step, of_target=True)
        return Outcome.OK if sums == head.checksums[first * 8 : last * 8] else Outcome.CORRUPT
    if head.stored_lengths is not None:
        at = 0
        for number, length in enumerate(head.stored_lengths[first:last]):
            run = into[number * step : (number + 1) * step]
            if not _unpack(head, body[at : at + length], run, codec):
                return Outcome.CORRUPT
            at += length
    return (
        Outcome.OK if run_checksums(into, step) == head.checksums[first * 8 : last * 8] else Outcome.CORRUPT
    )


def _unpack(head: Head, packed: memoryview, run: memoryview, codec: Codec) -> bool:
    if len(packed) == len(run):
        run[:] = packed
        return True
    return codec.unpack(head.method, packed, run)


def _unseal_protected(
    head: Head, body: memoryview, first: int, into: memoryview, codec: Codec, tenant: str
) -> Outcome:
    """Open sealed layer runs for `unseal`. The checksums cover the stored bytes. Damage (CORRUPT) can therefore be
    distinguished from a wrong key (LOCKED)."""
    assert head.stored_lengths is not None
    if codec.keys is None:
        return Outcome.LOCKED
    try:
        kind: Protect = "authenticate" if head.cipher == _PROTECTS["authenticate"] else "encrypt"
        cipher = codec.keys.page_cipher(tenant, head.salt, kind)
    except NoKeyError:
        return Outcome.LOCKED
    except TierError:
        return Outcome.VERSION  # the page is intact, and readable once the package is installed
    context = _context(head.key, head.method, head.runs, head.run_bytes, head.cipher)
    at, step = 0, head.run_bytes
    for number in range(first, first + len(into) // step):
        length = head.stored_lengths[number]
        sealed = body[at : at + length]
        if checksum(sealed) != int.from_bytes(head.checksums[number * 8 : number * 8 + 8], "little"):
            return Outcome.CORRUPT
        packed = cipher.decrypt(number, sealed, context)
        if packed is None:
            return Outcome.LOCKED
        run = into[(number - first) * step : (number - first + 1) * step]
        if not _unpack(head, packed, run, codec):
            return Outcome.CORRUPT
        at += length
    return Outcome.OK
