"""The Tier protocol: batched lookup, read, write and drop of objects, to and from ranges of the caller's memory.

    object   name (content) + group + form (how the bytes lie)     one page, cut into equal layer runs
    range    where a page begins in the caller's buffer            a read may ask for some runs only

A tier sees names and bytes. It does not know kinds, tokens or devices, and of a tenant only whose key encrypts and whose
share pays; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.core.names import NAME_BYTES

from .transfer import TierStats, Transfer

__all__ = ["FORM_BYTES", "KEY_BYTES", "MOST_RUNS", "Form", "Objects", "Ranges", "Tier", "TierError", "parted"]

FORM_BYTES = 16
KEY_BYTES = NAME_BYTES + 4 + FORM_BYTES
MOST_RUNS = 1 << 16


class TierError(RuntimeError):
    """A tier cannot be opened as asked; the message says what to do. Verbs of an open tier never raise it."""


@dataclass(frozen=True)
class Form:
    """How an object's bytes lie. Two forms that differ in anything have different fingerprints, so neither ever
    reads the other's bytes.

    `run_bytes` is the size of one layer's run: checksums are per run, and a read may ask for whole runs only.
    `shard` and `layout` are free text (a parallel rank, a page layout's own fingerprint). Lossy bytes say
    `exact=False`.
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
                f"a page of {self.page_bytes} bytes is not a whole number of runs of {self.run_bytes}: "
                "give run_bytes=page_bytes if its layers differ"
            )
        if self.page_bytes >= 1 << 31:
            raise ValueError(f"page_bytes={self.page_bytes} is beyond 2 GiB: cut the group into more pages")
        if self.runs > MOST_RUNS:
            raise ValueError(f"{self.runs} runs a page are beyond {MOST_RUNS}: give larger run_bytes")

    @property
    def runs(self) -> int:
        return self.page_bytes // self.run_bytes

    @cached_property
    def fingerprint(self) -> bytes:
        parts = (self.dtype, self.order, self.shard, self.layout, "exact" if self.exact else "lossy")
        text = b"".join(len(p).to_bytes(8, "little") + p for p in (s.encode() for s in parts))
        sizes = self.page_bytes.to_bytes(8, "little") + self.run_bytes.to_bytes(8, "little")
        return blake2b(sizes + text, digest_size=FORM_BYTES, person=b"kvloom.form").digest()


@dataclass(frozen=True)
class Objects:
    """A batch of objects of one group and form. Keep it and use it again: its keys are made once.

    `tenant` says whose key encrypts them, where a tier encrypts, and whose share they count for (`shares.py`). It is not part of their keys: a tenant's salt is in
    their names already."""

    names: Sequence[bytes]
    group: int
    form: Form
    tenant: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.group < 1 << 32:
            raise ValueError(f"group={self.group} is not an index of a group")
        if set(map(len, self.names)) - {NAME_BYTES}:
            wrong = next(name for name in self.names if len(name) != NAME_BYTES)
            raise ValueError(f"name {wrong!r} has {len(wrong)} bytes; names have {NAME_BYTES}")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def keys(self) -> list[bytes]:
        """One key an object: name, group, fingerprint of the form."""
        tail = self.group.to_bytes(4, "little") + self.form.fingerprint
        return [name + tail for name in self.names]

    def stored_as(self, keys: list[bytes]) -> Objects:
        """Returns the same objects under other `keys`, one for each."""
        renamed = Objects(self.names, self.group, self.form, self.tenant)
        vars(renamed)["keys"] = keys
        return renamed


@dataclass(frozen=True)
class Ranges:
    """Where pages begin in the caller's memory: one offset an object. Makes no copy of the buffer.

    Aligned memory (4096 bytes) lets a disk read land in place.
    """

    buffer: Any  # whatever has the buffer protocol; a row of uint8 afterwards
    offsets: npt.ArrayLike

    def __post_init__(self) -> None:
        view = memoryview(self.buffer)
        if not view.c_contiguous:
            raise ValueError(
                f"the buffer of shape {view.shape} is not contiguous: hand in the memory it views"
            )
        object.__setattr__(self, "buffer", np.frombuffer(view, np.uint8))
        object.__setattr__(self, "offsets", np.asarray(self.offsets, np.int64).reshape(-1))

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        array: npt.NDArray[np.uint8] = self.buffer
        return array

    @property
    def view(self) -> memoryview:
        return memoryview(self.buffer)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.offsets, np.int64)

    @property
    def address(self) -> int:
        return int(self.bytes.__array_interface__["data"][0])

    def check(self, objects: Objects, writable: bool) -> None:
        """A ValueError unless every object has its page inside the buffer."""
        starts, size = self.starts, objects.form.page_bytes
        if len(starts) != len(objects):
            raise ValueError(f"{len(starts)} ranges for {len(objects)} objects: give one offset an object")
        if len(starts) and (int(starts.min()) < 0 or int(starts.max()) + size > len(self.bytes)):
            raise ValueError(
                f"pages of {size} bytes from {int(starts.min())} to {int(starts.max()) + size} do not fit "
                f"a buffer of {len(self.bytes)} bytes"
            )
        if writable and not self.bytes.flags.writeable:
            raise ValueError("the buffer is read-only, and a read would write to it")


class Tier(Protocol):
    """A place for pages below the device pool.

    Every verb is safe from any thread, takes a batch, and raises only ValueError, for a batch that makes no
    sense, before anything is changed. What the medium does wrong is an outcome in the Transfer. Until a
    Transfer is `quiet` its ranges belong to the tier; after any outcome but OK a read range's bytes mean nothing.
    """

    @property
    def name(self) -> str: ...

    @property
    def capacity(self) -> int:
        """Bytes it may use, its own bookkeeping in memory not counted."""
        ...

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        """Which objects a read would probably find. No promise: they may leave, or prove bad."""
        ...

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        """Bytes [start, stop) of every object to the same place in its range; `part` is on run borders. Reads
        are served in the order of the calls, so that first layers asked for first arrive first."""
        ...

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        """Whole objects. OK means kept as the tier promises (a disk: durable). What is there already is OK."""
        ...

    def drop(self, objects: Objects) -> int:
        """Forget them; returns how many there were."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish or fail what is under way in bounded time. Afterwards every verb misses. Twice is harmless."""
        ...


def parted(form: Form, part: tuple[int, int] | None) -> tuple[int, int]:
    """The byte range of a part, the whole page for None; a ValueError off run borders."""
    if part is None:
        return 0, form.page_bytes
    start, stop = part
    if not 0 <= start < stop <= form.page_bytes or start % form.run_bytes or stop % form.run_bytes:
        raise ValueError(
            f"part {part} is not made of whole runs of {form.run_bytes} bytes in a page of {form.page_bytes}"
        )
    return start, stop
