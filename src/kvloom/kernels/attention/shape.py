"""The attention shape of a layer, and the argument checks of the GPU kernels. This module contains no kernels and
allocates nothing.

    q [queries, heads, k_dim]   k [pages, block, kv_heads, k_dim]   v [pages, block, kv_heads, v_dim]

Pages may be token-major or head-major. The last dimension of keys must be dense. For values, the last dimension or the
token dimension must be dense. If `v` is the first part of `k` (an MLA latent), the kernel reads the latent only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core import WHOLE, ContextPart, Visibility
from kvloom.kernels.dtypes import FLOAT_DTYPES, PAGE_DTYPES, QUANTISED_DTYPES

from .mask import Mask

__all__ = [
    "PLAN_CAPACITIES",
    "Shape",
    "check_call",
    "check_outputs",
    "check_part",
    "plan_capacity",
    "split_dim",
]

SUPPORTED_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
SUPPORTED_PAGE_TOKENS = (16, 32, 64, 128)


PLAN_CAPACITIES = (16, 64, 256, 512, 1024, 4096)
"""The capacities of decode plans, in sequences. A plan is compiled once and serves every step with at most this
many sequences."""


def plan_capacity(rows: int) -> int:
    """Return the smallest of PLAN_CAPACITIES that is at least `rows`, the number of sequences."""
    return next(capacity for capacity in PLAN_CAPACITIES if capacity >= rows)


def split_dim(dim: int) -> tuple[int, int]:
    """Split a head dimension into two powers of two, for example 80 into 64 and 16. Triton loads powers of two, so
    without the split it would load padding. The second number may be 0."""
    high = 1 << dim.bit_length() - 1
    return high, dim - high


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention shape of one layer: number of heads, their dimensions, tokens per page, and dtype of the pages."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide over {self.kv_heads} KV heads")

    def check(self) -> None:
        """Raise ValueError if the GPU kernels do not support this shape. The oracle supports every shape."""
        for name, dim in (("k_dim", self.k_dim), ("v_dim", self.v_dim)):
            if dim not in SUPPORTED_DIMS:
                raise ValueError(
                    f"{name} {dim} is not supported; supported: {', '.join(map(str, SUPPORTED_DIMS))}"
                )
        if self.latent and self.v_dim != split_dim(self.k_dim)[0]:
            raise ValueError(
                f"values of {self.v_dim} in latents of {self.k_dim} are not supported; supported: {split_dim(self.k_dim)[0]}"
            )
        if self.page_tokens not in SUPPORTED_PAGE_TOKENS:
            raise ValueError(
                f"pages of {self.page_tokens} tokens are not supported; supported: {', '.join(map(str, SUPPORTED_PAGE_TOKENS))}"
            )
        if self.dtype not in PAGE_DTYPES:
            raise ValueError(f"pages of {self.dtype} are not supported; supported: {_names(PAGE_DTYPES)}")

    @property
    def is_supported(self) -> bool:
        """Whether the GPU kernels support this shape."""
        try:
            self.check()
        except ValueError:
            return False
        return True

    @property
    def group(self) -> int:
        """Number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def latent(self) -> bool:
        """Whether values are the first part of keys (MLA)."""
        return self.k_dim > 256


def check_call(
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    mask: Mask,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    part: ContextPart = WHOLE,
) -> int:
    """Raise ValueError for an unsupported call. `part` is the part of each block for which the plan was made. Return the kind of page scales: 0 for no scales, 1 for one scale per
    head, 2 for one scale per token and head."""
    if q.dim() != 3 or q.shape[1:] != (shape.heads, shape.k_dim):
        raise ValueError(f"q {tuple(q.shape)} is not [queries, {shape.heads}, {shape.k_dim}]")
    if q.dtype not in FLOAT_DTYPES:
        raise ValueError(f"queries of {q.dtype} are not supported; supported: {_names(FLOAT_DTYPES)}")
    for name, pages, dim in (("k", k, shape.k_dim), ("v", v, shape.v_dim)):
        if pages.dim() != 4 or pages.shape[1:] != (shape.page_tokens, shape.kv_heads, dim):
            raise ValueError(
                f"{name} {tuple(pages.shape)} is not [pages, {shape.page_tokens}, {shape.kv_heads}, {dim}]"
            )
        if pages.dtype != shape.dtype:
            raise ValueError(f"{name} pages are {pages.dtype}, the plan was made for {shape.dtype}")
        if pages.stride(3) != 1 and not (name == "v" and pages.stride(1) == 1):
            raise ValueError(
                f"{name} pages have stride {pages.stride(3)} in their last dimension; it must be 1"
                + (", or that of tokens must" if name == "v" else "")
            )
    if shape.dtype in FLOAT_DTYPES and q.dtype != shape.dtype:
        raise ValueError(f"queries are {q.dtype} and pages {shape.dtype}; they must agree")
    if shape.latent and (v.data_ptr() != k.data_ptr() or v.stride() != k.stride()):
        raise ValueError(
            f"with keys of {shape.k_dim} dims, values must be a view of the first part of the keys"
        )
    if v.stride(3) != 1 and v.stride(0) % 16:
        raise ValueError(
            f"v pages with dense tokens begin every {v.stride(0)} elements; it must be a multiple of 16"
        )
    if q.stride(2) != 1:
        raise ValueError(f"q has stride {q.stride(2)} in its last dimension; it must be 1")
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(
            f"tables must be int32 [sequences, blocks] with dense rows, got {tables.dtype} {tuple(tables.shape)}"
        )
    if mask.part != part:
        raise ValueError(f"the plan is for {part}, the mask has {mask.part}: make a plan for the mask's part")
    _check_mask(shape, q, mask)
    scales = _check_scales(shape, k, v, k_scale, v_scale)
    given = {"k": k, "v": v, "tables": tables, "k_scale": k_scale, "v_scale": v_scale}
    for name, tensor in (given | {"sinks": mask.sinks, "trees": mask.trees}).items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, the queries are on {q.device}; they must agree")
    return scales


