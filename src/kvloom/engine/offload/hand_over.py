"""A hand-over: while a prefill worker computes a prompt, this worker pulls the prompt's pages into its own host memory.

    prefill worker   chunk 0 ──▶ chunk 1 ──▶ chunk 2 ──▶ checkpoint      each finished chunk enters its host memory
    this worker            pull 0      pull 1      pull 2      pull      ──▶ the usual load job copies them into the pool

Pages are addressed by block hash, so any tier that has them may replace the prefill worker. Only the pages that the
request needs to resume are pulled: window pages that are still visible, and one state snapshot.

A hand-over ends when all pages have arrived, or when the prefill worker is lost or late. The usual load job then uses
the pages that have arrived, and this worker computes the other tokens.
"""

from __future__ import annotations

from collections.abc import Container, Sequence as Many
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvloom.core import PUBLIC_TENANT, LoadPlan, PoolLayout
from kvloom.tiers import Objects
from kvloom.tiers.transfers import FetchJob, TierLookup, TierQueue, TransferManager

from .tier_loader import Forms

__all__ = ["HandOver", "needed_pages", "peer_queue"]

POLL_SECONDS = 0.002
"""Shortest time, in seconds, between two lookups of one hand-over."""
MAX_BLOCKS = 512
"""Largest number of blocks in one lookup."""

Page = tuple[int, bytes]
"""A page: the index of its layer group, and its block hash."""


def needed_pages(layout: PoolLayout, plan: LoadPlan) -> list[list[Page]]:
    """Return the pages that a prompt needs and the pool lacks: one list per block, from the first unmatched block on.
    O(blocks).

    With recurrent layers, one more list has the state snapshots and the pages of the partial last block.
    """
    block, states = layout.block_tokens, layout.of("state")
    first, blocks = plan.match.matched // block, plan.limit // block
    resume = plan.limit if states else blocks * block
    needed: list[list[Page]] = [[] for _ in range(first, blocks)]
    for group in layout.of("token"):
        for b in group.spec.visibility.visible_blocks(resume, block):
            if first <= b < blocks:
                needed[b - first].append((group.index, plan.hashes[b]))
    if states and resume > plan.match.resume:
        end = plan.hash_at(resume)
        last = [(group.index, end) for group in states]
        if resume % block:
            last += [(group.index, end) for group in layout.of("token")]
        needed.append(last)
    return needed


def peer_queue(transfers: TransferManager, address: str) -> int | None:
    """Return the index in `transfers.queues` of the queue whose tier is the peer at `address` (host:port). Return None
    if no tier has this address.
    """
    for number, queue in enumerate(transfers.queues):
        parts = urlsplit(queue.tier.name)
        if parts.scheme == "peer" and parts.netloc.rpartition("@")[2] == address:
            return number
    return None


@dataclass(slots=True)
class _Pull:
    """Pages in transfer to host memory. `first` is the index of their first entry in the result of `needed_pages`.
    `tier_of` maps the key of each page to the index in `transfers.queues` of the queue that loads the page.
    """

    first: int
    objects: list[Objects]
    tier_of: dict[bytes, int]
    fetch: FetchJob


