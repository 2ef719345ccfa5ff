"""KvloomL2Adapter: LMCache's interface for L2 adapters of its server.

LMCache's controllers submit tasks, and poll event file descriptors for their completion. Threads run the tasks, so no
call of a controller waits:

    submit_store_task            one thread     copy into host memory, then queue writes to the other tiers
    submit_lookup_and_lock_task  one thread     lookup in all tiers
    submit_load_task             two threads    load into host memory, then copy into LMCache's objects

An object that is missing, late or damaged is a miss. Lookups do not lock objects, although LMCache expects it. An
object that is evicted between lookup and load is therefore a miss, too.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.platform import create_event_notifier

from kvloom.adapters.common import TierPages, WaitingPages
from kvloom.tiers import OpenTier

from .object_keys import as_objects
from .settings import Settings

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["KvloomL2Adapter"]

log = logging.getLogger("kvloom.lmcache")
Result = TypeVar("Result")
Group = tuple[str, int, int]  # model, rank, group
MAX_SIZES = 4
"""Largest number of object sizes that a lookup tries for one group."""


class _Tasks:
    """Tasks of one kind (store, lookup or load). Contains the threads that run the tasks, the results by task id,
    and the event that notifies LMCache of new results."""

    def __init__(self, name: str, threads: int) -> None:
        self.event = create_event_notifier()
        self.results: dict[L2TaskId, Any] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, f"kvloom-lmcache-{name}")
        self._closed = False

    def submit(self, task: L2TaskId, call: Callable[[], Result], otherwise: Result) -> None:
        """Run `call` in a thread. Its result becomes the result of the task. If `call` raises, the result of the task
        is `otherwise`."""

        def run() -> None:
            try:
                result = call()
            except Exception:
                log.exception("task %d failed; its objects are misses", task)
                result = otherwise
            self._finish(task, result)

        try:
            self._threads.submit(run)
        except RuntimeError:  # closed
            self._finish(task, otherwise)

    def _finish(self, task: L2TaskId, result: Any) -> None:
        with self._lock:
            self.results[task] = result
            if not self._closed:
                self.event.notify()

    def take(self, task: L2TaskId) -> Any:
        """Return the result of a task, and remove the task. Return None before the task is complete."""
        with self._lock:
            return self.results.pop(task, None)

    def take_all(self) -> dict[L2TaskId, Any]:
        with self._lock:
            found, self.results = self.results, {}
            return found

    def close(self) -> None:
        """Cancel tasks that have not begun, and wait for the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._closed = True
            self.event.close()


