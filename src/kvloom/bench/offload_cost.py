"""What keeping copies costs the thread that makes the steps: many sequences end at once, and all their pages are offered.

A cache, a pool and a host tier of a shape's pages, without its model: nothing is computed. The pool's bytes are copied for
real, on a GPU by its own copies; what the thread spends on handing them over is told apart.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, PoolLayout
from kvloom.engine.offload import Event, HostPages, HostStore, Ids, form_of, open_host
from kvloom.models.specs import model_spec
from kvloom.tiers.transfers import TransferManager

from .shapes import SHAPES, hf_config

__all__ = ["measure_offload_cost"]

TOKENS = 640
"""Of each sequence: a prompt and an answer of W1."""
STEPS = 4
"""In which they all end."""


class _TimedHostPages(HostPages):
    """Tells how long the copies took to hand over; on a CPU, to make."""

    seconds = 0.0

    def offload(self, stride: int, pages: Ids, offsets: npt.NDArray[np.int64], age: int = 0) -> Event:
        began = time.perf_counter()
        try:
            return super().offload(stride, pages, offsets, age)
        finally:
            self.seconds += time.perf_counter() - began


def measure_offload_cost(
    shape: str, device: str, scale: float, rounds: int, pool: int, host: int
) -> list[dict[str, Any]]:
    """Microseconds a page, medians of `rounds`: with room in the host tier, and where every page that comes needs one to
    leave. `ended`: closing the sequences, in which pages are named and offered; `kept`: placing them, telling of them and
    letting them go; `copied`: handing the copies over. 256 sequences by `scale`, as far as bytes of `pool` and `host` hold
    them, and a few at least."""
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
    pages, transfers = _TimedHostPages(layout, buffer, host), TransferManager(host, ())
    store = HostStore(cache, pages, transfers, forms, forms, {"through"})
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"ended": [], "kept": [], "copied": []}
    for round_ in range(rounds + 1):  # the first warms up, or fills the tier
        open_url = []
        for _ in range(sequences):
            tokens = rng.integers(3, 2**30, TOKENS, np.int32)
            open_url.append(cache.open(cache.match(tokens)))
            cache.extend(open_url[-1], TOKENS)
            cache.commit(open_url[-1], tokens)
        store.flush()  # what left the pool for these
        _finish(store)
        before, pages.seconds = store.stats.offloaded_pages, 0.0
        spent = [0.0, 0.0]
        for step in range(STEPS):
            began = time.perf_counter()
            for sequence in open_url[step::STEPS]:
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
        "tier": "full" if full else "with room", "page": layout.groups[0].page_stride, "pages": count, "evicted": evicted,
        "us_per_page": {name: statistics.median(times) for name, times in found.items()},
    }  # fmt: skip


def _finish(store: HostStore) -> float:
    """Wait for copies that are under way; the seconds that letting them go took."""
    spent = 0.0
    while store.busy:
        time.sleep(0.0002)
        began = time.perf_counter()
        store.poll()
        spent += time.perf_counter() - began
    return spent
