"""Writing to pages and copying pages in plain torch: rotary embeddings, quantising, slots. `reference` is where to import from.

Says what a kernel must leave in the pages. Knows no attention, no models and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvloom.kernels.dtypes import accumulator_dtype, quantised_max

__all__ = ["SMALLEST_SCALE", "Rotary", "apply_rotary", "write"]

SMALLEST_SCALE = 2.0**-100
"""Scales stay above it, so that their inverse is finite; a row of zeros gets it."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotation of pairs of dims by angles given per token: `cos` and `sin` are [tokens, pairs], any strides.

    | form     | pair i is         | and is written to   | as in                    |
    |----------|-------------------|---------------------|--------------------------|
    | halves   | x[i], x[i + n]    | the same places     | Llama, Qwen, Gemma       |
    | pairs    | x[2i], x[2i + 1]  | the same places     | GPT-J, Cohere, GLM       |
    | unpaired | x[2i], x[2i + 1]  | x[i], x[i + n]      | DeepSeek's modeling code |

    with n pairs, so 2n dims turn: the first ones of a head, or its last ones with `tail` (latents). It is
    computed in float32 (float64 for float64) and rounded once, to the dtype of what is turned; where it is `rounded`, products
    are before they are added, too, as modeling code that computes in that dtype has it.
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
        """Of tables [..., tokens, 2n] in which every angle stands twice: n apart, or (Cohere) side by side.

        Views, no copies. M-RoPE's tables are such tables; complex ones are `Rotary(f.real, f.imag, "pairs")`.
        """
        size = cos.shape[-1]
        part = slice(0, size // 2) if repeated == "halves" else slice(0, size, 2)
        return cls(cos.reshape(-1, size)[:, part], sin.reshape(-1, size)[:, part], form, tail)


def apply_rotary(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """`x` ([tokens, heads, dim]) with its rotary dims turned, as a new tensor of the same dtype."""
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
    """Put `new` ([tokens, heads, dim]) at `slots` ([tokens]: page * tokens of a page + place; negative: skip).

    Pages of int8 and fp8 are quantised on the way in. With `scales` as pages ([pages, b, heads]) each token
    and head is scaled by its largest value, and the scale goes into the page with it; with `scales` per
    head ([heads], or one value) by that, and what is too large is clamped. Fp8 without scales is scaled by 1.
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
    """Rounded half to even; clamped first, for a conversion may turn what is too large into NaN."""
    most = quantised_max(dtype)
    if dtype == torch.int8 and most is not None:
        scaled = scaled.round()
    return scaled.clamp(-most, most).to(dtype) if most is not None else scaled.to(dtype)
