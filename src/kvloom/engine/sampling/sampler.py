"""Samples tokens from logits for all requests at once. Does not wait for the device. A row of the logits belongs to
one request, or to one draft position of a request.

    logits ─▶ penalties ─▶ bias ─▶ masked tokens ─▶ grammar ─▶ argmax                              greedy rows
                                                           └─▶ / temperature ─▶ cut ─▶ + noise ─▶ argmax    sampled rows

"cut" removes the tokens that `top_k`, `top_p` and `min_p` exclude. The parameters of a set of requests become small
tensors, which are reused while the set stays the same. The tokens stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvloom.kernels.fused import row_argmax

from . import grammar
from .grammar import GrammarState
from .logit_processors import (
    TokenCounts,
    add_bias,
    apply_grammar_mask,
    apply_penalties,
    mask_tokens,
    to_device,
)
from .logprobs import Logprobs
from .noise import gumbel, index_words, row_words
from .params import SamplingParams
from .timestamps import TimestampRule

__all__ = ["SampledTokens", "Sampler", "SamplingRequest"]

WIDTHS = (64, 256, 1024)
"""Numbers of most likely tokens to sort, for requests with `top_k`. A request uses the smallest width that is at
least twice its `top_k`. There is then space for tokens whose logit equals the logit of the last allowed token.
"""


class SamplingRequest(Protocol):
    """The part of a request that the sampler reads and writes."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int]
    seed: int
    top_logprobs: int
    structure: GrammarState | None
    token_counts: TokenCounts | None

    @property
    def sampled_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step ([rows of logits], int64), and the log-probabilities for requests that want
    them. Both are on the device of the logits.
    """

    tokens: torch.Tensor
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class _Draw:
    """Requests that are sampled in the same way: from the `width` most likely tokens or, if `width` is None, from
    all tokens without sorting.

    The width of a request depends only on its own parameters, so rounding errors of sums are the same in every batch.
    """

    width: int | None
    places: list[int]
    rows: torch.Tensor | None  # None: all
    temperature: torch.Tensor  # [rows, 1], like the next two fields
    k: torch.Tensor
    p: torch.Tensor
    min_p: torch.Tensor | None  # logarithms


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the sampler handles one set of requests: which requests need which processing, and the tensors for it.
    The plan is reused while the set stays the same."""

    requests: list[SamplingRequest]
    vocabulary: int
    device: torch.device
    changes_logits: bool
    draws: tuple[_Draw, ...]
    bias: tuple[torch.Tensor, torch.Tensor] | None
    penalised: list[int]
    structured: list[int]
    short: list[int]  # rows with `min_tokens`
    allowed: tuple[list[int], npt.NDArray[np.int32]] | None  # rows with allowed tokens, and one bit per token
    bad: list[int]  # rows with bad tokens
    stamped: list[int]  # rows with time stamps
    with_logprobs: list[int]  # rows that request log-probabilities
    logprob_rows: torch.Tensor | None  # None: all


