"""A request: what was asked, what it has by now, and how it ended. Data; it computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvloom.core import Control, Sequence

__all__ = ["Finish", "Request", "SamplingParams"]

Finish = Literal["stop", "length", "cancelled", "no_room"]
"""How a request ended; "no_room": the pool cannot hold it even alone."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 takes the likeliest. `seed` makes a request's draws its own: the same seed
    gives the same tokens, whatever else runs."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(
                f"temperature {self.temperature} must not be negative; 0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must not be negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must lie in [0, 1]")


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are prompt and output; `sequence` holds its pages while it runs, and is None while it waits.

    `priority`: larger runs first and is preempted last. `order` is the place in which requests came.
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
    preemptions: int = 0
    finish: Finish | None = None
    waits = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def drawn(self) -> int:
        """Tokens that were chosen for it so far, seen or not."""
        return len(self.tokens) + self.unknown - len(self.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose computing has not been launched."""
        return len(self.tokens) + self.unknown - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts first what runs first."""
        return -self.priority, self.order
