"""A launched step on its way: which requests it chooses tokens for, and what comes back of it while the next one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.engine.request import Request
from kvloom.engine.sampling.logit_processors import to_device
from kvloom.engine.sampling.logprobs import Logprobs, TokenLogprobs
from kvloom.engine.sampling.sampler import SampledTokens
from kvloom.engine.scheduling.scheduler import Scheduled

__all__ = ["InflightStep", "PromptLogprobs", "prompt_logprobs"]

PromptLogprobs = tuple[Request, int, Logprobs]
"""Whose prompt, from which of its tokens on, and how likely those were."""


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A launched step: its work, and the tokens it chooses for `requests`, on their way to the host."""

    work: list[Scheduled]
    requests: list[Request]
    tokens: torch.Tensor
    logprobs: Logprobs | None
    prompts: tuple[PromptLogprobs, ...]
    event: torch.cuda.Event | None
    prompt_tokens: int
    """Tokens of prompts that it computes; those that decode have one each."""

    @classmethod
    def create(
        cls,
        work: list[Scheduled],
        requests: list[Request],
        chosen: SampledTokens,
        prompts: Sequence[PromptLogprobs] = (),
        decoding: int = 0,
    ) -> InflightStep:
        """Send what was chosen, and what is told of it, on its way to the host; the first `decoding` of the work have one token
        each. Does not wait."""
        tokens, logprobs = chosen.tokens, chosen.logprobs
        sizes = (len(part.tokens) for _, part in work[decoding:])
        prompt_tokens = sum(size for size in sizes if size > 1)
        if not tokens.is_cuda:
            return cls(work, requests, tokens, logprobs, tuple(prompts), None, prompt_tokens)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        logprobs = None if logprobs is None else logprobs.to_host()
        told = tuple((request, start, every.to_host()) for request, start, every in prompts)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(work, requests, host, logprobs, told, event, prompt_tokens)

    @property
    def is_ready(self) -> bool:
        """Whether its tokens are here."""
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def results(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The tokens, and by their places the log-probabilities that were asked for; those of prompts go to their requests.
        Waits until they are here."""
        if self.event is not None:
            self.event.synchronize()
        told: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            told = dict(zip(self.logprobs.rows, self.logprobs.read(), strict=True))
        for request, start, every in self.prompts:
            request.add_prompt_logprobs(start, every.read())
        return self.tokens.tolist(), told


@torch.inference_mode()
def prompt_logprobs(work: Sequence[Scheduled], logits: torch.Tensor) -> list[PromptLogprobs]:
    """How likely the tokens of prompts were that follow those of `work`, by the logits after each ([tokens, vocabulary])."""
    found, at = [], 0
    for request, part in work:
        start, count = request.computed, len(part.tokens)
        following = np.array(request.prompt[start + 1 : start + count + 1], dtype=np.int64)
        asked = request.params.prompt_logprobs
        if len(following) and asked is not None:
            rows = logits[at : at + len(following)]
            every = Logprobs.of(
                rows, to_device(following, logits.device), range(len(rows)), [asked] * len(rows)
            )
            found.append((request, start + 1, every))
        at += count
    return found
