"""Keys of LMCache's objects in kvloom's tiers, and the file names of LMCache's `fs` adapter."""

from __future__ import annotations

from hashlib import blake2b

from lmcache.v1.distributed.api import ObjectKey

from kvloom.core import HASH_BYTES
from kvloom.tiers import Form, Objects

__all__ = ["as_objects", "object_form", "parse_file_name"]

FILE_SUFFIX = ".data"


def object_form(size: int) -> Form:
    """Return the form (byte layout) of objects of `size` bytes. The form depends only on the size, because LMCache's
    keys contain everything else that distinguishes objects."""
    return Form(dtype="bytes", order="lmcache", page_bytes=size, run_bytes=size)


def as_objects(keys: list[ObjectKey], size: int, namespace: str) -> Objects:
    """Return a batch of objects of `size` bytes each. Their hashes cover `keys` and `namespace`."""
    return Objects([_hash(key, namespace) for key in keys], 0, object_form(size))


def _hash(key: ObjectKey, namespace: str) -> bytes:
    parts = (
        namespace.encode(),
        key.model_name.encode(),
        f"{key.kv_rank:x}".encode(),
        f"{key.object_group_id:x}".encode(),
        key.cache_salt.encode(),
        key.chunk_hash,
    )
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(data, digest_size=HASH_BYTES, person=b"kvloom.lmcache").digest()


def parse_file_name(name: str) -> ObjectKey | None:
    """Return the key in the name of a file. The name consists of model, rank, group, chunk hash and, optionally,
    salt, separated by @. Return None if the name has another format.
    """
    parts = name.removesuffix(FILE_SUFFIX).split("@")
    if not name.endswith(FILE_SUFFIX) or len(parts) not in (4, 5):
        return None
    model, rank, group, chunk, *salt = parts
    try:
        return ObjectKey(
            chunk_hash=bytes.fromhex(chunk),
            model_name=model.replace("-SEP-", "/"),
            kv_rank=int(rank, 16),
            object_group_id=int(group, 16),
            cache_salt=salt[0] if salt else "",
        )
    except ValueError:
        return None
