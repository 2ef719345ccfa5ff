"""Sequence: the handle of a request. It has one row number in the block tables.

`BlockTables` has the lengths and page ids. A sequence has its row number, its node in the radix tree, and its
options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy.typing as npt

from kvloom.core.control import CacheControl, CheckpointPolicy
from kvloom.core.eviction.policies import ReuseHistory
from kvloom.core.layout.pool_layout import PoolLayout
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.block_tables import BlockTables
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.multimodal import Media, MediaRun
from kvloom.core.prefix.node import Checkpoint, Node, Root
from kvloom.core.prefix.owners import BlockOwners
from kvloom.core.state import CacheState

__all__ = ["ColdRun", "Sequence", "SequenceOwner", "ensure_open", "mark_special", "sequence_at"]


class SequenceOwner(Protocol):
    """The attributes and methods of the cache that a sequence uses."""

    layout: PoolLayout
    block_tokens: int
    block_tables: BlockTables
    has_states: bool
    state: CacheState

    @property
    def checkpoint_policy(self) -> CheckpointPolicy: ...
    def table(self, group: int) -> Ids: ...
    def extend(self, seq: Sequence, n: int) -> int: ...
    def commit(self, seq: Sequence, tokens: npt.ArrayLike, state_length: int | None = None) -> None: ...
    def rollback(self, seq: Sequence, n: int) -> int: ...
    def fork(self, seq: Sequence) -> Sequence | None: ...
    def close(self, seq: Sequence) -> None: ...


@dataclass(slots=True, eq=False)
class ColdRun:
    """Consecutive cold blocks. `pages` contains their page ids in host memory, indexed [blocks, columns]. Columns of
    windowed groups are unused.

    - `last_hash` is the block hash of the last block, or None.
    - `users` is the number of sequences that share the run: a sequence and its forks.
    - `on_release` is called when the last of them releases the run.
    """

    pages: Ids
    last_hash: bytes | None
    on_release: Callable[[], None]
    users: int = 1

    def release(self) -> None:
        """Remove one reference to the run. Calls `on_release` if no reference remains."""
        self.users -= 1
        if not self.users:
            self.on_release()


class Sequence:
    """One request, beam or sample. Its methods call the methods of the cache.

    | tokens               | meaning                                     |
    |----------------------|---------------------------------------------|
    | [0, resumed)         | were cached when the sequence was opened    |
    | [0, published)       | full blocks that are in the radix tree      |
    | [0, length)          | computed: pages and states are valid        |
    | [0, reserved_tokens) | have pages to write to                      |
    """

    __slots__ = (
        "cache",
        "checkpoint_positions",
        "cold_blocks",
        "cold_runs",
        "control",
        "finish_reason",
        "history",
        "media",
        "media_root",
        "media_runs",
        "node",
        "opened",
        "owners",
        "prompt",
        "published",
        "resumed",
        "root",
        "row",
        "shared_tail",
        "source_account",
        "state_source",
        "used_checkpoints",
    )

    def __init__(
        self,
        cache: SequenceOwner,
        row: int,
        root: Root,
        node: Node,
        control: CacheControl,
        owners: BlockOwners,
        now: float,
    ) -> None:
        self.cache = cache
        self.row = row
        self.root = root
        self.node = node  # the deepest node of its path; ends at `published`
        self.control = control
        self.owners = owners  # accounts of its blocks; its states are charged to the tenant
        self.published = node.end
        self.opened = now
        self.resumed = 0
        self.prompt = 0
        self.shared_tail = False  # its partial block is a shared page, which must be copied before a write
        self.state_source: Ids | None = None  # snapshot to resume from, in use until it is copied
        self.source_account = owners.account  # account of the snapshot to resume from
        self.checkpoint_positions: tuple[int, ...] = ()  # positions at which to take checkpoints
        self.cold_runs: list[ColdRun] = []  # its oldest blocks, in host memory
        self.cold_blocks = 0
        self.media: tuple[Media, ...] = ()
        self.media_root = root.hash  # root hash under which its images are cached
        self.media_runs: dict[bytes, MediaRun | Ids] = {}
        self.finish_reason: str | None = None  # "tool_calls", "stop", …: an input of learning policies
        self.history: ReuseHistory | None = None  # record of a learning policy
        self.used_checkpoints: list[Checkpoint] = []  # at which it resumed, or which it took

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Count this sequence as a user of a checkpoint until it is closed."""
        checkpoint.users += 1
        self.used_checkpoints.append(checkpoint)

    def __repr__(self) -> str:
        state = f"row {self.row}, {self.length} tokens" if self.open else "closed"
        return f"<Sequence {state}>"

    def retained(self) -> Iterator[tuple[BlockPages, Ids]]:
        """Yield the page ids of the pages that the sequence uses outside the block tables."""
        state = self.cache.state
        if self.state_source is not None:
            yield state.states, self.state_source
        for run in self.media_runs.values():
            yield state.media, run.rows if isinstance(run, MediaRun) else run

    @property
    def open(self) -> bool:
        """Whether the sequence is open."""
        return self.cache.block_tables.sequences[self.row] is self

    @property
    def length(self) -> int:
        """Number of computed tokens. Raises ValueError if the sequence is closed."""
        tables, row = self.cache.block_tables, self.row
        if tables.sequences[row] is not self:  # inlined `_open_row`, because every step reads the length
            self._open_row()
        return tables.length.item(row)

    @property
    def state_length(self) -> int:
        """Number of tokens that the live states cover. A step that verifies a draft does not change the states. After
        such a step, the number is smaller than `length`. The next step then computes the tokens from `state_length`
        to `length` again in the recurrent layers."""
        return int(self.cache.block_tables.state_length[self._open_row()])

    @property
    def reserved_tokens(self) -> int:
        """Number of tokens that have pages. Raises ValueError if the sequence is closed."""
        return int(self.cache.block_tables.blocks[self._open_row()]) * self.cache.block_tokens

    def _open_row(self) -> int:
        if not self.open:
            raise ValueError(f"{self!r} is closed; open a new one")
        return self.row

    @property
    def next_checkpoint(self) -> int | None:
        """The next position at which a step should end, because a snapshot should be taken there. None if there is no
        such position."""
        length = self.length
        ahead = [p for p in self.checkpoint_positions if p > length]
        every = self.cache.checkpoint_policy.every_blocks * self.cache.block_tokens
        if every:
            ahead.append((length // every + 1) * every)
        return min(ahead) if ahead and self.cache.has_states else None

    def table(self, group: int) -> Ids:
        """Return the page ids of one token group as a view, indexed [run, block]. A block owns one page per run. A run
        is the set of layers that share a page."""
        return self.cache.table(group)[:, self._open_row(), : int(self.cache.block_tables.blocks[self.row])]

    def states(self, group: int) -> Ids:
        """Return the page ids of the live state of one state group, indexed [run]. A state owns one page per run. A run
        is the set of layers that share a page."""
        groups = self.cache.layout.groups
        if not 0 <= group < len(groups) or groups[group].spec.unit != "state":
            raise KeyError(f"{group} is not a state group; the layout has {[g.name for g in groups]}")
        return self.cache.block_tables.states[groups[group].columns, self._open_row()]

    def release_cold_runs(self) -> None:
        """Release the cold runs of the sequence (its blocks in host memory), because the sequence closes or starts
        again at token 0."""
        for run in self.cold_runs:
            run.release()
        self.cold_runs, self.cold_blocks = [], 0

    def media_rows(self, digest: bytes) -> Ids:
        """Return the page ids of an image, indexed [block, column]. A block of the image owns one page per column."""
        run = self.media_runs[self.media_root + digest]
        return run.rows if isinstance(run, MediaRun) else run

    def media_is_cached(self, digest: bytes) -> bool:
        """Return whether the media run of an image is cached. The pages of a cached run are already written."""
        return isinstance(self.media_runs[self.media_root + digest], MediaRun)

    def extend(self, n: int) -> int:
        """Reserve pages for `n` more tokens. See `KVCache.extend`."""
        return self.cache.extend(self, n)

    def commit(self, tokens: npt.ArrayLike, state_length: int | None = None) -> None:
        """Append computed tokens. See `KVCache.commit`."""
        self.cache.commit(self, tokens, state_length)

    def stop_publishing(self) -> None:
        """Publish no more blocks and take no more checkpoints. Published blocks stay cached."""
        self.control, self.checkpoint_positions = replace(self.control, store=False), ()

    def rollback(self, n: int) -> int:
        """Discard the last `n` tokens. See `KVCache.rollback`."""
        return self.cache.rollback(self, n)

    def fork(self) -> Sequence | None:
        """Return a second sequence with the same tokens. See `KVCache.fork`."""
        return self.cache.fork(self)

    def close(self) -> None:
        """Close the sequence. See `KVCache.close`."""
        self.cache.close(self)


def sequence_at(state: CacheState, row: int) -> Sequence:
    """Return the open sequence with this row number."""
    sequence: Sequence | None = state.block_tables.sequences[row]
    if sequence is None:
        raise ValueError(f"row {row} has no open sequence")
    return sequence


def ensure_open(state: CacheState, seq: Sequence) -> None:
    """Raise ValueError unless `seq` is open in this cache."""
    try:
        if state.block_tables.sequences[seq.row] is seq:
            return
    except IndexError:  # a sequence of another cache, which allows more sequences
        pass
    raise ValueError(f"{seq!r} is not open in this cache")


def mark_special(state: CacheState, seq: Sequence) -> None:
    """Update `BlockTables.special` of a sequence: whether it must be extended and committed alone. This is true if
    the sequence has a page to copy, lacks its states, or has images that are not computed yet."""
    row = seq.row
    special = seq.shared_tail or (state.has_states and not state.block_tables.states[0, row])
    if seq.media and not special:
        special = any(item.stop > state.block_tables.length[row] for item in seq.media)
    state.block_tables.special[row] = special
