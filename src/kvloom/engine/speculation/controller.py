"""The controller decides how many draft tokens each request gets, and whether a proposer is used at all.

    cost        the measured seconds of decode steps of each size, and of a proposer's drafts
    estimate    the probabilities that a proposer has a draft for a request, that the first token of a draft is
                accepted, and that a token after an accepted token is: moving averages for each request and proposer.
                A head estimates a probability of acceptance (chance) for each node of a tree. For trees, the second
                estimate is instead the number of accepted tokens divided by the sum of the chances
    length      draft tokens are added in the order of their probability of acceptance, over all requests, up to the
                number with the largest expected tokens per second. A request with a low estimate gets none
    on or off   a proposer is used if it is expected to give GAIN times the tokens per second of plain steps

A large batch keeps the device busy without drafts. Each draft token then takes as long as a request's own token,
and the controller turns speculation off. It also turns off a proposer that seldom has a draft. While a proposer is
on, the engine waits for the tokens of each step before it launches the next step. The controller decides again if
the number of requests or the estimates have changed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .draft import Draft

__all__ = ["Acceptance", "Controller", "Estimate", "StepCosts"]

GAIN = 1.03
"""Drafts are used if the expected tokens per second are more than GAIN times those of plain steps."""
FIRST_PROBE_STEPS, PROBE_STEPS = 4, 100
"""A draft model or head that was turned off is tried again in one step, a probe: first after FIRST_PROBE_STEPS steps for
each request, because estimates of few requests are less certain. The number of steps doubles after each probe that does
not turn it on. It is at most PROBE_STEPS. After PROBE_STEPS steps with drafts, MEASURED_STEPS steps run without drafts, so
that their time is measured.
"""
MEASURED_STEPS = 3
REVIEW_STEPS, RISE = 8, 0.1
"""While a proposer is off, its estimates are compared every REVIEW_STEPS steps with those at the time when it was
turned off. If they are higher by RISE, the controller decides again.
"""
PRIOR = 0.7
"""Acceptance assumed of a proposer that has not been tried."""
WEIGHT = 0.15
"""Weight of the newest measurement in a moving average."""
OVERALL_WEIGHT = 0.03
"""Weight of the newest measurement in the estimate of a proposer, with which new requests start. It is an average over
several requests, so that one request with bad drafts does not turn drafts off for the next one."""
FADE = 0.005
"""With each measured step that may have drafts, the times of larger steps move by this share towards its time. If one of
them was measured too high, it is therefore tried and measured again."""
DRIFT = 0.02
"""In each step, the estimate of a request without a draft moves by this share towards the estimate of the proposer, if
that is higher. The request is therefore tried again."""
PROBE_TOKENS, PROBE_REQUESTS = 2, 8
"""Largest number of tokens in a draft of a probe, and of requests with such drafts."""
LEAST, MOST = 0.02, 0.98
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
"""Step sizes in tokens for which an average time is stored. Times of other sizes are interpolated."""


@dataclass(slots=True)
class Estimate:
    """Estimates about the drafts of a proposer. `found`, `chance` and `later` are moving averages.

    | field    | meaning                                                                                           |
    |----------|---------------------------------------------------------------------------------------------------|
    | `found`  | probability that the proposer has a draft for a request                                           |
    | `chance` | probability that the first token of a draft is accepted. If drafts have `Draft.chances`, `chance` |
    |          | is instead the number of accepted tokens divided by the sum of `Draft.chances`                    |
    | `later`  | probability that a token of a draft is accepted if the token before it was accepted               |
    | `unused` | a draft that a proposer made while it was off: the position of its first token, and its tokens.   |
    |          | No step verifies this draft. `Speculation._review` later compares it with the request's output    |
    """

    chance: float = PRIOR
    found: float = 1.0
    later: float = PRIOR
    unused: tuple[int, list[int]] | None = None

    @property
    def value(self) -> float:
        """The probability that a request gets a draft and that the first token of the draft is accepted."""
        return self.found * self.chance

    def observe(self, drafted: int, accepted: int, weight: float = WEIGHT) -> None:
        """Add a measurement: `accepted` of `drafted` tokens were accepted. 0 drafted tokens mean that the proposer had
        no draft. Draft tokens after the first rejected token do not count.
        """
        self.found += weight * ((drafted > 0) - self.found)
        if drafted:
            self.chance += weight * ((accepted > 0) - self.chance)
        if accepted and (tried := min(drafted, accepted + 1) - 1):
            self.later += (1 - (1 - weight / 2) ** tried) * ((accepted - 1) / tried - self.later)

    def observe_tree(self, expected: float, accepted: int, weight: float = WEIGHT) -> None:
        """Record the result of a draft tree. `accepted` is the number of accepted tokens. `expected` is the sum of the
        head's probabilities of acceptance (`Draft.chances`)."""
        self.found += weight * (1 - self.found)
        share = accepted / max(expected, LEAST)
        self.chance += (1 - (1 - weight) ** expected) * (share - self.chance)


