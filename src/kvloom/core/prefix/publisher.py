"""Names of what the tree holds, computed when someone asks, and events that tell them.

Nobody asks unless someone listens: a cache without tiers, peers or routers never hashes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvloom.core.events import BlockRemoved, BlockStored, EventBus
from kvloom.core.layout.pool_layout import HASH_TOKENS, PoolLayout

from .block_hash import TOKEN_BYTES, hash_chain, media_hash, tail_hash
from .node import Checkpoint, Node

__all__ = ["PLACE", "EventPublisher"]

PLACE = "device"


class EventPublisher:
    """Names nodes and tells listeners what entered or left the tree."""

    def __init__(self, layout: PoolLayout, events: EventBus, resolve: Callable[[int], bytes]) -> None:
        self.block = layout.block_tokens
        self.events = events
        self.resolve = resolve
        self.token_groups = tuple(g.index for g in layout.of("token"))
        self.state_groups = tuple(g.index for g in layout.of("state"))
        self.media_groups = tuple(g.index for g in layout.of("media"))
        windowed = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self.window_columns = tuple(g.columns for g in windowed)
        self.window_groups = tuple(g.index for g in windowed)

    def hash_before(self, node: Node) -> bytes:
        """The name of the last whole grain that ends at or before the node's start."""
        return self._last_hash(node.parent) if node.parent is not None else node.root.hash

    def _last_hash(self, node: Node | None) -> bytes:
        while node is not None and node.parent is not None:
            if self.hashes(node):
                return node.hashes[-1]
            node = node.parent
        assert node is not None
        return node.root.hash

    def hashes(self, node: Node) -> list[bytes]:
        """The names of the grains that end in `node`, computed once and kept with it."""
        unnamed = []
        current = node
        while current.parent is not None:  # up to the first node that has a name to go on from
            if self._unhashed_tokens(current):
                unnamed.append(current)
            if current.hashes:
                break
            current = current.parent
        for current in reversed(unnamed):
            first = current.start // HASH_TOKENS
            begin = (first + len(current.hashes)) * HASH_TOKENS
            data = bytes(current.text[max(0, begin - current.start) * TOKEN_BYTES :])
            if begin < current.start:
                data = self._text_before(current, current.start - begin) + data
            parent = current.hashes[-1] if current.hashes else self.hash_before(current)
            current.hashes += hash_chain(parent, data, self.resolve)
        return node.hashes

    @staticmethod
    def _unhashed_tokens(node: Node) -> int:
        return node.end // HASH_TOKENS - node.start // HASH_TOKENS - len(node.hashes)

    def _text_before(self, node: Node, tokens: int) -> bytes:
        text = b""
        current = node.parent
        while current is not None and len(text) < tokens * TOKEN_BYTES:
            text = bytes(current.text) + text
            current = current.parent
        return text[-tokens * TOKEN_BYTES :]

    def hash_at(self, node: Node, position: int) -> bytes:
        """The name of the prefix that ends at `position` in `node`: a grain's, or a partial tail's."""
        grains = position // HASH_TOKENS - node.start // HASH_TOKENS
        parent = self.hashes(node)[grains - 1] if grains else self.hash_before(node)
        if position % HASH_TOKENS == 0:
            return parent
        begin = position // HASH_TOKENS * HASH_TOKENS
        text = bytes(
            node.text[max(0, begin - node.start) * TOKEN_BYTES : (position - node.start) * TOKEN_BYTES]
        )
        if begin < node.start:
            text = self._text_before(node, node.start - begin) + text
        return tail_hash(parent, text, self.resolve)

    def stored(self, node: Node, at: int) -> None:
        base = node.start // HASH_TOKENS
        first, last = at // HASH_TOKENS - base, node.end // HASH_TOKENS - base
        if last > first:
            names = self.hashes(node)
            parent = names[first - 1] if first else self.hash_before(node)
            self.events.emit(BlockStored(parent, tuple(names[first:last]), self.token_groups, PLACE))
        tail = node.end % HASH_TOKENS
        if tail:
            name = self.hash_at(node, node.end)
            parent = self.hash_at(node, node.end - tail) if last else self.hash_before(node)
            self.events.emit(BlockStored(parent, (name,), self.token_groups, PLACE, tail))

    def checkpoint_stored(self, checkpoint: Checkpoint) -> None:
        node, position = checkpoint.node, checkpoint.position
        name = self.hash_at(node, position)
        before = (position - 1) // HASH_TOKENS * HASH_TOKENS
        parent = self.hash_at(node, before) if before > node.start else self.hash_before(node)
        # A tail inside a longer run has its pages there; only the snapshot makes its name worth telling.
        groups = self.state_groups + (self.token_groups if position % HASH_TOKENS else ())
        self.events.emit(BlockStored(parent, (name,), groups, PLACE, position % HASH_TOKENS))

    def adopted(self, node: Node, missing: npt.NDArray[np.bool_]) -> None:
        for window, columns in enumerate(self.window_columns):
            rows = np.flatnonzero(missing[:, columns.start])
            for name, parent in self._row_hashes(node, rows):
                self.events.emit(BlockStored(parent, (name,), (self.window_groups[window],), PLACE))

    def window_pages_dropped(self, node: Node, rows: npt.NDArray[np.intp], group: int, why: str) -> None:
        names = tuple(name for name, _ in self._row_hashes(node, rows))
        if names:
            self.events.emit(BlockRemoved(names, (group,), PLACE, why))

    def _row_hashes(self, node: Node, rows: npt.NDArray[np.intp]) -> list[tuple[bytes, bytes]]:
        """(name, parent) of the grains in some of the node's blocks that end in the node."""
        names = self.hashes(node)
        per_block = self.block // HASH_TOKENS
        skipped = node.start // HASH_TOKENS - node.start // self.block * per_block
        found = []
        for row in rows.tolist():
            for grain in range(row * per_block - skipped, (row + 1) * per_block - skipped):
                if 0 <= grain < len(names):
                    found.append((names[grain], names[grain - 1] if grain else self.hash_before(node)))
        return found

    def dropped(self, node: Node, end: int, why: str) -> None:
        base = node.start // HASH_TOKENS
        names = self.hashes(node)[end // HASH_TOKENS - base :]
        if node.end % HASH_TOKENS:
            names = [*names, self.hash_at(node, node.end)]
        if names:
            self.events.emit(BlockRemoved(tuple(reversed(names)), self.token_groups, PLACE, why))

    def media_stored(self, root: bytes, digest: bytes) -> None:
        self.events.emit(BlockStored(root, (media_hash(root, digest),), self.media_groups, PLACE))

    def media_dropped(self, root: bytes, digest: bytes, why: str) -> None:
        self.events.emit(BlockRemoved((media_hash(root, digest),), self.media_groups, PLACE, why))

    def grown(self, node: Node) -> None:
        """A partial tail is about to be filled; its name goes unless a checkpoint stands there."""
        if node.end % HASH_TOKENS and all(c.position != node.end for c in node.checkpoints):
            self.events.emit(BlockRemoved((self.hash_at(node, node.end),), self.token_groups, PLACE, "grown"))

    def checkpoint_dropped(self, checkpoint: Checkpoint, why: str) -> None:
        """A checkpoint goes, and with it the name of a tail that only it stood for."""
        name = self.hash_at(checkpoint.node, checkpoint.position)
        inner_tail = checkpoint.position % HASH_TOKENS and checkpoint.position != checkpoint.node.end
        groups = self.state_groups + (self.token_groups if inner_tail else ())
        if groups:
            self.events.emit(BlockRemoved((name,), groups, PLACE, why))
