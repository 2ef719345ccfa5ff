"""The entries of the radix tree: nodes, roots and checkpoints. This module has only data. The tree modifies these
objects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvloom.core.eviction.policies import Entry, ReuseHistory
from kvloom.core.eviction.tenants import Account, Owner
from kvloom.core.pool.block_pages import replace_page
from kvloom.core.pool.page_pool import Ids, Index

from .block_hash import TOKEN_BYTES

__all__ = ["Checkpoint", "Node", "OffloadMarks", "Root", "nodes_sharing_block"]


class OffloadMarks:
    """Records which pages of a node were already passed to the offload manager, and when the node last got pages. Nodes
    have these marks only if a tier is attached."""

    __slots__ = ("grown", "offloaded_tokens", "settled")

    def __init__(self, settled: int, grown: int = 0, offloaded_tokens: int = 0) -> None:
        self.offloaded_tokens = offloaded_tokens  # end of the tokens whose pages were passed to the listener
        self.grown = grown  # number of step marks when the node got its last pages
        self.settled = settled  # end of the node at that mark


class Node(Entry):
    """A node of the radix tree. It stores tokens [start, end) of a prefix, and the pages of all blocks that contain
    these tokens."""

    __slots__ = (
        "checkpoint_counts",
        "checkpoints",
        "children",
        "count",
        "end",
        "hashes",
        "locks",
        "offload",
        "owner",
        "pages",
        "parent",
        "root",
        "row_bytes",
        "start",
        "text",
        "unneeded_windows",
    )

    parent: Node | None
    root: Root
    owner: Owner
    """The account to which the node's pages are charged. Below a public prefix, it differs from the root's owner."""

    def __init__(self, serial: int, now: float, start: int, text: bytearray, pages: Ids) -> None:
        Entry.__init__(self, serial, now)
        self.start = start
        self.end = start + len(text) // TOKEN_BYTES
        self.text = text
        self.pages = pages  # page ids, one row per block; rows after `count` are unused capacity
        self.count = len(pages)
        self.row_bytes = 0
        self.children: dict[int, Node] = {}
        self.checkpoints: list[Checkpoint] = []
        self.checkpoint_counts: npt.NDArray[np.int32] | None = (
            None  # number of checkpoints that need a page, by block and window
        )
        self.hashes: list[
            bytes
        ] = []  # hashes of the HASH_TOKENS units that end in this node, computed on demand
        self.locks = 0  # number of sequences, pins and loads that end here
        self.unneeded_windows = 0  # bit mask of the windows queued for `drop_unneeded`
        self.offload: OffloadMarks | None = None

    @property
    def account(self) -> Account:
        return self.owner.account

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
        """Whether the node can be evicted: it has no children and no locks, and is not a root."""
        return not self.children and self.locks == 0 and self.parent is not None

    def replace_page(self, columns: Index, page: int, target: int, block_tokens: int) -> None:
        """Replace the page id `page` by `target` in this node, and in the nodes that share a block with this node."""
        for node in (self, *nodes_sharing_block(self, block_tokens)):
            replace_page(node.pages[: node.count], columns, page, target)


class Root(Node):
    """The parent of all first nodes under one root hash (model, tenant, adapter and salt). Public prefixes have one
    root for all tenants."""

    __slots__ = ("adapter", "hash")

    def __init__(self, serial: int, root_hash: bytes, owner: Owner, width: int, adapter: str) -> None:
        super().__init__(serial, 0.0, 0, bytearray(), np.empty((0, width), np.int32))
        self.hash = root_hash
        self.owner, self.adapter = owner, adapter
        self.parent = None
        self.root = self


class Checkpoint(Entry):
    """A resumable position in `node`. If the model has states, the checkpoint has a state snapshot."""

    __slots__ = (
        "is_offloaded",
        "is_periodic",
        "locks",
        "node",
        "position",
        "reach",
        "row_bytes",
        "states",
        "users",
    )

    def __init__(self, serial: int, now: float, node: Node, position: int, states: Ids | None) -> None:
        super().__init__(serial, now, node.priority, node.expires)
        self.node = node
        self.position = position
        self.reach = position  # position of the earliest query whose window pages are protected
        self.states = states
        self.row_bytes = 0
        self.locks = 0  # number of pins of this checkpoint
        self.users = 0
        self.is_offloaded = False  # whether its states were passed to the offload listener
        self.is_periodic = False  # whether it was only taken because of `CheckpointPolicy.every_blocks`

    @property
    def history(self) -> ReuseHistory | None:
        """The history of the checkpoint's node. A checkpoint has no history of its own, because a request that
        resumes at the checkpoint also hits the node."""
        return self.node.history

    @history.setter
    def history(self, history: ReuseHistory | None) -> None:
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

    def replace_page(self, columns: Index, page: int, target: int, block_tokens: int) -> None:
        """Replace the page id `page` by `target` in the state snapshot."""
        if self.states is not None:
            replace_page(self.states, columns, page, target)


def nodes_sharing_block(node: Node, block: int) -> Iterator[Node]:
    """Yield the other nodes that have pages of the first or the last block of `node`. Several of these nodes may refer
    to the same page. A block has `block` tokens."""
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
