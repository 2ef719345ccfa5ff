"""Places in the host tier's arena, lent to whoever copies to or from them, until the copies are made.

Knows slots; what a place holds and who else may have it is the tier's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .slots import Index
from .tier import Objects

if TYPE_CHECKING:
    from .host import HostTier

__all__ = ["Lease"]


class Lease:
    """Places in the arena, held until `release`. `offsets` is -1 where there is none; `results` says why."""

    __slots__ = ("_objects", "_slots", "_tier", "offsets", "results")

    def __init__(
        self, tier: HostTier, objects: Objects, slots: Index, offsets: Index, results: npt.NDArray[np.uint8]
    ) -> None:
        self._tier, self._objects = tier, objects
        self._slots = slots  # -1 where it holds none
        self.offsets, self.results = offsets, results

    def release(self, written: bool | npt.NDArray[np.bool_] = True) -> None:
        """Lets go. After `reserve`, `written` says that the bytes are there, of all or of each; without them the places
        are free again. Twice is harmless."""
        slots, self._slots = self._slots, self._slots[:0]
        self._tier._release(self._objects, slots, written)

    @property
    def check_bytes(self) -> int:
        """Bytes of the checksums of all its pages."""
        return int((self._slots >= 0).sum()) * 8 * self._objects.form.runs

    def checks(self) -> list[bytes]:
        """The checksums of the held pages that are ready, in order; made now where the tier has none. For whoever
        copies them to where bytes may be damaged."""
        held = self._slots[self._slots >= 0]
        ready = held[self._tier._slots.ready[held]].tolist()
        return [self._tier._checks(slot) for slot in ready]

    def keep_checks(self, data: bytes) -> None:
        """After `reserve`: the checksums of the pages that are being filled, one page after the other, from whoever
        fills them. A ValueError if they are not as many as there are pages."""
        held = self._slots[self._slots >= 0]
        fresh = held[~self._tier._slots.ready[held]].tolist()
        size = 8 * self._objects.form.runs
        if len(data) != len(fresh) * size:
            raise ValueError(f"{len(data)} bytes of checksums for {len(fresh)} pages of {size}")
        for number, slot in enumerate(fresh):
            self._tier._slots.checks[slot] = data[number * size : (number + 1) * size]
