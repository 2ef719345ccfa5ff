"""Beam search on the host: which beams go on with which token, and which texts have ended. Knows no pages.

    slots    one request for each beam; at first only the first is live, and holds the prompt
    offer    a beam's likeliest tokens; when all live beams of a depth have theirs,
    decide   the successors: (slot they follow, token, score), best first; none: the search is over

A finished text's score is its log-probability / length ** length_penalty. The search ends when the best live beam, if it
ended now, could not come among the `beam_width` best finished texts, or at `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from .logprobs import TokenLogprobs
from .params import Finish, SamplingParams

__all__ = ["BeamSearch", "Slot", "Successor", "seated"]


class Slot(Protocol):
    """What a beam is kept in: as much of a request as a search looks at and writes."""

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
    """A beam that follows `slot` with one more token; `told` is what came into question there."""

    slot: S
    token: int
    total: float
    told: TokenLogprobs

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Those of the slot with this token's, if they are wanted."""
        wanted = self.slot.params.logprobs
        if wanted is None:
            return []
        return [
            *self.slot.logprobs,
            {self.token: self.told[self.token], **dict(islice(self.told.items(), wanted))},
        ]


def seated(slots: Many[S], successors: Many[Successor[S]]) -> tuple[list[S], list[tuple[S, Successor[S]]]]:
    """The slots that nobody follows, and where each successor goes: the first that follows a slot stays there, others go to
    slots that nobody follows."""
    followed = {id(way.slot) for way in successors}
    spare = [slot for slot in slots if id(slot) not in followed]
    left, taken, seats = list(spare), set[int](), []
    for way in successors:
        seats.append((left.pop() if id(way.slot) in taken else way.slot, way))
        taken.add(id(way.slot))
    return spare, seats


@dataclass(frozen=True, slots=True)
class _Ended:
    score: float
    total: float
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    why: Finish


@dataclass(slots=True, eq=False)
class BeamSearch(Generic[S]):
    """`slots[0]` is the request; `ends` are the tokens that end a text."""

    slots: list[S]
    ends: frozenset[int]
    live: list[S] = field(init=False)
    _told: dict[int, TokenLogprobs] = field(default_factory=dict)
    _ended: list[_Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = self.slots[:1]

    @staticmethod
    def looked_at(width: int, ends: int) -> int:
        """How many of a beam's likeliest tokens must be known: enough that `width` of them end nothing."""
        return width + max(width, ends)

    def offer(self, slot: S, told: TokenLogprobs) -> bool:
        """A live beam's likeliest tokens; whether all have theirs now."""
        self._told[id(slot)] = told
        return len(self._told) == len(self.live)

    def decide(self) -> list[Successor[S]]:
        """The next depth's beams; empty when the search is over."""
        params = self.slots[0].params
        width, length = params.beam_width, self.live[0].output_count + 1
        early = length <= params.min_tokens
        ways = [
            Successor(slot, token, slot.cumulative_logprob + one.logprob, self._told[id(slot)])
            for slot in self.live
            for token, one in self._told[id(slot)].items()
            if not (early and token in self.ends)
        ]
        ways.sort(key=lambda way: -way.total)
        self._told.clear()
        found: list[Successor[S]] = []
        for rank, way in enumerate(ways):
            if way.token in self.ends or length >= params.max_tokens:
                if rank < width:
                    self._end(way, "stop" if way.token in self.ends else "length")
            elif len(found) < width:
                found.append(way)
        if not found or self._settled(found[0].total, length):
            self.live = []
            return []
        return found

    def finish(self) -> None:
        """Write the best texts into the slots, the best first. A vocabulary smaller than the width may leave slots empty."""
        for slot in self.slots[len(self._ended) :]:
            slot.tokens, slot.logprobs = list(slot.prompt), []
        for slot, ended in zip(self.slots, self._ended, strict=False):
            slot.tokens = [*slot.prompt, *ended.tokens]
            slot.logprobs, slot.cumulative_logprob = ended.logprobs, ended.total
            slot.stop_reason = ended.tokens[-1] if ended.why == "stop" else None
        self.live = []

    @property
    def endings(self) -> list[Finish]:
        """How the texts of the slots ended."""
        found: list[Finish] = [ended.why for ended in self._ended]
        return found + ["length"] * (len(self.slots) - len(found))

    def _settled(self, best: float, length: int) -> bool:
        params = self.slots[0].params
        full = len(self._ended) >= params.beam_width
        return full and best / length**params.length_penalty <= self._ended[-1].score

    def _end(self, way: Successor[S], why: Finish) -> None:
        params = way.slot.params
        tokens = [*way.slot.output, way.token]
        score = way.total / len(tokens) ** params.length_penalty
        self._ended.append(_Ended(score, way.total, tokens, way.logprobs, why))
        self._ended.sort(key=lambda ended: -ended.score)
        del self._ended[params.beam_width :]
