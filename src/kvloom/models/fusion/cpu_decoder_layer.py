"""Decoder layers on a CPU in eight calls, for steps with one token per sequence.

    norm, one product, `cpu.attention_step` (rotation, pages, attention), a product added to x;  norm, product, gate, product

A layer is replaced only if all its parts are already fused. On a CPU, calls between modules take most of a small
model's step. All other steps use the layer's previous forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvloom.kernels import cpu

from .fused_attention import KNOWN_ARGUMENTS, FusedAttention

__all__ = ["CpuDecoderLayer", "CpuNorm"]


class CpuNorm(NamedTuple):
    """A norm of a module. Its weight is read at each call. `gemma` has the same meaning as in `fused.NormForm`."""

    module: Any
    eps: float
    gemma: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.rms_norm(x, self.module.weight, self.eps, self.gemma)


class CpuDecoderLayer:
    """The new forward of a decoder layer. `own` is its previous forward."""

    def __init__(
        self,
        own: Any,
        attention: FusedAttention,
        output: Any,
        norms: tuple[CpuNorm, CpuNorm],
        gate_up: torch.Tensor,
        down: Any,
        tanh: bool,
    ) -> None:
        self._own, self._attention, self._output, self._norms = own, attention, output, norms
        self._gate_up, self._down, self._tanh = gate_up.t(), down, tanh
        self._joined = attention.weight.t()

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
        joined = torch.mm(first(x), self._joined)
        out = cpu.attention_step(joined, cos, sin, attention.heads, attention.scale, *found)
        x.addmm_(out, self._output.weight.t())
        gated = cpu.act_and_mul(torch.mm(second(x), self._gate_up), self._tanh)
        x.addmm_(gated, self._down.weight.t())
        return hidden_states
