"""The config of one of N ranks. Numbers of heads, widths of MLPs and channels of states are divided by N.

| field                        | if it can be divided by N | otherwise                                         |
|------------------------------|---------------------------|---------------------------------------------------|
| attention heads              | each rank has 1/N         | refused                                           |
| KV heads                     | each rank has 1/N         | if N is a multiple of their number, ranks share   |
|                              |                           | heads; else refused                               |
| widths of MLPs and experts   | each rank has 1/N         | every rank computes the whole MLP                 |
| heads and channels of states | each rank has 1/N         | every rank computes the whole mixer               |
| groups of B and C (Mamba-2)  | each rank has 1/N         | if N is a multiple of their number, ranks share   |
|                              |                           | groups; else every rank computes the whole mixer  |
| MLA latents, embeddings      | every rank has all        | every rank has all                                |

Every other field keeps its value. The hidden size is never divided.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvloom.core import Field, LayerSpec
from kvloom.models.specs import ModelError

__all__ = ["check_pages", "shard_config"]

HEADS = ("num_attention_heads", "num_attention_heads_per_layer")
KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
)
MAMBA2 = (
    ("mamba_n_heads", "mamba_n_groups", "mamba_expand"),
    ("mamba_num_heads", "n_groups", "expand"),
    ("num_heads", "n_groups", "expand"),
)
"""Fields of Mamba-2 mixers, by family: heads, groups, and inner size divided by hidden size."""
DELTA = (("linear_num_key_heads", "linear_num_value_heads"), ("linear_num_heads",))
"""Fields of delta-rule mixers, by family: the numbers of heads that are divided together."""


def shard_config(config: Any, count: int) -> Any:
    """Return the config of one of `count` ranks. Raises ModelError if the attention heads cannot be divided,
    or if layers have different numbers of them."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    fields, names = vars(text), getattr(text, "attribute_map", {})
    different = {"head_dim", *HEADS, *KV_HEADS, *WIDTHS} & set(
        getattr(text, "per_layer_attributes", None) or ()
    )
    if different:
        raise ModelError(
            f"model type {text.model_type!r} cannot be divided between ranks, because its layers differ in "
            f"{', '.join(sorted(different))}"
        )
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) and not _is_recurrent(fields):
        raise ModelError(f"model type {text.model_type!r} has no num_attention_heads to divide between ranks")
    if isinstance(heads, int) and getattr(text, "head_dim", None) is None:
        fields[names.get("head_dim", "head_dim")] = text.hidden_size // heads
    changed = {name: _divide_heads(getattr(text, name, None), name, count) for name in HEADS}
    changed |= {name: _divide_kv_heads(getattr(text, name, None), name, count) for name in KV_HEADS}
    for name, number in changed.items():
        if number:
            fields[names.get(name, name)] = number
    is_inner = fields.get("intermediate_size") == _inner_size(fields, "expand")
    for name in WIDTHS:
        if not (is_inner and name == "intermediate_size"):
            _divide_width(fields, names.get(name, name), count)
    _divide_mixers(fields, count)
    return found


def check_pages(
    whole: Mapping[str, LayerSpec], own: Mapping[str, LayerSpec], shard_count: int, model_type: str
) -> None:
    """Raise ModelError unless the pages of a rank (`own`) are a part of the pages of the `whole` model: the same
    layers and fields, with fewer heads or channels. Configs that derive the head size from the number of heads fail
    this check."""
    for name, spec in whole.items():
        other = own.get(name)
        same = other is not None and [f.name for f in spec.fields] == [f.name for f in other.fields]
        if not same or other is None:
            raise ModelError(f"model type {model_type!r}: layer {name} stores other fields on a rank")
        for field, part in zip(spec.fields, other.fields, strict=True):
            _check_field(name, spec, field, part, shard_count, model_type)


def _check_field(layer: str, spec: LayerSpec, whole: Field, own: Field, count: int, model_type: str) -> None:
    axis = whole.shard_axis if spec.unit == "token" else None
    changed = [i for i, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    if spec.unit == "token":
        heads = None if axis is None else max(1, whole.shape[axis] // count)
        fits = changed in ([], [axis]) and (axis is None or own.shape[axis] == heads)
    else:
        fits = all(own.shape[i] < whole.shape[i] for i in changed)
    if not fits:
        raise ModelError(
            f"model type {model_type!r} cannot be divided between {count} ranks: field {whole.name} of {layer} would "
            f"change from {whole.shape} to {own.shape}; its head size depends on the number of heads, or its heads are "
            "not divided"
        )


def _divide_heads(heads: Any, name: str, count: int) -> Any:
    if not heads:
        return heads
    if isinstance(heads, list | tuple):
        return [_divide_heads(each, name, count) for each in heads]
    if heads % count:
        raise ModelError(
            f"{name} {heads} is not divisible by tensor_parallel {count}: give a number of ranks that divides it"
        )
    return heads // count


def _divide_kv_heads(heads: Any, name: str, count: int) -> Any:
    if not heads:
        return heads
    if isinstance(heads, list | tuple):
        return [_divide_kv_heads(each, name, count) for each in heads]
    if heads % count and count % heads:
        raise ModelError(
            f"{name} {heads} and tensor_parallel {count}: one must be a multiple of the other, so that each rank has "
            "whole KV heads"
        )
    return max(1, heads // count)


def _divide_width(fields: dict[str, Any], name: str, count: int) -> None:
    width = fields.get(name)
    if isinstance(width, list | tuple):
        if all(each % count == 0 for each in width):
            fields[name] = [each // count for each in width]
    elif isinstance(width, int) and width and width % count == 0:
        fields[name] = width // count


def _divide_mixers(fields: dict[str, Any], count: int) -> None:
    """Divide the heads and channels of recurrent mixers. `fields` is the `__dict__` of a config. Writing to `__dict__`
    skips the type checks of the config class, which would refuse a fraction as `expand`."""
    for heads, groups, expand in MAMBA2:
        if not (fields.get(heads) and fields.get(groups)):
            continue
        if fields[heads] % count or (fields[groups] % count and count % fields[groups]):
            return
        inner = _inner_size(fields, expand)
        fields[heads] //= count
        fields[groups] = max(1, fields[groups] // count)
        if fields.get("mamba_d_ssm"):
            fields["mamba_d_ssm"] //= count
        if inner:
            fields[expand] = _quotient(fields[expand], count)
            if fields.get("intermediate_size") == inner:
                fields["intermediate_size"] //= count
        return
    for names in DELTA:
        if all(fields.get(name) for name in names):
            if not any(fields[name] % count for name in names):
                for name in names:
                    fields[name] //= count
            return
    for expand in ("expand", "mamba_expand"):
        inner = _inner_size(fields, expand)
        if inner and inner % count == 0 and (expand == "expand" or fields[expand] % count == 0):
            fields[expand] = _quotient(fields[expand], count)
            if expand == "expand" and fields.get("intermediate_size") == inner:
                fields["intermediate_size"] //= count
            return


def _inner_size(fields: Mapping[str, Any], expand: str) -> int:
    """Return the inner size of a Mamba mixer, or 0 if the config has no field `expand`."""
    return int(fields[expand] * fields["hidden_size"]) if fields.get(expand) else 0


def _quotient(number: float, count: int) -> float:
    return number // count if number % count == 0 else number / count


def _is_recurrent(fields: Mapping[str, Any]) -> bool:
    return bool(_inner_size(fields, "expand")) and "hidden_size" in fields
