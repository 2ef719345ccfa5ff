"""Random batches over pages for kernel tests: what is not written is NaN, pages lie in random order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import Mask, Shape, attend
from kvloom.kernels.write.reference import write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass
class Batch:
    """Packed queries over pages; `prefixes` are (tokens, rows) that share their first pages."""

    shape: Shape
    lengths: list[int]
    queries: list[int]
    span: Visibility = field(default_factory=lambda: Visibility("full"))
    order: str = "NHD"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    shared: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, gen = self.shape, torch.Generator().manual_seed(self.seed)
        block = shape.page_tokens
        blocks = max(1, -(-max(self.lengths) // block))
        count = sum(-(-n // block) for n in self.lengths) + 3
        self.k, self.v = _pages(shape, count, self.order)
        quantised = shape.dtype in (torch.int8, torch.float8_e4m3fn)
        self.k_scale = torch.full((count, block, shape.kv_heads), math.nan) if quantised else None
        self.v_scale = None if self.k_scale is None else self.k_scale.clone()
        self.tables = torch.zeros(len(self.lengths), blocks, dtype=torch.int32)
        free = (torch.randperm(count - 1, generator=gen) + 1).tolist()
        for row, length in enumerate(self.lengths):
            first = self.span.first_visible(max(0, length - self.queries[row])) // block
            for column in range(-(-length // block)):
                page = self._shared_page(row, column)
                if page is None:
                    page = free.pop()
                    tokens = min(block, length - column * block)
                    self._fill(page, tokens, gen)
                self.tables[row, column] = page
            if not any(row in rows for _, rows in self.shared):
                self.tables[row, :first] = 0
        self.starts = torch.tensor([0, *torch.tensor(self.queries).cumsum(0).tolist()], dtype=torch.int32)
        self.q = torch.randn(int(self.starts[-1]), shape.heads, shape.k_dim, generator=gen).to(self.dtype)
        for name in ("q", "tables", "starts"):
            setattr(self, name, getattr(self, name).to(DEVICE))
        self.lengths_ = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.k = self.k.to(DEVICE) if DEVICE == "cpu" else _moved(self.k)
        self.v = self.k[..., : shape.v_dim] if shape.latent else self.v if DEVICE == "cpu" else _moved(self.v)
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale, self.v_scale = self.k_scale.to(DEVICE), self.v_scale.to(DEVICE)

    def _shared_page(self, row: int, column: int) -> int | None:
        for tokens, rows in self.shared:
            if row in rows and row != rows[0] and (column + 1) * self.shape.page_tokens <= tokens:
                return int(self.tables[rows[0], column])
        return None

    def _fill(self, page: int, tokens: int, gen: torch.Generator) -> None:
        shape = self.shape
        slots = page * shape.page_tokens + torch.arange(tokens)
        for pages, scales in ((self.k, self.k_scale), (self.v, self.v_scale)):
            new = torch.randn(tokens, *pages.shape[2:], generator=gen)
            write(pages, slots, new, scales)

    def expected(self, mask: Mask, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle in float64, over what the pages hold."""

        def up(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.double().cpu()

        k, v = self.k.float().double().cpu(), self.v.float().double().cpu()
        sinks, trees = up(mask.sinks), None if mask.trees is None else mask.trees.cpu()
        spans = None if mask.spans is None else mask.spans.cpu()
        return attend(
            self.q.double().cpu(), k, v, self.tables.cpu(), self.starts.cpu(), self.lengths_.cpu(),
            Mask(mask.span, mask.softcap, sinks, trees, spans, mask.part), scale, up(self.k_scale), up(self.v_scale),
        )  # fmt: skip


def _pages(shape: Shape, count: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V side by side in one page, between other bytes, in token or head order; NaN where floats are."""
    block, heads = shape.page_tokens, shape.kv_heads
    size = block * heads * max(shape.k_dim, shape.v_dim)
    fill = 0 if shape.dtype == torch.int8 else math.nan
    flat = torch.full((count, 2 * size + 64), fill).to(shape.dtype)
    views = []
    for begin, dim in ((32, shape.k_dim), (32 + size, shape.v_dim)):
        stride = (heads * dim, dim, 1) if order == "NHD" else (dim, block * dim, 1)
        if order == "HDN" and views:
            stride = (1, block * dim, block)  # values by dimension, their tokens dense
        views.append(flat.as_strided((count, block, heads, dim), (flat.stride(0), *stride), begin))
    return views[0], views[1]


def _moved(view: torch.Tensor) -> torch.Tensor:
    """The view over a copy of its whole storage on the GPU."""
    base = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).cuda()
    return base.as_strided(view.shape, view.stride(), view.storage_offset())


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    found = found.double().cpu()
    if not torch.isfinite(found).all():
        return math.inf
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def random_trees(queries: list[int]) -> torch.Tensor:
    """Trees of rows with these numbers of queries: each query follows a random earlier one, or begins a branch."""
    trees = torch.zeros(sum(queries), max([1, *queries]), dtype=torch.uint8)
    first = 0
    for count in queries:
        for i in range(count):
            parent = int(torch.randint(-1, i, ())) if i else -1
            if parent >= 0:
                trees[first + i] = trees[first + parent]
            trees[first + i, i] = int(trees[first + i].max()) + 1
        first += count
    return trees
