"""One flat buffer of bytes, seen as the pages of every layer.

    page   [layer 0 | layer 1 | …]            layer   [field 0: tokens by shape | field 1: … ]

A view is a plain strided tensor over the pool: page `p` of a group begins at byte `p * page_stride`. Views
copy nothing and know no tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvloom.core import DTYPE_BYTES, PageGroup, PoolLayout

__all__ = ["TORCH_DTYPES", "LayerView", "allocate", "layer_views"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
}


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's fields over all pages.

    `fields[name]` is [pages, tokens, *shape] for a token layer and [pages, *shape] for a state. `group` and
    `run` say which table leads to its pages: `cache.table(group)[run]`.
    """

    group: int
    run: int
    fields: dict[str, torch.Tensor]


def allocate(layout: PoolLayout, slabs: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The pool's bytes. Uninitialised: nothing that was not written is ever read."""
    if slabs < 2:
        raise ValueError(f"a pool of {slabs} slabs cannot lend any: slab 0 is reserved, so give it 2 or more")
    return torch.empty(slabs * layout.slab_bytes, dtype=torch.uint8, device=device)


def layer_views(buffer: torch.Tensor, layout: PoolLayout) -> dict[str, LayerView]:
    """Every layer's view of `buffer`, by the layer's name."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"the pool is one contiguous row of uint8, got {buffer.dtype} {tuple(buffer.shape)}")
    if buffer.numel() % layout.slab_bytes:
        raise ValueError(f"{buffer.numel()} bytes are no whole number of slabs of {layout.slab_bytes}")
    return {
        name: _layer_view(buffer, layout, group, name) for group in layout.groups for name in group.layers
    }


def _layer_view(buffer: torch.Tensor, layout: PoolLayout, group: PageGroup, name: str) -> LayerView:
    run, place = group.locate(name)
    pages = buffer.numel() // layout.slab_bytes * group.pages_per_slab
    tokens = (group.block_tokens,) if group.spec.unit == "token" else ()
    offset = place * group.layer_bytes
    fields = {}
    for field in group.spec.fields:
        size = DTYPE_BYTES[field.dtype]
        shape = (*tokens, *field.shape)
        typed = buffer.view(TORCH_DTYPES[field.dtype])
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        fields[field.name] = typed.as_strided(
            (pages, *shape), (group.page_stride // size, *strides), offset // size
        )
        offset += size * math.prod(shape)
    return LayerView(group.index, run, fields)
