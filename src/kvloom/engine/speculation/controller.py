"""The controller decides how many draft tokens each request gets, and whether a proposer is used at all.

    cost        the measured seconds of decode steps of each size, and of a proposer per draft token
    acceptance  the probability that one more draft token is accepted: a moving average for each request and proposer.
                For drafts with estimated chances (trees of heads), the accepted tokens divided by the sum of the chances
    length      the draft lengths with the most expected tokens per second
    on or off   a proposer is used if it is expected to give GAIN times the tokens per second of plain steps

A large batch keeps the device busy without drafts. Each draft token then takes as long as a request's own token, and
the controller turns speculation off. It decides again after PROBE_STEPS steps, and earlier if the number of requests
or their acceptance has changed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .draft import Draft

__all__ = ["Acceptance", "Controller", "StepCosts"]

GAIN = 1.03
"""Drafts are used if the expected tokens per second are more than GAIN times those of plain steps."""
PROBE_STEPS = 100
"""After this many steps without drafts, one step tries drafts again. After this many steps with drafts, one step runs
without drafts, so that its time is measured.
"""
REVIEW_STEPS, RISE = 8, 0.1
"""While a proposer is off, the mean acceptance is compared every REVIEW_STEPS steps. If it is higher by RISE, the
controller decides again.
"""
PRIOR = 0.7
"""Acceptance assumed of a proposer that has not been tried."""
WEIGHT = 0.15
"""Weight of the newest measurement in a moving average."""
LEAST, MOST = 0.02, 0.98
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
"""Step sizes in tokens for which an average time is stored. Times of other sizes are interpolated."""


class Acceptance:
    """Estimates of acceptance: the probability that one more draft token is accepted. Each request has an estimate for
    each proposer. A new request starts with the average of the proposer. Estimates are moving averages.
    """

    def __init__(self) -> None:
        self._overall: dict[str, float] = {}

    def of(self, known: dict[str, float], proposer: str) -> float:
        """Return the estimate for a request. `known` contains the request's own estimates, by proposer."""
        return known.get(proposer, self._overall.get(proposer, PRIOR))

    def observe(self, known: dict[str, float], proposer: str, drafted: int, accepted: int) -> None:
        """Update the estimates of the request (`known`) and of the proposer: `accepted` of `drafted` tokens were
        accepted.

        Draft tokens after the first rejected token do not count.
        """
        tried = min(drafted, accepted + 1)
        share, weight = accepted / tried, 1 - (1 - WEIGHT) ** tried
        for estimates in (known, self._overall):
            before = estimates.get(proposer, self._overall.get(proposer, PRIOR))
            estimates[proposer] = before + weight * (share - before)

    def observe_chances(self, known: dict[str, float], proposer: str, expected: float, accepted: int) -> None:
        """Update the estimates like `observe`, for a draft whose estimated chances have the sum `expected`. The estimates
        are then the accepted tokens divided by the expected tokens."""
        share, weight = accepted / max(expected, LEAST), 1 - (1 - WEIGHT) ** expected
        for estimates in (known, self._overall):
            before = estimates.get(proposer, self._overall.get(proposer, PRIOR))
            estimates[proposer] = before + weight * (share - before)


class StepCosts:
    """Measured seconds of decode steps by their number of tokens, as moving averages at `SIZES`."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        size = SIZES[max(0, bisect_right(SIZES, tokens) - 1)]
        before = self._seconds.get(size)
        if before is None:
            self._seconds[size] = seconds
        else:  # a pause of the machine counts twice the average at most
            self._seconds[size] = before + WEIGHT * (min(seconds, 2 * before) - before)

    def knows(self, tokens: int) -> bool:
        """Whether a step of about this size was measured."""
        return SIZES[max(0, bisect_right(SIZES, tokens) - 1)] in self._seconds

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds of a step of `tokens` tokens, or 0 if no step was measured.

        Between measured sizes the time is interpolated. Beyond the largest measured size, it is assumed to grow
        slowly, so that larger steps are tried. A larger step is assumed to take at least as long as a smaller one."""
        known = sorted(self._seconds)
        if not known:
            return 0.0
        at = bisect_right(known, tokens)
        if not at:
            return self._seconds[known[0]]
        low = known[at - 1]
        below = self._seconds[low]
        if at == len(known):
            # Unknown: assume that half of the time grows with the tokens, so that it is tried and measured.
            return below * (1 + 0.25 * (tokens - low) / max(low, 8))
        high = known[at]
        above = max(below, self._seconds[high])
        return below + (above - below) * (tokens - low) / (high - low)


@dataclass(slots=True)
class _TurnedOff:
    """A proposer that the controller turned off. It has the number of steps since then, and the number and mean
    acceptance of the requests at that time."""

    requests: int
    acceptance: float
    steps: int = 0


