# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The mask rule of every layer kind, for kernels. To add a kind, add one branch here and one number to
`mask.SPAN_NUMBERS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mask import SPAN_NUMBERS

__all__ = ["first_visible", "stored_tokens", "tree_position"]

SLIDING: tl.constexpr = tl.constexpr(SPAN_NUMBERS["sliding"])
CHUNKED: tl.constexpr = tl.constexpr(SPAN_NUMBERS["chunked"])


@triton.jit
def first_visible(position, SPAN: tl.constexpr, SIZE: tl.constexpr):
    """Return the first token that the query at `position` sees. Equals `core.Visibility.first_visible`."""
    if SPAN == SLIDING:
        return tl.maximum(position - (SIZE - 1), 0)
    elif SPAN == CHUNKED:
        return tl.maximum(position, 0) // SIZE * SIZE
    else:
        return position * 0


@triton.jit
def stored_tokens(end, PAGE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Return how many of the tokens before position `end` are in the pages of this rank. If RANKS is 1, these are all
    tokens. Otherwise each block is divided into RANKS pages, and rank RANK has one of them. Equals
    `core.ContextPart.stored`."""
    if RANKS == 1:
        return end
    else:
        end = tl.maximum(end, 0)
        place = end % (PAGE * RANKS) - RANK * PAGE
        return end // (PAGE * RANKS) * PAGE + tl.minimum(tl.maximum(place, 0), PAGE)


@triton.jit
def tree_position(TREES, rows, own, last, mine):
    """Return the position of each query of a draft tree, read from TREES (see `mask.Mask`).

    - `rows` has the offset of each query's row in TREES.
    - `last` has the slot of each query, which is its token index in the sequence.
    - `own` has the slot of the sequence's first query.
    - `mine` marks the queries to read.
    """
    return own + tl.load(TREES + rows + last - own, mask=mine & (last >= 0), other=1).to(tl.int32) - 1
