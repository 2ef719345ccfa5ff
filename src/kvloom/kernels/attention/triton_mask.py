# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The mask rule of every layer kind, for kernels. To add a kind, add one branch here and one number to
`mask.SPAN_NUMBERS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mask import SPAN_NUMBERS

__all__ = ["first_visible", "tree_position"]

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
def tree_position(TREES, rows, own, last, mine):
    """Return the position of each query of a draft tree, read from TREES (see `mask.Mask`).

    - `rows` has the offset of each query's row in TREES.
    - `last` has the slot of each query, which is its token index in the sequence.
    - `own` has the slot of the sequence's first query.
    - `mine` marks the queries to read.
    """
    return own + tl.load(TREES + rows + last - own, mask=mine & (last >= 0), other=1).to(tl.int32) - 1
