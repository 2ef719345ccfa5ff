"""Views of one flat byte buffer as the pages of every layer.

    page   [layer 0 | layer 1 | …]            layer   [field 0: tokens by shape | field 1: … ]

A view is a strided tensor over the pool. Page `p` of a group begins at byte `p * page_stride`. Views copy nothing and
do not depend on block tables. `order` selects the order of axes in memory. The axes of the tensor are the same in both
orders:

| order | keys, values        | scales        | 8-bit values        | used by                                         |
|-------|---------------------|---------------|---------------------|-------------------------------------------------|
| HND   | heads, tokens, dims | heads, tokens | heads, dims, tokens | our kernels: the data of a head is dense        |
| NHD   | tokens, heads, dims | tokens, heads | tokens, heads, dims | engines that need all heads of a token together |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvloom.core import DTYPE_BYTES, Order, PageGroup, PoolLayout
from kvloom.kernels.dtypes import TORCH_DTYPES

__all__ = ["LayerView", "Order", "allocate", "layer_views"]


@dataclass(frozen=True, slots=True)
class LayerView:
    """The fields of one layer over all pages. `fields[name]` is [pages, tokens, *shape] for a token layer, and
    [pages, *shape] for a state.

    `group` and `run` select the block table of the layer: `cache.table(group)[run]`. A group whose layers are split
    over several pages has one block table per page, numbered by `run`.
    """

    group: int
    run: int
    fields: dict[str, torch.Tensor]


def allocate(layout: PoolLayout, slabs: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate the bytes of the pool on a device, uninitialised. The engine reads only bytes that were written
    before."""
    if slabs < 2:
        raise ValueError(f"a pool of {slabs} slabs has none to use: slab 0 is reserved, so give it 2 or more")
    return torch.empty(slabs * layout.slab_bytes, dtype=torch.uint8, device=device)


def layer_views(buffer: torch.Tensor, layout: PoolLayout, order: Order = "HND") -> dict[str, LayerView]:
    """Return every layer's view of `buffer` by layer name. Copies nothing."""
    if order not in ("HND", "NHD"):
        raise ValueError(f"unknown page order {order!r}; known: HND, NHD")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"the pool is one contiguous row of uint8, got {buffer.dtype} {tuple(buffer.shape)}")
    if buffer.numel() % layout.slab_bytes:
        raise ValueError(
            f"{buffer.numel()} bytes are not a whole number of slabs of {layout.slab_bytes} bytes"
        )
    return {
        name: _layer_view(buffer, layout, group, name, order)
        for group in layout.groups
        for name in group.layers
    }


def _layer_view(
    buffer: torch.Tensor, layout: PoolLayout, group: PageGroup, name: str, order: Order
) -> LayerView:
    run, place = group.locate(name)
    pages = buffer.numel() // layout.slab_bytes * group.pages_per_slab
    tokens = (group.page_tokens,) if group.spec.unit == "token" else ()
    offset = place * group.layer_bytes
    fields = {}
    for field in group.spec.fields:
        size = DTYPE_BYTES[field.dtype]
        shape = (*tokens, *field.shape)
        if offset % size:
            raise ValueError(
                f"field {field.name!r} of {name!r} begins at byte {offset} of its page, where {field.dtype} cannot: "
                "put fields of larger dtypes first, or pad the one before it"
            )
        typed = buffer.view(TORCH_DTYPES[field.dtype])
        strides = _strides(shape, field.axes(order) if tokens else range(len(shape)))
        fields[field.name] = typed.as_strided(
            (pages, *shape), (group.page_stride // size, *strides), offset // size
        )
        offset += size * math.prod(shape)
    return LayerView(group.index, run, fields)


def _strides(shape: tuple[int, ...], axes: Iterable[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(tuple(axes)):
        strides[axis] = step
        step *= shape[axis]
    return strides
