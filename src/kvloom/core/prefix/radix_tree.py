"""The prefix tree: what this process has computed, found by comparing runs of tokens.

    root ── [0,37) ──┬── [37,80)         a node is a run of tokens of any length, cut where prompts part
                     └── [37,64)         a node has a row of page ids for every block it touches

Nodes meet inside a block where prompts part there; the block's row then stands in both (the upper
node's copy is good for its own tokens). Rows hold 0 for pages that left (windows). Where one can resume
is the matter of its checkpoints. The tree decides nothing about when things leave; it knows how.
"""

from __future__ import annotations

import numpy as np

from kvloom.core.eviction.tenants import Account
from kvloom.core.layout.pool_layout import HASH_TOKENS, PoolLayout
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .block_hash import TOKEN_BYTES, token_at
from .checkpoints import Checkpoints
from .node import Node, Root
from .publisher import EventPublisher

__all__ = ["RadixTree", "Retention"]

Retention = tuple[int, float | None]
"""Priority, and when it expires."""


class RadixTree(Checkpoints):
    """See the module. Costs: walking is in proportion to nodes passed (and bytes compared), splitting
    and trimming to the node."""

    def __init__(
        self, layout: PoolLayout, pages: BlockPages, states: BlockPages, teller: EventPublisher
    ) -> None:
        super().__init__(layout, pages, states, teller)
        self.roots: dict[bytes, Root] = {}
        self.nodes = 0
        self._no_rows: Ids = np.empty((0, pages.width), np.int32)

    # -- finding --------------------------------------------------------------------------------

    def root(self, name: bytes, account: Account, tenant: str = "") -> Root:
        root = self.roots.get(name)
        if root is None:
            root = self.roots[name] = Root(next(self._serials), name, account, self.pages.width, tenant)
        return root

    def walk(self, node: Node, data: bytes, limit: int) -> tuple[list[Node], int]:
        """The nodes that `data`, the tokens after `node`, passes; how many of the first `limit` they match."""
        path: list[Node] = []
        at = 0
        while at < limit and node.children:
            child = node.children.get(token_at(data, at * TOKEN_BYTES)[0])
            if child is None:
                break
            node = child
            path.append(node)
            common = self._common(node, data, at, limit - at)
            at += common
            if common < node.end - node.start:
                break
        return path, at

    def _common(self, node: Node, data: bytes, at: int, most: int) -> int:
        """How many tokens of `node` equal those of `data` from `at` on, `most` at the most."""
        size = node.end - node.start
        if size <= most and data.startswith(node.text, at * TOKEN_BYTES):
            return size
        size = min(size, most)
        ours = np.frombuffer(node.text, np.int32, size)
        differs = ours != np.frombuffer(data, np.int32, size, at * TOKEN_BYTES)
        first = int(differs.argmax())
        return first if differs[first] else size

    def rows(self, path: list[Node], stop: int) -> Ids:
        """The rows of page ids of the blocks below `stop` tokens along a path; a view where one node has all."""
        block = self.block
        if not path:
            return self._no_rows
        if path[0].end >= stop > 0:
            return path[0].pages[: (stop - 1) // block + 1]
        parts: list[Ids] = []
        for node in path:
            if node.start >= stop:
                break
            if parts and node.start % block:
                parts[-1] = parts[-1][:-1]
            last = (min(stop, node.end) - 1) // block - node.start // block + 1
            parts.append(node.pages[:last])
        return np.concatenate(parts) if parts else self._no_rows

    # -- growing --------------------------------------------------------------------------------

    def publish(
        self,
        cursor: Node,
        data: bytes,
        rows: Ids,
        now: float,
        retention: Retention = (0, None),
        standing: Node | None = None,
        last: bool = False,
        lock: bool = False,
    ) -> tuple[Node, bool]:
        """Enter the tokens `data` after `cursor` (which ends at a block's start) with their pages, whose `rows` the
        tree may keep: nobody else may change them afterwards.

        Where the tree already has a block's page, `rows` is changed to it: the caller then holds the
        tree's page instead of its own. Returns the node that now ends where `data` does, and
        whether anything of it was in the tree before. `standing` is the node that the caller has
        locked, if it is not `cursor`; `last` says that it will not stand there any more, so that the
        node may grow by a partial block too; `lock` moves its lock to the node returned.
        """
        node, start = cursor, cursor.end
        standing = standing or cursor
        at, stop = start, start + len(data) // TOKEN_BYTES
        while at < stop and node.children:
            child = node.children.get(token_at(data, (at - start) * TOKEN_BYTES)[0])
            if child is None:
                break
            common = self._common(child, data, at - start, stop - at)
            node = child if common == child.end - child.start else self.split(child, child.start + common)
            self._adopt(node, rows[node.start // self.block - start // self.block :], stop)
            node.last_used = now
            node.ended = False
            at += common
        born = False
        if at < stop:
            rest, fresh = data, rows
            if at > start:
                rest = data[(at - start) * TOKEN_BYTES :]
                fresh = rows[at // self.block - start // self.block :]
            stays = node is standing and stop % self.block and not last
            if not stays and self._may_grow(node, standing, retention) and not self._loses(node, fresh):
                self._grow(node, rest, fresh, now)
            else:
                born = True
                node = self._add_child(node, rest, fresh, now, retention, lock)
            if self.events.listening:
                self.publisher.stored(node, at)
        if lock and node is not standing:
            if not born:
                self.lock(node)
            self.unlock(standing, now)
        return node, at > start

    def _adopt(self, node: Node, rows: Ids, stop: int) -> None:
        """Take pages that the tree lacks from `rows` (which begins at the node's first block), and put
        the tree's into `rows` for the rest."""
        whole = node.end // self.block - node.start // self.block
        ours, theirs = node.pages[:whole], rows[:whole]
        if self.windows:
            missing = (ours == 0) & (theirs != 0)
            if missing.any():
                taken = np.where(missing, theirs, 0)
                self.pages.add_cached(taken, node)
                ours[missing] = theirs[missing]
                self._unsettle(node, node.start)
                if self.events.listening:
                    self.publisher.adopted(node, missing)
            np.copyto(theirs, ours, where=theirs != 0)
            if node.end == stop and node.end % self.block:
                # The data ends in this block as the node does: a page the node lacks may be taken.
                tail, given = node.pages[whole], rows[whole]
                lacking = (tail == 0) & (given != 0)
                if lacking.any():
                    self.pages.add_cached(np.where(lacking, given, 0)[None], node)
                    tail[lacking] = given[lacking]
                    self._unsettle(node, node.start)
        else:
            theirs[:] = ours

    def _may_grow(self, node: Node, standing: Node, retention: Retention) -> bool:
        """A run grows in place while it is one sequence's own: nobody else is there, none has hit it."""
        return (
            node.parent is not None
            and not node.children
            and node.locks == (1 if node is standing else 0)
            and node.hits == 0
            and (node.priority, node.expires) == retention
        )

    def _loses(self, node: Node, rows: Ids) -> bool:
        """Whether a run that grows from `rows` on would lose a window's page, which may protect a resume point: a partial block's
        fuller page came without it."""
        if not self.windows or not node.end % self.block:
            return False
        return bool(((node.pages[node.count - 1] > 0) & (rows[0] == 0)).any())

    def may_append(self, cursor: Node) -> bool:
        """Whether a block after `cursor` can be added by `append_blocks`: it is one sequence's own run."""
        return self._may_grow(cursor, cursor, (0, None))

    def append_blocks(self, nodes: list[Node], data: bytes, rows: Ids, now: float) -> None:
        """`publish` of one block each for many nodes that may be appended to."""
        self.pages.add_cached(rows, None)
        size = self.block * TOKEN_BYTES
        for i, node in enumerate(nodes):
            have = node.count
            self._unsettle(node, node.end)
            if have == len(node.pages):
                self._make_capacity(node, 2 * have)
            node.pages[have] = rows[i]
            node.count = have + 1
            node.text += data[i * size : (i + 1) * size]
            node.end += self.block
            node.last_used = now
            if self.pages.owners:
                self.pages.own(rows[i : i + 1], node)
            if self.events.listening:
                self.publisher.stored(node, node.end - self.block)

    def _make_capacity(self, node: Node, capacity: int) -> None:
        pages = np.zeros((capacity, self.pages.width), np.int32)
        pages[: node.count] = node.pages[: node.count]
        node.pages = pages
        if node.checkpoint_counts is not None:
            marks = np.zeros((capacity, len(self.windows)), np.int32)
            marks[: node.count] = node.checkpoint_counts[: node.count]
            node.checkpoint_counts = marks

    def _unsettle(self, node: Node, end: int) -> None:
        """A run gets pages from `end` on, which were not in it when whoever keeps copies below last set a mark."""
        marks = 0 if self.offload_source is None else self.offload_source.marks
        node.settled = end if node.grown < marks else min(end, node.settled)
        node.grown = marks

    def _grow(self, node: Node, data: bytes, rows: Ids, now: float) -> None:
        self._unsettle(node, node.end)
        self.pages.add_cached(rows, node)
        have = node.count
        if node.end % self.block:  # a partial tail goes on: its last block gets the fuller page
            if self.events.listening:
                self.publisher.grown(node)
            have -= 1
            self.version += 1
            self.replaced += 1
            old = node.pages[have : have + 1].copy()
            node.root.account.used -= self.pages.drop_cached(old)
            node.pages[have] = 0
            self.pages.own(rows[:1], node)
            self._reassign_owner(node, old)
        if have + len(rows) > len(node.pages):
            self._make_capacity(node, max(have + len(rows), 2 * have))
        node.count = have + len(rows)
        node.pages[have : node.count] = rows
        node.text += data
        node.end += len(data) // TOKEN_BYTES
        node.last_used = now
        if node.queued is not None:
            node.root.account.queue.push(node, now)

    def _add_child(
        self, parent: Node, data: bytes, rows: Ids, now: float, retention: Retention, lock: bool
    ) -> Node:
        pages = rows if rows.base is None else rows.copy()
        node = Node(next(self._serials), now, parent.end, bytearray(data), pages)
        node.parent, node.root = parent, parent.root
        node.priority, node.expires = retention
        node.row_bytes = self.pages.row_bytes
        self._unsettle(node, node.start)
        if self.windows:
            node.checkpoint_counts = np.zeros((node.count, len(self.windows)), np.int32)
        self.pages.add_cached(rows, node)
        parent.children[token_at(data)[0]] = node
        self.nodes += 1
        queue = node.root.account.queue
        if parent.queued is not None:
            queue.remove(parent)
        queue.policy.on_insert(node, now)
        if lock:
            node.locks = 1  # someone stands there from the first: no need to queue it until they leave
        else:
            queue.push(node, now)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut a run in two; returns the new upper node. `node` stays the lower one, so whoever stands at
        its end still does."""
        self.version += 1
        first, cut = node.start // self.block, at // self.block
        offset = (at - node.start) * TOKEN_BYTES
        upper_rows = (at - 1) // self.block - first + 1
        upper = Node(
            next(self._serials), node.created, node.start, node.text[:offset], node.pages[:upper_rows].copy()
        )
        upper.parent, upper.root, upper.row_bytes = node.parent, node.root, node.row_bytes
        for name in (
            "last_used",
            "hits",
            "priority",
            "expires",
            "ended",
            "value",
            "offloaded_tokens",
            "grown",
        ):
            setattr(upper, name, getattr(node, name))
        upper.settled, node.settled = min(node.settled, at), max(node.settled, at)
        if node.history is not None:
            upper.history = node.history.split()
        upper.checkpoints = [c for c in node.checkpoints if c.position <= at]
        node.checkpoints = [c for c in node.checkpoints if c.position > at]
        for checkpoint in upper.checkpoints:
            checkpoint.node = upper
        self.pages.own(upper.pages[: cut - first], upper)
        if at % self.block:
            self.pages.add_cached(upper.pages[-1:], node)
        if node.checkpoint_counts is not None:
            upper.checkpoint_counts = node.checkpoint_counts[:upper_rows].copy()
            node.checkpoint_counts = node.checkpoint_counts[cut - first :].copy()
            if at % self.block:
                node.checkpoint_counts[0] -= sum(c.position > cut * self.block for c in upper.checkpoints)
        grains = at // HASH_TOKENS - node.start // HASH_TOKENS
        upper.hashes, node.hashes = node.hashes[:grains], node.hashes[grains:]
        assert node.parent is not None
        node.parent.children[token_at(node.text)[0]] = upper
        node.pages = node.pages[cut - first : node.count].copy()
        node.count = len(node.pages)
        del node.text[:offset]
        node.start = at
        node.parent = upper
        upper.children = {token_at(node.text)[0]: node}
        self.nodes += 1
        if node.unneeded_windows:
            for window in range(len(self.windows)):
                if node.unneeded_windows >> window & 1:
                    self.queue_unneeded(upper, window)
        return upper

    # -- shrinking ------------------------------------------------------------------------------

    def trim(self, node: Node, end: int, why: str) -> None:
        """Cut a leaf's run to `end`, or remove it if nothing is left."""
        self.version += 1
        start, block = node.start, self.block
        while node.checkpoints and node.checkpoints[-1].position > end:
            self.drop_checkpoint(node.checkpoints[-1], why)
        if self.events.listening:
            self.publisher.dropped(node, max(end, start), why)
        if self.offload_source is not None:
            self.offload_source.on_trim(node, end)
            node.offloaded_tokens = min(node.offloaded_tokens, end)
        keep = 0 if end <= start else (end - 1) // block - start // block + 1
        gone = node.pages[keep : node.count]
        node.root.account.used -= self.pages.drop_cached(gone)
        node.count = keep
        if self.pages.owners:
            self._reassign_owner(node, gone[:1])
        if end <= start:
            self._remove(node)
        else:
            del node.text[(end - start) * TOKEN_BYTES :]
            if node.hashes:
                del node.hashes[end // HASH_TOKENS - start // HASH_TOKENS :]
            node.end = end

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[token_at(node.text)[0]]
        node.root.account.queue.remove(node)
        node.end = node.start
        node.parent = None
        # Whoever remembers the node needs no more of it.
        node.text, node.hashes, node.pages = bytearray(), [], self._no_rows
        self.nodes -= 1
        if parent.parent is None and not parent.children and not parent.locks:
            self.roots.pop(parent.root.hash, None)

    # -- who stands where -----------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        node.locks += 1
        if node.queued is not None:
            node.root.account.queue.remove(node)

    def unlock(self, node: Node, now: float) -> None:
        node.locks -= 1
        if not node.children and not node.locks:
            if node.parent is None:
                self.roots.pop(node.root.hash, None)
            else:
                self.requeue(node, now)

    def requeue(self, node: Node, now: float) -> None:
        """Queue a node if it may leave; at the front if it has a tail in which nobody can resume."""
        if not node.children and not node.locks and node.parent is not None:  # a leaf, as `leaf` says
            if self.keeps_checkpoints:
                node.useless = self.last_resume(node) < node.end
            node.root.account.queue.push(node, now)
