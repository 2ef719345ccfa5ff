"""A cache over memory that comes and goes: what it lends is mapped, what it gives up is really gone, and the
sequences that live through it keep their bytes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvloom.core import (
    CacheControl,
    Field,
    KVCache,
    LayerSpec,
    PoolLayout,
    Sequence,
    Visibility,
    attention_fields,
)
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import ElasticBuffer, LayerView, elastic_buffer, granularity, layer_views

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = granularity(DEVICE)
BLOCK = 16
LAYERS = {
    "full": {"a": LayerSpec("token", attention_fields(1, STEP // 128, "fp32"), Visibility("full"))},
    # Eight pages and four states to a slab: pages move together when the pool shrinks.
    "hybrid": {
        "a": LayerSpec("token", attention_fields(1, STEP // 1024, "fp32"), Visibility("full")),
        "m": LayerSpec("state", (Field("s", (STEP // 16,), "fp32"),)),
    },
}
linux = pytest.mark.skipif(
    DEVICE == "cuda" or not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps"
)


class Engine:
    """The few calls that keep a buffer and a cache in step, and a mark of its own in every page of a sequence."""

    def __init__(self, kind: str, slabs: int, reserved: int) -> None:
        layout = PoolLayout.build(LAYERS[kind], BLOCK, granularity=STEP)
        self.cache = KVCache(layout, slabs, reserved=reserved, max_sequences=64, max_tokens=4096)
        self.buffer: ElasticBuffer = elastic_buffer(layout, reserved, DEVICE, mapped=slabs)
        self.views: dict[str, LayerView] = layer_views(self.buffer.tensor, layout)

    def grow(self, n: int) -> None:
        slabs = self.cache.unbacked_slabs(n)
        self.buffer.map(slabs)
        self.cache.grow(slabs)

    def shrink(self, n: int) -> list[int]:
        slabs = self.cache.shrink(n)
        self.buffer.unmap(slabs)
        return slabs.tolist()

    def copy(self) -> None:
        for batch in self.cache.take_copies():
            copy_pages(self.buffer.tensor, batch.page_stride, batch.source, batch.target)

    def run(self, mark: int, tokens: int, control: CacheControl | None = None) -> Sequence | None:
        """A request that writes what `mark` and the positions say; None where it does not fit."""
        prompt = [mark * 7 + 1] * tokens
        seq = self.cache.open(self.cache.match(prompt, control))
        rest = prompt[seq.length :]
        if seq.extend(len(rest)):
            seq.close()
            return None
        self.copy()
        for view, pages, values in self._written(seq, mark, tokens):
            view[pages] = values
        seq.commit(rest)
        return seq

    def intact(self, seq: Sequence, mark: int) -> bool:
        return all(
            torch.equal(view[pages], values) for view, pages, values in self._written(seq, mark, seq.length)
        )

    def _written(
        self, seq: Sequence, mark: int, tokens: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        parts = []
        for name, view in self.views.items():
            group = self.cache.layout.groups[view.group]
            run, _ = group.locate(name)
            if group.spec.unit == "token":
                pages = self.cache.table(view.group)[run, seq.row, : -(-tokens // BLOCK)]
            else:
                pages = self.cache.block_tables.states[group.columns.start + run, seq.row][None]
            index = torch.from_numpy(pages.astype(np.int64)).to(DEVICE)
            for field in view.fields.values():
                shape = (index.numel(), *field.shape[1:])
                values = torch.arange(index.numel(), dtype=field.dtype, device=DEVICE) + 1000.0 * mark + 1
                values = values.view(-1, *[1] * (len(shape) - 1)).expand(shape)
                parts.append((field, index, values))
        return parts


def resident(tensor: torch.Tensor) -> int:
    """KiB of memory behind the mapping that `tensor` lies in."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        edges = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if edges:
            low, high = (int(edge, 16) for edge in edges.groups())
            inside = low < tensor.data_ptr() + tensor.numel() and tensor.data_ptr() < high
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_sequences_keep_their_bytes_while_the_pool_shrinks_and_grows(kind: str) -> None:
    engine = Engine(kind, slabs=48, reserved=96)
    cache, buffer = engine.cache, engine.buffer
    live = {mark: engine.run(mark, 40) for mark in range(1, 5)}
    mark = 10
    while cache.state.pool.free_slabs:  # fill the rest with cached pages
        seq = engine.run(mark, 64)
        if seq is not None:
            seq.close()
        mark += 1
    address = buffer.tensor.data_ptr()
    taken = engine.shrink(99)
    engine.copy()
    taken += engine.shrink(99)
    engine.copy()
    assert len(taken) == 48 - buffer.mapped_slabs > 10
    assert not any(buffer.is_mapped(slab) for slab in taken)
    for slab in range(96):
        assert buffer.is_mapped(slab) == (slab < 48 and slab not in taken)
    assert all(seq is not None and engine.intact(seq, mark) for mark, seq in live.items())
    assert engine.run(5, 640) is None, "the memory is gone"
    engine.grow(96 - cache.state.pool.slabs)
    assert buffer.mapped_slabs == 96
    assert buffer.tensor.data_ptr() == address
    late = engine.run(6, 160)
    assert late is not None
    assert engine.intact(late, 6)
    assert all(seq is not None and engine.intact(seq, mark) for mark, seq in live.items())
    cache.check()
    buffer.close()


@linux
def test_the_memory_of_a_removed_slab_is_freed() -> None:
    engine = Engine("full", slabs=65, reserved=65)
    for mark in range(8):
        seq = engine.run(mark, 8 * BLOCK)
        assert seq is not None
        seq.close()
    assert engine.cache.state.pool.free_slabs == 0
    slab = engine.buffer.slab_bytes // 1024
    full = resident(engine.buffer.tensor)
    assert full >= 64 * slab
    taken = engine.shrink(40)
    assert len(taken) == 40
    assert resident(engine.buffer.tensor) <= full - 40 * slab
    engine.buffer.close()


@pytest.mark.parametrize("kind", sorted(LAYERS))
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_requests_and_resizes(kind: str, seed: int) -> None:
    """Removed slabs are filled with NaN: a kernel that reads one of their pages would return NaN."""
    rng = random.Random(seed)
    engine = Engine(kind, slabs=24, reserved=64)
    cache, buffer = engine.cache, engine.buffer
    live: dict[int, Sequence] = {}
    for mark in range(120):
        verb = rng.random()
        if verb < 0.45:
            seq = engine.run(mark, rng.randint(1, 80), CacheControl(store=rng.random() < 0.7))
            if seq is not None:
                live[mark] = seq
        elif verb < 0.65 and live:
            live.pop(rng.choice(sorted(live))).close()
        elif verb < 0.8:
            engine.grow(rng.randint(0, cache.state.pool.reserved - cache.state.pool.slabs))
        else:
            taken = engine.shrink(rng.randint(0, cache.state.pool.slabs))
            if DEVICE == "cpu":  # a GPU faults by itself
                buffer.tensor.view(-1, buffer.slab_bytes)[taken] = 255
        if rng.random() < 0.5 and verb < 0.8:
            continue  # the copies of several calls together
        engine.copy()
        assert buffer.mapped_slabs == cache.state.pool.slabs
        assert all(engine.intact(seq, mark) for mark, seq in live.items())
        cache.check()
    assert cache.stats()["evictions"]
    buffer.close()
