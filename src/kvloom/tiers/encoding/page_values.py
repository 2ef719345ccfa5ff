"""The values of a page as float32, for any KV dtype: K and V, or latents, without padding. Needs only numpy.

    page      [layer][field: k, v, k_scale, …]    in the KV dtype and the order of the pool
    values    [field: k, v][layer, token, head, dim], float32, padded with zeros to a multiple of 64 values

When values are read, quantised fields are multiplied by their scales. When a page is filled, its quantised fields get
new scales. A recurrent state is copied byte for byte, because the KV dtype does not apply to states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.core import Field

from .formats import Array, PageFields
from .quantisation import FP8_MAX, Floats, fp8_values, from_floats, to_floats, to_fp8

__all__ = ["PageValues"]

_BLOCK_VALUES = 64
_PLAIN = ("fp32", "fp16", "bf16")
_MOST = {"int8": 127.0, "fp8": FP8_MAX}
_SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True, slots=True)
class PageValues:
    """Converts between pages and their values. `page` describes the fields of the pages. Raises ValueError if a
    quantised field has no scales in the page."""

    page: PageFields

    def __post_init__(self) -> None:
        scaled = {field.name.removesuffix("_scale") for field in self.page.fields if _is_scale(field)}
        for field in self._fields if self.page.tokens else ():
            if field.dtype not in _PLAIN and (field.dtype not in _MOST or field.name not in scaled):
                raise ValueError(
                    f"field {field.name!r} has dtype {field.dtype} without scales in its page; "
                    "use dynamic scales, or a KV dtype of fp32, fp16 or bf16"
                )

    @property
    def _fields(self) -> list[Field]:
        return [field for field in self.page.fields if not _is_scale(field)]

    @property
    def bytes(self) -> int:
        """Number of bytes of one page's values. A page with a recurrent state counts without its padding."""
        if not self.page.tokens:
            return self.page.layers * self.page.layer_bytes
        each = self.page.layers * self.page.tokens
        values = sum(each * math.prod(field.shape) for field in self._fields)
        return 4 * -(-values // _BLOCK_VALUES) * _BLOCK_VALUES

    def text(self) -> str:
        """Return the names and shapes of the fields as text, without dtypes."""
        return ", ".join(f"{field.name}{list(field.shape)}" for field in self._fields)

    def read(self, page: Any, into: Any) -> None:
        """Convert a page to its values and write them to `into`, which has `bytes` bytes."""
        target = np.frombuffer(memoryview(into).cast("B"), np.uint8)
        if not self.page.tokens:
            target[:] = np.frombuffer(memoryview(page).cast("B"), np.uint8)[: self.bytes]
            return
        values, at = target.view(np.float32), 0
        views = self._views(page)
        for field in self._fields:
            part = _floats(views[field.name], field.dtype)
            if field.dtype in _MOST:
                part *= _scales(views, field)
            values[at : at + part.size] = part.ravel()
            at += part.size
        values[at:] = 0

    def fill(self, page: Any, values: Any) -> None:
        """Fill a page from `values`, which were read from a page of any KV dtype. Sets padding to 0."""
        self.page.clear_padding(page)
        source = np.frombuffer(memoryview(values).cast("B"), np.uint8)
        if not self.page.tokens:
            target = np.frombuffer(memoryview(page).cast("B"), np.uint8)
            target[: self.bytes] = source
            return
        floats, at = source.view(np.float32), 0
        views = self._views(page)
        for field in self._fields:
            view = views[field.name]
            part = floats[at : at + view.size].reshape(view.shape)
            at += view.size
            if field.dtype in _MOST:
                most = _MOST[field.dtype]
                sizes = np.maximum(np.abs(part).max(-1, keepdims=True) / np.float32(most), _SMALLEST_SCALE)
                scales = views[f"{field.name}_scale"]
                scales[...] = np.ascontiguousarray(sizes.reshape(scales.shape), np.float32).view(np.uint32)
                scaled = np.clip(part / sizes, -most, most)
                coded = np.rint(scaled).astype(np.int8).view(np.uint8) if most == 127 else to_fp8(scaled)
                view[...] = coded
            else:
                stored = from_floats(np.ascontiguousarray(part), field.dtype)
                view[...] = stored.view(view.dtype).reshape(view.shape)

    def _views(self, page: Any) -> dict[str, Array]:
        names = [field.name for field in self.page.fields]
        return dict(zip(names, self.page.views(page), strict=True))


def _is_scale(field: Field) -> bool:
    return field.name.endswith("_scale")


def _floats(view: Array, dtype: str) -> Floats:
    """Return the numbers of a field as a new float32 array, before they are multiplied by scales."""
    stored = np.ascontiguousarray(view)
    if dtype == "int8":
        return stored.view(np.int8).astype(np.float32)
    if dtype == "fp8":
        return np.take(fp8_values(), stored)
    return to_floats(stored.reshape(-1).view(np.uint8), dtype).reshape(view.shape)


def _scales(views: dict[str, Array], field: Field) -> Floats:
    """Return the scales of a field, one per token and head, or one per token of a latent."""
    scales = np.ascontiguousarray(views[f"{field.name}_scale"]).view(np.float32)
    return scales if scales.ndim == views[field.name].ndim else scales[..., None]
