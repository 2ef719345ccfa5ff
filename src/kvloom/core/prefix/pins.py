"""Pins, prefixes of waiting requests, and sessions. A pinned prefix is not evicted. The prefix of a waiting request is
evicted later than others, and the prefix of an ended session earlier."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from kvloom.core.clock import Clock
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .lookup import Match
from .media_cache import MediaCache
from .multimodal import MediaRun
from .node import Checkpoint, Node
from .owners import BlockOwners
from .radix_tree import RadixTree

__all__ = ["Pin", "Pins", "QueuedPrefix"]


class Pin:
    """The first `length` tokens of a prompt. Their pages are not evicted before the time `expires`."""

    __slots__ = (
        "checkpoint",
        "expires",
        "length",
        "media_runs",
        "node",
        "number",
        "owners",
        "rows",
        "state_account",
        "states",
    )

    def __init__(
        self,
        node: Node,
        owners: BlockOwners,
        length: int,
        rows: Ids,
        checkpoint: Checkpoint | None,
        expires: float,
        number: int,
    ) -> None:
        self.node: Node | None = node
        self.checkpoint = checkpoint
        self.media_runs: list[MediaRun] = []
        self.owners = owners
        self.state_account = node.account if checkpoint is None else checkpoint.node.account
        self.length = length
        self.rows = rows
        self.states = (
            checkpoint.states.copy() if checkpoint is not None and checkpoint.states is not None else None
        )
        self.expires = expires
        self.number = number

    @property
    def is_active(self) -> bool:
        """Whether the pin still retains its pages."""
        return self.node is not None


class QueuedPrefix:
    """The cached entries that a waiting request will hit. `turn` is the unique sort key of the request in the queue.
    The request with the smallest key runs first."""

    __slots__ = ("entries", "turn")

    def __init__(self, turn: tuple[int, int], entries: list[Node | Checkpoint]) -> None:
        self.turn = turn
        self.entries = entries


class Pins:
    """Owns the pins of one cache with their expiry times, and the last node of each session. Also marks the prefixes
    that waiting requests will hit."""

    SESSIONS = 1 << 16

    def __init__(self, tree: RadixTree, media: MediaCache, clock: Clock) -> None:
        self._tree, self._media, self._clock = tree, media, clock
        self._pins: dict[int, Pin] = {}
        self._expiring: list[tuple[float, int]] = []
        self._numbers = count()
        self._sessions: OrderedDict[str, Node] = OrderedDict()

    def pins(self) -> list[Pin]:
        """The active pins."""
        return list(self._pins.values())

    def retained(self) -> Iterator[tuple[BlockPages, Ids]]:
        """Yield the page ids of all pins."""
        for pin in self._pins.values():
            yield self._tree.pages, pin.rows
            if pin.states is not None:
                yield self._tree.states, pin.states
            for run in pin.media_runs:
                yield self._media.pages, run.rows

    def pin(self, match: Match, owners: BlockOwners, ttl: float) -> Pin:
        """Retain the pages of a match for `ttl` seconds. `owners` are the owners of its blocks."""
        tree, now = self._tree, self._clock.now()
        node: Node = tree.root(match.root_hash, owners.at(0), match.control.adapter)
        for passed in match.path:
            if passed.start >= match.resume:
                break
            node = passed if passed.end <= match.resume else tree.split(passed, match.resume)
        rows = tree.visible_rows(match.rows, match.resume)
        pin = Pin(node, owners, match.resume, rows, match.checkpoint, now + ttl, next(self._numbers))
        tree.lock(node)
        owners.retain(tree.pages, pin.rows)
        if pin.states is not None:
            pin.state_account.retain(tree.states.retain(pin.states))
        if pin.checkpoint is not None:
            pin.checkpoint.locks += 1
        for item in match.media:
            if self._media.outlives_prompt and self._media.needs_run(item, match.resume, match.resume):
                run = self._media[match.media_root + item.digest]
                self._media.retain(run, now)
                pin.media_runs.append(run)
        self._pins[pin.number] = pin
        heapq.heappush(self._expiring, (pin.expires, pin.number))
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release the pages of a pin. A second call has no effect."""
        if pin.node is None:
            return
        tree, node, now = self._tree, pin.node, self._clock.now()
        pin.node = None
        del self._pins[pin.number]
        if len(self._expiring) > 64 + 2 * len(self._pins):
            self._expiring = [item for item in self._expiring if item[1] in self._pins]
            heapq.heapify(self._expiring)
        pin.owners.release(tree.pages, pin.rows)
        if pin.states is not None:
            pin.state_account.release(*tree.states.release(pin.states))
        if pin.checkpoint is not None:
            pin.checkpoint.locks -= 1
            pin.state_account.queue.push(pin.checkpoint, now)
        for run in pin.media_runs:
            self._media.release(run, now)
        for window in range(len(tree.windows)):
            tree.queue_unneeded_range(node, window, 0, max(0, node.end - 1) // tree.block)
        tree.unlock(node, now)

    def release_expired(self) -> bool:
        """Release expired pins. Return whether a pin had expired."""
        if not self._expiring:
            return False
        now, some = self._clock.now(), False
        while self._expiring and self._expiring[0][0] <= now:
            pin = self._pins.get(heapq.heappop(self._expiring)[1])
            if pin is not None:
                self.unpin(pin)
                some = True
        return some

    # -- prefixes of waiting requests -----------------------------------------------------------

    def protect_queued(self, match: Match, turn: tuple[int, int]) -> QueuedPrefix:
        """Protect the deepest node of a match, and that node's checkpoint nearest to the end of the hit. Among entries
        with the same `Entry.retention_priority`, protected entries are evicted last. `turn` is the sort key of the
        request in the waiting queue."""
        entries: list[Node | Checkpoint] = []
        for node in [node for node in match.path if node.start < match.resume][-1:]:
            entries.append(node)
            # Protected, because a checkpoint keeps window pages that the request may need.
            if node.checkpoints:
                entries.append(min(node.checkpoints, key=lambda c: abs(c.position - match.resume)))
        for entry in entries:
            entry.wanted_by = tuple(sorted((*entry.wanted_by, turn)))
        return QueuedPrefix(turn, entries)

    def unprotect(self, queued: QueuedPrefix) -> None:
        """End a protection, because the waiting request was scheduled or cancelled. A second call has no effect."""
        now = self._clock.now()
        for entry in queued.entries:
            entry.wanted_by = tuple(turn for turn in entry.wanted_by if turn != queued.turn)
            if entry.queued is not None:
                node = entry.node if isinstance(entry, Checkpoint) else entry
                node.account.queue.push(entry, now)
        queued.entries = []

    # -- sessions -------------------------------------------------------------------------------

    def note_session(self, session: str, node: Node) -> None:
        """Record the node at which a session's last sequence ended. The number of sessions is limited, and the oldest
        are dropped.
        """
        self._sessions[session] = node
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.SESSIONS:
            self._sessions.popitem(last=False)

    def end_session(self, session: str) -> int:
        """Mark the blocks that only this session used, so that they are evicted first. Return the number of tokens in
        these blocks."""
        node: Node | None = self._sessions.pop(session, None)
        now = self._clock.now()
        tokens, owner = 0, None if node is None else node.owner
        while node is not None and node.parent is not None and len(node.children) <= 1 and not node.locks:
            if node.owner != owner:  # stop at the public prefix, which other tenants may use
                break
            node.ended = True
            tokens += node.tokens
            queue = node.account.queue
            for entry in node.checkpoints:
                entry.ended = True
                queue.push(entry, now)
            if node.leaf:
                queue.push(node, now)
            node = node.parent
        return tokens
