"""SLO admission: predicts the time to first token and the time between tokens of a request, and decides whether the
request may start.

    steps ──observe──▶ StepTimes      seconds of a step, from its prompt tokens, decoding requests and context
    queue ──Backlog──▶ predict        TTFT and TBT at the moment at which the request's prefill would end
    Objective        ──▶ decide       admit, defer (it has a deadline that allows waiting) or refuse

The engine, the router and the simulator use the same classes. This module does not read a clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from .control import Objective
from .histogram import Histogram

__all__ = [
    "RATIOS",
    "Backlog",
    "Decision",
    "Decoding",
    "Prediction",
    "PromptWork",
    "SloAdmission",
    "StepSize",
    "StepTimes",
    "Verdict",
]

RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Bounds of the histograms of actual divided by predicted time."""
ENOUGH_STEPS = 8
"""Number of steps that must be measured before a request can be refused."""
FIRST_HORIZON, LEAST_HORIZON = 2.0, 0.2
"""Prompts delay decode steps. This delay is averaged over a horizon in seconds. The horizon is FIRST_HORIZON at first.
Later it is the usual time from the first to the last token of recent requests, but never less than LEAST_HORIZON."""
HORIZON_WEIGHT = 1 / 16
MET_SHARES, MARGIN_STEP, MARGINS = (0.95, 0.6), 0.05, (0.7, 2.5)
"""Predictions of TTFT and TBT are multiplied by a margin between the two values of MARGINS. A margin changes by about
MARGIN_STEP after each request. It settles where the fraction of MET_SHARES of all requests is at least as fast as predicted.
The fraction of the TTFT is large: under overload, requests wait until their predicted TTFT nearly is the objective."""
DOUBT = 0.98
LAST_MOMENT = 1.2
"""A deferred request starts when the time left until its deadline is at most this multiple of the time that the request
needs."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The work of one step. `rows` is the number of decoding requests, and `context` is the sum of their lengths.
    `pairs` is the number of query-key pairs of the prompt tokens."""

    prompt_tokens: int = 0
    rows: int = 0
    context: float = 0.0
    pairs: float = 0.0


