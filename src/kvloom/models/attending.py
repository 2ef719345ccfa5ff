"""Attention modules of Hugging Face's as a few calls: one product for q, k and v, one rotation in place, then the pages.

Part of `fusing`, for a CPU, where calling is what costs. Nothing is known of families: a module is run on random input with
pages that only look at what they are given, and one that gives them something else, or makes something else of what they
give back, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kvloom.kernels import cpu
from kvloom.kernels.fused import linear

from .attention import ATTENTION, IGNORED

__all__ = ["TAKEN", "Attention", "fuse_attention"]

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Looking:
    """Stands for pages: keeps q, k and v as they are given, and gives back something that depends on q."""

    def __init__(self) -> None:
        self.given: Call | None = None
        self.how: tuple[Any, ...] = ()
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._new = key, value
        return key, value

    def take(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._new is not None
        return self._new

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        self.given = query.clone(), key.clone(), value.clone()
        self.how = layer, *how
        return query.flip(0).contiguous()


class Attention:
    """The forward of an attention module."""

    def __init__(
        self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, dim: int, scale: float
    ) -> None:
        self._module, self._own, self.layer = module, module.forward, int(module.layer_idx)
        self.weight, self.bias, self.dim, self.scale = weight, bias, dim, scale
        self.heads, self.kv = module.q_proj.out_features // dim, module.k_proj.out_features // dim
        self.norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]

    @property
    def plain(self) -> bool:
        """Whether nothing but a product lies between hidden states and the rotation."""
        return self.bias is None and self.norms == [None, None]

    def __call__(self, *given: Any, **named: Any) -> tuple[torch.Tensor, None]:
        pages, hidden, turns = (named.get(name) for name in ("pages", "hidden_states", "position_embeddings"))
        if given or pages is None or hidden is None or turns is None or not named.keys() <= TAKEN:
            return self._own(*given, **named)  # type: ignore[no-any-return]
        if len(hidden) != 1 or not self.turns(*turns):
            return self._own(**named)  # type: ignore[no-any-return]
        heads, kv, dim = self.heads, self.kv, self.dim
        tokens = hidden.shape[1]
        joined = linear(hidden[0], self.weight, self.bias).view(tokens, heads + 2 * kv, dim)
        turned = joined[:, : heads + kv]
        q, k, v = joined[:, :heads], joined[:, heads : heads + kv], joined[:, heads + kv :]
        if self.norms[0] is None:
            cpu.rotate_(turned, *turns)
        else:
            q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))  # type: ignore[misc]
            for part in (q, k):
                cpu.rotate_(part, *turns)
        new = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        out = pages.attend(self.layer, q, *new, self.scale, None, None, 0)
        return self._module.o_proj(out.reshape(1, tokens, -1)), None

    def turns(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            cos.shape[-1] == self.dim and cos.is_contiguous() and sin.is_contiguous() and cpu.takes(cos, sin)
        )


TAKEN = IGNORED | {"pages", "hidden_states", "position_embeddings", "attention_mask", "past_key_values"}
"""What a call may say; whoever says more is not understood here."""


def fuse_attention(module: Any) -> bool:
    """Put few calls in the place of an attention module's many, where they hand the pages the same, and do the same with
    what those give back. Its projections must have been joined."""
    layers = [getattr(module, f"{name}_proj", None) for name in "qkvo"]
    dim, config = getattr(module, "head_dim", None), getattr(module, "config", None)
    if not all(type(layer) is nn.Linear for layer in layers) or not isinstance(dim, int):
        return False
    if config is None or config._attn_implementation != ATTENTION or not hasattr(module, "layer_idx"):
        return False
    weight, bias = _joined([layer.weight for layer in layers[:3]]), None  # type: ignore[union-attr]
    if layers[0].bias is not None:  # type: ignore[union-attr]
        bias = _joined([layer.bias for layer in layers[:3]])  # type: ignore[union-attr]
        if bias is None:
            return False
    if weight is None or not cpu.takes(weight):
        return False
    draw = torch.Generator().manual_seed(dim)
    x = torch.randn(1, 3, weight.shape[1], generator=draw)
    turns = torch.randn(1, 3, dim, generator=draw), torch.randn(1, 3, dim, generator=draw)
    wanted = _look(module.forward, x, turns)
    if wanted is None or wanted[0].how[2:] != (None, None, 0):
        return False
    lean = Attention(module, weight, bias, dim, wanted[0].how[1])
    found = _look(lean, x, turns)
    if found is None or not _same(found, wanted):
        return False
    module.forward = lean
    return True


Seen = tuple[_Looking, torch.Tensor]


def _look(
    forward: Callable[..., Any], x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> Seen | None:
    pages = _Looking()
    try:
        out = forward(
            hidden_states=x,
            position_embeddings=turns,
            attention_mask=None,
            past_key_values=pages,
            pages=pages,
        )[0]
    except Exception:  # noqa: BLE001 - whatever it needs more, it does not get it here, and stays as it is
        return None
    return (pages, out) if pages.given is not None else None


def _same(a: Seen, b: Seen) -> bool:
    if a[0].how != b[0].how or a[0].given is None or b[0].given is None:
        return False
    pairs = zip((*a[0].given, a[1]), (*b[0].given, b[1]), strict=True)
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in pairs)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of several that lie one after the other; None where they do not."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or not part.is_contiguous():
            return None
        at += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    if (
        first.untyped_storage().nbytes()
        < (first.storage_offset() + rows * first.stride(0)) * first.element_size()
    ):
        return None
    return torch.as_strided(first.data, (rows, *first.shape[1:]), first.stride(), first.storage_offset())
