"""An in-flight step: a launched step whose tokens have not arrived on the host. The next step may already run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvloom.core import StepSize
from kvloom.engine.request import Request
from kvloom.engine.sampling import Logprobs, SampledTokens, TokenLogprobs, to_device
from kvloom.engine.scheduling import Scheduled
from kvloom.engine.speculation import Draft

from .pooling import PooledPrompt

__all__ = ["InflightStep", "PrefillChunks", "PromptLogprobs", "prompt_logprobs"]

PromptLogprobs = tuple[Request, int, Logprobs]
"""A request, the position of a prompt token, and the log-probabilities of the prompt tokens from that position on."""


class PrefillChunks(NamedTuple):
    """The prompt chunks of a step, and the launch time of the step on the monotonic clock. A chunk is a pair: the
    `order` of its request (later requests have a larger order) and the number of tokens in the chunk. A request that
    decodes with a draft also counts as a chunk.
    """

    launched: float = 0.0
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that runs on the device, and its results, which are still being copied to the host.

    - `work` is the scheduled work of the step.
    - `tokens` are the sampled tokens, one for each of `requests`.
    - `prompts` are the log-probabilities of prompt tokens.
    - `event` completes when all results are on the host. It is None on a CPU.
    """

    work: list[Scheduled]
    requests: list[Request]
    tokens: torch.Tensor
    logprobs: Logprobs | None
    prompts: tuple[PromptLogprobs, ...]
    event: torch.cuda.Event | None
    prompt_tokens: int
    """Number of prompt tokens in the step. Tokens of decoding requests are not counted."""
    embeddings: tuple[PooledPrompt, ...] = ()
    drafts: tuple[Draft, ...] = ()
    """The draft of each request. Empty if no request has a draft. With drafts, `tokens` has one more token for each
    draft token."""
    size: StepSize = field(default_factory=StepSize)
    """The amounts of work in the step, from which its time is estimated."""
    prefill: PrefillChunks = field(default_factory=PrefillChunks)

    @classmethod
    def create(
        cls,
        work: list[Scheduled],
        requests: list[Request],
        sampled: SampledTokens,
        prompts: Sequence[PromptLogprobs] = (),
        decoding: int = 0,
        embeddings: Sequence[PooledPrompt] = (),
        drafts: Sequence[Draft] = (),
        launched: float = 0.0,
    ) -> InflightStep:
        """Start to copy the results of a launched step to the host, and return the in-flight step. Does not wait.

        The first `decoding` entries of `work` are decoding requests with one token each.

        - `requests` are the requests of the sampled tokens, and `drafts` their drafts.
        - `sampled`, `prompts` and `embeddings` are results on the device: sampled tokens, prompt log-probabilities and
          embeddings.
        - `launched` is the time of the launch.
        """
        tokens, logprobs = sampled.tokens, sampled.logprobs
        prompts_of = [
            (request, len(part.tokens)) for request, part in work[decoding:] if len(part.tokens) > 1
        ]
        prompt_tokens = sum(count for _, count in prompts_of)
        prefill = PrefillChunks(
            launched, tuple([(request.order, len(part.tokens)) for request, part in work[decoding:]])
        )
        size = StepSize(
            prompt_tokens,
            len(work) - len(prompts_of),
            sum([request.computed for request, _ in work[:decoding]]),
            sum(count * (request.computed - count / 2) for request, count in prompts_of),
        )
        if not tokens.is_cuda:
            return cls(
                work,
                requests,
                tokens,
                logprobs,
                tuple(prompts),
                None,
                prompt_tokens,
                tuple(embeddings),
                tuple(drafts),
                size,
                prefill,
            )
        host = _to_host(tokens)
        logprobs = None if logprobs is None else logprobs.to_host()
        prompts = tuple((request, start, found.to_host()) for request, start, found in prompts)
        embeddings = tuple((request, _to_host(found)) for request, found in embeddings)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(
            work,
            requests,
            host,
            logprobs,
            prompts,
            event,
            prompt_tokens,
            embeddings,
            tuple(drafts),
            size,
            prefill,
        )

    @property
    def scheduled_requests(self) -> set[Request]:
        """The requests of the step's work."""
        return {request for request, _ in self.work}

    @property
    def is_ready(self) -> bool:
        """Whether the tokens of the step have arrived."""
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def results(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait until all results have arrived. Return the sampled tokens, and a dictionary that maps the index of a
        sampled token to its log-probabilities. Also adds prompt log-probabilities and embeddings to their requests.
        """
        if self.event is not None:
            self.event.synchronize()
        by_place: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            by_place = dict(zip(self.logprobs.rows, self.logprobs.read(), strict=True))
        for request, start, found in self.prompts:
            request.add_prompt_logprobs(start, found.read())
        for request, embedding in self.embeddings:
            request.embedding = embedding.numpy()
        return self.tokens.tolist(), by_place


def _to_host(found: torch.Tensor) -> torch.Tensor:
    """Start to copy a device tensor to pinned host memory, and return the host tensor. Does not wait."""
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return host.copy_(found, non_blocking=True)


@torch.inference_mode()
def prompt_logprobs(work: Sequence[Scheduled], logits: torch.Tensor) -> list[PromptLogprobs]:
    """Return the log-probabilities of prompt tokens, for requests that ask for them. The log-probability of a prompt
    token comes from the logits of the token before it.

    `logits` are [tokens of all work, vocabulary]. Does not wait for the device.
    """
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
