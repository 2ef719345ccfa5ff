"""The one rule of where a prompt may resume, shared by the prefix tree and the name index.

A resume point p is valid when every windowed group has all its units over [first_visible(p), p)
and every state group has a snapshot at exactly p. (Full groups are present wherever the text
matches: both indexes guarantee it.) A unit is a block for the tree and a grain for the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.layer_spec import Visibility

__all__ = ["longest_resume", "missing_unit"]

Present = npt.NDArray[np.generic]


def missing_unit(
    point: int, windows: Sequence[tuple[Visibility, Present]], unit: int
) -> tuple[int, int] | None:
    """The last unit that resuming at `point` lacks, as (window, unit), or None if it is valid.

    `windows` holds, for each windowed group, its span and one truth value a unit of the path.
    """
    stop = -(-point // unit)
    worst = None
    for window, (span, present) in enumerate(windows):
        first = span.first_visible(point) // unit
        if first < stop and not present[first:stop].all():
            hole = first + int(np.flatnonzero(present[first:stop] == 0)[-1])
            if worst is None or hole > worst[1]:
                worst = (window, hole)
    return worst


def longest_resume(
    limit: int,
    windows: Sequence[tuple[Visibility, Present]],
    unit: int,
    snapshots: Iterable[int] | None = None,
) -> tuple[int, int | None]:
    """The longest valid resume point at or below `limit`, and the window that stopped a longer one.

    `snapshots` are the positions that have one, deepest first, where the model keeps states; None
    where it does not. Jumps from hole to hole: no position is tried that a hole already excludes.
    """
    stopped = None
    if snapshots is not None:
        for point in snapshots:
            if point <= limit:
                hole = missing_unit(point, windows, unit)
                if hole is None:
                    return point, stopped
                stopped = hole[0]
        return 0, stopped
    point = limit
    while point > 0:
        hole = missing_unit(point, windows, unit)
        if hole is None:
            break
        stopped = hole[0]
        # Every point above the hole needs it too; the next candidate ends a run of present units.
        before = np.flatnonzero(windows[hole[0]][1][: hole[1]])
        point = min(hole[1] * unit, (int(before[-1]) + 1) * unit if before.size else 0)
        # Where a query sees only itself (the start of a chunk), nothing is needed, holes or not.
        span = windows[hole[0]][0]
        start = span.first_visible(hole[1] * unit)
        if span.first_visible(start) == start:
            point = max(point, start)
    return point, stopped
