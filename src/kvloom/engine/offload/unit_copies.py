"""Stores pages in host memory a second time, for workers with another block size. The second copy is cut into
units: pages of HASH_TOKENS tokens.

    page of this worker in host memory ──▶ its units, under their own hashes ──▶ a peer joins them to its block size

Other tiers store units only. Host memory stores whole pages, because whole pages are copied to and from the
pool. A worker that hands pages over therefore stores both, unless its blocks have HASH_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvloom.tiers import Form, HostTier, Lease, Objects, Ranges, Transfer, UnitForm, UnitTier

__all__ = ["UnitCopies"]


class UnitCopies:
    """Cuts pages in host memory into units of HASH_TOKENS tokens, in background threads. Also stores the units in host
    memory. Workers of every block size can use units. A unit for which host memory has no space is skipped.
    """

    def __init__(self, host: HostTier, forms: Mapping[Form, UnitForm]) -> None:
        self._host, self._tier = host, UnitTier(host, forms)
        self._pending: list[tuple[Transfer, Lease]] = []

    def copy(self, objects: Objects) -> None:
        """Start to copy the pages `objects` inside host memory, as units of HASH_TOKENS tokens. Skips pages that host
        memory lacks. Does not block."""
        self.poll()
        if self._tier.stored_form(objects.form) == objects.form:
            return  # states do not depend on the block size
        lease = self._host.acquire(objects)
        here = np.flatnonzero(lease.offsets >= 0)
        if not here.size:
            lease.release()
            return
        transfer = self._tier.write(objects.take(here), Ranges(self._host.arena, lease.offsets[here]))
        self._pending.append((transfer, lease))

    def poll(self) -> None:
        """End the leases of pages whose copies are done, so that host memory may evict these pages."""
        left = []
        for transfer, lease in self._pending:
            if transfer.done:
                lease.release()
            else:
                left.append((transfer, lease))
        self._pending = left

    def close(self) -> None:
        """Wait for running copies, and close host memory."""
        self._tier.close()
        for _, lease in self._pending:
            lease.release()
        self._pending = []
