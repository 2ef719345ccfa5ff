"""Default step sizes, and the memory budget of the pool: the memory of the device minus the memory that a step
needs.

On a GPU a trial measures the memory of a step. The trial runs the largest step on a pool with only the pages of that
step. For vision models it also encodes an image. The pool gets the memory that remains after the peak of the trial and
the estimated memory of CUDA graphs. On a CPU the pool has a fixed default size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.core import KVCache, PoolLayout
from kvloom.kernels.memory import allocate
from kvloom.models.lora import AdapterSlots
from kvloom.models.paged import Scales, Work
from kvloom.models.vision import Vision

from .decode_graphs import graph_sizes
from .draft_graphs import draft_graph_sizes
from .model_runner import ModelRunner

__all__ = ["MAX_RUNNING", "TOKEN_BUDGET", "MemoryBudget", "default_token_budget", "measure_budget"]

TOKEN_BUDGET = {False: 2048, True: 8192}
"""Default number of prompt tokens in a step. False: on a CPU. True: on a GPU."""
OFFLINE_TOKEN_BUDGET, LARGE_DEVICE_BYTES = 16384, 60 << 30
"""Number of prompt tokens in a step of offline batches, on a device with at least LARGE_DEVICE_BYTES bytes."""
MAX_RUNNING = {False: 256, True: 512}
"""Default number of running requests. False: on a CPU. True: on a GPU. In a larger batch, more sequences share pages,
and a step reads each shared page once."""
SLACK_BYTES = 256 << 20
"""Bytes reserved for libraries, and for work that the trial step does not include."""
CPU_POOL = 1 << 30
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How the memory of a device is divided, in bytes. Of the `total`, the engine may use `usable`. Weights and other
    processes use `taken`. The largest step needs `step`, and CUDA graphs need `graphs`. The pool gets the rest."""

    total: int
    usable: int
    taken: int
    step: int
    graphs: int

    @property
    def pool(self) -> int:
        """Number of bytes left for the pool."""
        return self.usable - self.taken - self.step - self.graphs

    def __str__(self) -> str:
        return (
            f"{self.usable / MiB:,.0f} of {self.total / MiB:,.0f} MiB are usable: {self.taken / MiB:,.0f} are taken, a step "
            f"needs {self.step / MiB:,.0f}, graphs {self.graphs / MiB:,.0f}; {self.pool / MiB:,.0f} MiB are left for the pool"
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
    drafted_models: int = 0,
    lora: AdapterSlots | None = None,
) -> MemoryBudget:
    """Return how the memory of the device is divided, if the engine uses `fraction` of it. The pool gets the memory
    that steps, graphs, weights and other processes do not need.

    On a GPU a trial step measures the memory that steps need, which takes seconds. On a CPU the pool has a fixed size.
    Raises ValueError if no memory is left.

    - `rows`, `longest`, `tokens`: a step of the engine has up to `rows` sequences of up to `longest` tokens, and up to
      `tokens` prompt tokens.
    - `graphs`: memory for CUDA graphs is reserved, too.
    - `drafted_models`: number of models with graphs for steps with drafts: 0 without speculation, 2 with a draft model
      or head, and 1 with other proposers.
    - `lora`: the trial step uses adapters. Their slots must already be allocated.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction {fraction} must be above 0 and at most 1")
    device = next(model.parameters()).device
    if device.type != "cuda":
        return MemoryBudget(CPU_POOL, CPU_POOL, 0, 0, 0)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    step, logits = _trial(model, layout, tokens, rows, scales, longest, invariant, vision, lora)
    kinds = 1 if lora is None else 2  # decode steps with and without adapters
    captured = kinds * sum(graph_sizes(rows)) + drafted_models * sum(draft_graph_sizes(tokens + rows))
    logits_bytes = captured * logits // rows if graphs else 0
    pieces = step if graphs else 0  # memory of the tensors between piecewise graphs
    budget = MemoryBudget(
        total,
        int(total * fraction),
        total - free,
        step + SLACK_BYTES,
        2 * logits_bytes + pieces + SLACK_BYTES // 2,
    )
    if budget.pool < 2 * layout.slab_bytes:
        raise ValueError(
            f"no memory is left for the pool: {budget}; raise memory_fraction or lower token_budget"
        )
    return budget


def _trial(
    model: Any,
    layout: PoolLayout,
    tokens: int,
    rows: int,
    scales: Scales | None,
    longest: int,
    invariant: bool,
    vision: Vision | None,
    lora: AdapterSlots | None = None,
) -> tuple[int, int]:
    """Run the largest step on a temporary pool. Return the peak memory of the step and the size of its logits, in
    bytes.
    """
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
    runner = ModelRunner(
        model, cache, buffer, tokens, rows, graphs=False, scales=scales, invariant=invariant, lora=lora
    )
    torch.cuda.reset_peak_memory_stats(device)
    if vision is not None:
        for sample in vision.samples():
            vision.embed(sample)
    runner.try_replay()  # allocates the plans of a replay, which stay allocated
    slot = 0 if lora is None else 1
    works = [
        Work(cache.open(cache.match([])), np.zeros(count, dtype=np.int64), adapter=slot) for count in counts
    ]
    if any(work.sequence.extend(len(work.tokens)) for work in works):
        raise ValueError(f"a trial step of {tokens} tokens does not fit {slabs} slabs: lower token_budget")
    logits = runner.run(works)[:1].expand(rows, -1).contiguous()
    logits.float().softmax(-1).sort(-1)  # memory that sampling may need
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    found = logits.numel() * logits.element_size()
    del logits, runner, buffer
    torch.cuda.empty_cache()
    return peak, found


def default_token_budget(device: torch.device) -> int | None:
    """Return the number of prompt tokens per step for offline batches on a large GPU. A larger step makes the whole
    batch finish slightly earlier, but delays each token, so servers use smaller steps. Return None for other devices:
    they use the number for servers.
    """
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < LARGE_DEVICE_BYTES:
        return None
    return OFFLINE_TOKEN_BUDGET
