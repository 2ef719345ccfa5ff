"""Batch-invariant matrix products and sums, as Triton kernels for CUDA tensors. The result of a tensor row is
bit-identical in any batch.

The number of rows must not change the result, so usually all products with the same weight use one tile
size. A large product uses a larger tile, but only if a test on random input gave identical bits on this
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from . import triton_products as kernels

__all__ = ["grouped_product", "product", "row_cumsum", "row_sum"]

SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE_TILE = _Tile(128, 128, 64, 8, 3)


_large_tile_agrees: dict[tuple[Any, ...], bool] = {}


def _small_tile(columns: int, dtype: torch.dtype) -> _Tile:
    """Return the small tile for a weight with `columns` outputs. The tile has few columns, so that the product of a
    single row already uses the whole device."""
    if dtype == torch.float32:  # multiplied from registers, without tensor cores
        return _Tile(16, 32, 32, 4, 2)
    return _Tile(64, 128 if columns >= 32768 else 64 if columns >= 8192 else 32, 64, 4, 4)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matrix product of a [m, k] and b [k, n], plus `bias` [n] if given. `a` and `b` may have a batch
    dimension and any strides. Sums along k are in float32 and rounded once."""
    if a.shape[-1] != b.shape[-2] or a.dim() != b.dim() or (a.dim() == 3 and len(a) != len(b)):
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    if a.shape[-1] == 1 and bias is None:
        return a * b  # an empty sum
    # In a batched product the columns of b may be the tokens of the step, so the tile must not depend on their number.
    small = _small_tile(b.shape[-1] if b.dim() == 2 else 0, a.dtype)
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    large = -(-m // LARGE_TILE.rows) * -(-n // LARGE_TILE.columns) * (len(a) if a.dim() == 3 else 1)
    if a.is_cuda and a.dtype != torch.float32 and large >= _processors(a.device):
        key = n, k, a.dtype, a.device, b.stride()[-2:] == (1, k)
        if key not in _large_tile_agrees:
            _large_tile_agrees[key] = _tiles_agree(small, b[0] if b.dim() == 3 else b)
        return _launch(a, b, bias, LARGE_TILE if _large_tile_agrees[key] else small)
    return _launch(a, b, bias, small)


def grouped_product(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply groups of rows of a [m, k] by different matrices. Group i ends at row `offsets[i]` of a, and is
    multiplied by b[i] ([groups, k, n]). Return the products [m, n]. The offsets are on the device, and the host
    does not read them."""
    return _launch(a, b, None, _small_tile(b.shape[-1], a.dtype), offsets)


def _tiles_agree(small: _Tile, b: torch.Tensor) -> bool:
    """Return whether the large tile and the small tile compute identical bits for the weight `b` on this device.
    The test uses random input."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, b.shape[0], generator=generator).to(b.device, b.dtype)
    return torch.equal(_launch(a, b, None, small), _launch(a, b, None, LARGE_TILE))


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    tile: _Tile,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    out = torch.empty((*a.shape[:-1], n), dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    batches = (a.stride(0), b.stride(0), out.stride(0)) if a.dim() == 3 else (0, b.stride(0), 0)
    tiles = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns)
    kernels.product[(tiles, len(b) if b.dim() == 3 else 1)](
        a, b, a if bias is None else bias, out, a if offsets is None else offsets, m, n, k, batches[0], *a.stride()[-2:], batches[1], *b.stride()[-2:],
        batches[2], n, BM=tile.rows, BN=tile.columns, BK=tile.depth, TOGETHER=8, BIASED=bias is not None,
        EXACT=a.dtype == torch.float32, GROUPED=offsets is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum along the last dimension, in float32."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        block = min(SUM_BLOCK, triton.next_power_of_2(x.shape[-1]))
        kernels.row_sum[(len(rows),)](rows, out, x.shape[-1], rows.stride(0), BLOCK=block, num_warps=4)
    return out.view(x.shape[:-1])


def row_cumsum(x: torch.Tensor) -> torch.Tensor:
    """Return running sums along the last dimension, in float32."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        block = min(SUM_BLOCK, triton.next_power_of_2(x.shape[-1]))
        kernels.row_cumsum[(len(rows),)](
            rows, out, x.shape[-1], rows.stride(0), out.stride(0), BLOCK=block, num_warps=4
        )
    return out.view(x.shape)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter has no multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count
