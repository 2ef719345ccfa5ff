"""Cold pages: a request that is longer than the pool keeps the full-attention pages of its oldest blocks in host
memory.

1. If the prompt and the longest output of a request together do not fit the pool, the request is admitted only if all
   its full-attention pages fit into host memory (`scheduling/feasibility.py`). The request is called long as soon as it
   has cold pages, or from the start if its prompt alone does not fit the pool. `Scheduler` runs as many long requests
   at a time as host memory has space for.
2. Only layer groups with full attention have cold pages. Windowed groups release their old pages, and a state is a
   single page.
3. If `extend` lacks pages, the scheduler makes the oldest blocks of a long request cold, before it preempts a request:
   this module copies their pages to host memory, and then releases the pages in the pool. The sequence owns the leases
   of its cold pages (`core.ColdRun`), so host memory cannot evict them while the sequence runs.
4. A layer first computes attention over the pages in the pool, as if the sequence were shorter. It then adds attention
   over the cold pages, a part at a time (`kernels/attention/cold.py`). Keys are stored after rotation, so their
   positions do not change.
5. Cold pages have ordinary block hashes. Before the sequence is closed, its other pages are also copied (`save`), and
   all of them stay in host memory like other pages. Two kinds of requests can resume after these pages (`find`,
   `start`): the same request after a preemption, and another long request with the same prompt. Requests with shorter
   prompts load the pages into the pool.
6. A long request publishes nothing in the prefix cache, because every path of the radix tree must begin at its root,
   without gaps.

If a copy fails, the pages stay in the pool, and the request is preempted and recomputes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvloom.core import HASH_BYTES, ColdRun, KVCache, PageGroup, Sequence
from kvloom.engine.request import Request
from kvloom.tiers import Form, Lease, Objects, Outcome
from kvloom.tiers.transfers import TransferManager

from .host_pages import HostPages, Ids
from .stats import OffloadStats

__all__ = ["MAX_HOST_SHARE", "ColdPages", "ColdStart"]

MAX_SAVED = 1024
"""Largest number of saved resume positions (see `ColdPages.save`), for models with windows or states."""
MAX_HOST_SHARE = 0.9
"""Largest share of host memory that cold pages may use. Transfers need the rest."""


@dataclass(slots=True, eq=False)
class ColdStart:
    """Leased pages in host memory, with which a request can resume at `position`.

    | field   | meaning                                                                                          |
    |---------|--------------------------------------------------------------------------------------------------|
    | pages   | page ids in host memory, of the full blocks before `position`: [blocks, block table columns]     |
    | leases  | the leases of these pages                                                                        |
    | hashes  | block hashes of all blocks before `position`; the last block may be partial                      |
    | visible | leases of pages that must be copied to the pool: pages of windows, of a partial block, of states |
    """

    position: int
    pages: npt.NDArray[np.int32]
    hashes: list[bytes]
    leases: list[Lease]
    visible: list[Lease]

    @property
    def last_hash(self) -> bytes | None:
        """Hash of the last full block, or None if there is no full block."""
        return self.hashes[len(self.pages) - 1] if len(self.pages) else None

    def release(self) -> None:
        """Release all leases of pages in host memory."""
        _release([*self.leases, *self.visible])


class ColdPages:
    """Moves cold pages of one cache to host memory. Not thread-safe, like the cache.

    `forms_of` returns the byte layouts (`Form`) of a request's pages, by layer group. `apply_copies` runs the pending
    copies inside the pool.
    """

    def __init__(
        self,
        cache: KVCache,
        transfers: TransferManager,
        pages: HostPages,
        forms_of: Callable[[Request], dict[int, list[Form]]],
        apply_copies: Callable[[], None],
        stats: OffloadStats,
    ) -> None:
        self._cache, self._transfers, self._host, self._pages = cache, transfers, transfers.host, pages
        self._forms_of, self._apply_copies, self._stats = forms_of, apply_copies, stats
        self._groups = [g for g in cache.layout.of("token") if not g.spec.visibility.windowed]
        self._saved: dict[
            bytes, int
        ] = {}  # positions where long requests ended, by the hash of the tokens before them
        self.block_bytes = sum(group.page_stride * group.runs for group in self._groups)
        """Bytes of the pages of one block that can become cold, or 0 if no layer has full attention."""

    def limit(self, tenant: str) -> int:
        """Return the bytes of host memory that cold pages of a tenant may use."""
        return int(MAX_HOST_SHARE * self._host.limit_of(tenant))

    def bytes_for(self, tokens: int) -> int:
        """Return the bytes of all pages that can become cold (move to host memory) in a sequence of `tokens` tokens."""
        return -(-tokens // self._cache.block_tokens) * self.block_bytes

    def offload(self, request: Request, blocks: int) -> int:
        """Move up to `blocks` of the oldest blocks of a running request to host memory (make them cold). Waits for the
        copies.

        Return the number of moved blocks, which is 0 if all blocks are cold already, or if host memory is full.
        """
        sequence = request.sequence
        assert sequence is not None
        self._apply_copies()
        rows = self._cache.cold.next_pages(sequence, blocks)
        if not len(rows):
            return 0
        runs, keep = sequence.cold_runs, self._keeps(request)
        parent = runs[-1].last_hash if runs else None
        if parent is None and not keep:
            parent = secrets.token_bytes(HASH_BYTES)  # a random parent: no other request gets these hashes
        first, block = sequence.cold_blocks, self._cache.block_tokens
        hashes = self._block_hashes(request, first, (first + len(rows)) * block, parent)
        leases: list[Lease] = []
        host_pages = np.zeros_like(rows)
        try:
            for group, form, column in self._columns(request):
                objects = Objects(hashes, group.index, form, request.control.tenant)
                number, tokens = column - group.column, np.full(len(rows), block)
                leases.append(self._copy(group, number, objects, rows[:, column], tokens, keep))
                hashes = hashes[: _first_missing(leases[-1])]
                rows = rows[: len(hashes)]
                host_pages[: len(rows), column] = leases[-1].offsets[: len(rows)] // group.page_stride
        except BaseException:
            _release(leases)
            raise
        if not len(rows):
            _release(leases)
            return 0
        run = ColdRun(host_pages[: len(rows)], hashes[-1], lambda: _release(leases))
        self._cache.cold.add_run(sequence, run)
        self._stats.cold_pages += len(rows) * len(self._cache.cold.columns)
        return len(rows)

    def save(self, request: Request) -> None:
        """Copy the pages of a long request to host memory, so that a later request can resume at its end. Call this
        method before the sequence is closed.

        Does nothing if the request stores no pages, or if host memory is full. Does nothing if the sequence has
        computed no token since it was opened, because it then has no state. If a copy fails, no error is raised, and
        later requests recompute the pages.
        """
        sequence, cache = request.sequence, self._cache
        assert sequence is not None
        position = sequence.length
        if not self._keeps(request) or sequence.state_length != position or position > len(request.tokens):
            return
        if cache.has_states and not cache.state_pages[:, sequence.row].all():
            return
        with suppress(RuntimeError):
            full = position // cache.block_tokens
            self.offload(request, full - sequence.cold_blocks)
            if not cache.needs_checkpoints or not position or sequence.cold_blocks < full:
                return
            hashes, is_complete = self._block_hashes(request, 0, position, None), True
            for group, form, blocks, pages in self._visible_pages(request, sequence, position):
                objects = Objects([hashes[b] for b in blocks], group.index, form, request.control.tenant)
                number = self._forms_of(request)[group.index].index(form)
                tokens = position - np.asarray(blocks) * cache.block_tokens
                lease = self._copy(group, number, objects, pages, tokens, keep=True)
                is_complete &= bool((lease.offsets >= 0).all())
                lease.release()
            if is_complete:
                self._saved[bytes(hashes[-1])] = position
                if len(self._saved) > MAX_SAVED:
                    del self._saved[next(iter(self._saved))]

    def find(self, request: Request, beyond: int) -> ColdStart | None:
        """Lease the pages with which a long request can resume at a position after `beyond`. Return None if host
        memory lacks these pages.

        A model with windows or states can resume only where an earlier long request ended (see `save`). Other models
        can resume at the end of any block.
        """
        cache, last = self._cache, len(request.tokens) - 1
        if not request.match_control.read or (request.images and cache.media_outlives_prompt):
            return None
        if not cache.needs_checkpoints:
            start = self._lease(request, last // cache.block_tokens * cache.block_tokens)
            if start.position > beyond:
                return start
            start.release()
            return None
        for position in sorted({p for p in self._saved.values() if beyond < p <= last}, reverse=True):
            key = bytes(self._block_hashes(request, 0, position, None)[-1])
            if key in self._saved:
                start = self._lease(request, position)
                if start.position == position:
                    return start
                start.release()
                del self._saved[key]  # host memory has evicted a page
        return None

    def start(self, request: Request, found: ColdStart) -> bool:
        """Make the empty sequence of a request continue at `found.position`, with the leased pages as its cold
        pages. Waits until the pages that must be in the pool are copied there.

        Return True. If the pool lacks pages, releases the leases and returns False.
        """
        sequence, cache = request.sequence, self._cache
        assert sequence is not None
        tail = request.ids(found.position)[len(found.pages) * cache.block_tokens :]
        run = ColdRun(found.pages, found.last_hash, lambda: _release(found.leases))
        if not cache.cold.open(sequence, run, found.position, tail):
            found.release()
            return False
        try:
            # Pending offloads and moves must read their pages first, because the new copies overwrite these pages.
            self._apply_copies()
            pages = self._visible_pages(request, sequence, found.position)
            for (group, _, _, ids), lease in zip(pages, found.visible, strict=True):
                self._pages.load(group, ids, lease.offsets).synchronize()
        finally:
            _release(found.visible)
        return True

    def _lease(self, request: Request, position: int) -> ColdStart:
        """Lease the pages with which a request can resume at `position`.

        If host memory lacks some pages, the position of the result is smaller. In models with windows or states, the
        position is then 0. In other models, it is the end of the last block before the first missing page.
        """
        cache, tenant = self._cache, request.control.tenant
        hashes, blocks = self._block_hashes(request, 0, position, None), position // cache.block_tokens
        found = ColdStart(position, np.zeros((blocks, len(cache.page_tables)), np.int32), hashes, [], [])
        for group, form, column in self._columns(request):
            lease = self._host.acquire(Objects(hashes[:blocks], group.index, form, tenant))
            found.leases.append(lease)
            blocks = _first_missing(lease)
            found.pages[:blocks, column] = lease.offsets[:blocks] // group.page_stride
        found.pages = found.pages[:blocks]
        if blocks < position // cache.block_tokens:
            found.position = 0 if cache.needs_checkpoints else blocks * cache.block_tokens
        for group, form, at in self._visible_blocks(request, found.position):
            lease = self._host.acquire(Objects([hashes[b] for b in at], group.index, form, tenant))
            found.visible.append(lease)
            if (lease.offsets < 0).any():
                found.position = 0
        return found

    def _visible_blocks(self, request: Request, position: int) -> list[tuple[PageGroup, Form, list[int]]]:
        """Return the blocks whose pages must be in the pool to resume at `position`. Each entry is (group, form,
        blocks), where `form` is the byte layout of the pages. If a block owns several pages in a group, there is one
        entry for each of these pages. Pages of other blocks can stay cold (in host memory).

        A windowed group needs the blocks inside the window. A group with full attention needs only the last block,
        and only if this block is partial. A state group needs the last block.
        """
        layout, block, forms = self._cache.layout, self._cache.block_tokens, self._forms_of(request)
        last = -(-position // block)
        found = []
        for group in layout.of("token"):
            visibility = group.spec.visibility
            first = visibility.first_visible(position) // block if visibility.windowed else position // block
            found += [(group, form, list(range(first, last))) for form in forms[group.index]]
        for group in layout.of("state") if position else ():
            found += [(group, form, [last - 1]) for form in forms[group.index]]
        return [part for part in found if part[2]]

    def _visible_pages(
        self, request: Request, sequence: Sequence, position: int
    ) -> list[tuple[PageGroup, Form, list[int], Ids]]:
        """Return the entries of `_visible_blocks`, each with one more element: the page ids of its blocks in the pool."""
        found: list[tuple[PageGroup, Form, list[int], Ids]] = []
        for group, form, blocks in self._visible_blocks(request, position):
            column = group.column + self._forms_of(request)[group.index].index(form)
            if group.spec.unit == "state":
                pages = self._cache.state_pages[column, [sequence.row]]
            else:
                pages = self._cache.page_tables[column, sequence.row, blocks]
            found.append((group, form, blocks, pages))
        return found

    @staticmethod
    def _keeps(request: Request) -> bool:
        """Return whether pages of a request may stay in host memory for other requests."""
        return request.control.store and not request.uncached

    def _columns(self, request: Request) -> list[tuple[PageGroup, Form, int]]:
        forms = self._forms_of(request)
        return [(g, form, g.column + run) for g in self._groups for run, form in enumerate(forms[g.index])]

    def _block_hashes(self, request: Request, first: int, end: int, parent: bytes | None) -> list[bytes]:
        """Return the hashes of a request's blocks from block `first` to token `end`. `parent` is the hash of the
        block before `first`, or None if `first` is 0."""
        media = request.media
        ids = request.ids(len(request.tokens) if media else end)
        return self._cache.block_hashes(ids, request.control, media, first, end, parent)

    def _copy(
        self, group: PageGroup, run: int, objects: Objects, pages: Ids, tokens: Ids, keep: bool
    ) -> Lease:
        """Copy `pages` of one layer group to host memory, and lease them there for reading. `objects` are their keys,
        and `tokens` their numbers of tokens, in the same order. `run` is the number of the pages in their blocks. Waits
        for the copy. Pages that host memory already has are not copied again.

        If host memory has no space for a page, its offset in the lease is negative. If `keep` is false, the pages are
        freed when the lease ends.
        """
        written, done = self._host.reserve(objects), False
        is_new = written.results == int(Outcome.PENDING)
        try:
            if is_new.any():
                offsets = written.offsets[is_new]
                self._pages.offload(group, pages[is_new], offsets).synchronize()
                self._pages.clear_unwritten(group, run, offsets, tokens[is_new])
            done = True
        finally:
            written.release(done)
        self._stats.offloaded_pages += int(is_new.sum())
        self._stats.offloaded_bytes += int(is_new.sum()) * group.page_stride
        lease = self._host.acquire(objects)
        if not keep:
            self._host.drop(objects)
        elif self._transfers.queues and is_new.any():
            self._transfers.write_to_tiers(objects.take(np.flatnonzero(is_new)), False)
        return lease


def _first_missing(lease: Lease) -> int:
    """Return the number of leased pages before the first missing page."""
    missing = np.flatnonzero(lease.offsets < 0)
    return int(missing[0]) if missing.size else len(lease.offsets)


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
