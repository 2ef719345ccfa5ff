"""Finds the workers that can meet the objective of a request, from the step times that the workers report.

The worker that gets a request decides again, because it has more information: its queue, and the requests of other
routers. The router therefore refuses a request only if the times that it predicts exceed MARGIN times the objective on
every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.core import (
    Backlog,
    Decision,
    Decoding,
    Objective,
    Prediction,
    PromptWork,
    SloAdmission,
    StepTimes,
    Verdict,
)

from .scoring import WorkerLoad

__all__ = ["MARGIN", "admissible", "objective_of", "predict"]

MARGIN = 1.5
"""The router refuses a request only if its predicted times exceed this factor times its objective on every worker."""
TYPICAL_OUTPUT = 256


def objective_of(body: Mapping[str, Any], default: Objective) -> Objective:
    """Return the objective of a request. Values that the request does not set come from `default`, the objective of
    the worker. An invalid objective is ignored here, because the worker refuses it."""
    given = body.get("slo")
    try:
        return Objective(**given).over(default) if isinstance(given, dict) else default
    except (TypeError, ValueError):
        return Objective()


def predict(
    load: WorkerLoad, times: Sequence[float], token_budget: int, prompt: int, cached: int, now: float
) -> Prediction | None:
    """Predict the TTFT and the time between tokens of a request on a worker.

    - `load` contains the requests that this router sent to the worker.
    - `times` are the coefficients of the worker's step times.
    - `prompt` and `cached` are the numbers of prompt tokens and of cached prompt tokens.

    Return None if the worker has not reported step times.
    """
    if not times:
        return None
    waiting = [one for one in load.requests.values() if not one.has_first]
    seconds = sum(one.seconds for one in waiting)
    left = (
        min(1.0, load.backlog(now) / seconds) if seconds else 0.0
    )  # share of the prompt that is not computed yet
    backlog = Backlog(
        [PromptWork(int(one.compute * left), TYPICAL_OUTPUT, one.tokens) for one in waiting],
        [Decoding(one.tokens, TYPICAL_OUTPUT / 2) for one in load.requests.values() if one.has_first],
        token_budget=token_budget or 2048,
    )
    own = PromptWork(max(1, prompt - cached), TYPICAL_OUTPUT, prompt)
    return SloAdmission(StepTimes(times)).predict(own, backlog)


def admissible(objective: Objective, prediction: Prediction | None, waited: float) -> Decision:
    """Decide whether a worker may get a request, and return the decision. The request is refused only if the prediction
    exceeds MARGIN times the objective. `waited` is the number of seconds since the request arrived.

    A request with a deadline is always admitted, because it may wait at the worker. A request without a prediction is
    also always admitted.
    """
    if prediction is None or objective.deadline_ms is not None:
        return Decision(Verdict.ADMIT)
    relaxed = replace(
        objective,
        ttft_ms=None if objective.ttft_ms is None else MARGIN * objective.ttft_ms,
        tbt_ms=None if objective.tbt_ms is None else MARGIN * objective.tbt_ms,
    )
    own = PromptWork(1, TYPICAL_OUTPUT, 1)
    return SloAdmission().decide(relaxed, prediction, own, waited)
