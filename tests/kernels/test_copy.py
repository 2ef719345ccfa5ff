"""Pages that move: inside the pool, to host rows and back, by every method this machine has."""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvloom.core import CopyBatch, Field, LayerSpec, PageRange, PoolLayout, Visibility
from kvloom.kernels.copy import Copier, Method, RangeCopier, copier as copy, copy_pages, reference
from kvloom.kernels.copy.copier import merge_adjacent
from kvloom.kernels.memory import allocate, layer_views

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
METHODS: list[Method | None] = [None, "batch", "staged", "kernel"]
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU: on a CPU copies are done when the call returns")


def pool_of(pages: int, stride: int) -> torch.Tensor:
    return torch.randint(0, 256, (pages * stride,), dtype=torch.uint8).to(DEVICE)


def host_of(rows: int, size: int, stride: int | None = None) -> torch.Tensor:
    whole = torch.randint(0, 256, (rows, stride or size), dtype=torch.uint8, pin_memory=CUDA)
    return whole[:, :size]


class Immediate:
    """A stream, an event or a driver where everything happens at once, for machines without a GPU."""

    copies_batches, cuda_stream = True, 0

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        for copy_ in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(*copy_)


def copier_of(
    pool: torch.Tensor, stride: int, size: int, method: Method | None, monkeypatch: pytest.MonkeyPatch
) -> Copier:
    """A copier that takes the device's way; without a GPU over immediate streams and interpreted kernels."""
    copier = Copier(pool, stride, size)
    if not CUDA and method is not None:
        pytest.importorskip("triton")
        monkeypatch.setattr(torch.cuda, "Stream", Immediate)
        monkeypatch.setattr(torch.cuda, "Event", Immediate)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", Immediate)
        monkeypatch.setattr(copy, "load_cuda_driver", Immediate)
        monkeypatch.setattr(copy, "_multiprocessors", lambda device: 3)
        monkeypatch.setattr(copy, "_upload", lambda ids, device: torch.from_numpy(ids).int())
        copier._out, copier._in = copy._StagedLane(pool.device), copy._StagedLane(pool.device)
    return copier


