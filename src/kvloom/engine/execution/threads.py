"""How many CPU threads torch computes with: one rule for the server, the offline API and the benchmarks.

| first of these that is there        | threads                                            |
|-------------------------------------|----------------------------------------------------|
| what was asked for (`--threads`)    | that many                                          |
| KVLOOM_THREADS, OMP_NUM_THREADS     | that many                                          |
| neither                             | one less than the cores that may be used, 1 at least |

Threads meet after every operation and wait for the slowest: where one of them shares its core with anything else (the server,
a tokenizer, the loop that feeds the model), all of them run at the pace of half a core, and those that wait burn theirs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

__all__ = ["cores", "use_threads"]

VARIABLES = ("KVLOOM_THREADS", "OMP_NUM_THREADS")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def use_threads(asked: int | None = None) -> int:
    """Let torch compute with as many threads as the rule says, for this whole process; how many those are. Raises
    ValueError where a variable says something that is no number of threads."""
    threads = asked or _named() or max(1, cores() - 1)
    torch.set_num_threads(threads)
    return threads


def cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than a container's quota is worth."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return bound if quota == "max" else max(1, min(bound, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return bound


def _named() -> int | None:
    for name in VARIABLES:
        text = os.environ.get(name, "").strip()
        if name == "OMP_NUM_THREADS":
            text = text.partition(",")[0]  # one number for each level of nesting
        if not text:
            continue
        if not text.isdecimal() or not 0 < int(text) <= 4096:
            raise ValueError(f"{name}={text!r} must be a number of threads, 1 to 4096")
        return int(text)
    return None