class StepTimes:
    """Estimates the seconds of a step: a constant, plus a part for each of the four numbers of its `StepSize`.

    The coefficients are fitted to measured steps by least squares of the relative error. Older steps have less weight.
    No coefficient is negative, so more work never takes less time. `observe` repeats the fit at every early step, and
    later every SOLVE_STEPS steps. A call without a fit takes about 10 µs."""

    FADE = 0.995
    SOLVE_STEPS = 16
    SCALES = (1.0, 1e3, 1e2, 1e5, 1e6)
    PENALTIES = (1e-6, 1e-6, 1e-6, 1e-2, 5e-2)
    """Penalty of each coefficient. If two coefficients explain the measured steps equally well, the fit uses the one
    with the smaller penalty."""

    def __init__(self, coefficients: Sequence[float] | None = None) -> None:
        size = len(self.SCALES)
        self._products = np.zeros((size, size))
        self._targets = np.zeros(size)
        self._solution = [0.0] * size
        self.steps = 0
        if coefficients is not None:
            if len(coefficients) != size or not all(0 <= one < math.inf for one in coefficients):
                raise ValueError(f"coefficients {coefficients} must be {size} numbers from 0 on")
            self._solution = [one * scale for one, scale in zip(coefficients, self.SCALES, strict=True)]
            self.steps = ENOUGH_STEPS

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured to refuse requests."""
        return self.steps >= ENOUGH_STEPS

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The seconds of a step as five numbers: a constant, then the seconds per prompt token, per decoding request,
        per token of context, and per query-key pair."""
        return tuple(one / scale for one, scale in zip(self._solution, self.SCALES, strict=True))

    def observe(self, size: StepSize, seconds: float) -> None:
        """Add a measurement: a step with the amounts of work `size` took `seconds`. If this is more than four times the
        estimate, four times the estimate is added instead."""
        if seconds <= 0:
            return
        if self.is_known and (expected := self.seconds(size)):
            seconds = min(seconds, 4 * expected)
        row = np.array((1.0, size.prompt_tokens, size.rows, size.context, size.pairs)) / self.SCALES / seconds
        self._products = self.FADE * self._products + np.outer(row, row)
        self._targets = self.FADE * self._targets + row
        self.steps += 1
        if self.steps <= 4 * self.SOLVE_STEPS or self.steps % self.SOLVE_STEPS == 0:
            self._solve()

    def seconds(self, size: StepSize) -> float:
        """Estimate the seconds of a step with the amounts of work `size`."""
        a, b, c, d, e = self.coefficients
        return a + b * size.prompt_tokens + c * size.rows + d * size.context + e * size.pairs

    def doubt(self) -> None:
        """Lower the estimate slightly. Call this method after a refusal on an idle worker. Refused work is never
        measured, so a wrong estimate would otherwise never be corrected."""
        self._targets *= DOUBT
        self._solution = [DOUBT * one for one in self._solution]

    def _solve(self) -> None:
        """Fit the coefficients by coordinate descent from the last solution. Each coefficient stays at 0 or above."""
        rows, targets, found = self._products.tolist(), self._targets.tolist(), self._solution
        for _ in range(200):
            change = 0.0
            for i, row in enumerate(rows):
                if row[i] <= 0.0:
                    continue
                ridge = self.PENALTIES[i] * row[i]
                left = targets[i] - sum(a * x for a, x in zip(row, found, strict=True))
                value = max(0.0, (found[i] * row[i] + left) / (row[i] + ridge))
                change = max(change, abs(value - found[i]) * row[i] ** 0.5)
                found[i] = value
            if change < 1e-4 * math.sqrt(max(1.0, self.steps)):
                return


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A prompt to compute.

    - `tokens` is the number of its tokens that are not hit, and `context` is the number of all its tokens.
    - `output` is the expected number of output tokens.
    - `load_seconds` is the time until its pages from tiers are loaded.
    - `due` is the time until its first token is due.
    """

    tokens: int
    output: int
    context: int
    load_seconds: float = 0.0
    due: float = math.inf

    @property
    def pairs(self) -> float:
        """Number of query-key pairs that attention computes for the prompt."""
        return self.tokens * (self.context - self.tokens / 2)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A decoding request: `context` is its number of tokens, and `left` is the expected number of tokens still to
    generate."""

    context: int
    left: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work that a worker already has when a new request arrives.

    | field          | meaning                                                                  |
    |----------------|--------------------------------------------------------------------------|
    | `prompts`      | prompts that are computed before the new request, in order               |
    | `decoding`     | requests that decode now                                                 |
    | `behind`       | prompt tokens of later requests; they fill the rest of the last step     |
    |                | of the new request's prefill                                             |
    | `token_budget` | largest number of tokens in a step                                       |
    | `max_running`  | largest number of running requests                                       |
    | `capacity`     | number of tokens that fit in the pool                                    |
    | `step_seconds` | remaining seconds of the step in flight                                  |
    """

    prompts: Sequence[PromptWork] = ()
    decoding: Sequence[Decoding] = ()
    behind: int = 0
    token_budget: int = 2048
    max_running: int = 256
    capacity: float = math.inf
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a request that starts now, in seconds.

    | field        | meaning                                                                              |
    |--------------|--------------------------------------------------------------------------------------|
    | `ttft`       | time to the first token                                                              |
    | `tbt`        | time between tokens                                                                  |
    | `idle_ttft`  | `ttft` on an idle worker                                                             |
    | `idle_tbt`   | `tbt` on an idle worker                                                              |
    | `rows`       | requests that decode when this request's prefill ends, as (steps left, context)      |
    | `others_due` | the last step of this request's prefill may also complete other prompts; shortest    |
    |              | time until the first token of one of them is due, or infinity if there are none      |
    """

    ttft: float
    tbt: float
    idle_ttft: float
    idle_tbt: float
    rows: tuple[tuple[float, float], ...] = ()
    others_due: float = math.inf

    def total(self, output: int) -> float:
        """Return the seconds until an answer of `output` tokens is complete."""
        return self.ttft + self.tbt * max(0, output - 1)


class Verdict(Enum):
    """The outcome of admission for a request."""

    ADMIT = "admit"
    DEFER = "defer"
    """The request waits, because its deadline allows a later start."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict. `reason` explains a refusal. `retry_seconds` is the time until this worker can probably meet the
    objective. `retry_seconds` is None if the worker could not meet the objective even without other requests."""

    verdict: Verdict
    reason: str = ""
    retry_seconds: float | None = 0.0

    @property
    def message(self) -> str:
        """The error message of a refusal."""
        if self.retry_seconds is None:
            return f"slo: the objective cannot be met here, even without other requests: {self.reason}; raise it, or shorten the request"
        return f"slo: the objective cannot be met now: {self.reason}; retry in {self.retry_after} s"

    @property
    def retry_after(self) -> int | None:
        """Whole seconds after which the client should retry, at least one. None if a retry does not help."""
        return None if self.retry_seconds is None else max(1, math.ceil(self.retry_seconds))


