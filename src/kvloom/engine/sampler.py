"""From logits to tokens: greedy, or drawn by temperature, top-k, top-p and min-p, with a request's own seed."""

from __future__ import annotations

import torch

from .request import Request, SamplingParams

__all__ = ["Sampler"]


class Sampler:
    """Chooses the next token of each row. A seeded request draws from its own generator, by how many tokens it has: the
    same whatever else runs, and after a preemption."""

    def choose(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        """One token for each row of `logits` ([rows, vocabulary])."""
        best = logits.argmax(-1)
        if all(request.params.temperature == 0 for request in requests):
            return best
        likeliest = best.tolist()
        return torch.tensor(
            [
                token if request.params.temperature == 0 else self._draw(row, request)
                for token, row, request in zip(likeliest, logits, requests, strict=True)
            ],
            device=logits.device,
        )

    def _draw(self, logits: torch.Tensor, request: Request) -> int:
        weights = kept(logits.float(), request.params).cpu()
        if request.params.seed is None:
            return int(torch.multinomial(weights, 1))
        generator = torch.Generator().manual_seed(request.params.seed + request.drawn * 0x9E3779B9)
        return int(torch.multinomial(weights, 1, generator=generator))


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities ([vocabulary]) of the tokens that may be drawn, zero for the others."""
    weights = torch.softmax(logits / params.temperature, -1)
    if params.top_k:
        least = weights.topk(min(params.top_k, len(weights))).values[-1]
        weights = torch.where(weights >= least, weights, 0.0)
    if params.top_p < 1:
        ordered, index = weights.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # the first token that passes the bound is kept, too
        ordered = torch.where(before < params.top_p * weights.sum(), ordered, 0.0)
        weights = torch.zeros_like(weights).scatter(0, index, ordered)
    if params.min_p:
        weights = torch.where(weights >= params.min_p * weights.max(), weights, 0.0)
    return weights / weights.sum()
