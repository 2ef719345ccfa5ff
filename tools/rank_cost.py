"""Models the cost of several ranks, without a GPU: `python tools/rank_cost.py` prints the tables of docs/scale.md.

| table   | content                                                                                      |
|---------|----------------------------------------------------------------------------------------------|
| tensor  | time of the sums of tensor parallelism, and of the work of a rank                            |
| experts | work of the busiest rank of expert parallelism, divided by its work with tensor parallelism  |
| context | bytes that a rank of context parallelism receives in a step                                  |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.models.specs import load_config

__all__ = ["context_lines", "expert_lines", "tensor_lines"]

LATENCY, LINK = 10e-6, 450e9
"""A sum: seconds of latency, and bytes per second in one direction (NVLink 4)."""
MEMORY, COMPUTE = 4.8e12, 0.6 * 989e12
"""A rank: bytes per second, and operations per second (H200)."""
RANKS = 2, 4, 8
DRAWS = 200
"""Simulated steps per line of the table of experts."""


def tensor_lines() -> Iterator[str]:
    """Yield the lines of the table of sums."""
    c = load_config("llama-3.1-70b")
    layers, size, width = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]
    heads = 2 * size * size * (1 + c["num_key_value_heads"] / c["num_attention_heads"])
    weights = layers * (heads + 3 * size * width) + 2 * c["vocab_size"] * size
    for kind, tokens in (("decode step of 64 sequences", 64), ("prompt step of 8,192 tokens", 8192)):
        for ranks in RANKS:
            sums = 2 * layers * (LATENCY + 2 * (ranks - 1) / ranks * tokens * size * 2 / LINK)
            own = max(weights * 2 / MEMORY, 2 * weights * tokens / COMPUTE) / ranks
            digits = 0 if tokens > 64 else 1
            times = f"{sums * 1e3:.{digits}f} ms | {own * 1e3:.{digits}f} ms"
            yield f"{_first(kind, ranks)} {ranks} | {times} | {100 * sums / (sums + own):.0f} % |"


def expert_lines() -> Iterator[str]:
    """Yield the lines of the table of experts. Each token selects its experts at random."""
    c = load_config("qwen3-30b-a3b")
    experts, picked = c["num_experts"], c["num_experts_per_tok"]
    for tokens in (1, 8, 64, 512, 8192):
        draw = np.random.default_rng(tokens)
        ratios = []
        for _ in range(DRAWS if tokens < 8192 else 10):
            index = draw.random((tokens, experts)).argpartition(picked, 1)[:, :picked]
            pairs = np.bincount(index.ravel(), minlength=experts)
            ratios.append([_busiest(values, n) for n in RANKS for values in (pairs > 0, pairs)])
        weights, products = np.mean(ratios, 0).reshape(-1, 2).T
        cells = [f"{a:.2f}, {b:.2f}" for a, b in zip(weights, products, strict=True)]
        yield f"| {tokens:,} | {' | '.join(cells)} |"


def _busiest(values: npt.NDArray[Any], ranks: int) -> float:
    """Return the largest sum over the experts of one rank, divided by the mean over all ranks."""
    sums = values.reshape(ranks, -1).sum(1)
    return float(sums.max() / sums.mean())


def context_lines() -> Iterator[str]:
    """Yield the lines of the table of bytes."""
    c = load_config("llama-3.1-8b")
    layers, size, heads, kv = (
        c[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = size // heads
    for kind, tokens, sampled in (
        ("decode step of 32 sequences", 32, 32),
        ("prompt step of 8,192 tokens", 8192, 1),
    ):
        for ranks in RANKS:
            others = ranks - 1
            if tokens < 32 * ranks:
                received, calls = layers * others * tokens * heads * (dim + 1) * 4, layers
            else:
                row = heads * (dim + 1) * 4 + (heads + 2 * kv) * dim * 2
                received, calls = others / ranks * tokens * (layers * row + size * 2), 2 * layers + 1
            received += others / ranks * c["vocab_size"] * 2 * sampled
            yield f"{_first(kind, ranks)} {ranks} | {calls + 1} | {received / 1e6:,.0f} MB |"


def _first(kind: str, ranks: int) -> str:
    """Return the first cell of a line, which is empty except for two ranks."""
    return f"| {kind} |" if ranks == 2 else "| |"


if __name__ == "__main__":
    for lines in (tensor_lines, expert_lines, context_lines):
        print("\n".join(lines()), end="\n\n")