class Sampler:
    """Samples the next token of each request. `eos` are the end-of-sequence tokens. The model's tokens `suppressed` are
    never sampled, and `suppressed_first` never as the first token of an answer. A request with `allowed_token_ids` may
    sample suppressed tokens, too. `timestamps` is the rule for requests with time stamps."""

    def __init__(
        self,
        eos: Iterable[int] = (),
        suppressed: Iterable[int] = (),
        suppressed_first: Iterable[int] = (),
        timestamps: TimestampRule | None = None,
    ) -> None:
        self.eos, self.timestamps = tuple(eos), timestamps
        self._suppressed, self._suppressed_first = tuple(suppressed), tuple(suppressed_first)
        self._plan: _Plan | None = None
        self._indexes: torch.Tensor | None = None

    @torch.inference_mode()
    def choose(
        self, logits: torch.Tensor, requests: Sequence[SamplingRequest], counts: Sequence[int] | None = None
    ) -> SampledTokens:
        """Return one token for each row of `logits` ([rows, vocabulary]). Does not modify the logits and does not
        wait.

        `counts` is the number of tokens sampled for each request so far, including in-flight tokens (default:
        `sampled_tokens`). A request with `needs_last_token` must have all its tokens on the host.
        """
        if len(requests) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits do not match {len(requests)} requests")
        if counts is None:
            counts = [request.sampled_tokens for request in requests]
        plan = self._plan_for(logits, requests)
        changed = self._changed(logits, plan, counts) if self._changes_logits(plan) else logits
        tokens = self._tokens(changed, plan, counts)
        return SampledTokens(tokens, self._logprobs(logits, tokens, plan))

    def _plan_for(self, logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> _Plan:
        plan = self._plan
        vocabulary, device = logits.shape[1], logits.device
        if (
            plan is None
            or plan.requests != requests
            or (plan.vocabulary, plan.device) != (vocabulary, device)
        ):
            self._plan = plan = _make_plan(list(requests), vocabulary, device)
        return plan

    def _changes_logits(self, plan: _Plan) -> bool:
        return plan.changes_logits or bool(self._suppressed or self._suppressed_first)

    def _changed(self, logits: torch.Tensor, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """Return a copy of the logits with penalties, biases and masks applied."""
        changed = logits.to(torch.float32, copy=True)
        requests = plan.requests
        if plan.penalised:
            rows = []
            for row in plan.penalised:
                request = requests[row]
                if request.token_counts is None:
                    # Only the repetition penalty covers the prompt.
                    whole = request.params.repetition_penalty != 1
                    request.token_counts = TokenCounts(0 if whole else len(request.prompt))
                request.token_counts.update(request.tokens, len(request.prompt))
                rows.append((row, request.params, request.token_counts))
            apply_penalties(changed, rows)
        if plan.bias is not None:
            add_bias(changed, *plan.bias)
        early = [row for row in plan.short if counts[row] < requests[row].params.min_tokens]
        if early:
            mask_tokens(changed, [(row, self.eos + requests[row].params.stop_token_ids) for row in early])
        chosen = () if plan.allowed is None else plan.allowed[0]
        if self._suppressed:
            mask_tokens(
                changed, [(row, self._suppressed) for row in range(len(changed)) if row not in chosen]
            )
        if self._suppressed_first:
            first = [row for row, count in enumerate(counts) if not count and row not in chosen]
            mask_tokens(changed, [(row, self._suppressed_first) for row in first])
        if plan.stamped and self.timestamps is not None:
            outputs = [(row, requests[row].tokens[len(requests[row].prompt) :]) for row in plan.stamped]
            self.timestamps.apply(changed, outputs)
        if plan.allowed is not None:
            apply_grammar_mask(changed, *plan.allowed)
        if plan.bad:
            mask_tokens(changed, [(row, _bad_tokens(requests[row])) for row in plan.bad])
        if plan.structured:
            states = [requests[row].structure for row in plan.structured]
            apply_grammar_mask(
                changed, plan.structured, grammar.fill([state for state in states if state is not None])
            )
        return changed

    def _tokens(self, changed: torch.Tensor, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """Return the most likely token of each greedy request, and a sampled token of each other request."""
        draws = plan.draws
        if len(draws) == 1 and draws[0].rows is None:
            return self._drawn(changed, draws[0], plan, counts)
        tokens = row_argmax(changed)
        for draw in draws:
            assert draw.rows is not None
            drawn = self._drawn(changed.index_select(0, draw.rows), draw, plan, counts)
            tokens.index_copy_(0, draw.rows, drawn)
        return tokens

    @torch.inference_mode()
    def scores(
        self, logits: torch.Tensor, requests: Sequence[SamplingRequest], counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the scores of all tokens ([rows, vocabulary]). `choose` would choose the token with the largest score.
        Does not wait."""
        plan = self._plan_for(logits, requests)
        changed = self._changed(logits, plan, counts) if self._changes_logits(plan) else logits.float()
        for draw in plan.draws:
            rows = changed if draw.rows is None else changed.index_select(0, draw.rows)
            noisy, ids = self._noisy(rows, draw, plan, counts)
            if ids is not None:
                noisy = torch.full_like(rows, -math.inf).scatter_(1, ids, noisy)
            changed = noisy if draw.rows is None else changed.index_copy(0, draw.rows, noisy)
        return changed

    def _drawn(self, changed: torch.Tensor, draw: _Draw, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """Return a sampled token for each request of `draw`."""
        noisy, ids = self._noisy(changed, draw, plan, counts)
        if ids is None:
            return noisy.argmax(-1)
        return ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]

    def _noisy(
        self, changed: torch.Tensor, draw: _Draw, plan: _Plan, counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores of tokens for each row of `draw`, and the token ids of these scores. A score is the scaled
        logit plus noise, or minus infinity for a token that the row may not sample. The token ids are None if each row
        has a score for every token, in the order of token ids.
        """
        words = row_words([plan.requests[i].seed for i in draw.places], [counts[i] for i in draw.places])
        sent, indexes = to_device(words, changed.device), self._indexes_of(plan)
        scaled = changed.float() / draw.temperature
        if draw.width is None:
            if draw.min_p is not None:
                scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + draw.min_p, -math.inf)
            return scaled.add_(gumbel(sent, indexes)), None
        narrow = draw.width < plan.vocabulary
        ordered, ids = scaled.topk(draw.width, -1) if narrow else scaled.sort(-1, descending=True)
        ordered.masked_fill_(ordered < _floor(ordered, draw), -math.inf)
        return ordered.add_(gumbel(sent, indexes[ids])), ids

    def _indexes_of(self, plan: _Plan) -> torch.Tensor:
        indexes = self._indexes
        if indexes is None or len(indexes) != plan.vocabulary or indexes.device != plan.device:
            indexes = self._indexes = index_words(plan.vocabulary, plan.device)
        return indexes

    @staticmethod
    def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, plan: _Plan) -> Logprobs | None:
        if not plan.with_logprobs:
            return None
        counts = [plan.requests[row].top_logprobs for row in plan.with_logprobs]
        if plan.logprob_rows is not None:
            logits, tokens = (
                logits.index_select(0, plan.logprob_rows),
                tokens.index_select(0, plan.logprob_rows),
            )
        return Logprobs.of(logits, tokens, plan.with_logprobs, counts)


def _floor(ordered: torch.Tensor, draw: _Draw) -> torch.Tensor:
    """Return the smallest logit that a sampled token may have, for each request ([rows, 1]). `top_k`, `top_p` and
    `min_p` define this limit. All tokens with exactly this logit may be sampled.
    """
    outside = torch.arange(ordered.shape[1], device=ordered.device) >= draw.k
    share = ordered.masked_fill(outside, -math.inf).softmax(-1)
    before = share.cumsum(-1) - share  # the token that crosses top_p is included
    kept = ((before < draw.p) & ~outside).sum(-1, keepdim=True).clamp_(min=1)
    floor = ordered.gather(1, kept - 1)
    return floor if draw.min_p is None else torch.maximum(floor, ordered[:, :1] + draw.min_p)


def _make_plan(requests: list[SamplingRequest], vocabulary: int, device: torch.device) -> _Plan:
    every = [request.params for request in requests]
    with_logprobs = [i for i, params in enumerate(every) if params.wants_logprobs]
    penalised = [i for i, params in enumerate(every) if params.has_penalties]
    structured = [i for i, request in enumerate(requests) if request.structure is not None]
    short = [i for i, params in enumerate(every) if params.min_tokens]
    allowed = [i for i, params in enumerate(every) if params.allowed_token_ids is not None]
    bad = [i for i, params in enumerate(every) if params.bad_token_ids]
    stamped = [i for i, params in enumerate(every) if params.timestamps]
    biased = [
        (i * vocabulary + token, value)
        for i, params in enumerate(every)
        for token, value in params.logit_bias.items()
        if token < vocabulary
    ]
    bias = None
    if biased:
        where, values = zip(*biased, strict=True)
        bias = to_device(np.array(where), device), to_device(np.array(values, dtype=np.float32), device)
    return _Plan(
        requests=requests,
        vocabulary=vocabulary,
        device=device,
        changes_logits=bool(biased or penalised or structured or short or allowed or bad or stamped),
        draws=tuple(_draws(every, vocabulary, device)),
        bias=bias,
        penalised=penalised,
        structured=structured,
        short=short,
        allowed=_allowed_bits(every, allowed, vocabulary) if allowed else None,
        bad=bad,
        stamped=stamped,
        with_logprobs=with_logprobs,
        logprob_rows=_rows(with_logprobs, len(requests), device),
    )


def _allowed_bits(
    every: list[SamplingParams], rows: list[int], vocabulary: int
) -> tuple[list[int], npt.NDArray[np.int32]]:
    """Return `rows`, and a mask for each of these requests: one bit per token, which is set if the request may sample
    the token. `every` has the sampling parameters of all requests, and `rows` are indices in `every`.
    """
    flags = np.zeros((len(rows), -(-vocabulary // 32) * 32), dtype=np.uint8)
    for place, row in enumerate(rows):
        flags[place, [token for token in every[row].allowed_token_ids or () if token < vocabulary]] = 1
    return rows, np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def _bad_tokens(request: SamplingRequest) -> list[int]:
    """Return the tokens that would complete a bad sequence next."""
    output = request.tokens[len(request.prompt) :] if request.params.needs_last_token else []
    return [
        tokens[-1]
        for tokens in request.params.bad_token_ids
        if len(tokens) == 1 or output[1 - len(tokens) :] == list(tokens[:-1])
    ]


def _draws(every: list[SamplingParams], vocabulary: int, device: torch.device) -> Iterable[_Draw]:
    """Yield the requests that are not greedy, grouped by the number of most likely tokens from which they sample (see
    `_Draw`). `every` has the sampling parameters of all requests."""
    by_width: dict[int | None, list[int]] = {}
    for i, params in enumerate(every):
        if not params.greedy:
            by_width.setdefault(_width(params, vocabulary), []).append(i)

    def column(values: list[float]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.float32)[:, None], device)

    for width, places in by_width.items():
        some = [every[i] for i in places]
        min_p = [math.log(params.min_p) if params.min_p else -math.inf for params in some]
        yield _Draw(
            width,
            places,
            _rows(places, len(every), device),
            temperature=column([params.temperature for params in some]),
            k=column([params.top_k or vocabulary for params in some]),
            # Rounding may make a sum larger than 1.
            p=column([params.top_p if params.top_p < 1 else 2 for params in some]),
            min_p=column(min_p) if any(params.min_p for params in some) else None,
        )


def _width(params: SamplingParams, vocabulary: int) -> int | None:
    if not params.top_k and params.top_p == 1:
        return None
    return min(next((width for width in WIDTHS if 0 < 2 * params.top_k <= width), vocabulary), vocabulary)


def _rows(rows: list[int], count: int, device: torch.device) -> torch.Tensor | None:
    """Return the row numbers `rows` as an index tensor. Return None if the list is empty, or if it contains all
    `count` rows."""
    return to_device(np.array(rows), device) if 0 < len(rows) < count else None
