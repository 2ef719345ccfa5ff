"""KvloomTier: kvloom's tiers behind vLLM's own CPU offloading (`TieringOffloadingSpec`), selected by `module_path`.

vLLM copies blocks between the GPU and its CPU memory. This tier copies chunks of that CPU memory to and from kvloom's
tiers. vLLM's scheduler calls it, so no call may wait. One thread owns the tiers and copies the bytes.

    lookup ──> queue ──> thread: TierLookup ──> HIT or MISS at a later call; RETRY until then
    submit_store ──> queue ──> thread: copy to host memory, queues of the other tiers ──> get_finished_jobs
    submit_load ──> queue ──> thread: FetchJob, copy from host memory ──> get_finished_jobs
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvloom.adapters.common import TierPages, weights_digest
from kvloom.core import HASH_BYTES, root_hash
from kvloom.tiers import Form, Objects, Outcome
from kvloom.tiers.host import copy_pages
from kvloom.tiers.transfers import FetchJob, TierLookup

from .settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvloomTier"]

log = logging.getLogger("kvloom.vllm")
POLL_SECONDS = 0.002
DRAIN_SECONDS = 60.0


@dataclass(slots=True)
class _Load:
    """A load job of vLLM, as the thread runs it. For each group, `objects` are its pages in the tiers, and `rows`
    are the numbers of the chunks of vLLM's CPU memory to fill.
    """

    job: TransferJob
    objects: list[Objects]
    rows: list[list[int]]
    keys: list[list[OffloadKey]]
    lookup: TierLookup
    fetch: FetchJob | None = None


class KvloomTier(SecondaryTierManager):
    """A secondary tier of vLLM that stores chunks in kvloom's tiers. `tiers` and `load_seconds` are as in the
    connector's `Settings`.

    Chunks are found by vLLM's block hashes. These cover the cache salt and the name of the LoRA adapter, but not the
    version of the adapter.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        tiers: Sequence[str],
        load_seconds: float = 5.0,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = Settings.parse({"tiers": list(tiers), "load_seconds": load_seconds})
        config = offloading_spec.config
        self._root, self._form = _root(config), _form(config, self.block_size_bytes)
        self._chunks = np.frombuffer(primary_kv_view.cast("B"), np.uint8)
        self._seconds = settings.load_seconds
        self._tiers = TierPages(settings.tiers, self.block_size_bytes)
        self._found: dict[
            str, dict[OffloadKey, bool | None]
        ] = {}  # by request: whether a tier has each key, or None during the lookup
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lookups: list[tuple[TierLookup, list[list[tuple[str, OffloadKey]]]]] = []
        self._asked: list[tuple[str, OffloadKey]] = []
        self._loads: list[_Load] = []
        self._results: SimpleQueue[JobResult] = SimpleQueue()
        self._open_jobs = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvloom-vllm-tier", daemon=True)
        self._thread.start()

    # --- called by vLLM's scheduler

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._found.setdefault(req_context.req_id, {})
        if key not in found:
            found[key] = None
            item = (req_context.req_id, key)
            self._orders.put(lambda: self._asked.append(item))
        answer = found[key]
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._found.pop(req_context.req_id, None)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(lambda: self._store(job_metadata), job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(lambda: self._start_load(job_metadata), job_metadata)

    def _submit(self, order: Callable[[], None], job: TransferJob) -> None:
        with self._changed:
            self._open_jobs += 1
        self._orders.put(lambda: self._guarded(job, order))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except Empty:
                return results

    def has_pending_work(self) -> bool:
        return self._open_jobs > 0

    def drain_jobs(self) -> None:
        """Wait until every job has ended. Loads end by their deadlines."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open_jobs, DRAIN_SECONDS):
                raise TimeoutError(f"{self._open_jobs} jobs did not end within {DRAIN_SECONDS:g} seconds")

    def shutdown(self) -> None:
        """Write pending pages to the tiers, and close the tiers."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join(30)

    # --- the thread

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=POLL_SECONDS if self._lookups or self._loads else None)
                while order is not None:
                    order()
                    order = self._orders.get_nowait()
                break
            except Empty:
                pass
            self._start_lookups()
            self._poll()
        self._tiers.close()

    def _guarded(self, job: TransferJob, call: Callable[[], None]) -> None:
        """Run `call` for a job. If it raises, the job fails, and the thread continues."""
        try:
            call()
        except Exception:
            log.exception("job %s failed; its chunks are recomputed", job.job_id)
            self._finish(JobResult(job.job_id, success=False, successful_keys=()))

    def _batches(self, keys: Collection[OffloadKey]) -> tuple[list[Objects], list[list[int]]]:
        """Return the objects of `keys`, one batch per group, and for each batch the indices of its objects in `keys`."""
        groups: dict[int, list[int]] = {}
        names = list(keys)
        for i, key in enumerate(names):
            groups.setdefault(get_offload_group_idx(key), []).append(i)
        objects = [
            Objects([self._hash(names[i]) for i in at], group, self._form) for group, at in groups.items()
        ]
        return objects, list(groups.values())

    def _hash(self, key: OffloadKey) -> bytes:
        return blake2b(self._root + get_offload_block_hash(key), digest_size=HASH_BYTES).digest()

    def _start_lookups(self) -> None:
        asked, self._asked = self._asked, []
        if asked:
            objects, positions = self._batches([key for _, key in asked])
            items = [[asked[i] for i in at] for at in positions]
            self._lookups.append((self._tiers.manager.lookup(objects), items))

    def _poll(self) -> None:
        for lookup, items in [entry for entry in self._lookups if entry[0].done]:
            self._lookups.remove((lookup, items))
            for mask, batch in zip(lookup.found, items, strict=True):
                for (request_id, key), there in zip(batch, mask.tolist(), strict=True):
                    found = self._found.get(request_id)
                    if found is not None:
                        found[key] = there
        for load in list(self._loads):
            if load.fetch is None and load.lookup.done:
                missing = [
                    Objects(
                        [n for n, there in zip(o.block_hashes, mask.tolist(), strict=True) if not there],
                        o.group,
                        o.form,
                    )
                    for o, mask in zip(load.objects, load.lookup.in_host, strict=True)
                ]
                deadline = time.monotonic() + self._seconds
                load.fetch = self._tiers.manager.fetch(missing, load.lookup.queue_of, deadline)
            if load.fetch is not None and load.fetch.done:
                self._loads.remove(load)
                self._guarded(load.job, lambda load=load: self._copy_loaded(load))  # type: ignore[misc]

    def _store(self, job: TransferJob) -> None:
        began, size = time.monotonic(), self.block_size_bytes
        ids = np.asarray(job.chunk_ids, np.int64)
        objects, positions = self._batches(job.keys)
        complete = True
        for batch, at in zip(objects, positions, strict=True):
            lease = self._tiers.host.reserve(batch)
            fresh = np.flatnonzero(lease.results == Outcome.PENDING)
            copy_pages(self._tiers.arena, lease.offsets[fresh], self._chunks, ids[at][fresh] * size, size)
            full = lease.results == Outcome.FULL
            lease.release(True)
            complete = complete and not full.any()
            names = [name for name, lost in zip(batch.block_hashes, full.tolist(), strict=True) if not lost]
            self._tiers.manager.write_to_tiers(Objects(names, batch.group, batch.form), used=False)
        self._finish(JobResult(job.job_id, complete, None, time.monotonic() - began, len(ids) * size))

    def _start_load(self, job: TransferJob) -> None:
        objects, positions = self._batches(job.keys)
        keys, ids = list(job.keys), np.asarray(job.chunk_ids).tolist()
        self._loads.append(
            _Load(
                job,
                objects,
                [[ids[i] for i in at] for at in positions],
                [[keys[i] for i in at] for at in positions],
                self._tiers.manager.lookup(objects),
            )
        )

    def _copy_loaded(self, load: _Load) -> None:
        size, loaded = self.block_size_bytes, []
        for batch, rows, keys in zip(load.objects, load.rows, load.keys, strict=True):
            lease = self._tiers.host.acquire(batch)
            there = np.flatnonzero(lease.results == Outcome.OK)
            to = np.asarray(rows, np.int64)[there] * size
            copy_pages(self._chunks, to, self._tiers.arena, lease.offsets[there], size)
            lease.release(False)
            loaded += [keys[i] for i in there.tolist()]
            self._tiers.manager.write_to_tiers(batch.take(there), used=True)
        complete = len(loaded) == len(load.job.keys)
        took = time.monotonic() - load.job.submit_time
        self._finish(
            JobResult(load.job.job_id, complete, None if complete else loaded, took, len(loaded) * size)
        )

    def _finish(self, result: JobResult) -> None:
        self._results.put(result)
        with self._changed:
            self._open_jobs -= 1
            self._changed.notify_all()


def _root(config: OffloadingConfig) -> bytes:
    """Return the root of all block hashes in the tiers. It covers the weights, and how vLLM divides tokens into hashed
    chunks.
    """
    try:
        weights = weights_digest(config.model.name, None)
    except ValueError as error:
        log.warning("pages are identified by the name of the model only: %s", error)
        weights = "unknown"
    cache = config.cache
    return root_hash(
        f"vllm chunks {config.model.name} {weights} {cache.tokens_per_hash} {cache.blocks_per_chunk}"
    )


def _form(config: OffloadingConfig, chunk_bytes: int) -> Form:
    groups = "; ".join(f"{g.group_id} {g.tokens_per_block} {','.join(g.layer_names)}" for g in config.groups)
    parallel = config.parallel
    return Form(
        dtype=config.model.dtype,
        order=f"vllm {config.kv_cache_layout}",
        page_bytes=chunk_bytes,
        run_bytes=chunk_bytes,
        shard=f"tp {parallel.tp_size} pp {parallel.pp_size}",
        layout=f"{config.worker_kv_bytes_per_block} bytes per worker, canonical {config.canonical_layout}: {groups}",
    )