# -- inside the pool --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_pages_are_copied_as_the_reference_copies_them(seed: int) -> None:
    rng = random.Random(seed)
    pages, stride = rng.randint(2, 40), 16 * rng.choice([1, 3, 64, 1025, 2048])
    pool = pool_of(pages, stride)
    count = rng.randint(0, pages // 2)
    target = rng.sample(range(pages), count)
    source = rng.choices([p for p in range(pages) if p not in target], k=count)
    expected = pool.cpu()
    reference.copy_pages(expected, stride, torch.tensor(source).long(), torch.tensor(target).long())
    kind = seed % 3
    if kind == 0:
        copy_pages(pool, stride, torch.tensor(source, device=DEVICE), torch.tensor(target))
    elif kind == 1:
        batch = CopyBatch(stride, np.array(source, np.int32), np.array(target, np.int32))
        copy_pages(pool, batch.page_stride, batch.source, batch.target)
    else:
        copy_pages(pool, stride, source, target)
    assert torch.equal(pool.cpu(), expected)


def test_padding_stays_where_it_is() -> None:
    pool = pool_of(4, 64)
    before = pool.cpu().view(4, 64)
    copy_pages(pool, 64, [1], [3], page_bytes=48)
    after = pool.cpu().view(4, 64)
    assert torch.equal(after[3, :48], before[1, :48])
    assert torch.equal(after[3, 48:], before[3, 48:])
    assert torch.equal(after[:3], before[:3])


@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_moves_rows_between_any_strides(seed: int) -> None:
    triton_copy = pytest.importorskip("kvloom.kernels.copy.triton_copy")
    rng = random.Random(seed)
    tile = triton_copy.TILE_BYTES
    size = 16 * rng.choice([1, 7, 513, tile // 16, tile // 16 + 1, 2 * tile // 16])
    strides = [size + 16 * rng.choice([0, 0, 1, 5]) for _ in range(2)]
    rows = [rng.randint(3, 9) for _ in range(2)]
    ends = [pool_of(n, s) for n, s in zip(rows, strides, strict=True)]
    count = rng.randint(1, min(rows))
    ids = [rng.sample(range(n), count) if rng.random() < 0.7 else list(range(count)) for n in rows]
    plain = [picked == list(range(count)) for picked in ids]
    given = [
        None if p else torch.tensor(picked, dtype=torch.int32, device=DEVICE)
        for p, picked in zip(plain, ids, strict=True)
    ]
    expected = ends[1].cpu().view(rows[1], strides[1])
    expected[ids[1], :size] = ends[0].cpu().view(rows[0], strides[0])[ids[0], :size]
    triton_copy.move(*ends, *given, count, size, *strides, programs=rng.choice([1, 2, 5, 1000]))
    assert torch.equal(ends[1].cpu().view(rows[1], strides[1]), expected)


# -- to the host and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(8))
def test_pages_are_copied_to_the_host_and_back(
    seed: int, method: Method | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    size = 16 * rng.choice([1, 5, 256, 1025, 2500])
    stride = size + 16 * rng.choice([0, 0, 3])
    pages, count = 30, rng.choice([0, 1, 7, 25])
    monkeypatch.setattr(copy, "_STAGE_BYTES", 3 * size + 16)  # several turns of both staging buffers
    pool = pool_of(pages, stride)
    before = pool.cpu().view(pages, stride)
    ids = rng.sample(range(pages), count)
    rows = rng.sample(range(40), count) if seed % 2 else None
    host = host_of(40 if seed % 2 else count, size, stride=rng.choice([None, size + 32]))
    expected = host.clone()
    expected[list(range(count)) if rows is None else rows] = before[ids, :size]
    copier = copier_of(pool, stride, size, method, monkeypatch)
    copier.gather(ids, host, rows, method=method).synchronize()
    assert torch.equal(host, expected)

    other = rng.sample(range(pages), count)
    copier.scatter(host, other, rows, method=method).synchronize()
    before[other, :size] = before[ids, :size].clone()
    assert torch.equal(pool.cpu().view(pages, stride), before)


@pytest.mark.parametrize("unit", [16, 4], ids=["by a kernel", "one by one"])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_of_pages_are_copied_to_the_host_and_back(
    seed: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges of a page are in another order and at other distances in host memory."""
    pytest.importorskip("triton")
    rng = random.Random(seed)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "Stream", Immediate)
        monkeypatch.setattr(torch.cuda, "Event", Immediate)
        for name in ("stream", "device"):
            monkeypatch.setattr(torch.cuda, name, nullcontext)
        monkeypatch.setattr(torch.cuda, "current_stream", Immediate)
        monkeypatch.setattr(RangeCopier, "_upload", lambda self, ids: torch.from_numpy(ids))
    sizes = [unit * rng.choice([1, 3, 64, 1025]) for _ in range(5)]
    owns = np.cumsum([0, *sizes])
    order = rng.sample(range(5), 5)
    wholes = dict(zip(order, np.cumsum([32, *(sizes[i] + 48 for i in order)])[:-1].tolist(), strict=True))
    ranges = [PageRange(int(owns[i]), wholes[i], size, True) for i, size in enumerate(sizes)]
    stride, whole = -(-int(owns[-1]) // 16) * 16, sum(sizes) + 5 * 48 + 48
    pool, host = pool_of(6, stride), host_of(1, 8 * whole)[0]
    copier = RangeCopier(pool, host)
    pages, rows = rng.sample(range(6), 3), rng.sample(range(8), 3)
    before, expected = pool.cpu(), host.clone()
    for page, row in zip(pages, rows, strict=True):
        for each in ranges:
            to, at = row * whole + each.whole, page * stride + each.own
            expected[to : to + each.size] = before[at : at + each.size]
    starts, offsets = np.array(pages, np.int64) * stride, np.array(rows, np.int64) * whole
    copier.gather(ranges, starts, offsets).synchronize()
    assert torch.equal(host, expected)

    pool.zero_()
    copier.scatter(ranges, starts, offsets, torch.cuda.current_stream())
    if CUDA:
        torch.cuda.synchronize()
    found, wanted = pool.cpu().view(6, stride), before.view(6, stride)
    assert torch.equal(found[pages, : int(owns[-1])], wanted[pages, : int(owns[-1])])
    others = [page for page in range(6) if page not in pages]
    assert not found[others].any()


def test_a_page_may_be_gathered_twice_and_a_row_scattered_twice() -> None:
    pool, host = pool_of(6, 32), host_of(2, 32)
    before = pool.cpu().view(6, 32)
    copier = Copier(pool, 32)
    copier.gather([4, 4], host).synchronize()
    assert torch.equal(host, before[[4, 4]])
    copier.scatter(host, [0, 1], [1, 1]).synchronize()
    assert torch.equal(pool.cpu().view(6, 32)[:2], before[[4, 4]])


@pytest.mark.parametrize("method", METHODS)
def test_one_layer_of_every_page_moves_alone(method: Method | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = (Field("k", (2, 8), "fp32"), Field("v", (2, 8), "fp32"))
    layers = {name: LayerSpec("token", fields, Visibility("full")) for name in ("a", "b", "c")}
    layout = PoolLayout.build(layers)
    pool = allocate(layout, 6, DEVICE)
    pool.zero_()
    group = layout.groups[0]
    host = host_of(1, group.layer_bytes)
    start = group.locate("b")[1] * group.layer_bytes
    last = len(pool) // group.page_stride - 1
    copier = copier_of(pool[start:], group.page_stride, group.layer_bytes, method, monkeypatch)
    copier.scatter(host, [last], method=method).synchronize()
    views = layer_views(pool, layout)
    got = torch.cat([views["b"].fields[name][last].flatten() for name in ("k", "v")]).cpu()
    assert torch.equal(got.view(torch.uint8), host[0])
    assert int(pool.ne(0).sum()) == int(host.ne(0).sum())


def test_arguments_of_a_batch_of_copies() -> None:
    host = torch.randint(0, 256, (9, 64), dtype=torch.uint8)[:, :32]
    rows = copy._ByteRows(host, np.array([8, 0, 3]))
    found = [ctypes.string_at(int(address), 32) for address in rows.addresses()]
    assert found == [host[row].numpy().tobytes() for row in (8, 0, 3)]


@pytest.mark.parametrize(
    ("rows", "runs"),
    [
        ([5], [(0, 5, 1)]),
        ([0, 1, 2], [(0, 0, 3)]),
        ([4, 5, 1, 0, 8, 9], [(0, 4, 2), (2, 1, 1), (3, 0, 1), (4, 8, 2)]),
    ],
)
def test_rows_side_by_side_are_one_copy(rows: list[int], runs: list[tuple[int, int, int]]) -> None:
    host = torch.zeros(10, 32, dtype=torch.uint8)
    assert copy._contiguous_ranges(np.array(rows), host) == runs
    apart = [(at, row, 1) for at, row in enumerate(rows)]
    assert copy._contiguous_ranges(np.array(rows), host[:, :16]) == apart


# -- staging, in any order that its events allow -------------------------------------------------------


class Stream:
    """A queue of what a stream would do; waiting and recording meet in a list that holds whether it happened."""

    def __init__(self, *_: object, **__: object) -> None:
        self.queue: list[tuple[str, Any]] = []

    def wait_event(self, event: Event) -> None:
        self.queue.append(("wait", event.happened))

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)


class Event:
    def __init__(self) -> None:
        self.happened: list[bool] = [True]

    def record(self, stream: Stream) -> None:
        self.happened = []
        stream.queue.append(("record", self.happened))


class Device(TorchFunctionMode):
    """Takes copies down instead of running them, then runs all streams in a random order."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            return self.move(args[1], args[0], None, None)
        return func(*args, **(kwargs or {}))

    def move(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        read: torch.Tensor | None,
        written: torch.Tensor | None,
        programs: int | None = None,
    ) -> None:
        self.current.queue.append(("do", (source, target, read, written)))

    def run(self, streams: list[Stream], rng: random.Random) -> None:
        while any(stream.queue for stream in streams):
            ready = [s for s in streams if s.queue and (s.queue[0][0] != "wait" or s.queue[0][1])]
            kind, what = rng.choice(ready).queue.pop(0)
            if kind == "record":
                what.append(True)
            elif kind == "do":
                source, target, read, written = what
                values = source if read is None else source[read]
                target[torch.arange(len(values)) if written is None else written] = values[
                    : None if written is None else len(written)
                ]


@pytest.mark.parametrize("seed", range(6))
def test_copies_that_lie_side_by_side_at_both_ends_are_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(0, 60)), 16
    steps = [rng.choice([1, 1, 1, 2, -5], count).cumsum() + 1000 for _ in range(2)]
    targets, sources = (at.astype(np.uint64) * np.uint64(size) for at in steps)
    runs = merge_adjacent(targets, sources, size)
    again = [
        (target + at, source + at)
        for target, source, length in zip(*(array.tolist() for array in runs), strict=True)
        for at in range(0, length, size)
    ]
    assert again == list(zip(targets.tolist(), sources.tolist(), strict=True))
    joins = itertools.pairwise(again)
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (size, size) for a, b in joins)
    assert len(runs[0]) == breaks + (count > 0), "and no more of them than there must be"


@pytest.mark.parametrize("seed", range(20))
def test_staging_needs_no_luck(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, device = random.Random(seed), Device()
    monkeypatch.setattr(copy, "_STAGE_BYTES", 32 * rng.randint(1, 4))
    monkeypatch.setattr(copy, "_new_event", Event)
    monkeypatch.setattr(copy, "_move", device.move)
    monkeypatch.setattr(copy, "_upload", lambda ids, device: torch.from_numpy(ids))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    pages = torch.randint(0, 256, (40, 32), dtype=torch.uint8)
    out, back = torch.zeros_like(pages), torch.randint(0, 256, (40, 32), dtype=torch.uint8)
    order = rng.sample(range(40), 40)
    ways = [copy._StagedLane(pages.device), copy._StagedLane(pages.device)]
    sides = [Stream(), Stream()]  # callers may bring another stream each time
    expected = pages.clone()
    expected[order[20:]] = back[order[20:]]
    with device:
        for part in ([0, 7], [7, 8], [8, 20]):
            ids = np.array(order[slice(*part)])
            stream = rng.choice([*sides, ways[0].stream])
            ways[0].gather(copy._ByteRows(pages, ids), copy._ByteRows(out, ids), stream)
            ids = np.array(order[20 + part[0] : 20 + part[1]])
            stream = rng.choice([*sides, ways[1].stream])
            ways[1].scatter(copy._ByteRows(back, ids), copy._ByteRows(pages, ids), stream)
    device.run([*sides, *(s for way in ways for s in (way.stream, way._packer))], rng)
    assert torch.equal(out[order[:20]], expected[order[:20]])
    assert torch.equal(pages, expected)


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1], [8], "target page 8 is not among the 8"),
        ([-1], [2], "source page -1 is not among the 8"),
        ([1, 2], [3, 3], "target page 3 is written twice"),
        ([1, 2], [2, 3], "page 2 is both source and target"),
        ([1, 2], [3], "2 source pages for 1 target pages"),
        ([[1], [2]], [3, 4], "one row of ids"),
    ],
)
def test_copies_that_make_no_sense(source: list[int], target: list[int], message: str) -> None:
    pool = pool_of(8, 32)
    before = pool.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        copy_pages(pool, 32, source, target)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("stride", "size"), [(40, 32), (32, 24), (32, 48), (32, 0)])
