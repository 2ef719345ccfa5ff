"""Radix tree: contains the prefixes that this process computed, and finds them by comparing tokens.

    root ── [0,37) ──┬── [37,80)         a node has any number of tokens; it is split where prompts diverge
                     └── [37,64)         a node has the page ids of every block that contains some of its tokens

If prompts diverge inside a block, several nodes share the block. Each of these nodes has its own page ids for the
block, which are valid for the tokens of the node. The id of an evicted window page is 0. `checkpoints` handles
resumable positions. The allocator decides which entries are evicted and when. The tree evicts them.
"""

from __future__ import annotations

import numpy as np

from kvloom.core.eviction.tenants import Owner
from kvloom.core.layout.pool_layout import HASH_TOKENS, PoolLayout
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .block_hash import TOKEN_BYTES, token_at
from .checkpoints import Checkpoints
from .node import Node, Root
from .publisher import EventPublisher

__all__ = ["RadixTree", "Retention"]

Retention = tuple[int, float | None]
"""An eviction priority, and the time at which it expires (in seconds of the cache's clock). None means that the
priority does not expire."""


class RadixTree(Checkpoints):
    """The radix tree. The time of a walk grows with the number of nodes passed and of bytes compared. The time of a
    split or trim grows with the size of the node.
    """

    def __init__(
        self, layout: PoolLayout, pages: BlockPages, states: BlockPages, publisher: EventPublisher
    ) -> None:
        super().__init__(layout, pages, states, publisher)
        self.roots: dict[bytes, Root] = {}
        self.nodes = 0
        self.tokens = 0
        """Number of tokens of all nodes."""
        self.locked: set[Node] = set()
        """Nodes that have locks, because a sequence, a pin or a load ends there."""
        self._no_rows: Ids = np.empty((0, pages.width), np.int32)

    # -- finding --------------------------------------------------------------------------------

    def root(self, root_hash: bytes, owner: Owner, adapter: str = "") -> Root:
        """Return the root with the hash `root_hash`. If there is none, creates a root with this `owner` and
        `adapter`."""
        root = self.roots.get(root_hash)
        if root is None:
            root = Root(next(self._serials), root_hash, owner, self.pages.width, adapter)
            self.roots[root_hash] = root
        return root

    def walk(self, node: Node, data: bytes, limit: int) -> tuple[list[Node], int]:
        """Return the nodes below `node` that match the tokens in `data`, and the number of matching tokens. The last
        node may match only in part. At most `limit` tokens are compared."""
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
        """Return how many tokens of `node` equal the tokens of `data` from `at` on, at most `most`."""
        size = node.end - node.start
        if size <= most and data.startswith(node.text, at * TOKEN_BYTES):
            return size
        size = min(size, most)
        ours = np.frombuffer(node.text, np.int32, size)
        differs = ours != np.frombuffer(data, np.int32, size, at * TOKEN_BYTES)
        first = int(differs.argmax())
        return first if differs[first] else size

    def rows(self, path: list[Node], stop: int) -> Ids:
        """Return the page ids of the first `stop` tokens along a path, one row per block. If the first node has all
        these tokens, the result is a view of its page ids."""
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

    @staticmethod
    def path(node: Node) -> list[Node]:
        """Return the path from the first node after the root to `node`."""
        path = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            path.append(current)
            current = current.parent
        return path[::-1]

    # -- growing --------------------------------------------------------------------------------

    def publish(
        self,
        cursor: Node,
        data: bytes,
        rows: Ids,
        now: float,
        retention: Retention = (0, None),
        locked: Node | None = None,
        last: bool = False,
        lock: bool = False,
        owner: Owner | None = None,
    ) -> tuple[Node, bool]:
        """Add the tokens `data` and their pages (`rows`) after `cursor`, which ends at a block boundary. Return the
        node that ends where `data` ends, and whether the tree already had any of the tokens.

        The tree takes over the array `rows`, so the caller must not change the array afterwards. If the tree already
        has a page of a block, the tree writes the id of that page into `rows`. The caller must then use that page.

        - `locked`: the node that the caller has locked, by default `cursor`.
        - `last`: the caller will unlock the node `locked` next. Only in this case may that node grow by a partial
          block.
        - `lock`: moves the caller's lock to the returned node.
        - `owner`: the owner of all pages in `rows`, by default the owner of `cursor`.
        - `retention`: the eviction priority of the tokens, and its expiry time.
        """
        node, start = cursor, cursor.end
        locked, owner = locked or cursor, owner or cursor.owner
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
        is_new = False
        if at < stop:
            rest, fresh = data, rows
            if at > start:
                rest = data[(at - start) * TOKEN_BYTES :]
                fresh = rows[at // self.block - start // self.block :]
            stays = node is locked and stop % self.block and not last
            if not stays and self._may_grow(node, locked, retention, owner) and not self._loses(node, fresh):
                self._grow(node, rest, fresh, now)
            else:
                is_new = True
                node = self._add_child(node, rest, fresh, now, retention, lock, owner)
            if self.events.listening:
                self.publisher.stored(node, at)
        if lock and node is not locked:
            if not is_new:
                self.lock(node)
            self.unlock(locked, now)
        return node, at > start

    def _adopt(self, node: Node, rows: Ids, stop: int) -> None:
        """Merge newly computed pages into a node that already has the same tokens. `rows` has their page ids, one row
        per block, from the first block of the node on. The published tokens end at `stop`.

        - The node takes the pages that it lacks.
        - For the other pages of its full blocks, the node keeps its own pages, and their ids are written into `rows`.
        """
        whole = node.end // self.block - node.start // self.block
        ours, theirs = node.pages[:whole], rows[:whole]
        if self.windows:
            missing = (ours == 0) & (theirs != 0)
            if missing.any():
                taken = np.where(missing, theirs, 0)
                self.pages.add_cached(taken, node)
                ours[missing] = theirs[missing]
                self._note_growth(node, node.start)
                if self.events.listening:
                    self.publisher.adopted(node, missing)
            np.copyto(theirs, ours, where=theirs != 0)
            if node.end == stop and node.end % self.block:
                # The data ends inside this block, where the node ends, so a missing page may be added.
                tail, given = node.pages[whole], rows[whole]
                lacking = (tail == 0) & (given != 0)
                if lacking.any():
                    self.pages.add_cached(np.where(lacking, given, 0)[None], node)
                    tail[lacking] = given[lacking]
                    self._note_growth(node, node.start)
        else:
            theirs[:] = ours

    def _may_grow(self, node: Node, locked: Node, retention: Retention, owner: Owner) -> bool:
        """Return whether new tokens may be added to a node itself, instead of to a new child. This is allowed only if
        no other request uses the node or has hit it. `locked` is the node that the caller has locked. The node must
        also have the given owner and retention (priority and expiry time)."""
        return (
            node.parent is not None
            and not node.children
            and node.locks == (1 if node is locked else 0)
            and node.hits == 0
            and (node.priority, node.expires) == retention
            and node.owner == owner
        )

    def _loses(self, node: Node, rows: Ids) -> bool:
        """Return whether a node would lose a window page if it grew by `rows` (page ids, one row per block). The
        first row replaces the page ids of the node's partial block. This row may lack a window page that a
        checkpoint still needs."""
        if not self.windows or not node.end % self.block:
            return False
        return bool(((node.pages[node.count - 1] > 0) & (rows[0] == 0)).any())

    def may_append(self, cursor: Node, owner: Owner) -> bool:
        """Return whether `append_blocks` may add a block of `owner` to the node `cursor`. `_may_grow` has the
        conditions, for example that no other sequence uses the node."""
        return self._may_grow(cursor, cursor, (0, None), owner)

    def append_blocks(self, nodes: list[Node], data: bytes, rows: Ids, now: float) -> None:
        """Add one block to every node of `nodes`. `may_append` must be true for each node. `data` contains the tokens
        of all blocks as bytes, and `rows[i]` the page ids of the block for `nodes[i]`. Has the same effect as `publish`
        for each node."""
        self.pages.add_cached(rows, None)
        if self.pages.owners:
            self.pages.own_each(rows, nodes)
        block, source, listening = self.block, self.offload_source, self.events.listening
        size = block * TOKEN_BYTES
        self.tokens += block * len(nodes)
        for i, node in enumerate(nodes):
            have, end = node.count, node.end
            if source is not None:
                source.on_grow(node, end)
            if have == len(node.pages):
                self._make_capacity(node, 2 * have)
            node.pages[have] = rows[i]
            node.count = have + 1
            node.text += data[i * size : (i + 1) * size]
            node.end = end + block
            node.last_used = now
            if listening:
                self.publisher.stored(node, end)

    def _make_capacity(self, node: Node, capacity: int) -> None:
        pages = np.zeros((capacity, self.pages.width), np.int32)
        pages[: node.count] = node.pages[: node.count]
        node.pages = pages
        if node.checkpoint_counts is not None:
            marks = np.zeros((capacity, len(self.windows)), np.int32)
            marks[: node.count] = node.checkpoint_counts[: node.count]
            node.checkpoint_counts = marks

    def _note_growth(self, node: Node, end: int) -> None:
        if self.offload_source is not None:
            self.offload_source.on_grow(node, end)

    def _grow(self, node: Node, data: bytes, rows: Ids, now: float) -> None:
        self._note_growth(node, node.end)
        self.pages.add_cached(rows, node)
        have = node.count
        if node.end % self.block:  # the page of the full block replaces the page of the partial block
            if self.events.listening:
                self.publisher.grown(node)
            have -= 1
            self.version += 1
            self.replaced += 1
            old = node.pages[have : have + 1].copy()
            node.owner.account.free(self.pages.drop_cached(old))
            node.pages[have] = 0
            self.pages.own(rows[:1], node)
            self._reassign_owner(node, old)
        if have + len(rows) > len(node.pages):
            self._make_capacity(node, max(have + len(rows), 2 * have))
        node.count = have + len(rows)
        node.pages[have : node.count] = rows
        node.text += data
        node.end += len(data) // TOKEN_BYTES
        self.tokens += len(data) // TOKEN_BYTES
        node.last_used = now
        if node.queued is not None:
            node.owner.account.queue.push(node, now)

    def _add_child(
        self,
        parent: Node,
        data: bytes,
        rows: Ids,
        now: float,
        retention: Retention,
        lock: bool,
        owner: Owner,
    ) -> Node:
        pages = rows if rows.base is None else rows.copy()
        node = Node(next(self._serials), now, parent.end, bytearray(data), pages)
        node.parent, node.root, node.owner = parent, parent.root, owner
        node.priority, node.expires = retention
        node.row_bytes = self.pages.row_bytes
        if self.offload_source is not None:
            self.offload_source.on_grow(node, node.start)
        if self.windows:
            node.checkpoint_counts = np.zeros((node.count, len(self.windows)), np.int32)
        self.pages.add_cached(rows, node)
        parent.children[token_at(data)[0]] = node
        self.nodes += 1
        self.tokens += len(data) // TOKEN_BYTES
        queue = node.owner.account.queue
        if parent.queued is not None:
            parent.owner.account.queue.remove(parent)
        queue.policy.on_insert(node, now)
        if lock:
            node.locks = 1  # the new node is locked from the start, so it is not queued for eviction
            self.locked.add(node)
        else:
            queue.push(node, now)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Split a node at token `at` and return the new upper node. `node` becomes the lower node and keeps its
        locks.
        """
        self.version += 1
        first, cut = node.start // self.block, at // self.block
        offset = (at - node.start) * TOKEN_BYTES
        upper_rows = (at - 1) // self.block - first + 1
        upper = Node(
            next(self._serials), node.created, node.start, node.text[:offset], node.pages[:upper_rows].copy()
        )
        upper.parent, upper.root, upper.row_bytes = node.parent, node.root, node.row_bytes
        upper.owner = node.owner
        for name in ("last_used", "hits", "priority", "expires", "ended", "value"):
            setattr(upper, name, getattr(node, name))
        if self.offload_source is not None:
            self.offload_source.on_split(upper, node, at)
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
        units = at // HASH_TOKENS - node.start // HASH_TOKENS
        upper.hashes, node.hashes = node.hashes[:units], node.hashes[units:]
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

    def trim(self, node: Node, end: int, reason: str) -> None:
        """Evict the tokens of a leaf from `end` on. Removes the leaf if no tokens remain."""
        self.version += 1
        start, block = node.start, self.block
        while node.checkpoints and node.checkpoints[-1].position > end:
            self.drop_checkpoint(node.checkpoints[-1], reason)
        if self.events.listening:
            self.publisher.dropped(node, max(end, start), reason)
        if self.offload_source is not None:
            self.offload_source.on_trim(node, end)
        self.tokens -= node.end - max(end, start)
        keep = 0 if end <= start else (end - 1) // block - start // block + 1
        gone = node.pages[keep : node.count]
        node.owner.account.free(self.pages.drop_cached(gone))
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
        node.owner.account.queue.remove(node)
        node.end = node.start
        node.parent = None
        # Sessions and ghosts may still refer to the node, but do not need its contents.
        node.text, node.hashes, node.pages = bytearray(), [], self._no_rows
        self.nodes -= 1
        if parent.parent is None and not parent.children and not parent.locks:
            self.roots.pop(parent.root.hash, None)

    # -- locks and hits -------------------------------------------------------------------------

    def hit(self, node: Node, now: float) -> None:
        """Record a hit of a node. Calls `Policy.on_hit` before `node.last_used` changes."""
        node.hits += 1
        if node.hits == 1 and node.offload is not None:
            # Pass the pages to the listener once more: a tier that stores only reused pages needs them now.
            node.offload.offloaded_tokens = 0
        node.ended = False
        node.owner.account.queue.policy.on_hit(node, now)
        node.last_used = now

    def lock(self, node: Node) -> None:
        """Forbid eviction of a node and of all nodes above it."""
        if not node.locks:
            self.locked.add(node)
        node.locks += 1
        if node.queued is not None:
            node.owner.account.queue.remove(node)

    def unlock(self, node: Node, now: float) -> None:
        """Drop one lock. A leaf without locks is queued for eviction. A root without nodes is removed."""
        node.locks -= 1
        if node.locks:
            return
        self.locked.discard(node)
        if not node.children:
            if node.parent is None:
                self.roots.pop(node.root.hash, None)
            else:
                self.requeue(node, now)

    def requeue(self, node: Node, now: float) -> None:
        """Queue a leaf for eviction. If no prompt can resume at the end of the leaf, the leaf has the retention
        priority FIRST and is evicted before other entries."""
        if not node.children and not node.locks and node.parent is not None:  # inlined `node.leaf`
            if self.needs_checkpoints:
                node.useless = self.last_resume(node) < node.end
            node.owner.account.queue.push(node, now)
