"""Ghosts: records of recently evicted runs, to explain misses and to train policies. They have no pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvloom.core.eviction.policies import ReuseHistory

from .node import Node

__all__ = ["Ghost", "Ghosts"]


class Ghost(NamedTuple):
    """An evicted run: the time, the policy, and the policy's history of it."""

    when: float
    reason: str
    history: ReuseHistory | None


class Ghosts:
    """Evicted runs by the node before them and a hash of their first tokens. Bounded; the oldest are dropped."""

    LIMIT = 1 << 16
    SEEN = 64  # bytes of text that identify a run

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], tuple[float, str, ReuseHistory | None]] = (
            OrderedDict()
        )

    @staticmethod
    def place(node: Node) -> int | bytes:
        """Return the key of a node's end. The key of a root is its hash, which outlives the root."""
        return node.root.hash if node.parent is None else node.serial

    def add(
        self, after: Node, text: bytes | bytearray, ghost: tuple[float, str, ReuseHistory | None]
    ) -> None:
        """Record that the run after a node that starts with `text` (at most SEEN bytes) was evicted.

        `ghost` has the fields of `Ghost`. It is a plain tuple, because evictions far outnumber lookups."""
        seen = self._seen
        seen[self.place(after), hash(bytes(text))] = ghost
        if len(seen) > self.LIMIT:
            seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        """Return the evicted run with which `data` from byte `start` on begins, or None."""
        ghost = self._seen.get((place, hash(data[start : start + self.SEEN])))
        return None if ghost is None else Ghost(*ghost)