def test_pages_have_whole_accesses(stride: int, size: int) -> None:
    with pytest.raises(ValueError, match="bytes every"):
        Copier(pool_of(8, 240), stride, size)


@pytest.mark.parametrize(
    ("pages", "host", "rows", "message"),
    [
        ([8], (1, 32), None, "page 8 is not among the 8"),
        ([1, 2], (3, 32), None, "3 rows for 2 pages"),
        ([1], (1, 48), None, "[rows, 32] uint8"),
        ([1, 2], (4, 32), [1], "1 host rows for 2 pages"),
        ([1, 2], (4, 32), [1, 4], "host row 4 is not among the 4"),
    ],
)
def test_host_rows_that_do_not_fit(
    pages: list[int], host: tuple[int, int], rows: list[int] | None, message: str
) -> None:
    copier = Copier(pool_of(8, 32), 32)
    with pytest.raises(ValueError, match=re.escape(message)):
        copier.gather(pages, host_of(*host), rows)
    with pytest.raises(ValueError, match=re.escape(message)):
        copier.scatter(host_of(*host), pages, rows)


def test_targets_are_written_once() -> None:
    copier, host = Copier(pool_of(8, 32), 32), host_of(4, 32)
    with pytest.raises(ValueError, match="host row 1 is written twice"):
        copier.gather([1, 2], host, [1, 1])
    with pytest.raises(ValueError, match="page 2 is written twice"):
        copier.scatter(host[:2], [2, 2])


