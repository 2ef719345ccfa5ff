"""The decode work list: the choice of a tile, the device memory of the list, and the launches of one layer.
`triton_work_list` explains segments, tiles, units and lanes. A fixed rule chooses the tile from the shape and the
number of query rows. There is no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kvloom.kernels.device import pdl_options, supports_pdl
from kvloom.kernels.dtypes import QUANTISED_DTYPES

from .mask import SPAN_NUMBERS, Mask
from .shape import Shape, split_dim
from .triton_single_tile import READ_AHEAD, attend_single_tiles
from .triton_tiles import attend_tiles
from .triton_work_list import merge_levels, merge_split

__all__ = ["LayerCall", "Tile", "WorkList", "choose_tile", "uses_single_tile_kernel"]

UNIT_BYTES = 36 * 1024
"""Largest size of the keys and values of one unit, in bytes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work of a launch is divided.

    - `rows`, `tokens`: a tile has `rows` query rows and reads `tokens` tokens at a time (a unit).
    - `programs`, `warps`, `stages`: a launch has up to `programs` programs, with `warps` warps and `stages` pipeline
      stages each.
    - `registers`: limits the registers of a thread.
    - `min_units`: a program processes at least this many units.
    - `overhead_units`: starting a tile takes as long as this many units. If it is 0, the single-tile kernel runs.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    min_units: int = 4
    overhead_units: int = 2
    registers: int | None = None


