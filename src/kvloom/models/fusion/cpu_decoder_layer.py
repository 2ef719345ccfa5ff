"""Decoder layers on a CPU in eight calls, for steps with one token per sequence.

    norm, one product, `cpu.attention_step` (rotation, pages, attention), a product added to x;  norm, product, gate, product

In a small model on a CPU, calls between modules take most of a step. A layer is replaced only if all its parts are
already fused. Steps with several tokens per sequence use the layer's previous forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvloom.kernels import cpu

from .fused_attention import KNOWN_ARGUMENTS, FusedAttention
from .product import Product

__all__ = ["CpuDecoderLayer", "CpuNorm"]


class CpuNorm(NamedTuple):
    """Applies a norm module through the native kernel. Each call reads the current weight of the module. `gemma`
    selects the form of the norm (see `fused.NormForm`)."""

    module: Any
    eps: float
    gemma: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.rms_norm(x, self.module.weight, self.eps, self.gemma)


class CpuDecoderLayer:
    """The new forward of a decoder layer. If it does not support a call, the layer's previous forward (`own`) runs."""

    def __init__(
        self,
        own: Any,
        attention: FusedAttention,
        output: Product,
        norms: tuple[CpuNorm, CpuNorm],
        gate_up: Product,
        down: Product,
        tanh: bool,
    ) -> None:
        self._own, self._attention, self._output, self._norms = own, attention, output, norms
        self._gate_up, self._down, self._tanh = gate_up, down, tanh

    @property
    def form(self) -> tuple[int, float, float, bool, bool]:
        """The numbers that native code needs: heads, scale of attention, epsilon of norms, and whether norms have
        Gemma's form and gates use tanh. The epsilon is NaN if the two norms differ."""
        first, second = self._norms
        same = first[1:] == second[1:]
        return (
            self._attention.heads, self._attention.scale, first.eps if same else float("nan"), first.gemma, self._tanh
        )  # fmt: skip

    def small_layer(self, pages: cpu.LayerPages) -> cpu.SmallLayer:
        """Return the weights of the layer, for a model that native code runs as a whole."""
        first, second = self._norms
        return cpu.SmallLayer(
            first.module.weight.data,
            self._attention.product.weight.data,
            self._output.weight.data,
            second.module.weight.data,
            self._gate_up.weight.data,
            self._down.weight.data,
            pages,
        )

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        pages, rotary = named.get("pages"), named.get("position_embeddings")
        if (
            more
            or pages is None
            or rotary is None
            or not named.keys() <= KNOWN_ARGUMENTS
            or len(hidden_states) != 1
        ):
            return self._own(hidden_states, *more, **named)  # type: ignore[no-any-return]
        attention = self._attention
        found = pages.single_token_rows(attention.layer)
        cos, sin = rotary
        if found is None or not attention.supports_rotary(cos, sin) or not hidden_states.is_contiguous():
            return self._own(hidden_states, *more, **named)  # type: ignore[no-any-return]
        x = hidden_states[0]
        first, second = self._norms
        joined = _product(first(x), attention.product)
        out = cpu.attention_step(joined, cos, sin, attention.heads, attention.scale, *found)
        _add_product(out, self._output, x)
        gated = cpu.act_and_mul(_product(second(x), self._gate_up), self._tanh)
        _add_product(gated, self._down, x)
        return hidden_states


def _product(x: torch.Tensor, product: Product) -> torch.Tensor:
    weight = product.weight
    out = cpu.multiply(x, weight) if cpu.multiplies(x, weight) else torch.mm(x, weight.t())
    product.add_term(x, out)
    return out


def _add_product(x: torch.Tensor, product: Product, into: torch.Tensor) -> None:
    weight = product.weight
    if cpu.multiplies(x, weight):
        cpu.multiply(x, weight, into)
    else:
        into.addmm_(x, weight.t())
    product.add_term(x, into)
