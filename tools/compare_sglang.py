"""Compare storage backends of SGLang's HiCache: throughput of backups and prefetches through SGLang's own controller.

    build/sglang/bin/python tools/compare_sglang.py --pages 64 --folder /nvme/compare

Every system stores the same pages of a host pool, then loads them into other slots, and all bytes must be equal. The
systems run in turns, each turn with new pages, so that load of the machine hits all of them. Before each measurement the
same controller moves other pages, so that memory is in use already. "Again" loads pages that the same controller
stored. "After a restart" loads them by a new controller. "From disk" does so after the files left the system's page
cache. Results are medians of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_import import define_operators

define_operators()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

LAYERS, HEADS, SIZE = 32, 8, 128


def systems(folder: Path, memory: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The storage backend of each system and its extra config."""

    def kvloom(*tiers: str) -> tuple[str, dict[str, Any]]:
        return "dynamic", {
            "backend_name": "kvloom",
            "module_path": "kvloom.adapters.sglang",
            "class_name": "KvloomStorage",
            "interface_v1": 1,
            "load_seconds": 60,
            "tiers": list(tiers),
        }

    return {
        "SGLang's `file` backend": ("file", {"file_storage_path": str(folder / "file")}),
        "kvloom, host memory and disk": kvloom(f"host:{memory}", f"disk:{folder / 'kvloom'}:8GiB"),
    }


class Bench:
    """A host pool, and backups and prefetches of its pages by SGLang's controller."""

    def __init__(self, page_tokens: int, pages: int, layout: str) -> None:
        self.page, self.tokens = page_tokens, page_tokens * pages
        self.device = MHATokenToKVPool(
            size=page_tokens,
            page_size=page_tokens,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=SIZE,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool = MHATokenToKVPoolHost(
            self.device._mha_buffer_info(),
            2.0 * pages,
            0,
            page_tokens,
            layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=page_tokens,
            start_layer=0,
            end_layer=LAYERS,
        )
        self.pool.kv_buffer.random_(-100, 100)
        self.bytes = self.tokens * self.pool.size_per_token

    @contextmanager
    def controller(self, backend: str, extra: dict[str, Any]) -> Iterator[HiCacheController]:
        allocator: Any = SimpleNamespace(get_kvcache=lambda: self.device)
        one = HiCacheController(
            allocator,
            self.pool,
            self.page,
            torch.distributed.group.WORLD,
            threading.Event(),
            io_backend="kernel",
            storage_backend=backend,
            model_name="model",
            storage_backend_extra_config=dict(extra),
        )
        try:
            yield one
        finally:
            one.detach_storage_backend()

    def store(self, one: HiCacheController, tokens: list[int], slots: torch.Tensor) -> float:
        """Return the seconds of a backup."""
        hashes = get_storage_hash_str(tokens, None, page_size=self.page)
        began = time.monotonic()
        one.write_storage(slots, tokens, hashes)
        done = one.ack_backup_queue.get(timeout=600)
        if done.completed_tokens != len(tokens):
            raise SystemExit(f"only {done.completed_tokens} of {len(tokens)} tokens were stored")
        return time.monotonic() - began

    def load(self, one: HiCacheController, tokens: list[int], slots: torch.Tensor) -> float:
        """Return the seconds of a lookup and a prefetch."""
        began = time.monotonic()
        one.prefetch("request", tokens, None)
        operation = one.prefetch_hit_queue.get(timeout=600)
        if operation.storage_hit_count != len(tokens):
            raise SystemExit(f"only {operation.storage_hit_count} of {len(tokens)} tokens were found")
        operation.host_indices = slots
        one.prefetch_buffer.put(operation)
        loaded = 0
        while not (ack := one.ack_prefetch_queue.get(timeout=600)).completed_req:
            loaded = ack.completed_tokens
        if loaded != len(tokens):
            raise SystemExit(f"only {loaded} of {len(tokens)} tokens were loaded")
        return time.monotonic() - began

    def check(self, slots: torch.Tensor, others: torch.Tensor) -> None:
        for a, b in zip(slots[:: self.page].tolist(), others[:: self.page].tolist(), strict=True):
            if not torch.equal(self.pool.get_data_page(a), self.pool.get_data_page(b)):
                raise SystemExit("a loaded page differs from the stored one")

    def turn(self, system: tuple[str, dict[str, Any]], number: int, folder: Path) -> dict[str, float]:
        """Return the throughput of one turn in GB/s."""
        tokens = [number * 1_000_000 + i for i in range(self.tokens)]
        others = [[i + part * 500_000_000 for i in tokens] for part in (1, 2)]  # to warm up
        source, target = torch.arange(self.tokens), torch.arange(self.tokens, 2 * self.tokens)
        self.pool.kv_buffer[:, source[0]].random_(-100, 100)
        seconds = {}
        with self.controller(*system) as one:
            for some in others:
                self.store(one, some, source)
                self.load(one, some, target)
            wait_for_writes(one.storage_backend)
            seconds["store"] = self.store(one, tokens, source)
            seconds["load again"] = self.load(one, tokens, target)
            self.check(source, target)
            began = time.monotonic()
        seconds["store until closed"] = seconds["store"] + time.monotonic() - began
        for name in ("load after a restart", "load from disk"):
            with self.controller(*system) as one:
                for some in others:
                    self.load(one, some, target)
                if name == "load from disk":
                    drop_from_page_cache(folder)
                seconds[name] = self.load(one, tokens, target)
                self.check(source, target)
        return {name: self.bytes / 1e9 / s for name, s in seconds.items()}


def wait_for_writes(storage: Any) -> None:
    """Wait until kvloom has written what it has queued. SGLang's backend writes at once."""
    pages = getattr(storage, "pages", None)
    while pages is not None and any(queue.pending_store_bytes for queue in pages.tiers.manager.queues):
        time.sleep(0.01)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layout", default="page_first")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kvloom-compare-sglang"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    bench = Bench(options.page_tokens, options.pages, options.layout)
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {}
    try:
        with get_parallel().override(
            attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
        ):
            for number in range(options.turns):
                for name, system in systems(options.folder, 2 * bench.bytes).items():
                    found.setdefault(name, []).append(bench.turn(system, number, options.folder))
                    print(name, {k: round(v, 2) for k, v in found[name][-1].items()}, flush=True)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    medians = {
        name: {k: round(statistics.median(t[k] for t in turns), 3) for k in turns[0]}
        for name, turns in found.items()
    }
    first, second = medians
    ratios = {
        k: round(statistics.median(b[k] / a[k] for a, b in zip(found[first], found[second], strict=True)), 2)
        for k in medians[first]
    }
    print(json.dumps({"bytes": bench.bytes, "GB/s": medians, f"{second} / {first}": ratios}, indent=1))


if __name__ == "__main__":
    main()
