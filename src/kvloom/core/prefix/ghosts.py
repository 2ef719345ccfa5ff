"""What left lately, and why: so that a miss can be explained, and a policy learn from it. No pages are here."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvloom.core.eviction.policies import ReuseHistory

from .node import Node

__all__ = ["Ghost", "Ghosts"]


class Ghost(NamedTuple):
    """Something that left: when, by which policy, and what the policy remembers of it."""

    when: float
    why: str
    memo: ReuseHistory | None


class Ghosts:
    """What left lately, so that a miss can be explained and learned from. Bounded; the oldest are
    forgotten."""

    LIMIT = 1 << 16
    SEEN = 64  # bytes of text by which a run is known again

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], tuple[float, str, ReuseHistory | None]] = (
            OrderedDict()
        )

    @staticmethod
    def place(node: Node) -> int | bytes:
        """What stands for the end of a node; for a root its name, which outlives it."""
        return node.root.hash if node.parent is None else node.serial

    def add(
        self, after: Node, text: bytes | bytearray, ghost: tuple[float, str, ReuseHistory | None]
    ) -> None:
        """The run that began with `text` (no more than SEEN of it) after the end of a node left. `ghost` is what
        `Ghost` names: far more leave than are ever asked for."""
        seen = self._seen
        seen[self.place(after), hash(bytes(text))] = ghost
        if len(seen) > self.LIMIT:
            seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        ghost = self._seen.get((place, hash(data[start : start + self.SEEN])))
        return None if ghost is None else Ghost(*ghost)
