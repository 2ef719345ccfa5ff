"""KvloomStorage: SGLang's interface for storage backends of HiCache.

SGLang's key of a page is a hash of all tokens up to the end of the page, the request's salt and the LoRA
adapter. The backend adds the model to every key. Tiers also distinguish pages by their form, which states
dtype, layout and parallel rank. If a tier fails, no method raises: the pages are misses, and the fault is
counted and logged.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvloom.adapters.common import TierPages, WaitingPages
from kvloom.core import HASH_BYTES, root_hash
from kvloom.tiers import Form, Objects, OpenTier

from .identity import model_identity
from .pool_pages import PoolPages, as_bytes
from .prefix_hits import leading_pages, restorable_lengths
from .settings import Settings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

__all__ = ["KvloomStorage"]

log = logging.getLogger("kvloom.sglang")
Answer = TypeVar("Answer")
KV = str(PoolName.KV)


class KvloomStorage(HiCacheStorage):
    """One storage backend over kvloom's tiers. SGLang passes its storage config, and further arguments in
    `kwargs`. `others` are tiers that are already open. If given, they replace all configured tiers except the
    host tier. Raises ValueError for wrong settings. Thread-safe.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: dict[str, Any] | None = None,
        others: Sequence[OpenTier] | None = None,
    ) -> None:
        config, extra = storage_config, dict(storage_config.extra_config or {})
        self._config, self._others = config, others
        workers = config.tp_size * config.pp_size * config.attn_cp_size * (config.dp_rank + 1)
        self._settings = Settings.parse(extra, workers, config.is_mla_model and config.tp_size > 1)
        self._has_v1 = bool(extra.get("interface_v1", 0))
        self._identity = model_identity(config.model_name, self._settings.model)
        self._root = root_hash(self._identity)
        self._pools: dict[str, PoolPages] = {}
        self._values: Form | None = None
        self._opened: WaitingPages | None = None
        self._is_cleared = False
        self._metrics = StorageMetrics()
        self.faults = 0
        """Number of calls that failed with an error, and whose pages were reported as misses."""

    # --- pools

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        pages = PoolPages(KV, mem_pool_host, self._shard(KV, mem_pool_host), flat=not self._has_v1)
        self._pools[KV] = pages
        if pages.form is not None:
            self._values = replace(pages.form, order=f"sglang {mem_pool_host.layout} flat")

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._pools and self._pools[name].pool is host_pool:
            return
        try:
            self._pools[name] = PoolPages(name, host_pool, self._shard(name, host_pool))
        except ValueError as error:
            if self._opened is None:
                raise
            log.warning("pages of the pool %s are not stored: %s", name, error)  # SGLang serves already

    def on_host_pools_registered(self) -> None:
        """Open the tiers. Raises ValueError if a required tier cannot be opened."""
        if self._opened is not None:
            return
        largest = max((pool.form.page_bytes for pool in self._pools.values() if pool.form), default=1)
        tiers = TierPages(self._settings.tiers, largest, self._rank, others=self._others)
        self._opened = WaitingPages(tiers, self._settings.load_seconds)

    @property
    def _rank(self) -> int:
        """The number of this process among all processes with the same configuration."""
        c = self._config
        return int(
            ((c.dp_rank * c.pp_size + c.pp_rank) * c.attn_cp_size + c.attn_cp_rank) * c.tp_size + c.tp_rank
        )

    def _shard(self, name: str, pool: Any) -> str:
        """Return which part of the model a pool stores. Latent (MLA) pages are equal on all tensor-parallel ranks."""
        c = self._config
        is_replicated = (
            c.is_mla_model and name != str(PoolName.MAMBA) and not isinstance(pool, MHATokenToKVPoolHost)
        )
        tensor = "replicated" if is_replicated else f"{c.tp_rank} of {c.tp_size}"
        return (
            f"tp {tensor} pp {c.pp_rank} of {c.pp_size} cp {c.attn_cp_rank} of {c.attn_cp_size} "
            f"dcp {c.dcp_rank} of {c.dcp_size}"
        )

    # --- lookups

    def exists(self, key: str) -> bool:
        """Return whether host memory or a tier has the page of a key. The page may still be evicted before `get`."""
        return self._values is not None and bool(self._lookup([self._values], [key])[0].all())

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of stored pages before the first missing page."""
        return leading_pages(self._stored([KV], keys)[0])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the lengths, in pages, of all prefixes that can be loaded, and the largest of these lengths. A prefix
        can be loaded if the tiers have, for each pool, the pages that this pool needs for the prefix. Pools with the
        hit policy BLOCK_GROUPS are not checked. Also return, for each checked pool, the longest prefix that could be
        loaded for this pool alone.
        """
        # Pages of block groups are a second form of pages that another pool also has, so they limit no prefix.
        gates = [t for t in pool_transfers or [] if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        masks = self._stored([KV, *(str(t.name) for t in gates)], keys)
        kv_pages = leading_pages(masks[0])
        needs = [
            None if t.hit_policy == PoolHitPolicy.ALL_PAGES else max(1, len(t.keys or ())) for t in gates
        ]
        restorable, longest = restorable_lengths(kv_pages, list(zip(masks[1:], needs, strict=True)))
        hits = {PoolName.KV: kv_pages} | {t.name: n for t, n in zip(gates, longest, strict=True)}
        lengths = [int(i) + 1 for i in np.flatnonzero(restorable)]
        return PoolTransferResult(
            lengths[-1] if lengths else 0, {name: n for name, n in hits.items() if n}, lengths
        )

    # --- pages of SGLang's host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool. Return which pages were loaded."""
        return self._transfer(KV, keys, host_indices, is_load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool. Return which pages are stored."""
        return self._transfer(KV, keys, host_indices, is_load=False)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages into several host pools. Return for each pool which pages were loaded."""
        return {t.name: self._transfer(str(t.name), t.keys or [], t.host_indices, True) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several host pools. Return for each pool which pages are stored."""
        return {t.name: self._transfer(str(t.name), t.keys or [], t.host_indices, False) for t in transfers}

    def _transfer(
        self, name: str, keys: list[str], indices: torch.Tensor | None, is_load: bool
    ) -> list[bool]:
        verb, misses, began = "read" if is_load else "write", [False] * len(keys), time.monotonic()

        def call() -> list[bool]:
            pool, pages = self._pools[name], self._require_open()
            if pool.form is None:
                return [True] * len(keys)
            if indices is None or indices.numel() != len(keys) * pool.page_tokens:
                raise ValueError(
                    f"pool {name}: {0 if indices is None else indices.numel()} token slots for {len(keys)} pages of "
                    f"{pool.page_tokens} tokens"
                )
            if self._is_cleared:
                return misses
            objects, arena, slots = self._objects(pool.form, keys), pages.tiers.arena, indices.cpu()
            if is_load:
                found = pages.load(objects, lambda at, to: pool.write(slots, at, arena, to))
            else:
                found = pages.store(objects, lambda at, to: pool.read(slots, at, arena, to))
            if name == KV:
                self._record(is_load, int(found.sum()), pool.form.page_bytes, time.monotonic() - began)
            answer: list[bool] = found.tolist()
            return answer

        return self._guarded(verb, len(keys), misses, call) if keys else []

    # --- single tensors, and SGLang without interface_v1

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Load one flat page into the tensor `target_location`. Return the tensor, or None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Load flat pages into the tensors `target_locations`. Return, for each key, its tensor, or None for
        a miss."""

        def call() -> list[torch.Tensor | None]:
            targets, pages = self._flat_pages(keys, target_locations), self._require_open()
            arena = pages.tiers.arena

            def copy(at: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
                for i, offset in zip(at.tolist(), offsets.tolist(), strict=True):
                    targets[i][:] = arena[offset : offset + len(targets[i])]

            found = pages.load(self._objects(self._value_form, keys), copy).tolist()
            return [target if ok else None for ok, target in zip(found, target_locations or [], strict=True)]

        if self._is_cleared or not keys:
            return [None] * len(keys)
        return self._guarded("read", len(keys), [None] * len(keys), call)

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store one flat page. Return whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store flat pages. Return whether all of them are stored."""

        def call() -> bool:
            sources, pages = self._flat_pages(keys, values), self._require_open()
            arena = pages.tiers.arena

            def copy(at: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> None:
                for i, offset in zip(at.tolist(), offsets.tolist(), strict=True):
                    arena[offset : offset + len(sources[i])] = sources[i]

            return bool(pages.store(self._objects(self._value_form, keys), copy).all())

        if self._is_cleared or not keys:
            return not keys
        return self._guarded("write", len(keys), False, call)

    def _flat_pages(self, keys: list[str], tensors: Any | None) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of tensors. Raises ValueError unless each key has one tensor with the size of a page."""
        found = [as_bytes(tensor) for tensor in tensors or []]
        size = self._value_form.page_bytes
        if len(found) != len(keys) or any(len(page) != size for page in found):
            raise ValueError(f"{len(keys)} keys need as many tensors of {size:,} bytes")
        return found

    # --- upkeep

    def clear(self) -> bool:
        """Change the keys of this process, so that all stored pages become misses. Tiers evict these pages later.

        With MLA and several tensor-parallel workers, the workers share their pages and cannot agree on new keys. In
        this case, nothing is stored or loaded until SGLang starts again.
        """
        if self._config.is_mla_model and self._config.tp_size > 1:
            self._is_cleared = True
            log.warning("the storage was cleared: nothing is stored or loaded until SGLang starts again")
        else:
            self._root = root_hash(f"{self._identity} {uuid.uuid4().hex}")
        return True

    def get_stats(self) -> StorageMetrics | None:
        """Return the numbers of pages and the throughputs of all transfers since the last call. Return None if SGLang
        collects no metrics."""
        if not self._config.enable_storage_metrics:
            return None
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    @property
    def pages(self) -> WaitingPages | None:
        """The object that loads and stores pages, with its counts. None until all pools are registered."""
        return self._opened

    def close(self) -> None:
        """Write pending pages to the tiers within a time limit, and close the tiers."""
        if self._opened is not None:
            self._opened.close()

    # --- parts of the calls above

    @property
    def _value_form(self) -> Form:
        if self._values is None:
            raise ValueError("no host pool with pages is registered")
        return self._values

    def _require_open(self) -> WaitingPages:
        if self._opened is None:
            raise RuntimeError("SGLang did not call on_host_pools_registered, so no tier is open")
        return self._opened

    def _objects(self, form: Form, keys: list[str]) -> Objects:
        root = self._root
        return Objects(
            [blake2b(root + key.encode(), digest_size=HASH_BYTES).digest() for key in keys], 0, form
        )

    def _stored(self, pools: list[str], keys: list[str]) -> list[npt.NDArray[np.bool_]]:
        """Return, for each pool, which of its pages are stored under `keys`. For a pool without bytes, all pages count
        as stored. For an unknown pool, no page counts as stored."""
        known = [self._pools.get(name) for name in pools]
        masks = [np.full(len(keys), pool is not None and pool.form is None) for pool in known]
        at = [i for i, pool in enumerate(known) if pool is not None and pool.form is not None]
        forms = [pool.form for pool in known if pool is not None and pool.form is not None]
        for i, found in zip(at, self._lookup(forms, keys), strict=True):
            masks[i] = found
        return masks

    def _lookup(self, forms: list[Form], keys: list[str]) -> list[npt.NDArray[np.bool_]]:
        """Return, for each form (byte layout of pages), which keys are stored."""
        misses = [np.zeros(len(keys), bool) for _ in forms]
        if self._is_cleared or not keys or not forms:
            return misses
        return self._guarded(
            "lookup",
            len(keys),
            misses,
            lambda: self._require_open().lookup([self._objects(form, keys) for form in forms]),
        )

    def _record(self, is_load: bool, pages: int, size: int, seconds: float) -> None:
        if not self._config.enable_storage_metrics or not pages:
            return
        metrics, rate = self._metrics, pages * size / 1e9 / max(seconds, 1e-9)
        (metrics.prefetch_pgs if is_load else metrics.backup_pgs).append(pages)
        (metrics.prefetch_bandwidth if is_load else metrics.backup_bandwidth).append(rate)

    def _guarded(self, verb: str, pages: int, otherwise: Answer, call: Callable[[], Answer]) -> Answer:
        """Return the result of `call`. After any error return `otherwise`, and count and log the error."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  SGLang computes the pages instead
            self.faults += 1
            if self._opened is None:
                log.warning("%s of %d pages failed: %s", verb, pages, error)
            else:
                self._opened.record_fault("sglang", verb, pages, f"{type(error).__name__}: {error}")
            return otherwise
