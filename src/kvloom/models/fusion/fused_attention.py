"""Attention modules in a few calls: one product for q, k and v, one rotation, then the pages.

On a CPU, fewer calls save time. On a GPU, steps in a CUDA graph need fewer launches, because the launch that writes
keys also rotates keys and queries. If a model has norms of q and k, one launch normalises and rotates q and k of
prompts, which saves memory traffic.

Modules are selected by a test, not by family name. Each module and its fused forward run on random input, with
pages that record calls. If the fused forward makes other calls or gives other results, the module is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvloom.kernels import cpu
from kvloom.kernels.fused import RMSNorm, apply_rotary as norm_and_rotate, rms_norms
from kvloom.kernels.write import Rotary, apply_rotary
from kvloom.models.paged import ATTENTION, IGNORED, is_dense

from .product import Product, registered

__all__ = ["KNOWN_ARGUMENTS", "FusedAttention", "GpuFusedAttention", "attention_output", "fuse_attention"]

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _RecordingPages:
    """A stand-in for the pages in the test of a fused forward. Records q, k and v, and returns a tensor that depends
    on q."""

    def __init__(self, is_replaying: bool) -> None:
        self.is_replaying = is_replaying
        self.given: Call | None = None
        self.arguments: tuple[Any, ...] = ()
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
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *arguments: Any,
        rotary: Any = None,
    ) -> torch.Tensor:
        if rotary is not None:
            cos, sin = (x[0, :, : x.shape[-1] // 2] for x in rotary)
            angles = Rotary(cos, sin, rounded=True)
            query, key = (
                apply_rotary(query, angles),
                apply_rotary(key[0].transpose(0, 1), angles).transpose(0, 1)[None],
            )
        self.given = query.clone(), key.clone(), value.clone()
        self.arguments = layer, *arguments
        return query.flip(0).contiguous()


class FusedAttention:
    """The fused forward of an attention module on a CPU. If it does not support a call, the module's own forward
    runs."""

    def __init__(self, module: Any, product: Product, dim: int, scale: float) -> None:
        self._module, self._own, self.layer = module, module.forward, int(module.layer_idx)
        self.product, self.dim, self.scale = product, dim, scale
        self.heads, self.kv = module.q_proj.out_features // dim, module.k_proj.out_features // dim
        self.norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]

    @property
    def plain(self) -> bool:
        """Whether q, k and v are plain matrix products of the hidden states, without bias and norms."""
        return self.product.bias is None and self.norms == [None, None]

    def __call__(self, *given: Any, **named: Any) -> tuple[torch.Tensor, None]:
        pages, hidden, rotary = (
            named.get(name) for name in ("pages", "hidden_states", "position_embeddings")
        )
        if given or pages is None or hidden is None or rotary is None or not named.keys() <= KNOWN_ARGUMENTS:
            return self._own(*given, **named)  # type: ignore[no-any-return]
        if len(hidden) != 1 or not self.supports(pages, *rotary):
            return self._own(**named)  # type: ignore[no-any-return]
        tokens = hidden.shape[1]
        out = self._attended(pages, hidden[0], rotary)
        return self._module.o_proj(out.reshape(1, tokens, -1)), None

    def supports(self, pages: Any, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether this forward can compute a step on these pages with these rotary angles."""
        return self.supports_rotary(cos, sin)

    def _adjacent(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return q, k and v of all tokens as one tensor [tokens, heads, dim]. The heads of q come first, then those
        of k, then those of v."""
        return self.product(hidden).view(len(hidden), self.heads + 2 * self.kv, self.dim)

    def _attended(
        self, pages: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads, kv, joined = self.heads, self.kv, self._adjacent(hidden)
        turned = joined[:, : heads + kv]
        q, k, v = joined[:, :heads], joined[:, heads : heads + kv], joined[:, heads + kv :]
        if self.norms[0] is None:
            cpu.rotate_(turned, *rotary)
        else:
            q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))  # type: ignore[misc]
            for part in (q, k):
                cpu.rotate_(part, *rotary)
        new = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        found: torch.Tensor = pages.attend(self.layer, q, *new, self.scale, None, None, 0)
        return found

    def supports_rotary(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return whether the native rotation supports these angles."""
        return (
            cos.shape[-1] == self.dim
            and cos.is_contiguous()
            and sin.is_contiguous()
            and cpu.supports(cos, sin)
        )


class GpuFusedAttention(FusedAttention):
    """The fused forward of an attention module on a GPU. In a step that a CUDA graph replays, the launch that writes
    keys also rotates keys and queries. In other steps, the launch that normalises q and k also rotates them."""

    def __init__(self, module: Any, *given: Any) -> None:
        super().__init__(module, *given)
        self._fused = all(
            isinstance(normed, RMSNorm) and normed.weight.shape == (self.dim,)
            for normed in map(self._fused_norm, self.norms)
        )

    @staticmethod
    def _fused_norm(norm: Any) -> Any:
        """Return the parameters of a fused norm with its current weight, or None if the norm is not fused."""
        return getattr(getattr(norm, "forward", None), "normed", None)

    def supports(self, pages: Any, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        plain = cos.shape == sin.shape and cos.shape[-1] == self.dim and cos.dim() == 3 and len(cos) == 1
        return plain and (pages.is_replaying or self._fused) and not torch.compiler.is_compiling()

    def _attended(
        self, pages: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads, kv, joined = self.heads, self.kv, self._adjacent(hidden)
        q, k, v = joined[:, :heads], joined[:, heads : heads + kv], joined[:, heads + kv :]
        norms = [self._fused_norm(norm) for norm in self.norms] if self._fused else []
        left = rotary if pages.is_replaying else None
        if norms and left is not None:
            both = rms_norms(joined[:, : heads + kv], heads, (norms[0], norms[1]))
            q, k = both[:, :heads], both[:, heads:]
        elif norms:
            done = norm_and_rotate(_packed(q), _packed(k), *rotary, norms=(norms[0], norms[1]))
            q, k = (x[0].transpose(0, 1) for x in done)
        elif self.norms[0] is not None:
            q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))  # type: ignore[misc]
        new = _packed(k), _packed(v)
        found: torch.Tensor = pages.attend(self.layer, q, *new, self.scale, None, None, 0, rotary=left)
        return found


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, dim] as a view in the layout of modeling code: [1, heads, tokens, dim]."""
    return x.transpose(0, 1)[None]


KNOWN_ARGUMENTS = IGNORED | {
    "pages",
    "hidden_states",
    "position_embeddings",
    "attention_mask",
    "past_key_values",
}
"""The keywords that a call may have. With any other keyword, the module's own forward runs."""


