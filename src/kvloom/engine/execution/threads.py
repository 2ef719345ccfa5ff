"""CPU threads of torch: one rule for the server, the offline API and the benchmarks.

| first that is set               | threads                                    |
|---------------------------------|--------------------------------------------|
| an argument (`--threads`)       | that many                                  |
| KVLOOM_THREADS, OMP_NUM_THREADS | that many                                  |
| none of them                    | one less than the usable cores, at least 1 |

Torch's threads synchronise after every operation. If one thread shares its core with the server or a tokenizer, all
threads wait for it. By default one core is therefore left to the server and the tokenizer.
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
    """Set torch's number of threads for this process, and return it. Raises ValueError for an invalid environment
    variable."""
    threads = asked or _from_environment() or max(1, cores() - 1)
    torch.set_num_threads(threads)
    return threads


def cores() -> int:
    """Return the number of usable cores: the cores in the CPU affinity, limited by the container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return bound if quota == "max" else max(1, min(bound, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return bound


def _from_environment() -> int | None:
    for name in VARIABLES:
        text = os.environ.get(name, "").strip()
        if name == "OMP_NUM_THREADS":
            text = text.partition(",")[0]  # the value may list one number for each nesting level
        if not text:
            continue
        if not text.isdecimal() or not 0 < int(text) <= 4096:
            raise ValueError(f"{name}={text!r} must be a number of threads from 1 to 4096")
        return int(text)
    return None