class HandOver:
    """Pulls the pages of one request from a prefill worker into this worker's host memory, while the prefill worker
    computes the prompt. If no new page arrives for `patience` seconds, the hand-over ends.

    - `needed` is the result of `needed_pages`.
    - `peer` is the index in `transfers.queues` of the prefill worker's queue.
    - `public` has the hashes of pages of a public prefix.
    """

    def __init__(
        self,
        transfers: TransferManager,
        forms: Forms,
        tenant: str,
        public: Container[bytes],
        needed: Many[list[Page]],
        peer: int,
        patience: float,
        now: float,
    ) -> None:
        self._transfers, self._forms, self._tenant, self._public = transfers, forms, tenant, public
        self._needed, self._peer, self._patience = needed, peer, patience
        self._found = 0  # entries of `needed` in host memory or in transfer
        self._pulls: list[_Pull] = []
        self._lookup: TierLookup | None = None
        self._asked: list[list[Page]] = []
        self._ask_at = self._progress_at = now
        self._without: set[int] = set()  # queues whose pages were damaged or missing
        self.pages = 0
        """Pages that have arrived."""

    @property
    def is_complete(self) -> bool:
        """Whether all pages have arrived."""
        return self._found == len(self._needed) and not self._pulls

    @property
    def _is_lost(self) -> bool:
        queue: TierQueue = self._transfers.queues[self._peer]
        is_reachable = queue.breaker.is_closed and not queue.is_stuck and queue.tier.is_reachable
        return not is_reachable or len(self._without) == len(self._transfers.queues)

    def advance(self, now: float) -> bool:
        """Collect arrived pages and request the next pages. Return whether more pages may arrive. Does not block."""
        for pull in [pull for pull in self._pulls if self._has_ended(pull)]:
            self._pulls.remove(pull)
            self._collect(pull, now)
        if self._lookup is not None:
            if not self._lookup.done:
                return True
            self._pull(self._lookup, now)
            self._lookup = None
        if self._found == len(self._needed):
            return bool(self._pulls)
        if self._is_lost or now - self._progress_at > self._patience:
            return bool(self._pulls)
        if now >= self._ask_at:
            self._asked = list(self._needed[self._found : self._found + MAX_BLOCKS])
            self._lookup = self._transfers.lookup(self._objects(self._asked, all_runs=False), self._without)
            self._ask_at = now + POLL_SECONDS
        return True

    def cancel(self) -> None:
        """Cancel the transfers. Pages that have arrived stay in host memory."""
        for pull in self._pulls:
            pull.fetch.cancel()
        self._pulls, self._lookup = [], None

    def _has_ended(self, pull: _Pull) -> bool:
        """Return whether no page of a pull is in transfer. Another request may load the same pages. A fetch does not
        load them again, and ends before they have arrived."""
        host = self._transfers.host
        return pull.fetch.done and not any(
            key in host and not is_stored
            for objects in pull.objects
            for key, is_stored in zip(objects.keys, host.lookup(objects).tolist(), strict=True)
        )

    def _collect(self, pull: _Pull, now: float) -> None:
        """Count the pages of a finished transfer. If the transfer did not load all pages, request the missing pages
        from other tiers."""
        self.pages += pull.fetch.loaded
        missing = [
            objects.keys[i]
            for objects in pull.objects
            for i, here in enumerate(self._transfers.host.lookup(objects))
            if not here
        ]
        if missing:
            self._without |= {pull.tier_of[key] for key in missing if key in pull.tier_of}
            self._found = min(self._found, pull.first)
        else:
            self._progress_at = now

    def _pull(self, lookup: TierLookup, now: float) -> None:
        """Start to load the pages that a lookup has found. Stops at the first entry of `needed_pages` with a missing
        page.
        """
        found = {
            key
            for objects, here in zip(lookup.objects, lookup.found, strict=True)
            for key, is_here in zip(objects.keys, here.tolist(), strict=True)
            if is_here
        }
        count = 0
        for entry in self._asked:
            if not all(
                key in found for objects in self._objects([entry], all_runs=False) for key in objects.keys
            ):
                break
            count += 1
        if not count:
            return
        objects = self._objects(self._asked[:count], all_runs=True)
        tier_of: dict[bytes, int] = {}
        for one in objects:
            # If a block owns several pages in a group, a lookup asks only for the first. The others are in the same
            # tier.
            firsts = Objects(one.block_hashes, one.group, self._forms[one.group][0]).keys
            for key, first in zip(one.keys, firsts, strict=True):
                if first in lookup.queue_of and key not in self._transfers.host:
                    tier_of[key] = lookup.queue_of[first]
        fetch = self._transfers.fetch(objects, tier_of, now + self._patience)
        self._pulls.append(_Pull(self._found, objects, tier_of, fetch))
        self._found += count
        self._progress_at = now

    def _objects(self, entries: Many[list[Page]], all_runs: bool) -> list[Objects]:
        """Return pages as objects for tiers, by layer group. `entries` are entries of `needed_pages`. A block may own
        several pages (runs) in a group. `all_runs` includes all of them; otherwise only the first is included.
        """
        hashes: dict[tuple[int, str], list[bytes]] = {}
        for entry in entries:
            for group, page_hash in entry:
                tenant = PUBLIC_TENANT if page_hash in self._public else self._tenant
                hashes.setdefault((group, tenant), []).append(page_hash)
        return [
            Objects(some, group, form, tenant)
            for (group, tenant), some in hashes.items()
            for form in (self._forms[group] if all_runs else self._forms[group][:1])
        ]
