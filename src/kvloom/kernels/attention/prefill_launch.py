"""The launches of the prefill kernels. Each function is one launch, and makes no choices. This module imports
Triton."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kvloom.core import Visibility

from . import triton_gathered as gathered, triton_prefill as kernels
from .mask import SPAN_NUMBERS, Mask
from .prefill_backends import COPY_TOKENS, BlockTile
from .shape import Shape, split_dim

__all__ = [
    "attend_blocks",
    "attend_gathered",
    "fits_descriptor",
    "gather",
    "join_blocks",
    "merge_parts",
]

MERGE_ROWS = 32
JOIN_ROWS = 16
FEW_TILES = 4
"""If a window has at most this many tiles, one loop processes all tiles, with a mask. Two loops, for tiles with and
without a mask, would have only one or two tiles each, which is slower."""


def attend_blocks(
    shape: Shape,
    tile: BlockTile,
    blocks: torch.Tensor,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    mask: Mask,
    span: Visibility,
    ids: torch.Tensor | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scales: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Compute attention of every block over its pages. Results of whole blocks are written to `out`. Partial results of
    split blocks are written to `parts` and `part_lse`. `ids` are the image ids of the queries, or None. `scales` is the
    kind of page scales (see `check_call`).

    `span` replaces the visibility rule in `mask`. It is the same rule, or full attention if no sequence is longer than
    the window.
    """
    dk0, dk1 = split_dim(shape.k_dim)
    dv0, dv1 = split_dim(shape.v_dim)
    kernels.attend_blocks[(blocks.shape[0] * shape.kv_heads,)](
        q, k, v, q if k_scale is None else k_scale, q if v_scale is None else v_scale, out, lse, parts, part_lse,
        blocks, tables, q if mask.sinks is None else mask.sinks, blocks if ids is None else ids,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride(),
        *_scale_strides(k_scale), *_scale_strides(v_scale),
        out.stride(0), out.stride(1), *lse.stride(), tables.stride(0), scale,
        1.0 if mask.softcap is None else mask.softcap,
        HEADS=shape.kv_heads, GROUP=shape.group, DK0=dk0, DK1=dk1, DV0=dv0, DV1=dv1, PAGE=shape.page_tokens, BM=tile.rows, BN=tile.tokens,
        SPAN=SPAN_NUMBERS[span.kind], SIZE=span.size,
        IMAGES=ids is not None, SOFTCAP=mask.softcap is not None, SINK=mask.sinks is not None, SCALES=scales,
        LATENT=shape.latent, TURNED=v.stride(3) != 1, EXACT=q.dtype == torch.float32,
        HALF=shape.dtype == torch.float8_e4m3fn, STAGES=tile.stages, RANK=mask.part.rank, RANKS=mask.part.count,
        num_warps=tile.warps,
    )  # fmt: skip


def join_blocks(
    shape: Shape,
    tile: BlockTile,
    joins: torch.Tensor,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge the partial results of split blocks, as listed in `joins`, and write them to `out` and `lse`."""
    rows = min(JOIN_ROWS, tile.rows)
    kernels.join_blocks[(shape.kv_heads, joins.shape[0], tile.rows // rows)](
        out, lse, parts, part_lse, joins, parts if sinks is None else sinks, out.stride(0), out.stride(1), *lse.stride(),
        tile.rows, GROUP=shape.group, DV=shape.v_dim, COLUMNS=triton.next_power_of_2(shape.v_dim), ROWS=rows,
        SINK=sinks is not None, num_warps=4,
    )  # fmt: skip


def gather(
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    copies: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Copy tokens from pages to `k_out` and `v_out` ([tokens, heads, dim], contiguous), as listed in `copies`."""
    heads, each = k.shape[2], 1 if k.shape[2] % 2 else 2
    gathered.gather_pages[(copies.shape[0], heads // each, 2)](
        k, v, k_out, v_out, copies, tables, *k.stride()[:3], *v.stride(), heads * k.shape[3], heads * v.shape[3],
        tables.stride(0), DK=k.shape[3], DV=v.shape[3],
        COLUMNS=triton.next_power_of_2(max(k.shape[3], v.shape[3])), PAGE=k.shape[1], TOKENS=COPY_TOKENS, EACH=each,
        num_warps=4,
    )  # fmt: skip


def attend_gathered(
    tile: BlockTile,
    blocks: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    span: Visibility,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Compute attention over contiguous K and V ([tokens, heads, dim]) that satisfy `fits_descriptor`. `span`
    applies only to causal attention.
    """
    heads, k_dim, v_dim = k.shape[1], k.shape[2], v.shape[2]
    dk0, dk1 = split_dim(k_dim)
    flat_k, flat_v = k.view(-1, heads * k_dim), v.view(-1, heads * v_dim)
    gathered.attend_gathered[(blocks.shape[0] * heads,)](
        q, _descriptor(flat_k, tile.tokens, dk0), _descriptor(flat_k, tile.tokens, dk1 or dk0),
        _descriptor(flat_v, tile.tokens, v_dim), out, lse, blocks, q if sinks is None else sinks,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *lse.stride(), scale,
        HEADS=heads, GROUP=q.shape[1] // heads, DK0=dk0, DK1=dk1, DV=v_dim, BM=tile.rows, BN=tile.tokens, CAUSAL=causal,
        SPAN=SPAN_NUMBERS[span.kind], SIZE=span.size, FEW=span.windowed and span.size <= FEW_TILES * tile.tokens,
        SINK=sinks is not None, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip


def merge_parts(
    a: torch.Tensor,
    a_lse: torch.Tensor,
    b: torch.Tensor | None,
    b_lse: torch.Tensor | None,
    places: torch.Tensor,
    longest: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge the attention results `a` and `b` over two sets of tokens into packed `out` and `lse`. Without `b`, only
    `a` is copied.

    - `a` and `b` are [batch, tokens, heads, dim] with a dense last dimension. Their log-sum-exps are [batch, tokens,
      heads].
    - `places` lists, for each sequence, where its queries are in the batch and in `out` (see `triton_gathered`).
    - `longest` is the largest number of queries of one sequence.
    """
    other, other_lse = (a, a_lse) if b is None or b_lse is None else (b, b_lse)
    gathered.merge_parts[(triton.cdiv(longest * a.shape[2], MERGE_ROWS), places.shape[0])](
        a, a_lse, other, other_lse, out, lse, places, a if sinks is None else sinks,
        *a.stride()[:3], *a_lse.stride(), *other.stride()[:3], *other_lse.stride(),
        out.stride(0), out.stride(1), *lse.stride(),
        HEADS=a.shape[2], DV=a.shape[3], COLUMNS=triton.next_power_of_2(a.shape[3]), ROWS=MERGE_ROWS,
        BOTH=b is not None, SINK=sinks is not None, num_warps=4,
    )  # fmt: skip


def fits_descriptor(x: torch.Tensor) -> bool:
    """Return whether tensor descriptors can read the keys or values `x` without a copy. Each token must be
    contiguous and aligned.
    """
    return (
        x.stride(2) == 1
        and x.stride(1) == x.shape[2]
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def _descriptor(flat: torch.Tensor, tokens: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tokens, columns])


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Return three strides of a scale tensor: per page, per token and per head. If there is only one scale per
    head, the first two are 0."""
    if scale is None:
        return 0, 0, 0
    return (
        (0, 0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1), scale.stride(2))
    )
