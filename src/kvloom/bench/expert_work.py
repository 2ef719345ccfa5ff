"""The mixture-of-experts part of `kvloom bench kernels`: one layer of Qwen3-30B-A3B with random routing, compared with
torch.

This module defines the calls and their lower bounds. `kernels` times the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvloom.kernels.fused import act_and_mul
from kvloom.kernels.moe import fused_moe

from .gpu_peers import Call

__all__ = ["ExpertWork", "by_torch", "expert_work", "layer"]

EXPERTS, PICKED, DIM, INNER = 128, 8, 2048, 768
TOKENS = (1, 16, 64, 256, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """One case of the benchmark of expert layers. `calls` has the function of each compared implementation. `moved` is
    the number of weight bytes that a call must read, and `flops` is its number of operations."""

    what: str
    calls: dict[str, Call]
    moved: int
    flops: int


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 weights of one expert layer as two tensors. The first has the gate and up projections, and the
    second the down projections."""
    gate_up = torch.empty((EXPERTS, 2 * INNER, DIM), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    down = torch.empty((EXPERTS, DIM, INNER), dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    return gate_up, down


def expert_work() -> Iterator[ExpertWork]:
    gate_up, down = layer()
    for tokens in TOKENS:
        x = torch.randn(tokens, DIM, dtype=torch.bfloat16, device="cuda")
        odds, index = torch.rand(tokens, EXPERTS, device="cuda").topk(PICKED)
        given = (x, index, odds.softmax(-1).to(x.dtype), gate_up, down)
        calls: dict[str, Call] = {"kvloom": partial(fused_moe, *given)}
        if hasattr(torch, "_grouped_mm"):
            calls["torch grouped_mm"] = partial(by_torch, *given)
        each = 3 * DIM * INNER
        moved = int((torch.bincount(index.reshape(-1)) > 0).sum()) * each * 2
        yield ExpertWork(
            f"{tokens} tokens, {PICKED} of {EXPERTS} experts", calls, moved, 2 * each * index.numel()
        )


def by_torch(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute the result of an expert layer with torch's grouped matrix multiplication: sort by expert, gather,
    multiply, scatter."""
    chosen, order = index.reshape(-1).sort()
    ends = torch.searchsorted(chosen, torch.arange(len(gate_up), device=x.device), right=True).int()
    both = torch._grouped_mm(x[order // index.shape[1]], gate_up.transpose(1, 2), offs=ends)
    parts = torch._grouped_mm(act_and_mul(both), down.transpose(1, 2), offs=ends)
    back = torch.empty_like(parts)
    back[order] = parts
    return (back.view(*index.shape, -1) * weights[..., None]).sum(1)
