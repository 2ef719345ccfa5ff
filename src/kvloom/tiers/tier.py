"""The Tier protocol: batched lookup, read, write and drop of objects. Reads and writes use ranges of the caller's
memory.

    object   one page. Its key contains the block hash, the layer group and the form (byte layout)
    range    the memory of one page in the caller's buffer, given by its start

A page consists of equal layer runs. A layer run is the data of one layer, or the whole page. Each layer run has a
checksum. A read may request only some layer runs of a page. A tier handles keys and bytes. It does not depend on layer
kinds, tokens, devices or torch. Of a tenant, a tier uses only the encryption key and the share of the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.core import HASH_BYTES

from .transfer import TierStats, Transfer

__all__ = [
    "FORM_BYTES",
    "KEY_BYTES",
    "MAX_RUNS",
    "Form",
    "Objects",
    "Ranges",
    "Tier",
    "TierError",
    "part_range",
]

FORM_BYTES = 16
KEY_BYTES = HASH_BYTES + 4 + FORM_BYTES
MAX_RUNS = 1 << 16


class TierError(RuntimeError):
    """Raised if a tier cannot be opened or set up, never by its reads and writes. The message states the remedy."""


@dataclass(frozen=True)
class Form:
    """The byte layout of an object. Two servers can share pages only if their forms are equal in every field.

    - `order`: the order of the axes, such as LFHTD (layer, field, head, token, dim).
    - `run_bytes`: the size of a layer run, which is the data of one layer or the whole page. Each layer run has
      a checksum, and a read requests whole layer runs.
    - `shard`: free text. It names the part of the model or block, such as a parallel rank.
    - `layout`: free text. It describes the layers and fields of the page.
    - `exact`: False if the pages may be re-encoded (lossy).
    """

    dtype: str
    order: str
    page_bytes: int
    run_bytes: int
    shard: str = ""
    layout: str = ""
    exact: bool = True

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.run_bytes <= 0 or self.page_bytes % self.run_bytes:
            raise ValueError(
                f"page_bytes={self.page_bytes} is not a multiple of run_bytes={self.run_bytes}: "
                "use run_bytes=page_bytes if the layers differ in size"
            )
        if self.page_bytes >= 1 << 31:
            raise ValueError(
                f"page_bytes={self.page_bytes} is not below 2 GiB: split the group into more pages"
            )
        if self.runs > MAX_RUNS:
            raise ValueError(
                f"{self.runs} runs per page exceed the limit of {MAX_RUNS}: use larger run_bytes"
            )

    @property
    def runs(self) -> int:
        """Number of layer runs in a page."""
        return self.page_bytes // self.run_bytes

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of all fields. Keys of objects contain it."""
        parts = (self.dtype, self.order, self.shard, self.layout, "exact" if self.exact else "lossy")
        text = b"".join(len(p).to_bytes(8, "little") + p for p in (s.encode() for s in parts))
        sizes = self.page_bytes.to_bytes(8, "little") + self.run_bytes.to_bytes(8, "little")
        return blake2b(sizes + text, digest_size=FORM_BYTES, person=b"kvloom.form").digest()


@dataclass(frozen=True)
class Objects:
    """A batch of objects of one group and form. The property `keys` is computed once per batch, so reuse a batch
    if possible.

    `tenant` selects the encryption key and the share (`shares.py`). `keys` do not contain the tenant, because
    the block hashes already depend on it.
    """

    block_hashes: Sequence[bytes]
    group: int
    form: Form
    tenant: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.group < 1 << 32:
            raise ValueError(f"group={self.group} is not a group index: use 0 to 2**32 - 1")
        if set(map(len, self.block_hashes)) - {HASH_BYTES}:
            wrong = next(name for name in self.block_hashes if len(name) != HASH_BYTES)
            raise ValueError(f"block hash {wrong!r} has {len(wrong)} bytes; block hashes have {HASH_BYTES}")

    def __len__(self) -> int:
        return len(self.block_hashes)

    @cached_property
    def keys(self) -> list[bytes]:
        """The keys of the objects. A key contains the block hash, the group and the fingerprint of the form."""
        tail = self.group.to_bytes(4, "little") + self.form.fingerprint
        return [name + tail for name in self.block_hashes]

    def take(self, indexes: npt.NDArray[np.int64] | Sequence[int]) -> Objects:
        """Return a batch of the objects at `indexes`."""
        hashes = [self.block_hashes[i] for i in np.asarray(indexes, np.int64).tolist()]
        return Objects(hashes, self.group, self.form, self.tenant)

    def with_keys(self, keys: list[bytes]) -> Objects:
        """Return a batch of the same objects with other keys, one per object. A tier with a key file uses this
        method, because it does not store pages under `Objects.keys`."""
        renamed = Objects(self.block_hashes, self.group, self.form, self.tenant)
        vars(renamed)["keys"] = keys
        return renamed


