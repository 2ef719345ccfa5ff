"""Beam search on the host: chooses the beams that continue and their tokens, and stores finished beams. Does not use
pages.

    slots    one request for each beam; at first only the first slot is live, with the prompt
    offer    adds the most likely tokens of a live beam
    decide   called when all live beams have offered; returns the successors (slot to continue, token, score), best
             first; an empty list means that the search is over

The score of a finished beam is its log-probability / length ** length_penalty. The search ends at `max_tokens`, or when
no live beam can still become one of the `beam_width` best finished beams. With `early_stopping` it ends when
`beam_width` beams have finished.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from .logprobs import TokenLogprobs
from .params import Finish, SamplingParams

__all__ = ["BeamSearch", "Slot", "Successor", "assign_slots"]


class Slot(Protocol):
    """The part of a request that a beam search reads and writes."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cumulative_logprob: float
    stop_reason: int | str | None

    @property
    def output(self) -> list[int]: ...

    @property
    def output_count(self) -> int: ...


S = TypeVar("S", bound=Slot)


@dataclass(frozen=True, slots=True)
class Successor(Generic[S]):
    """A new beam: the beam in `slot`, followed by `token`. `total` is the cumulative log-probability of the new beam.
    `candidates` are the most likely next tokens of the beam in `slot`, including `token`."""

    slot: S
    token: int
    total: float
    candidates: TokenLogprobs

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of the slot, followed by the log-probability of this token. Empty if not requested."""
        wanted = self.slot.params.logprobs
        if wanted is None:
            return []
        return [
            *self.slot.logprobs,
            {self.token: self.candidates[self.token], **dict(islice(self.candidates.items(), wanted))},
        ]


def assign_slots(
    slots: Many[S], successors: Many[Successor[S]]
) -> tuple[list[S], list[tuple[S, Successor[S]]]]:
    """Assign each successor to a slot. Return two lists: the slots whose own beam has no successor, and a pair (slot,
    successor) for each successor. The first successor of a beam stays in the beam's slot. The other successors of the
    beam get slots of the first list.
    """
    followed = {id(successor.slot) for successor in successors}
    spare = [slot for slot in slots if id(slot) not in followed]
    left, taken, seats = list(spare), set[int](), []
    for successor in successors:
        is_taken = id(successor.slot) in taken
        seats.append((left.pop() if is_taken else successor.slot, successor))
        taken.add(id(successor.slot))
    return spare, seats


@dataclass(frozen=True, slots=True)
class _Finished:
    score: float
    total: float
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    why: Finish


@dataclass(slots=True, eq=False)
class BeamSearch(Generic[S]):
    """A beam search. `slots[0]` is the request. `ends` are the tokens that finish a text. `live` are the slots whose
    beams continue."""

    slots: list[S]
    ends: frozenset[int]
    live: list[S] = field(init=False)
    _offered: dict[int, TokenLogprobs] = field(default_factory=dict)
    _finished: list[_Finished] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = self.slots[:1]

    @staticmethod
    def candidates_needed(width: int, ends: int) -> int:
        """Return how many of its most likely tokens each beam must offer. Among so many tokens, at least `width` are
        not end tokens. `ends` is the number of different end tokens.
        """
        return width + max(width, ends)

    def offer(self, slot: S, candidates: TokenLogprobs) -> bool:
        """Add the most likely tokens of a live beam. Return whether all live beams have offered tokens."""
        self._offered[id(slot)] = candidates
        return len(self._offered) == len(self.live)

    def decide(self) -> list[Successor[S]]:
        """Return the beams that continue, each with one more token. An empty list means that the search is over."""
        params = self.slots[0].params
        width, length = params.beam_width, self.live[0].output_count + 1
        early = length <= params.min_tokens
        successors = [
            Successor(slot, token, slot.cumulative_logprob + one.logprob, self._offered[id(slot)])
            for slot in self.live
            for token, one in self._offered[id(slot)].items()
            if not (early and token in self.ends)
        ]
        successors.sort(key=lambda successor: -successor.total)
        self._offered.clear()
        found: list[Successor[S]] = []
        for rank, successor in enumerate(successors):
            if successor.token in self.ends or length >= params.max_tokens:
                if rank < width:
                    self._end(successor, "stop" if successor.token in self.ends else "length")
            elif len(found) < width:
                found.append(successor)
        if not found or self._is_over(found[0].total, length):
            self.live = []
            return []
        return found

    def finish(self) -> None:
        """Write the best texts into the slots, best first. With a small vocabulary there may be fewer texts than
        slots. The last slots then stay empty.
        """
        for slot in self.slots[len(self._finished) :]:
            slot.tokens, slot.logprobs = list(slot.prompt), []
        for slot, finished in zip(self.slots, self._finished, strict=False):
            slot.tokens = [*slot.prompt, *finished.tokens]
            slot.logprobs, slot.cumulative_logprob = finished.logprobs, finished.total
            slot.stop_reason = finished.tokens[-1] if finished.why == "stop" else None
        self.live = []

    @property
    def endings(self) -> list[Finish]:
        """The finish reason of each slot, in the order of the slots."""
        found: list[Finish] = [finished.why for finished in self._finished]
        return found + ["length"] * (len(self.slots) - len(found))

    def _is_over(self, best: float, length: int) -> bool:
        params = self.slots[0].params
        full = len(self._finished) >= params.beam_width
        if full and params.early_stopping:
            return True
        return full and best / length**params.length_penalty <= self._finished[-1].score

    def _end(self, successor: Successor[S], why: Finish) -> None:
        params = successor.slot.params
        tokens = [*successor.slot.output, successor.token]
        score = successor.total / len(tokens) ** params.length_penalty
        self._finished.append(_Finished(score, successor.total, tokens, successor.logprobs, why))
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[params.beam_width :]
