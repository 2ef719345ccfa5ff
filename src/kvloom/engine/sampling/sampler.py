"""From logits to tokens, for all rows at once, without waiting for the device.

    logits ─▶ penalties ─▶ bias ─▶ bans ─▶ grammar ─▶ argmax                                   greedy rows
                                                  └─▶ / temperature ─▶ cut ─▶ + noise ─▶ argmax    drawn rows

Parameters travel as small tensors, made once for a set of requests and kept while it stays. The tokens stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.engine.request import Request
from kvloom.kernels.fused import row_argmax

from . import grammar
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

__all__ = ["SampledTokens", "Sampler"]

WIDTHS = (64, 256, 1024)
"""How many of the row_argmax are looked at for a `top_k` of up to half of them: what equals the last one kept is there, too."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step ([rows], int64), and the log-probabilities of the rows that asked; on the logits' device."""

    tokens: torch.Tensor
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class _Draw:
    """Rows that are drawn in the same way: from the `width` row_argmax tokens, or from all as they stand (None). Which way a
    row goes hangs on its own parameters alone, so that sums round the same whatever else is in the batch."""

    width: int | None
    places: list[int]
    rows: torch.Tensor | None  # None: all
    temperature: torch.Tensor  # this and the next: [rows, 1]
    k: torch.Tensor
    p: torch.Tensor
    min_p: torch.Tensor | None  # logarithms


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a set of requests needs, as far as it does not change from step to step."""

    requests: list[Request]
    vocabulary: int
    device: torch.device
    edited: bool  # whether any logits may change
    draws: tuple[_Draw, ...]
    bias: tuple[torch.Tensor, torch.Tensor] | None
    penalised: list[int]
    structured: list[int]
    short: list[int]  # rows with `min_tokens`
    told: list[int]  # rows that want log-probabilities
    told_rows: torch.Tensor | None  # None: all


class Sampler:
    """Chooses the next token of each row. `eos` are the tokens that end a text."""

    def __init__(self, eos: Iterable[int] = ()) -> None:
        self.eos = tuple(eos)
        self._plan: _Plan | None = None
        self._indexes: torch.Tensor | None = None

    @torch.inference_mode()
    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], counts: Sequence[int] | None = None
    ) -> SampledTokens:
        """One token for each row of `logits` ([rows, vocabulary]), which stays as it is.

        `counts` are how many tokens were chosen for each request before (`drawn`, by default), those included that the host
        has not seen. Requests that wait for theirs (`waits`) must have them on the host. Launches work, waits for none.
        """
        if len(requests) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(requests)} requests")
        if counts is None:
            counts = [request.drawn for request in requests]
        plan = self._planned(logits, requests)
        odds = self._changed(logits, plan, counts) if plan.edited else logits
        tokens = self._tokens(odds, plan, counts)
        return SampledTokens(tokens, self._told(logits, tokens, plan))

    def _planned(self, logits: torch.Tensor, requests: Sequence[Request]) -> _Plan:
        old = self._plan
        vocabulary, device = logits.shape[1], logits.device
        if old is None or old.requests != requests or (old.vocabulary, old.device) != (vocabulary, device):
            self._plan = old = _make_plan(list(requests), vocabulary, device)
        return old

    def _changed(self, logits: torch.Tensor, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """Logits with penalties, biases, bans and masks; a copy."""
        odds = logits.to(torch.float32, copy=True)
        requests = plan.requests
        if plan.penalised:
            rows = []
            for row in plan.penalised:
                request = requests[row]
                if request.tally is None:
                    whole = request.params.repetition_penalty != 1  # only it looks at the prompt
                    request.tally = TokenCounts(0 if whole else len(request.prompt))
                request.tally.update(request.tokens, len(request.prompt))
                rows.append((row, request.params, request.tally))
            apply_penalties(odds, rows)
        if plan.bias is not None:
            add_bias(odds, *plan.bias)
        early = [row for row in plan.short if counts[row] < requests[row].params.min_tokens]
        if early:
            mask_tokens(odds, [(row, self.eos + requests[row].params.stop_token_ids) for row in early])
        if plan.structured:
            states = [requests[row].structure for row in plan.structured]
            apply_grammar_mask(
                odds, plan.structured, grammar.fill([state for state in states if state is not None])
            )
        return odds

    def _tokens(self, odds: torch.Tensor, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """The row_argmax token of each row, or the one drawn."""
        draws = plan.draws
        if len(draws) == 1 and draws[0].rows is None:
            return self._drawn(odds, draws[0], plan, counts)
        tokens = row_argmax(odds)
        for draw in draws:
            assert draw.rows is not None
            drawn = self._drawn(odds.index_select(0, draw.rows), draw, plan, counts)
            tokens.index_copy_(0, draw.rows, drawn)
        return tokens

    def _drawn(self, odds: torch.Tensor, draw: _Draw, plan: _Plan, counts: Sequence[int]) -> torch.Tensor:
        """A token for each row of one way of drawing."""
        words = row_words([plan.requests[i].seed for i in draw.places], [counts[i] for i in draw.places])
        sent, indexes = to_device(words, odds.device), self._indexes_of(plan)
        scaled = odds.float() / draw.temperature
        if draw.width is None:
            if draw.min_p is not None:
                scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + draw.min_p, -math.inf)
            return scaled.add_(gumbel(sent, indexes)).argmax(-1)
        narrow = draw.width < plan.vocabulary
        ordered, ids = scaled.topk(draw.width, -1) if narrow else scaled.sort(-1, descending=True)
        ordered.masked_fill_(ordered < _floor(ordered, draw), -math.inf)
        best = ordered.add_(gumbel(sent, indexes[ids])).argmax(-1, keepdim=True)
        return ids.gather(1, best)[:, 0]

    def _indexes_of(self, plan: _Plan) -> torch.Tensor:
        kept = self._indexes
        if kept is None or len(kept) != plan.vocabulary or kept.device != plan.device:
            kept = self._indexes = index_words(plan.vocabulary, plan.device)
        return kept

    @staticmethod
    def _told(logits: torch.Tensor, tokens: torch.Tensor, plan: _Plan) -> Logprobs | None:
        if not plan.told:
            return None
        counts = [plan.requests[row].top_logprobs for row in plan.told]
        if plan.told_rows is not None:
            logits, tokens = logits.index_select(0, plan.told_rows), tokens.index_select(0, plan.told_rows)
        return Logprobs.of(logits, tokens, plan.told, counts)


def _floor(ordered: torch.Tensor, draw: _Draw) -> torch.Tensor:
    """The least of a row's logits, row_argmax first, that may be drawn ([rows, 1]); those that equal it may, too."""
    outside = torch.arange(ordered.shape[1], device=ordered.device) >= draw.k
    share = ordered.masked_fill(outside, -math.inf).softmax(-1)
    before = share.cumsum(-1) - share  # the first token that passes the bound is kept, too
    kept = ((before < draw.p) & ~outside).sum(-1, keepdim=True).clamp_(min=1)
    floor = ordered.gather(1, kept - 1)
    return floor if draw.min_p is None else torch.maximum(floor, ordered[:, :1] + draw.min_p)


