"""Mixtures of experts in Hugging Face modules, computed as grouped matrix products.

| found in a model                                              | replaced by                                  |
|---------------------------------------------------------------|----------------------------------------------|
| experts with `gate_up_proj`, `down_proj` of [expert, out, in] | two grouped products, no wait for the device |
| routers: softmax of one product, top-k                        | one launch after the product                 |

Each replacement is first compared on random input. A module with different results is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from kvloom.kernels.fused import Activation
from kvloom.kernels.moe import candidate_tiles, fused_moe, topk_softmax

__all__ = ["fuse_experts", "fuse_router"]

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


def fuse_experts(module: Any) -> bool:
    """Replace the experts of a module by grouped products if the results are the same. Return whether they were
    replaced.
    """
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor) or gate_up.ndim != 3:
        return False
    count, both, dim = gate_up.shape
    if down.shape != (count, dim, both // 2) or not (gate_up.is_contiguous() and down.is_contiguous()):
        return False
    draw = torch.Generator().manual_seed(dim)
    picked = min(2, count)
    # Some tensor rows are large, so that a clamp in the gate changes the result.
    sizes = torch.tensor([1.0, 1.0, 8.0, 64.0, 512.0])
    x = (torch.randn(5, dim, generator=draw) * sizes[:, None]).to(gate_up.device, gate_up.dtype)
    index = torch.stack([torch.randperm(count, generator=draw)[:picked] for _ in x]).to(x.device)
    weights = torch.rand(5, picked, generator=draw).to(x.device, x.dtype)
    try:
        wanted = module(x, index, weights)
    except (TypeError, RuntimeError):
        return False  # the module has other arguments, so it is not changed
    for activation in ACTIVATIONS:
        # Every tile is tried, which also compiles its kernel before serving.
        found = (fused_moe(x, index, weights, gate_up, down, activation, tile) for tile in candidate_tiles(x))
        if all(_same_rows(each, wanted) for each in found):
            # Weights are read at each call, because loading weights later replaces them.
            module.forward = lambda x, index, weights, activation=activation: fused_moe(
                x, index, weights, module.gate_up_proj, module.down_proj, activation
            )
            return True
    return False


def fuse_router(module: Any) -> bool:
    """Replace a router's softmax and top-k by one launch if it selects the same experts. Return whether it was
    replaced."""
    weight, picked = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not isinstance(picked, int):
        return False
    if set(dict(module.named_parameters())) != {"weight"} or list(module.buffers()):
        return False
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(picked))
    x = x.to(weight.device, weight.dtype)
    try:
        logits, scores, index = module(x)
    except (TypeError, ValueError, RuntimeError):
        return False
    if logits.shape != (5, len(weight)) or scores.shape != (5, picked) or index.shape != scores.shape:
        return False
    for shared in (True, False):
        found, chosen = topk_softmax(functional.linear(x, weight), picked, shared, scores.dtype)
        # Among equal probabilities another expert may be selected, so the logits of the experts are compared.
        alike = torch.equal(logits.gather(1, index).sort(-1)[0], logits.gather(1, chosen).sort(-1)[0])
        if alike and _same_rows(found.sort(-1)[0], scores.sort(-1)[0]):
            module.forward = _router(module, picked, shared, scores.dtype)
            return True
    return False


def _router(module: Any, picked: int, shared: bool, dtype: torch.dtype) -> Any:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(x.reshape(-1, x.shape[-1]), module.weight)
        return logits, *topk_softmax(logits, picked, shared, dtype)

    return forward


def _same_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results differ only by rounding in every tensor row."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    distance = (a.double() - b.double()).norm(dim=-1)
    return bool((distance <= 8 * torch.finfo(a.dtype).eps * b.double().norm(dim=-1)).all())
