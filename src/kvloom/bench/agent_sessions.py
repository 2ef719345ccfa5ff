"""The load of `kvloom bench routing`: random sessions of coding agents. The same seed gives the same sessions.

    tools + system prompt ── project ── task ─┬─ turn ─┬─ turn ── turn ── turn …   a session
    (all sessions share it) (some share it)   │        ├─ branch ── turn           a branch: shares all so far
                                              │        └─ branch                   in parallel; then the session goes on
    tools of sub-agents ── project ── task ───┴─ turn ── turn                      a sub-agent: shares only its tools

A prompt is the whole history of a session, and each turn adds a reply and a tool result. Sometimes the last turn is
sent again with another end, as after an edit or a retry. Between turns a session is idle, as if a tool runs or a user
thinks. The popularity of projects follows Zipf's law.

Lengths and idle times follow 64 recorded sessions (3,347 requests). Recorded lengths are divided by 16, and times by
40, so that a small model on a CPU can serve them:

| recorded                              | 10 % | median | 90 %  | here                                             |
|---------------------------------------|------|--------|-------|--------------------------------------------------|
| tools and system prompt               |      | 15,200 |       | 768 tokens                                       |
| tokens that a request adds            | 256  | 896    | 4,864 | median 56, 90 % 264, at most 512                 |
| seconds between answer and next turn  | 5    | 13     | 190   | median 0.33, 90 % 4.3, at most 5                 |
| turns of a session                    | 5    | 21     | 122   | median 10, limited by the model's context        |
| first prompt of a sub-agent           |      | 10,170 |       | 512 tokens, project and task                     |
| requests that change earlier tokens   | 4 %  |        |       | 4 % of turns                                     |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["AgentLoad", "Session", "Turn", "shared_tokens"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYSTEM_TOKENS, SUB_AGENT_TOKENS = 768, 512
LONGEST_TURN, LONGEST_IDLE = 512, 5.0
TURN_SPREAD, IDLE_SPREAD, LENGTH_SPREAD = 1.2, 2.0, 0.9
"""Standard deviations of three logarithms: of the tokens that a turn adds, of idle times, and of the number of turns of
a session."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt that is sent `idle` seconds after the previous answer. After the answer to this prompt, all `branches`
    run in parallel. The session continues when the branches have ended."""

    idle: float
    prompt: str
    branches: tuple[tuple[Turn, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one agent. The first turn starts at `at` seconds."""

    at: float
    turns: tuple[Turn, ...]

    def walk(self) -> Iterator[Turn]:
        """Yield all turns, including the turns of branches."""

        def of(turns: Iterable[Turn]) -> Iterator[Turn]:
            for turn in turns:
                yield turn
                for branch in turn.branches:
                    yield from of(branch)

        return of(self.turns)


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Parameters of the load.

    - `sessions` sessions start at random times within `seconds`. Each is about one of `projects` projects.
    - `turns` is the median number of turns of a session.
    - `tokens` is the median number of tokens that a turn adds.
    - `idle` is the median number of seconds before a turn.
    - `longest` is the largest number of tokens of a prompt.
    - `fork_share` is the fraction of turns that start branches or sub-agents.
    - `edit_share` is the fraction of turns that are sent again with a different end.
    """

    sessions: int = 24
    projects: int = 6
    turns: float = 10.0
    tokens: float = 56.0
    idle: float = 0.33
    seconds: float = 20.0
    longest: int = 3500
    fork_share: float = 0.12
    edit_share: float = 0.04

    def draw(self, seed: int, mark: str = "") -> list[Session]:
        """Return the sessions of a seed, by start time. All prompts begin with `mark`, so that loads with different marks
        share no prefix."""
        return _Draw(self, seed, mark).sessions()


class _Draw:
    def __init__(self, load: AgentLoad, seed: int, mark: str) -> None:
        self._load, self._rng, self._mark = load, np.random.default_rng(seed), mark
        self._system = self._words(SYSTEM_TOKENS)
        self._sub_agents = self._words(SUB_AGENT_TOKENS)
        self._projects = [self._words(self._around(256, 0.5, LONGEST_TURN)) for _ in range(load.projects)]
        weights = 1.0 / np.arange(1, load.projects + 1)
        self._popularity = weights / weights.sum()

    def sessions(self) -> list[Session]:
        load, rng = self._load, self._rng
        starts = np.sort(rng.uniform(0.0, load.seconds, load.sessions))
        return [Session(float(at), self._session()) for at in starts]

    def _session(self) -> tuple[Turn, ...]:
        load = self._load
        project = self._projects[self._rng.choice(load.projects, p=self._popularity)]
        count = self._around(load.turns, LENGTH_SPREAD, 10 * int(load.turns) + 1)
        return self._turns(self._system + project, count, 0.0, project)

    def _turns(self, prompt: str, count: int, idle: float, project: str | None) -> tuple[Turn, ...]:
        """Return at most `count` turns that continue `prompt`. The first turn starts after `idle` seconds. `project` is
        None for the turns of a branch, which start no further branches.
        """
        load, found = self._load, list[Turn]()
        for number in range(count):
            more = self._words(self._around(load.tokens, TURN_SPREAD, LONGEST_TURN))
            if _tokens(prompt + more) > load.longest:
                break
            if number and self._rng.random() < load.edit_share:
                other = self._words(self._around(load.tokens, TURN_SPREAD, LONGEST_TURN))
                if _tokens(prompt + other) <= load.longest:
                    found.append(Turn(idle, self._mark + prompt + other))
            prompt += more
            forks = project is not None and self._rng.random() < load.fork_share
            branches = self._branches(prompt, project or "") if forks else ()
            found.append(Turn(idle, self._mark + prompt, branches))
            idle = self._idle()
        return tuple(found)

    def _branches(self, prompt: str, project: str) -> tuple[tuple[Turn, ...], ...]:
        """Return two to four branches. With a probability of one half, all of them continue the whole prompt. Otherwise
        they are sub-agents, whose prompts begin with the tools of sub-agents and the project.
        """
        rng = self._rng
        begin = prompt if rng.random() < 0.5 else self._sub_agents + project
        return tuple(
            self._turns(begin, int(rng.integers(1, 5)), 0.0, None) for _ in range(rng.integers(2, 5))
        )

    def _around(self, median: float, spread: float, most: int) -> int:
        return max(1, min(most, round(self._rng.lognormal(math.log(median), spread))))

    def _idle(self) -> float:
        if not self._load.idle:
            return 0.0
        return min(LONGEST_IDLE, float(self._rng.lognormal(math.log(self._load.idle), IDLE_SPREAD)))

    def _words(self, count: int) -> str:
        """Return random text. Each word is one token of usual tokenizers: a space and a letter."""
        return "".join(" " + LETTERS[one] for one in self._rng.integers(0, len(LETTERS), count))


def _tokens(prompt: str) -> int:
    return len(prompt) // 2


def shared_tokens(prompts: Iterable[str]) -> tuple[int, int]:
    """Return how many words of the prompts would be hits in an unlimited cache, and the number of all words. The hit of
    a prompt is the longest prefix that it shares with an earlier prompt. The last word of a prompt is never a hit.
    """
    root: dict[str, dict] = {}  # type: ignore[type-arg]
    hits = total = 0
    for prompt in prompts:
        words, node, depth, is_new = prompt.split(), root, 0, False
        for word in words:
            below = node.get(word)
            if below is None:
                below = node[word] = {}
                is_new = True
            depth += not is_new
            node = below
        hits += min(depth, len(words) - 1)
        total += len(words)
    return hits, total