def check_part(part: ContextPart, span: Visibility) -> None:
    """Raise ValueError if the GPU kernels cannot read a part of each block under this visibility rule."""
    if part != WHOLE and span.windowed:
        raise ValueError(f"pages with a part of each block need full attention, not {span}: use whole blocks")


def check_outputs(shape: Shape, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Raise ValueError if an output buffer has a wrong shape, dtype, stride or device."""
    if out is not None:
        wanted = (q.shape[0], shape.heads, shape.v_dim)
        if out.shape != wanted or out.stride(2) != 1 or not out.is_floating_point() or out.device != q.device:
            raise ValueError(
                f"out must be floating {wanted} on {q.device}, dense in its last dimension, got {out.dtype} "
                f"{tuple(out.shape)} on {out.device}, strides {out.stride()}"
            )
    if lse is not None:
        wanted_lse = (q.shape[0], shape.heads)
        if lse.shape != wanted_lse or lse.dtype != torch.float32 or lse.device != q.device:
            raise ValueError(
                f"lse must be float32 {wanted_lse} on {q.device}, got {lse.dtype} {tuple(lse.shape)} on {lse.device}"
            )


def _check_mask(shape: Shape, q: torch.Tensor, mask: Mask) -> None:
    if mask.sinks is not None and (mask.sinks.shape != (shape.heads,) or not mask.sinks.is_contiguous()):
        raise ValueError(
            f"sinks {tuple(mask.sinks.shape)} are not one for each of {shape.heads} heads, side by side"
        )
    if mask.sinks is not None and not mask.sinks.is_floating_point():
        raise ValueError(f"sinks are {mask.sinks.dtype}; they must be floating")
    if mask.softcap is not None and mask.softcap <= 0:
        raise ValueError(f"softcap {mask.softcap} must be positive")
    if mask.trees is not None and (mask.trees.dim() != 2 or mask.trees.shape[0] != q.shape[0]):
        raise ValueError(f"trees {tuple(mask.trees.shape)} are not one row for each of {q.shape[0]} queries")
    if mask.trees is not None and (
        mask.trees.dtype not in (torch.bool, torch.uint8) or mask.trees.stride(1) != 1
    ):
        raise ValueError(
            f"trees must be bool with dense rows, got {mask.trees.dtype}, strides {mask.trees.stride()}"
        )


def _check_scales(
    shape: Shape,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> int:
    if (k_scale is None) != (v_scale is None):
        raise ValueError("give scales for both keys and values, or for neither")
    if k_scale is None or v_scale is None:
        if shape.dtype in QUANTISED_DTYPES:
            raise ValueError(f"pages of {shape.dtype} need k_scale and v_scale")
        return 0
    if k_scale.dtype != torch.float32 or v_scale.dtype != torch.float32:
        raise ValueError(f"scales are {k_scale.dtype} and {v_scale.dtype}; they must be float32")
    if k_scale.shape == v_scale.shape == (shape.kv_heads,):
        return 1
    if k_scale.shape == k.shape[:3] and v_scale.shape == v.shape[:3]:
        return 2
    raise ValueError(
        f"scales {tuple(k_scale.shape)} and {tuple(v_scale.shape)} are neither [{shape.kv_heads}] "
        f"nor {tuple(k.shape[:3])}"
    )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
