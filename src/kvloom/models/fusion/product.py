"""Matrix products of linear layers. A product may join several layers with the same input. If the engine has LoRA
adapters, a product also has a low-rank term, which adds the contribution of a batch's adapters to the result
(`models/lora`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from kvloom.kernels.fused import linear

__all__ = ["Product", "Term", "can_join", "product_of", "registered"]


class Term(Protocol):
    """A term that is added to the result of a product."""

    def add(self, x: torch.Tensor, out: torch.Tensor, part: int | None = None) -> None:
        """Add the term of the input `x` to `out`, in place. `out` is the result of all joined layers. With `part`,
        `out` is the result of only one joined layer, which has the number `part`."""


class Product:
    """The product of an input with the weights of one linear layer, or of several joined layers. The weights of
    joined layers become views of one tensor.

    A single layer keeps its weight. Each call reads this weight from the layer, because loading weights may replace the
    tensor.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.term: Term | None = None
        self._joined = _join(*layers) if len(layers) > 1 else None

    def register(self) -> Product:
        """Record that this product computes its layers, and return it. `product_of` then finds it."""
        for layer in self.layers:
            vars(layer)["product"] = self
        return self

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the layer, or the joined weights."""
        return self.layers[0].weight if self._joined is None else self._joined[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the layer, or the joined biases."""
        return self.layers[0].bias if self._joined is None else self._joined[1]

    @property
    def sizes(self) -> list[int]:
        """The number of outputs of each layer."""
        return [layer.out_features for layer in self.layers]

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product. With `into`, add the product to `into` in place and return `into`."""
        out = linear(x, self.weight, self.bias, into=into)
        if self.term is not None:
            self.term.add(x, out)
        return out

    def of_part(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """Return the product with the weights of one joined layer, which has the number `part`."""
        layer = self.layers[part]
        out = nn.functional.linear(x, layer.weight, layer.bias)
        if self.term is not None:
            self.term.add(x, out, part)
        return out

    def add_term(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the term to a result that another function has computed."""
        if self.term is not None:
            self.term.add(x, out)


def registered(layer: Any) -> Product | None:
    """Return the product that computes a layer, or None if the layer is not fused."""
    found: Product | None = vars(layer).get("product")
    return found


def product_of(layer: nn.Linear) -> Product:
    """Return the `Product` that computes a linear layer. If the layer has none, create one, and let it replace the
    forward of the layer. A layer whose outputs are summed over ranks keeps its forward, which calls the product.
    """
    found = registered(layer)
    if found is not None:
        return found
    product = Product(layer).register()
    if type(layer) is nn.Linear:
        layer.forward = product  # type: ignore[method-assign, assignment]
    return product


def can_join(a: nn.Linear, b: nn.Linear, rows: bool = False) -> bool:
    """Return whether the weights of two layers fit into one tensor. With `rows`, they must have equal numbers of
    outputs."""
    same = a.in_features == b.in_features and (a.bias is None) == (b.bias is None)
    return same and a.weight.dtype == b.weight.dtype and (not rows or a.out_features == b.out_features)


def _join(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join the weights of several layers into one tensor, and the biases into another. The weights of the layers
    become views of the joined tensor."""
    weight = torch.cat([layer.weight.data for layer in layers])
    biases: list[Any] = [
        part.data for part in (getattr(layer, "bias", None) for layer in layers) if part is not None
    ]
    bias = torch.cat(biases) if biases else None
    at = 0
    for layer in layers:
        end = at + layer.out_features
        layer.weight = nn.Parameter(weight[at:end], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[at:end], requires_grad=False)
        at = end
    return weight, bias