def test_trusted_rows_are_checked_except_for_duplicates() -> None:
    pool, host = pool_of(8, 32), host_of(4, 32)
    copier = Copier(pool, 32)
    copier.gather([5, 2], host, [3, 1], trusted=True).synchronize()
    assert torch.equal(host[[3, 1]], pool.view(8, 32)[[5, 2]].cpu())
    for pages, rows in (([8], [1]), ([1], [4]), ([-1], [1]), ([1], [-1])):
        with pytest.raises(ValueError, match="is not among"):
            copier.gather(pages, host, rows, trusted=True)


def test_host_memory_is_rows_of_bytes() -> None:
    copier = Copier(pool_of(8, 32), 32)
    with pytest.raises(ValueError, match="side by side"):
        copier.gather([1, 2], torch.zeros(32, 2, dtype=torch.uint8).T)
    with pytest.raises(ValueError, match="float32"):
        copier.gather([1], torch.zeros(1, 32))


# -- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_host_memory_is_pinned() -> None:
    copier = Copier(pool_of(8, 32), 32)
    with pytest.raises(ValueError, match="not pinned"):
        copier.gather([1], torch.zeros(1, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiples of 16"):
        copier.gather([1], torch.zeros(100, dtype=torch.uint8, pin_memory=True)[8:40].view(1, 32))
    with pytest.raises(ValueError, match="on the device"):
        copier.gather(torch.tensor([1], device=DEVICE), host_of(1, 32))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gather_follows_what_was_queued_before_it(method: Method | None) -> None:
    size, pages = 1 << 20, 64
    pool = torch.zeros(pages * size, dtype=torch.uint8, device=DEVICE)
    host = torch.zeros(pages, size, dtype=torch.uint8, pin_memory=True)
    copier = Copier(pool, size)
    copier.gather(range(pages), host, method=method).synchronize()  # compiles what there is to compile
    for value in (1, 2, 3):
        torch.cuda._sleep(20_000_000)
        pool.fill_(value)
        done = copier.gather(range(pages), host, method=method)
        assert not done.query()
        done.synchronize()
        assert bool((host == value).all())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_stream_waits_for_a_scatter(method: Method | None) -> None:
    size, pages = 1 << 20, 64
    pool = torch.zeros(pages * size, dtype=torch.uint8, device=DEVICE)
    side = torch.cuda.Stream()
    copier = Copier(pool, size)
    for value in (1, 2, 3):
        host = torch.full((pages, size), value, dtype=torch.uint8, pin_memory=True)
        done = copier.scatter(host, range(pages), stream=side, method=method)
        done.wait(torch.cuda.current_stream())
        total = pool.to(torch.int64).sum()
        assert int(total) == value * pool.numel()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_gather_and_scatter_overlap(method: Method | None) -> None:
    size, pages = 64 << 10, 512
    pool = pool_of(2 * pages, size)
    before = pool.cpu().view(2 * pages, size)
    out, back = host_of(pages, size), host_of(pages, size)
    copier = Copier(pool, size)
    order = torch.randperm(2 * pages)
    events = [
        copier.gather(order[:pages], out, method=method),
        copier.scatter(back, order[pages:], method=method),
    ]
    for event in events:
        event.synchronize()
    assert torch.equal(out, before[order[:pages]])
    assert torch.equal(pool.cpu().view(2 * pages, size)[order[pages:]], back)


@pytest.mark.gpu
@needs_gpu
def test_copies_with_ids_on_the_device_are_captured() -> None:
    pool = pool_of(8, 1 << 16)
    source, target = (torch.tensor(ids, dtype=torch.int32, device=DEVICE) for ids in ([1, 2], [3, 4]))
    copy_pages(pool, 1 << 16, source, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_pages(pool, 1 << 16, source, target)
    source.copy_(torch.tensor([5, 6], dtype=torch.int32))
    graph.replay()
    after = pool.view(8, -1)
    assert torch.equal(after[3:5], after[5:7])
