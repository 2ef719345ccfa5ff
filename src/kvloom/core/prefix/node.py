"""What the prefix tree is made of: nodes, the roots they hang from, and checkpoints in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.policies import Entry, ReuseHistory
from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.page_pool import Ids

from .block_hash import TOKEN_BYTES

__all__ = ["Checkpoint", "Node", "Root", "nodes_sharing_block"]


class Node(Entry):
    """A run of tokens [start, end) and the pages of the blocks it touches."""

    __slots__ = (
        "checkpoint_counts",
        "checkpoints",
        "children",
        "count",
        "end",
        "grown",
        "hashes",
        "locks",
        "offloaded_tokens",
        "pages",
        "parent",
        "root",
        "row_bytes",
        "settled",
        "start",
        "text",
        "unneeded_windows",
    )

    parent: Node | None
    root: Root

    def __init__(self, serial: int, now: float, start: int, text: bytearray, pages: Ids) -> None:
        Entry.__init__(self, serial, now)
        self.start = start
        self.end = start + len(text) // TOKEN_BYTES
        self.text = text
        self.pages = pages  # may have spare capacity; `count` rows are real
        self.count = len(pages)
        self.row_bytes = 0
        self.children: dict[int, Node] = {}
        self.checkpoints: list[Checkpoint] = []
        self.checkpoint_counts: npt.NDArray[np.int32] | None = None
        self.hashes: list[bytes] = []  # of the grains that end in it, as far as anyone asked
        self.locks = 0
        self.unneeded_windows = 0
        self.offloaded_tokens = 0  # tokens whose pages were offered to whoever keeps copies below
        self.grown = 0  # after how many marks of theirs it got its last pages
        self.settled = start  # where it ended at that mark

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def depth(self) -> int:
        return self.start

    @property
    def bytes(self) -> int:
        return self.count * self.row_bytes

    @property
    def leaf(self) -> bool:
        """May it leave: nothing hangs below it and nobody is there."""
        return not self.children and self.locks == 0 and self.parent is not None


class Root(Node):
    """Where the names of one model, tenant and adapter begin."""

    __slots__ = ("account", "hash", "tenant")

    def __init__(self, serial: int, name: bytes, account: Account, width: int, tenant: str) -> None:
        super().__init__(serial, 0.0, 0, bytearray(), np.empty((0, width), np.int32))
        self.hash = name
        self.account = account  # who pays: the tenant's own, or one that it shares with others
        self.tenant = tenant
        self.parent = None
        self.root = self


class Checkpoint(Entry):
    """A resume point at `position` in `node`, with its state snapshot where the model keeps states."""

    __slots__ = ("is_offloaded", "locks", "node", "position", "reach", "row_bytes", "states")

    def __init__(self, serial: int, now: float, node: Node, position: int, states: Ids | None) -> None:
        super().__init__(serial, now, node.priority, node.expires)
        self.node = node
        self.position = position
        self.reach = position  # the earliest query whose window it protects
        self.states = states
        self.row_bytes = 0
        self.locks = 0  # pins that need it
        self.is_offloaded = False  # its states were, as for a node

    @property
    def memo(self) -> ReuseHistory | None:
        """That of the run it stands in: whoever comes back comes back to both."""
        return self.node.history

    @memo.setter
    def memo(self, memo: ReuseHistory | None) -> None:
        pass

    @property
    def tokens(self) -> int:
        before = [c.position for c in self.node.checkpoints if c.position < self.position]
        return self.position - (max(before) if before else self.node.start)

    @property
    def depth(self) -> int:
        return self.position - self.tokens

    @property
    def bytes(self) -> int:
        return self.row_bytes


def nodes_sharing_block(node: Node, block: int) -> Iterator[Node]:
    """The nodes that meet `node` inside its first block of `block` tokens or its last, where a page may stand in several."""
    current, first = node, node.start // block * block
    while current.start > first and current.parent is not None and current.parent.parent is not None:
        current = current.parent
        yield current
    last = node.end // block
    below = [child for child in node.children.values() if node.end % block]
    while below:
        current = below.pop()
        yield current
        if current.end // block == last:
            below += current.children.values()
