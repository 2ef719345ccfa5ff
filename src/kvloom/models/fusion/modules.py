"""Replaces operations of Hugging Face modules by fewer, larger operations. This step is optional, and runs after
the model was prepared for pages.

| found in a model                   | replaced by                                               |
|------------------------------------|-----------------------------------------------------------|
| RMS norms, with or without a gate  | one launch                                                |
| gate_proj, up_proj of a gated MLP  | one matrix product, one launch for the activation         |
| q_proj, k_proj, v_proj             | one matrix product                                        |
| `apply_rotary_pos_emb`             | one launch                                                |
| rotary embeddings (`rotary_cache`) | on a GPU, a table lookup                                  |
| decoder layers with these modules  | the product, or the norm after it, also adds the residual |
| MLA (`latent_attention`)           | on a GPU, one product, and one launch until attention     |
| attention (`fused_attention`)      | on a CPU one rotation in place, and fewer calls; on a GPU |
|                                    | single tokens are rotated by the launch that writes them, |
|                                    | prompts by the launch that norms q and k                  |
| delta rules (`delta_mixer`)        | one product for all inputs, four launches after it        |
| mixtures of experts (`moe`)        | two grouped matrix products, one launch for the routing   |

Modules are selected by a test, not by family name. Each replacement is first compared with the module on random
input. A module with different results is not changed. Weights are joined in one tensor, and the weights of the
modules become views of that tensor. A fused decoder layer overwrites its input.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvloom.kernels.fused import (
    Activation,
    GateOrder,
    NormForm,
    RMSNorm,
    act_and_mul,
    add_norm,
    apply_rotary,
    gated_rms_norm,
    linear,
    rms_norm,
)
from kvloom.models.paged import is_dense

from . import cpu_decoder_layer
from .comparison import differ_by_rounding
from .delta_mixer import fuse_delta_mixer
from .fused_attention import FusedAttention, fuse_attention
from .latent_attention import fuse_latent_attention
from .moe import FusedBlock, fuse_block, fuse_experts, fuse_router
from .product import Product, can_join, registered
from .rotary_cache import fuse_rotary_embedding

__all__ = ["fuse"]


def fuse(model: Any, limit: int = 0) -> Counter[str]:
    """Fuse every module of the model that can be fused. Return the number of fused modules by kind. Repeated calls
    are allowed. The model must already be on the device on which it will run.

    All token positions that the model will get must be below `limit`. If `limit` is 0, the positions are unknown,
    and rotary embeddings are not replaced.
    """
    done: Counter[str] = Counter()
    with torch.no_grad():
        fresh = [module for module in model.modules() if not getattr(module, "is_fused", False)]
        for (
            name,
            tried,
        ) in FUSIONS.items():  # norms come first, because the fusion of attention needs fused norms
            for module in fresh:
                if tried(module):
                    module.is_fused = True
                    done[name] += 1
        for module in model.modules():
            if not getattr(module, "is_fused", False) and _fuse_layer(module):
                module.is_fused = True
                done["layers"] += 1
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                _link_layers(module)
        for name in {type(module).__module__ for module in model.modules()}:
            done["rotary embeddings"] += _fuse_rotary(sys.modules[name], model)
        _fuse_head(model)
        like = next(model.parameters())[:1]
        for module in model.modules() if limit and like.is_cuda else ():
            done["rotary caches"] += fuse_rotary_embedding(module, limit, like)
    return +done


def _fuse_head(model: Any) -> None:
    """On a CPU, make the model's output matrix use `linear`, which is faster than BLAS for a few tokens."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if is_dense(head) and "bias" not in dict(head.named_parameters()) and head.weight.is_cpu:
        vars(head).setdefault("forward", lambda x: linear(x, head.weight))


