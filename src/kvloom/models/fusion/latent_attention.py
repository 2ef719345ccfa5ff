"""MLA modules in a few calls: one product for queries and latents, one launch for norm, rotation and writing.

An MLA module (DeepSeek) projects hidden states to queries and to one latent per token. The module's own forward
launches about twenty small kernels per layer. The fused forward launches three kernels before attention and two after
it in a decode step. If queries also have latents, a norm and one more product follow the first product.

    product      queries | latents          weights of both projections joined
    write        latents: norm, rotation, pages; queries: rotation of their last dims
    product      queries into latent space
    attention    over the pages
    product      out of latent space
    product      output projection

Modules are selected by a test, not by family name: see `fused_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from kvloom.kernels.fused import RMSNorm
from kvloom.kernels.write import Rotary, apply_rotary
from kvloom.models.paged import ATTENTION, absorb, is_dense, keeps_latents, up_projection

from .fused_attention import KNOWN_ARGUMENTS, attention_output
from .product import Product, can_join

__all__ = ["FusedLatentAttention", "fuse_latent_attention"]

Form = Literal["halves", "pairs", "unpaired"]
FORMS: tuple[Form, ...] = ("pairs", "unpaired", "halves")
Angles = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rotary angles of a step as a module gets them: complex numbers [1, tokens, pairs], or cos and sin [1, tokens, dim]."""


