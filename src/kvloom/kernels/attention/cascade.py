"""Cascade attention: runs of pages that several sequences share, so that decode reads them once. Plain arrays, no
kernels.

    sequence 0   [ system prompt | document | own … ]
    sequence 1   [ system prompt | document | own … ]       level 0: the system prompt, three members
    sequence 2   [ system prompt | other    | own … ]       level 1: the document, two members

The prefix cache gives sequences the same pages for equal tokens, so equal page ids in equal blocks are shared. Runs
change when sequences join or leave the batch, not while they decode. A windowed layer shares the visible part of a
run (`visible_shared_runs`). That part shrinks every step; the device computes it from positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import Visibility
from kvloom.kernels.device import upload

__all__ = ["SharedRun", "SharedRuns", "find_shared_runs", "is_worth_sharing", "visible_shared_runs"]

MIN_SAVED_TOKENS = 1024
"""Least number of tokens that a shared run must save. Below that, merging costs more than it saves."""
MIN_RUN_TOKENS = 128
"""Least number of tokens of a run with its own level. A shorter run is read by the groups of the next level."""
MIN_WINDOW_TOKENS = 512
"""Smallest window that shares runs. In a shorter one, a sequence's own tokens soon fill the window."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Tokens [lo, hi) that all `members` (rows of the batch) have in the same pages; `level` is the number of runs
    before it."""

    lo: int
    hi: int
    members: tuple[int, ...]
    level: int


def find_shared_runs(
    tables: npt.NDArray[np.int32],
    written: npt.NDArray[np.int64],
    block_tokens: int,
    depth: int = 4,
    min_saved: int = MIN_SAVED_TOKENS,
    min_run: int = MIN_RUN_TOKENS,
) -> list[SharedRun]:
    """Return the runs of blocks worth reading once among the rows of `tables` ([sequences, blocks]).

    The first `written` tokens of a row are in its pages: all but this step's queries. Costs one comparison of page ids per
    member and level.
    """
    written = np.asarray(written, dtype=np.int64)
    full = written // block_tokens
    runs: list[SharedRun] = []
    waiting = [(np.arange(len(tables)), 0, 0, 0)]
    while waiting:
        rows, begin, column, level = waiting.pop()
        if level >= depth:
            continue
        for members in _group_by_page(tables, rows[full[rows] > column], column):
            if len(members) < 2 or tables[members[0], column] == 0:
                continue
            end = _end_of_agreement(tables, members, column, int(full[members].min()))
            tokens = (end - begin) * block_tokens
            kept = tokens >= min_run and tokens * (len(members) - 1) >= min_saved
            if kept:
                runs.append(
                    SharedRun(begin * block_tokens, end * block_tokens, tuple(members.tolist()), level)
                )
            waiting.append((members, end if kept else begin, end, level + kept))
    return sorted(runs, key=lambda run: run.level)


def is_worth_sharing(span: Visibility) -> bool:
    """Return whether layers of this span read shared runs once."""
    return not span.windowed or span.size >= MIN_WINDOW_TOKENS


def visible_shared_runs(
    runs: list[SharedRun], tables: npt.NDArray[np.int32], first: npt.NDArray[np.int64], block_tokens: int
) -> list[SharedRun]:
    """Return those `runs` whose pages are also shared in the `tables` of a windowed group.

    `first` is each row's first visible token. Members whose pages differ read that run, and all deeper runs, on their
    own."""
    kept: list[SharedRun] = []
    out: set[int] = set()
    for run in sorted(runs, key=lambda run: run.level):
        rows = np.array(run.members)
        seen = first[rows] // block_tokens
        begin, end = max(run.lo // block_tokens, int(seen.min())), run.hi // block_tokens
        part = tables[rows, begin:end]
        widest = part[seen.argmin()]  # the row whose window begins first has all pages
        looks = np.arange(begin, end) >= seen[:, None]
        if out.intersection(run.members) or not widest.all() or (looks & (part != widest)).any():
            out.update(run.members)
        else:
            kept.append(run)
    return kept


def _group_by_page(
    tables: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], column: int
) -> list[npt.NDArray[np.int64]]:
    """Return the rows, grouped by their page in `column`."""
    if not len(rows):
        return []
    order = rows[np.argsort(tables[rows, column], kind="stable")]
    cuts = np.flatnonzero(np.diff(tables[order, column])) + 1
    return np.split(order, cuts)


def _end_of_agreement(
    tables: npt.NDArray[np.int32], members: npt.NDArray[np.int64], column: int, end: int
) -> int:
    """Return the first block from `column` on in which the members' pages differ or are missing."""
    part = tables[members, column:end]
    differs = (part != part[:1]).any(0) | (part[0] == 0)
    return column + int(differs.argmax()) if differs.any() else end


class SharedRuns:
    """Shared runs in fixed device buffers, for plans captured in CUDA graphs.

    Capacity: `segments` runs, nested up to `depth` levels, for up to `sequences` rows of `queries` query tokens."""

    def __init__(
        self,
        sequences: int,
        queries: int = 1,
        segments: int = 64,
        depth: int = 4,
        device: torch.device | str = "cuda",
    ) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.sequences, self.queries, self.segments, self.depth = sequences, queries, segments, depth
        self.run_count = 0
        """Number of shared runs. The host needs it, because graphs with and without shared runs differ."""
        self.begin = ints(sequences)
        self.run_table, self.run_total = ints(segments, 5), ints(1)
        self.members = ints(depth * sequences * queries)
        self.levels = torch.full((depth, sequences, 2), -1, dtype=torch.int32, device=device)

    def set_runs(self, runs: list[SharedRun], starts: npt.NDArray[np.int64]) -> list[SharedRun]:
        """Copy the runs to the device, in order on the current stream, without waiting. Return the runs that fit.

        If a run does not fit, all deeper runs are skipped too; they are then read per sequence."""
        starts = np.asarray(starts, dtype=np.int64)
        begin = np.zeros(self.sequences, dtype=np.int32)
        given = np.zeros((self.segments, 5), dtype=np.int32)
        levels = np.full((self.depth, self.sequences, 2), -1, dtype=np.int32)
        members: list[npt.NDArray[np.int64]] = []
        placed: list[SharedRun] = []
        used = 0
        out: set[int] = set()
        for run in sorted(runs, key=lambda run: run.level):
            if len(placed) == self.segments or run.level >= self.depth or out.intersection(run.members):
                out.update(run.members)
                continue
            tokens = [np.arange(starts[row], starts[row + 1]) for row in run.members]
            at = np.cumsum([0, *map(len, tokens)])
            rows = np.array(run.members)
            levels[run.level, rows, 0] = len(placed)
            levels[run.level, rows, 1] = at[:-1]
            begin[rows] = run.hi
            given[len(placed)] = (run.members[0], run.lo, run.hi, at[-1], used)
            members += tokens
            used += int(at[-1])
            placed.append(run)
        flat = np.concatenate(members).astype(np.int32) if members else np.zeros(0, dtype=np.int32)
        self.begin.copy_(upload(begin, self.begin.device))
        self.run_table.copy_(upload(given, self.begin.device))
        self.run_total.fill_(len(placed))
        self.run_count = len(placed)
        self.members[:used].copy_(upload(flat, self.begin.device))
        self.levels.copy_(upload(levels, self.begin.device))
        return placed
