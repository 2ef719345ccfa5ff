"""The hot loops of the core. Uses the native extension if it is built, else numpy (`counts`)."""

from __future__ import annotations

from collections.abc import Callable

chain: Callable[[bytes, bytes], list[bytes]] | None
"""Computes the chain of block hashes of token bytes. None if the native loops are not built."""

try:
    from kvloom.core._native import (
        any_negative,
        chain,
        drop as drop_cached,
        keep as add_cached,
        lend as allocate,
        plain_ids,
        release,
        retain,
        unwatched,
        wrong_row,
    )
except ImportError:
    from .counts import (
        add_cached,
        allocate,
        any_negative,
        drop_cached,
        plain_ids,
        release,
        retain,
        unwatched,
        wrong_row,
    )

    chain = None

try:
    from kvloom.core._native import leading, leading_of
except ImportError:
    from .counts import leading, leading_of

__all__ = [
    "add_cached",
    "allocate",
    "any_negative",
    "chain",
    "drop_cached",
    "leading",
    "leading_of",
    "plain_ids",
    "release",
    "retain",
    "unwatched",
    "wrong_row",
]