class FusedLatentAttention:
    """The fused forward of an MLA module. If it does not support a call, the module's own forward runs."""

    def __init__(
        self, module: Any, product: Product, later: Product | None, form: Form, scale: float
    ) -> None:
        """`product` computes two results from the hidden states: the queries (or their latents), and the latents of
        keys. If queries have latents (`q_lora_rank`), `later` computes the queries from these latents. Otherwise
        `later` is None. `form` is the order of rotated pairs (see `Rotary`), and `scale` the factor of the attention
        scores."""
        self._module, self._own, self._product, self._later = module, module.forward, product, later
        self._form, self._scale, self.layer = form, scale, int(module.layer_idx)
        self._rotated = module.qk_rope_head_dim
        self._dim = module.qk_nope_head_dim + self._rotated
        self._cut = product.sizes[0]

    def __call__(self, *given: Any, **named: Any) -> tuple[torch.Tensor, None]:
        pages, hidden, angles = (
            named.get(name) for name in ("pages", "hidden_states", "position_embeddings")
        )
        if given or pages is None or hidden is None or angles is None or not named.keys() <= KNOWN_ARGUMENTS:
            return self._own(*given, **named)  # type: ignore[no-any-return]
        rotary = None if torch.compiler.is_compiling() else self._rotary(angles)
        if len(hidden) != 1 or rotary is None or pages.divided is not None:
            return self._own(**named)  # type: ignore[no-any-return]
        module, tokens = self._module, hidden.shape[1]
        joined = self._product(hidden[0])
        query, latents = joined[:, : self._cut], joined[:, self._cut :]
        if self._later is not None:
            query = self._later(module.q_a_layernorm(query))
        norm = module.kv_a_layernorm.forward.normed
        found = pages.attend_latents(
            self.layer,
            query.view(tokens, -1, self._dim),
            latents,
            norm,
            rotary,
            self._scale,
            up_projection(module),
        )
        return module.o_proj(found.reshape(1, tokens, -1)), None

    def _rotary(self, angles: Angles) -> Rotary | None:
        """Return the rotation of a step. `angles` is one complex tensor, or (cos, sin). Return None if the shapes of
        `angles` are not supported. Copies nothing."""
        if isinstance(angles, torch.Tensor):
            if not angles.is_complex() or angles.dim() != 3 or 2 * angles.shape[2] != self._rotated:
                return None
            return Rotary(angles[0].real, angles[0].imag, self._form, tail=True)
        cos, sin = angles
        if cos.shape != sin.shape or cos.dim() != 3 or len(cos) != 1 or cos.shape[2] != self._rotated:
            return None
        cos, sin = (x[0, :, : self._rotated // 2] for x in (cos, sin))
        return Rotary(cos, sin, self._form, tail=True, rounded=True)


class _RecordingPages:
    """A stand-in for the pages in the test of a fused forward. Records the queries in latent space, the new latents
    and the scale. Returns a tensor that depends on the queries."""

    def __init__(self) -> None:
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None
        self.divided = None
        self.scale = 0.0
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._new = key, value
        return key, value

    def take(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._new is not None
        return self._new

    def expands_latents(self, *_: Any) -> bool:
        return False

    def attend(
        self, _: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *rest: Any
    ) -> torch.Tensor:
        softcap, sinks, rank = rest
        assert softcap is None and sinks is None
        self.given, self.scale = (query.clone(), torch.cat((key, value), -1)[0, 0]), scale
        return query[..., :rank].flip(0).contiguous()

    def attend_latents(
        self, layer: int, query: torch.Tensor, latents: torch.Tensor, norm: RMSNorm, rotary: Rotary, scale: float,
        weight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        rank = weight.shape[2]
        rotated = latents.shape[-1] - rank
        plain = query.shape[-1] - rotated
        key, rest = norm(latents[:, :rank]), apply_rotary(latents[:, None], rotary)[:, 0, rank:]
        query = absorb(apply_rotary(query, rotary), weight, rotated)
        found = self.attend(layer, query, key[None, None], rest[None, None], scale, None, None, rank)
        return torch.einsum("thr,hdr->thd", found, weight[:, plain:])


def fuse_latent_attention(module: Any) -> bool:
    """Replace the forward of an MLA module by a fused forward. Return whether the forward was replaced. The forward is
    replaced only if, on random input, the old and the new forward write the same latents and return the same result.
    The norms of the module must already be fused."""
    if not keeps_latents(module) or not hasattr(module, "layer_idx"):
        return False
    config, norm = getattr(module, "config", None), getattr(module, "kv_a_layernorm", None)
    if config is None or config._attn_implementation != ATTENTION:
        return False
    first = module.q_proj if module.q_lora_rank is None else module.q_a_proj
    layers = [first, module.kv_a_proj_with_mqa]
    later = [module.o_proj, module.kv_b_proj, *([] if module.q_lora_rank is None else [module.q_b_proj])]
    if not all(is_dense(layer) for layer in layers + later):
        return False
    if any(layer.bias is not None for layer in (*layers, *later[1:])) or not can_join(*layers):
        return False
    if not hasattr(getattr(norm, "forward", None), "normed"):
        return False
    return _replace_forward(module, layers)


def _replace_forward(module: Any, layers: list[nn.Linear]) -> bool:
    """Try each form of rotation, and replace the module's forward if one form gives the same results. Return whether
    the forward was replaced. Joins the weights of `layers` into one tensor."""
    weight, pairs = layers[0].weight, module.qk_rope_head_dim // 2
    draw = torch.Generator().manual_seed(pairs)
    x = torch.randn(1, 3, weight.shape[1], generator=draw).to(weight)
    turn = torch.rand(1, 3, pairs, generator=draw) * 6
    tables = turn.cos().repeat(1, 1, 2).to(weight), turn.sin().repeat(1, 1, 2).to(weight)
    angles: Angles
    for angles in (torch.polar(torch.ones_like(turn), turn).to(weight.device), tables):
        wanted = _record_call(module.forward, x, angles)
        if wanted is None:
            continue
        product = Product(*layers)
        later = None if module.q_lora_rank is None else Product(module.q_b_proj)
        for form in FORMS:
            fused = FusedLatentAttention(module, product, later, form, wanted[0].scale)
            found = _record_call(fused, x, angles)
            if found is not None and _same(found, wanted):
                for each in (product, later):
                    if each is not None:
                        each.register()
                module.forward = fused
                return True
    return False


RecordedCall = tuple[_RecordingPages, torch.Tensor]


def _record_call(forward: Callable[..., Any], x: torch.Tensor, angles: Angles) -> RecordedCall | None:
    pages = _RecordingPages()
    out = attention_output(forward, x, angles, pages)
    return None if out is None or pages.given is None else (pages, out)


def _same(a: RecordedCall, b: RecordedCall) -> bool:
    if a[0].given is None or b[0].given is None or a[0].scale != b[0].scale:
        return False
    pairs = zip((*a[0].given, a[1]), (*b[0].given, b[1]), strict=True)
    near = 8 * torch.finfo(a[1].dtype).eps
    return all(
        x.shape == y.shape and torch.dist(x.float(), y.float()) <= near * y.float().norm() for x, y in pairs
    )
