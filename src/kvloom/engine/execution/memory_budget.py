"""How large steps are where nobody says, and how large the pool may be: what a device has, less what the model needs to run.

On a GPU a trial finds out: the largest step that the scheduler may ask for runs on a pool of just its pages, after a step of
single tokens and, where the model sees, an image; the peak of what was allocated (tables and plans that stay among it) is kept
free, with the memory of graphs on top. Elsewhere there is no limit worth measuring, and the pool
is a part of what is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.core import KVCache, PoolLayout
from kvloom.kernels.memory import allocate
from kvloom.models.paged import Scales, Work
from kvloom.models.vision import Vision

from .model_runner import ModelRunner, graph_sizes

__all__ = ["MAX_RUNNING", "TOKEN_BUDGET", "MemoryBudget", "default_token_budget", "measure_budget"]

TOKEN_BUDGET = {False: 2048, True: 8192}
"""Tokens of prompts a step where nobody says: a CPU is busy with fewer than a GPU."""
LONG_BUDGET, LARGE = 16384, 60 << 30
"""Tokens of prompts a step on a device of so many bytes, where answers are awaited whole."""
MAX_RUNNING = {False: 256, True: 512}
"""Sequences at once where nobody says; the more of them share pages, the less often those are read."""
SLACK = 256 << 20
"""Bytes left to libraries and to whatever the trial did not meet."""
CPU_POOL = 1 << 30
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of a device: in all, the part that may be used, taken already (weights and others), needed by the largest
    step, by graphs, and what is left for the pool."""

    total: int
    usable: int
    taken: int
    step: int
    graphs: int

    @property
    def pool(self) -> int:
        return self.usable - self.taken - self.step - self.graphs

    def __str__(self) -> str:
        return (
            f"{self.usable / MiB:,.0f} of {self.total / MiB:,.0f} MiB may be used: {self.taken / MiB:,.0f} are taken, a step "
            f"needs {self.step / MiB:,.0f}, graphs {self.graphs / MiB:,.0f}; {self.pool / MiB:,.0f} MiB are left for pages"
        )


def measure_budget(
    model: Any,
    layout: PoolLayout,
    fraction: float,
    tokens: int,
    rows: int,
    graphs: bool,
    scales: Scales | None = None,
    longest: int = 131072,
    invariant: bool = False,
    vision: Vision | None = None,
) -> MemoryBudget:
    """What is left of the model's device for pages, of a `fraction` of its memory, when steps have up to `rows` rows
    and `tokens` tokens of prompts, and sequences at most `longest` tokens. Raises ValueError where nothing is."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a fraction of memory lies in (0, 1], got {fraction}")
    device = next(model.parameters()).device
    if device.type != "cuda":
        return MemoryBudget(CPU_POOL, CPU_POOL, 0, 0, 0)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    step, logits = _trial(model, layout, tokens, rows, scales, longest, invariant, vision)
    held = sum(graph_sizes(rows)) * logits // rows if graphs else 0
    strips = step if graphs else 0  # what lies between the graphs of a step of prompts
    room = MemoryBudget(
        total, int(total * fraction), total - free, step + SLACK, 2 * held + strips + SLACK // 2
    )
    if room.pool < 2 * layout.slab_bytes:
        raise ValueError(
            f"no memory is left for the cache: {room}; give it a larger fraction or fewer tokens a step"
        )
    return room


def _trial(
    model: Any,
    layout: PoolLayout,
    tokens: int,
    rows: int,
    scales: Scales | None,
    longest: int,
    invariant: bool,
    vision: Vision | None,
) -> tuple[int, int]:
    """The peak of what the largest step allocates, and the bytes of its logits."""
    device = next(model.parameters()).device
    tokens = min(tokens, rows * longest)
    counts = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    blocks = sum(-(-count // layout.block_tokens) for count in counts)
    each = {"token": blocks, "state": len(counts)}
    units = [each[g.spec.unit] * g.runs if g.spec.axis == "text" else 0 for g in layout.groups]
    slabs = 2 + sum(
        1 + -(-count // group.pages_per_slab) for count, group in zip(units, layout.groups, strict=True)
    )
    buffer = allocate(layout, slabs, device)
    cache = KVCache(layout, slabs=slabs, max_sequences=rows, max_tokens=longest)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(model, cache, buffer, tokens, rows, graphs=False, scales=scales, invariant=invariant)
    torch.cuda.reset_peak_memory_stats(device)
    if vision is not None:
        vision.embed(vision.sample())
    runner.try_replay()  # whose plans stay
    works = [Work(cache.open(cache.match([])), np.zeros(count, dtype=np.int64)) for count in counts]
    if any(work.sequence.extend(len(work.tokens)) for work in works):
        raise ValueError(f"a trial of {tokens} tokens does not fit {slabs} slabs")
    logits = runner.run(works)[:1].expand(rows, -1).contiguous()
    logits.float().softmax(-1).sort(-1)  # what sampling may need
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    found = logits.numel() * logits.element_size()
    del logits, runner, buffer
    torch.cuda.empty_cache()
    return peak, found


def default_token_budget(device: torch.device) -> int | None:
    """Tokens of prompts a step where answers are awaited whole, as in a batch: a large GPU computes longer steps a little faster,
    while a token more takes its turn twice as late. None: as many as where tokens are awaited one by one."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < LARGE:
        return None
    return LONG_BUDGET
