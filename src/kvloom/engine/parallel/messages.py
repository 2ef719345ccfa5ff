"""The messages from rank 0 to the other ranks, and their answers. Arrays are sent as bytes.

`ShareHost` lets a rank map the host tier, and `CopyHost` copies pages between its pool and the host tier. A rank
answers each with `Copied`.

A `Step` has the arguments of `ModelRunner.run`, and the entries of block tables that changed since the last step of
each sequence. `LoadAdapter` has weights of a LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvloom.core import CopyBatch, KVCache
from kvloom.models.paged import RotatedCopy, Work

__all__ = [
    "Copied",
    "CopyDocument",
    "CopyHost",
    "CopyPages",
    "Failed",
    "FromRank",
    "LoadAdapter",
    "MoveTokens",
    "Prepare",
    "RankStart",
    "Ready",
    "SetSinks",
    "ShareHost",
    "Started",
    "Step",
    "StepReader",
    "StepWriter",
    "ToRank",
]


Ints = npt.NDArray[np.int64]


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: what it loads. `settings` are fields of `EngineConfig`."""

    rank: int
    count: int
    meeting: str
    model: str
    dtype: str
    device: str
    load_format: str
    threads: int | None
    settings: dict[str, Any]


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank is about to connect to the others."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its part of the model. `layout` is the table of its page layout."""

    layout: str
    slabs: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank has stopped because of an error. `is_refusal` means that the settings or the model are wrong."""

    text: str
    is_refusal: bool


class Copied(msgspec.Struct, frozen=True, tag=True):
    """A rank has finished all copies up to `number`. The first copy is number 1."""

    number: int


FromRank = Started | Ready | Failed | Copied


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The arguments of `ModelRunner.run`. `works` has one line of int64 numbers for each sequence of the step
    (`_WORK_FIELDS`)."""

    works: bytes
    tokens: bytes
    states: bytes
    tables: bytes
    parents: list[tuple[int, ...]]
    wanted: list[int] | None
    whole: list[int]
    pooled: list[int]


