"""Names of what the tree holds, computed when someone asks, and events that tell them.

Nobody asks unless someone listens: a cache without tiers, peers or routers never hashes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .events import Dropped, EventBus, Stored
from .layout import GRAIN, PoolLayout
from .names import TOKEN_BYTES, chain, media_name, tail_name
from .nodes import Checkpoint, Node

__all__ = ["PLACE", "Teller"]

PLACE = "device"


class Teller:
    """Names nodes and tells listeners what entered or left the tree."""

    def __init__(self, layout: PoolLayout, events: EventBus, resolve: Callable[[int], bytes]) -> None:
        self.block = layout.block_tokens
        self.events = events
        self.resolve = resolve
        self.token_groups = tuple(g.index for g in layout.of("token"))
        self.state_groups = tuple(g.index for g in layout.of("state"))
        self.media_groups = tuple(g.index for g in layout.of("media"))
        windowed = [g for g in layout.of("token") if g.spec.span.windowed]
        self.window_columns = tuple(g.columns for g in windowed)
        self.window_groups = tuple(g.index for g in windowed)

    def name_before(self, node: Node) -> bytes:
        """The name of the last whole grain that ends at or before the node's start."""
        return self._last_name(node.parent) if node.parent is not None else node.root.name

    def _last_name(self, node: Node | None) -> bytes:
        while node is not None and node.parent is not None:
            if self.names(node):
                return node.names[-1]
            node = node.parent
        assert node is not None
        return node.root.name

    def names(self, node: Node) -> list[bytes]:
        """The names of the grains that end in `node`, computed once and kept with it."""
        unnamed = []
        current = node
        while current.parent is not None:  # up to the first node that has a name to go on from
            if self._unnamed_grains(current):
                unnamed.append(current)
            if current.names:
                break
            current = current.parent
        for current in reversed(unnamed):
            first = current.start // GRAIN
            begin = (first + len(current.names)) * GRAIN
            data = bytes(current.text[max(0, begin - current.start) * TOKEN_BYTES :])
            if begin < current.start:
                data = self._text_before(current, current.start - begin) + data
            parent = current.names[-1] if current.names else self.name_before(current)
            current.names += chain(parent, data, self.resolve)
        return node.names

    @staticmethod
    def _unnamed_grains(node: Node) -> int:
        return node.end // GRAIN - node.start // GRAIN - len(node.names)

    def _text_before(self, node: Node, tokens: int) -> bytes:
        text = b""
        current = node.parent
        while current is not None and len(text) < tokens * TOKEN_BYTES:
            text = bytes(current.text) + text
            current = current.parent
        return text[-tokens * TOKEN_BYTES :]

    def name_at(self, node: Node, position: int) -> bytes:
        """The name of the prefix that ends at `position` in `node`: a grain's, or a partial tail's."""
        grains = position // GRAIN - node.start // GRAIN
        parent = self.names(node)[grains - 1] if grains else self.name_before(node)
        if position % GRAIN == 0:
            return parent
        begin = position // GRAIN * GRAIN
        text = bytes(
            node.text[max(0, begin - node.start) * TOKEN_BYTES : (position - node.start) * TOKEN_BYTES]
        )
        if begin < node.start:
            text = self._text_before(node, node.start - begin) + text
        return tail_name(parent, text, self.resolve)

    def stored(self, node: Node, at: int) -> None:
        base = node.start // GRAIN
        first, last = at // GRAIN - base, node.end // GRAIN - base
        if last > first:
            names = self.names(node)
            parent = names[first - 1] if first else self.name_before(node)
            self.events.emit(Stored(parent, tuple(names[first:last]), self.token_groups, PLACE))
        tail = node.end % GRAIN
        if tail:
            name = self.name_at(node, node.end)
            parent = self.name_at(node, node.end - tail) if last else self.name_before(node)
            self.events.emit(Stored(parent, (name,), self.token_groups, PLACE, tail))

    def snapshot(self, checkpoint: Checkpoint) -> None:
        node, position = checkpoint.node, checkpoint.position
        name = self.name_at(node, position)
        before = (position - 1) // GRAIN * GRAIN
        parent = self.name_at(node, before) if before > node.start else self.name_before(node)
        # A tail inside a longer run has its pages there; only the snapshot makes its name worth telling.
        groups = self.state_groups + (self.token_groups if position % GRAIN else ())
        self.events.emit(Stored(parent, (name,), groups, PLACE, position % GRAIN))

    def adopted(self, node: Node, missing: npt.NDArray[np.bool_]) -> None:
        for window, columns in enumerate(self.window_columns):
            rows = np.flatnonzero(missing[:, columns.start])
            for name, parent in self._row_names(node, rows):
                self.events.emit(Stored(parent, (name,), (self.window_groups[window],), PLACE))

    def rows(self, node: Node, rows: npt.NDArray[np.intp], group: int, why: str) -> None:
        names = tuple(name for name, _ in self._row_names(node, rows))
        if names:
            self.events.emit(Dropped(names, (group,), PLACE, why))

    def _row_names(self, node: Node, rows: npt.NDArray[np.intp]) -> list[tuple[bytes, bytes]]:
        """(name, parent) of the grains in some of the node's blocks that end in the node."""
        names = self.names(node)
        per_block = self.block // GRAIN
        skipped = node.start // GRAIN - node.start // self.block * per_block
        found = []
        for row in rows.tolist():
            for grain in range(row * per_block - skipped, (row + 1) * per_block - skipped):
                if 0 <= grain < len(names):
                    found.append((names[grain], names[grain - 1] if grain else self.name_before(node)))
        return found

    def dropped(self, node: Node, end: int, why: str) -> None:
        base = node.start // GRAIN
        names = self.names(node)[end // GRAIN - base :]
        if node.end % GRAIN:
            names = [*names, self.name_at(node, node.end)]
        if names:
            self.events.emit(Dropped(tuple(reversed(names)), self.token_groups, PLACE, why))

    def media_stored(self, root: bytes, digest: bytes) -> None:
        self.events.emit(Stored(root, (media_name(root, digest),), self.media_groups, PLACE))

    def media_dropped(self, root: bytes, digest: bytes, why: str) -> None:
        self.events.emit(Dropped((media_name(root, digest),), self.media_groups, PLACE, why))

    def grown(self, node: Node) -> None:
        """A partial tail is about to be filled; its name goes unless a checkpoint stands there."""
        if node.end % GRAIN and all(c.position != node.end for c in node.checkpoints):
            self.events.emit(Dropped((self.name_at(node, node.end),), self.token_groups, PLACE, "grown"))

    def forgotten(self, checkpoint: Checkpoint, why: str) -> None:
        """A checkpoint goes, and with it the name of a tail that only it stood for."""
        name = self.name_at(checkpoint.node, checkpoint.position)
        inner_tail = checkpoint.position % GRAIN and checkpoint.position != checkpoint.node.end
        groups = self.state_groups + (self.token_groups if inner_tail else ())
        if groups:
            self.events.emit(Dropped((name,), groups, PLACE, why))
