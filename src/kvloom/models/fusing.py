"""Fewer, larger operations in Hugging Face's modules: the third, optional step after the two seams.

| found in a model                      | what is done                                              |
|---------------------------------------|-----------------------------------------------------------|
| RMS norms                             | one launch                                                |
| gate_proj, up_proj of a gated MLP     | one matrix product, one launch for the activation         |
| q_proj, k_proj, v_proj                | one matrix product                                        |
| `apply_rotary_pos_emb`                | one launch                                                |
| experts and their routers (`experts`) | two grouped matrix products, one launch for the choice    |

Nothing is known of families: what a module computes is tried on random input first, and one that computes something else
stays as it is. Weights are joined in place: the modules' own become views, and no memory is doubled.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kvloom.kernels.fused import Activation, Norm, gated, rms_norm, rotate

from .experts import fuse_experts, fuse_router

__all__ = ["fuse"]


def fuse(model: Any) -> Counter[str]:
    """Fuse what can be fused; how much that was. Harmless to repeat. The model must be on its device."""
    done: Counter[str] = Counter()
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "is_fused", False):
                continue
            for name, tried in TRIED.items():
                if tried(module):
                    module.is_fused = True
                    done[name] += 1
        for name in {type(module).__module__ for module in model.modules()}:
            done["rotary embeddings"] += _turn(sys.modules[name], model)
    return +done


def _trial(*shape: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    distance = torch.dist(a.float(), b.float())
    return a.shape == b.shape and bool(distance <= 8 * torch.finfo(a.dtype).eps * a.float().norm())


def _norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return False
    if not isinstance(eps, float):
        return False
    x = _trial(3, len(weight), like=weight)
    form: Norm
    for form in ("llama", "gemma"):
        try:
            same = _same(module(x), rms_norm(x, weight, eps, form))
        except TypeError:  # it takes more than one argument: a gated norm
            return False
        if same:
            # The weight is looked up anew: whoever loads weights later replaces it.
            module.forward = lambda x, form=form: rms_norm(x, module.weight, eps, form)
            return True
    return False


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


def _gate(module: Any) -> bool:
    found = _layers(module, "gate", "up", "down")
    if found is None or not _alike(found[0], found[1]):
        return False
    gate, up, down = found
    x = _trial(2, gate.in_features, like=gate.weight)
    wanted = module(x)
    for activation in ACTIVATIONS:
        both = torch.cat((gate(x), up(x)), -1)
        if _same(down(gated(both, activation)), wanted):
            joined, bias = _join(gate, up)
            module.forward = _gated_forward(joined, bias, down, activation)
            return True
    return False


def _gated_forward(
    joined: torch.Tensor, bias: torch.Tensor | None, down: nn.Linear, activation: Activation
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = down(gated(functional.linear(x, joined, bias), activation))
        return out

    return forward


def _project(module: Any) -> bool:
    found = _layers(module, "q", "k", "v")
    if found is None or not all(_alike(found[0], other, rows=False) for other in found):
        return False
    q, k, v = found
    joined, bias = _join(q, k, v)
    cuts = [q.out_features, k.out_features, v.out_features]
    held: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        held[:] = [(x, torch.split(functional.linear(x, joined, bias), cuts, -1))]
        return held[0][1][0]

    def later(place: int, own: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not held or held[0][0] is not x:
                return functional.linear(x, own.weight, own.bias)
            found = held[0][1][place]
            if place == 2:
                held.clear()  # or a layer's activations would live until its next run
            return found

        return forward

    layers: tuple[Any, ...] = (q, k, v)
    for layer, forward in zip(layers, (first, later(1, k), later(2, v)), strict=True):
        layer.forward = forward
    return True


def _layers(module: Any, *names: str) -> list[nn.Linear] | None:
    """The module's projections of these names, where all are linear layers and nothing else."""
    found = [getattr(module, f"{name}_proj", None) for name in names]
    plain = [layer for layer in found if type(layer) is nn.Linear and not layer._forward_pre_hooks]
    return plain if len(plain) == len(names) else None


def _alike(a: nn.Linear, b: nn.Linear, rows: bool = True) -> bool:
    same = a.in_features == b.in_features and (a.bias is None) == (b.bias is None)
    return same and a.weight.dtype == b.weight.dtype and (not rows or a.out_features == b.out_features)


def _join(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) out of several, of which the layers' own are views from now on."""
    weight = torch.cat([layer.weight.data for layer in layers])
    biases = [part.data for part in (getattr(layer, "bias", None) for layer in layers) if part is not None]
    bias = torch.cat(biases) if biases else None
    at = 0
    for layer in layers:
        end = at + layer.out_features
        layer.weight = nn.Parameter(weight[at:end], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[at:end], requires_grad=False)
        at = end
    return weight, bias


def _turn(modeling: Any, model: Any) -> int:
    """Put `rotate` in the place of a modeling file's `apply_rotary_pos_emb`, where it does the same."""
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    weight = next(model.parameters())
    if original is None or getattr(original, "is_fused", False) or not weight.is_cuda:
        return 0
    q, k = (_trial(1, heads, 3, 64, like=weight) for heads in (4, 2))
    cos, sin = (_trial(1, 3, 64, like=weight) for _ in range(2))
    try:
        wanted, found = original(q, k, cos, sin), rotate(q, k, cos, sin)
        same = all(_same(a, b) for a, b in zip(wanted, found, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return 0  # it takes other arguments, or other shapes: it stays as it is
    if not same:
        return 0

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        if more or named or not q.is_cuda or q.shape[0] != 1 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *more, **named)
        return rotate(q, k, cos, sin)

    turned.is_fused = True  # type: ignore[attr-defined]
    modeling.apply_rotary_pos_emb = turned
    return 1


TRIED: dict[str, Callable[[Any], bool]] = {
    "norms": _norm,
    "gated MLPs": _gate,
    "projections": _project,
    "experts": fuse_experts,
    "routers": fuse_router,
}
