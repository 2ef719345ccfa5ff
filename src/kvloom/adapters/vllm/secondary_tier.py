"""KvloomTier: kvloom's tiers behind vLLM's own CPU offloading (`TieringOffloadingSpec`), selected by `module_path`.

vLLM copies blocks between the GPU and its own CPU memory. This tier copies chunks between that CPU memory and kvloom's
tiers. vLLM's scheduler calls this tier, so no call may wait. Threads wait for the tiers and copy the bytes.

    lookup ──> thread: WaitingPages.lookup ──> HIT or MISS at a later call; RETRY until then
    submit_store ──> thread: WaitingPages.store ──> get_finished_jobs
    submit_load ──> thread: WaitingPages.load ──> get_finished_jobs

A job may be larger than kvloom's host memory: `WaitingPages` splits it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
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

from kvloom.adapters.common import TierPages, WaitingPages, weights_digest
from kvloom.core import HASH_BYTES, root_hash
from kvloom.tiers import Form, Objects
from kvloom.tiers.host import copy_pages

from .settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvloomTier"]

log = logging.getLogger("kvloom.vllm")
LOAD_THREADS = 4
DRAIN_SECONDS = 60.0
SHUTDOWN_SECONDS = 30.0


class KvloomTier(SecondaryTierManager):
    """A secondary tier of vLLM that stores chunks in kvloom's tiers. `tiers` and `load_seconds` are as in the
    connector's `Settings`.

    Chunks are found by vLLM's block hashes. The hashes depend on the cache salt and on the name of the LoRA adapter,
    but not on the version of the adapter.
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
        config = offloading_spec.config
        replica = config.parallel.data_parallel_index
        processes = max(config.parallel.data_parallel_size, replica + 1)  # one scheduler for each replica
        settings = Settings.parse({"tiers": list(tiers), "load_seconds": load_seconds}, processes)
        self._root, self._form = _root(config), _form(config, self.block_size_bytes)
        self._chunks = np.frombuffer(primary_kv_view.cast("B"), np.uint8)
        self._seconds = settings.load_seconds
        self._pages = WaitingPages(TierPages(settings.tiers, self.block_size_bytes, replica), self._seconds)
        self._lookups = ThreadPoolExecutor(1, "kvloom-vllm-lookup")
        self._stores = ThreadPoolExecutor(1, "kvloom-vllm-store")
        self._loads = ThreadPoolExecutor(LOAD_THREADS, "kvloom-vllm-load")
        self._found: dict[str, dict[OffloadKey, bool | None]] = {}  # by request; None while it is looked up
        self._asked: list[tuple[str, OffloadKey]] = []  # not looked up yet
        self._results: SimpleQueue[JobResult] = SimpleQueue()
        self._open_jobs = 0
        self._changed = threading.Condition()  # guards _asked and _open_jobs

    # --- called by vLLM's scheduler

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._found.setdefault(req_context.req_id, {})
        if key not in found:
            found[key] = None
            with self._changed:
                self._asked.append((req_context.req_id, key))
                is_first = len(self._asked) == 1
            if is_first:  # the thread looks up all keys that are asked until it runs
                self._lookups.submit(self._look_up)
        answer = found[key]
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._found.pop(req_context.req_id, None)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._load, job_metadata)

    def _submit(
        self, threads: ThreadPoolExecutor, call: Callable[[TransferJob], JobResult], job: TransferJob
    ) -> None:
        with self._changed:
            self._open_jobs += 1
        threads.submit(self._run, call, job)

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
        """Wait until every job has ended. Raises TimeoutError after DRAIN_SECONDS. Loads end at their deadlines."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open_jobs, DRAIN_SECONDS):
                raise TimeoutError(f"{self._open_jobs} jobs did not end within {DRAIN_SECONDS:g} seconds")

    def shutdown(self) -> None:
        """Write pending pages to the tiers within a time limit, and close the tiers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open_jobs, SHUTDOWN_SECONDS)
        for threads in (self._lookups, self._stores, self._loads):
            threads.shutdown(cancel_futures=True)
        self._pages.close()

    # --- threads

    def _run(self, call: Callable[[TransferJob], JobResult], job: TransferJob) -> None:
        """Run a job. If it raises, the job fails, and the thread continues."""
        try:
            result = call(job)
        except Exception:
            log.exception("job %s failed; its chunks are recomputed", job.job_id)
            if job.is_promotion:
                self._miss(job, job.keys)
            result = JobResult(job.job_id, success=False, successful_keys=())
        self._results.put(result)
        with self._changed:
            self._open_jobs -= 1
            self._changed.notify_all()

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

    def _look_up(self) -> None:
        with self._changed:
            asked, self._asked = self._asked, []
        objects, positions = self._batches([key for _, key in asked])
        try:
            masks = self._pages.lookup(objects)
        except Exception:
            log.exception("a lookup failed; its %d chunks are misses", len(asked))
            masks = [np.zeros(len(batch), bool) for batch in objects]
        for mask, at in zip(masks, positions, strict=True):
            for i, there in zip(at, mask.tolist(), strict=True):
                request_id, key = asked[i]
                found = self._found.get(request_id)
                if found is not None:
                    found[key] = there

    def _store(self, job: TransferJob) -> JobResult:
        began, complete = time.monotonic(), True
        for objects, at in zip(*self._batches(job.keys), strict=True):
            stored = self._pages.store(objects, self._copy(job.chunk_ids[at], to_tiers=True))
            complete = complete and bool(stored.all())
        size = len(job.keys) * self.block_size_bytes
        return JobResult(job.job_id, complete, None, time.monotonic() - began, size)

    def _load(self, job: TransferJob) -> JobResult:
        keys, deadline = list(job.keys), job.submit_time + self._seconds
        loaded = np.zeros(len(keys), bool)
        for objects, at in zip(*self._batches(keys), strict=True):
            loaded[at] = self._pages.load(objects, self._copy(job.chunk_ids[at], to_tiers=False), deadline)
        complete, there = bool(loaded.all()), [keys[i] for i in np.flatnonzero(loaded).tolist()]
        self._miss(job, [keys[i] for i in np.flatnonzero(~loaded).tolist()])
        took, size = time.monotonic() - job.submit_time, len(there) * self.block_size_bytes
        return JobResult(job.job_id, complete, None if complete else there, took, size)

    def _miss(self, job: TransferJob, keys: Collection[OffloadKey]) -> None:
        """Record that `keys` are misses for the request of a job, so that its later lookups of these keys return MISS.
        Otherwise vLLM would try to load the same chunks again and again."""
        found = self._found.get(job.req_context.req_id)
        if found is not None:
            found.update(dict.fromkeys(keys, False))

    def _copy(
        self, chunk_ids: npt.NDArray[np.int64], to_tiers: bool
    ) -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], None]:
        """Return a function that copies chunks between vLLM's CPU memory and the arena (kvloom's host memory). With
        `to_tiers`, the function copies to the arena, otherwise from the arena. The function takes indices in
        `chunk_ids`, and the offsets of these chunks in the arena.
        """
        size = self.block_size_bytes

        def copy(which: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
            places = chunk_ids[which].astype(np.int64) * size
            if to_tiers:
                copy_pages(self._pages.tiers.arena, offsets, self._chunks, places, size)
            else:
                copy_pages(self._chunks, places, self._pages.tiers.arena, offsets, size)

        return copy


def _root(config: OffloadingConfig) -> bytes:
    """Return the root of all block hashes in the tiers. The root depends on the weights, on the number of tokens per
    hash, and on the number of blocks per chunk.
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