class CopyPages(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copies of pages inside the pool."""

    page_stride: int
    source: bytes
    target: bytes

    @classmethod
    def of(cls, copies: CopyBatch) -> CopyPages:
        """Return the message for a batch of copies."""
        source, target = (np.asarray(ids, np.int64).tobytes() for ids in (copies.source, copies.target))
        return cls(copies.page_stride, source, target)

    @property
    def page_ids(self) -> tuple[Ints, Ints]:
        """The ids of the pages to copy, and the ids of the pages to which they are copied."""
        return np.frombuffer(self.source, np.int64).copy(), np.frombuffer(self.target, np.int64).copy()


class MoveTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Moves of accepted tokens of draft trees: the `places` of `TokenMover`, for each group of layers."""

    places: list[bytes]

    @classmethod
    def of(cls, places: Many[Ints]) -> MoveTokens:
        """Return the message for `places`."""
        return cls([each.tobytes() for each in places])

    def read(self) -> list[Ints]:
        """Return the places."""
        return [np.frombuffer(each, np.int64).reshape(4, -1).copy() for each in self.places]


class CopyDocument(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A `RotatedCopy` of tokens of a document. `rotations` are the numbers of the layers' rotations."""

    rotations: list[int]
    source: bytes
    target: bytes
    first: int
    at: int
    count: int

    @classmethod
    def of(cls, rotations: Many[int], plan: RotatedCopy) -> CopyDocument:
        """Return the message for a copy."""
        source, target = (each.astype(np.int32).tobytes() for each in (plan.source, plan.target))
        return cls(list(rotations), source, target, plan.first, plan.at, plan.count)

    def read(self, columns: int) -> RotatedCopy:
        """Return the copy. The block tables have `columns` page ids for each block."""
        source, target = (
            np.frombuffer(each, np.int32).reshape(columns, -1) for each in (self.source, self.target)
        )
        return RotatedCopy(source, target, self.first, self.at, self.count)


class SetSinks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Turn the attention sinks of the model on or off."""

    is_on: bool


class Prepare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Capture all CUDA graphs."""


class ShareHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Map the memory of the host tier. The fields are arguments of `map_shared_memory`."""

    path: str
    token: str
    size: int


class CopyHost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copies of pages between the pool and the host tier. `group` is the index of the layer group. `offsets` are the
    offsets of whole pages in the host tier."""

    is_load: bool
    group: int
    pages: bytes
    offsets: bytes


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Some weights of a LoRA adapter in safetensors' format. After the last message of the adapter (`is_last`), a rank
    copies its part of them to the slot."""

    slot: int
    tensors: bytes
    is_last: bool


ToRank = (
    Step | CopyPages | MoveTokens | CopyDocument | SetSinks | Prepare | ShareHost | CopyHost | LoadAdapter
)

_WORK_FIELDS = (
    *("row", "serial", "count", "source", "recomputed", "drafts", "rewrites", "skipped"),
    *("length", "blocks", "state_length", "first", "adapter", "active_from"),
)
"""Numbers of a work: the row of its sequence, a number that differs for each sequence, the number of tokens, and
fields of `Work`. Then the sequence's entries in the block tables, and the first block whose page ids follow. Then more
fields of `Work`."""


_UNCHANGED = np.iinfo(np.int64).max


class StepWriter:
    """Turns the steps of one cache into messages. Numbers the sequences, so that ranks can identify them."""

    def __init__(self, cache: KVCache, keeps_changes: bool) -> None:
        """By default, `write` clears the block tables' record of changed blocks. `keeps_changes` keeps this record for
        a GPU, which later copies the changed blocks to the device."""
        self._cache, self._keeps_changes = cache, keeps_changes
        self._noted = np.full(len(cache.block_tables.blocks), _UNCHANGED, np.int64)
        self._serial = 0
        self._sequences: dict[int, tuple[Any, int]] = {}

    def write(self, works: Many[Work], wanted: Many[int] | None, whole: Many[int], pooled: Many[int]) -> Step:
        """Return the message of a step. The arguments are those of `ModelRunner.run`. The time grows with the number of
        sequences and of changed blocks."""
        tables = self._cache.block_tables
        rows = np.array([work.sequence.row for work in works], np.int64)
        first = tables.take_changed(rows).astype(np.int64)
        if self._keeps_changes:
            tables.mark_each_changed(rows, first)
        blocks = tables.blocks[rows].astype(np.int64)
        first = np.minimum(first, self._noted[rows])
        self._noted[rows] = _UNCHANGED
        given = [(len(w.tokens), w.source, w.recomputed, w.drafts, w.rewrites, w.skipped) for w in works]
        serials = [self._number(work.sequence) for work in works]
        lines = np.column_stack(
            (
                rows,
                serials,
                np.array(given, np.int64),
                tables.length[rows],
                blocks,
                tables.state_length[rows],
                first,
                np.array([(work.adapter, work.active_from) for work in works], np.int64),
            )
        )
        changed = [
            tables.tables[:, row, begin:end].reshape(-1)
            for row, begin, end in zip(rows.tolist(), first.tolist(), blocks.tolist(), strict=True)
            if end > begin
        ]
        return Step(
            lines.astype(np.int64).tobytes(),
            np.concatenate([work.tokens for work in works]).astype(np.int64).tobytes(),
            np.ascontiguousarray(tables.states[:, rows]).tobytes(),
            np.concatenate([np.zeros(0, np.int32), *changed]).tobytes(),
            [work.parents for work in works] if any(work.parents for work in works) else [],
            None if wanted is None else list(wanted),
            list(whole),
            list(pooled),
        )

    def note_changes(self, works: Many[Work]) -> None:
        """Record the changed blocks of `works` for the next `write`. Call this before a step that only rank 0 runs,
        because on a GPU the step clears the block tables' own record."""
        tables = self._cache.block_tables
        rows = np.array([work.sequence.row for work in works], np.int64)
        first = tables.take_changed(rows).astype(np.int64)
        tables.mark_each_changed(rows, first)
        np.minimum.at(self._noted, rows, first)

    def _number(self, sequence: Any) -> int:
        known = self._sequences.get(sequence.row)
        if known is None or known[0] is not sequence:
            self._serial += 1
            known = self._sequences[sequence.row] = sequence, self._serial
        return known[1]


class RankSequence(msgspec.Struct, frozen=True):
    """A sequence in the process of a rank.

    - `row` is its row in the block tables.
    - `serial` identifies the sequence, because a later sequence may get the same row.
    - `length` is the number of its tokens with K and V before the step.
    - `state_length` is the number of tokens that its recurrent states contain before the step.
    """

    row: int
    serial: int
    length: int
    state_length: int
    cold_blocks: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankSequence) and self.serial == other.serial

    def __hash__(self) -> int:
        return hash(self.serial)


class StepReader:
    """Reads messages of steps. Copies their block tables to the cache of a rank, and returns the work of each
    sequence."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def read(self, step: Step) -> list[Work]:
        """Return the works of a step, after updating the block tables."""
        tables = self._cache.block_tables
        lines: Ints = np.frombuffer(step.works, np.int64).reshape(-1, len(_WORK_FIELDS))
        rows, blocks, first = lines[:, 0], lines[:, 9], lines[:, 11]
        tables.length[rows], tables.blocks[rows], tables.state_length[rows] = (
            lines[:, 8],
            blocks,
            lines[:, 10],
        )
        tables.states[:, rows] = np.frombuffer(step.states, np.int32).reshape(-1, len(rows))
        pages, at, width = np.frombuffer(step.tables, np.int32), 0, len(tables.tables)
        for row, begin, end in zip(rows.tolist(), first.tolist(), blocks.tolist(), strict=True):
            if end > begin and width:
                size = width * (end - begin)
                tables.tables[:, row, begin:end] = pages[at : at + size].reshape(width, -1)
                at += size
        tables.mark_each_changed(rows, first)
        tokens, works, at = np.frombuffer(step.tokens, np.int64), [], 0
        for i, line in enumerate(lines.tolist()):
            (
                row,
                serial,
                count,
                source,
                recomputed,
                drafts,
                rewrites,
                skipped,
                length,
                _,
                state_length,
                _,
                *lora,
            ) = line
            sequence: Any = RankSequence(row, serial, length, state_length)
            parents = step.parents[i] if step.parents else ()
            works.append(
                Work(
                    sequence,
                    tokens[at : at + count],
                    source,
                    None,
                    recomputed,
                    drafts,
                    bool(rewrites),
                    skipped,
                    parents,
                    *lora,
                )
            )
            at += count
        return works
