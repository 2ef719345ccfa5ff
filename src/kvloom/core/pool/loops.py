"""The hot loops of the core: native where the package was built with a compiler, else their plain twins."""

from __future__ import annotations

from collections.abc import Callable

chain: Callable[[bytes, bytes], list[bytes]] | None
"""Names of whole grains, or None without the native loops."""

try:
    from kvloom.core._native import (
        any_negative,
        chain,
        drop,
        keep,
        lend,
        plain_ids,
        release,
        retain,
        unwatched,
        wrong_row,
    )
except ImportError:
    from .counts import any_negative, drop, keep, lend, plain_ids, release, retain, unwatched, wrong_row

    chain = None

__all__ = [
    "any_negative",
    "chain",
    "drop",
    "keep",
    "lend",
    "plain_ids",
    "release",
    "retain",
    "unwatched",
    "wrong_row",
]
