"""What a step looks like to a model: some sequences' next tokens in one packed row, and where their pages are.

    tokens   | sequence 0: a chunk of its prompt | sequence 1: one token | sequence 2: … |
    starts   0                                   7                       8               …

Made once a step from sequences whose pages are reserved (`extend`); knows no model and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, Sequence

__all__ = ["Batch", "Work"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's part of a step: the tokens that follow its `length`, for which `extend` has reserved pages."""

    sequence: Sequence
    tokens: Ints


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's packed row. `tables[group]` is [runs, rows, blocks], `slots[group]` [runs, tokens]: where each token of
    the row goes, `page * block_tokens + place`. `last` are the places of each row's last token. `states[group]` ([runs,
    rows]) are the pages of state groups, and `fresh` says which rows begin without one. `bounds` and `sizes` are starts and
    lengths on the host, so that nobody fetches them."""

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    tables: dict[int, torch.Tensor]
    slots: dict[int, torch.Tensor]
    states: dict[int, torch.Tensor]
    fresh: tuple[bool, ...]
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def build(cls, cache: KVCache, works: Many[Work], device: torch.device | str = "cpu") -> Batch:
        """The batch of `works`, in their order."""
        if not works:
            raise ValueError("a step needs at least one sequence with tokens to compute")
        counts = np.array([len(work.tokens) for work in works])
        if (counts == 0).any():
            raise ValueError(f"sequence {int(np.flatnonzero(counts == 0)[0])} of the step has no tokens")
        before = np.array([work.sequence.length for work in works])
        starts = np.concatenate(([0], counts.cumsum()))
        lengths = before + counts
        row = np.arange(len(works)).repeat(counts)
        positions = before[row] + np.arange(starts[-1]) - starts[row]
        tables, slots = {}, {}
        block = cache.layout.block_tokens
        blocks = -(-int(lengths.max()) // block)
        rows = [work.sequence.row for work in works]
        for group in cache.layout.of("token"):
            table = cache.table(group.index)[:, rows, :blocks]
            pages = table[:, row, positions // block].astype(np.int64)
            if (pages == 0).any():
                raise ValueError(
                    f"{group.name}: some tokens of the step have no page; extend the sequence first"
                )
            tables[group.index] = torch.from_numpy(np.ascontiguousarray(table)).to(device)
            slots[group.index] = torch.from_numpy(pages * block + positions % block).to(device)

        states = {
            group.index: torch.from_numpy(
                np.stack([work.sequence.states(group.index) for work in works], 1).astype(np.int64)
            ).to(device)
            for group in cache.layout.of("state")
        }

        def sent(array: npt.NDArray[np.int64], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(array).to(device, dtype)

        return cls(
            tokens=sent(np.concatenate([work.tokens for work in works]).astype(np.int64)),
            positions=sent(positions),
            starts=sent(starts, torch.int32),
            lengths=sent(lengths, torch.int32),
            last=sent(starts[1:] - 1),
            tables=tables,
            slots=slots,
            states=states,
            fresh=tuple(work.sequence.state_length == 0 for work in works),
            bounds=tuple(starts.tolist()),
            sizes=tuple(lengths.tolist()),
        )
