"""Measures the time to copy and to read pages, whole and layer by layer. The difference of the two times is the cost of
loading the layers in the order in which the model computes them.

A page has all layers of its tokens in contiguous bytes. To load the first layer of many pages first, each page is
copied or read in one piece per layer. The benchmark uses tiers without an engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvloom.tiers import DiskConfig, DiskTier, Form, Objects, Ranges, aligned_bytes
from kvloom.tiers.host import copy_pages

__all__ = ["measure_layerwise_copy"]


def measure_layerwise_copy(
    folder: str, layers: int = 32, run: int = 64 << 10, pages: int = 96, rounds: int = 5
) -> dict[str, Any]:
    """Return the median seconds to copy and to read `pages` pages in three ways: whole, layer by layer, and the
    first layer only. A page has `layers` layers of `run` bytes each.

    Pages are in random order in source and target, as in a used pool."""
    size = layers * run
    rng = np.random.default_rng(0)
    here, there = (np.frombuffer(aligned_bytes(pages * size), np.uint8) for _ in range(2))
    here[:], there[:] = 1, 2
    at, to = rng.permutation(pages) * size, rng.permutation(pages) * size

    def copies(count: int) -> None:
        for layer in range(count):
            copy_pages(there, to + layer * run, here, at + layer * run, run)

    objects = Objects([i.to_bytes(16, "little") for i in range(pages)], 0, Form("bf16", "LKTHD", size, run))
    into = Ranges(there, np.arange(pages) * size)
    config = DiskConfig(folder, 4 * pages * size + (256 << 20), durable="process")
    tier = DiskTier(config)

    def reads(parts: list[tuple[int, int] | None]) -> None:
        for transfer in [tier.read(objects, into, part) for part in parts]:
            if not transfer.wait(60.0) or transfer.failed:
                raise RuntimeError(f"a read failed: {transfer}")

    parts: list[tuple[int, int] | None] = [(layer * run, (layer + 1) * run) for layer in range(layers)]
    try:
        if not tier.write(objects, Ranges(here, np.arange(pages) * size)).wait(120.0):
            raise RuntimeError("the pages were not written within two minutes")
        ways: dict[str, dict[str, Callable[[], None]]] = {
            "host": {
                "whole": lambda: copy_pages(there, to, here, at, size),
                "layers": lambda: copies(layers),
                "first": lambda: copies(1),
            },
            "disk": {
                "whole": lambda: reads([None]),
                "layers": lambda: reads(parts),
                "first": lambda: reads(parts[:1]),
            },
        }
        found: dict[str, Any] = {"page": size, "layers": layers, "pages": pages}
        for place, each in ways.items():
            found[place] = {way: _median(call, rounds) for way, call in each.items()}
        return found
    finally:
        tier.close()


def _median(call: Callable[[], None], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
