"""Linear layers of quantised checkpoints. A layer is dense if its result is its input times its weight, plus its bias.
kvloom uses the weight directly only for dense layers. A quantised layer has another class, packed weights, a weight of
a tensor subclass, or a forward of its own. Only this forward can compute its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["dense_copy", "is_dense", "is_dense_weight", "replace_up_projections"]

DENSE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_dense(layer: Any) -> bool:
    """Return whether the result of a linear layer is the product of its input with its weight, plus its bias. False for
    quantised layers, and for layers with hooks."""
    if type(layer) is not nn.Linear or layer._forward_pre_hooks or layer._forward_hooks:
        return False
    if not is_dense_weight(layer._parameters.get("weight")):
        return False
    # A fused layer also counts as dense: kvloom's forward of it has a `Product` (see `fusion.product`).
    return "forward" not in vars(layer) or "product" in vars(layer)


def is_dense_weight(weight: Any) -> bool:
    """Return whether a weight is a plain tensor of floating-point numbers that are not quantised."""
    is_plain = isinstance(weight, torch.Tensor) and type(weight.data) is torch.Tensor
    return is_plain and weight.dtype in DENSE_DTYPES


@torch.no_grad()
def dense_copy(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """Return a dense layer with the weights of `layer`, which is quantised and has no bias. To get the weights,
    this function runs `layer` on an identity matrix, so it works for every format."""
    device = next(layer.parameters(), next(layer.buffers(), torch.empty(0))).device
    weight = layer(torch.eye(layer.in_features, device=device, dtype=dtype)).T.contiguous()
    dense = nn.Linear(layer.in_features, len(weight), bias=False, device="meta")
    dense.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return dense


def replace_up_projections(model: Any, dtype: torch.dtype) -> None:
    """Replace quantised `kv_b_proj` layers of MLA modules by dense layers. Attention in latent space needs the
    weights of these layers, because it multiplies queries by them."""
    for module in model.modules():
        layer = getattr(module, "kv_b_proj", None)
        if isinstance(layer, nn.Module) and not is_dense(layer):
            module.kv_b_proj = dense_copy(layer, dtype)
