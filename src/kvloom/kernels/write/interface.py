"""Writes new K and V to pages. One call per layer rotates K and q, quantises K and V, and writes K and V to their
pages.

Pages are views of `memory.views`; a token's slot is `page * page_tokens + offset`. A call on a GPU reads no value on
the host and allocates nothing. A graph can therefore capture it and replay it with other slots. CPU tensors run in
torch, CUDA tensors in one Triton kernel.

| argument         | shape                    | strides                 | notes                                |
|------------------|--------------------------|-------------------------|--------------------------------------|
| k_pages, v_pages | [pages, b, kv, d]        | any; 1 in d for k_pages | dtype float, int8 or fp8 (e4m3)      |
| slots            | [tokens]                 | any                     | negative: the token is skipped       |
| k, v             | [tokens, kv, d]          | any; 1 in d             | k and v may have different d         |
| k_scale, v_scale | [pages, b, kv]; [kv]; [] | any                     | scales in pages are written,         |
|                  |                          |                         | other scales are read                |
| rotary.cos, .sin | [tokens, pairs]          | any                     | see `Rotary`                         |
| q, q_out         | [tokens, heads, d]       | any; 1 in d             | without q_out, q is rotated in place |

MLA latents use the same call with one head and no V: `write(pages, None, slots, latent, None)`. If the last dims of the
latents still need rotation, pass `Rotary(…, tail=True)`. If the other dims still need an RMS norm, pass `norm`.
"""

from __future__ import annotations

import torch

from kvloom.kernels.dtypes import quantised_max
from kvloom.kernels.fused import RMSNorm

from . import reference
from .reference import Rotary

__all__ = ["Rotary", "write"]


def write(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
) -> None:
    """Write `k` and `v` to their slots, and rotate `q` by the same rotary embedding. With `norm`, the dims of `k` that
    are not rotated are normalised. The call does not detect two tokens with the same slot, or slots beyond the last
    page.

    K and V are quantised for int8 and fp8 pages. If the scales are in pages, the call computes one float32 scale per
    token and head, and stores the scale in the page. The scale is amax / 127 for int8, and amax / 448 for fp8. With
    static scales, values are clamped to the range.

    Values are multiplied by the inverse scale in float32 and rounded half to even. Kernel and reference store the same
    bytes.
    """
    _check("k", k_pages, k, k_scale, slots)
    if (v is None) != (v_pages is None):
        raise ValueError("give both v and v_pages, or neither")
    if v is not None and v_pages is not None:
        _check("v", v_pages, v, v_scale, slots)
        if v_pages.shape[:3] != k_pages.shape[:3]:
            raise ValueError(
                f"k_pages {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)} differ in pages"
            )
    if rotary is not None:
        _check_rotary(rotary, k, q)
    elif q is not None or q_out is not None:
        raise ValueError("q is only rotated: give rotary, or omit q")
    if norm is not None:
        _check_norm(norm, k, rotary)
    if q_out is not None and (q is None or q_out.shape != q.shape or q_out.stride(-1) != 1):
        raise ValueError(f"q_out {tuple(q_out.shape)} needs a q of its shape, contiguous in its last axis")
    if k.is_cuda and k.dtype != torch.float64:
        from . import triton_write

        triton_write.write(k_pages, v_pages, slots, k, v, k_scale, v_scale, rotary, q, q_out, norm)
        return
    if norm is not None:
        k = torch.cat((norm(k[..., : len(norm.weight)]), k[..., len(norm.weight) :]), -1)
    reference.write(k_pages, slots, k, k_scale, rotary)
    if v is not None and v_pages is not None:
        reference.write(v_pages, slots, v, v_scale)
    if q is not None and rotary is not None:
        (q if q_out is None else q_out).copy_(reference.apply_rotary(q, rotary))


def _check(
    name: str, pages: torch.Tensor, new: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor
) -> None:
    if pages.dim() != 4 or new.dim() != 3 or pages.shape[2:] != new.shape[1:]:
        raise ValueError(
            f"{name} {tuple(new.shape)} does not fit pages {tuple(pages.shape)}: "
            "they are [tokens, heads, dim] and [pages, block tokens, heads, dim]"
        )
    if slots.dim() != 1 or slots.shape[0] != new.shape[0]:
        raise ValueError(
            f"slots {tuple(slots.shape)} for {new.shape[0]} tokens of {name}: one each is needed"
        )
    if (pages.stride(3) != 1 and name != "v") or new.stride(2) != 1:
        raise ValueError(
            f"{name} and its pages need the dims of a head side by side, "
            f"got strides {new.stride()} and {pages.stride()}: make {name} contiguous in its last axis"
        )
    if quantised_max(pages.dtype) is None or pages.dtype == new.dtype:
        if scale is not None:
            raise ValueError(
                f"{name}_scale is for int8 and fp8 pages, these keep {pages.dtype}: leave it out"
            )
    elif scale is None:
        if pages.dtype == torch.int8:
            raise ValueError(f"int8 pages need {name}_scale: pages of scales, or one per head")
    elif scale.dim() == 3:
        if scale.shape != pages.shape[:3] or scale.dtype != torch.float32:
            raise ValueError(
                f"{name}_scale {scale.dtype} {tuple(scale.shape)} needs to be float32 {tuple(pages.shape[:3])}"
            )
    elif scale.numel() not in (1, pages.shape[2]) or scale.dim() > 1:
        raise ValueError(
            f"{name}_scale {tuple(scale.shape)} is neither one value nor {pages.shape[2]} heads'"
        )


def _check_norm(norm: RMSNorm, k: torch.Tensor, rotary: Rotary | None) -> None:
    rotated = 2 * rotary.cos.shape[1] if rotary is not None else 0
    if norm.weight.shape != (k.shape[2] - rotated,) or norm.weight.stride(0) != 1:
        raise ValueError(
            f"a norm of {tuple(norm.weight.shape)} does not fit k {tuple(k.shape)} with {rotated} rotated dims: it needs one "
            "weight for each of the other dims"
        )
    if rotated and not (rotary is not None and rotary.tail):
        raise ValueError("a norm needs the rotated dims at the end of k: give Rotary(…, tail=True)")


def _check_rotary(rotary: Rotary, k: torch.Tensor, q: torch.Tensor | None) -> None:
    cos, sin = rotary.cos, rotary.sin
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != k.shape[0]:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} need to be [{k.shape[0]} tokens, pairs]"
        )
    if not 0 < 2 * cos.shape[1] <= k.shape[2]:
        raise ValueError(
            f"{cos.shape[1]} pairs turn {2 * cos.shape[1]} dims, but a head of k has only {k.shape[2]}"
        )
    if rotary.form not in ("halves", "pairs", "unpaired"):
        raise ValueError(f"unknown rotary form {rotary.form!r}; known: halves, pairs, unpaired")
    if q is None:
        return
    if q.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] < 2 * cos.shape[1] or q.stride(2) != 1:
        raise ValueError(
            f"q {tuple(q.shape)} with strides {q.stride()} needs to be [{k.shape[0]} tokens, heads, "
            f"{2 * cos.shape[1]} dims or more], dims side by side"
        )