class Acceptance:
    """The estimates of each request for each proposer. A new request starts with the estimate of the proposer, which is
    the average over all requests.
    """

    def __init__(self) -> None:
        self._overall: dict[str, Estimate] = {}

    def knows(self, proposer: str) -> bool:
        """Whether there was any measurement of a proposer."""
        return proposer in self._overall

    def of(self, known: dict[str, Estimate], proposer: str) -> Estimate:
        """Return the estimate for a request. `known` contains the request's own estimates, by proposer."""
        return known.get(proposer) or self._overall.get(proposer) or UNTRIED

    def observe(self, known: dict[str, Estimate], proposer: str, drafted: int, accepted: int) -> None:
        """Add a measurement (see `Estimate.observe`) to the estimates of the request (`known`) and of the proposer."""
        self.own(known, proposer).observe(drafted, accepted)
        self._overall.setdefault(proposer, Estimate()).observe(drafted, accepted, OVERALL_WEIGHT)

    def observe_draft(self, known: dict[str, Estimate], proposer: str, draft: Draft, accepted: int) -> None:
        """Like `observe`, for the draft `draft`, of which `accepted` tokens were accepted."""
        if not draft.chances:
            self.observe(known, proposer, len(draft.tokens), accepted)
            return
        self.own(known, proposer).observe_tree(sum(draft.chances), accepted)
        self._overall.setdefault(proposer, Estimate()).observe_tree(
            sum(draft.chances), accepted, OVERALL_WEIGHT
        )

    def drift(self, known: dict[str, Estimate], proposer: str) -> None:
        """For a request without a draft: if the proposer's estimate is higher, move the request's by DRIFT of the gap."""
        if proposer in known:
            known[proposer].chance += DRIFT * max(
                0.0, self._overall[proposer].chance - known[proposer].chance
            )

    def own(self, known: dict[str, Estimate], proposer: str) -> Estimate:
        """Return the request's own estimate from `known`. If there is none, add a copy of the proposer's estimate to
        `known`."""
        if proposer not in known:
            known[proposer] = replace(self._overall.setdefault(proposer, Estimate()))
        return known[proposer]


UNTRIED = Estimate()


class StepCosts:
    """Measured seconds of decode steps by their number of tokens, as moving averages at `SIZES`.

    If there are `others` (the times of plain steps), these are the steps whose drafts the controller chooses: sizes that
    were not measured have the time in `others`, and the times of larger steps slowly fall (`FADE`).
    """

    def __init__(self, others: StepCosts | None = None) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._others = others

    def observe(self, tokens: int, seconds: float) -> None:
        size = _size_of(tokens)
        count = self._counts[size] = self._counts.get(size, 0) + 1
        # The first measurements have equal weights, because the very first step of a size is often slow. A pause of
        # the machine counts at most as twice the average.
        before = self._seconds.get(size, seconds)
        average = self._seconds[size] = before + max(WEIGHT, 1 / count) * (min(seconds, 2 * before) - before)
        if self._others is None:
            return
        for other, old in self._seconds.items():
            if other > size and old > average:
                self._seconds[other] = old - FADE * (old - average)

    def knows(self, tokens: int) -> bool:
        """Return whether a step of about this size was measured."""
        return _size_of(tokens) in self._seconds

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds of a step of `tokens` tokens, or 0 if no step was measured."""
        return float(self.seconds_of(np.array([tokens]))[0])

    def seconds_of(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the expected seconds of steps of `tokens` tokens, or zeros if no step was measured.

        Interpolates between measured sizes. Beyond the largest measured size, assumes that a quarter of the time grows
        with the tokens, so that larger steps are tried and measured. A step never gets more time than a larger step:
        an old measurement of a small step may be too high."""
        measured = self._seconds if self._others is None else self._others._seconds | self._seconds
        if not measured:
            return np.zeros(len(tokens))
        sizes = np.array(sorted(measured), dtype=np.float64)
        seconds = np.minimum.accumulate(np.array([measured[size] for size in sizes])[::-1])[::-1]
        beyond = np.maximum(0.0, tokens - sizes[-1]) / max(sizes[-1], 8)
        expected: npt.NDArray[np.float64] = np.interp(tokens, sizes, seconds) * (1 + 0.25 * beyond)
        return expected


def _size_of(tokens: int) -> int:
    """Return the size in `SIZES` to which a step of `tokens` tokens belongs."""
    return SIZES[max(0, bisect_right(SIZES, tokens) - 1)]


