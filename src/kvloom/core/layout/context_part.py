"""Context parallelism: the tokens of a block that one rank stores.

    block of 16 tokens    | 0 … 7 | 8 … 15 |
    2 ranks                 rank 0   rank 1     each page has 8 tokens

Only full-attention layers are divided. Windows and states are small, so every rank has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["WHOLE", "ContextPart"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One of `count` equal parts of every block. `rank` is its number, from 0."""

    rank: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank {self.rank} must be from 0 to {self.count - 1}")

    def page_tokens(self, block_tokens: int) -> int:
        """Return how many tokens of a block this rank stores. Raises ValueError if the block cannot be divided."""
        if block_tokens % self.count:
            raise ValueError(
                f"blocks of {block_tokens} tokens cannot be divided between {self.count} ranks: give a number of ranks "
                "that divides block_tokens"
            )
        return block_tokens // self.count

    def places(self, positions: Ints, block_tokens: int) -> Ints:
        """Return, for each position, the index of its token in the page, or -1 if another rank stores the token."""
        size = self.page_tokens(block_tokens)
        places = positions % block_tokens - self.rank * size
        return np.where((places >= 0) & (places < size), places, -1)

    def stored(self, ends: Ints, page_tokens: int) -> Ints:
        """Return how many of the tokens before each position this rank stores. `page_tokens` is the number of tokens of
        a page."""
        block, place = np.divmod(ends, page_tokens * self.count)
        inside: Ints = np.clip(place - self.rank * page_tokens, 0, page_tokens)
        return block * page_tokens + inside

    def positions(self, tokens: Ints, page_tokens: int) -> Ints:
        """Return the positions of tokens in their sequence. `tokens` are the indices of these tokens among the tokens
        that this rank stores. `page_tokens` is the number of tokens of a page.
        """
        block, place = np.divmod(tokens, page_tokens)
        return (block * self.count + self.rank) * page_tokens + place


WHOLE = ContextPart()
"""All tokens of every block, on one rank."""
