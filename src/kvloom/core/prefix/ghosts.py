"""Ghosts: records of recently evicted tokens. They explain misses and train policies, and have no pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvloom.core.eviction.policies import ReuseHistory

from .node import Node

__all__ = ["Ghost", "Ghosts"]


class Ghost(NamedTuple):
    """The record that remains of evicted tokens. `when` is the time of the eviction, `reason` names the policy, and
    `history` is what the policy had learned about the entry."""

    when: float
    reason: str
    history: ReuseHistory | None


class Ghosts:
    """Records of evicted tokens. A record is found by the node before the tokens and a hash of the first tokens.
    The number of records is limited, and the oldest are dropped.
    """

    LIMIT = 1 << 16
    SEEN = 64  # number of bytes that identify evicted tokens

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], tuple[float, str, ReuseHistory | None]] = (
            OrderedDict()
        )

    @staticmethod
    def place(node: Node) -> int | bytes:
        """Return the key of the end of a node. The key of a root is its hash, which stays valid when the root is
        removed."""
        return node.root.hash if node.parent is None else node.serial

    def add(
        self, after: Node, text: bytes | bytearray, ghost: tuple[float, str, ReuseHistory | None]
    ) -> None:
        """Record that the tokens after a node were evicted. They start with `text` (at most SEEN bytes). `ghost` is
        a tuple with the fields of `Ghost`. A tuple is cheaper to create, and there are far more evictions than
        lookups.
        """
        seen = self._seen
        seen[self.place(after), hash(bytes(text))] = ghost
        if len(seen) > self.LIMIT:
            seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        """Return the record of evicted tokens that equal `data` from byte `start` on, or None."""
        ghost = self._seen.get((place, hash(data[start : start + self.SEEN])))
        return None if ghost is None else Ghost(*ghost)
