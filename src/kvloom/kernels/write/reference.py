"""Writes to pages in plain torch, with rotary embedding and quantisation. The kernel must write the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvloom.kernels.dtypes import accumulator_dtype, quantised_max

__all__ = ["SMALLEST_SCALE", "Rotary", "apply_rotary", "write"]

SMALLEST_SCALE = 2.0**-100
"""Smallest scale that is used, so that the inverse of a scale is always finite. If all values of a head are zero,
this is their scale."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotation of pairs of dims by angles per token. `cos` and `sin` are [tokens, pairs], with any strides. There
    are n pairs.

    | form     | pair i is         | and is written to   | as in                    |
    |----------|-------------------|---------------------|--------------------------|
    | halves   | x[i], x[i + n]    | x[i], x[i + n]      | Llama, Qwen, Gemma       |
    | pairs    | x[2i], x[2i + 1]  | x[2i], x[2i + 1]    | GPT-J, Cohere, GLM       |
    | unpaired | x[2i], x[2i + 1]  | x[i], x[i + n]      | DeepSeek's modeling code |

    The n pairs are the first 2n dims of a head, or with `tail` (for latents) the last 2n dims. Results are computed
    in float32 (float64 for float64 inputs) and rounded once to the input's dtype. With `rounded`, products are also
    rounded before they are added, as in Hugging Face's modeling code.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    form: Literal["halves", "pairs", "unpaired"] = "halves"
    tail: bool = False
    rounded: bool = False

    @classmethod
    def from_tables(
        cls,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: Literal["halves", "pairs", "unpaired"] = "halves",
        tail: bool = False,
        repeated: Literal["halves", "pairs"] = "halves",
    ) -> Rotary:
        """Build a rotation from tables [..., tokens, 2n] that contain every angle twice. With `repeated="halves"` the
        two copies are n columns apart, with "pairs" they are adjacent (Cohere). Copies nothing.

        M-RoPE tables have this form. For complex tables use `Rotary(f.real, f.imag, "pairs")`.
        """
        size = cos.shape[-1]
        part = slice(0, size // 2) if repeated == "halves" else slice(0, size, 2)
        return cls(cos.reshape(-1, size)[:, part], sin.reshape(-1, size)[:, part], form, tail)


def apply_rotary(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Return `x` ([tokens, heads, dim]) with its rotary dims rotated, as a new tensor of the same dtype."""
    size = 2 * rotary.cos.shape[1]
    before = x.shape[-1] - size if rotary.tail else 0
    part = x[..., before : before + size].to(accumulator_dtype(x))
    cos, sin = rotary.cos.to(part.dtype)[:, None], rotary.sin.to(part.dtype)[:, None]
    a, b = part.chunk(2, -1) if rotary.form == "halves" else (part[..., 0::2], part[..., 1::2])
    parts = [a * cos, b * sin, b * cos, a * sin]
    if rotary.rounded:
        parts = [product.to(x.dtype).to(part.dtype) for product in parts]
    a, b = parts[0] - parts[1], parts[2] + parts[3]
    turned = torch.stack((a, b), -1).flatten(-2) if rotary.form == "pairs" else torch.cat((a, b), -1)
    if size == x.shape[-1]:
        return turned.to(x.dtype)
    return torch.cat((x[..., :before], turned.to(x.dtype), x[..., before + size :]), -1)


def write(
    pages: torch.Tensor,
    slots: torch.Tensor,
    new: torch.Tensor,
    scales: torch.Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Write `new` ([tokens, heads, dim]) to `slots` ([tokens], each page * block tokens + offset). A token with a
    negative slot is skipped.

    Values are quantised for int8 and fp8 pages. If `scales` are pages ([pages, b, heads]), each token and head gets
    its own scale, which is stored in the page. If `scales` are per head ([heads] or one value), values are divided
    by them and clamped. fp8 pages without scales have scale 1.
    """
    if slots.shape[0] != new.shape[0]:
        raise ValueError(f"{slots.shape[0]} slots for {new.shape[0]} tokens")
    kept = (slots >= 0).nonzero().squeeze(1)
    slots = slots[kept]
    page, place = slots // pages.shape[1], slots % pages.shape[1]
    new = (new if rotary is None else apply_rotary(new, rotary))[kept]
    if pages.dtype == new.dtype or quantised_max(pages.dtype) is None:
        pages[page, place] = new.to(pages.dtype)
        return
    if scales is not None and scales.dim() == 3:
        size = (new.float().abs().amax(-1) * (1 / (quantised_max(pages.dtype) or 1))).clamp_min(
            SMALLEST_SCALE
        )
        scales[page, place] = size
    else:
        size = torch.ones((), device=new.device) if scales is None else scales.float()
    pages[page, place] = _quantised(new.float() * size.reciprocal()[..., None], pages.dtype)


def _quantised(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, which are already divided by their scale, in `dtype`. They are clamped to its range and
    rounded half to even. Without the clamp, the conversion could turn large values into NaN."""
    most = quantised_max(dtype)
    if dtype == torch.int8 and most is not None:
        scaled = scaled.round()
    return scaled.clamp(-most, most).to(dtype) if most is not None else scaled.to(dtype)
