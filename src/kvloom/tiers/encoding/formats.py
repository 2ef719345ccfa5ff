"""Converts pages to and from the memory formats of other systems, and between block sizes. Needs only numpy.

    a page of kvloom    [layer][field: keys, values, …][heads, tokens, dims]    order HND
                        [layer][field: keys, values, …][tokens, heads, dims]    order NHD

In HND, 8-bit values are [heads, dims, tokens] (`core.Field.axes`).

| format | one block                           | used by                                                |
|--------|-------------------------------------|--------------------------------------------------------|
| 2LTD   | [2, layers, tokens, heads·dims]     | LMCache's chunks (KV_2LTD)                             |
| T2D    | [layers, tokens, 2, heads·dims]     | layer by layer, keys beside values (KV_T2D)            |
| 2TD    | [layers, 2, tokens, heads·dims]     | layer by layer (KV_2TD)                                |
| NHD    | [layers, 2, tokens, heads, dims]    | FlashInfer and vLLM, token-major                       |
| HND    | [layers, 2, heads, tokens, dims]    | FlashInfer and vLLM, head-major                        |
| MLA    | [layers, tokens, dims]              | one latent per token (KV_MLA)                          |

Only the order of values changes, so every element type of 1, 2, 4 or 8 bytes works. This module does not depend on
tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloom.core import DTYPE_BYTES, Field, Order

__all__ = [
    "Format",
    "Order",
    "PageFields",
    "PageShape",
    "from_format",
    "join_units",
    "split_units",
    "to_format",
]

Format = Literal["2LTD", "T2D", "2TD", "NHD", "HND", "MLA"]
_ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DTYPES = {1: "int8", 2: "bf16", 4: "fp32", 8: "fp64"}
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PageFields:
    """The fields of a page. The page has `layers` layers of `layer_bytes` bytes each, then padding. `tokens` is the
    number of tokens, or 0 for a recurrent state."""

    fields: tuple[Field, ...]
    layers: int
    tokens: int
    layer_bytes: int
    page_bytes: int
    order: Order = "HND"

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of a page that are in no field."""
        units = self.tokens or 1
        used = units * sum(DTYPE_BYTES[field.dtype] * math.prod(field.shape) for field in self.fields)
        ends = [(at + used, at + self.layer_bytes) for at in self._layer_starts]
        ends.append((self.layers * self.layer_bytes, self.page_bytes))
        return [(start, stop) for start, stop in ends if start < stop]

    @property
    def _layer_starts(self) -> range:
        return range(0, self.layers * self.layer_bytes, self.layer_bytes)

    def clear_from(self, page: Any, tokens: int) -> None:
        """Set the tokens of a page from index `tokens` on to 0, in all fields. Does nothing for a recurrent state."""
        if self.tokens:
            for view in self.views(page):
                view[:, tokens:] = 0

    def clear_padding(self, page: Any) -> None:
        """Set the padding of a page to 0."""
        data = memoryview(page).cast("B")
        for start, stop in self.padding:
            data[start:stop] = bytes(stop - start)

    def views(self, page: Any) -> list[Array]:
        """Return a view of each field as [layers, tokens, *shape], whatever the order in memory."""
        data = np.frombuffer(memoryview(page).cast("B"), np.uint8)
        if len(data) != self.page_bytes:
            raise ValueError(f"the page has {len(data)} bytes; {self} has {self.page_bytes}")
        layers = data[: self.layers * self.layer_bytes].reshape(self.layers, self.layer_bytes)
        found, at = [], 0
        for field in self.fields:
            element = DTYPE_BYTES[field.dtype]
            shape = (*((self.tokens,) if self.tokens else ()), *field.shape)
            axes = field.axes(self.order) if self.tokens else tuple(range(len(shape)))
            size = element * math.prod(shape)
            stored = layers[:, at : at + size].view(_ELEMENTS[element])
            in_memory = stored.reshape(self.layers, *(shape[axis] for axis in axes))
            found.append(in_memory.transpose(0, *(1 + int(axis) for axis in np.argsort(axes))))
            at += size
        return found


def split_units(page: Any, shape: PageFields, units: Sequence[Any], unit: PageFields) -> None:
    """Copy the tokens of a page to smaller pages (`units`), in order. If all units together have fewer tokens than
    the page, only the first tokens are copied. A recurrent state is copied as a whole, to one unit."""
    _copy_units(page, shape, units, unit, joined=False)


def join_units(units: Sequence[Any], unit: PageFields, page: Any, shape: PageFields) -> None:
    """Copy the tokens of smaller pages (`units`) to a page, in order. If all units together have fewer tokens than
    the page, the rest of the page is set to 0. Padding is also set to 0."""
    _copy_units(page, shape, units, unit, joined=True)
    shape.clear_padding(page)