class KvloomL2Adapter(L2AdapterInterface):
    """One L2 adapter over kvloom's tiers. `params` are its settings. `others` are tiers that are already open.
    If given, they replace all configured tiers except the host tier. Raises ValueError for wrong settings, or
    if a required tier cannot be opened. Thread-safe.
    """

    def __init__(
        self,
        params: dict[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
        others: Sequence[OpenTier] | None = None,
    ) -> None:
        super().__init__()  # without a capacity: tiers evict objects themselves
        self._settings = Settings.parse(params)
        tiers = TierPages(self._settings.tiers, self._settings.max_object_bytes, others=others)
        self.pages = WaitingPages(tiers, self._settings.load_seconds)
        self._stores, self._lookups, self._loads = _Tasks("store", 1), _Tasks("lookup", 1), _Tasks("load", 2)
        self._ids = count()
        self._sizes: dict[Group, dict[int, None]] = defaultdict(dict)  # seen sizes of objects
        self._sizes_lock = threading.Lock()
        self._is_closed = False

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    # --- store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        task = next(self._ids)
        self._stores.submit(task, lambda: self._store(keys, objects), L2StoreResult(False, 0))
        return task

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        return self._stores.take_all()

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        """Store objects. The task succeeds if all objects are in host memory afterwards."""
        data, complete, stored = _contents(keys, objects), True, list[int]()
        for size, at in _by_size(data).items():
            batch = as_objects([keys[i] for i in at], size, self._settings.namespace)

            def copy(
                pages: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], at: list[int] = at
            ) -> None:
                for i, offset in zip(pages.tolist(), offsets.tolist(), strict=True):
                    source = data[at[i]]
                    self.pages.tiers.arena[offset : offset + len(source)] = source
                    stored.append(at[i])

            complete = bool(self.pages.store(batch, copy).all()) and complete
            self._remember([keys[i] for i in at], size)
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], [len(data[i]) for i in stored])
        return L2StoreResult(complete, sum(len(data[i]) for i in stored))

    # --- lookup

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        task = next(self._ids)
        self._lookups.submit(task, lambda: self._lookup(keys, group_layout_descs), Bitmap(len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, because lookups lock nothing."""

    def _lookup(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        """Return which objects are stored. A lookup in tiers needs the sizes of objects, which LMCache's keys do not
        contain. This method tries up to MAX_SIZES sizes: the size in LMCache's layout, and sizes that objects of the
        same group had before.
        """
        by_size: dict[int, list[int]] = defaultdict(list)
        for group, size in {(_group(key), _layout_bytes(layouts, key)) for key in keys}:
            if size:
                self._remember_size(group, size)
        with self._sizes_lock:
            sizes = {group: list(found) for group, found in self._sizes.items()}
        for i, key in enumerate(keys):
            for size in sizes.get(_group(key), ()):
                by_size[size].append(i)
        batches = [
            as_objects([keys[i] for i in at], size, self._settings.namespace) for size, at in by_size.items()
        ]
        found = Bitmap(len(keys))
        if batches:
            for mask, at in zip(self.pages.lookup(batches), by_size.values(), strict=True):
                found.batched_set([at[i] for i in np.flatnonzero(mask).tolist()])
        return found

    # --- load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        task = next(self._ids)
        self._loads.submit(task, lambda: self._load(keys, objects), Bitmap(len(keys)))
        return task

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._loads.take(task_id)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        data, loaded = _contents(keys, objects), list[int]()
        for size, at in _by_size(data).items():
            batch = as_objects([keys[i] for i in at], size, self._settings.namespace)

            def copy(
                pages: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], at: list[int] = at
            ) -> None:
                for i, offset in zip(pages.tolist(), offsets.tolist(), strict=True):
                    target = data[at[i]]
                    target[:] = self.pages.tiers.arena[offset : offset + len(target)]

            loaded += [at[i] for i in np.flatnonzero(self.pages.load(batch, copy)).tolist()]
        if loaded:
            self._notify_keys_accessed([keys[i] for i in loaded])
        found = Bitmap(len(keys))
        found.batched_set(loaded)
        return found

    # --- upkeep

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects from all tiers. Waits for the tiers."""
        removed: dict[int, int] = {}
        for i, key in enumerate(keys):
            with self._sizes_lock:
                sizes = list(self._sizes.get(_group(key), ()))
            for size in sizes:
                if self._drop(key, size):
                    removed[i] = size
        if removed:
            self._notify_keys_deleted([keys[i] for i in removed], list(removed.values()))

    def _drop(self, key: ObjectKey, size: int) -> bool:
        objects, dropped = as_objects([key], size, self._settings.namespace), 0
        manager = self.pages.tiers.manager
        for tier in (self.pages.tiers.host, *(opened.tier for opened in manager.tiers)):
            try:
                dropped += tier.drop(objects)
            except Exception as error:  # noqa: BLE001  the page expires or is evicted later
                self.pages.record_fault(tier.name, "drop", 1, str(error))
        return dropped > 0

    def report_status(self) -> dict[str, Any]:
        """Return counts, and the state of each tier. The adapter stays healthy if a tier fails."""
        manager, counts = self.pages.tiers.manager, self.pages.counts
        return {
            "is_healthy": not self._is_closed,
            "type": "KvloomL2Adapter",
            "stored_objects": counts.stored,
            "skipped_objects": counts.skipped,
            "loaded_objects": counts.loaded,
            "missed_objects": counts.missed,
            "faults": {" ".join(name): n for name, n in manager.fault_log.counts.items()},
            "tiers": {queue.tier.name: queue.breaker.state for queue in manager.queues},
        }

    def close(self) -> None:
        """Finish running tasks, write pending objects to the tiers, and close the tiers. A second call has no
        effect."""
        if self._is_closed:
            return
        self._is_closed = True
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self.pages.close()

    def _remember(self, keys: list[ObjectKey], size: int) -> None:
        for group in {_group(key) for key in keys}:
            self._remember_size(group, size)

    def _remember_size(self, group: Group, size: int) -> None:
        with self._sizes_lock:
            sizes = self._sizes[group]
            sizes[size] = None
            if len(sizes) > MAX_SIZES:
                sizes.pop(next(iter(sizes)))


def _group(key: ObjectKey) -> Group:
    return key.model_name, key.kv_rank, key.object_group_id


def _layout_bytes(layouts: dict[int, MemoryLayoutDesc], key: ObjectKey) -> int:
    """Return the size of an object in bytes, from LMCache's layout of its group. Return 0 if there is no layout."""
    layout = layouts.get(key.object_group_id)
    if layout is None:
        return 0
    return sum(
        shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )


def _contents(keys: list[ObjectKey], objects: list[MemoryObj]) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of memory objects, without a copy."""
    if len(keys) != len(objects):
        raise ValueError(f"{len(keys)} keys for {len(objects)} objects")
    return [np.frombuffer(one.byte_array, np.uint8) for one in objects]


def _by_size(data: list[npt.NDArray[np.uint8]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for i, one in enumerate(data):
        found[len(one)].append(i)
    return found
