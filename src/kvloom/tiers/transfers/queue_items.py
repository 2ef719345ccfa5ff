"""The items of a tier queue: lookups, loads, and the transfer batches of loads and stores. Data only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.tiers.host import Lease
from kvloom.tiers.tier import Objects
from kvloom.tiers.transfer import Transfer

__all__ = ["QueuedLoad", "QueuedLookup", "TransferBatch"]

Mask = npt.NDArray[np.bool_]


class QueuedLookup:
    """A lookup of several batches of objects in one tier. `found` has one mask per batch, and is valid once `done` is
    set. If the tier does not answer in time, the objects are misses."""

    def __init__(self, objects: list[Objects]) -> None:
        self.objects = objects
        self.found: list[Mask] = [np.zeros(len(o), bool) for o in objects]
        self.done = False


class QueuedLoad:
    """A load of objects of one form into host memory. `loaded` states for each object whether it was loaded, and is
    valid once `done` is set."""

    def __init__(self, objects: Objects, deadline: float) -> None:
        self.objects, self.deadline = objects, deadline
        self.loaded: Mask = np.zeros(len(objects), bool)
        self.remaining = len(objects)
        self.is_cancelled = False

    @property
    def done(self) -> bool:
        return self.remaining == 0 or self.is_cancelled


@dataclass(slots=True, eq=False)
class TransferBatch:
    """Part of a load, or of a store if `load` is None. `size` is the number of bytes. While the batch is in flight, it
    leases pages of the host arena."""

    objects: Objects
    size: int
    load: QueuedLoad | None
    positions: npt.NDArray[np.int64] | None = None  # indices of the batch's objects in the load
    lease: Lease | None = None
    requested: npt.NDArray[np.int64] | None = None  # indices of the batch's objects that the tier transfers
    transfer: Transfer | None = None
    started_at: float = 0.0

    @property
    def is_cancelled(self) -> bool:
        """Whether the load of this batch was cancelled."""
        return self.load is not None and self.load.is_cancelled
