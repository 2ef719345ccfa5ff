"""Embeddings of prompts: the hidden states of a step, pooled on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvloom.engine.request import Request
from kvloom.engine.scheduling import Scheduled

__all__ = ["PooledPrompt", "pool_hidden_states"]

PooledPrompt = tuple[Request, torch.Tensor]
"""A request whose prompt is computed, and its embedding (float32, unit length)."""


@torch.inference_mode()
def pool_hidden_states(work: Sequence[Scheduled], states: Sequence[torch.Tensor]) -> list[PooledPrompt]:
    """Return the requests whose prompt this step completes, with their embeddings. `states` has the hidden states
    of each entry of `work`: [tokens, hidden]. Does not wait for the device.

    With the pooling "mean", the hidden states are added to a sum that each request keeps between steps. If a
    request computes its prompt again from the first token, its sum starts again at zero.
    """
    done = []
    for (request, part), rows in zip(work, states, strict=True):
        size, end = len(request.prompt), request.computed + len(part.tokens)
        rows = rows[: size - request.computed]
        if request.params.pooling == "mean":
            total = rows.sum(0, dtype=torch.float32)
            if request.computed:
                assert request.hidden_sum is not None
                total += request.hidden_sum
            request.hidden_sum = total
        if end >= size:
            pooled = rows[-1].float() if request.params.pooling == "last" else request.hidden_sum
            assert pooled is not None
            request.hidden_sum = None
            done.append((request, torch.nn.functional.normalize(pooled, dim=0)))
    return done
