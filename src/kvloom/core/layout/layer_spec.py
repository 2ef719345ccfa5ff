"""What one layer keeps of the past: its unit, its fields and its span.

A spec is data. It knows nothing of pages, pools or devices, and nothing here asks which
architecture a layer comes from: MLA latents, indexer keys, int8 K/V with scales, convolution and
recurrent states are only different fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["DTYPE_BYTES", "PROMPT", "Field", "LayerSpec", "Visibility", "attention_fields"]

DTYPE_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "int32": 4,
}
QUANTISED = ("int8", "fp8")

Unit = Literal["token", "state"]
Axis = Literal["text", "media"]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a layer: `shape` per token (or per state).

    `shard_axis` is the axis that tensor parallelism cuts, None when every rank keeps a copy (MLA).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None

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

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which earlier tokens a query still sees: one rule for masking, freeing, hits and loading.

    | kind    | the query at `position` sees                         |
    |---------|------------------------------------------------------|
    | full    | every token from 0                                   |
    | sliding | the last `size` tokens, itself included              |
    | chunked | the tokens of its own chunk of `size`                |
    """

    kind: Literal["full", "sliding", "chunked"]
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "sliding", "chunked"):
            raise ValueError(f"unknown span kind {self.kind!r}; known: full, sliding, chunked")
        if (self.kind == "full") != (self.size == 0) or self.size < 0:
            raise ValueError(
                f"span {self.kind!r} with size {self.size}: full takes none, the others a positive one"
            )

    def first_visible(self, position: int) -> int:
        """The first token that the query at `position` sees. It never falls as `position` grows."""
        if self.kind == "full":
            return 0
        if self.kind == "sliding":
            return max(0, position - self.size + 1)
        return position // self.size * self.size

    def first_visible_each(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`first_visible` of many positions at once."""
        if self.kind == "full":
            return np.zeros_like(positions)
        if self.kind == "sliding":
            return np.maximum(positions - (self.size - 1), 0)
        return positions // self.size * self.size

    def visible_tokens(self, length: int) -> int:
        """How many tokens a sequence of `length` tokens still needs at its last query."""
        return length - self.first_visible(length - 1) if length > 0 else 0

    @property
    def windowed(self) -> bool:
        return self.kind != "full"

    def __str__(self) -> str:
        return self.kind if self.kind == "full" else f"{self.kind} {self.size}"


FULL = Visibility("full")
PROMPT = "prompt"
"""The lifetime of what an image's tokens are computed from."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps.

    `unit` is "token" (fields per token) or "state" (fields once per sequence). `axis` is "text", or
    "media" for layers that keep the tokens of an image alone, named by its content (cross
    attention). Layers of different `lifetime` never share a page (a draft model beside its target); what
    an image keeps with the lifetime "prompt" (its embeddings) is needed while its tokens are computed, not after.
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
                f"a {self.unit} layer on the {self.axis} axis takes no window, got {self.visibility}"
            )

    @property
    def bytes(self) -> int:
        """Bytes of one token, or of one state."""
        return sum(field.bytes for field in self.fields)

    @property
    def kind(self) -> str:
        """A word for people: full, sliding, chunked, cross, embeddings, or state."""
        if self.unit == "state":
            return "state"
        if self.axis == "media":
            return "embeddings" if self.lifetime == PROMPT else "cross"
        return self.visibility.kind


def attention_fields(
    kv_heads: int, head_dim: int, dtype: str, scales: bool | None = None
) -> tuple[Field, ...]:
    """K and V of one attention layer; int8 and fp8 carry a float32 scale per token and head unless
    `scales` is False (static scales live with the weights)."""
    fields: tuple[Field, ...] = (
        Field("k", (kv_heads, head_dim), dtype, shard_axis=0),
        Field("v", (kv_heads, head_dim), dtype, shard_axis=0),
    )
    if dtype in QUANTISED and scales is not False:
        fields += (
            Field("k_scale", (kv_heads,), "fp32", shard_axis=0),
            Field("v_scale", (kv_heads,), "fp32", shard_axis=0),
        )
    return fields
