"""Layer spec: the data that one layer stores (unit, fields), and the tokens that its queries see (visibility).

A spec is plain data and does not depend on pages, pools or devices. Architectures differ only in fields: MLA latents,
indexer keys, int8 K/V with scales, convolution and recurrent states.

To add a visibility kind, add one class to this file and register it in KINDS. Also add one mask rule to the attention
kernels (`kvloom.kernels`). Trees, block tables and the resume rule use only `first_visible`: a sequence releases pages
before this token, and keeps all later pages.

A kind with holes, such as a dilated window, sets `has_holes` and overrides `sees_each`. Attention on a CPU supports
holes. The GPU kernels refuse kinds with holes, because these kernels let a query see every token from `first_visible`
on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "DTYPE_BYTES",
    "KINDS",
    "PROMPT",
    "QUANTISED",
    "Field",
    "LayerSpec",
    "Order",
    "Visibility",
    "VisibilityKind",
    "attention_fields",
]

DTYPE_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "int32": 4,
}
"""Bytes of one value of each data type."""
QUANTISED = ("int8", "fp8")
"""Data types that need scales."""

Unit = Literal["token", "state"]
Axis = Literal["text", "media"]
Order = Literal["HND", "NHD"]
"""Order of K and V inside a page: heads first, or tokens first."""
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a layer. `shape` is its shape per token, or per state. `shard_axis` is the axis that tensor
    parallelism splits. None means that every rank has a full copy (MLA).

    `parts` are the sizes of the parts of the shard axis, if it has several, such as the [x|B|C] of a convolution.
    Tensor parallelism splits each part separately. On one of several ranks, `whole_parts` are the sizes of these parts
    in the whole model. () means that the field is not divided (`tensor_part.py`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    parts: tuple[int, ...] = ()
    whole_parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"field {self.name!r}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}"
            )
        if not self.shape or any(size <= 0 for size in self.shape):
            raise ValueError(f"field {self.name!r}: shape {self.shape} needs positive sizes")
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            raise ValueError(
                f"field {self.name!r}: shard_axis {self.shard_axis} is not an axis of {self.shape}"
            )
        if self.parts and (self.shard_axis is None or sum(self.parts) != self.shape[self.shard_axis]):
            raise ValueError(
                f"field {self.name!r}: the parts {self.parts} do not add up to axis {self.shard_axis} of {self.shape}"
            )
        if self.whole_parts and len(self.whole_parts) != len(self.axis_parts):
            raise ValueError(
                f"field {self.name!r}: {len(self.axis_parts)} parts on a rank, {len(self.whole_parts)} in the whole model"
            )

    @property
    def axis_parts(self) -> tuple[int, ...]:
        """Sizes of the parts of the shard axis. An axis without `parts` is one part. Without a shard axis, the result
        is ().
        """
        if self.shard_axis is None:
            return ()
        return self.parts or (self.shape[self.shard_axis],)

    @property
    def bytes(self) -> int:
        """Bytes of the field for one token, or for one state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def whole(self) -> Field:
        """Return the field in the whole model, if this is the field of one of several ranks. Otherwise return the field
        itself."""
        if not self.whole_parts:
            return self
        shape = list(self.shape)
        shape[self.shard_axis or 0] = sum(self.whole_parts)
        parts = self.whole_parts if self.parts else ()
        return replace(self, shape=tuple(shape), parts=parts, whole_parts=())

    def axes(self, order: Order) -> tuple[int, ...]:
        """Return the order in which a page stores the axes of (tokens, *shape), outermost first. A field without heads
        (MLA) always has the order NHD.

        | order | K, and V of 16 or 32 bits | scales        | V of 8 bits         |
        |-------|---------------------------|---------------|---------------------|
        | HND   | heads, tokens, dims       | heads, tokens | heads, dims, tokens |
        | NHD   | tokens, heads, dims       | tokens, heads | tokens, heads, dims |
        """
        plain = tuple(range(len(self.shape) + 1))
        if order == "NHD" or self.shard_axis != 0:
            return plain
        if self.name == "v" and DTYPE_BYTES[self.dtype] == 1:
            return 1, 2, 0
        return (1, 0, *plain[2:])


