"""Counting holds and keeps of pages in arrays: the plain twin of the native loops, used without them.

All take `held` (int32) and `kept` (int16), one count a page, and int32 page ids, of which 0 means no
page. A call that would break a count raises ValueError naming the page, and changes nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["any_negative", "drop", "keep", "lend", "release", "retain", "wrong_row"]

Ids = npt.NDArray[np.int32]
Kept = npt.NDArray[np.int16]


def lend(held: Ids, kept: Kept, ids: Ids) -> None:
    """The first hold of each page, none of which may be in use or listed twice."""
    at = _real(ids)
    _refuse(at, (held[at] != 0) | (kept[at] != 0), "is not free and cannot be lent")
    np.add.at(held, at, 1)
    twice = held[at] > 1
    if twice.any():
        held[at] = 0
    _refuse(at, twice, "is not free and cannot be lent")


def retain(held: Ids, kept: Kept, ids: Ids) -> int:
    """One more hold of each page; returns how many nobody held before."""
    at = _real(ids)
    idle = held[at] == 0
    _refuse(at, idle & (kept[at] == 0), "is free; only a live page can be held")
    fresh = _once(at[idle]).size
    np.add.at(held, at, 1)
    return fresh


def release(held: Ids, kept: Kept, ids: Ids, out: Ids) -> tuple[int, int]:
    """One hold less of each page; returns how many nobody holds now, and how many of those are free and
    written to `out`."""
    at = _real(ids)
    np.subtract.at(held, at, 1)
    short = held[at] < 0
    if short.any():
        np.add.at(held, at, 1)
    _refuse(at, short, "is released more often than it was held")
    idle = _once(at[held[at] == 0])
    free = idle[kept[idle] == 0]
    out[: free.size] = free
    return idle.size, free.size


def keep(held: Ids, kept: Kept, ids: Ids) -> None:
    """The cache keeps each page once more."""
    at = _real(ids)
    _refuse(at, (held[at] == 0) & (kept[at] == 0), "is free and cannot be kept")
    np.add.at(kept, at, 1)


def drop(held: Ids, kept: Kept, ids: Ids, out: Ids) -> int:
    """The cache lets each page go once; returns how many are free now and written to `out`."""
    at = _real(ids)
    np.subtract.at(kept, at, 1)
    short = kept[at] < 0
    if short.any():
        np.add.at(kept, at, 1)
    _refuse(at, short, "is dropped more often than it was kept")
    free = _once(at[(kept[at] == 0) & (held[at] == 0)])
    out[: free.size] = free
    return free.size


def any_negative(data: bytes) -> bool:
    """Whether a run of int32s has a negative one."""
    return len(data) > 0 and bool(np.frombuffer(data, "<i4").min() < 0)


def wrong_row(rows: npt.NDArray[np.int64], is_open: npt.NDArray[np.bool_]) -> int:
    """The place of the first row that is not open or was named before, or -1."""
    seen: set[int] = set()
    for place, row in enumerate(rows.tolist()):
        if not 0 <= row < is_open.size or not is_open[row] or row in seen:
            return place
        seen.add(row)
    return -1


def _real(ids: Ids) -> npt.NDArray[np.intp]:
    at: npt.NDArray[np.intp] = ids.ravel().astype(np.intp)
    real: npt.NDArray[np.intp] = at[at != 0]
    return real


def _once(at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The pages in the order they are listed, each once."""
    first: npt.NDArray[np.intp] = np.sort(np.unique(at, return_index=True)[1])
    return at[first]


def _refuse(at: npt.NDArray[np.intp], wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        raise ValueError(f"page {at[wrong][0]} {why}")