def _copy_units(page: Any, shape: PageFields, units: Sequence[Any], unit: PageFields, joined: bool) -> None:
    parts = [unit.views(one) for one in units]
    for number, whole in enumerate(shape.views(page)):
        for at, part in enumerate(parts):
            tokens = slice(at * unit.tokens, (at + 1) * unit.tokens) if unit.tokens else slice(None)
            if joined:
                whole[:, tokens] = part[number]
            else:
                part[number][...] = whole[:, tokens]
        if joined and unit.tokens:
            whole[:, len(parts) * unit.tokens :] = 0


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of a page in kvloom. `fields` is 2 for keys and values, and 1 for a latent (MLA)."""

    layers: int
    tokens: int
    heads: int
    dims: int
    element_bytes: int
    order: Order = "HND"
    fields: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "tokens", "heads", "dims"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.element_bytes not in _ELEMENTS:
            raise ValueError(
                f"element_bytes={self.element_bytes} is none of {', '.join(map(str, _ELEMENTS))}"
            )
        if self.order not in get_args(Order):
            raise ValueError(f"order={self.order!r} is none of {get_args(Order)}")
        if self.fields not in (1, 2):
            raise ValueError(f"fields={self.fields}: 2 for keys and values, 1 for a latent")

    @property
    def page_bytes(self) -> int:
        return self.layers * self.fields * self.tokens * self.heads * self.dims * self.element_bytes

    def views(self, page: Any) -> list[Array]:
        """Return a view of each field as [layers, tokens, heads, dims], whatever the order in memory."""
        dtype = _DTYPES[self.element_bytes]
        names = ("k", "v") if self.fields == 2 else ("latent",)
        fields = tuple(Field(name, (self.heads, self.dims), dtype, shard_axis=0) for name in names)
        layer = self.page_bytes // self.layers
        return PageFields(fields, self.layers, self.tokens, layer, self.page_bytes, self.order).views(page)


# The order of the axes (layers, fields, tokens, heads, dims) in each format.
_AXES: dict[Format, tuple[int, ...]] = {
    "2LTD": (1, 0, 2, 3, 4),
    "T2D": (0, 2, 1, 3, 4),
    "2TD": (0, 1, 2, 3, 4),
    "NHD": (0, 1, 2, 3, 4),
    "HND": (0, 1, 3, 2, 4),
    "MLA": (0, 1, 2, 3, 4),
}


def _block_shape(shape: PageShape, kind: Format) -> tuple[int, ...]:
    """Return the shape of a block in the format `kind`."""
    layers, tokens, width = shape.layers, shape.tokens, shape.heads * shape.dims
    return {
        "2LTD": (2, layers, tokens, width),
        "T2D": (layers, tokens, 2, width),
        "2TD": (layers, 2, tokens, width),
        "NHD": (layers, 2, tokens, shape.heads, shape.dims),
        "HND": (layers, 2, shape.heads, tokens, shape.dims),
        "MLA": (layers, tokens, width),
    }[kind]


def _check(shape: PageShape, kind: Format) -> None:
    if kind not in _AXES:
        raise ValueError(f"format {kind!r} is none of {', '.join(_AXES)}")
    if (kind == "MLA") != (shape.fields == 1):
        raise ValueError(
            f"format {kind} has {1 if kind == 'MLA' else 2} fields, this page {shape.fields}: "
            "use MLA for latents, the others for keys and values"
        )


def to_format(page: Any, shape: PageShape, kind: Format) -> Array:
    """Return a page in the format `kind`, as a new array of unsigned integers of the element size."""
    _check(shape, kind)
    stacked = np.stack(shape.views(page), axis=1)
    return np.ascontiguousarray(stacked.transpose(_AXES[kind])).reshape(_block_shape(shape, kind))


def from_format(block: Array, shape: PageShape, kind: Format, page: Any) -> None:
    """Fill `page` from a block in the format `kind`. Raises ValueError, before any write, if the shapes do not
    match."""
    _check(shape, kind)
    if block.shape != _block_shape(shape, kind) or block.dtype.itemsize != shape.element_bytes:
        raise ValueError(
            f"a block of shape {block.shape} with elements of {block.dtype.itemsize} bytes is not {kind} of "
            f"{_block_shape(shape, kind)} and {shape.element_bytes}"
        )
    targets = shape.views(page)
    if not targets[0].flags.writeable:
        raise ValueError("the page is read-only: pass a writable buffer")
    axes = _AXES[kind]
    sizes = (shape.layers, shape.fields, shape.tokens, shape.heads, shape.dims)
    plain = np.ascontiguousarray(block).view(_ELEMENTS[shape.element_bytes])
    laid = plain.reshape([sizes[axis] for axis in axes]).transpose(np.argsort(axes))
    for number, target in enumerate(targets):
        target[...] = laid[:, number]