class VisibilityKind(ABC):
    """A rule that decides which earlier tokens a query sees. The rule has one parameter, `size` (such as the length of
    a window, in tokens), which every call gets."""

    has_size = True
    is_relative = False
    """Whether the visible tokens of a query depend only on their distance from the query."""
    has_holes = False
    """Whether the visible tokens of a query may have gaps, as in a dilated window. A kind with gaps overrides
    `sees_each`."""

    @abstractmethod
    def first_visible(self, position: int, size: int) -> int:
        """Return the first token that the query at `position` sees, for a rule with the parameter `size`. The result
        must not fall as `position` grows."""

    @abstractmethod
    def first_visible_each(self, positions: Positions, size: int) -> Positions:
        """Return, for each position, the first token that the query at this position sees."""

    def visible_blocks(self, position: int, size: int, block: int) -> Sequence[int]:
        """Return the blocks up to `position` that the query at `position` or a later query sees, in order. A kind with
        holes may omit blocks that none of these queries sees."""
        return range(self.first_visible(position, size) // block, position // block + 1)

    def sees_each(self, positions: Positions, tokens: Positions, size: int) -> npt.NDArray[np.bool_]:
        """Return a boolean array: whether the query at each of `positions` sees each of `tokens`. The two arrays are
        broadcast against each other. A kind with holes overrides this method."""
        return (tokens >= self.first_visible_each(positions, size)) & (tokens <= positions)


class _Full(VisibilityKind):
    has_size = False
    is_relative = True

    def first_visible(self, position: int, size: int) -> int:
        return 0

    def first_visible_each(self, positions: Positions, size: int) -> Positions:
        return np.zeros_like(positions)


class _Sliding(VisibilityKind):
    is_relative = True

    def first_visible(self, position: int, size: int) -> int:
        return max(0, position - size + 1)

    def first_visible_each(self, positions: Positions, size: int) -> Positions:
        return np.maximum(positions - (size - 1), 0)


class _Chunked(VisibilityKind):
    def first_visible(self, position: int, size: int) -> int:
        return position // size * size

    def first_visible_each(self, positions: Positions, size: int) -> Positions:
        return positions // size * size


KINDS: dict[str, VisibilityKind] = {"full": _Full(), "sliding": _Sliding(), "chunked": _Chunked()}
"""Visibility kinds by printed name."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """The rule that decides which earlier tokens a query sees. Masks, released pages, hits and loads all follow this
    rule.

    | kind    | tokens that the query at `position` sees             |
    |---------|------------------------------------------------------|
    | full    | all tokens up to `position`                          |
    | sliding | the last `size` tokens, up to `position`             |
    | chunked | the tokens of its chunk, up to `position`; a chunk   |
    |         | has `size` tokens                                    |
    """

    kind: str
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown visibility kind {self.kind!r}; known: {', '.join(KINDS)}")
        if self.size < 0 or KINDS[self.kind].has_size != (self.size > 0):
            expected = "a positive size" if KINDS[self.kind].has_size else "no size"
            raise ValueError(f"visibility {self.kind!r} has size {self.size}; it takes {expected}")

    def first_visible(self, position: int) -> int:
        """Return the first token that the query at `position` sees. The result never decreases as `position` grows."""
        return KINDS[self.kind].first_visible(position, self.size)

    def first_visible_each(self, positions: Positions) -> Positions:
        """Return, for each position, the first token that the query at this position sees."""
        return KINDS[self.kind].first_visible_each(positions, self.size)

    def visible_blocks(self, position: int, block: int) -> Sequence[int]:
        """Return the blocks up to `position` that the query at `position` or a later query sees, in order."""
        return KINDS[self.kind].visible_blocks(position, self.size, block)

    def sees_each(self, positions: Positions, tokens: Positions) -> npt.NDArray[np.bool_]:
        """Return a boolean array: whether the query at each of `positions` sees each of `tokens`. The two arrays are
        broadcast against each other."""
        return KINDS[self.kind].sees_each(positions, tokens, self.size)

    def visible_tokens(self, length: int) -> int:
        """Return how many tokens a sequence of `length` tokens must keep. These are all tokens from the first token
        that its last query sees.
        """
        return length - self.first_visible(length - 1) if length > 0 else 0

    @property
    def has_holes(self) -> bool:
        """Whether the tokens that a query sees may have gaps."""
        return KINDS[self.kind].has_holes

    @property
    def is_relative(self) -> bool:
        """Whether the tokens that a query sees depend only on their distance from the query. If so, padding before a
        prompt does not change which tokens a query sees."""
        return KINDS[self.kind].is_relative

    @property
    def windowed(self) -> bool:
        """Whether old tokens become invisible to later queries, as in a sliding window."""
        return KINDS[self.kind].has_size

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.windowed else self.kind


FULL = Visibility("full")
PROMPT = "prompt"
"""Lifetime of image embeddings, which are needed only until the image's tokens are computed."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The data that one layer stores.

    | field    | meaning                                                                                       |
    |----------|-----------------------------------------------------------------------------------------------|
    | unit     | "token" (fields per token) or "state" (fields once per sequence)                              |
    | axis     | "text": the layer stores the tokens of the sequence; "media": it stores only tokens of images |
    |          | (cross attention, embeddings), cached by the hash of the image's content                      |
    | lifetime | a label, for example of a draft model; layers with different labels never share a page        |

    On the media axis, data with lifetime "prompt" (embeddings) is released when the image's tokens are computed.
    """

    unit: Unit
    fields: tuple[Field, ...]
    visibility: Visibility = FULL
    axis: Axis = "text"
    lifetime: str = "target"

    def __post_init__(self) -> None:
        if self.unit not in ("token", "state"):
            raise ValueError(f"unit {self.unit!r} is neither 'token' nor 'state'")
        if self.axis not in ("text", "media"):
            raise ValueError(f"axis {self.axis!r} is neither 'text' nor 'media'")
        if not self.fields:
            raise ValueError("a layer spec needs at least one field")
        if len({field.name for field in self.fields}) != len(self.fields):
            raise ValueError(f"field names repeat: {[field.name for field in self.fields]}")
        if self.visibility.windowed and (self.unit == "state" or self.axis == "media"):
            raise ValueError(
                f"a {self.unit} layer on the {self.axis} axis cannot have a window, got {self.visibility}; use full"
            )

    @property
    def bytes(self) -> int:
        """Number of bytes of one token, or of one state."""
        return sum(field.bytes for field in self.fields)

    def whole(self) -> LayerSpec:
        """Return the spec of the layer in the whole model, if this is the spec of one of several ranks. Otherwise
        return the spec itself."""
        if not any(field.whole_parts for field in self.fields):
            return self
        return replace(self, fields=tuple(field.whole() for field in self.fields))

    @property
    def kind(self) -> str:
        """Name of the kind: full, sliding, chunked, cross, embeddings or state."""
        if self.unit == "state":
            return "state"
        if self.axis == "media":
            return "embeddings" if self.lifetime == PROMPT else "cross"
        return self.visibility.kind


def attention_fields(
    kv_heads: int, head_dim: int, dtype: str, scales: bool | None = None, v_dim: int | None = None
) -> tuple[Field, ...]:
    """Return the fields of one attention layer. V has `v_dim` dimensions per head, by default as many as K. If `dtype`
    is int8 or fp8, K and V also have one float32 scale per token and head. `scales=False` omits these scales, for
    models with static scales: static scales are weights and need no fields."""
    fields: tuple[Field, ...] = (
        Field("k", (kv_heads, head_dim), dtype, shard_axis=0),
        Field("v", (kv_heads, v_dim or head_dim), dtype, shard_axis=0),
    )
    if dtype in QUANTISED and scales is not False:
        fields += (
            Field("k_scale", (kv_heads,), "fp32", shard_axis=0),
            Field("v_scale", (kv_heads,), "fp32", shard_axis=0),
        )
    return fields