class Controller:
    """Decides the draft lengths of a step, for each proposer."""

    def __init__(self) -> None:
        self.costs, self.acceptance = StepCosts(), Acceptance()
        self.reasons: dict[str, str] = {}
        """The last decision about each proposer, with its figures, as text."""
        self._proposing: dict[str, float] = {}  # seconds per draft token of a proposer, for all rows
        self._chances: dict[str, list[float]] = {}  # mean chances of the nodes of trees, by rank
        self._off: dict[str, _TurnedOff] = {}
        self._since_plain = 0

    @property
    def wants_drafts(self) -> bool:
        """Whether the next step may have drafts. If so, the engine waits for the tokens of the previous step."""
        return not self.reasons or any(
            name not in self._off or self._off[name].steps >= PROBE_STEPS for name in self.reasons
        )

    def step_begins(self, estimates: Sequence[dict[str, float]]) -> None:
        """Count a step. The controller decides again about a proposer that is off in two cases: the number of
        requests has doubled or halved, or their mean acceptance has risen by RISE. `estimates` are the estimates of
        each request, by proposer."""
        self._since_plain += 1
        count = len(estimates)
        for name, off in list(self._off.items()):
            off.steps += 1
            if not count:  # only prompts run
                continue
            changed = count > 2 * off.requests or 2 * count < off.requests
            if not changed and off.steps % REVIEW_STEPS == 0:
                mean = sum(self.acceptance.of(known, name) for known in estimates) / count
                changed = mean > off.acceptance + RISE
            if changed:
                del self._off[name]

    def lengths(
        self,
        proposer: str,
        chances: Sequence[float],
        most: Sequence[int],
        rows: int,
        others: int,
        replays: bool = False,
    ) -> list[int]:
        """Return how many draft tokens each request gets from a proposer. All are 0 while the proposer is off, or if
        the step should run without drafts.

        `chances` are the acceptances of the requests, and `most` their longest possible drafts. All drafts together
        have at most `rows` tokens. `others` is the number of tokens of other requests in the step. `replays` states
        that recurrent layers compute accepted tokens again in the next step.
        """
        count, plain = len(chances), len(chances) + others
        none = [0] * count
        if not self.costs.knows(plain) or self._since_plain > PROBE_STEPS:
            self._since_plain = 0
            self.reasons.setdefault(proposer, "nothing is measured yet")
            return none
        probes = proposer in self._off
        if probes and self._off[proposer].steps < PROBE_STEPS:
            return none
        base = self.costs.seconds(plain)
        rate = plain / base if base else math.inf
        best, best_rate = none, rate
        by_rank = self._chances.get(proposer)
        for length in LENGTHS:
            if length > max(most, default=0) and best_rate > rate:
                break
            pairs = zip(chances, most, strict=True)
            if by_rank is None:
                drafts = self.share([_worth(chance, min(length, n)) for chance, n in pairs], rows)
                gained = sum(_expected(chance, n) for chance, n in zip(chances, drafts, strict=True))
                runs = max(drafts, default=0)
            else:
                drafts = self.share([min(length, n) for _, n in pairs], rows)
                gained = sum(chance * sum(by_rank[:n]) for chance, n in zip(chances, drafts, strict=True))
                runs = 1  # the size of a tree hardly changes the time to propose it
            seconds = self.costs.seconds(plain + sum(drafts) + (round(gained) if replays else 0))
            seconds += self._proposing.get(proposer, 0.0) * runs
            if seconds and (plain + gained) / seconds > best_rate:
                best, best_rate = drafts, (plain + gained) / seconds
        mean = sum(chances) / max(1, count)
        if best_rate > GAIN * rate:
            self._off.pop(proposer, None)
            self.reasons[proposer] = (
                f"on: {sum(best)} draft tokens for {plain} requests, acceptance {mean:.2f}, "
                f"expects {best_rate / rate:.2f} times the tokens per second"
            )
            return best
        self._off[proposer] = _TurnedOff(count, mean)
        self.reasons[proposer] = (
            f"off: {plain} requests, acceptance {mean:.2f}; drafts would give "
            f"{best_rate / rate:.2f} times the tokens per second"
        )
        # A probe verifies one draft token of each request, to learn whether that has changed.
        return self.share([min(1, n) for n in most], rows) if probes else none

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Update the average time of decode steps of `tokens` tokens. The step must have no prompt tokens."""
        self.costs.observe(tokens, seconds)

    def observe_proposal(self, proposer: str, drafts: Sequence[Draft], seconds: float) -> None:
        """Update a proposer's average time per draft token, or per tree. The proposer took `seconds` for `drafts`."""
        by_rank = self._chances.get(proposer, [])
        for draft in drafts:
            for rank, chance in enumerate(draft.chances):
                if rank == len(by_rank):
                    by_rank.append(chance)
                by_rank[rank] += WEIGHT * (chance - by_rank[rank])
        if by_rank:
            self._chances[proposer] = by_rank
        longest = 1 if by_rank else max((len(draft.tokens) for draft in drafts), default=0)
        if longest:
            each = seconds / longest
            before = self._proposing.get(proposer, each)
            self._proposing[proposer] = before + WEIGHT * (min(each, 2 * before) - before)

    def observe_draft(self, known: dict[str, float], proposer: str, draft: Draft, accepted: int) -> None:
        """Update the acceptance of a request (`known`) and a proposer after the verification of a draft."""
        if draft.chances:
            self.acceptance.observe_chances(known, proposer, sum(draft.chances), accepted)
        else:
            self.acceptance.observe(known, proposer, len(draft.tokens), accepted)

    @staticmethod
    def share(drafts: list[int], rows: int) -> list[int]:
        """Shorten the longest drafts, in place, until all drafts together have at most `rows` tokens. Return the
        lengths.
        """
        while sum(drafts) > rows:
            longest = max(drafts)
            excess = sum(drafts) - rows
            for i, n in enumerate(drafts):
                if n == longest and excess:
                    drafts[i] -= 1
                    excess -= 1
        return drafts


def _worth(chance: float, length: int) -> int:
    """Return how many of the first `length` draft tokens have a probability of acceptance of at least LEAST."""
    chance = min(max(chance, LEAST), MOST)
    return min(length, int(math.log(LEAST) / math.log(chance)))


def _expected(chance: float, length: int) -> float:
    """Return the expected number of accepted tokens of a draft: a + a² + … + a^length, where a is `chance`."""
    chance = min(max(chance, 0.0), MOST)
    return chance * (1 - chance**length) / (1 - chance)
