"""Slabs that come and go under one tensor; on a GPU, and without one against a driver that keeps books."""

from __future__ import annotations

import gc
import mmap
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvloom.core import LayerSpec, PoolLayout, Visibility, attention_fields
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import (
    CudaError,
    ElasticBuffer,
    elastic as memory,
    elastic_buffer,
    granularity,
    layer_views,
    load_cuda_driver,
)

pytestmark = [pytest.mark.alone, pytest.mark.slow]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEP = granularity(DEVICE)
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")


# -- any device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.few(2)
def test_slabs_keep_their_bytes_while_others_are_mapped_and_unmapped(seed: int) -> None:
    rng = random.Random(seed)
    slabs = 24
    with ElasticBuffer(STEP, slabs, DEVICE, mapped=rng.randint(1, 4)) as buffer:
        rows = buffer.tensor.view(slabs, STEP)
        address = buffer.tensor.data_ptr()
        known = {}
        mapped = {slab for slab in range(slabs) if buffer.is_mapped(slab)}
        for _ in range(30):
            others = sorted(set(range(slabs)) - mapped)
            if rng.random() < 0.5 and others:
                chosen = rng.sample(others, rng.randint(1, len(others)))
                buffer.map(chosen)
                mapped |= set(chosen)
            else:
                chosen = rng.sample(sorted(mapped - {0}), rng.randint(0, len(mapped) - 1))
                buffer.unmap(chosen)
                mapped -= set(chosen)
                known = {slab: value for slab, value in known.items() if slab in mapped}
            slab, value = rng.choice(sorted(mapped)), rng.randrange(256)
            rows[slab] = value
            known[slab] = value
            assert buffer.mapped_slabs == len(mapped)
            assert buffer.mapped_bytes == len(mapped) * STEP
            assert all(bool((rows[slab] == value).all()) for slab, value in known.items())
        assert buffer.tensor.data_ptr() == address


def test_a_pool_lives_in_it() -> None:
    spec = LayerSpec("token", attention_fields(2, 16, "fp32"), Visibility("full"))
    layout = PoolLayout.build({"a": spec, "b": spec}, granularity=STEP)
    with elastic_buffer(layout, 64, DEVICE, mapped=3) as buffer:
        views = layer_views(buffer.tensor, layout)
        stride, last = layout.groups[0].page_stride, 50 * layout.groups[0].pages_per_slab
        views["a"].fields["k"][1] = 7.0
        buffer.map([50])
        copy_pages(buffer.tensor, stride, [1], [last])
        assert bool((views["a"].fields["k"][last] == 7.0).all())
        buffer.unmap([1, 2])
        assert bool((views["a"].fields["k"][last] == 7.0).all())
        del views


def test_refusals_change_nothing() -> None:
    with ElasticBuffer(STEP, 8, DEVICE, mapped=2) as buffer:
        refused = [
            (buffer.map, [2, 8], "slab 8 is outside the reservation of 8"),
            (buffer.map, [-1], "slab -1 is outside"),
            (buffer.map, [2, 1], "slab 1 is mapped already"),
            (buffer.unmap, [1, 5], "slab 5 is not mapped"),
            (buffer.unmap, [1, 0], "slab 0 stays mapped"),
        ]
        for call, slabs, message in refused:
            with pytest.raises(ValueError, match=re.escape(message)):
                call(slabs)
            assert [buffer.is_mapped(slab) for slab in range(8)] == [True] * 2 + [False] * 6
        buffer.unmap([])
        buffer.map(range(0))


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=f"granularity={STEP}"):
        ElasticBuffer(STEP + 16, 4, DEVICE)
    for mapped in (0, 5):
        with pytest.raises(ValueError, match="give 1 to 4"):
            ElasticBuffer(STEP, 4, DEVICE, mapped=mapped)
    with pytest.raises(ValueError, match="cpu and cuda"):
        granularity("meta")


def test_a_closed_buffer_raises() -> None:
    buffer = ElasticBuffer(STEP, 4, DEVICE)
    buffer.close()
    buffer.close()
    assert buffer.mapped_bytes == 0
    for call in (lambda: buffer.tensor, lambda: buffer.map([1]), lambda: buffer.unmap([0])):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_view_keeps_the_addresses() -> None:
    view = ElasticBuffer(STEP, 4, DEVICE).tensor[16:32]
    gc.collect()
    view.fill_(3)
    assert view.tolist() == [3] * 16


