"""The prefixes of a request that can be loaded from the stored pages of all pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["leading_pages", "restorable_lengths"]

Mask = npt.NDArray[np.bool_]


def leading_pages(stored: Mask) -> int:
    """Return the number of stored pages before the first missing page."""
    return int(np.argmin(stored)) if not stored.all() else len(stored)


def restorable_lengths(kv_pages: int, pools: Sequence[tuple[Mask, int | None]]) -> tuple[Mask, list[int]]:
    """Find the prefixes of 1 to `kv_pages` pages that can be loaded. Return two results:

    - for each prefix, whether every pool can restore it,
    - for each pool, the length in pages of the longest prefix that this pool can restore.

    `pools` has a pair for each pool: a mask of its stored pages, and the number of pages at the end of a prefix that
    the pool needs. None means that the pool needs all pages of the prefix.
    """
    restorable, longest = np.ones(kv_pages, bool), []
    for stored, trailing in pools:
        lengths = np.arange(1, kv_pages + 1)
        before = np.concatenate([[0], np.cumsum(~stored[:kv_pages])])  # missing pages before each position
        first = np.zeros_like(lengths) if trailing is None else np.maximum(0, lengths - trailing)
        complete = before[lengths] == before[first]
        longest.append(int(lengths[complete].max()) if complete.any() else 0)
        restorable &= complete
    return restorable, longest
