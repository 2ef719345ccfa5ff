"""A request's view of the cache: its tables, its length, its states.

Numbers live in arrays with a row per sequence, so that a decode step of many sequences is a few
array operations; a Sequence is a handle on one row. Tables are indexed [column, row, block]; an
entry is 0 where the sequence needs no page (never written, or left every window).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvloom.core.clock import Clock
from kvloom.core.eviction.policies import ReuseHistory
from kvloom.core.layout.pool_layout import PoolLayout
from kvloom.core.pool import loops
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.multimodal import Media, MediaRun
from kvloom.core.prefix.node import Node, Root

__all__ = ["BlockTables", "CacheControl", "CheckpointPolicy", "RetainRange", "Sequence"]


@dataclass(frozen=True, slots=True)
class RetainRange:
    """Tokens [start, stop) get `priority` (above 0 stays longer, below leaves sooner) for `ttl` seconds."""

    start: int = 0
    stop: int | None = None
    priority: int = 1
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(f"token range [{self.start}, {self.stop}) is empty or negative")
        if self.ttl is not None and self.ttl <= 0:
            raise ValueError(f"ttl {self.ttl} is not positive")


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request may say about caching. `lossy`: it may be served pages that a tier re-encoded (int8, fp8), and is kept
    apart from those that may not: what it computes is found by its like alone."""

    tenant: str = ""
    adapter: str = ""
    store: bool = True
    read: bool = True
    session: str | None = None
    retain: tuple[RetainRange, ...] = ()
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Where sequences leave resume points in models with windows or states.

    `before_last` takes the prompt's snapshot one token early, so that the very same prompt can resume
    from it too; it costs models with states one more step, of one token, a prompt of more than a block.
    """

    prompt_end: bool = True
    before_last: bool = False
    turn_end: bool = True
    branch: bool = True
    every_blocks: int = 0

    def __post_init__(self) -> None:
        if self.every_blocks < 0:
            raise ValueError(f"every_blocks {self.every_blocks} is negative")


class BlockTables:
    """The arrays behind all sequences. Memory is touched only as far as sequences reach."""

    def __init__(
        self, sequences: int, max_blocks: int, block: int, width: int, states: int, windows: int
    ) -> None:
        self.tables: Ids = np.zeros((width, sequences, max_blocks), np.int32)
        self.states: Ids = np.zeros((states, sequences), np.int32)
        self.length = np.zeros(sequences, np.int64)
        self.blocks: Ids = np.zeros(sequences, np.int32)  # blocks reserved
        self.state_length = np.zeros(sequences, np.int64)  # where the live states stand, where there are any
        self.first: Ids = np.zeros((windows, sequences), np.int32)  # first block still in each window
        self.tail: Ids = np.zeros((sequences, block), np.int32)  # tokens after the last published block
        self.special = np.zeros(sequences, np.bool_)  # must be served one by one: see Verbs.mark_special
        self.wants_checkpoint = np.zeros(
            sequences, np.bool_
        )  # wants a resume point ahead: see Sequence.wanted
        self.first_changed: Ids = np.full(
            sequences, max_blocks, np.int32
        )  # first block the engine has not seen
        self._has_states, self._has_windows = states > 0, windows > 0
        self.sequences: list[Sequence | None] = [None] * sequences
        self._open = np.zeros(sequences, np.bool_)
        self._free = list(range(sequences - 1, -1, -1))

    @property
    def open(self) -> int:
        """How many sequences there are."""
        return len(self.sequences) - len(self._free)

    def take_row(self) -> int:
        if not self._free:
            raise RuntimeError(
                f"all {len(self.sequences)} sequences are open; close one or raise max_sequences"
            )
        row = self._free.pop()
        self._open[row] = True
        return row

    def free_row(self, row: int) -> None:
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
        """Rows of many sequences, each open and named once."""
        at = np.asarray(rows)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise ValueError(f"rows must be one line of whole numbers, got {at.dtype} {at.shape}")
        at = np.ascontiguousarray(at, np.int64)
        wrong = loops.wrong_row(at, self._open)
        if wrong >= 0:
            row = int(at[wrong])
            twice = row in at[:wrong].tolist()
            raise ValueError(f"row {row} is named twice" if twice else f"row {row} has no open sequence")
        return at

    def mark_changed(self, row: int, block: int) -> None:
        """A row's entries differ from `block` on. (Those that leave a window need no word: nobody reads them again.)"""
        if block < self.first_changed.item(row):
            self.first_changed[row] = block

    def mark_each_changed(self, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """`touch` of many entries, of one row some of them."""
        np.minimum.at(self.first_changed, rows, blocks.astype(np.int32))

    def take_changed(self, rows: npt.NDArray[np.int64]) -> Ids:
        """The first block of each row that changed since this was last asked; the end of its table where none did."""
        first = np.minimum(self.first_changed[rows], self.blocks[rows])
        self.first_changed[rows] = self.tables.shape[2]
        return first

    def open_rows(self) -> list[int]:
        return [row for row, handle in enumerate(self.sequences) if handle is not None]


class SequenceOwner(Protocol):
    """The cache, as far as a sequence needs it."""

    layout: PoolLayout
    block_tokens: int
    snapshots: CheckpointPolicy
    clock: Clock
    block_tables: BlockTables
    has_states: bool

    def table(self, group: int) -> Ids: ...
    def extend(self, seq: Sequence, n: int) -> int: ...
    def commit(self, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None: ...
    def rollback(self, seq: Sequence, n: int) -> int: ...
    def fork(self, seq: Sequence) -> Sequence | None: ...
    def close(self, seq: Sequence) -> None: ...


class Sequence:
    """One request, beam or sample. All verbs are the cache's; these are shorthands.

    | tokens        | meaning                                                    |
    |---------------|------------------------------------------------------------|
    | [0, resumed)  | were in the cache when it opened                           |
    | [0, length)   | computed: their pages and states are real                  |
    | up to reserve | pages are there to write to                                |
    """

    __slots__ = (
        "cache",
        "checkpoint_positions",
        "control",
        "finish_reason",
        "history",
        "media",
        "media_runs",
        "node",
        "opened",
        "prompt",
        "published",
        "resumed",
        "root",
        "row",
        "shared_tail",
        "state_source",
    )

    def __init__(
        self, cache: SequenceOwner, row: int, root: Root, node: Node, control: CacheControl, now: float
    ) -> None:
        self.cache = cache
        self.row = row
        self.root = root
        self.node = node  # the deepest node on its path; ends at `published`
        self.control = control
        self.published = node.end
        self.opened = now
        self.resumed = 0
        self.prompt = 0
        self.shared_tail = False  # its partial block is someone else's page: copy before writing
        self.state_source: Ids | None = None  # a snapshot to start from, held until copied
        self.checkpoint_positions: tuple[int, ...] = ()  # positions at which to leave a resume point
        self.media: tuple[Media, ...] = ()
        self.media_runs: dict[bytes, MediaRun | Ids] = {}
        self.finish_reason: str | None = (
            None  # how it ended ("tool_calls", "stop"): a hint that a policy may learn from
        )
        self.history: ReuseHistory | None = None  # what a policy that learns remembers of it

    def __repr__(self) -> str:
        state = f"row {self.row}, {self.length} tokens" if self.open else "closed"
        return f"<Sequence {state}>"

    @property
    def open(self) -> bool:
        return self.cache.block_tables.sequences[self.row] is self

    @property
    def length(self) -> int:
        return int(self.cache.block_tables.length[self._place()])

    @property
    def state_length(self) -> int:
        """Where the live states stand: at `length`, or before it while drafts are verified; the tokens
        between must be given to the recurrent layers again."""
        return int(self.cache.block_tables.state_length[self._place()])

    @property
    def reserved_tokens(self) -> int:
        return int(self.cache.block_tables.blocks[self._place()]) * self.cache.block_tokens

    def _place(self) -> int:
        """Its row, unless that belongs to another by now."""
        if not self.open:
            raise ValueError(f"{self!r} is closed")
        return self.row

    @property
    def next_checkpoint(self) -> int | None:
        """The next position at which a step should end, so that a state snapshot can be taken there."""
        length = self.length
        ahead = [p for p in self.checkpoint_positions if p > length]
        every = self.cache.snapshots.every_blocks * self.cache.block_tokens
        if every:
            ahead.append((length // every + 1) * every)
        return min(ahead) if ahead and self.cache.has_states else None

    def table(self, group: int) -> Ids:
        """The page ids of one token group: [runs, blocks], a view."""
        return self.cache.table(group)[:, self._place(), : int(self.cache.block_tables.blocks[self.row])]

    def states(self, group: int) -> Ids:
        """The page ids of one state group's live state: [runs]."""
        groups = self.cache.layout.groups
        if not 0 <= group < len(groups) or groups[group].spec.unit != "state":
            raise KeyError(f"{group} is not a state group; the layout has {[g.name for g in groups]}")
        return self.cache.block_tables.states[groups[group].columns, self._place()]

    def media_rows(self, digest: bytes) -> Ids:
        """The rows of page ids of an image's run: [blocks, columns]."""
        run = self.media_runs[self.root.hash + digest]
        return run.rows if isinstance(run, MediaRun) else run

    def media_is_cached(self, digest: bytes) -> bool:
        """Whether the cache keeps an image's run, so that its pages have been written."""
        return isinstance(self.media_runs[self.root.hash + digest], MediaRun)

    def extend(self, n: int) -> int:
        return self.cache.extend(self, n)

    def commit(self, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
        self.cache.commit(self, tokens, state_length)

    def rollback(self, n: int) -> int:
        return self.cache.rollback(self, n)

    def fork(self) -> Sequence | None:
        return self.cache.fork(self)

    def close(self) -> None:
        self.cache.close(self)
