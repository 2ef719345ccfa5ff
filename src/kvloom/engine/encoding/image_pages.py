"""Images and their embeddings as pages of a tier.

    pages   [total bytes u64 | header bytes u32 | header (JSON) | tensors …] in pages of PAGE_BYTES; the last is padded
    hash    of the image's key and the number of the page; the key covers image encoder, tenant and content

The first page has a separate group number and is written last. If a tier has the first page, all pages of the image
were written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import HASH_BYTES
from kvloom.tiers import Form, Objects, Ranges, Tier

__all__ = [
    "EMBEDDINGS",
    "INPUTS",
    "PAGE_BYTES",
    "Kind",
    "PagesError",
    "first_page",
    "image_key",
    "pack",
    "page_objects",
    "read_fields",
    "read_pages",
    "unpack",
    "write_pages",
]

PAGE_BYTES = 64 << 10
MAX_BYTES = 1 << 30
_HEAD_BYTES = 12
_FORM = Form("uint8", "B", PAGE_BYTES, PAGE_BYTES, layout="image 1")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}

Pages = npt.NDArray[np.uint8]


class Kind(NamedTuple):
    """The group numbers under which a tier stores the first page (`first`) and the other pages (`rest`) of an image."""

    first: int
    rest: int


INPUTS = Kind((1 << 32) - 2, (1 << 32) - 3)
"""Group numbers for the pages of an image, which contain the tensors of the model's processor."""
EMBEDDINGS = Kind((1 << 32) - 4, (1 << 32) - 5)
"""Group numbers for the pages of an image's embeddings."""


class PagesError(RuntimeError):
    """Raised if a tier lacks pages or does not move them in time."""


def image_key(encoder: str, tenant: str, digest: bytes) -> bytes:
    """Return the key of an image. `encoder` is the fingerprint of the model's image part."""
    parts = (encoder.encode(), tenant.encode(), digest)
    data = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(data, digest_size=32, person=b"kvloom.encoder").digest()


def first_page(block_hash: bytes, kind: Kind) -> Objects:
    """Return the first page of an image as an object of a tier. `block_hash` is the hash of this page. `kind` has the
    group numbers of the pages."""
    return Objects([block_hash], kind.first, _FORM)


def page_objects(key: bytes, kind: Kind, tenant: str, start: int, stop: int) -> Objects:
    """Return the pages [start, stop) of an image as objects of a tier. `kind` has the group numbers of the pages. The
    first page has its own group number. Therefore a call returns only the first page (`start` 0, `stop` 1), or only
    later pages (`start` above 0)."""
    hashes = [
        blake2b(key + number.to_bytes(4, "little"), digest_size=HASH_BYTES).digest()
        for number in range(start, stop)
    ]
    return Objects(hashes, kind.rest if start else kind.first, _FORM, tenant)


def pack(fields: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> Pages:
    """Return pages that contain `fields` and `tensors`. Copies the tensors. Raises PagesError if they exceed
    MAX_BYTES."""
    described, data = [], []
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        described.append((name, str(host.dtype).removeprefix("torch."), list(host.shape)))
        data.append(host.reshape(-1).view(torch.uint8).numpy())
    header = msgspec.json.encode({"fields": dict(fields), "tensors": described})
    size = _HEAD_BYTES + len(header) + sum(len(part) for part in data)
    if size > MAX_BYTES:
        raise PagesError(f"an image of {size:,} bytes exceeds the limit of {MAX_BYTES:,}")
    pages = np.zeros(-(-size // PAGE_BYTES) * PAGE_BYTES, np.uint8)
    head = size.to_bytes(8, "little") + len(header).to_bytes(4, "little") + header
    at = len(head)
    pages[:at] = np.frombuffer(head, np.uint8)
    for part in data:
        pages[at : at + len(part)] = part
        at += len(part)
    return pages.reshape(-1, PAGE_BYTES)


def read_fields(pages: Pages) -> dict[str, str]:
    """Return the fields of an image, which its first page contains. Raises PagesError for invalid bytes."""
    return _header(pages)[0].fields


def unpack(pages: Pages) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the fields and tensors of pages. Copies the tensors. Raises PagesError for
    invalid bytes.
    """
    data = pages.reshape(-1)
    found, at = _header(pages)
    try:
        tensors = {}
        for name, dtype, shape in found.tensors:
            kind = _DTYPES[dtype]
            size = prod(shape) * kind.itemsize
            if min(shape, default=0) < 0 or at + size > _size(pages):
                raise ValueError(f"a tensor of shape {shape} exceeds the pages")
            # Copy, because the bytes of a tensor may begin at an address that is not aligned for its dtype.
            tensors[name] = torch.from_numpy(data[at : at + size].copy()).view(kind).reshape(shape)
            at += size
    except (ValueError, KeyError, RuntimeError) as error:
        raise PagesError(f"the pages of an image are invalid: {error}") from error
    return found.fields, tensors


class _Header(msgspec.Struct):
    fields: dict[str, str]
    tensors: list[tuple[str, str, list[int]]]


def _header(pages: Pages) -> tuple[_Header, int]:
    """Return the header, and the byte position of the first tensor in the pages."""
    data = pages.reshape(-1)
    end = _HEAD_BYTES + int.from_bytes(data[8:_HEAD_BYTES].tobytes(), "little")
    try:
        return msgspec.json.decode(data[_HEAD_BYTES:end].tobytes(), type=_Header), end
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PagesError(f"the pages of an image have an invalid header: {error}") from error


def _size(pages: Pages) -> int:
    """Return the number of bytes in use in all pages. The first page contains this number. Raises PagesError if the
    number is invalid."""
    size = int.from_bytes(pages.reshape(-1)[:8].tobytes(), "little")
    if not _HEAD_BYTES <= size <= MAX_BYTES:
        raise PagesError(f"the first page of an image states {size:,} bytes; the limit is {MAX_BYTES:,}")
    return size


def write_pages(tier: Tier, key: bytes, kind: Kind, tenant: str, pages: Pages, deadline: float) -> None:
    """Write the pages of an image, the first page last. The arguments are those of `page_objects`. Raises PagesError if
    the tier does not store the pages before `deadline`."""
    _move(tier.write, page_objects(key, kind, tenant, 1, len(pages)), pages[1:], deadline)
    _move(tier.write, page_objects(key, kind, tenant, 0, 1), pages[:1], deadline)


def read_pages(tier: Tier, key: bytes, kind: Kind, tenant: str, deadline: float) -> Pages:
    """Read the pages of an image from a tier. The arguments are those of `page_objects`. Raises PagesError if a page is
    missing or damaged, or arrives after `deadline`."""
    first = np.empty((1, PAGE_BYTES), np.uint8)
    _move(tier.read, page_objects(key, kind, tenant, 0, 1), first, deadline)
    count = -(-_size(first) // PAGE_BYTES)
    pages = np.empty((count, PAGE_BYTES), np.uint8)
    pages[0] = first[0]
    _move(tier.read, page_objects(key, kind, tenant, 1, count), pages[1:], deadline)
    return pages


def _move(move: Any, objects: Objects, pages: Pages, deadline: float) -> None:
    if not len(objects):
        return
    transfer = move(objects, Ranges(pages.reshape(-1), np.arange(len(pages)) * PAGE_BYTES))
    if not transfer.wait(max(0.0, deadline - time.monotonic())):
        transfer.cancel()
    if not transfer.ok.all():
        raise PagesError(
            transfer.reason or f"{int((~transfer.ok).sum())} of {len(pages)} pages were not moved"
        )
