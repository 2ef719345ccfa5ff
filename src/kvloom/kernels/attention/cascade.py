"""Cascade attention: finds page ranges that several sequences share, so that decode reads them only once. This module
works on numpy arrays and has no kernels.

    sequence 0   [ system prompt | document | own … ]
    sequence 1   [ system prompt | document | own … ]       level 0: the system prompt, three members
    sequence 2   [ system prompt | other    | own … ]       level 1: the document, two members

Sequences with an equal prefix have the same page ids in their block tables. Such a range of equal page ids is a shared
run. The shared runs change only when a sequence joins or leaves the batch. In layers with a window, only the visible
part of a run is shared (`visible_shared_runs`). The visible part shrinks every step. The device computes it from the
positions of the queries.
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
"""A run is shared only if this saves reading at least this many tokens. Otherwise, merging the results costs more
than sharing saves."""
MIN_RUN_TOKENS = 128
"""Smallest number of tokens in a shared run. The tokens of a shorter run are added to the start of the runs that
follow it."""
MIN_WINDOW_TOKENS = 512
"""Layers with a smaller window, in tokens, share no runs. In a small window, a sequence's own tokens soon replace
the shared tokens."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A token range [lo, hi) that several sequences have in the same pages. `members` are the indices of these
    sequences in the batch. `level` is the number of shared runs that they have before this run."""

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
    """Return the token ranges that several sequences have in the same pages (shared runs). Reading such a range once
    saves tokens * (sequences - 1) token reads. A range is left out if it saves fewer than `min_saved` token reads, or
    if it has fewer than `min_run` tokens.

    - `tables` is [sequences, blocks].
    - `written` is the number of tokens of each sequence that are in pages, without the queries of this step.
    - `depth` is the largest number of shared runs per sequence.
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
    """Return whether layers with this visibility should read shared runs (page ranges of several sequences) once
    for all sequences. Return False for windows shorter than MIN_WINDOW_TOKENS."""
    return not span.windowed or span.size >= MIN_WINDOW_TOKENS


def visible_shared_runs(
    runs: list[SharedRun], tables: npt.NDArray[np.int32], first: npt.NDArray[np.int64], block_tokens: int
) -> list[SharedRun]:
    """Return those of `runs` that are also shared in the layers of a windowed group. `tables` are the block tables
    of the group. `first` is the first visible token of each sequence.

    If the members of a run have different visible page ids, the run and all deeper runs of these members are left out.
    Each member then reads these tokens separately.
    """
    kept: list[SharedRun] = []
    out: set[int] = set()
    for run in sorted(runs, key=lambda run: run.level):
        rows = np.array(run.members)
        seen = first[rows] // block_tokens
        begin, end = max(run.lo // block_tokens, int(seen.min())), run.hi // block_tokens
        part = tables[rows, begin:end]
        widest = part[seen.argmin()]  # the sequence whose window begins first has every page of the range
        looks = np.arange(begin, end) >= seen[:, None]
        if out.intersection(run.members) or not widest.all() or (looks & (part != widest)).any():
            out.update(run.members)
        else:
            kept.append(run)
    return kept


def _group_by_page(
    tables: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], column: int
) -> list[npt.NDArray[np.int64]]:
    """Group the sequences `rows` by the page id that they have in block `column`."""
    if not len(rows):
        return []
    order = rows[np.argsort(tables[rows, column], kind="stable")]
    cuts = np.flatnonzero(np.diff(tables[order, column])) + 1
    return np.split(order, cuts)


def _end_of_agreement(
    tables: npt.NDArray[np.int32], members: npt.NDArray[np.int64], column: int, end: int
) -> int:
    """Return the first block in [column, end) in which the page ids of `members` differ or are 0. Return `end` if
    there is no such block."""
    part = tables[members, column:end]
    differs = (part != part[:1]).any(0) | (part[0] == 0)
    return column + int(differs.argmax()) if differs.any() else end


class SharedRuns:
    """Shared runs (page ranges that several sequences share) in fixed device buffers, for plans captured in CUDA
    graphs.

    The buffers have space for `segments` runs on up to `depth` levels, and for `sequences` sequences of `queries`
    query tokens each.
    """

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
        """Number of shared runs. The host reads it to choose between the graphs with and without shared runs."""
        self.begin = ints(sequences)
        self.run_table, self.run_total = ints(segments, 5), ints(1)
        self.members = ints(depth * sequences * queries)
        self.levels = torch.full((depth, sequences, 2), -1, dtype=torch.int32, device=device)

    def set_runs(self, runs: list[SharedRun], starts: npt.NDArray[np.int64]) -> list[SharedRun]:
        """Copy the shared runs to the device. `starts` has the index in q of each sequence's first query. The copy is
        queued on the current stream, and the call does not wait. Return the runs that fit into the buffers.

        If a run does not fit, the deeper runs of its members are skipped, too. Each member reads the tokens of
        skipped runs separately.
        """
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
