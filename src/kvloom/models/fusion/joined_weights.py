"""The weights of several linear layers in one tensor, so that one product computes all of them."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["can_join", "join_weights"]


def can_join(a: nn.Linear, b: nn.Linear, rows: bool = False) -> bool:
    """Return whether the weights of two layers fit into one tensor. With `rows`, they must have equal numbers of
    outputs."""
    same = a.in_features == b.in_features and (a.bias is None) == (b.bias is None)
    return same and a.weight.dtype == b.weight.dtype and (not rows or a.out_features == b.out_features)


def join_weights(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join the weights of several layers into one tensor, and the biases into another. The weights of the layers
    become views of the joined tensor."""
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