def fuse_attention(module: Any, implementation: type[FusedAttention] | None = None) -> bool:
    """Replace the forward of an attention module by a fused forward. Return whether the forward was replaced. The
    forward is replaced only if, on random input, the old and the new forward pass the same tensors to the pages and
    return the same result.

    The projections of the module must already be joined. The default `implementation` depends on the device.
    """
    layers = [getattr(module, f"{name}_proj", None) for name in "qkvo"]
    dim, config = getattr(module, "head_dim", None), getattr(module, "config", None)
    if not all(is_dense(layer) for layer in layers) or not isinstance(dim, int):
        return False
    if config is None or config._attn_implementation != ATTENTION or not hasattr(module, "layer_idx"):
        return False
    product = registered(layers[0])
    if product is None or len(product.layers) != 3:
        return False
    weight = product.weight
    if not (weight.is_cuda or cpu.supports(weight)):
        return False
    return _replace_forward(
        module, implementation or (GpuFusedAttention if weight.is_cuda else FusedAttention), product, dim
    )


def _replace_forward(
    module: Any,
    implementation: type[FusedAttention],
    product: Product,
    dim: int,
) -> bool:
    """Replace a module's forward by `implementation` if both compute the same results."""
    weight = product.weight
    draw = torch.Generator().manual_seed(dim)
    x = torch.randn(1, 3, weight.shape[1], generator=draw).to(weight)
    rotary = torch.randn(1, 3, dim, generator=draw), torch.randn(1, 3, dim, generator=draw)
    if implementation is GpuFusedAttention:  # the kernel expects every angle twice
        rotary = rotary[0][..., : dim // 2].repeat(1, 1, 2), rotary[1][..., : dim // 2].repeat(1, 1, 2)
    rotary = rotary[0].to(weight), rotary[1].to(weight)
    wanted = _record_call(module.forward, x, rotary)
    if wanted is None or wanted[0].arguments[2:] != (None, None, 0):
        return False
    fused = implementation(module, product, dim, wanted[0].arguments[1])
    for is_replaying in (True, False):
        found = _record_call(fused, x, rotary, is_replaying)
        if found is None or not _same(found, wanted):
            return False
    module.forward = fused
    return True


RecordedCall = tuple[_RecordingPages, torch.Tensor]


def _record_call(
    forward: Callable[..., Any],
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    is_replaying: bool = True,
) -> RecordedCall | None:
    pages = _RecordingPages(is_replaying)
    out = attention_output(forward, x, rotary, pages)
    return None if out is None or pages.given is None else (pages, out)


def attention_output(
    forward: Callable[..., Any], x: torch.Tensor, rotary: Any, pages: Any
) -> torch.Tensor | None:
    """Return the output of an attention module's forward for `x` on stand-in `pages`. Return None if the forward
    fails, for example because it needs other arguments."""
    try:
        found: torch.Tensor = forward(
            hidden_states=x,
            position_embeddings=rotary,
            attention_mask=None,
            past_key_values=pages,
            pages=pages,
        )[0]
    except Exception:  # noqa: BLE001 - any failure means that the module stays as it is
        return None
    return found


def _same(a: RecordedCall, b: RecordedCall) -> bool:
    if a[0].arguments != b[0].arguments or a[0].given is None or b[0].given is None:
        return False
    pairs = zip((*a[0].given, a[1]), (*b[0].given, b[1]), strict=True)
    near = max(1e-5, 8 * torch.finfo(a[1].dtype).eps)
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=near, atol=near) for x, y in pairs)
