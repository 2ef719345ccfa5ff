"""Block hashes identify the content of a page. They are the same in every process, in every tier and on every
machine.

    root = hash(model, tenant, adapter, salt)          block hash = hash(parent's hash, HASH_TOKENS tokens)
    public root = hash(model, adapter)                 parent of the first block of a public prefix

A hash covers its own tokens and all tokens before them. HASH_TOKENS is fixed, so hashes do not depend on the page
layout. Media tokens are hashed by the digest of their content. `hash_index` maps hashes to locations.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.pool_layout import HASH_TOKENS
from kvloom.core.pool import loops

__all__ = [
    "HASH_BYTES",
    "TOKEN_BYTES",
    "BlockHash",
    "hash_chain",
    "media_hash",
    "public_root_hash",
    "root_hash",
    "tail_hash",
    "token_at",
    "token_bytes",
    "unit_hashes",
]

HASH_BYTES = 16
"""Bytes of a block hash."""
TOKEN_BYTES = 4
"""Bytes of a token id in hashes and events."""
token_at = struct.Struct("<i").unpack_from
"""Reads the token at a byte offset. Returns a tuple with one element."""
_TOKEN = np.dtype("<i4")
_UNIT_BYTES = HASH_TOKENS * TOKEN_BYTES
Resolve = Callable[[int], bytes]
_HASH = blake2b(digest_size=HASH_BYTES)


class BlockHash(bytes):
    """The hash of a block that has several units of HASH_TOKENS tokens. Its value is the hash of the last unit.
    `units` contains the hashes of all units, for tiers that store pages of HASH_TOKENS tokens.
    """

    units: tuple[bytes, ...]

    @classmethod
    def of(cls, units: Sequence[bytes]) -> bytes:
        """Return the hash of a block that consists of these units, in order. For a single unit, return the unit's hash
        itself."""
        if len(units) == 1:
            return units[0]
        block = cls(units[-1])
        block.units = tuple(units)
        return block


def unit_hashes(block_hash: bytes) -> tuple[bytes, ...]:
    """Return the hashes of a block's units (HASH_TOKENS tokens each), in order."""
    return block_hash.units if isinstance(block_hash, BlockHash) else (block_hash,)


def token_bytes(tokens: npt.ArrayLike) -> bytes:
    """Return token ids as little-endian int32 bytes. Hashes and the radix tree use this form."""
    if isinstance(tokens, np.ndarray):
        array = tokens
    elif (plain := loops.plain_ids(tokens)) is not None:
        return bytes(plain)
    else:
        array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be a 1-D array of ids, got shape {array.shape}")
    if array.dtype != _TOKEN:
        if array.size:
            if array.dtype.kind not in "iu":
                raise ValueError(f"tokens must be integers, got {array.dtype}")
            if not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
                raise ValueError(f"token ids from {array.min()} to {array.max()} do not fit 31 bits")
        array = array.astype(_TOKEN)
    data: bytes = array.tobytes()
    if loops.any_negative(data):
        raise ValueError(f"token id {array.min()} is negative; ids start at 0")
    return data


def root_hash(model: str, tenant: str = "", adapter: str = "", salt: str = "") -> bytes:
    """Return the root hash of one model, tenant, adapter and salt. This hash is the parent of the first block hash."""
    parts = (model, tenant, adapter, salt) if salt else (model, tenant, adapter)
    return blake2b(_joined(parts), digest_size=HASH_BYTES, person=b"kvloom.root").digest()


def public_root_hash(model: str, adapter: str = "") -> bytes:
    """Return the root hash of public prefixes of one model and adapter. All tenants share this hash. No call of
    `root_hash` returns the same hash."""
    return blake2b(_joined((model, adapter)), digest_size=HASH_BYTES, person=b"kvloom.public").digest()


def _joined(parts: Sequence[str]) -> bytes:
    """Return the texts joined to one message. The length of each text precedes the text."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in (s.encode() for s in parts))


def media_hash(root: bytes, digest: bytes) -> bytes:
    """Return the hash of the media run (the cached pages) of an image, for requests with the root hash `root`.
    `digest` is the digest of the image's content."""
    return blake2b(root + digest, digest_size=HASH_BYTES, person=b"kvloom.media").digest()


def hash_chain(parent: bytes, data: bytes | memoryview, resolve: Resolve | None = None) -> list[bytes]:
    """Return the chain of block hashes of `data`: one hash for each HASH_TOKENS tokens.

    - `parent` is the parent of the first hash.
    - `data` are token bytes that start at a multiple of HASH_TOKENS.
    - `resolve` maps a negative id (a media token) to its digest. Without `resolve` there must be no media tokens.
    """
    raw = bytes(data)
    whole = len(raw) // _UNIT_BYTES * _UNIT_BYTES
    media = resolve is not None and whole > 0 and loops.any_negative(raw)
    if not media and loops.chain is not None:
        return loops.chain(parent, raw)
    hashes = []
    fresh = _HASH.copy  # copying a hash object costs less than creating one
    for (unit,) in struct.iter_unpack(f"{_UNIT_BYTES}s", raw[:whole]):
        if media and resolve is not None:
            unit = _with_media(unit, resolve)
        link = fresh()
        link.update(parent + unit)
        parent = link.digest()
        hashes.append(parent)
    return hashes


def tail_hash(parent: bytes, data: bytes | memoryview, resolve: Resolve | None = None) -> bytes:
    """Return the hash of a partial last block, which has fewer than HASH_TOKENS tokens after `parent`."""
    if not 0 < len(data) < _UNIT_BYTES:
        raise ValueError(f"a tail has 1 to {HASH_TOKENS - 1} tokens, got {len(data) / TOKEN_BYTES:g}")
    message = bytes(data) if resolve is None else _with_media(bytes(data), resolve)
    return blake2b(parent + message, digest_size=HASH_BYTES, person=b"kvloom.tail").digest()


def _with_media(data: bytes, resolve: Resolve) -> bytes:
    """Return the bytes to hash for tokens that may include media tokens. The bytes contain the tokens, with -1 for
    every media token. The range and the digest of each image follow after the tokens."""
    if not loops.any_negative(data):
        return data
    ids = np.frombuffer(data, "<i4")
    edges = np.flatnonzero(np.diff(ids)) + 1
    parts = [np.where(ids < 0, -1, ids).astype("<i4").tobytes()]
    for start, stop in zip([0, *edges], [*edges, ids.size], strict=True):
        if ids[start] < 0:
            parts.append(struct.pack("<BB", start, stop) + resolve(int(ids[start])))
    return b"".join(parts)