def _random_input(*shape: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


class _FusedNorm:
    """The fused forward of a norm. Each call reads the weight of the module, because loading weights may replace the
    tensor. If the weight does not fit the input (Falcon Mamba), the module's own forward runs.
    """

    def __init__(self, module: Any, eps: float, form: NormForm) -> None:
        self._module, self._eps, self._form, self._own = module, eps, form, module.forward

    @property
    def normed(self) -> RMSNorm:
        return RMSNorm(self._module.weight, self._eps, self._form)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.normed
        if x.shape[-1:] != normed.weight.shape:
            return self._own(x)  # type: ignore[no-any-return]
        return normed(x)


def _fuse_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return False
    if not isinstance(eps, float):
        return False
    x = _random_input(3, len(weight), like=weight)
    own = weight.detach().clone()
    # A weight of ones would hide whether the module uses its weight.
    weight.data.copy_(_random_input(len(weight), like=weight))
    form: NormForm
    try:
        for form in ("llama", "gemma"):
            if differ_by_rounding(module(x), rms_norm(x, weight, eps, form)):
                module.forward = _FusedNorm(module, eps, form)
                return True
    except TypeError:  # for example a gated norm, which takes more arguments
        return False
    finally:
        weight.data.copy_(own)
    return False


class _FusedGatedNorm:
    """The fused forward of a gated norm. The last dimension of x has `groups` parts, which are normalised
    separately. If there is no gate, the module's own forward runs."""

    def __init__(self, module: Any, eps: float, order: GateOrder, groups: int) -> None:
        self._module, self._own, self._groups = module, module.forward, groups
        self.eps, self.order = eps, order

    def __call__(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight, groups = self._module.weight, self._groups
        if gate is None or x.shape != gate.shape or x.shape[-1:] != weight.shape:
            return self._own(x, gate)  # type: ignore[no-any-return]
        if groups == 1:
            return gated_rms_norm(x, gate, weight, self.eps, self.order)
        x_parts, gate_parts = (part.view(*part.shape[:-1], groups, -1) for part in (x, gate))
        return gated_rms_norm(x_parts, gate_parts, weight.view(groups, -1), self.eps, self.order).view(
            x.shape
        )


def _fuse_gated_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNormGated") or weight is None or weight.dim() != 1:
        return False
    size = getattr(module, "group_size", None) or len(weight)
    groups = getattr(module, "n_groups", None) or len(weight) // size
    if not isinstance(eps, float) or len(weight) % groups:
        return False
    x, gate = _random_input(2, 3, len(weight), like=weight)
    own = weight.detach().clone()
    weight.data.copy_(_random_input(len(weight), like=weight))
    order: GateOrder
    try:
        wanted = module(x, gate)
        for order in ("first", "last"):
            fused = _FusedGatedNorm(module, eps, order, groups)
            if wanted.dtype == x.dtype and differ_by_rounding(wanted, fused(x, gate)):
                module.forward = fused
                return True
    except (RuntimeError, TypeError):  # the module has other arguments, so it is not changed
        return False
    finally:
        weight.data.copy_(own)
    return False


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


class _FusedMLP:
    """The fused forward of a gated MLP. If `into` is given, the result is added to that tensor."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: Activation) -> None:
        self.gate_up, self.down = Product(gate, up).register(), Product(down).register()
        self.activation: Activation = activation

    @property
    def adds(self) -> bool:
        """Whether the forward can add its result to a tensor."""
        return self.down.bias is None

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(act_and_mul(self.gate_up(x), self.activation), into=into)


def _fuse_mlp(module: Any) -> bool:
    found = _projections(module, "gate", "up", "down")
    if found is None or not can_join(found[0], found[1], rows=True):
        return False
    gate, up, down = found
    x = _random_input(2, gate.in_features, like=gate.weight)
    wanted = module(x)
    for activation in ACTIVATIONS:
        both = torch.cat((gate(x), up(x)), -1)
        if differ_by_rounding(down(act_and_mul(both, activation)), wanted):
            module.forward = _FusedMLP(gate, up, down, activation)
            return True
    return False


class _ResidualOutput:
    """The fused forward of an output projection. If a layer has set `into`, the result is added to that tensor."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.into: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        into, self.into = self.into, None
        return self.product(x, into=into)


class _FusedDecoderLayer:
    """The fused forward of a decoder layer: x + attention(norm(x)), then x + mlp(norm(x)), both in place.

    - `posts` is empty, or has two norms: one normalises the output of attention, the other the output of the MLP,
      before the output is added to x.
    - `after` is the first norm of the next layer, or None.
    - With `posts`, the launch that adds the MLP output also applies `after` to x. This result is stored as an attribute
      of x, so it is freed with x.
    """

    def __init__(
        self,
        module: Any,
        output: _ResidualOutput,
        pres: tuple[_FusedNorm, ...],
        posts: tuple[_FusedNorm, ...],
    ) -> None:
        self._module, self._output, self._pres, self._posts = module, output, pres, posts
        self._mlp: _FusedMLP | FusedBlock = module.mlp.forward
        self._names = tuple(inspect.signature(module.forward).parameters)[1:]
        self.after: _FusedNorm | None = None

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        x, (first, second) = hidden_states, self._pres
        if more:
            named = dict(zip(self._names, more, strict=False)) | named
        if self._posts:
            y = self._module.self_attn(hidden_states=self._first(x), **named)[0]
            z = add_norm(x, y, self._posts[0].normed, second.normed)
            assert z is not None
            after = None if torch.compiler.is_compiling() else self.after
            z = add_norm(x, self._mlp(z), self._posts[1].normed, None if after is None else after.normed)
            if after is not None:
                vars(x)[NORMED_ATTRIBUTE] = after, z
            return x
        self._output.into = x
        self._module.self_attn(hidden_states=first(x), **named)
        return self._mlp(second(x), into=x)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            norm, z = vars(x).pop(NORMED_ATTRIBUTE, (None, None))
            if norm is self._pres[0]:
                return z  # type: ignore[no-any-return]
        return self._pres[0](x)


NORMED_ATTRIBUTE = "_kvloom_normed"
"""Name of the attribute of hidden states that contains (norm, result of this norm)."""


def _link_layers(layers: nn.ModuleList) -> None:
    """For each layer with `posts`, set `after` to the first norm of the next layer. If a hook runs between the two
    layers, set `after` to None, because the hook may change the hidden states."""
    for one, other in pairwise(layers):
        here, there, hooks = one.forward, other.forward, (*one._forward_hooks, *other._forward_pre_hooks)
        if (
            isinstance(here, _FusedDecoderLayer)
            and isinstance(there, _FusedDecoderLayer)
            and here._posts
            and there._posts
        ):
            here.after = None if hooks else there._pres[0]


PRES = ("input_layernorm", "post_attention_layernorm")
SANDWICH = (
    ("input_layernorm", "pre_feedforward_layernorm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
)


def _fuse_layer(module: Any) -> bool:
    """Fuse a decoder layer of attention and a gated MLP. Return whether the layer was fused. The layer's own
    forward and the fused forward are first compared, with a stand-in for attention. The layer is fused only if their
    results are equal."""
    attention, mlp = getattr(module, "self_attn", None), getattr(module, "mlp", None)
    output: Any = getattr(attention, "o_proj", None)
    if not is_dense(output) or not isinstance(getattr(mlp, "forward", None), _FusedMLP | FusedBlock):
        return False
    posts: tuple[str, ...]
    for pres, posts in ((PRES, ()), SANDWICH):
        found_norms = [getattr(getattr(module, name, None), "forward", None) for name in (*pres, *posts)]
        norms = [norm for norm in found_norms if isinstance(norm, _FusedNorm)]
        if len(norms) < len(found_norms):
            continue
        if not posts and (output.bias is not None or not module.mlp.forward.adds):
            continue
        added = _ResidualOutput(registered(output) or Product(output))
        found = _FusedDecoderLayer(module, added, tuple(norms[:2]), tuple(norms[2:]))
        if _computes_same(module, attention, output, found):
            added.product.register()
            output.forward = added
            module.forward = _cpu_layer(found)
            return True
    return False


def _cpu_layer(layer: _FusedDecoderLayer) -> Any:
    """Return a `CpuDecoderLayer` for a plain layer on a CPU. Return any other layer unchanged. A plain layer has a
    gated MLP, no biases, no norms of q and k, and no norms after attention and MLP."""
    attention, mlp = layer._module.self_attn.forward, layer._mlp
    plain = type(attention) is FusedAttention and attention.plain
    if layer._posts or not plain or not isinstance(mlp, _FusedMLP) or mlp.gate_up.bias is not None:
        return layer
    first, second = (
        cpu_decoder_layer.CpuNorm(norm._module, norm._eps, norm._form == "gemma") for norm in layer._pres
    )
    tanh = mlp.activation == "gelu_tanh"
    return cpu_decoder_layer.CpuDecoderLayer(
        layer, attention, layer._output.product, (first, second), mlp.gate_up, mlp.down, tanh
    )


def _computes_same(module: Any, attention: Any, output: Any, found: _FusedDecoderLayer) -> bool:
    """Return whether a layer (`module`) and its fused form `found` compute the same result on random input. During this
    test a stand-in replaces `attention`. The stand-in only applies the output projection `output` to the hidden
    states."""
    plain = output.forward

    def aside(*_: Any, hidden_states: torch.Tensor, **__: Any) -> tuple[torch.Tensor, None]:
        wide = torch.cat([hidden_states] * (1 + output.in_features // hidden_states.shape[-1]), -1)
        return output(wide[..., : output.in_features]), None

    x = _random_input(1, 3, len(module.input_layernorm.weight), like=output.weight)
    own = vars(attention).get("forward")
    attention.forward = aside
    try:
        wanted = module(x.clone())
        output.forward = found._output
        return isinstance(wanted, torch.Tensor) and differ_by_rounding(found(x.clone()), wanted)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # the module needs more than hidden states, so it is not changed
    finally:
        output.forward = plain
        if own is None:
            del attention.forward
        else:
            attention.forward = own


def _fuse_projections(module: Any) -> bool:
    found = _projections(module, "q", "k", "v")
    if found is None or not all(can_join(found[0], other) for other in found):
        return False
    q, k, v = found
    product = Product(q, k, v).register()
    last: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        last[:] = [(x, torch.split(product(x), product.sizes, -1))]
        return last[0][1][0]

    def later(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not last or last[0][0] is not x:
                return product.of_part(x, place)
            found = last[0][1][place]
            if place == 2:
                last.clear()  # frees the activations of the layer now, not at its next call
            return found

        return forward

    layers: tuple[Any, ...] = (q, k, v)
    for layer, forward in zip(layers, (first, later(1), later(2)), strict=True):
        layer.forward = forward
    return True


def _projections(module: Any, *names: str) -> list[nn.Linear] | None:
    """Return the submodules `<name>_proj` of `module` for all `names`. Return None if any of them is not a
    dense linear layer."""
    found: list[Any] = [getattr(module, f"{name}_proj", None) for name in names]
    dense = [layer for layer in found if is_dense(layer)]
    return dense if len(dense) == len(names) else None


def _fuse_rotary(modeling: Any, model: Any) -> int:
    """Replace `apply_rotary_pos_emb` of a modeling file by one launch if both compute the same results. Return 1 if
    it was replaced, else 0.
    """
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    weight = next(model.parameters())
    if original is None or getattr(original, "is_fused", False) or not weight.is_cuda:
        return 0
    q, k = (_random_input(1, heads, 3, 64, like=weight) for heads in (4, 2))
    cos, sin = (_random_input(1, 3, 64, like=weight) for _ in range(2))
    try:
        wanted, found = original(q, k, cos, sin), apply_rotary(q, k, cos, sin)
        same = all(differ_by_rounding(a, b) for a, b in zip(wanted, found, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return 0  # the function has other arguments or shapes, so it is not changed
    if not same:
        return 0

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        if more or named or not q.is_cuda or q.shape[0] != 1 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *more, **named)
        return apply_rotary(q, k, cos, sin)

    turned.is_fused = True  # type: ignore[attr-defined]
    modeling.apply_rotary_pos_emb = turned
    return 1


def _fuse_latent_attention(module: Any) -> bool:
    """Fuse an MLA module on a GPU. Return whether it was fused. An MLA module on a CPU is not changed, because
    operations start quickly there."""
    return next(module.parameters(), torch.empty(0)).is_cuda and fuse_latent_attention(module)


FUSIONS: dict[str, Callable[[Any], bool]] = {
    "norms": _fuse_norm,
    "gated norms": _fuse_gated_norm,
    "gated MLPs": _fuse_mlp,
    "projections": _fuse_projections,
    "attentions": fuse_attention,
    "latent attentions": _fuse_latent_attention,
    "delta rules": fuse_delta_mixer,
    "experts": fuse_experts,
    "routers": fuse_router,
    "mixtures of experts": fuse_block,
}
