"""Leases of arena pages. A leased page is neither evicted nor reused while the caller copies to or from it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloom.tiers.tier import Objects

from .slots import Index

__all__ = ["Lease", "LeaseOwner"]


class LeaseOwner(Protocol):
    """The interface of a tier that leases its pages. Thread-safe."""

    def release_slots(
        self, objects: Objects, slots: Index, written: bool | npt.NDArray[np.bool_]
    ) -> None: ...

    def ready_checksums(self, slots: Index) -> list[bytes]:
        """Return the checksums of the leased slots whose pages are ready, in order."""
        ...

    def set_checksums(self, slots: Index, data: bytes, size: int) -> None:
        """Store the checksums of the leased pages, which are being filled. `data` has `size` bytes for each page.
        Raises ValueError if `data` has a wrong length."""
        ...


class Lease:
    """Leased pages of host memory (the arena), which stay in use until `release`. `offsets` contains the position of
    each object's page in the arena. The position is -1 if the object has no page. In this case, `results` contains the
    reason. `tick` is the time of the lease in the host tier's order of use."""

    __slots__ = ("_objects", "_owner", "offsets", "results", "slots", "tick")

    def __init__(
        self,
        owner: LeaseOwner,
        objects: Objects,
        slots: Index,
        offsets: Index,
        results: npt.NDArray[np.uint8],
        tick: int = 0,
    ) -> None:
        self._owner, self._objects = owner, objects
        self.tick = tick
        self.slots = slots  # -1 if the object has no page
        self.offsets, self.results = offsets, results

    def release(self, written: bool | npt.NDArray[np.bool_] = True) -> None:
        """End the lease. A second call has no effect. After `reserve`, `written` states whether the bytes are
        complete, as one value for all pages or one per page. Incomplete pages are freed."""
        slots, self.slots = self.slots, self.slots[:0]
        self._owner.release_slots(self._objects, slots, written)

    @property
    def checksum_bytes(self) -> int:
        """Size of the checksums of all leased pages, in bytes."""
        return int((self.slots >= 0).sum()) * 8 * self._objects.form.runs

    def page_checksums(self) -> list[bytes]:
        """Return the checksums of the leased pages that are ready, in order. Computes missing checksums."""
        return self._owner.ready_checksums(self.slots[self.slots >= 0])

    def set_checksums(self, data: bytes) -> None:
        """Store the checksums that the writer computed for the pages of a `reserve` lease, page after page. Raises
        ValueError if the number of checksums is wrong.
        """
        size = 8 * self._objects.form.runs
        self._owner.set_checksums(self.slots[self.slots >= 0], data, size)
