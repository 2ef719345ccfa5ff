"""Puts sums and gathers between ranks into a model whose weights are cut.

| module                         | its output on a rank   | what is added                                      |
|--------------------------------|------------------------|----------------------------------------------------|
| linear layer with cut inputs   | a term of the output   | the terms of all ranks are summed                  |
| experts with a part of their   | a term of the output   | the terms of all ranks are summed                  |
| width, or some whole experts   |                        |                                                    |
| norm over a cut dimension      | needs the inputs of    | all ranks gather the inputs before the norm; then  |
|                                | all ranks              | each rank keeps its values of the result           |
| output matrix                  | the logits of a part   | all ranks gather the logits of the whole           |
|                                | of the vocabulary      | vocabulary                                         |

If outputs are summed, only rank 0 has the bias. On other ranks the bias is zero (`cuts`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from .cuts import Cuts, Range, cut_axis
from .experts import is_mixture
from .ranks import RankGroups, Ranks
from .whole_model import whole_of

__all__ = ["LayerCut", "cut_of", "install_collectives", "is_summed", "ranks_of", "set_ranks", "split_head"]


class LayerCut(NamedTuple):
    """How a linear layer is cut: the numbers of inputs and outputs of the whole layer, and the ranges of inputs and
    outputs that the rank has. Empty ranges mean that the rank has all of them."""

    inputs: int
    outputs: int
    input_ranges: list[Range]
    output_ranges: list[Range]

    def of_inputs(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the columns of a matrix [n, inputs] that belong to the rank."""
        return cut_axis(weight, 1, self.input_ranges)

    def of_outputs(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of a matrix [outputs, n] that belong to the rank."""
        return cut_axis(weight, 0, self.output_ranges)


def cut_of(layer: Any) -> LayerCut | None:
    """Return how a linear layer is cut. None for a whole layer."""
    found: LayerCut | None = vars(layer).get("cut")
    return found


def is_summed(layer: Any) -> bool:
    """Return whether the outputs of a linear layer are summed over ranks."""
    return isinstance(layer, _SummedLinear)


def ranks_of(model: Any) -> RankGroups | None:
    """Return the groups of a model that several ranks compute. None for a model on one rank."""
    found: RankGroups | None = vars(model).get("ranks")
    return found


def set_ranks(model: Any, ranks: RankGroups) -> None:
    """Set the groups of ranks that compute a model."""
    vars(model)["ranks"] = ranks


def install_collectives(model: Any, whole: Any, cuts: Cuts, ranks: Ranks, whole_output: bool = False) -> None:
    """Put sums and gathers into a loaded `model`. `whole` is the model without cuts, on the meta device. With
    `whole_output`, every rank computes all logits. Every rank must call this function."""
    for name, module in list(model.named_modules()):
        if (axes := cuts.ranges.get(f"{name}.weight")) and _is_linear(module):
            every = whole.get_submodule(name)
            cut = LayerCut(every.in_features, every.out_features, axes.get(1, []), axes.get(0, []))
            vars(module)["cut"] = cut
        if type(module) is nn.Linear and 1 in cuts.axes(f"{name}.weight"):
            module.__class__ = _SummedLinear
            vars(module)["ranks"] = ranks
        elif (cuts.axes(f"{name}.down_proj")) and is_mixture(module):
            module.register_forward_hook(lambda _, __, found: ranks.sum(found))
            if ranks.shard.rank and isinstance(getattr(module, "identity_expert", None), nn.Identity):
                module.identity_expert = _Zero()
        elif cuts.axes(f"{name}.weight") and _spans_ranks(module, whole.get_submodule(name)):
            _gather_norm(module, whole.get_submodule(name), ranks)
    if not whole_output:
        split_head(model, ranks)


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear


class _Zero(nn.Module):
    """Stands in for an expert that returns its input (LongCat). Without it, the sum over ranks would have the input once
    for each rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class _SummedLinear(nn.Linear):
    """The forward of a linear layer that has a part of its inputs on each rank. Sums the outputs of all ranks. If the
    layer has a `Product`, its result (with the terms of LoRA adapters) is summed."""

    ranks: Ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = vars(self).get("product")
        out = functional.linear(x, self.weight, self.bias) if product is None else product(x)
        return self.ranks.sum(out)


def _spans_ranks(own: Any, whole: Any) -> bool:
    """Return whether a module is a norm that needs values of several ranks. `own` is the module of this rank, and
    `whole` the same module in the whole model. The result is False for a norm over groups of values if every group is
    complete on one rank."""
    if "Norm" not in type(own).__name__ or own.weight.dim() != 1 or "weight" in dict(own.named_buffers()):
        return False
    sizes = [getattr(each, "group_size", None) for each in (own, whole)]
    if sizes[0] is None:
        groups = [getattr(each, "n_groups", 1) for each in (own, whole)]
        sizes = [len(each.weight) // count for each, count in zip((own, whole), groups, strict=True)]
    return sizes[0] != sizes[1]


def _gather_norm(own: Any, whole: Any, ranks: Ranks) -> None:
    """Change the norm `own` of this rank. The changed norm gathers its inputs from all ranks, computes the norm of all
    values, and returns only the values of this rank. `whole` is the same norm in the whole model."""
    size = len(own.weight)
    total = len(whole.weight)
    copies = size * ranks.shard.count // total  # ranks that share heads have equal values, which count once
    own_first = ranks.shard.rank // copies * size

    def joined(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(ranks.gather(x)[::copies]), -1)

    norm = whole.to_empty(device=own.weight.device).to(own.weight.dtype).requires_grad_(False)
    for name, tensor in own.named_parameters():
        norm.get_parameter(name).copy_(joined(tensor.data))

    def forward(x: torch.Tensor, *gates: torch.Tensor | None, **named: Any) -> torch.Tensor:
        every = [None if gate is None else joined(gate) for gate in gates]
        some = {key: joined(value) if torch.is_tensor(value) else value for key, value in named.items()}
        found: torch.Tensor = norm(joined(x), *every, **some)[..., own_first : own_first + size]
        return found.contiguous()

    own.forward = forward
    own.is_fused = True


def split_head(model: Any, ranks: Ranks) -> None:
    """Let each rank compute the logits of a part of the vocabulary. If the vocabulary cannot be divided, every rank
    computes all logits. Call `set_whole` first."""
    head, shard = model.get_output_embeddings(), ranks.shard
    if not _is_linear(head) or head.out_features % shard.count:
        return
    size = head.out_features // shard.count
    part = slice(shard.rank * size, (shard.rank + 1) * size)
    is_tied = head.weight is model.get_input_embeddings().weight
    weight = head.weight.data[part] if is_tied else head.weight.data[part].clone()
    bias = None if head.bias is None else head.bias.data[part].clone()
    if not is_tied:
        whole = whole_of(model)
        if whole is not None:
            name = next(name for name, each in model.named_parameters() if each is head.weight)
            whole.record(name, head.weight.data)
        head.weight = nn.Parameter(weight, requires_grad=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = ranks.gather(functional.linear(x, weight, bias))
        return torch.cat(list(parts), -1)

    head.forward = forward
