"""The workloads of `kvloom bench engine`: their sizes, and the random tokens of their prompts.

| name | workload                                                                 | size                             |
|------|--------------------------------------------------------------------------|----------------------------------|
| W1   | decode-heavy                                                             | 256 x (128 in, 512 out)          |
| W2   | balanced                                                                 | 512 x (1024 in, 128 out)         |
| W3   | shared prefix: each prompt begins with one of 8 prefixes; runs twice,    | 512 x (4096 + 64 in, 64 out)     |
|      | the second time with cached prefixes                                     |                                  |
| W4   | long prompts                                                             | 16 x (16384 in, 128 out)         |
| W5   | single request                                                           | 1 x (512 in, 256 out)            |
| W6   | conversations: the first prompt has 1024 tokens, and a later prompt is   | 64 x 6 turns (64 out per turn)   |
|      | the whole history and 448 new tokens                                     |                                  |
| W7   | a full context of 131072 tokens; runs only if selected                   | 1 x (130816 in, 256 out)         |

All workloads are lists of conversations. Only conversations of W6 have more than one turn. The same seed and round give
the same tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["WORKLOADS", "Conversation", "Workload", "select_workloads"]

FIRST_TOKEN = 3
"""Smaller ids are often special tokens and are not drawn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A first prompt, and the new tokens of each later turn. A later prompt is the history followed by these
    tokens."""

    prompt: list[int]
    later: list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `requests` conversations with `turns` turns each. Each answer has exactly `output` greedy tokens.

    - The first prompt of a conversation begins with one of `prefixes` shared prefixes, which have `prefix` tokens and
      are used in turn. `prompt` tokens follow that no other prompt has.
    - A later turn adds `more` tokens.
    - With `warm`, an earlier workload of the same round has computed the same prefixes.
    - With `on_request`, the workload runs only if it is selected by name.
    """

    name: str
    what: str
    requests: int
    prompt: int
    output: int
    prefixes: int = 0
    prefix: int = 0
    turns: int = 1
    more: int = 0
    warm: bool = False
    on_request: bool = False

    @property
    def size(self) -> str:
        """The size as text: "256 x (128 in, 512 out)"."""
        on_request = f"{self.prefix} + {self.prompt}" if self.prefixes else str(self.prompt)
        turns = f", {self.turns} turns of {self.more} more" if self.turns > 1 else ""
        return f"{self.requests} x ({on_request} in, {self.output} out{turns})"

    @property
    def output_tokens(self) -> int:
        return self.requests * self.turns * self.output

    @property
    def longest(self) -> int:
        """Return the number of tokens of a conversation at its end."""
        return self.prefix + self.prompt + self.turns * self.output + (self.turns - 1) * self.more

    @property
    def separable(self) -> bool:
        """Whether the time of prefill can be measured by running the prompts alone. This holds if no prompt hits the
        cache.
        """
        return self.turns == 1 and not self.prefixes

    def scaled(self, scale: float) -> Workload:
        """Return the workload with requests, prefixes and lengths multiplied by `scale`. The numbers of requests and
        prefixes are not reduced below 2, and lengths are not reduced below 4. The number of turns does not change.
        """
        if not 0 < scale <= 1:
            raise ValueError(f"scale {scale} must be above 0 and at most 1")

        def of(count: int, least: int) -> int:
            return max(min(count, least), round(count * scale))

        return replace(
            self,
            requests=of(self.requests, 2),
            prefixes=of(self.prefixes, 2),
            prompt=of(self.prompt, 4),
            output=of(self.output, 4),
            prefix=of(self.prefix, 4),
            more=of(self.more, 4),
        )

    def fewer(self, requests: int | None) -> Workload:
        """Return the workload with at most `requests` requests."""
        if requests is not None and requests < 1:
            raise ValueError(f"requests {requests} must be at least 1")
        return self if requests is None else replace(self, requests=min(self.requests, requests))

    def short(self) -> Workload:
        """Return a warm-up workload. It has the same prompt sizes, but at most 8 output tokens per turn and at most two
        turns."""
        return replace(self, output=min(self.output, 8), turns=min(self.turns, 2))

    def prompts_alone(self) -> Workload:
        """Return the workload with one output token per turn, so that its time is the time of the prompts."""
        return replace(self, output=1)

    def draw(self, vocabulary: int, seed: int = 0, round_: int = 0) -> list[Conversation]:
        """Return the conversations of one round. Conversations of different rounds or workloads have different tokens.
        Exception: a warm workload has the same prefixes as the cold workload of the same round.
        """
        family = self.name.split()[0]
        common = np.random.default_rng([seed, round_, zlib.crc32(family.encode())])
        prefixes = common.integers(FIRST_TOKEN, vocabulary, (self.prefixes, self.prefix)).tolist()
        own = np.random.default_rng([seed, round_, zlib.crc32(self.name.encode()), self.output])
        drawn = []
        for request in range(self.requests):
            prefix = prefixes[request % self.prefixes] if prefixes else []
            tokens = own.integers(
                FIRST_TOKEN, vocabulary, self.prompt + (self.turns - 1) * self.more
            ).tolist()
            later = [tokens[self.prompt + turn * self.more :][: self.more] for turn in range(self.turns - 1)]
            drawn.append(Conversation(prefix + tokens[: self.prompt], later))
        return drawn


WORKLOADS: tuple[Workload, ...] = (
    Workload("W1", "decode-heavy", 256, 128, 512),
    Workload("W2", "balanced", 512, 1024, 128),
    Workload("W3", "shared prefix", 512, 64, 64, prefixes=8, prefix=4096),
    Workload("W3 warm", "shared prefix, served before", 512, 64, 64, prefixes=8, prefix=4096, warm=True),
    Workload("W4", "long", 16, 16384, 128),
    Workload("W5", "alone", 1, 512, 256),
    Workload("W6", "conversations", 64, 1024, 64, turns=6, more=448),
    Workload("W7", "the longest", 1, 130816, 256, on_request=True),
)


def select_workloads(names: Sequence[str] | None, scale: float = 1.0) -> list[Workload]:
    """Return the workloads with these names. "W3" selects both of its parts. Without names, return all workloads
    except those whose `on_request` is True."""
    known = list(dict.fromkeys(w.name.split()[0] for w in WORKLOADS))
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown workload {name!r}; known: {', '.join(known)}")
    wanted = [w for w in WORKLOADS if (w.name.split()[0] in names if names else not w.on_request)]
    return [w.scaled(scale) for w in wanted]
