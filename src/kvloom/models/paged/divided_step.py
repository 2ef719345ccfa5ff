"""The tokens of a step, divided between ranks that divide the context.

    step       | tokens of rank 0 | tokens of rank 1 | … | padding |     equally many on every rank
    layer      norms, projections, MLPs, experts: own tokens
               attention: `join` queries, keys and values of all ranks → attention → own tokens
               mixers: `join` inputs of all ranks → all tokens on every rank → own tokens
    last       `join` hidden states of all ranks → logits

Each rank reads a part of every block (`core.ContextPart`), so all ranks have equal attention work. A step with few
tokens is not divided: its collectives would take more time than they save.
"""

from __future__ import annotations

import torch

from kvloom.models.sharding import Ranks

__all__ = ["DividedStep", "divide_step"]

MIN_TOKENS = 32
"""Smallest number of tokens per rank with which a step is divided."""


def divide_step(ranks: Ranks, tokens: int) -> DividedStep | None:
    """Return the division of a step between ranks. None if the step has too few tokens."""
    return DividedStep(ranks, tokens) if tokens >= MIN_TOKENS * ranks.shard.count else None


class DividedStep:
    """The tokens of a step that this rank computes. Every rank must make the same calls in the same order."""

    def __init__(self, ranks: Ranks, tokens: int) -> None:
        self._ranks, self._tokens, self._count = ranks, tokens, ranks.shard.count
        self._each = -(-tokens // self._count)
        self._own = slice(ranks.shard.rank * self._each, (ranks.shard.rank + 1) * self._each)

    def own(self, x: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Return this rank's tokens of `x`, which has all tokens of the step along `axis`. The last rank may get
        padding, which repeats the last token."""
        at = torch.arange(self._own.start, self._own.stop, device=x.device)
        return x.index_select(axis, at.clamp_(max=self._tokens - 1))

    def join(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather tensors of all ranks. Each tensor has the tokens of one rank: [own tokens, …]. The results have all
        tokens of the step. Makes one collective call."""
        flat = [part.reshape(self._each, -1) for part in parts]
        every = self._ranks.gather(torch.cat(flat, 1)).flatten(0, 1)[: self._tokens]
        found = torch.split(every, [part.shape[1] for part in flat], 1)
        return tuple(x.reshape(-1, *part.shape[1:]).to(part) for x, part in zip(found, parts, strict=True))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange partial results. `x` [tokens, …] has this rank's values for all tokens of the step. Each rank gets
        the values for its own tokens from all ranks. Return them: [ranks, own tokens, …]."""
        padding = x.new_zeros(self._each * self._count - len(x), *x.shape[1:])
        return self._ranks.exchange(torch.cat((x, padding)).view(self._count, self._each, *x.shape[1:]))
