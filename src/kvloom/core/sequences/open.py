"""Opening a sequence on what the cache has, sharing it, and leaving it to the next."""

from __future__ import annotations

import numpy as np

from kvloom.core.eviction.policies import ReuseHistory
from kvloom.core.histogram import Histogram
from kvloom.core.lookup import Match
from kvloom.core.pool.page_pool import Ids
from kvloom.core.prefix.block_hash import TOKEN_BYTES
from kvloom.core.prefix.multimodal import MediaRun
from kvloom.core.prefix.node import Node

from .extend import Extender
from .sequence import CacheControl, Sequence, SequenceOwner
from .snapshot import Checkpointer
from .state import CacheState, SequenceOps

__all__ = ["Opener"]


class Opener(SequenceOps):
    def __init__(self, parts: CacheState, points: Checkpointer, reserving: Extender) -> None:
        super().__init__(parts)
        self.points = points
        self.reserving = reserving
        self.reused = Histogram()
        """Seconds between a hit and the use before of what it hit deepest."""
        self.hit_blocks = 0
        self.hit_states = 0
        self.hit_media_blocks = 0
        self.left_behind = [0] * len(self.tree.windows)
        """Of `hit_blocks`, those that a window had passed already."""

    def open(self, cache: SequenceOwner, match: Match) -> Sequence:
        runs = self._runs(match) if match.media else ()
        tree, control, point = self.tree, match.control, match.resume
        row = self.block_tables.take_row()
        now = self.clock.now()
        account = self.accounts[control.tenant]
        root = tree.root(match.root_hash, account, control.tenant)
        node = self._stand(match, root, now) if match.path else root
        tree.lock(node)
        seq = Sequence(cache, row, root, node, control, now)
        self.block_tables.sequences[row] = seq
        account.open += 1
        seq.resumed = point
        seq.prompt = match.length
        if match.media:
            seq.media = tuple(sorted(match.media, key=lambda m: m.start))
        if point:
            rows = self.visible_rows(match.rows, point) if tree.windows else match.rows
            self._seat(seq, point, rows, match.data)
        self.mark_special(seq)
        self.block_tables.first_changed[row] = 0
        if tree.keeps_checkpoints:
            if match.checkpoint is not None:
                self.start_from(seq, match.checkpoint, now)
            elif point and self.snapshots.branch and tree.windows and not self.has_states:
                tree.checkpoint(self._node_at(node, match.data, point), point, None, now)
            seq.checkpoint_positions = self._wanted(match)
            self.block_tables.wants_checkpoint[row] = bool(seq.checkpoint_positions)
        for run in runs:
            self.retain_media(seq, run, now)
            self.hit_media_blocks += len(run.rows)
        if point:
            self._count(match, point, row)
        learner = account.queue.learner
        if learner is not None and control.store:
            seq.history = learner.on_open(node, self._ghost(match), point, now)
        return seq

    def _runs(self, match: Match) -> list[MediaRun]:
        """The runs of images that a sequence which resumes there reads."""
        return [
            self.allocator.media_runs[match.root_hash + item.digest]
            for item in match.media
            if self.allocator.media_outlives_prompt and self.needs_run(item, match.resume, match.resume)
        ]

    def _count(self, match: Match, point: int, row: int) -> None:
        """A sequence resumed at `point`: what it found, for whoever reads the counts."""
        self.hit_blocks += -(-point // self.block_tokens)
        self.hit_states += match.checkpoint is not None and self.has_states
        for window in range(len(self.left_behind)):
            self.left_behind[window] += int(self.block_tables.first[window, row])

    def hit_pages(self) -> dict[str, int]:
        """Pages that sequences found in the cache so far, by the kind of layers they serve."""
        found: dict[str, int] = {}
        passed = iter(self.left_behind)
        for group in self.layout.groups:
            if group.spec.axis == "media":
                blocks = self.hit_media_blocks
            elif group.spec.unit == "state":
                blocks = self.hit_states
            else:
                blocks = self.hit_blocks - (next(passed) if group.spec.visibility.windowed else 0)
            kind = group.name.rsplit(" #", 1)[0]
            found[kind] = found.get(kind, 0) + blocks * group.runs
        return found

    def _ghost(self, match: Match) -> ReuseHistory | None:
        """What the policy remembers of the run that this prompt would have met next, had it not left."""
        if match.miss.reason != "evicted":
            return None
        place = match.path[-1].serial if match.path else match.root_hash
        ghost = self.allocator.ghosts.find(place, match.data, match.matched * TOKEN_BYTES)
        return None if ghost is None else ghost.memo

    def _stand(self, match: Match, root: Node, now: float) -> Node:
        """The node that ends at the resume point's block boundary; cut where it must be, counted as hit."""
        boundary = match.resume // self.block_tokens * self.block_tokens
        policy = self.accounts[match.control.tenant].queue.policy
        node = root
        before = now
        for passed in match.path:
            if passed.start >= boundary:
                if passed.start < match.resume:
                    before = passed.last_used
                    passed.last_used = now
                break
            before = passed.last_used
            node = passed if passed.end <= boundary else self.tree.split(passed, boundary)
            node.hits += 1
            if node.hits == 1:
                node.offloaded_tokens = 0  # it was used again: whoever waits for that hears of it once more
            node.ended = False
            if match.control.retain:
                self._raise_priority(node, match.control, now)
            policy.on_hit(node, now)
            node.last_used = now
            if passed is not node:
                passed.last_used = now if boundary < match.resume else passed.last_used
                break
        if match.resume:
            self.reused.add(now - before)
        return node

    @staticmethod
    def _raise_priority(node: Node, control: CacheControl, now: float) -> None:
        """What a request asks for its tokens also holds for those that were cached before it came."""
        for item in control.retain:
            if item.start <= node.start and (item.stop is None or node.end <= item.stop):
                if item.priority >= node.rank(now):
                    node.priority = item.priority
                    node.expires = None if item.ttl is None else now + item.ttl
                return

    def _seat(self, seq: Sequence, point: int, rows: Ids, data: bytes) -> None:
        """Give a row its first `point` tokens: holds, table, window edges, tail."""
        row, table, blocks = seq.row, self.block_tables, len(rows)
        seq.root.account.in_use += self.pages.retain(rows)
        table.tables[:, row, :blocks] = rows.T
        table.blocks[row] = blocks
        table.length[row] = table.state_length[row] = point
        if self.tree.windows:
            self.set_window_edges(row, point)
        tail = point - seq.published
        if tail:
            start = seq.published * TOKEN_BYTES
            table.tail[row, :tail] = np.frombuffer(data, np.int32, tail, start)
            seq.shared_tail = True

    def _node_at(self, node: Node, data: bytes, point: int) -> Node:
        """The node that holds `point`, at or below `node` on the path of `data`."""
        ids = memoryview(data).cast("i")
        while node.end < point:
            node = node.children[ids[node.end]]
        return node

    def _wanted(self, match: Match) -> tuple[int, ...]:
        """Where a sequence should leave resume points."""
        if not match.control.store:
            return ()
        wanted = set()
        if self.snapshots.prompt_end:
            early = self.snapshots.before_last and match.length > self.block_tokens
            wanted.add(match.length - early)
        if self.snapshots.branch:
            # Others have come this way and could not resume here: leave a point for the next.
            wanted.add(match.matched // self.block_tokens * self.block_tokens)
        return tuple(sorted(p for p in wanted if p > match.resume))

    def fork(self, seq: Sequence) -> Sequence | None:
        self.ensure_open(seq)
        account = seq.root.account
        live = bool(self.has_states and self.block_tables.states[0, seq.row])
        needs = self.needs(0, int(live), 0)
        row = self.block_tables.take_row()
        if live and self.allocator.make_room(account, needs):
            self.block_tables.free_row(row)
            return None
        now = self.clock.now()
        child = Sequence(seq.cache, row, seq.root, seq.node, seq.control, now)
        self.block_tables.sequences[row] = child
        account.open += 1
        self.tree.lock(seq.node)
        child.published, child.resumed, child.prompt = seq.published, seq.resumed, seq.prompt
        child.checkpoint_positions, child.media = seq.checkpoint_positions, seq.media
        table, length = self.block_tables, int(self.block_tables.length[seq.row])
        blocks = -(-length // self.block_tokens)
        rows = table.tables[:, seq.row, :blocks].T.copy()
        account.in_use += self.pages.retain(rows)
        table.tables[:, row, :blocks] = rows.T
        table.blocks[row], table.length[row] = blocks, length
        table.state_length[row] = table.state_length[seq.row]
        table.first[:, row] = table.first[:, seq.row]
        table.tail[row] = table.tail[seq.row]
        table.mark_changed(row, 0)
        self.block_tables.wants_checkpoint[row] = self.block_tables.wants_checkpoint[seq.row]
        child.shared_tail = length % self.block_tokens != 0
        if live:
            account.charge(self.allocator.bytes_of(needs))
            self.reserving.give_states(child)
            source = table.states[:, seq.row][None].copy()
            account.in_use += self.states.retain(source)
            self.allocator.copies.add_rows(self.states, source, table.states[:, row][None])
            self.allocator.copies.retain_sources(self.states, source, account)
        elif seq.state_source is not None:
            child.state_source = seq.state_source.copy()
            account.in_use += self.states.retain(child.state_source)
        for key, run in seq.media_runs.items():
            if isinstance(run, MediaRun):
                self.retain_media(child, run, now)
            else:
                account.in_use += self.media.retain(run)
                child.media_runs[key] = run.copy()
        self.mark_special(child)
        return child

    def close(self, seq: Sequence) -> Node:
        """Let a sequence go; returns the node where its tokens end."""
        self.ensure_open(seq)
        now = self.clock.now()
        account, row = seq.root.account, seq.row
        length = self.block_tables.length.item(row)
        node = seq.node
        if seq.control.store and length > seq.resumed:
            node = self._leave_turn(seq, now)
        firsts = self.block_tables.first[:, row].tolist() if self.tree.windows else ()
        self.release(
            account, self.pages, self.block_tables.tables[:, row, : self.block_tables.blocks.item(row)].T
        )
        if self.has_states and self.block_tables.states[0, row]:
            self.release(account, self.states, self.block_tables.states[:, row][None].copy())
        if seq.state_source is not None:
            self.release(account, self.states, seq.state_source)
        for run in seq.media_runs.values():
            if isinstance(run, MediaRun):
                self.allocator.release_media(run, now)
            else:
                self.release(account, self.media, run)
        self.block_tables.free_row(row)
        account.open -= 1
        passed: Node | None = node
        while passed is not None:
            passed.last_used = now
            passed = passed.parent
        learner = account.queue.learner
        if learner is not None and seq.history is not None:
            runs = self.path(node)[::-1]
            learner.on_close(seq.history, runs, length, seq.control.tenant, seq.finish_reason, now)
            if node is not seq.node:
                self.tree.requeue(node, now)
        for window, first in enumerate(firsts):
            self.tree.queue_unneeded_range(node, window, first, length // self.block_tokens)
        self.tree.unlock(seq.node, now)
        return node

    def _leave_turn(self, seq: Sequence, now: float) -> Node:
        """Enter the partial tail and leave a resume point at the end; live states become its snapshot."""
        if not self.tree.keeps_checkpoints:
            if self.block_tables.length.item(seq.row) == seq.published:
                return seq.node
        elif not self.snapshots.turn_end:
            return seq.node
        end = int((self.block_tables.state_length if self.has_states else self.block_tables.length)[seq.row])
        node = self.points.published_node(seq, end, now, closing=True)
        if node is None:
            return seq.node
        if self.tree.keeps_checkpoints:
            states = self.block_tables.states[:, seq.row][None].copy() if self.has_states else None
            if states is None or states[0, 0]:
                self.tree.checkpoint(node, end, states, now)
        return node