@dataclass(frozen=True)
class Ranges:
    """The memory of a batch: a buffer, and the start of each object's page in the buffer. Does not copy the buffer.

    If the pages are aligned to 4096 bytes, a disk tier can transfer them without a copy.
    """

    buffer: Any  # any object with the buffer protocol; a uint8 array after initialisation
    offsets: npt.ArrayLike

    def __post_init__(self) -> None:
        view = memoryview(self.buffer)
        if not view.c_contiguous:
            raise ValueError(
                f"the buffer of shape {view.shape} is not contiguous: pass the memory that it views"
            )
        object.__setattr__(self, "buffer", np.frombuffer(view, np.uint8))
        object.__setattr__(self, "offsets", np.asarray(self.offsets, np.int64).reshape(-1))

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The buffer as bytes. A view, not a copy."""
        array: npt.NDArray[np.uint8] = self.buffer
        return array

    @property
    def view(self) -> memoryview:
        """The buffer as a memoryview."""
        return memoryview(self.buffer)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The start of each page in the buffer, in bytes."""
        return np.asarray(self.offsets, np.int64)

    @property
    def address(self) -> int:
        """The address of the buffer in memory."""
        return int(self.bytes.__array_interface__["data"][0])

    def check(self, objects: Objects, writable: bool) -> None:
        """Raises ValueError unless there is one range per object and every page lies inside the buffer. With
        `writable`, also raises ValueError if the buffer is read-only."""
        starts, size = self.starts, objects.form.page_bytes
        if len(starts) != len(objects):
            raise ValueError(f"{len(starts)} ranges for {len(objects)} objects: give one offset per object")
        if len(starts) and (int(starts.min()) < 0 or int(starts.max()) + size > len(self.bytes)):
            raise ValueError(
                f"pages of {size} bytes from {int(starts.min())} to {int(starts.max()) + size} do not fit "
                f"a buffer of {len(self.bytes)} bytes"
            )
        if writable and not self.bytes.flags.writeable:
            raise ValueError("the buffer is read-only; a read needs a writable buffer")


class Tier(Protocol):
    """A location for pages outside the device pool.

    Every method is thread-safe and takes a batch. An invalid batch raises ValueError before any change. Faults of the
    medium never raise: they are outcomes in the Transfer. The tier may access the ranges until the Transfer is
    `released`. If the outcome of a read is not OK, the bytes of its range are undefined. A tier may also support
    tenant shares (`SupportsShares`).
    """

    @property
    def name(self) -> str:
        """Name of the tier in statistics and logs, such as `host` or `disk:/path`."""
        ...

    @property
    def capacity(self) -> int:
        """Number of bytes that the tier may use, without its bookkeeping."""
        ...

    @property
    def is_lossy(self) -> bool:
        """Whether the tier re-encodes pages. Requests that need exact pages never load from a lossy tier."""
        return False

    @property
    def is_reachable(self) -> bool:
        """Whether the last call reached the medium."""
        return True

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        """Return for each object whether a read would probably find it. A page may still be evicted or damaged
        before the read.
        """
        ...

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        """Read bytes [start, stop) of every page. The bytes are written to the same range [start, stop) of the page's
        memory in `into`. Return the transfer.

        `part` is (start, stop) and must begin and end at boundaries of layer runs. None means the whole page. A
        tier serves reads in the order of the calls, so layers that are requested first arrive first.
        """
        ...

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        """Write whole objects from the memory ranges `source`. Return the transfer. The outcome OK means that the
        page is stored now, or was stored before. In a disk tier, such a page survives a crash."""
        ...

    def drop(self, objects: Objects) -> int:
        """Remove objects. Return the number removed."""
        ...

    def stats(self) -> TierStats:
        """Return the size of the tier, and counts of reads and writes by outcome."""
        ...

    def close(self) -> None:
        """Finish pending transfers, or fails them after a bounded time. Afterwards every lookup and read is a miss.
        A second call has no effect."""
        ...


def part_range(form: Form, part: tuple[int, int] | None) -> tuple[int, int]:
    """Return the byte range of `part`, or of the whole page if `part` is None. Raises ValueError if the range does
    not begin and end at boundaries of layer runs.
    """
    if part is None:
        return 0, form.page_bytes
    start, stop = part
    if not 0 <= start < stop <= form.page_bytes or start % form.run_bytes or stop % form.run_bytes:
        raise ValueError(
            f"part {part} does not consist of whole runs of {form.run_bytes} bytes in a page of {form.page_bytes}"
        )
    return start, stop
