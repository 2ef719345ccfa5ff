"""Selects the slice of each weight that a rank loads. A weight is cut where its shape in the rank's model is
smaller.

Most axes are cut into N equal pieces, one per rank. An axis may consist of several parts, such as [q|k|v]
or the [x|B|C] of a convolution. Each part is then cut into pieces separately. If ranks share heads, a part
has fewer than N pieces, and neighbouring ranks load the same piece.

    pieces                  = size in the whole model / size in the rank's model
    piece that a rank loads = rank * pieces // N
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvloom.models.specs import ModelError

from .experts import is_mixture
from .ranks import Shard

__all__ = ["Cuts", "Range", "computed_buffers", "cut_axis", "find_cuts"]

Range = tuple[int, int]
COMPUTED = ("mup_vector", "layernorm.weight")
"""Buffers that a mixer computes from the sizes of its parts, also on a rank. The norms of Falcon Mamba have weights of
ones."""


class Cuts:
    """Cuts weights by name. `ranges` has, for each cut axis of a weight, the ranges that the rank loads."""

    def __init__(self, ranges: dict[str, dict[int, list[Range]]], zeroed: frozenset[str]) -> None:
        """`zeroed` are biases that only rank 0 adds, because their outputs are summed over ranks. On this rank they
        are set to zero."""
        self.ranges, self._zeroed = ranges, zeroed

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of the weight `whole`, which has the name `name`. The part is a copy if the weight was
        cut."""
        if name in self._zeroed:
            return torch.zeros_like(whole)
        found = whole
        for axis, ranges in self.ranges.get(name, {}).items():
            found = cut_axis(found, axis, ranges)
        return found.contiguous()

    def axes(self, name: str) -> tuple[int, ...]:
        """Return the axes on which a weight is cut."""
        return tuple(self.ranges.get(name, ()))


def cut_axis(whole: torch.Tensor, axis: int, ranges: list[Range]) -> torch.Tensor:
    """Return the ranges of an axis, one after the other. Without ranges, return the whole tensor."""
    if not ranges:
        return whole
    return torch.cat([whole.narrow(axis, begin, end - begin) for begin, end in ranges], axis)


def find_cuts(whole: nn.Module, own: nn.Module, shard: Shard) -> Cuts:
    """Return how each weight of a model is cut for one rank. Compares the shapes of the weights in the whole model
    (`whole`) and in the rank's model (`own`), both without data. Raises ModelError for a weight that cannot be cut."""
    ranges: dict[str, dict[int, list[Range]]] = {}
    zeroed = set()
    named = dict(_tensors(own))
    for name, tensor in _tensors(whole):
        other = named.get(name)
        if other is None or other.dim() != tensor.dim():
            raise ModelError(f"weight {name} has no counterpart on a rank")
        for axis in range(tensor.dim()):
            if tensor.shape[axis] != other.shape[axis]:
                parts = _parts(whole, own, name, tensor, axis)
                ranges.setdefault(name, {})[axis] = _ranges(name, tensor, other, axis, parts, shard)
    kept = {name for name, _ in whole.named_parameters()} | set(whole.state_dict()) | computed_buffers(whole)
    lost = [name for name in ranges if name not in kept]
    if lost:
        raise ModelError(f"{lost[0]} depends on the number of heads and is not a weight, so it cannot be cut")
    for name, axes in ranges.items():
        bias = _summed_bias(name, tuple(axes), named)
        if bias is not None and bias not in ranges and shard.rank:
            zeroed.add(bias)
    return Cuts(ranges, frozenset(zeroed))


