"""Groups the pieces of an answer into blocks. A block is reasoning, content or one tool call. It opens, grows
and closes before the next block opens.

The Responses API returns the blocks of an answer as items, and the Messages API returns them as content
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from .pieces import Piece

__all__ = ["Block", "BlockChange", "Blocks"]


@dataclass(slots=True)
class Block:
    """A block of an answer: reasoning, content or one tool call. `first` is its first piece, which contains the id and
    the name of a call. `parts` are the texts of the block so far."""

    index: int
    first: Piece
    parts: list[str] = field(default_factory=list)

    @property
    def kind(self) -> Literal["reasoning", "content", "call"]:
        return self.first.kind

    @property
    def text(self) -> str:
        return "".join(self.parts)


BlockChange = tuple[Literal["open", "grow", "close"], Block, str]
"""A change of a block: the kind of change, the block, and the text that is appended to it."""


class Blocks:
    """Collects the pieces of one answer into blocks, such as thinking, text and tool calls."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def add(self, pieces: Iterable[Piece]) -> list[BlockChange]:
        """Add pieces. Return the resulting changes, in order."""
        changes: list[BlockChange] = []
        for piece in pieces:
            last = self.blocks[-1].first if self._is_open else None
            if last is None or piece.id is not None or (piece.kind, piece.index) != (last.kind, last.index):
                changes += self.close()
                self.blocks.append(Block(len(self.blocks), piece))
                self._is_open = True
                changes.append(("open", self.blocks[-1], ""))
            if piece.text:
                self.blocks[-1].parts.append(piece.text)
                changes.append(("grow", self.blocks[-1], piece.text))
        return changes

    def close(self) -> list[BlockChange]:
        """Close the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        return [("close", self.blocks[-1], "")]
