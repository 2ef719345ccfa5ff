"""Log-probabilities of tokens. They are computed on the device and read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Logprob", "Logprobs", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, its rank (1: most likely), and its text if there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The log-probabilities at one position: the sampled token, then the most likely tokens."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities for some rows of a step's logits. `rows` are the indexes of these rows. `chosen` are the
    sampled tokens, with their log-probabilities (`values`) and `ranks` (each [rows]).

    `top_ids` and `top_values` ([rows, most]) are the most likely tokens, best first. `counts` is the number of top
    tokens that each request asked for. `most` is the largest of these numbers.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    chosen: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    @classmethod
    def of(
        cls, logits: torch.Tensor, chosen: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> Logprobs:
        """Compute log-probabilities from logits ([rows, vocabulary]) and the tokens sampled from them ([rows]). Does
        not wait.
        """
        logits = logits.float()
        total = logits.logsumexp(-1, keepdim=True)
        value = logits.gather(1, chosen[:, None])
        ranks = (logits > value).sum(-1) + 1
        top = logits.topk(min(max(counts), logits.shape[1]), -1)
        return cls(
            tuple(rows), tuple(counts), chosen, (value - total)[:, 0], ranks, top.indices, top.values - total
        )

    def to_host(self) -> Logprobs:
        """Start a copy to the host and return the copy. The copy is valid after the device has finished the work that
        is queued when this call returns. If the data is already on the host, returns `self`.
        """
        if not self.values.is_cuda:
            return self

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return target.copy_(tensor, non_blocking=True)

        tensors = (self.chosen, self.values, self.ranks, self.top_ids, self.top_values)
        return Logprobs(self.rows, self.counts, *map(copy, tensors))

    def read(self) -> list[TokenLogprobs]:
        """Return one dictionary per request. Call this method on the result of `to_host` after the copy is done.
        Does not wait."""
        result: list[TokenLogprobs] = []
        rows = zip(
            self.counts,
            self.chosen.tolist(),
            self.values.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_values.tolist(),
            strict=True,
        )
        for count, chosen, value, rank, ids, values in rows:
            one = {chosen: Logprob(value, rank)}
            for place, (token, likely) in enumerate(zip(ids[:count], values[:count], strict=True)):
                one.setdefault(token, Logprob(likely, place + 1))
            result.append(one)
        return result