def choose_tile(shape: Shape, rows: int, device: torch.device, beside: bool = False) -> Tile:
    """Return the tile for `rows` query rows per KV head. The rule was tuned on an H200.

    With few query rows, memory is the bottleneck. A unit then has about 32 KiB, and two programs run per
    multiprocessor. For 8-bit values in pages of 64 tokens or more, three programs are faster, because one computes
    while others load. With many query rows, arithmetic is the bottleneck, and tiles have more rows. `beside` states
    that two launches share the multiprocessors, so each uses fewer programs.
    """
    if device.type != "cuda":
        # Triton's interpreter: tiles are small, so that tests split every kind of work.
        height = min(64, max(16, triton.next_power_of_2(rows)))
        toll = 0 if uses_single_tile_kernel(shape, height) and not beside else 1
        return Tile(height, 32 if shape.dtype in QUANTISED_DTYPES else 16, 4, 2, 8, 1, toll)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    each = (shape.k_dim + (0 if shape.latent else shape.v_dim)) * shape.dtype.itemsize
    tokens = min(128, max(16, 1 << (UNIT_BYTES // each).bit_length() - 1))
    wide = max(shape.k_dim, shape.v_dim)
    if rows > 32:
        height = 64 if rows <= 64 or wide > 256 else 128
        if wide > 128:
            return Tile(
                height, 64 if shape.latent and shape.dtype.itemsize == 2 else 32, 8, 2, processors, 2, 1
            )
        if beside and rows <= 128 and shape.dtype.itemsize == 2:
            # Each token is read by one tile only, so the speed depends on the number of bytes in flight.
            return Tile(height, height // 2, height // 16, 5, processors, 2, 1, 168)
        return Tile(height, 64, height // 16, 3, processors, 2, 1, 168)
    if shape.dtype in QUANTISED_DTYPES:
        height = max(8, triton.next_power_of_2(rows))
        if shape.page_tokens < 64 and not beside:
            return Tile(height, tokens, 4, 5, processors * 2, 2, 1)
        return Tile(height, tokens, 4, 4, processors * (1 if beside else 3), 2, 1, 168)
    height = max(16, triton.next_power_of_2(rows))
    if shape.latent and shape.dtype.itemsize == 2 and height == 16:
        return Tile(height, tokens, 4, 5, processors * (1 if beside else 2))
    if shape.latent or shape.dtype.itemsize > 2:
        return Tile(height, tokens, 4, 3, processors * (1 if shape.latent else 2))
    if beside:
        return Tile(height, max(16, tokens // 2), 2, 4, processors * 2, 4, 3, 168)
    if uses_single_tile_kernel(shape, height):
        return Tile(height, tokens, 4, 5, processors * 2, 1, 0)
    return Tile(height, tokens, 4, 5, processors * 2)


def uses_single_tile_kernel(shape: Shape, rows: int) -> bool:
    """Return whether tiles of `rows` query rows run in the single-tile kernel, which loads the queries again for every
    unit. This kernel is faster if the queries are so small that two programs fit into shared memory."""
    return rows <= 16 and max(shape.k_dim, shape.v_dim) <= 128 and shape.dtype not in QUANTISED_DTYPES


class WorkList:
    """The device memory of one work list: the ordered segments, the first segment of each lane, and buffers for
    partial results."""

    def __init__(self, tile: Tile, shape: Shape, segments: int, tiles: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tile, self.capacity = tile, segments
        self.lanes = max(1, tile.programs // shape.kv_heads)
        self.segments, self.places = ints(segments + READ_AHEAD, 8), ints(segments)
        self.firsts, self.totals = ints(self.lanes), ints(3)
        pieces = (tiles + self.lanes) * shape.kv_heads * tile.rows
        self.parts = torch.empty((pieces, shape.v_dim), dtype=torch.float32, device=device)
        self.part_lse = torch.empty(pieces, dtype=torch.float32, device=device)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.segments, self.places, self.firsts, self.totals

    def constants(self, shape: Shape) -> dict[str, int]:
        """Return the compile-time constants of the planning kernels for this list."""
        return {
            "LANES": self.lanes,
            "LEAST": self.tile.min_units,
            "TOLL": self.tile.overhead_units,
            "GROUP": shape.group,
            "PAGE": shape.page_tokens,
            "BM": self.tile.rows,
            "BN": self.tile.tokens,
            "CAPACITY": triton.next_power_of_2(self.capacity),
            # Number of lanes compared with segments at a time. Registers limit it.
            "STEP": max(1, min(128, 8192 // triton.next_power_of_2(self.capacity))),
        }


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The inputs and outputs of one layer's call."""

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

    def attend_tiles(
        self,
        work: WorkList,
        bounds: int,
        direct: bool,
        members: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        """Launch the attention kernel for every tile of the work list.

        If one program reads all tokens of a tile, the result is final. With `direct`, final results are written to
        `out`. All other results are partial, and are written to `work.parts`.

        - `bounds` states which limits the kernel checks for each query row: 1 is the last visible token, 2 the first
          visible token, and 3 both.
        - `members` contains the indices of the queries that read a shared run. Without `members`, the queries of a tile
          are consecutive.
        - With `beside`, this launch runs at the same time as the previous launch, and ends after that launch.
        """
        q, k, v, shape, mask, tile = self.q, self.k, self.v, self.shape, self.mask, work.tile
        k_scale = self.q if self.k_scale is None else self.k_scale
        v_scale = self.q if self.v_scale is None else self.v_scale
        dk0, dk1 = split_dim(shape.k_dim)
        dv0, dv1 = split_dim(shape.v_dim)
        turned = v.stride(3) != 1
        # Latents are so long that scores of 16 query rows are faster as [rows, tokens].
        small = tile.rows < 64 and not (shape.latent and shape.dtype.itemsize == 2 and tile.rows == 16)
        # Arithmetic limits the speed of tiles with many query rows, and masks are part of it.
        clear = turned or (members is not None and not small and max(shape.k_dim, shape.v_dim) <= 128)
        # Tensor cores read 8-bit values directly, 32 at a time along the summed axis.
        native = (
            shape.dtype in QUANTISED_DTYPES
            and turned
            and small
            and (dk1 == 0 or dk1 >= 32)
            and tile.tokens >= 32
        )
        attend_tiles[(work.lanes * shape.kv_heads,)](
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
            HEADS=shape.kv_heads, GROUP=shape.group, DK0=dk0, DK1=dk1, DV0=dv0, DV1=dv1, PAGE=shape.page_tokens,
            BM=tile.rows, BN=tile.tokens, SPAN=SPAN_NUMBERS[mask.span.kind], SIZE=mask.span.size,
            SHARED=members is not None, BOUNDS=bounds, TREE=mask.trees is not None, SOFTCAP=mask.softcap is not None,
            SINK=mask.sinks is not None, SCALES=self.scales, LATENT=shape.latent,
            TURNED=turned, DIRECT=direct,
            EXACT=q.dtype == torch.float32, HALF=shape.dtype == torch.float8_e4m3fn, PHASES=clear,
            STAGES=tile.stages, OVERLAP=supports_pdl(q.device), SMALL=small, TOLL=tile.overhead_units, BESIDE=beside and supports_pdl(q.device),
            NATIVE=native, num_warps=tile.warps, maxnreg=tile.registers, **(pdl_options(q.device) if beside else {}),
        )  # fmt: skip

    def attend_single_tiles(self, work: WorkList, queries: int, bounds: int) -> None:
        """Launch the single-tile kernel, for a work list in which every segment has one tile. If one program reads
        all tokens of a tile, the result is final and is written to `out`. Results of split tiles are partial, and
        are written to `work.parts`.
        """
        q, k, v, shape, mask, tile = self.q, self.k, self.v, self.shape, self.mask, work.tile
        dk0, dk1 = split_dim(shape.k_dim)
        dv0, dv1 = split_dim(shape.v_dim)
        attend_single_tiles[(work.lanes * shape.kv_heads,)](
            q, k, v, self.out, self.lse, work.parts, work.part_lse, work.segments, work.firsts, work.totals,
            self.tokens, self.tables, q if mask.sinks is None else mask.sinks,
            q if mask.trees is None else mask.trees.view(torch.uint8),
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride(),
            self.out.stride(0), self.out.stride(1), self.lse.stride(0), self.tables.stride(0),
            0 if mask.trees is None else mask.trees.stride(0),
            shape.k_dim**-0.5 if self.scale is None else self.scale,
            1.0 if mask.softcap is None else mask.softcap,
            HEADS=shape.kv_heads, GROUP=shape.group, DK0=dk0, DK1=dk1, DV0=dv0, DV1=dv1, PAGE=shape.page_tokens,
            BM=tile.rows, BN=tile.tokens, SPAN=SPAN_NUMBERS[mask.span.kind], WINDOW=mask.span.size,
            SINGLE=queries == 1, BOUNDS=bounds, TREE=mask.trees is not None, SOFTCAP=mask.softcap is not None,
            SINK=mask.sinks is not None, TURNED=v.stride(3) != 1, EXACT=q.dtype == torch.float32,
            STAGES=tile.stages, OVERLAP=supports_pdl(q.device), num_warps=tile.warps, maxnreg=tile.registers,
            **pdl_options(q.device),
        )  # fmt: skip

    def merge_split(self, work: WorkList, starts: torch.Tensor, queries: int) -> None:
        """Merge the partial results of split tiles (tiles whose tokens several programs read). On a GPU this launch
        starts while `attend_tiles` still runs, and waits for its results."""
        shape, tile = self.shape, work.tile
        columns = triton.next_power_of_2(shape.v_dim)
        merge_split[(work.lanes, shape.kv_heads, min(tile.rows, queries * shape.group))](
            self.out, self.lse, work.parts, work.part_lse, *work.buffers, starts,
            self.q if self.mask.sinks is None else self.mask.sinks, starts.numel() - 1,
            self.out.stride(0), self.out.stride(1), self.lse.stride(0),
            HEADS=shape.kv_heads, GROUP=shape.group, DV=shape.v_dim, COLUMNS=columns,
            BM=tile.rows, SINK=self.mask.sinks is not None, CHUNK=2048 // columns, LANES=work.lanes,
            OVERLAP=supports_pdl(self.q.device), num_warps=1, **pdl_options(self.q.device),
        )  # fmt: skip

    def merge_levels(self, own: WorkList, shared: WorkList, sources: torch.Tensor) -> None:
        """Merge two kinds of partial results of each query: the results over its own tokens (from the work list `own`),
        and the results over the shared runs that the query reads (from the work list `shared`). A shared run is a page
        range that several sequences share."""
        shape = self.shape
        merge_levels[(self.q.shape[0], shape.heads)](
            self.out, self.lse, own.parts, own.part_lse, own.totals, shared.parts, shared.part_lse, shared.totals,
            sources, self.q if self.mask.sinks is None else self.mask.sinks,
            self.out.stride(0), self.out.stride(1), self.lse.stride(0),
            HEADS=shape.kv_heads, GROUP=shape.group, DV=shape.v_dim, COLUMNS=triton.next_power_of_2(shape.v_dim),
            BM=own.tile.rows, S_BM=shared.tile.rows, DEPTH=sources.shape[1] - 1, SINK=self.mask.sinks is not None,
            CHUNK=4, OVERLAP=supports_pdl(self.q.device), num_warps=1, **pdl_options(self.q.device),
        )  # fmt: skip


def _scale_strides(scale: torch.Tensor, scales: int) -> tuple[int, int, int]:
    if scales == 0:
        return 0, 0, 0
    if scales == 1:
        return 0, 0, scale.stride(0)
    page, token, head = scale.stride()
    return page, token, head
