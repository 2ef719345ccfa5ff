"""How likely tokens were: the model's own log-probabilities, found on the device and read on the host when they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Logprob", "Logprobs", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, its place among all (1 is the likeliest), and its text where there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Of one place: the chosen token, then the likeliest ones."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of `rows` of a step (places in it): chosen tokens, their log-probabilities and ranks ([rows]), and of the likeliest
    tokens ids and values ([rows, most]), the likeliest first; `counts` is how many of them each row asked for."""

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
        """Of the model's logits of these rows ([rows, vocabulary]) and the tokens chosen there ([rows]). Does not wait."""
        logits = logits.float()
        total = logits.logsumexp(-1, keepdim=True)
        value = logits.gather(1, chosen[:, None])
        ranks = (logits > value).sum(-1) + 1
        top = logits.topk(min(max(counts), logits.shape[1]), -1)
        return cls(
            tuple(rows), tuple(counts), chosen, (value - total)[:, 0], ranks, top.indices, top.values - total
        )

    def to_host(self) -> Logprobs:
        """A copy on the host, valid once the device has passed this point; itself if it is there."""
        if not self.values.is_cuda:
            return self

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return there.copy_(tensor, non_blocking=True)

        tensors = (self.chosen, self.values, self.ranks, self.top_ids, self.top_values)
        return Logprobs(self.rows, self.counts, *map(copied, tensors))

    def read(self) -> list[TokenLogprobs]:
        """As dictionaries, one a row. Waits for nothing: call it on what `to_host` gave, when it is there."""
        found: list[TokenLogprobs] = []
        told = zip(
            self.counts,
            self.chosen.tolist(),
            self.values.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_values.tolist(),
            strict=True,
        )
        for count, chosen, value, rank, ids, values in told:
            one = {chosen: Logprob(value, rank)}
            for place, (token, likely) in enumerate(zip(ids[:count], values[:count], strict=True)):
                one.setdefault(token, Logprob(likely, place + 1))
            found.append(one)
        return found
