"""What a step's tokens mean to the requests that get them: an end, a stop text, a grammar's refusal, the next depth of beams.

The scheduler hears of each end, and of the beams that go on. Knows no model and no device.
"""

from __future__ import annotations

from typing import Any

from .beams import BeamSearch
from .flight import Flight
from .grammar import collect
from .logprobs import TokenLogprobs
from .request import Finish, Request
from .scheduler import Scheduled, Scheduler
from .text import Text

__all__ = ["Landing", "ends_of"]


def ends_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, as a model says."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([given] if isinstance(given, int) else given or ())


GRAMMAR_SECONDS = 0.01
"""How long a step waits for the masks that follow its tokens. A request whose mask comes later is not scheduled until then."""


class Landing:
    """Takes in tokens; `eos` are those that end a text. `late` requests wait for a mask."""

    def __init__(self, scheduler: Scheduler, eos: frozenset[int]) -> None:
        self.scheduler, self.eos = scheduler, eos
        self.late: list[Request] = []

    def land(self, flight: Flight, after: list[Scheduled]) -> list[Request]:
        """Take in a step's tokens; `after` is the work of the step that was launched since. Waits until they are here."""
        tokens, told = flight.land()
        open_ = [(i, request) for i, request in enumerate(flight.requests) if request.finish is None]
        self.scheduler.learned(flight.requests, tokens, after)
        refused = self._advance_grammars([request for _, request in open_])
        for place, request in open_:
            if request.beams is not None:
                if request.beams.offer(request, told[place]):
                    self._advance(request.beams)
            else:
                self._take(request, told.get(place), id(request) in refused)
        return [request for _, request in open_]

    def settle(self) -> None:
        """End late requests whose mask has come and allows nothing more, or whose grammar failed. Does not wait."""
        collect([request.structure for request in self.late if request.structure is not None], 0.0)
        waiting, self.late = [request for request in self.late if request.finish is None], []
        for request in waiting:
            structure = request.structure
            assert structure is not None
            if structure.pending:
                self.late.append(request)
            elif structure.failed:
                self._fail(request)
            elif structure.done:
                self._finish(request, "stop")

    def _advance_grammars(self, requests: list[Request]) -> set[int]:
        """Send each new token to its grammar, and wait a short time for the masks that follow. Returns the requests (by `id`)
        whose token is not allowed."""
        waiting, refused = [], set()
        for request in requests:
            structure = request.structure
            if structure is not None and not self._ends(request):
                if structure.advance(request.tokens[-1]):
                    if not structure.grammar.late:  # a slow one is not worth the others' time
                        waiting.append(structure)
                else:
                    refused.add(id(request))
        collect(waiting, GRAMMAR_SECONDS)
        return refused

    def _ends(self, request: Request) -> bool:
        """Whether a request's last token ends its text."""
        token, params = request.tokens[-1], request.params
        return token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)

    def _fail(self, request: Request) -> None:
        """End a request whose grammar allows nothing more; the stop reason says why."""
        assert request.structure is not None
        request.stop_reason = request.structure.error
        self._finish(request, "grammar")

    def _take(self, request: Request, told: TokenLogprobs | None, refused: bool) -> None:
        """Take in a request's new token, and end it where that is its last. A `refused` one is dropped."""
        token, params = request.tokens[-1], request.params
        ends = self._ends(request)
        if ends:
            request.stop_reason = token if token in params.stop_token_ids else None
        if refused:
            request.tokens.pop()  # nothing was allowed, so that anything came
            self._fail(request)
            return
        if told is not None:
            request.cumulative_logprob += told[token].logprob
            if params.logprobs is not None:
                request.logprobs.append(told)
        if request.text is not None and self._reads(request, request.text, token, ends):
            request.stop_reason, ends = request.text.stopped, True
        elif not ends and request.structure is not None and not request.mask_pending:
            if request.structure.failed:
                self._fail(request)
                return
            ends = request.structure.done
        if ends or len(request.tokens) >= request.limit:
            self._finish(request, "stop" if ends else "length")
        elif request.mask_pending:
            self.late.append(request)

    @staticmethod
    def _reads(request: Request, text: Text, token: int, ends: bool) -> bool:
        """Make a token's text; whether a stop text ends there. That of a token that ends it all is made where it is wanted."""
        if not ends:
            return text.add(token, request.output_count >= request.params.min_tokens)
        if request.params.include_stop_str_in_output:
            text.add(token, may_stop=False)
        return False

    def _advance(self, beams: BeamSearch[Request]) -> None:
        """All beams of a depth are there: let the best go on, or end the search."""
        successors = beams.decide()
        if successors:
            beams.live = self.scheduler.succeed(beams.slots, successors)
            return
        beams.finish()
        for slot in beams.slots:
            slot.beams = None  # each ends in its own way
        for slot, why in zip(beams.slots, beams.endings, strict=True):
            self._finish(slot, why)

    def _finish(self, request: Request, why: Finish) -> None:
        self.scheduler.finish(request, why)
        if request.text is not None:
            request.text.finish(request.output_count >= request.params.min_tokens)
