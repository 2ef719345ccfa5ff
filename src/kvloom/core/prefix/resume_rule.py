"""The resume rule: the positions at which a prompt may resume. Radix tree, hash index and load plan use it.

Position p is valid if every windowed group has pages for [first_visible(p), p), and every state group
has a snapshot at p. The rule does not test groups with full attention, because they have a page for every
matched token.

The functions test pages in units. The pages of a unit are present or missing together. In the radix tree
and in the load plan a unit is a block. In the hash index a unit has HASH_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvloom.core.layout.layer_spec import Visibility

__all__ = ["longest_resume", "missing_unit"]

Present = npt.NDArray[np.generic]


def missing_unit(
    position: int, windows: Sequence[tuple[Visibility, Present]], unit: int
) -> tuple[int, int] | None:
    """Find the last missing unit among the units that a prompt needs to resume at `position`. Return it as
    (index in `windows`, index of the unit), or None if no needed unit is missing. `windows` contains, for each
    windowed group, its visibility and one truth value per unit of the path: whether the unit is present. `unit`
    is the number of tokens in a unit."""
    stop = -(-position // unit)
    worst = None
    for window, (visibility, present) in enumerate(windows):
        first = visibility.first_visible(position) // unit
        if first < stop and np.count_nonzero(present[first:stop]) < stop - first:
            missing = first + int(np.flatnonzero(present[first:stop] == 0)[-1])
            if worst is None or missing > worst[1]:
                worst = (window, missing)
    return worst


def longest_resume(
    limit: int,
    windows: Sequence[tuple[Visibility, Present]],
    unit: int,
    snapshots: Iterable[int] | None = None,
) -> tuple[int, int | None]:
    """Return the longest valid position at or below `limit`. Also return the index of the window that ruled out longer
    positions, or None.

    `snapshots` are the positions with a state snapshot, deepest first, or None for models without states. When a unit
    is missing, all positions that need this unit are skipped at once.
    """
    stopped = None
    if snapshots is not None:
        for position in snapshots:
            if position <= limit:
                missing = missing_unit(position, windows, unit)
                if missing is None:
                    return position, stopped
                stopped = missing[0]
        return 0, stopped
    position = limit
    while position > 0:
        missing = missing_unit(position, windows, unit)
        if missing is None:
            break
        stopped = missing[0]
        # All smaller positions after the missing unit need it, too. The next candidate is the end of an earlier range
        # of present units.
        before = np.flatnonzero(windows[missing[0]][1][: missing[1]])
        position = min(missing[1] * unit, (int(before[-1]) + 1) * unit if before.size else 0)
        # A query that sees only itself (at the start of a chunk) needs no unit.
        visibility = windows[missing[0]][0]
        start = visibility.first_visible(missing[1] * unit)
        if visibility.first_visible(start) == start:
            position = max(position, start)
    return position, stopped