def _make_plan(requests: list[Request], vocabulary: int, device: torch.device) -> _Plan:
    every = [request.params for request in requests]
    told = [i for i, params in enumerate(every) if params.wants_logprobs]
    penalised = [i for i, params in enumerate(every) if params.penalised]
    structured = [i for i, request in enumerate(requests) if request.structure is not None]
    short = [i for i, params in enumerate(every) if params.min_tokens]
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
        edited=bool(biased or penalised or structured or short),
        draws=tuple(_draws(every, vocabulary, device)),
        bias=bias,
        penalised=penalised,
        structured=structured,
        short=short,
        told=told,
        told_rows=_rows(told, len(requests), device),
    )


def _draws(every: list[SamplingParams], vocabulary: int, device: torch.device) -> Iterable[_Draw]:
    """The rows that are drawn, by how many of the row_argmax tokens are looked at."""
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
            p=column([params.top_p if params.top_p < 1 else 2 for params in some]),  # a sum may round above 1
            min_p=column(min_p) if any(params.min_p for params in some) else None,
        )


def _width(params: SamplingParams, vocabulary: int) -> int | None:
    if not params.top_k and params.top_p == 1:
        return None
    return min(next((width for width in WIDTHS if 0 < 2 * params.top_k <= width), vocabulary), vocabulary)


def _rows(rows: list[int], count: int, device: torch.device) -> torch.Tensor | None:
    """Some of `count` rows as an index; None for all of them, or none."""
    return to_device(np.array(rows), device) if 0 < len(rows) < count else None