def computed_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not weights, and that mixers compute from the sizes of their parts."""
    stored = set(model.state_dict())
    return {name for name, _ in model.named_buffers() if name.endswith(COMPUTED) and name not in stored}


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _summed_bias(name: str, axes: tuple[int, ...], named: dict[str, torch.Tensor]) -> str | None:
    """Return the name of the bias that belongs to the weight `name`, if the outputs of this weight are summed over
    ranks. Otherwise return None. `axes` are the cut axes of the weight. Also return None if there is no bias."""
    if name.endswith(".weight") and axes == (1,):
        bias = name.removesuffix("weight") + "bias"
    elif name.endswith("down_proj") and named[name].dim() == 3:
        bias = f"{name}_bias"
    else:
        return None
    return bias if bias in named else None


def _ranges(
    name: str,
    tensor: torch.Tensor,
    other: torch.Tensor,
    axis: int,
    parts: tuple[Sequence[int], Sequence[int]],
    shard: Shard,
) -> list[Range]:
    sizes, own = parts
    if sum(sizes) != tensor.shape[axis] or sum(own) != other.shape[axis] or len(sizes) != len(own):
        raise ModelError(
            f"weight {name} {tuple(tensor.shape)} cannot be cut to {tuple(other.shape)}: its parts are not known"
        )
    found, begin = [], 0
    for size, mine in zip(sizes, own, strict=True):
        pieces = size // mine if mine else 1
        if mine * pieces != size or shard.count % pieces:
            raise ModelError(
                f"weight {name}: a part of {size} cannot be cut to {mine} on {shard.count} ranks"
            )
        at = begin + shard.rank * pieces // shard.count * mine
        found.append((at, at + mine))
        begin += size
    return found


def _parts(
    whole: nn.Module, own: nn.Module, name: str, tensor: torch.Tensor, axis: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the sizes of the parts of a weight's axis, in the whole model (`whole`) and in the rank's model (`own`).
    An axis has several parts if a weight joins several matrices, such as [q|k|v]."""
    path, _, leaf = name.rpartition(".")
    if leaf in ("weight", "bias"):
        path, _, leaf = path.rpartition(".")
    sizes = tuple(_part_sizes(model.get_submodule(path), leaf, axis) for model in (whole, own))
    if sizes[0] and sizes[1]:
        return sizes[0], sizes[1]
    other = dict(_tensors(own))[name]
    is_expert = axis == 0 and is_mixture(whole.get_submodule(path))  # the axis of the experts has one part
    count = 2 if _is_pair(whole.get_submodule(path), leaf) and not is_expert else 1
    return [tensor.shape[axis] // count] * count, [other.shape[axis] // count] * count


def _part_sizes(owner: Any, leaf: str, axis: int) -> Sequence[int]:
    """Return the sizes of the parts that a weight of a mixer or an attention module joins, such as [q|k|v]. Return
    an empty sequence if the weight has one part."""
    if axis and leaf not in COMPUTED:
        return ()
    inner, states = getattr(owner, "intermediate_size", 0), getattr(owner, "ssm_state_size", 0)
    if inner and states and hasattr(owner, "n_groups"):  # Mamba-2
        both = [owner.n_groups * states] * 2
        if leaf == "conv1d":
            return [inner, *both]
        if leaf == "in_proj" or leaf in COMPUTED:
            return [inner, inner, *both, owner.num_heads]
    elif inner and states and leaf == "in_proj":  # Mamba: x and the gate
        return [inner, inner]
    elif hasattr(owner, "key_dim") and hasattr(owner, "value_dim") and leaf in JOINED:
        return [owner.key_dim, owner.key_dim, owner.value_dim]
    elif hasattr(owner, "qkv_dim") and leaf == "conv1d":  # Kimi Linear
        return [owner.qkv_dim] * 3
    elif leaf in ("qkv_proj", "Wqkv") and hasattr(owner, "num_key_value_groups"):
        config = owner.config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        return [heads * owner.head_dim, *[shared * owner.head_dim] * 2]
    elif leaf in JOINED and not (inner and states) and not hasattr(owner, "slope_rate"):
        raise ModelError(
            f"the parts of {leaf} in {type(owner).__name__} are not known, so it cannot be divided between ranks"
        )
    return ()


JOINED = ("conv1d", "in_proj", "in_proj_qkv", "qkv_proj", "Wqkv", "query_key_value")
"""Weights of mixers and attention modules that join several parts in most families. One whose parts are not known is
refused. In the mixer of MiniMax (`slope_rate`) the parts of a head are adjacent."""
GATES = ("gate_up_proj", "gate_up_proj_bias", "up_gate_proj", "input_linear")
"""Weights with the gate and the up-projection of an MLP."""


def _is_pair(owner: Any, leaf: str) -> bool:
    """Return whether a weight has the gate of an MLP, followed by the up-projection. Such a weight has two parts, which
    are cut separately. If experts interleave gate and up-projection, the result is False, because their weight can be
    cut as a whole."""
    return leaf in GATES and getattr(owner, "is_concatenated", True)
