"""A draft: the tokens that a proposer guesses for one request, as a chain or as a tree.

    chain     last token → d1 → d2 → d3            parents  ()
    tree      last token → d1 → d3                 parents  (-1, -1, 0, 1)
              last token → d2 → d4

Each token of a tree is a node. A node follows its parent, and parents precede their children. Siblings are different
tokens, and the more likely sibling is first.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from kvloom.engine.sampling import GrammarState

__all__ = ["NO_DRAFT", "Draft"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of a request. A request with a grammar also has the state of the grammar after each draft token.

    In a tree, `parents` has the index of each node's parent, or -1 for the request's last token. In a chain,
    `parents` is empty. `chances` are the estimated probabilities that the nodes are accepted, and may be empty.
    """

    tokens: list[int]
    structures: list[GrammarState] = field(default_factory=list)
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    def parent(self, node: int) -> int:
        """Return the index of a node's parent. -1 means that the parent is the request's last token."""
        return self.parents[node] if self.parents else node - 1

    @property
    def depths(self) -> list[int]:
        """The depth of each node: the number of tokens after the request's last token, up to and including the
        node."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    def path(self, node: int) -> list[int]:
        """Return the indexes of the nodes on the path from the first token of the draft to `node`."""
        if not self.parents:
            return list(range(node + 1))
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def follow(self, sampled: Sequence[int]) -> list[int]:
        """Return the indexes of the accepted nodes, in order. `sampled` are the sampled tokens after the request's
        last token and after each node."""
        accepted: list[int] = []
        at = -1
        for node, token in enumerate(self.tokens):
            if self.parent(node) == at and token == sampled[at + 1]:
                accepted.append(node)
                at = node
        return accepted

    def best_path(self) -> Draft:
        """Return the chain from the request's last token through the first (most likely) child of each node."""
        nodes: list[int] = []
        for node in range(len(self.tokens)):
            if self.parent(node) == (nodes[-1] if nodes else -1):
                nodes.append(node)
        return self._only(nodes, chain=True)

    def select(self, wanted: Set[int]) -> Draft:
        """Return a draft with the nodes in `wanted`. A node is left out if one of its ancestors is not in `wanted`."""
        nodes: list[int] = []
        kept = {-1}
        for node in range(len(self.tokens)):
            if node in wanted and self.parent(node) in kept:
                nodes.append(node)
                kept.add(node)
        if len(nodes) == len(self.tokens):
            return self
        return self._only(nodes, chain=not self.parents)

    def _only(self, nodes: list[int], chain: bool) -> Draft:
        index = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return Draft(
            [self.tokens[node] for node in nodes],
            [self.structures[node] for node in nodes] if self.structures else [],
            () if chain else tuple(index[self.parent(node)] for node in nodes),
            tuple(self.chances[node] for node in nodes) if self.chances else (),
        )


NO_DRAFT = Draft([])