# -- host memory ----------------------------------------------------------------------------------------


def resident(tensor: torch.Tensor) -> int:
    """Bytes of real memory behind a tensor's mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


@linux
def test_unmapped_host_memory_is_freed() -> None:
    slab = 4 << 20
    with ElasticBuffer(slab, 1 << 15, "cpu", mapped=4) as buffer:  # 128 GiB of addresses
        rows = buffer.tensor.view(-1, slab)
        before = resident(buffer.tensor)
        rows[:4] = 1
        assert resident(buffer.tensor) - before >= 4 * slab - mmap.PAGESIZE
        buffer.unmap([1, 3])
        assert resident(buffer.tensor) - before <= 2 * slab + mmap.PAGESIZE
        assert bool((rows[2] == 1).all())
        assert not bool(rows[1].any())
        view = buffer.tensor
        del rows
    assert resident(view) - before < slab  # the system may join the mapping with a neighbour


# -- device memory, by the books --------------------------------------------------------------------------


class Books:
    """What the driver would hold: fails on what it would refuse, and runs out of memory on demand."""

    BASE = 1 << 40

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.allowed: set[int] = set()
        self.creations = self.failures = 0
        self.fail: tuple[str, int, int] | None = None  # call, how many succeed before, code

    def _maybe_fail(self, call: str) -> None:
        if self.fail and self.fail[0] == call:
            if self.fail[1] == 0:
                raise CudaError(call, self.fail[2], "as asked")
            self.fail = (call, self.fail[1] - 1, self.fail[2])

    def use(self, device: int) -> None: ...

    def granularity(self, device: int) -> int:
        return 2 << 20

    def reserve(self, size: int, alignment: int) -> int:
        self._maybe_fail("reserve")
        self.reserved[self.BASE] = size
        return self.BASE

    def free(self, address: int, size: int) -> None:
        assert not self.mappings, "freed under a mapping"
        assert self.reserved.pop(address) == size

    def create(self, size: int, device: int) -> int:
        self._maybe_fail("create")
        self.creations += 1
        self.handles[self.creations] = size
        return self.creations

    def release(self, handle: int) -> None:
        del self.handles[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        self._maybe_fail("map")
        assert self.handles[handle] == size
        assert address not in self.mappings
        assert self.BASE <= address
        assert address + size <= self.BASE + self.reserved[self.BASE]
        self.mappings[address] = size

    def allow(self, address: int, size: int, device: int) -> None:
        self._maybe_fail("allow")
        self.allowed.update(self._covered(address, size))

    def unmap(self, address: int, size: int) -> None:
        for start in self._covered(address, size):
            del self.mappings[start]
            self.allowed.discard(start)

    def _covered(self, address: int, size: int) -> list[int]:
        starts, at = [], address
        while at < address + size:
            starts.append(at)
            at += self.mappings[at]
        assert at == address + size
        assert starts
        return starts


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5 << 20, 100 << 20))
    monkeypatch.setattr(memory._CudaRange, "view", lambda self: torch.empty(0, dtype=torch.uint8))
    books = Books()
    monkeypatch.setattr(memory, "load_cuda_driver", lambda: books)
    return books


def test_the_driver_holds_what_is_mapped_and_no_handles(books: Books) -> None:
    slab = 4 << 20
    with ElasticBuffer(slab, 100, "cuda:0", mapped=2) as buffer:
        buffer.map([7, 5, 6, 99])
        expected = {Books.BASE + s * slab for s in (0, 1, 5, 6, 7, 99)}
        assert books.mappings.keys() == books.allowed == expected
        assert not books.handles
        buffer.unmap([6, 1, 5])
        assert books.mappings.keys() == {Books.BASE + s * slab for s in (0, 7, 99)}
    assert not books.reserved
    assert not books.mappings


@pytest.mark.parametrize("call", ["create", "map", "allow"])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("code", [CudaError.OUT_OF_MEMORY, 1])
@pytest.mark.few(1)
def test_mapping_is_all_or_nothing(books: Books, call: str, before: int, code: int) -> None:
    with ElasticBuffer(2 << 20, 100, "cuda:0") as buffer:
        mappings, allowed = dict(books.mappings), set(books.allowed)
        books.fail = (call, before, code)
        slabs = [3, 4, 9, 20, 22]  # four runs
        expected = MemoryError if code == CudaError.OUT_OF_MEMORY else CudaError
        with pytest.raises(
            expected, match="5 slabs of 2097152 bytes: 5242880 of" if code == 2 else "as asked"
        ):
            buffer.map(slabs)
        assert (books.mappings, books.allowed, books.handles) == (mappings, allowed, {})
        assert buffer.mapped_slabs == 1
        books.fail = None
        buffer.map(slabs)
        assert buffer.mapped_slabs == 6


def test_a_failed_buffer_frees_everything(books: Books) -> None:
    books.fail = ("reserve", 0, CudaError.OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="no addresses for 10 slabs"):
        ElasticBuffer(2 << 20, 10, "cuda:0")
    books.fail = ("create", 2, CudaError.OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="enough for 2"):
        ElasticBuffer(2 << 20, 10, "cuda:0", mapped=5)
    assert not books.reserved
    assert not books.mappings
    assert not books.handles


def test_memory_cached_by_torch_is_freed_before_failing(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ElasticBuffer(2 << 20, 10, "cuda:0") as buffer:
        books.fail = ("create", 1, CudaError.OUT_OF_MEMORY)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(books, "fail", None))
        buffer.map([1, 2, 3])
        assert buffer.mapped_slabs == 4


def test_a_dropped_buffer_frees_itself(books: Books) -> None:
    buffer = ElasticBuffer(2 << 20, 10, "cuda:0", mapped=3)
    assert books.reserved
    del buffer
    gc.collect()
    assert not books.reserved
    assert not books.mappings


def test_unmapping_waits_first(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Event:
        def synchronize(self) -> None:
            waited.append(("event", len(books.mappings)))

    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waited.append((device, len(books.mappings)))
    )
    buffer = ElasticBuffer(2 << 20, 10, "cuda:0", mapped=5)
    buffer.unmap([1])
    buffer.unmap([2], after=Event())  # type: ignore[arg-type]
    assert waited == [(torch.device("cuda:0"), 5), ("event", 4)]


# -- device memory, for real ------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_unmapped_device_memory_is_freed() -> None:
    slab, count = 64 << 20, 32
    with ElasticBuffer(slab, 4096, "cuda") as buffer:  # 256 GiB of addresses
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        buffer.map(range(1, 1 + count))
        buffer.tensor[slab : (1 + count) * slab].fill_(5)
        assert free - torch.cuda.mem_get_info()[0] >= count * slab
        buffer.unmap(range(2, 1 + count))
        assert abs(free - torch.cuda.mem_get_info()[0] - slab) < slab
        assert bool((buffer.tensor[slab : 2 * slab] == 5).all())


@pytest.mark.gpu
@needs_gpu
def test_the_driver_counts_the_gpus_that_torch_does() -> None:
    assert load_cuda_driver().devices() == torch.cuda.device_count()


@pytest.mark.gpu
@needs_gpu
def test_too_much_maps_nothing() -> None:
    slab = 1 << 30
    with ElasticBuffer(slab, 1000, "cuda") as buffer:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(MemoryError, match="map fewer"):
            buffer.map(range(1, 1000))
        assert buffer.mapped_slabs == 1
        assert abs(torch.cuda.mem_get_info()[0] - free) < slab


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_outlives_a_remapping() -> None:
    with ElasticBuffer(STEP, 64, "cuda", mapped=8) as buffer:
        part = buffer.tensor[5 * STEP : 6 * STEP]
        part.fill_(1)
        out = torch.zeros((), dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.sum(part, dim=0, dtype=torch.int64, out=out)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            torch.sum(part, dim=0, dtype=torch.int64, out=out)
        for value in (2, 3):
            buffer.unmap([5])
            buffer.map([5])
            part.fill_(value)
            graph.replay()
            assert int(out) == value * STEP


def test_runs() -> None:
    assert list(memory._contiguous_ranges(np.array([1, 2, 3, 7, 9, 10]))) == [(1, 3), (7, 1), (9, 2)]
    assert list(memory._contiguous_ranges(np.array([], np.int64))) == []
