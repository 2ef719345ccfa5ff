"""Applies a step's tokens to their requests: finish, stop text, grammar, next depth of beams.

Reports each finish, and the beams that continue, to the scheduler. Does not use the model or the device.
"""

from __future__ import annotations

from typing import Any

from kvloom.engine.request import Request
from kvloom.engine.sampling import BeamSearch, Finish, TextStream, TokenLogprobs
from kvloom.engine.scheduling import Scheduled, Scheduler

from .inflight_step import InflightStep

__all__ = ["OutputProcessor", "eos_tokens"]


def eos_tokens(model: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of a model."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([given] if isinstance(given, int) else given or ())


class OutputProcessor:
    """Applies tokens to requests; `eos` are the end-of-sequence tokens."""

    def __init__(self, scheduler: Scheduler, eos: frozenset[int]) -> None:
        self.scheduler, self.eos = scheduler, eos

    def process(self, step: InflightStep, launched_since: list[Scheduled]) -> list[Request]:
        """Apply a step's tokens and return its requests. `launched_since` is the work of the step after it.

        Waits until the tokens have arrived."""
        tokens, logprobs = step.results()
        open_ = [(i, request) for i, request in enumerate(step.requests) if request.finish_reason is None]
        self.scheduler.commit_tokens(step.requests, tokens, launched_since)
        for place, request in open_:
            if request.beams is not None:
                if request.beams.offer(request, logprobs[place]):
                    self._advance(request.beams)
            else:
                self._accept(request, logprobs.get(place))
        return [request for _, request in open_]

    def _accept(self, request: Request, logprobs: TokenLogprobs | None) -> None:
        """Apply a request's new token, and finish it if that token is its last."""
        token, params = request.tokens[-1], request.params
        ends = token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)
        if ends:
            request.stop_reason = token if token in params.stop_token_ids else None
        if request.structure is not None and not ends and not request.structure.advance(token):
            request.tokens.pop()  # the grammar allowed no token, so an arbitrary one was sampled
            self._finish(request, "grammar")
            return
        if logprobs is not None:
            request.cumulative_logprob += logprobs[token].logprob
            if params.logprobs is not None:
                request.logprobs.append(logprobs)
        if request.text is not None and self._decode(request, request.text, token, ends):
            request.stop_reason, ends = request.text.stopped, True
        elif request.structure is not None:
            ends = ends or request.structure.done
        if ends or len(request.tokens) >= request.limit:
            self._finish(request, "stop" if ends else "length")

    @staticmethod
    def _decode(request: Request, text: TextStream, token: int, ends: bool) -> bool:
        """Decode a token. Return whether a stop text is complete. Decodes the final token only if the output includes it."""
        if not ends:
            return text.add(token, request.output_count >= request.params.min_tokens)
        if request.params.include_stop_str_in_output:
            text.add(token, may_stop=False)
        return False

    def _advance(self, beams: BeamSearch[Request]) -> None:
        """All beams of a depth have offered: continue with the best, or end the search."""
        successors = beams.decide()
        if successors:
            beams.live = self.scheduler.advance_beams(beams.slots, successors)
            return
        beams.finish()
        for slot in beams.slots:
            slot.beams = None  # each slot finishes on its own
        for slot, why in zip(beams.slots, beams.endings, strict=True):
            self._finish(slot, why)

    def _finish(self, request: Request, why: Finish) -> None:
        self.scheduler.finish(request, why)
        if request.text is not None:
            request.text.finish(request.output_count >= request.params.min_tokens)
