"""What the verbs of a cache share: its parts, and the few steps that all of them take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .clock import Clock
from .columns import Columns
from .layout import PoolLayout
from .media import Media, MediaIds, MediaRun
from .nodes import Checkpoint, Node
from .pool import Ids
from .prefix import PrefixTree
from .room import Room
from .sequence import Sequence, SequenceRows, Snapshots
from .tenants import Account, Accounts

__all__ = ["Parts", "Rows", "Verbs"]

Rows = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Parts:
    """One cache, taken apart."""

    layout: PoolLayout
    pages: Columns
    states: Columns
    media: Columns
    media_ids: MediaIds
    tree: PrefixTree
    accounts: Accounts
    room: Room
    rows: SequenceRows
    snapshots: Snapshots
    clock: Clock
    max_tokens: int


class Verbs:
    """The base of what a scheduler can do with sequences. Holds no state of its own."""

    def __init__(self, parts: Parts) -> None:
        self.layout = parts.layout
        self.block_tokens = parts.layout.block_tokens
        self.pages = parts.pages
        self.states = parts.states
        self.media = parts.media
        self.media_ids = parts.media_ids
        self.tree = parts.tree
        self.accounts = parts.accounts
        self.room = parts.room
        self.rows = parts.rows
        self.snapshots = parts.snapshots
        self.clock = parts.clock
        self.max_tokens = parts.max_tokens
        self.has_states = bool(parts.states.width)

    def handle(self, row: int) -> Sequence:
        seq = self.rows.handles[row]
        if seq is None:
            raise ValueError(f"row {row} has no open sequence")
        return seq

    def ensure_open(self, seq: Sequence) -> None:
        try:
            if self.rows.handles[seq.row] is seq:
                return
        except IndexError:  # it is another cache's, which has more rows
            pass
        raise ValueError(f"{seq!r} is not open in this cache")

    def let_go(self, account: Account, columns: Columns, rows: Ids) -> None:
        account.returned(*columns.release(rows))

    def needs(self, rows: int, states: int, media: int) -> list[int]:
        needs = self.pages.needs(rows)
        if states:
            needs = [a + b for a, b in zip(needs, self.states.needs(states), strict=True)]
        if media:
            needs = [a + b for a, b in zip(needs, self.media.needs(media), strict=True)]
        return needs

    def in_view(self, rows: Ids, point: int) -> Ids:
        """A copy of `rows` without the pages that a query at `point` sees no more."""
        rows = rows.copy()
        for span, columns in zip(self.tree.windows, self.tree.window_columns, strict=True):
            rows[: span.first_visible(point) // self.block_tokens, columns] = 0
        return rows

    def set_window_edges(self, row: int, point: int) -> None:
        for window, span in enumerate(self.tree.windows):
            self.rows.first[window, row] = span.first_visible(point) // self.block_tokens

    def start_from(self, seq: Sequence, checkpoint: Checkpoint, now: float) -> None:
        assert checkpoint.states is not None
        seq.state_source = checkpoint.states.copy()
        seq.root.account.held += self.states.retain(seq.state_source)
        checkpoint.hits += 1
        checkpoint.ended = False
        seq.root.account.queue.policy.on_hit(checkpoint, now)
        checkpoint.last_used = now

    def hold_run(self, seq: Sequence, run: MediaRun, now: float) -> None:
        if run.key not in seq.runs:
            self.room.hold_run(run, now)
            seq.runs[run.key] = run

    def needs_run(self, item: Media, start: int, stop: int) -> bool:
        """Whether computing tokens [start, stop) takes an image's run of pages of its own."""
        has = bool(item.tokens and self.media.width)
        return has and item.start < stop and (self.room.runs_last or item.stop > start)

    def mark_special(self, seq: Sequence) -> None:
        """Note whether a sequence must be served one by one: it has something to copy, to be given, or
        images ahead."""
        row = seq.row
        special = seq.shared_tail or (self.has_states and not self.rows.states[0, row])
        if seq.media and not special:
            special = any(item.stop > self.rows.length[row] for item in seq.media)
        self.rows.special[row] = special

    @staticmethod
    def path(node: Node) -> list[Node]:
        """The nodes from the root (left out) down to `node`."""
        path = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            path.append(current)
            current = current.parent
        return path[::-1]
