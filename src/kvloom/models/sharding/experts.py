"""Expert parallelism: a rank has some whole experts of every mixture, instead of a part of every expert.

    experts of a mixture    | 0 1 2 3 | 4 5 6 7 |
                              rank 0    rank 1       the outputs of both ranks are summed (`collectives`)

All ranks have the same hidden states, and their routers select the same experts. A rank computes the pairs of a token
and one of its own experts. All other pairs get the index after the last own expert, which transformers' experts skip,
and the weight 0.

In Llama 4, every expert computes all tokens, and the router's weights are already in the inputs. A rank then computes the
inputs of its own experts, and the outputs of all other experts are 0.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from kvloom.combinations import refused
from kvloom.models.specs import ModelError

from .ranks import Shard

__all__ = ["divide_experts", "is_mixture"]


def is_mixture(module: Any) -> bool:
    """Return whether a module has the weights of all experts of a mixture: tensors of [expert, …]."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, torch.Tensor) and down.dim() == 3


def divide_experts(own: nn.Module, whole: nn.Module, shard: Shard) -> None:
    """Change `own`, the model of one rank without data: each mixture gets a part of the experts of `whole`, with their
    whole width. Raises ModelError if no experts can be divided."""
    names = [name for name, module in whole.named_modules() if _skips_pairs(module) or _sees_all(module)]
    if not names:
        raise ModelError(refused("expert parallel, experts", model=type(whole).__name__))
    for name in names:
        every: Any = whole.get_submodule(name)
        count = len(every.down_proj)
        if count % shard.count:
            raise ModelError(
                f"{name} has {count} experts, and tensor_parallel {shard.count} does not divide this number: give another "
                "number of ranks, or turn expert_parallel off"
            )
        own.set_submodule(name, _part(every, own.get_submodule(name), shard))


def _part(whole: Any, own: Any, shard: Shard) -> Any:
    """Return the experts of one rank, without data. `own` are experts with a part of their width, and with the dtype of the
    result."""
    config = getattr(whole, "config", None)
    found: Any = copy.deepcopy(whole, {} if config is None else {id(config): own.config})
    total = len(whole.down_proj)
    found.num_experts = total // shard.count
    for name, weight in list(found.named_parameters(recurse=False)):
        count = found.num_experts if len(weight) == total else len(weight)
        part = own.get_parameter(name).data.new_empty((count, *weight.shape[1:]))
        setattr(found, name, nn.Parameter(part, requires_grad=False))
    first = shard.rank * found.num_experts
    if _skips_pairs(found):
        found._is_expert_parallel = True
        found.register_forward_pre_hook(_SkippedPairs(first, found.num_experts))
    else:
        rows = _OwnRows(first, found.num_experts, total)
        found.register_forward_pre_hook(rows.take)
        found.register_forward_hook(rows.place)
    return found


def _skips_pairs(module: Any) -> bool:
    """Return whether the experts of a module are transformers' own, which can skip pairs."""
    return is_mixture(module) and hasattr(module, "_is_expert_parallel")


def _sees_all(module: Any) -> bool:
    """Return whether every expert of a module computes all tokens. The only argument of its forward is the inputs of
    all experts."""
    return is_mixture(module) and len(inspect.signature(type(module).forward).parameters) == 2


class _SkippedPairs:
    """Marks the pairs of a token and an expert of another rank. `first` is the first own expert, and `count` the number
    of own experts."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __call__(self, _: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, index, weights = given
        own = index - self._first
        others = (own < 0) | (own >= self._count)
        return x, own.masked_fill(others, self._count), weights.masked_fill(others, 0)


class _OwnRows:
    """Takes the inputs of own experts from those of all experts, and puts their outputs back into the place of these
    inputs. `total` is the number of all experts."""

    def __init__(self, first: int, count: int, total: int) -> None:
        self._first, self._count, self._total = first, count, total

    def take(self, _: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = given[0].view(self._total, -1, given[0].shape[-1])
        return (x[self._first : self._first + self._count].flatten(0, 1),)

    def place(self, _: Any, given: tuple[torch.Tensor, ...], found: torch.Tensor) -> torch.Tensor:
        every = found.new_zeros((self._total, len(found) // self._count, found.shape[-1]))
        every[self._first : self._first + self._count] = found.view(self._count, -1, found.shape[-1])
        return every.flatten(0, 1)
