"""What left lately, and why: so that a miss can be explained, and a policy learn from it. No pages are here."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from .nodes import Node, Root
from .policies import Memo

__all__ = ["Ghost", "Ghosts"]


class Ghost(NamedTuple):
    """Something that left: when, by which policy, and what the policy remembers of it."""

    when: float
    why: str
    memo: Memo | None


class Ghosts:
    """What left lately, so that a miss can be explained and learned from. Bounded; the oldest are
    forgotten."""

    LIMIT = 1 << 16
    SEEN = 64  # bytes of text by which a run is known again

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], Ghost] = OrderedDict()

    @staticmethod
    def place(node: Node) -> int | bytes:
        """What stands for the end of a node; for a root its name, which outlives it."""
        return node.name if isinstance(node, Root) else node.serial

    def add(self, after: Node, text: bytes | bytearray, ghost: Ghost) -> None:
        """The run that began with `text` (no more than SEEN of it) after the end of a node left."""
        seen = self._seen
        seen[self.place(after), hash(bytes(text))] = ghost
        if len(seen) > self.LIMIT:
            seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        return self._seen.get((place, hash(data[start : start + self.SEEN])))
