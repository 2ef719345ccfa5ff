"""What users ask of a cache: keep this for a while, forget that session."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count

from kvloom.core.lookup import Match
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.prefix.node import Checkpoint, Node

from .state import CacheState, SequenceOps

__all__ = ["Pin", "Pins", "QueuedPrefix"]


class Pin:
    """Pages that stay until `expires`, whatever the pressure."""

    __slots__ = (
        "account",
        "checkpoint",
        "expires",
        "length",
        "media_runs",
        "node",
        "number",
        "rows",
        "states",
    )

    def __init__(
        self, node: Node, length: int, rows: Ids, checkpoint: Checkpoint | None, expires: float
    ) -> None:
        self.node: Node | None = node
        self.checkpoint = checkpoint
        self.media_runs: list[MediaRun] = []
        self.account = node.root.account
        self.length = length
        self.rows = rows
        self.states = (
            checkpoint.states.copy() if checkpoint is not None and checkpoint.states is not None else None
        )
        self.expires = expires
        self.number = 0


class QueuedPrefix:
    """What somebody who waits will want. Turns sort as they come; no two who wait have the same."""

    __slots__ = ("entries", "turn")

    def __init__(self, turn: tuple[int, int], entries: list[Node | Checkpoint]) -> None:
        self.turn = turn
        self.entries = entries


class Pins(SequenceOps):
    SESSIONS = 1 << 16

    def __init__(self, parts: CacheState) -> None:
        super().__init__(parts)
        self._pins: dict[int, Pin] = {}
        self._expiring: list[tuple[float, int]] = []
        self._numbers = count()
        self._sessions: OrderedDict[str, Node] = OrderedDict()

    def pins(self) -> list[Pin]:
        return list(self._pins.values())

    def pin(self, match: Match, ttl: float) -> Pin:
        now = self.clock.now()
        tenant = match.control.tenant
        root = self.tree.root(match.root_hash, self.accounts[tenant], tenant)
        node: Node = root
        for passed in match.path:
            if passed.start >= match.resume:
                break
            node = passed if passed.end <= match.resume else self.tree.split(passed, match.resume)
        rows = self.visible_rows(match.rows, match.resume)
        pin = Pin(node, match.resume, rows, match.checkpoint, now + ttl)
        self.tree.lock(node)
        pin.account.in_use += self.pages.retain(pin.rows)
        if pin.states is not None:
            pin.account.in_use += self.states.retain(pin.states)
        if pin.checkpoint is not None:
            pin.checkpoint.locks += 1
        for item in match.media:
            if self.allocator.media_outlives_prompt and self.needs_run(item, match.resume, match.resume):
                pin.media_runs.append(self.allocator.media_runs[match.root_hash + item.digest])
                self.allocator.retain_media(pin.media_runs[-1], now)
        pin.number = next(self._numbers)
        self._pins[pin.number] = pin
        heapq.heappush(self._expiring, (pin.expires, pin.number))
        return pin

    def unpin(self, pin: Pin) -> None:
        if pin.node is None:
            return
        node, pin.node = pin.node, None
        del self._pins[pin.number]
        if len(self._expiring) > 64 + 2 * len(self._pins):
            self._expiring = [item for item in self._expiring if item[1] in self._pins]
            heapq.heapify(self._expiring)
        self.release(pin.account, self.pages, pin.rows)
        now = self.clock.now()
        if pin.states is not None:
            self.release(pin.account, self.states, pin.states)
        if pin.checkpoint is not None:
            pin.checkpoint.locks -= 1
            pin.account.queue.push(pin.checkpoint, now)
        for run in pin.media_runs:
            self.allocator.release_media(run, now)
        for window in range(len(self.tree.windows)):
            self.tree.queue_unneeded_range(node, window, 0, max(0, node.end - 1) // self.block_tokens)
        self.tree.unlock(node, now)

    def release_expired(self) -> bool:
        """End the pins whose time is over; whether there were any. Called whenever room is short."""
        if not self._expiring:
            return False
        now, some = self.clock.now(), False
        while self._expiring and self._expiring[0][0] <= now:
            pin = self._pins.get(heapq.heappop(self._expiring)[1])
            if pin is not None:
                self.unpin(pin)
                some = True
        return some

    def protect_queued(self, match: Match, turn: tuple[int, int]) -> QueuedPrefix:
        """Somebody waits who will want what `match` found: it leaves after all that nobody waits for."""
        entries: list[Node | Checkpoint] = []
        for node in [node for node in match.path if node.start < match.resume][-1:]:
            entries.append(node)
            if node.checkpoints:  # which hold windows' pages, if nobody resumes right there either
                entries.append(min(node.checkpoints, key=lambda point: abs(point.position - match.resume)))
        for entry in entries:
            entry.wanted_by = tuple(sorted((*entry.wanted_by, turn)))
        return QueuedPrefix(turn, entries)

    def unprotect(self, foreseen: QueuedPrefix) -> None:
        """Whose turn it was has begun, or waits no more."""
        now = self.clock.now()
        for entry in foreseen.entries:
            entry.wanted_by = tuple(turn for turn in entry.wanted_by if turn != foreseen.turn)
            if entry.queued is not None:
                node = entry.node if isinstance(entry, Checkpoint) else entry
                node.root.account.queue.push(entry, now)
        foreseen.entries = []

    def note_session(self, session: str, node: Node) -> None:
        self._sessions[session] = node
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.SESSIONS:
            self._sessions.popitem(last=False)

    def end_session(self, session: str) -> int:
        node: Node | None = self._sessions.pop(session, None)
        now = self.clock.now()
        tokens = 0
        while node is not None and node.parent is not None and len(node.children) <= 1 and not node.locks:
            node.ended = True
            tokens += node.tokens
            queue = node.root.account.queue
            for entry in node.checkpoints:
                entry.ended = True
                queue.push(entry, now)
            if node.leaf:
                queue.push(node, now)
            node = node.parent
        return tokens
