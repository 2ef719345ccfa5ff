"""Leases of arena pages, for the caller that copies to or from them.

The owner decides what a page contains and which other leases it has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloom.tiers.tier import Objects

from .slots import Index

__all__ = ["Lease", "LeaseOwner"]


class LeaseOwner(Protocol):
    """The tier that leases its pages. Thread-safe."""

    def release_slots(
        self, objects: Objects, slots: Index, written: bool | npt.NDArray[np.bool_]
    ) -> None: ...

    def ready_checksums(self, slots: Index) -> list[bytes]:
        """Returns the checksums of the ready pages among leased slots, in order."""
        ...

    def set_checksums(self, slots: Index, data: bytes, size: int) -> None:
        """Stores `size` bytes of checksums for each page that is being filled. ValueError for a wrong length."""
        ...


class Lease:
    """Arena pages, in use until `release`. An offset is -1 without a page; `results` has the reason."""

    __slots__ = ("_objects", "_owner", "offsets", "results", "slots")

    def __init__(
        self,
        owner: LeaseOwner,
        objects: Objects,
        slots: Index,
        offsets: Index,
        results: npt.NDArray[np.uint8],
    ) -> None:
        self._owner, self._objects = owner, objects
        self.slots = slots  # -1 without a page
        self.offsets, self.results = offsets, results

    def release(self, written: bool | npt.NDArray[np.bool_] = True) -> None:
        """Ends the lease. Idempotent.

        After `reserve`, `written` states whether the bytes are complete, for all pages or per page; pages without
        them are freed.
        """
        slots, self.slots = self.slots, self.slots[:0]
        self._owner.release_slots(self._objects, slots, written)

    @property
    def checksum_bytes(self) -> int:
        """Bytes of the checksums of all leased pages."""
        return int((self.slots >= 0).sum()) * 8 * self._objects.form.runs

    def page_checksums(self) -> list[bytes]:
        """Returns the checksums of the leased pages that are ready, in order. Computes missing ones."""
        return self._owner.ready_checksums(self.slots[self.slots >= 0])

    def set_checksums(self, data: bytes) -> None:
        """After `reserve`: stores the writer's checksums of the pages being filled, page after page.

        Raises ValueError if their number does not match.
        """
        size = 8 * self._objects.form.runs
        self._owner.set_checksums(self.slots[self.slots >= 0], data, size)
