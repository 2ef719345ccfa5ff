"""Measures the cost of offloading for the engine thread. Many sequences finish at the same time, and all their pages
are offloaded.

The benchmark uses a cache, a pool and a host tier with the pages of a shape, without the model. Pages are really
copied. The time to start the copies is reported separately.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, PageGroup, PoolLayout
from kvloom.engine.offload import Event, HostPages, Ids, PageOffloader, form_of, open_host
from kvloom.models.specs import model_spec
from kvloom.tiers.transfers import TransferManager

from .shapes import SHAPES, hf_config

__all__ = ["measure_offload_cost"]

TOKENS = 640
"""Number of tokens per sequence: prompt and output of workload W1."""
STEPS = 4
"""Number of engine steps in which the sequences finish: an equal part of them in each step."""


class _TimedHostPages(HostPages):
    """Host pages that measure the time to start copies to host memory. On a CPU, a copy is done when its start returns,
    so this time includes the copying."""

    seconds = 0.0

    def offload(self, group: PageGroup, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Event:
        began = time.perf_counter()
        try:
            return super().offload(group, pages, offsets, age)
        finally:
            self.seconds += time.perf_counter() - began


def measure_offload_cost(
    shape: str, device: str, scale: float, rounds: int, pool: int, host: int
) -> list[dict[str, Any]]:
    """Return two results: for a host tier with free space, and for a full host tier. All times are microseconds per
    page, as medians of `rounds` rounds. There are 256 sequences times `scale`, or as many as fit into `pool` and
    `host`.

    - `close` is the time to close the sequences, which hashes and queues their pages.
    - `offload` is the time to place the pages in host memory and publish them.
    - `copy` is the time to start the copies.
    """
    dtype = str(SHAPES[shape].dtype).removeprefix("torch.")
    layout = PoolLayout.build(model_spec({**hf_config(shape).to_dict(), "dtype": dtype}).layers)
    each = layout.slab_bytes_for(TOKENS)
    most = min(pool // (2 * each), host // ((rounds + 1) * each))
    sequences = max(STEPS, min(most, max(16, round(256 * scale))))
    return [_measure(layout, device, sequences, rounds, full) for full in (False, True)]


def _measure(layout: PoolLayout, device: str, sequences: int, rounds: int, full: bool) -> dict[str, Any]:
    each = layout.slab_bytes_for(TOKENS)
    slabs = 2 * sequences * each // layout.slab_bytes + 64
    cache = KVCache(layout, slabs, max_sequences=sequences, max_tokens=2 * TOKENS)
    buffer = torch.zeros(slabs * layout.slab_bytes, dtype=torch.uint8, device=device)
    capacity = sequences * each * (1 if full else rounds + 1) + 64 * layout.slab_bytes
    host, _ = open_host(layout, capacity, False, buffer.device)
    forms = {g.index: [form_of(g, run) for run in range(g.runs)] for g in layout.groups}
    pages, transfers = _TimedHostPages(layout, buffer, host.arena), TransferManager(host, ())
    store = PageOffloader(cache, pages, transfers, forms, forms, {"through"})
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"close": [], "offload": [], "copy": []}
    for round_ in range(rounds + 1):  # the first warms up and fills the tier
        opened = []
        for _ in range(sequences):
            tokens = rng.integers(3, 2**30, TOKENS, np.int32)
            opened.append(cache.open(cache.match(tokens)))
            cache.extend(opened[-1], TOKENS)
            cache.commit(opened[-1], tokens)
        store.flush()  # pages that were evicted for these sequences
        _finish(store)
        before, pages.seconds = store.stats.offloaded_pages, 0.0
        spent = [0.0, 0.0]
        for step in range(STEPS):
            began = time.perf_counter()
            for sequence in opened[step::STEPS]:
                cache.close(sequence)
            closed = time.perf_counter()
            store.flush()
            spent[0] += closed - began
            spent[1] += time.perf_counter() - closed
        spent[1] += _finish(store)
        cache.take_copies()
        if round_:
            count = store.stats.offloaded_pages - before
            for name, seconds in zip(found, (spent[0], spent[1] - pages.seconds, pages.seconds), strict=True):
                found[name].append(seconds / count * 1e6)
    evicted = host.stats().evicted
    transfers.close()
    pages.close()
    return {
        "tier": "full" if full else "not full", "page": layout.groups[0].page_stride, "pages": count, "evicted": evicted,
        "us_per_page": {name: statistics.median(times) for name, times in found.items()},
    }  # fmt: skip


def _finish(store: PageOffloader) -> float:
    """Wait for pending copies. Return the seconds that the calls of `poll` took, without the time between the calls."""
    spent = 0.0
    while store.busy:
        time.sleep(0.0002)
        began = time.perf_counter()
        store.poll()
        spent += time.perf_counter() - began
    return spent
