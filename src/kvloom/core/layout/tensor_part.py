"""Tensor parallelism: the bytes of a page that one rank stores. Tiers store whole pages, so that every number of ranks
can use them. With context parallelism, the rank has these bytes for some tokens of the block.

    field of the whole model   | x: 64 channels | B: 16 | C: 16 |     parts of the shard axis
    page of rank 1 of 2        | x: 32 … 63 | B: 8 … 15 | C: 8 … 15 |

If a part has `whole` values and each rank stores `own` of them, there are `whole / own` pieces. Rank r stores piece r *
pieces // ranks. If there are fewer pieces than ranks, neighbouring ranks have the same piece. The first of these ranks
writes the piece to the whole page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .context_part import WHOLE, ContextPart
from .layer_spec import Field, LayerSpec
from .pool_layout import PageGroup

__all__ = ["PageRange", "TensorPart", "divided_specs"]


class PageRange(NamedTuple):
    """A range of bytes that is at `own` in the page of a rank, and at `whole` in the whole page. `is_first` means that
    no lower rank has the same bytes."""

    own: int
    whole: int
    size: int
    is_first: bool


def divided_specs(own: Mapping[str, LayerSpec], whole: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Return the specs of a rank's layers (`own`), with the sizes that their fields have in the `whole` model. Raises
    ValueError if a field is divided on another axis than its first, or into unequal pieces."""
    return {name: _divided(name, spec, whole[name]) for name, spec in own.items()}


def _divided(layer: str, own: LayerSpec, whole: LayerSpec) -> LayerSpec:
    fields = tuple(
        field if field.shape == other.shape else _divided_field(layer, field, other)
        for field, other in zip(own.fields, whole.fields, strict=True)
    )
    return replace(own, fields=fields)


def _divided_field(layer: str, own: Field, whole: Field) -> Field:
    sizes = zip(own.axis_parts, whole.axis_parts, strict=True)
    if own.shard_axis != 0 or own.shape[1:] != whole.shape[1:] or any(w % o for o, w in sizes):
        raise ValueError(
            f"{layer}: field {own.name} {whole.shape} cannot be divided into fields of shape {own.shape}"
        )
    return replace(own, whole_parts=whole.axis_parts)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of a page that rank `rank` of `count` ranks stores."""

    rank: int = 0
    count: int = 1

    def ranges(self, own: PageGroup, whole: PageGroup, context: ContextPart = WHOLE) -> list[PageRange]:
        """Return the ranges of bytes that a page of this rank (`own`) and the `whole` page have in common. Together they
        are all bytes of the rank's page, without padding. `context` is the rank's part of each block."""
        is_writer = own.parts > 1 or context.rank == 0
        if own.parts == 1 and not any(field.whole_parts for field in own.spec.fields):
            return [PageRange(0, 0, own.page_bytes, self.rank == 0 and is_writer)]
        units = own.page_tokens if own.spec.unit == "token" else 1
        found: list[PageRange] = []
        for layer in range(own.run_layers):
            at, to = layer * own.layer_bytes, layer * whole.layer_bytes
            for field, other in zip(own.spec.fields, whole.spec.fields, strict=True):
                lines = _lines(field) if own.spec.unit == "token" else field.shape[0]
                size = field.bytes * units // lines
                for mine, theirs, count, is_first in self._field_lines(field, lines):
                    for line in range(count):
                        start = to + (theirs + line) * size * own.parts
                        start += context.rank * size if own.parts > 1 else 0
                        found.append(
                            PageRange(at + (mine + line) * size, start, size, is_first and is_writer)
                        )
                at += field.bytes * units
                to += other.bytes * units * own.parts
        return _merged(found)

    def own_values(self, own: int, whole: int) -> slice:
        """Return which of `whole` values this rank stores, if each rank stores `own` of them."""
        piece = self._piece(whole // own)
        return slice(piece * own, (piece + 1) * own)

    def _field_lines(self, field: Field, lines: int) -> list[tuple[int, int, int, bool]]:
        """Return the lines of a field that this rank has. A line is the bytes of all tokens of a page, for one index of
        the outer axes (for example one head).

        Each entry of the result has the first line in the rank's page, the first line in the whole page, the number
        of lines, and whether no lower rank has these lines.
        """
        if not field.whole_parts:
            return [(0, 0, lines, self.rank == 0)]
        found, mine, theirs, each = [], 0, 0, lines // field.shape[0]
        for own, whole in zip(field.axis_parts, field.whole_parts, strict=True):
            piece = self._piece(whole // own)
            is_first = self.rank == 0 or TensorPart(self.rank - 1, self.count)._piece(whole // own) != piece
            found.append((mine, theirs + piece * own * each, own * each, is_first))
            mine += own * each
            theirs += whole * each
        return found

    def _piece(self, pieces: int) -> int:
        return self.rank * pieces // self.count


def _lines(field: Field) -> int:
    """Return the number of lines of a field in a page. `_field_lines` defines a line."""
    axes = field.axes("HND")
    return math.prod(field.shape[axis - 1] for axis in axes[: axes.index(0)])


def _merged(ranges: list[PageRange]) -> list[PageRange]:
    """Join ranges that are adjacent in both pages."""
    found: list[PageRange] = []
    for one in ranges:
        last = found[-1] if found else None
        if (
            last is not None
            and last.own + last.size == one.own
            and last.whole + last.size == one.whole
            and last.is_first == one.is_first
        ):
            found[-1] = last._replace(size=last.size + one.size)
        else:
            found.append(one)
    return found