@dataclass(slots=True)
class _TurnedOff:
    """A proposer that is off. `requests` is the number of requests when it was turned off, and `value` the mean of
    their `Estimate.value`. `steps` counts the steps since then. A probe follows after `wait` steps."""

    requests: int
    value: float
    wait: int
    steps: int = 0

    @property
    def needs_probe(self) -> bool:
        return self.steps >= self.wait


class Controller:
    """Decides the draft lengths of a step, for each proposer.

    `lookups` are the proposers that search earlier tokens and need no device. While a lookup is off, `Speculation`
    reviews it: the lookup makes drafts that no step verifies, and `Speculation` compares them with the output. Any
    other proposer that is off is tried again by probes.
    """

    def __init__(self, lookups: Iterable[str] = ()) -> None:
        self.costs = StepCosts()
        """Seconds of plain steps, which have no drafts and for which the engine does not wait. On a GPU the next step
        is launched before their tokens arrive."""
        self._waiting = StepCosts(
            self.costs
        )  # seconds of steps that the engine waits for, with or without drafts
        self.acceptance = Acceptance()
        self.reasons: dict[str, str] = {}
        """The last decision about each proposer, with its figures, as text."""
        self.longest: dict[str, int] = {}
        """The longest draft of each proposer by its last decision. 0 while the proposer is off."""
        self._lookups = frozenset(lookups)
        self._proposing: dict[str, float] = {}  # seconds per request of a lookup, else per draft token
        # Mean chance of the best node of a tree, of the second best node, ….
        self._chances: dict[str, list[float]] = {}
        self._off: dict[str, _TurnedOff] = {}
        self._since_plain = 0
        self._measuring = 0  # steps that still run without drafts

    @property
    def wants_drafts(self) -> bool:
        """Whether the next step may have drafts. If so, the engine waits for the tokens of the previous step."""
        if self._measuring:
            return False
        return not self.reasons or any(not self._is_off(name) for name in self.reasons)

    def _is_off(self, proposer: str) -> bool:
        off = self._off.get(proposer)
        return off is not None and (proposer in self._lookups or not off.needs_probe)

    def step_begins(self, estimates: Sequence[dict[str, Estimate]]) -> list[str]:
        """Count a step. Return the names of the lookups that are off and due for a review (see `Controller`).
        `estimates` are the estimates of each request, by proposer.

        The controller decides again about a proposer that is off in two cases: the number of requests has doubled or
        halved, or the mean of their `Estimate.value` has risen by RISE."""
        self._since_plain = self._since_plain + 1 if self.wants_drafts else 0
        self._measuring = max(0, self._measuring - 1)
        count, due = len(estimates), []
        for name, off in list(self._off.items()):
            off.steps += 1
            if not count:  # only prompts run
                continue
            if count > 2 * off.requests or 2 * count < off.requests:
                del self._off[name]
            elif off.steps % REVIEW_STEPS == 0:
                self.review(name, sum(self.acceptance.of(known, name).value for known in estimates) / count)
                if name in self._off and name in self._lookups:
                    due.append(name)
        return due

    def review(self, proposer: str, value: float) -> None:
        """Let the controller decide again about a proposer that is off, if `value` has risen by RISE since the proposer
        was turned off. A draft model or head is probed, if it stays off. `value` is the mean `Estimate.value`. For a
        lookup proposer, `value` is the mean share of draft tokens that equal the output, over drafts that no step
        verified."""
        off = self._off.get(proposer)
        if off is None or value <= off.value + RISE:
            return
        if proposer in self._lookups:
            del self._off[proposer]
        else:
            off.steps = off.wait

    def lengths(
        self,
        proposer: str,
        estimates: Sequence[Estimate],
        most: Sequence[int],
        rows: int,
        others: int,
        recomputes: bool = False,
    ) -> list[int]:
        """Return how many draft tokens each request gets from a proposer. All are 0 while the proposer is off, or if
        the step should run without drafts. All drafts together have at most `rows` tokens.

        - `estimates` has the estimate of each request, and `most` the length of its longest possible draft.
        - `others` is the number of tokens of other requests in the step.
        - `recomputes` means that recurrent layers compute accepted tokens again in the next step.
        """
        count, plain = len(estimates), len(estimates) + others
        none = [0] * count
        if not self.costs.knows(plain) or self._since_plain > PROBE_STEPS:
            self._since_plain, self._measuring = 0, MEASURED_STEPS
            self.reasons.setdefault(proposer, "nothing is measured yet")
            return none
        if self._is_off(proposer):
            return none
        probed = self._off.get(proposer)
        base = self.costs.seconds(plain)
        rate = plain / base if base else math.inf
        best, best_rate = self._best_lengths(
            proposer, estimates, most, min(rows, sum(most)), plain, recomputes
        )
        found = sum(one.found for one in estimates) / max(1, count)
        chance = sum(one.chance for one in estimates) / max(1, count)
        figures = f"{found:.0%} of them have a draft, {chance:.0%} of draft tokens are accepted"
        if best_rate > GAIN * rate:
            self._off.pop(proposer, None)
            self.longest[proposer] = max(best)
            self.reasons[proposer] = (
                f"on: up to {sum(best)} draft tokens for {plain} requests; {figures}; "
                f"expected speed: {best_rate / rate:.2f} times"
            )
            return best
        self.longest[proposer] = 0
        wait = min(2 * probed.wait if probed else FIRST_PROBE_STEPS * count, PROBE_STEPS)
        self._off[proposer] = _TurnedOff(count, sum(one.value for one in estimates) / max(1, count), wait)
        self.reasons[proposer] = (
            f"off: {plain} requests; {figures}; expected speed with drafts: {best_rate / rate:.2f} times"
        )
        if probed is None:
            return none
        # A probe verifies a few short drafts, to measure whether drafts are now worth their cost.
        tried = sorted(range(count), key=lambda i: -estimates[i].value)[:PROBE_REQUESTS]
        return self.share([min(PROBE_TOKENS, n) * (i in tried) for i, n in enumerate(most)], rows)

    def _best_lengths(
        self,
        proposer: str,
        estimates: Sequence[Estimate],
        most: Sequence[int],
        rows: int,
        plain: int,
        recomputes: bool,
    ) -> tuple[list[int], float]:
        """Return the draft lengths with the largest expected tokens per second, and this rate. The arguments are those
        of `lengths`. `plain` is the number of tokens of the step without drafts."""
        count, longest = len(estimates), max(most, default=0)
        if rows < 1 or not longest:
            return [0] * count, 0.0
        chance, later = np.array([(one.chance, one.later) for one in estimates]).T[:, :, None]
        found = np.array([one.found for one in estimates])
        by_rank = self._chances.get(proposer)
        depth = np.arange(1, longest + 1)
        if by_rank is None:
            accepted = np.clip(chance, 0.0, MOST) * np.clip(later, 0.0, MOST) ** (depth - 1)
        else:
            accepted = chance * np.pad(
                np.minimum.accumulate(by_rank)[:longest], (0, max(0, longest - len(by_rank)))
            )
        accepted = np.where(depth <= np.array(most)[:, None], accepted, -1.0)
        order = np.argsort(-accepted, axis=None, kind="stable")[:rows]
        request, place = np.divmod(order, longest)
        gained = np.cumsum(accepted.ravel()[order] * found[request])
        tokens = plain + np.cumsum(found[request]) + (gained if recomputes else 0.0)
        units: float | npt.NDArray[np.int64] = 1  # the size of a tree hardly changes the time to propose it
        if proposer in self._lookups:
            units = count
        elif by_rank is None:
            units = np.maximum.accumulate(place + 1)
        seconds = self._waiting.seconds_of(tokens) + self._proposing.get(proposer, 0.0) * units
        rates = (plain + gained) / np.maximum(seconds, 1e-9)
        best = int(rates.argmax())
        return np.bincount(request[: best + 1], minlength=count).tolist(), float(rates[best])

    def observe_step(self, tokens: int, seconds: float, waited: bool = False) -> None:
        """Update the average time of decode steps of `tokens` tokens. The step must have no prompt tokens. `waited`
        means that the engine waited for the tokens of the step, as speculation requires.
        """
        (self._waiting if waited else self.costs).observe(tokens, seconds)

    def observe_proposal(self, proposer: str, requests: int, longest: int, seconds: float) -> None:
        """Update a proposer's average time: per request for a lookup, else per token of the longest draft. The
        proposer took `seconds` for drafts of up to `longest` tokens for `requests` requests. For trees, `longest`
        is 1. The first drafts of a draft model after steps without drafts also compute the tokens of these steps, so
        their time counts only if nothing else was measured."""
        if self._since_plain == 1 and proposer in self._proposing and proposer not in self._lookups:
            return
        if units := requests if proposer in self._lookups else longest:
            each = seconds / units
            before = self._proposing.get(proposer, each)
            self._proposing[proposer] = before + WEIGHT * (min(each, 2 * before) - before)

    def observe_chances(self, proposer: str, drafts: Iterable[Draft]) -> None:
        """Update the mean chances (probabilities of acceptance) of the nodes in a proposer's trees: of the best node,
        of the second best node, and so on."""
        by_rank = self._chances.get(proposer, [])
        for draft in drafts:
            for rank, chance in enumerate(draft.chances):
                if rank == len(by_rank):
                    by_rank.append(chance)
                by_rank[rank] += WEIGHT * (chance - by_rank[rank])
        if by_rank:
            self._chances[proposer] = by_rank

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
