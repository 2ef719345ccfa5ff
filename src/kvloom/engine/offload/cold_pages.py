"""Cold pages: a request longer than the pool keeps the full-attention pages of its oldest blocks in host memory.

1. A request is long if the pool cannot hold it at its full length. It then needs host memory for all its full-attention
   pages: `scheduling/feasibility.py` refuses it otherwise, and `Scheduler` admits as many long requests as fit.
2. Windows drop pages by themselves and a state is one page, so only groups with full attention have cold pages.
3. If `extend` lacks pages, the scheduler makes the oldest blocks of a long request cold, before it preempts a request.
   The pages are copied to host memory here, then released: the sequence owns the leases of its cold pages
   (`core.ColdRun`), so that host memory cannot evict them while it runs.
4. Layers read the rest of the block table as a shorter sequence, then add attention over the cold pages, piece by
   piece (`kernels/attention/cold.py`). Keys are stored rotated, so positions do not change.
5. Cold pages have ordinary block hashes. After the sequence is closed, host memory keeps them like other pages; a
   request with the same prompt starts behind them (`find`), and shorter prompts load them.
6. A long request publishes nothing in the prefix cache: a path of the radix tree has no gaps.

A copy that fails changes nothing: the pages stay in the pool, and the request is preempted and recomputes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np

from kvloom.core import HASH_BYTES, ColdRun, KVCache, PageGroup
from kvloom.engine.request import Request
from kvloom.tiers import Form, Lease, Objects, Outcome
from kvloom.tiers.transfers import TransferManager

from .host_pages import HostPages, Ids
from .stats import OffloadStats

__all__ = ["MAX_HOST_SHARE", "ColdPages"]

MAX_HOST_SHARE = 0.9
"""Most of host memory that cold pages may use, as a share: transfers need the rest."""


class ColdPages:
    """Moves cold pages of one cache to host memory. `forms_of` returns the forms of a request's pages by group.

    `apply_copies` makes the pending copies inside the pool. Not thread safe, like the cache."""

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
        self.block_bytes = sum(group.page_stride * group.runs for group in self._groups)
        """Bytes of the pages of one block that can become cold; 0 if the model has none."""

    def limit(self, tenant: str) -> int:
        """Return the bytes of host memory that cold pages of a tenant may use."""
        return int(MAX_HOST_SHARE * self._host.limit_of(tenant))

    def bytes_for(self, tokens: int) -> int:
        """Return the bytes of all pages that can become cold in a sequence of `tokens` tokens."""
        return -(-tokens // self._cache.block_tokens) * self.block_bytes

    def offload(self, request: Request, blocks: int) -> int:
        """Make up to `blocks` oldest blocks of a running request cold. Return how many; 0 if none is left or host
        memory is full.

        Waits for the copies."""
        sequence = request.sequence
        assert sequence is not None
        self._apply_copies()
        rows = self._cache.coldable_pages(sequence, blocks)
        if not len(rows):
            return 0
        runs, keep = sequence.cold_runs, request.control.store and not request.uncached
        parent = runs[-1].last_hash if runs else None
        if parent is None and not keep:
            parent = secrets.token_bytes(HASH_BYTES)  # no other request has these hashes
        hashes = self._block_hashes(request, sequence.cold_blocks, sequence.cold_blocks + len(rows), parent)
        leases: list[Lease] = []
        host_pages = np.zeros_like(rows)
        try:
            for group, form, column in self._columns(request):
                objects = Objects(hashes, group.index, form, request.control.tenant)
                leases.append(self._copy(group, objects, rows[:, column], keep))
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
        self._cache.add_cold_run(sequence, run)
        self._stats.cold_pages += len(rows) * len(self._cache.full_columns)
        return len(rows)

    def find(self, request: Request, beyond: int) -> ColdRun | None:
        """Lease the blocks of a waiting request that host memory has, if they are more than `beyond` tokens, else None.

        Only for models without windows and states: their pages are needed in the pool."""
        cache, control = self._cache, request.match_control
        if cache.needs_checkpoints or not control.read:
            return None
        hashes = self._block_hashes(request, 0, (len(request.tokens) - 1) // cache.block_tokens, None)
        leases: list[Lease] = []
        host_pages = np.zeros((len(hashes), cache.page_tables.shape[0]), np.int32)
        for group, form, column in self._columns(request):
            leases.append(self._host.acquire(Objects(hashes, group.index, form, request.control.tenant)))
            hashes = hashes[: _first_missing(leases[-1])]
            host_pages[: len(hashes), column] = leases[-1].offsets[: len(hashes)] // group.page_stride
        if len(hashes) * cache.block_tokens <= beyond:
            _release(leases)
            return None
        return ColdRun(host_pages[: len(hashes)], hashes[-1], lambda: _release(leases))

    def _columns(self, request: Request) -> list[tuple[PageGroup, Form, int]]:
        forms = self._forms_of(request)
        return [(g, form, g.column + run) for g in self._groups for run, form in enumerate(forms[g.index])]

    def _block_hashes(self, request: Request, first: int, last: int, parent: bytes | None) -> list[bytes]:
        media = () if request.images is None else request.images.media
        ids = request.ids(len(request.tokens) if media else last * self._cache.block_tokens)
        return self._cache.block_hashes(ids, request.control, media, first, last, parent)

    def _copy(self, group: PageGroup, objects: Objects, pages: Ids, keep: bool) -> Lease:
        """Copy pages of one column to host memory, where they are not there already, and lease them for reading.

        A page without space in host memory is not leased. Unless `keep`, the end of the lease frees the pages."""
        written, done = self._host.reserve(objects), False
        is_new = written.results == int(Outcome.PENDING)
        try:
            if is_new.any():
                self._pages.offload(group.page_stride, pages[is_new], written.offsets[is_new]).synchronize()
            done = True
        finally:
            written.release(done)
        self._stats.offloaded_pages += int(is_new.sum())
        self._stats.offloaded_bytes += int(is_new.sum()) * group.page_stride
        lease = self._host.acquire(objects)
        if not keep:
            self._host.drop(objects)
        elif self._transfers.queues and is_new.any():
            new = [objects.block_hashes[i] for i in np.flatnonzero(is_new).tolist()]
            self._transfers.write_to_tiers(Objects(new, objects.group, objects.form, objects.tenant), False)
        return lease


def _first_missing(lease: Lease) -> int:
    """Return the number of leased pages before the first that is missing."""
    missing = np.flatnonzero(lease.offsets < 0)
    return int(missing[0]) if missing.size else len(lease.offsets)


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
