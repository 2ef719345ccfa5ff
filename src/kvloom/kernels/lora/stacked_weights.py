"""The data of low-rank terms: the stacked weights of the adapters, and the adapters of a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvloom.kernels.device import upload

__all__ = ["COLUMNS", "MIN_RANK", "AdapterRows", "LowRankWeights", "SlotViews"]

MIN_RANK = 16
"""Smallest rank of stacked weights, because a GPU multiplies tiles of at least this size. All ranks are powers of two."""
COLUMNS = 64
"""Columns of the result that one program of the second product computes."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which tokens of a step use which adapter. An `AdapterRows` is made once per step, and every layer uses it.

    | field    | meaning                                                                                        |
    |----------|------------------------------------------------------------------------------------------------|
    | `count`  | number of tokens of the step                                                                   |
    | `groups` | on a CPU: for each adapter of the step, its slot and its tokens (a range, or their indexes)    |
    | `order`  | on a GPU: indexes of the tokens, sorted by slot                                                |
    | `slots`  | on a GPU: slots of the tokens in this order                                                    |
    """

    count: int
    groups: tuple[tuple[int, slice | torch.Tensor], ...] = ()
    order: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    @classmethod
    def on_host(cls, slots: npt.NDArray[np.integer]) -> AdapterRows:
        """Return the `AdapterRows` of a step that runs on a CPU. `slots` has the adapter slot of each token."""
        groups: list[tuple[int, slice | torch.Tensor]] = []
        for slot in np.unique(slots).tolist():
            if slot:
                at = np.flatnonzero(slots == slot)
                first, end = int(at[0]), int(at[-1]) + 1
                is_range = end - first == len(at)
                groups.append((slot, slice(first, end) if is_range else torch.from_numpy(at)))
        return cls(len(slots), tuple(groups))

    @classmethod
    def of(cls, slots: torch.Tensor) -> AdapterRows:
        """Return the `AdapterRows` of a step that runs on the device of `slots`. `slots` has the adapter slot of each
        token. Does not wait for a GPU."""
        return cls.sorted_by_slot(slots) if slots.is_cuda else cls.on_host(slots.numpy())

    def token_slots(self) -> torch.Tensor:
        """Return the adapter slot of each token of a step that runs on a CPU."""
        slots = torch.zeros(self.count, dtype=torch.int64)
        for slot, at in self.groups:
            slots[at] = slot
        return slots

    @classmethod
    def sorted_by_slot(cls, slots: torch.Tensor) -> AdapterRows:
        """Return the `AdapterRows` of a step that runs on a GPU. `slots` has the adapter slot of each token."""
        found, order = torch.sort(slots, stable=True)
        return cls(len(slots), (), order, found)


class SlotViews(NamedTuple):
    """The weights of one adapter, as transposed views. `a` is [inputs, parts * rank]. `b` has a view [rank, outputs]
    for each part that the adapter changes."""

    a: torch.Tensor
    b: dict[int, torch.Tensor]


class LowRankWeights:
    """The stacked weights of one product, for `slots` adapters of up to `rank` dimensions. A product may compute
    several joined layers, and has one part for each of them. The tensors keep their addresses, so that CUDA graphs stay
    valid when an adapter is loaded.

    `a` has the shape [slots, parts * rank, inputs], and `b` [slots, outputs, rank]. Unused rows and columns are 0.
    """

    def __init__(
        self, slots: int, rank: int, inputs: int, outputs: Sequence[int], like: torch.Tensor
    ) -> None:
        if rank < MIN_RANK or rank & (rank - 1):
            raise ValueError(
                f"rank {rank} of stacked weights must be a power of two of at least {MIN_RANK}: round it up"
            )
        self.rank, self.outputs = rank, tuple(outputs)
        self.a = torch.zeros((slots, len(self.outputs) * rank, inputs), dtype=like.dtype, device=like.device)
        self.b = torch.zeros((slots, sum(self.outputs), rank), dtype=like.dtype, device=like.device)
        self.views: dict[int, SlotViews] = {}
        """The weights of the adapters that change this product, by slot."""
        ends = np.cumsum(self.outputs).tolist()
        self.columns = [slice(end - size, end) for end, size in zip(ends, self.outputs, strict=True)]
        """The columns of the result that belong to each part."""
        self.blocks: torch.Tensor | None = None
        """On a GPU: [blocks, 3], the first column, the end and the part of each block of columns."""
        if like.is_cuda:
            self.blocks = upload(self.column_blocks(), like.device)

    @property
    def bytes(self) -> int:
        """Bytes of the stacked weights."""
        return sum(one.numel() * one.element_size() for one in (self.a, self.b))

    def column_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks of output columns that the programs of the second product (`expand`) compute. Each row of
        the result has the first column, the end and the part of a block. A block never spans two parts."""
        blocks = [
            (first, part.stop, place)
            for place, part in enumerate(self.columns)
            for first in range(part.start, part.stop, COLUMNS)
        ]
        return np.array(blocks, np.int32)

    def clear(self, slot: int) -> None:
        """Remove the adapter in a slot: set its weights to 0."""
        if self.views.pop(slot, None) is not None:
            self.a[slot - 1].zero_()
            self.b[slot - 1].zero_()

    def load(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy the weights of an adapter to a slot. `part` is the number of the joined layer to which the weights
        belong. The slot must be empty (see `clear`). `a` has the shape [rank, inputs], and `b` [outputs, rank]. `b`
        includes the scale of the adapter."""
        rank = len(a)
        if rank > self.rank:
            raise ValueError(f"an adapter of rank {rank} does not fit slots of rank {self.rank}")
        first = part * self.rank
        self.a[slot - 1, first : first + rank].copy_(a, non_blocking=True)
        own = self.b[slot - 1, self.columns[part]]
        own[:, :rank].copy_(b, non_blocking=True)
        self.views.setdefault(slot, SlotViews(self.a[slot - 1].t(), {})).b[part] = own.t()