class SloAdmission:
    """Predicts times and decides about requests for one worker. Also counts how accurate the predictions are."""

    def __init__(self, times: StepTimes | None = None) -> None:
        self.times = times or StepTimes()
        self._horizon = FIRST_HORIZON
        self._margins = [1.0, 1.0]  # the margins of TTFT and TBT
        self._rows = self._delay = (
            # Recent sums over steps: decoding requests, and decoding requests times the seconds of prompts.
            0.0
        )
        self.ttft_ratio, self.tbt_ratio = Histogram(RATIOS), Histogram(RATIOS)
        """Histograms of actual time divided by predicted time, for admitted requests."""
        self.counts = dict.fromkeys(Verdict, 0)

    def observe_step(self, size: StepSize, seconds: float, count: int = 1) -> None:
        """Update the estimates with a measured step, or with `count` steps of the same size and time."""
        self.times.observe(size, seconds)
        _, token, _, _, pair = self.times.coefficients
        fade = math.exp(-seconds * count / self._horizon)
        prompts = min(seconds, token * size.prompt_tokens + pair * size.pairs)
        self._rows = fade * self._rows + size.rows * count
        self._delay = fade * self._delay + size.rows * prompts * count

    def observe_idle(self, seconds: float) -> None:
        """Lower `prompt_delay`, because the worker had no work for `seconds`."""
        self._delay *= math.exp(-max(0.0, seconds) / self._horizon)

    @property
    def prompt_delay(self) -> float:
        """Mean seconds that prompts recently added to each decode step."""
        return self._delay / self._rows if self._rows else 0.0

    def predict(self, own: PromptWork, backlog: Backlog) -> Prediction | None:
        """Predict the times of a request with the prompt `own` that joins `backlog`. Return None until enough steps
        are measured.

        Simulates the steps that compute the earlier prompts. Decoding requests are in these steps until they finish. A
        request starts to decode when its prompt is computed. O(n log n) in the requests.
        """
        if not self.times.is_known:
            return None
        step, token, row, position, pair = self.times.coefficients
        budget = max(1, backlog.token_budget)
        time, steps, tokens = backlog.step_seconds, 0.0, 0
        # For each request: the step in which it ends, and its context at step 0.
        rows: list[tuple[float, float]] = [(one.left, one.context) for one in backlog.decoding]
        heapq.heapify(rows)
        context = float(sum(one.context for one in backlog.decoding))

        def advance(count: float) -> None:
            nonlocal time, steps, context
            grown = context + len(rows) * (steps + count / 2)
            time += count * (step + row * len(rows) + position * grown)
            steps += count

        def retire() -> None:
            nonlocal context
            context -= heapq.heappop(rows)[1]

        for work in (*backlog.prompts, own):
            used = context + len(rows) * steps
            while rows and (len(rows) >= backlog.max_running or used + work.context > backlog.capacity):
                advance(max(0.0, rows[0][0] - steps))
                retire()
                used = context + len(rows) * steps
            advance(work.tokens / budget)
            time += token * work.tokens + pair * work.pairs
            tokens += work.tokens
            while rows and rows[0][0] <= steps:
                retire()
            if work is not own:
                heapq.heappush(rows, (steps + work.output, work.context - steps))
                context += work.context - steps
        others_due = self._others_due(backlog.prompts, tokens, budget, time)
        rest = math.ceil(tokens / budget) - tokens / budget
        advance(rest)
        time += token * min(rest * budget, backlog.behind)
        time = max(time, own.load_seconds)
        at_end = tuple(sorted((end - steps, base + steps) for end, base in rows))
        tbt = step + row * (len(rows) + 1) + position * (context + len(rows) * steps + own.context)
        alone = math.ceil(own.tokens / budget) * step + token * own.tokens + pair * own.pairs
        if not backlog.prompts and not backlog.decoding and not backlog.step_seconds and not backlog.behind:
            time = max(alone, own.load_seconds)  # exact, without rounding to whole steps
        return Prediction(
            time * self._margins[0],
            (tbt + self.prompt_delay) * self._margins[1],
            max(alone, own.load_seconds) * self._margins[0],
            (step + row + position * own.context) * self._margins[1],
            at_end,
            others_due,
        )

    def _others_due(self, prompts: Sequence[PromptWork], tokens: int, budget: int, time: float) -> float:
        """Return the seconds until the first token of an earlier prompt is due: the smallest `due` of all prompts that
        count. A prompt counts under two conditions. The last step of the new request's prefill also completes the
        prompt. Without the new request, the first token of the prompt would be on time. Return infinity if no prompt
        counts.

        `tokens` is the number of tokens of the earlier prompts (`prompts`) and of the new request. Computing them takes
        `time` seconds. `budget` is the largest number of tokens in a step.
        """
        token = self.times.coefficients[1]
        first = (math.ceil(tokens / budget) - 1) * budget  # tokens before the last step
        own = tokens - sum(work.tokens for work in prompts)
        without = time - token * own
        end, due = 0, math.inf
        for work in prompts:
            end += work.tokens
            if end > first and work.due < due and work.due >= without:
                due = work.due
        return due

    def decide(
        self,
        objective: Objective,
        prediction: Prediction | None,
        own: PromptWork,
        waited: float = 0.0,
        is_deferred: bool = False,
    ) -> Decision:
        """Decide about a request that arrived `waited` seconds ago, and count the verdict. `own` is the request's
        prompt. With `is_deferred`, the request was deferred before. Such a request is counted again only if it is
        refused."""
        decision = self._decide(objective, prediction, own, waited)
        if not is_deferred or decision.verdict is Verdict.REFUSE:
            self.counts[decision.verdict] += 1
        is_idle = prediction is not None and not prediction.rows and prediction.ttft <= prediction.idle_ttft
        if is_idle and decision.retry_seconds is None:
            self.times.doubt()
        return decision

    def _decide(
        self, objective: Objective, prediction: Prediction | None, own: PromptWork, waited: float
    ) -> Decision:
        if prediction is None:
            return Decision(Verdict.ADMIT)
        ttft, tbt, deadline = (
            None if ms is None else ms / 1e3
            for ms in (objective.ttft_ms, objective.tbt_ms, objective.deadline_ms)
        )
        before = waited if deadline is None else 0.0
        late, slow = ttft is not None and before + prediction.ttft > ttft, False
        delays = prediction.ttft > prediction.others_due
        if tbt is not None and own.output > 1:
            slow = prediction.tbt > tbt
        left = math.inf if deadline is None else deadline - waited
        needed = prediction.total(own.output)
        if needed > left:
            why = f"its answer would be complete after {_ms(waited + needed)} ms, its deadline is {_ms(deadline or 0)} ms"
            idle = prediction.idle_ttft + prediction.idle_tbt * max(0, own.output - 1)
            can = idle <= (deadline or 0.0)
            return Decision(Verdict.REFUSE, why, needed - left if can else None)
        if not (late or slow or delays):
            return Decision(Verdict.ADMIT)
        if deadline is not None:
            helps = not (late and prediction.idle_ttft > (ttft or 0.0))
            helps = helps and not (slow and prediction.idle_tbt > (tbt or 0.0))
            waits = helps and left > LAST_MOMENT * needed
            return Decision(Verdict.DEFER if waits else Verdict.ADMIT)
        reasons, retry = [], [0.0]
        if late:
            assert ttft is not None
            reasons.append(
                f"its first token would come after {_ms(before + prediction.ttft)} ms, its objective is {_ms(ttft)} ms"
            )
            retry.append(prediction.ttft - ttft if prediction.idle_ttft <= ttft else math.inf)
        elif delays:
            reasons.append(
                "in the same step, it would delay the first token of another request beyond its objective"
            )
            retry.append(prediction.others_due)
        if slow:
            assert tbt is not None
            reasons.append(
                f"its tokens would be {_ms(prediction.tbt)} ms apart, its objective is {_ms(tbt)} ms"
            )
            retry.append(self._seconds_until(tbt, prediction))
        longest = max(retry)
        return Decision(Verdict.REFUSE, "; ".join(reasons), longest if longest < math.inf else None)

    def _seconds_until(self, tbt: float, prediction: Prediction) -> float:
        """Return the seconds until the time between tokens falls to `tbt` seconds. It falls because decoding requests
        finish. Return infinity if even an idle worker is slower."""
        if prediction.idle_tbt > tbt:
            return math.inf
        slower = prediction.tbt / max(1e-9, prediction.idle_tbt)
        for place, (left, _) in enumerate(prediction.rows):
            # The part of a step's time that grows with its decoding requests falls in proportion.
            part = 1.0 - (place + 1) / len(prediction.rows)
            if prediction.idle_tbt * (1.0 + (slower - 1.0) * part) <= tbt:
                return max(0.0, left) * prediction.tbt
        return self._horizon

    def _adapt(self, which: int, is_slower: bool) -> None:
        """Adjust the margin of TTFT (`which` is 0) or TBT (1). A request that was slower than predicted raises the
        margin, and any other request lowers it. Predicted times are multiplied by the margin."""
        share = MET_SHARES[which]
        change = MARGIN_STEP * (share if is_slower else share - 1.0)
        self._margins[which] = min(MARGINS[1], max(MARGINS[0], self._margins[which] * (1.0 + change)))

    def observe_request(self, predicted: Prediction, ttft: float, tbt: float | None, tokens: int) -> None:
        """Compare a finished request of `tokens` output tokens with its prediction. Times are in seconds."""
        self.ttft_ratio.add(ttft / max(1e-6, predicted.ttft))
        self._adapt(0, ttft > predicted.ttft)
        if tbt is not None:
            self.tbt_ratio.add(tbt / max(1e-6, predicted.tbt))
            self._adapt(1, tbt > predicted.tbt)
            seconds = max(LEAST_HORIZON, tbt * (tokens - 1))
            self._horizon += HORIZON_WEIGHT * (seconds - self._horizon)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
