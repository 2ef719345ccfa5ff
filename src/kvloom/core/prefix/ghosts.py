"""Ghosts: records of recently evicted tokens. They provide the miss reason "evicted", and histories for learning
policies. They own no pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvloom.core.eviction.policies import ReuseHistory

from .node import Node

__all__ = ["Ghost", "Ghosts"]


class Ghost(NamedTuple):
    """The record of an evicted entry.

    - `when` is the time of the eviction.
    - `reason` is the name of the policy that evicted the entry.
    - `history` is the policy's history of the entry.
    """

    when: float
    reason: str
    history: ReuseHistory | None


class Ghosts:
    """Records of evicted tokens. The key of a record is the node before the tokens, and a hash of the first tokens.
    The number of records is limited, and the oldest are dropped."""

    LIMIT = 1 << 16
    SEEN = 64  # number of bytes that identify evicted tokens

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int | bytes, int], tuple[float, str, ReuseHistory | None]] = (
            OrderedDict()
        )

    def add(
        self, after: Node, text: bytes | bytearray, ghost: tuple[float, str, ReuseHistory | None]
    ) -> None:
        """Record that the tokens after the node `after` were evicted. These tokens start with `text` (at most SEEN
        bytes). `ghost` has the fields of `Ghost`. `ghost` is a plain tuple, because most records are never looked up
        and a tuple takes less time to create."""
        seen = self._seen
        # A root hash stays valid when the root is removed.
        place = after.serial if after.parent is not None else after.root.hash
        seen[place, hash(bytes(text))] = ghost
        if len(seen) > self.LIMIT:
            seen.popitem(last=False)

    def find(self, place: int | bytes, data: bytes, start: int) -> Ghost | None:
        """Return the record of evicted tokens that start like `data` at byte `start`, or None. Only the first SEEN
        bytes are compared. `place` is the serial number of the node before these tokens. If this node is a root,
        `place` is the root hash."""
        ghost = self._seen.get((place, hash(data[start : start + self.SEEN])))
        return None if ghost is None else Ghost(*ghost)
