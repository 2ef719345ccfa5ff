"""Applies the tokens of a step to their requests: stop conditions, stop texts, grammars and beams.

This module reports finished requests and continued beams to the scheduler. It does not use the model or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvloom.engine.request import Request
from kvloom.engine.sampling import BeamSearch, Finish, TextStream, TokenLogprobs, collect
from kvloom.engine.scheduling import Scheduled, Scheduler
from kvloom.engine.speculation import accepted_places

from .inflight_step import InflightStep

__all__ = ["MovedToken", "OutputProcessor", "eos_tokens"]


def eos_tokens(model: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of a model."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([given] if isinstance(given, int) else given or ())


MovedToken = tuple[int, int, int]
"""A token that moves to another slot: the row of its sequence in the block tables, the token's index in the sequence,
and its new index there."""
MASK_SECONDS = 0.01
"""Longest time in seconds that a step waits for grammar processes to compute the next masks. If a mask takes
longer, its request is left out of the next steps until the mask arrives.
"""


class OutputProcessor:
    """Appends the sampled tokens of each step to their requests, and finishes requests. `eos` are the end-of-sequence
    tokens. After a draft tree, `move_tokens` moves the bytes of accepted tokens to the slots of their positions."""

    def __init__(
        self, scheduler: Scheduler, eos: frozenset[int], move_tokens: Callable[[list[MovedToken]], None]
    ) -> None:
        self.scheduler, self.eos, self._move_tokens = scheduler, eos, move_tokens
        self.awaiting_masks: list[Request] = []
        """Requests whose grammar mask is late."""

    def process(self, step: InflightStep, launched_since: list[Scheduled]) -> list[Request]:
        """Wait for the tokens of a step and apply them to its requests. Return the requests of the step that had not
        finished before this call.

        `launched_since` is the work of the next step, if it is already launched. Also waits up to MASK_SECONDS for
        grammar masks.
        """
        tokens, logprobs = step.results()
        open_ = [(i, request) for i, request in enumerate(step.requests) if request.finish_reason is None]
        if step.drafts:
            self._accept_drafts(step, tokens, logprobs, [i for i, _ in open_])
            return [request for _, request in open_]
        self.scheduler.commit_tokens(step.requests, tokens, launched_since)
        refused = self._advance_grammars([request for _, request in open_])
        for place, request in open_:
            if request.beams is not None:
                if request.beams.offer(request, logprobs[place]):
                    self._advance(request.beams)
            else:
                self._accept(request, logprobs.get(place), id(request) in refused)
        return [request for _, request in open_]

    def _accept_drafts(
        self, step: InflightStep, tokens: list[int], logprobs: dict[int, TokenLogprobs], open_: list[int]
    ) -> None:
        """Apply the tokens of a step with drafts. Each request gets its accepted draft tokens and one more sampled
        token, unless it finishes earlier. `open_` are the indices in `step.requests` of the requests that have not
        finished."""
        places = accepted_places(tokens, step.drafts)
        self._move_accepted(step, places, open_)
        self.scheduler.commit_tokens(step.requests, [tokens[of[0]] for of in places], [])
        depth = 0
        while open_:
            of_depth = [(i, step.requests[i]) for i in open_]
            last = [request for i, request in of_depth if depth == len(places[i]) - 1]
            for i, request in of_depth:
                if depth < len(places[i]) - 1 and request.structure is not None and not self._is_end(request):
                    node = places[i][depth + 1] - places[i][0] - 1
                    request.structure = step.drafts[i].structures[node]
            refused = self._advance_grammars(last)
            for i, request in of_depth:
                found = logprobs.get(places[i][depth])
                if request.beams is None:
                    self._accept(request, found, id(request) in refused)
                elif request.beams.offer(request, logprobs[places[i][depth]]):
                    self._advance(request.beams)
            depth += 1
            open_ = [i for i in open_ if step.requests[i].finish_reason is None]
            for i in open_:
                if depth == len(places[i]):
                    self.scheduler.commit_drafts(step.requests[i])
            open_ = [i for i in open_ if depth < len(places[i])]
            for i in open_:
                self.scheduler.accept_draft(step.requests[i], tokens[places[i][depth]])

    def _move_accepted(self, step: InflightStep, places: list[list[int]], open_: list[int]) -> None:
        """Move the bytes of accepted tokens of draft trees to the slots of their positions. Call this method before
        the tokens are committed. `places` are the results of `accepted_places`: for each request, the indices of its
        accepted tokens among the sampled tokens. `open_` are the indices in `step.requests` of the requests that have
        not finished."""
        moved: list[MovedToken] = []
        for i in open_:
            sequence, first = step.requests[i].sequence, step.requests[i].computed - 1
            if sequence is not None and step.drafts[i].parents:
                moved += [
                    (sequence.row, first + place - places[i][0], first + depth)
                    for depth, place in enumerate(places[i])
                    if place - places[i][0] != depth
                ]
        if moved:
            self._move_tokens(moved)

    def wait_for_masks(self, seconds: float) -> None:
        """Wait up to `seconds` for grammar masks that were late in an earlier step."""
        collect([request.structure for request in self.awaiting_masks if request.structure], seconds)

    def settle_masks(self) -> list[Request]:
        """Check the late grammar masks that have arrived. Finish a request if its grammar is complete, allows no token,
        or has failed. Return the finished requests. Does not wait.
        """
        collect([request.structure for request in self.awaiting_masks if request.structure is not None], 0.0)
        late, self.awaiting_masks = [r for r in self.awaiting_masks if r.finish_reason is None], []
        for request in late:
            structure = request.structure
            assert structure is not None
            if structure.pending:
                self.awaiting_masks.append(request)
            elif structure.failed:
                self._fail(request)
            elif structure.done:
                self._finish(request, "stop")
        return [request for request in late if request.finish_reason is not None]

    def resume(self, request: Request, tokens: Sequence[int]) -> None:
        """Give a new request the output tokens `tokens`, which another engine generated. If a stop condition is met
        within these tokens, the request finishes.
        """
        for token in tokens:
            request.tokens.append(token)
            refused = self._advance_grammars([request])
            self._accept(request, None, id(request) in refused)
            if request.finish_reason is not None:
                return

    def _advance_grammars(self, requests: list[Request]) -> set[int]:
        """Pass the last token of each request to its grammar, and wait up to MASK_SECONDS for the next masks. Return
        the `id` of each request whose grammar does not allow the token.
        """
        waiting, refused = [], set()
        for request in requests:
            structure = request.structure
            if structure is not None and not self._is_end(request):
                if structure.advance(request.tokens[-1]):
                    if not structure.grammar.late:  # a slow grammar must not delay the other requests
                        waiting.append(structure)
                else:
                    refused.add(id(request))
        collect(waiting, MASK_SECONDS)
        return refused

    def _is_end(self, request: Request) -> bool:
        """Return whether the last token of a request finishes it."""
        token, params = request.tokens[-1], request.params
        return token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)

    def _fail(self, request: Request) -> None:
        """Finish a request whose grammar allows no token. Its `stop_reason` becomes the error of the grammar."""
        assert request.structure is not None
        request.stop_reason = request.structure.error
        self._finish(request, "grammar")

    def _accept(self, request: Request, logprobs: TokenLogprobs | None, refused: bool) -> None:
        """Apply the last token of a request: log-probability, text, stop conditions. Finish the request if its
        output ends. `refused` means that the grammar does not allow the token. The token is then dropped and the
        request fails.
        """
        token, params = request.tokens[-1], request.params
        ends = self._is_end(request)
        if ends:
            request.stop_reason = token if token in params.stop_token_ids else None
        if refused:
            request.tokens.pop()  # the grammar allowed no token, so an arbitrary token was sampled
            self._fail(request)
            return
        structure = request.structure
        if (
            ends
            and structure is not None
            and not structure.pending
            and structure.done
            and not structure.failed
        ):
            request.tokens.pop()  # the grammar was complete, but its last mask arrived late
            self._finish(request, "stop")
            return
        if logprobs is not None:
            request.cumulative_logprob += logprobs[token].logprob
            if params.logprobs is not None:
                request.logprobs.append(logprobs)
        if request.text is not None and self._decode(request, request.text, token, ends):
            request.stop_reason, ends = request.text.stopped, True
        elif not ends and request.structure is not None and not request.mask_pending:
            if request.structure.failed:
                self._fail(request)
                return
            ends = request.structure.done
        if ends or len(request.tokens) >= request.limit:
            self._finish(request, "stop" if ends else "length")
        elif request.mask_pending:
            self.awaiting_masks.append(request)

    @staticmethod
    def _decode(request: Request, text: TextStream, token: int, ends: bool) -> bool:
        """Add a token to the text of a request. Return whether the text now contains a stop text. If the token ends
        the output (`ends`), it is decoded only if the request sets `include_stop_str_in_output`.
        """
        if not ends:
            return text.add(token, request.output_count >= request.params.min_tokens)
        if request.params.include_stop_str_in_output:
            text.add(token, may_stop=False)
        return False

    def _advance(self, beams: BeamSearch[Request]) -> None:
        """Continue a beam search with its best beams, or finish it if no beam continues. Call this method when every
        live beam has passed its candidate tokens to `BeamSearch.offer`.
        """
        successors = beams.decide()
        if successors:
            beams.live = self.scheduler.advance_beams(beams.slots, successors)
            return
        beams.finish()
        for slot in beams.slots:
            slot.beams = None  # from here on, each beam finishes as a separate request
        for slot, why in zip(beams.slots, beams.endings, strict=True):
            if slot.text is not None:
                hides_end = why == "stop" and not slot.params.include_stop_str_in_output
                for token in slot.output[: -1 if hides_end else None]:
                    slot.text.add(token, may_stop=False)
            self._finish(slot, why)

    def _finish(self, request: Request, why: Finish) -> None:
        self.scheduler.commit_drafts(request)
        self.scheduler.finish(request, why)
        if request.text is not None:
            request.text.finish(request.output_count >= request.params.min_tokens)
