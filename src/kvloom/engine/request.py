"""A request: its parameters, its state and its results. This module contains only data."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import (
    CacheControl,
    Decision,
    Media,
    Miss,
    Objective,
    Prediction,
    QueuedPrefix,
    Sequence,
    plain_ids,
    unwatched,
)
from kvloom.models.paged import ImageInputs

from .adapter_table import LoadedAdapter
from .sampling import BeamSearch, Finish, GrammarState, SamplingParams, TextStream, TokenCounts, TokenLogprobs
from .speculation import Estimate, TokenIndex

__all__ = ["Document", "Request", "SloState", "prompt_media", "token_ids"]

SEEDS = 1 << 64


def token_ids(given: Iterable[int]) -> tuple[tuple[int, ...], npt.NDArray[Any]]:
    """Return token ids as Python integers and as an array. Takes a few nanoseconds per token for a list of plain
    integers."""
    items = given if isinstance(given, (list, tuple, np.ndarray)) else list(given)
    data = plain_ids(items)
    if data is not None:
        return unwatched(tuple(items)), np.frombuffer(data, np.int32)
    try:
        ids: npt.NDArray[Any] = np.fromiter(items, np.int64, len(items))
    except (OverflowError, TypeError, ValueError):  # integers above 64 bits, or other types
        ids = np.array([int(token) for token in items], dtype=object)
    return tuple(ids.tolist()), ids


def prompt_media(images: ImageInputs | None, activation: Media | None) -> tuple[Media, ...]:
    """Return the parts of a prompt that block hashes identify by content: images, and the start of an activated
    LoRA."""
    media = () if images is None else tuple(images.media)
    return media if activation is None else (*media, activation)


@dataclass(slots=True, eq=False)
class SloState:
    """The objective of a request, its prediction at admission, its refusal, and its measured times.

    The predicted TTFT counts from the arrival. `first_token` and `last_token` are times on the cache's clock, or 0
    before that token has arrived.
    """

    objective: Objective
    arrived: float
    prediction: Prediction | None = None
    is_deferred: bool = False
    refusal: Decision | None = None
    first_token: float = 0.0
    last_token: float = 0.0

    def tbt(self, tokens: int) -> float | None:
        """Return the mean seconds between tokens of an output of `tokens` tokens. Return None for a single token, and
        until the last token has arrived.
        """
        if tokens < 2 or not self.last_token:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)

    def report(self, tokens: int) -> dict[str, Any]:
        """Return plain data: the objective, the prediction, the result after `tokens` output tokens, and the
        refusal. Times are in milliseconds."""
        objective, predicted, refusal = self.objective, self.prediction, self.refusal
        ttft = self.first_token - self.arrived if self.first_token else None
        return {
            "ttft_ms": objective.ttft_ms,
            "tbt_ms": objective.tbt_ms,
            "deadline_ms": objective.deadline_ms,
            "predicted_ttft_ms": None if predicted is None else round(1e3 * predicted.ttft, 3),
            "predicted_tbt_ms": None if predicted is None else round(1e3 * predicted.tbt, 3),
            "actual_ttft_ms": None if ttft is None else round(1e3 * ttft, 3),
            "actual_tbt_ms": None if (tbt := self.tbt(tokens)) is None else round(1e3 * tbt, 3),
            "deferred": self.is_deferred,
            "refusal": None if refusal is None else refusal.message,
            "retry_after_s": None if refusal is None else refusal.retry_after,
        }


@dataclass(frozen=True, slots=True)
class Document:
    """A token range [start, end) of a prompt whose K and V may be copied from a sequence with only these tokens. The
    request computes the tokens before `copied_from` itself."""

    start: int
    end: int
    copied_from: int


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens that grows: prompt, then output. In the table, "it" is the request.

    | field                             | meaning                                                                   |
    |-----------------------------------|---------------------------------------------------------------------------|
    | `tokens`                          | prompt and output tokens that are on the host                             |
    | `computed`                        | number of tokens that launched steps compute                              |
    | `inflight_tokens`                 | number of sampled tokens that are not on the host yet                     |
    | `sequence`                        | its sequence in the cache while it runs; None while it waits              |
    | `queued_prefix`                   | the cached pages that are protected for it while it waits                 |
    | `next_block_hash`                 | the hash of the first block after `queued_prefix`                         |
    | `uncached`                        | true: it neither reads nor adds cached pages                              |
    | `looked_in_tiers`                 | number of cached tokens at its last lookup in tiers                       |
    | `tier_miss`                       | where the pages in tiers end, and why                                     |
    | `may_be_long`                     | true: the pool is too small for it at its largest length                  |
    | `is_long`                         | true: its oldest pages may be in host memory, and it publishes no pages   |
    | `priority`                        | a request with a larger value runs first and is preempted last            |
    | `order`                           | number of the request, in the order of arrival                            |
    | `seed`                            | the given seed, or a random one                                           |
    | `text`                            | the decoded output                                                        |
    | `structure`                       | position of the output in its grammar                                     |
    | `parent`, `children`              | the other samples of the same prompt                                      |
    | `branched`                        | true: the children have started                                           |
    | `beams`                           | the beam search of all samples                                            |
    | `images`                          | the images of the prompt                                                  |
    | `hidden_sum`                      | sum of the hidden states of its computed tokens, on the device            |
    | `embedding`                       | embedding of the whole prompt                                             |
    | `prompt_logprobs`                 | log-probabilities of the prompt tokens; None for the first token          |
    | `cached_tokens`                   | number of cached tokens when it started for the first time                |
    | `pool_miss`                       | where and why the hit ended, in pool and tiers                            |
    | `in_other_tenant`                 | true: only another tenant has the first block of the prompt cached        |
    | `looked_up`, `started`            | times of its match and of its first work, on the cache's clock            |
    | `draft_tokens`, `accepted_tokens` | number of proposed and of accepted draft tokens                           |
    | `token_index`                     | index of its tokens, for proposers without weights                        |
    | `estimates`                       | estimated acceptance of its drafts, by proposer                           |
    | `draft_missing`                   | first token that the draft model has not computed                         |
    | `offers_pages`                    | true: its pages are offloaded after each chunk, for another worker        |
    | `awaits_peer`                     | host:port of the worker that computes its prompt                          |
    | `slo`                             | its objective and prediction, or None                                     |
    | `missing_tokens`                  | number of prompt tokens to compute, estimated when it was added           |
    | `loads`                           | finished loads: (tier, start, end, tokens), times on the monotonic clock  |
    | `first_loads`                     | how many of `loads` ended before it started                               |
    | `adapter`                         | its LoRA adapter, or None                                                 |
    | `activation`                      | where an activated LoRA begins to apply; None: the adapter always applies |
    | `adapter_slot`                    | slot of its adapter while it runs                                         |
    | `documents`                       | the documents of its prompt that may be copied                            |
    | `awaited`                         | the requests that compute these documents                                 |
    | `copied`                          | number of copied tokens of each document, by its start                    |
    | `is_document`                     | true: the engine added it to compute a document of another request        |
    """

    order: int
    prompt: tuple[int, ...]
    params: SamplingParams
    control: CacheControl = field(default_factory=CacheControl)
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    cached_tokens: int | None = None
    computed: int = 0
    inflight_tokens: int = 0
    uncached: bool = False
    may_be_long: bool = False
    is_long: bool = False
    looked_in_tiers: int | None = None
    queued_prefix: QueuedPrefix | None = None
    next_block_hash: int = 0
    tier_miss: Miss | None = None
    preemptions: int = 0
    tokens_when_preempted: int = 0
    """Number of tokens of the request (prompt and output) at its last preemption."""
    fruitless_preemptions: int = 0
    """Number of preemptions since its last new token."""
    decode_turn: int = 0
    """Order of a tenant's decoding requests, if several tenants share a step that cannot decode all requests. The
    request with the smallest value has waited longest and is decoded first.
    """
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    seed: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    top_logprobs: int = 0
    text: TextStream | None = None
    structure: GrammarState | None = None
    token_counts: TokenCounts | None = None
    parent: Request | None = None
    children: list[Request] = field(default_factory=list)
    branched: bool = False
    beams: BeamSearch[Request] | None = None
    images: ImageInputs | None = None
    hidden_sum: torch.Tensor | None = None
    embedding: npt.NDArray[np.float32] | None = None
    looked_up: float = 0.0
    started: float = 0.0
    pool_miss: Miss | None = None
    loads: list[tuple[str, float, float, int]] = field(default_factory=list)
    first_loads: int = 0
    in_other_tenant: bool = False
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_missing: int | None = None
    estimates: dict[str, Estimate] = field(default_factory=dict)
    token_index: TokenIndex | None = None
    offers_pages: bool = False
    awaits_peer: str | None = None
    slo: SloState | None = None
    missing_tokens: int | None = None
    adapter: LoadedAdapter | None = None
    activation: Media | None = None
    adapter_slot: int = 0
    documents: tuple[Document, ...] = ()
    awaited: list[Request] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)
    is_document: bool = False
    needs_last_token: bool = field(init=False)
    sort_key: tuple[int, int] = field(init=False)
    """Higher priority first, then earlier arrival. The request with the smallest key runs first."""
    limit: int = field(init=False)
    """Largest number of tokens of prompt and output together."""
    prompt_array: npt.NDArray[np.int32] | None = field(repr=False, default=None)
    """The prompt as an array, if the caller passed one. See `prompt_ids`."""

    def __post_init__(self) -> None:
        self.tokens = unwatched(list(self.prompt))
        self.sort_key = -self.priority, self.order
        self.limit = len(self.prompt) + self.params.max_tokens
        self.needs_last_token = self.params.needs_last_token
        self.top_logprobs = self.params.logprobs or 0
        if self.seed < 0:
            self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed % SEEDS

    def add_samples(self) -> None:
        """Create the other samples of the prompt (`params.samples`) as children."""
        self.children = [
            Request(
                self.order + i,
                self.prompt,
                self.params,
                self.control,
                self.priority,
                seed=self.seed + i,
                parent=self,
                images=self.images,
                adapter=self.adapter,
                activation=self.activation,
            )
            for i in range(1, self.params.samples)
        ]

    @property
    def rank(self) -> tuple[int, int]:
        """Deprecated name of `sort_key`."""
        warnings.warn(
            "Request.rank is deprecated and will be removed in 0.4.0: use Request.sort_key",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.sort_key

    @property
    def output(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[len(self.prompt) :]

    def ids(self, end: int) -> npt.NDArray[np.int32]:
        """Return the first `end` tokens as an array. The time grows with the number of output tokens among them."""
        size, asked = len(self.prompt), self.prompt_ids
        if end <= size:
            return asked[:end]
        return np.concatenate((asked, np.array(self.tokens[size:end], np.int32)))

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The prompt as an array, which all samples share. It is created at first use."""
        first = self.parent or self
        if first.prompt_array is None:
            first.prompt_array = np.array(first.prompt, np.int32)
        return first.prompt_array

    @property
    def media(self) -> tuple[Media, ...]:
        """The parts of the prompt that block hashes identify by content. See `prompt_media`."""
        return prompt_media(self.images, self.activation)

    @property
    def active_from(self) -> int:
        """The first token that the adapter changes."""
        return 0 if self.activation is None else self.activation.start

    @property
    def match_control(self) -> CacheControl:
        """The cache control for a match. Its `read` is False if the request skips the cache or must compute every
        prompt token. Its `store` is False if the request skips the cache or is long.
        """
        if self.uncached:
            return replace(self.control, read=False, store=False)
        if self.is_long:
            return replace(self.control, read=not self.computes_all and self.control.read, store=False)
        return replace(self.control, read=False) if self.computes_all else self.control

    def count_cached(self, tokens: int) -> None:
        """Record how many tokens were cached when the request started for the first time. Later starts, such as after a
        preemption, do not change the number.
        """
        if self.cached_tokens is None:
            self.cached_tokens = tokens

    @property
    def computes_all(self) -> bool:
        """Whether every prompt token must be computed, because cached tokens have neither log-probabilities nor
        hidden states.
        """
        return self.wants_prompt_logprobs or self.params.pooling == "mean"

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request asks for prompt log-probabilities that are not complete yet. Every prompt token is then
        computed.
        """
        wanted = self.params.prompt_logprobs is not None and self.parent is None
        return wanted and max(1, len(self.prompt_logprobs)) < len(self.prompt)

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether the next tokens of the request are prompt tokens whose log-probabilities are wanted."""
        return self.computed < len(self.prompt) and self.wants_prompt_logprobs

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Add the log-probabilities of prompt tokens from `start` on. Existing values are not replaced."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        known = len(self.prompt_logprobs)
        if start <= known:
            self.prompt_logprobs += logprobs[known - start :]

    @property
    def hits(self) -> dict[str, int]:
        """Cached tokens by tier. They sum to `cached_tokens`."""
        found: dict[str, int] = {}
        left = self.cached_tokens or 0
        # If pages were loaded again after an eviction, only the last load counts.
        for tier, _, _, tokens in reversed(self.loads[: self.first_loads]):
            if counted := min(tokens, left):
                found[tier] = found.get(tier, 0) + counted
                left -= counted
        return {"device": left, **found} if left else found

    @property
    def output_count(self) -> int:
        """Number of output tokens on the host."""
        return len(self.tokens) - len(self.prompt)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens, including in-flight tokens."""
        return len(self.tokens) + self.inflight_tokens - len(self.prompt)

    @property
    def pending(self) -> int:
        """Number of tokens that no launched step computes yet."""
        return len(self.tokens) + self.inflight_tokens - self.computed

    @property
    def mask_pending(self) -> bool:
        """Whether the grammar process is still computing the next mask. The request cannot be scheduled before the
        mask has arrived."""
        return self.structure is not None and self.structure.pending

    @property
    def documents_pending(self) -> bool:
        """Whether other requests still compute documents of this request. The request cannot be admitted before they
        have finished."""
        return any(one.finish_reason is None for one in self.awaited)

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens whose K and V were copied from documents. If it is not 0, the answer is
        approximate."""
        return sum((self.parent or self).copied.values())

    @property
    def parked(self) -> bool:
        """Whether the request is a beam that waits until the other beams have the same length."""
        return self.beams is not None and self.pending == 0

    @property
    def family(self) -> list[Request]:
        """All samples of the prompt, including this one."""
        first = self.parent or self
        return [first, *first.children]

    @property
    def finishes_with(self) -> list[Request]:
        """The requests that finish together with this one: all beams, and samples that have not started."""
        return self.family if self.beams is not None or (self.children and not self.branched) else [self]

    @property
    def returned_samples(self) -> list[Request]:
        """The samples to return, at most `params.n`. If there are more samples, the best are returned: those with the
        largest cumulative log-probability, or the best beams of a beam search."""
        answers = self.family
        if self.params.beam_width > 1:
            answers = [one for one in answers if one.output_count]
        elif self.params.samples > self.params.n:
            answers.sort(key=lambda one: -one.cumulative_logprob)
        return answers[: self.params.n]
