"""The block tables of all sequences: page ids, lengths and flags. Each open sequence has a row number, its index in
all arrays.

A decode step of many sequences is a few numpy operations on these arrays. Tables are indexed [column, row, block].
A column is one page of a block. Entry 0 means no page, because the block has no page yet or is outside the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import loops
from .page_pool import Ids

__all__ = ["BlockTables", "Rows"]

Rows = npt.NDArray[np.integer]


class BlockTables:
    """Arrays with one entry per open sequence, indexed by its row number. Parts that were never written take no memory.

    | array            | meaning                                                                    |
    |------------------|----------------------------------------------------------------------------|
    | tables           | page ids [column, row, block]                                              |
    | states           | page ids of the live states [column, row]                                  |
    | length           | number of computed tokens                                                  |
    | state_length     | number of tokens that the live states cover                                |
    | blocks           | number of reserved blocks                                                  |
    | first            | first block inside each window [window, row]                               |
    | tail             | ids of the tokens after the last published block                           |
    | special          | whether the sequence must be extended and committed alone, not in bulk     |
    | wants_checkpoint | whether the sequence needs a checkpoint at a later position                |
    | first_changed    | first block whose page ids changed since the last `take_changed`           |
    """

    def __init__(
        self, sequences: int, max_blocks: int, block: int, width: int, states: int, windows: int
    ) -> None:
        self.tables: Ids = np.zeros((width, sequences, max_blocks), np.int32)
        self.states: Ids = np.zeros((states, sequences), np.int32)
        self.length = np.zeros(sequences, np.int64)
        self.blocks: Ids = np.zeros(sequences, np.int32)
        self.state_length = np.zeros(sequences, np.int64)
        self.first: Ids = np.zeros((windows, sequences), np.int32)
        self.tail: Ids = np.zeros((sequences, block), np.int32)
        self.special = np.zeros(sequences, np.bool_)
        self.wants_checkpoint = np.zeros(sequences, np.bool_)
        self.first_changed: Ids = np.full(sequences, max_blocks, np.int32)
        self._has_states, self._has_windows = states > 0, windows > 0
        self.sequences: list[Any] = [None] * sequences
        """The sequence of each row number, or None if the number is free."""
        self._open = np.zeros(sequences, np.bool_)
        self._free = list(range(sequences - 1, -1, -1))

    @property
    def open(self) -> int:
        """Return the number of open sequences."""
        return len(self.sequences) - len(self._free)

    def take_row(self) -> int:
        """Return a free row number for a new sequence, and mark it as used. Raises RuntimeError if none is free."""
        if not self._free:
            count = len(self.sequences)
            raise RuntimeError(f"all {count} sequences are open; close one or raise max_sequences")
        row = self._free.pop()
        self._open[row] = True
        return row

    def assign(self, row: int, sequence: object) -> None:
        """Store the sequence of a used row number."""
        self.sequences[row] = sequence

    def free_row(self, row: int) -> None:
        """Clear the arrays at a row number and mark the number as free. The caller has released the pages."""
        self.tables[:, row, : self.blocks.item(row)] = 0
        if self._has_states:
            self.states[:, row] = 0
        if self._has_windows:
            self.first[:, row] = 0
        self.length[row] = self.blocks[row] = self.state_length[row] = 0
        self.special[row] = self.wants_checkpoint[row] = False
        self.first_changed[row] = 0
        self.sequences[row] = None
        self._open[row] = False
        self._free.append(row)

    def validated(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return `rows` as int64. Raises ValueError unless every row number belongs to an open sequence and is
        listed once."""
        at = np.asarray(rows)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise ValueError(f"rows must be a 1-D array of integers, got {at.dtype} {at.shape}")
        at = np.ascontiguousarray(at, np.int64)
        wrong = loops.wrong_row(at, self._open)
        if wrong >= 0:
            row = int(at[wrong])
            twice = row in at[:wrong].tolist()
            raise ValueError(f"row {row} is listed twice" if twice else f"row {row} has no open sequence")
        return at

    def mark_changed(self, row: int, block: int) -> None:
        """Record that page ids of the sequence with this row number changed, from `block` on. Blocks outside a
        window need no such call, because the engine never reads them."""
        if block < self.first_changed.item(row):
            self.first_changed[row] = block

    def mark_each_changed(self, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """Call `mark_changed` for each pair of `rows[i]` and `blocks[i]`. A row number may occur several times."""
        np.minimum.at(self.first_changed, rows, blocks.astype(np.int32))

    def take_changed(self, rows: npt.NDArray[np.int64]) -> Ids:
        """For each sequence in `rows` (row numbers), return the number of its first changed block. If no block changed,
        return its number of reserved blocks. Then reset the record of changes."""
        first = np.minimum(self.first_changed[rows], self.blocks[rows])
        self.first_changed[rows] = self.tables.shape[2]
        return first

    def open_rows(self) -> list[int]:
        """Return the row numbers of the open sequences."""
        return [row for row, sequence in enumerate(self.sequences) if sequence is not None]

    def open_sequences(self) -> Iterator[tuple[int, Any]]:
        """Yield the row number and the object of each open sequence."""
        return ((row, sequence) for row, sequence in enumerate(self.sequences) if sequence is not None)
