"""A request: what was asked, what it has by now, and how it ended. Data; it computes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core import Control, Foreseen, Sequence, Stop, loops
from kvloom.models.sight import Sight

from .beams import BeamSearch
from .grammar import GrammarState
from .logprobs import TokenLogprobs
from .odds import Tally
from .params import Finish, SamplingParams
from .text import Text

__all__ = ["Finish", "Request", "SamplingParams", "token_ids"]

SEEDS = 1 << 64


def token_ids(given: Iterable[int]) -> tuple[tuple[int, ...], npt.NDArray[Any]]:
    """Token ids as Python's numbers and as an array of integers. A list of Python's costs a few nanoseconds a token where it
    holds plain numbers alone; a device may wait for it."""
    held = given if isinstance(given, (list, tuple, np.ndarray)) else list(given)
    data = loops.plain_ids(held)
    if data is not None:
        return loops.unwatched(tuple(held)), np.frombuffer(data, np.int32)
    try:
        ids: npt.NDArray[Any] = np.fromiter(held, np.int64, len(held))
    except (OverflowError, TypeError, ValueError):  # numbers that no such array holds, or something else
        ids = np.array([int(token) for token in held], dtype=object)
    return tuple(ids.tolist()), ids


@dataclass(slots=True, eq=False)
class Request:
    """One text that grows. `tokens` are prompt and output; `sequence` holds its pages while it runs, and is None while it
    waits. `computed` tokens have been launched, `unknown` ones were chosen that the host has not seen; where `uncached`, it
    leaves the cache alone: uses nothing of it, and adds nothing. `looked_below`: how far the cache took it when tiers had no
    more for it, since it last began; `lacking` is what kept those that are there from serving it.

    `priority`: larger runs first and is preempted last. `order` is the place in which requests came. `seed` is the one it
    was given, or any. `text` is its output as text where that is made as it grows, `structure` where it stands in its
    grammar. Where several answers are wanted the request is the first of them and `children` are the others: they begin
    (`branched`) where the prompt ends, or are the places of `beams`. One that `waits` must have its last token seen by the
    host before its next can be chosen. `sight` is what the prompt shows, where it has images. `prompt_logprobs` are those of
    the prompt's tokens that are known by now, where they are wanted; the first token has none.

    How it went: it was looked up at `looked_up`, on the cache's clock, and `began` when it got its first work: `hits` says
    how many tokens it found in which tier, `stop` why the pool had no more then, and `elsewhere` that another tenant has more.
    `loads` are tokens that came from below the pool for it: the tier, from when to when on the monotonic clock, how many. The
    `first_loads` of them are what it began with; others brought back what it had lost.
    """

    order: int
    prompt: tuple[int, ...]
    params: SamplingParams
    control: Control = field(default_factory=Control)
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    cached_tokens: int | None = None
    computed: int = 0
    unknown: int = 0
    uncached: bool = False
    looked_below: int | None = None
    foreseen: Foreseen | None = None
    lacking: Stop | None = None
    preemptions: int = 0
    finish: Finish | None = None
    stop_reason: int | str | None = None
    seed: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    top_logprobs: int = 0
    text: Text | None = None
    structure: GrammarState | None = None
    tally: Tally | None = None
    parent: Request | None = None
    children: list[Request] = field(default_factory=list)
    branched: bool = False
    beams: BeamSearch[Request] | None = None
    sight: Sight | None = None
    looked_up: float = 0.0
    began: float = 0.0
    stop: Stop | None = None
    loads: list[tuple[str, float, float, int]] = field(default_factory=list)
    first_loads: int = 0
    elsewhere: bool = False
    waits: bool = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """Sorts first what runs first."""
    limit: int = field(init=False)
    """Tokens that it may come to have."""
    asked: npt.NDArray[np.int32] | None = field(repr=False, default=None)
    """The prompt as an array, where whoever made the request had one: see `prompt_ids`."""

    def __post_init__(self) -> None:
        self.tokens = loops.unwatched(list(self.prompt))
        self.rank = -self.priority, self.order
        self.limit = len(self.prompt) + self.params.max_tokens
        self.waits = self.params.needs_last_token
        self.top_logprobs = self.params.logprobs or 0
        if self.seed < 0:
            self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed % SEEDS

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def ids(self, end: int) -> npt.NDArray[np.int32]:
        """Its first `end` tokens as an array; costs in proportion to those that are not its prompt's."""
        size, asked = len(self.prompt), self.prompt_ids
        if end <= size:
            return asked[:end]
        return np.concatenate((asked, np.array(self.tokens[size:end], np.int32)))

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The prompt as an array, which all answers to it share: made when it is first wanted, as the device may be busy then."""
        first = self.parent or self
        if first.asked is None:
            first.asked = np.array(first.prompt, np.int32)
        return first.asked

    @property
    def asking(self) -> Control:
        """Its control as it asks the cache: one that leaves the cache alone, or tells of its prompt, takes nothing from it."""
        if self.uncached:
            return replace(self.control, read=False, store=False)
        # What is found is not computed, and then not known.
        return replace(self.control, read=False) if self.tells_prompt else self.control

    def count_cached(self, tokens: int) -> None:
        """It began with so many tokens found in the cache; what it finds when it comes back does not count."""
        if self.cached_tokens is None:
            self.cached_tokens = tokens

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all known: every token of it must be computed."""
        wanted = self.params.prompt_logprobs is not None and self.parent is None
        return wanted and max(1, len(self.prompt_logprobs)) < len(self.prompt)

    @property
    def telling(self) -> bool:
        """Whether what it computes next tells of its prompt."""
        return self.computed < len(self.prompt) and self.tells_prompt

    def tell_prompt(self, start: int, told: list[TokenLogprobs]) -> None:
        """Take in the log-probabilities of the prompt's tokens from `start` on; what is known already stays."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        known = len(self.prompt_logprobs)
        if start <= known:
            self.prompt_logprobs += told[known - start :]

    @property
    def hits(self) -> dict[str, int]:
        """Tokens that it found, by the tier that had them; `cached_tokens` in all."""
        found: dict[str, int] = {}
        left = self.cached_tokens or 0
        # Of what came more than once, because it left again before its turn, the last counts.
        for tier, _, _, tokens in reversed(self.loads[: self.first_loads]):
            if counted := min(tokens, left):
                found[tier] = found.get(tier, 0) + counted
                left -= counted
        return {"device": left, **found} if left else found

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def drawn(self) -> int:
        """Tokens that were chosen for it so far, seen or not."""
        return len(self.tokens) + self.unknown - len(self.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose computing has not been launched."""
        return len(self.tokens) + self.unknown - self.computed

    @property
    def mask_pending(self) -> bool:
        """Whether its grammar's process still computes which tokens may come next: it cannot be scheduled before."""
        return self.structure is not None and self.structure.pending

    @property
    def parked(self) -> bool:
        """Whether it is a beam that waits for the others of its depth."""
        return self.beams is not None and self.pending == 0

    @property
    def family(self) -> list[Request]:
        """All answers to its prompt, itself among them."""
        first = self.parent or self
        return [first, *first.children]

    @property
    def bound(self) -> list[Request]:
        """Those that end when it is ended: all beams, and answers that have not begun."""
        return self.family if self.beams is not None or (self.children and not self.branched) else [self]

    @property
    def best(self) -> list[Request]:
        """The answers that were asked for: where there are more, those of the greatest cumulative log-probability."""
        answers = self.family
        if self.params.beam_width > 1:
            answers = [one for one in answers if one.output_count]
        elif self.params.samples > self.params.n:
            answers.sort(key=lambda one: -one.cumulative_logprob)
        return answers[: self.params.n]
