"""Launching the work list: how work is cut into tiles, the list's memory, and one layer's launches over it.

The rule for tiles is one function of the shape and the rows; nothing is searched at run time. Knows no batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from . import triton_attention as kernels
from .reference import Mask
from .shapes import Shape, split_dim

__all__ = ["Layer", "Tile", "WorkList", "choose_tile"]

SPANS = {"full": 0, "sliding": 1, "chunked": 2}
SHARED_MEMORY = 220 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch cuts its work: `rows` of queries by `tokens`, warps and stages of a program, `main` programs that
    run at once and share most of the work equally, `extra` ones that take the rest as the first end, and the units
    each takes at least."""

    rows: int
    tokens: int
    warps: int
    stages: int
    main: int
    extra: int = 0
    least: int = 2
    share: int = 85

    @property
    def programs(self) -> int:
        return self.main + self.extra


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: enough to split everything
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_tile(shape: Shape, rows: int, device: torch.device) -> Tile:
    """The tile for `rows` query rows a KV head."""
    wide = max(shape.k_dim, shape.v_dim)
    most = 64 if wide > 256 else 128
    height = min(most, max(8, triton.next_power_of_2(rows)))
    tokens = 64 if wide <= 128 else 32
    warps = 8 if (wide > 256 and height > 16) or (wide > 128 and height > 64) else 4
    stages = 3
    size = shape.dtype.itemsize
    held = stages * tokens * (shape.k_dim + (0 if shape.latent else shape.v_dim)) * size
    held += height * shape.k_dim * 2
    each = max(1, min(16 // warps, SHARED_MEMORY // held, 2 if height >= 64 else 4))
    if device.type != "cuda":
        tokens = 16
    return Tile(height, tokens, warps, stages, _processors(device) * each)


class WorkList:
    """The device memory of one work list: segments in line, where programs begin, and room for their pieces."""

    def __init__(self, tile: Tile, segments: int, tiles: int, v_dim: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tile, self.capacity = tile, segments
        self.segments, self.places = ints(segments, 8), ints(segments)
        self.firsts, self.totals = ints(tile.programs), ints(3)
        pieces = (tiles + tile.programs) * tile.rows
        self.parts = torch.empty((pieces, v_dim), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(pieces, dtype=torch.float32, device=device)

    @property
    def line(self) -> tuple[torch.Tensor, ...]:
        return self.segments, self.places, self.firsts, self.totals

    def cut(self, shape: Shape) -> dict[str, int]:
        """The constants by which the planning kernels lay out this list."""
        return {
            "PROGRAMS": self.tile.programs,
            "MAIN": self.tile.main,
            "SHARE": self.tile.share if self.tile.extra else 100,
            "LEAST": self.tile.least,
            "HEADS": shape.kv_heads,
            "GROUP": shape.group,
            "PAGE": shape.block_tokens,
            "BM": self.tile.rows,
            "BN": self.tile.tokens,
            "CAPACITY": triton.next_power_of_2(self.capacity),
            # A comparison of programs with segments at a time, kept within registers.
            "STEP": max(1, min(128, 8192 // triton.next_power_of_2(self.capacity))),
        }


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's call: what is read, and where results go."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    tokens: torch.Tensor
    mask: Mask
    scale: float | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scales: int
    out: torch.Tensor
    lse: torch.Tensor

    def tiles(
        self,
        work: WorkList,
        bounds: int,
        direct: bool,
        members: torch.Tensor | None = None,
        phases: bool = False,
        beside: bool = False,
    ) -> None:
        """Attention of every tile of the list. `bounds`: which of the rows' bounds to look at (1 their last token,
        2 their first); `direct`: whole tiles go to `out`; `members`: the queries, where they are listed; `beside`:
        run beside the launch before, which must be one of these and is waited for at the end."""
        q, k, v, shape, mask, tile = self.q, self.k, self.v, self.shape, self.mask, work.tile
        k_scale = self.q if self.k_scale is None else self.k_scale
        v_scale = self.q if self.v_scale is None else self.v_scale
        dk0, dk1 = split_dim(shape.k_dim)
        dv0, dv1 = split_dim(shape.v_dim)
        kernels.attend_tiles[(tile.programs,)](
            q, k, v, k_scale, v_scale, self.out, self.lse, work.parts, work.part_lse, work.segments, work.firsts, work.totals,
            self.tokens if members is None else members, self.tokens, self.tables,
            q if mask.sinks is None else mask.sinks,
            q if mask.trees is None else mask.trees.view(torch.uint8),
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride(),
            *_scale_strides(k_scale, self.scales), *_scale_strides(v_scale, self.scales),
            self.out.stride(0), self.out.stride(1), self.lse.stride(0), self.tables.stride(0),
            0 if mask.trees is None else mask.trees.stride(0),
            shape.k_dim**-0.5 if self.scale is None else self.scale,
            1.0 if mask.softcap is None else mask.softcap,
            HEADS=shape.kv_heads, GROUP=shape.group, DK0=dk0, DK1=dk1, DV0=dv0, DV1=dv1, PAGE=shape.block_tokens,
            BM=tile.rows, BN=tile.tokens, SPAN=SPANS[mask.span.kind], SIZE=mask.span.size,
            SHARED=members is not None, BOUNDS=bounds, TREE=mask.trees is not None, SOFTCAP=mask.softcap is not None,
            SINK=mask.sinks is not None, SCALES=self.scales, LATENT=shape.latent,
            TURNED=v.stride(3) != 1, DIRECT=direct,
            EXACT=q.dtype == torch.float32, HALF=shape.dtype == torch.float8_e4m3fn, PHASES=phases or v.stride(3) != 1,
            STAGES=tile.stages, OVERLAP=q.is_cuda, SMALL=tile.rows < 64, MAIN=tile.main, BESIDE=beside and q.is_cuda,
            num_warps=tile.warps, **(_overlapped(q) if beside else {}),
        )  # fmt: skip

    def merge_split(self, work: WorkList, starts: torch.Tensor, queries: int) -> None:
        """Join the pieces of tiles that were cut. On a GPU it starts while `tiles` still runs, and waits in place."""
        shape, tile = self.shape, work.tile
        kernels.merge_split[(tile.programs, min(tile.rows, queries * shape.group))](
            self.out, self.lse, work.parts, work.part_lse, *work.line, starts,
            self.q if self.mask.sinks is None else self.mask.sinks, starts.numel() - 1,
            self.out.stride(0), self.out.stride(1), self.lse.stride(0),
            HEADS=shape.kv_heads, GROUP=shape.group, DV=shape.v_dim, COLUMNS=triton.next_power_of_2(shape.v_dim),
            BM=tile.rows, SINK=self.mask.sinks is not None, CHUNK=16, PROGRAMS=tile.programs, MAIN=tile.main,
            OVERLAP=self.q.is_cuda, num_warps=4, **_overlapped(self.q),
        )  # fmt: skip

    def merge_levels(
        self, own: WorkList, shared: WorkList, levels: torch.Tensor, starts: torch.Tensor
    ) -> None:
        """Join every query's own pieces with those of the shared segments above it."""
        shape = self.shape
        kernels.merge_levels[(self.q.shape[0], shape.heads)](
            self.out, self.lse, own.parts, own.part_lse, own.segments, own.totals,
            shared.parts, shared.part_lse, shared.segments, shared.totals, own.places, shared.places, levels, self.tokens, starts,
            self.q if self.mask.sinks is None else self.mask.sinks, levels.shape[1],
            self.out.stride(0), self.out.stride(1), self.lse.stride(0),
            GROUP=shape.group, DV=shape.v_dim, COLUMNS=triton.next_power_of_2(shape.v_dim), BM=own.tile.rows,
            S_BM=shared.tile.rows, DEPTH=levels.shape[0], SINK=self.mask.sinks is not None, CHUNK=16,
            MAIN=own.tile.main, S_MAIN=shared.tile.main, OVERLAP=self.q.is_cuda, num_warps=2, **_overlapped(self.q),
        )  # fmt: skip


def _scale_strides(scale: torch.Tensor, scales: int) -> tuple[int, int, int]:
    if scales == 0:
        return 0, 0, 0
    if scales == 1:
        return 0, 0, scale.stride(0)
    page, token, head = scale.stride()
    return page, token, head


def _overlapped(q: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one ahead of it has ended, and waits for it in place."""
    return {"launch_pdl": True} if q.is_cuda else {}
