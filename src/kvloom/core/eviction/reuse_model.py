"""When will it be wanted again? What the adaptive policy learns of runs of tokens, as numbers.

The policy watches places in the text of requests, each from the end of one use until the next. From the
last few thousand of them this model learns the hazard of a use: how likely it is in the next second, after
so long without, for a place of such features. It knows no entries and no pages.

    hazard(age, features) = baseline of the stratum at that age, times a factor for each feature's value

Ages fall into bins that grow by a quarter, fine enough to see a service's sessions time out. What was not
used again counts as watched until now, also when its pages left long ago: the ghosts of the cache tell of
uses that found nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["BINS", "VALUES", "ReuseModel"]

Floats = npt.NDArray[np.float64]

VALUES = 16
"""Values a feature may take: 0 to 15."""
_FINE = 8.0
_LOG_STEP = math.log(1.25)
_EDGES = [0.0, 2.0, 4.0, *(_FINE * 1.25**k for k in range(37))]
BINS = len(_EDGES)
"""Ages up to 8 · 1.25^36 seconds, about 7 hours; what is older counts as that old."""
_LEVELS, _LOWEST, _LEVEL_STEP = 37, -5.0, 0.25
_LEAST = 1e-12


class ReuseModel:
    """See the module. `strata` baselines (the last has nothing in common with the others), `features`
    factors; the newest `window` places are remembered.

    | call     | cost                                                                       |
    |----------|----------------------------------------------------------------------------|
    | start    | O(features); every `every`-th call, in the beginning more often, fits the model |
    | returned | O(1)                                                                       |
    | index    | O(1)                                                                       |
    """

    def __init__(self, strata: int, features: int, window: int = 8192, every: int = 1024) -> None:
        self.strata, self.features = strata, features
        self.window, self.every = window, every
        self.fits = 1
        """How often the model was fitted."""
        self.horizon = math.inf
        """The age by which nearly all have come who ever will; beyond it the features tell nothing."""
        self.factors = [[0.0] * VALUES for _ in range(features)]
        """Of each feature and value, as logarithms. They change when the model is fitted."""
        self.edges: Floats = np.array(_EDGES)
        self._width = np.diff(self.edges, append=self.edges[-1] * 1.25)
        self._middle = np.maximum(self.edges + self._width / 2, 1.0)
        self._started = np.zeros(window)
        self._away = np.full(window, np.nan)  # how long until the return; NaN: not yet
        self._stratum = np.zeros(window, np.int16)
        self._weight = np.zeros(window)
        self._values = bytearray(window * features)
        self._seen = 0
        self._due = every // 16
        self._recorded = 0
        self._stride = 1
        self._wrapped = 0.0
        self._index: list[list[list[float]]] = []
        self._lower: list[list[list[float]]] = []  # the age from which the index is clearly lower
        age = self._middle
        reads, stays = (age / READS) ** 2, 1 / (1 + (age / GONE) ** 2)
        self._flat = PRIOR / age
        self._prior = self._flat * (reads / (1 + reads) * stays + 0.01)
        self._tabulate(np.tile(self._flat, (strata, 1)))

    # -- what happens ---------------------------------------------------------------------------

    def start(self, stratum: int, values: bytes, weight: float, now: float) -> int:
        """A use ends and an absence begins. Returns its number, or -1 for one that is not watched: where
        thousands come in an hour a share of them tells enough."""
        self._seen += 1
        if self._seen >= self._due:
            self._due += min(self.every, max(self.every // 16, self._seen // 16))
            self.fit(now)
        if self._seen % self._stride:
            return -1
        number = self._recorded
        place = number % self.window
        if place == 0:
            self._keep_span(now)
        self._started[place] = now
        self._away[place] = np.nan
        self._stratum[place] = stratum
        self._weight[place] = weight
        self._values[place * self.features : (place + 1) * self.features] = values
        self._recorded += 1
        return number

    def returned(self, number: int, away: float) -> None:
        """Place `number` was used again after `away` seconds."""
        if number >= 0 and self._recorded - number <= self.window:
            self._away[number % self.window] = away

    def _keep_span(self, now: float) -> None:
        """Watch fewer places where the window would span less than SPAN seconds, more where much more."""
        if self._recorded:
            if now - self._wrapped < SPAN:
                self._stride *= 2
            elif now - self._wrapped > 4 * SPAN:
                self._stride = max(1, self._stride // 2)
        self._wrapped = now

    # -- what it means --------------------------------------------------------------------------

    def index(self, stratum: int, level: float, age: float) -> float:
        """What keeping pages is worth whose features' factors add up to `level`: the logarithm of the most
        uses per second of waiting that any time to wait would bring, after `age` seconds without one."""
        row = self._index[stratum][_row(level)]
        if age < _FINE:
            return row[0] if age < 2.0 else row[1] if age < 4.0 else row[2]
        place = 3.0 + math.log(age / _FINE) / _LOG_STEP
        bin_ = int(place)
        if bin_ >= BINS:
            return row[BINS] - (place - BINS) * _LOG_STEP
        return row[bin_] + (row[bin_ + 1] - row[bin_]) * (place - bin_)

    def falls(self, stratum: int, level: float, age: float) -> float:
        """The age at which `index` will be clearly lower than now: twice the age at the latest."""
        if age < _FINE:
            first = 0 if age < 2.0 else 1 if age < 4.0 else 2
        else:
            first = min(BINS, 3 + int(math.log(age / _FINE) / _LOG_STEP))
        latest = age + (age if age > LOOK else LOOK)
        lower = self._lower[stratum][_row(level)][first]
        return lower if age < lower < latest else latest

    # -- learning -------------------------------------------------------------------------------

    def fit(self, now: float) -> None:
        """Learn from the places in the window. O(window times features)."""
        n = min(self._recorded, self.window)
        if not n:
            return
        away = self._away[:n]
        back = ~np.isnan(away)
        age = np.where(back, away, np.maximum(now - self._started[:n], 0.0))
        bin_ = np.searchsorted(self.edges[1:], age, "right")
        cell = self._stratum[:n] * np.int64(BINS) + bin_
        into = age - self.edges[bin_]
        size = self._weight[:n] / self._weight[:n].mean()
        used = size * back
        shape = (self.strata, BINS)
        cells = self.strata * BINS
        count = np.asarray(np.bincount(cell, used, cells), np.float64).reshape(shape)
        table = np.frombuffer(self._values, np.uint8).reshape(self.window, self.features)
        values = table[:n].T.astype(np.int64)
        seen = [np.bincount(value, used, VALUES) for value in values]
        factors = np.zeros((self.features, VALUES))
        level = np.zeros(n)
        baseline = np.zeros(shape)
        for _ in range(ROUNDS):
            times = size * np.exp(level)
            here = np.bincount(cell, times, cells).reshape(shape)
            beyond = here[:, ::-1].cumsum(1)[:, ::-1] - here
            exposure = beyond * self._width + np.bincount(cell, times * into, cells).reshape(shape)
            if not level.any():
                self.horizon = self._far(count[:-1].sum(0), exposure[:-1].sum(0))
            baseline = self._baseline(count, exposure)
            before = np.cumsum(baseline * self._width, 1) - baseline * self._width
            expected = size * (before.ravel()[cell] + baseline.ravel()[cell] * into)
            for feature, value in enumerate(values):
                level -= factors[feature][value]
                due = np.bincount(value, expected * np.exp(level), VALUES)
                factors[feature] = np.log((seen[feature] + DOUBT) / (due + DOUBT))
                level += factors[feature][value]
        self.factors = factors.tolist()
        self._tabulate(np.maximum(baseline, _LEAST))
        self.fits += 1

    def _baseline(self, count: Floats, exposure: Floats) -> Floats:
        """The hazard in each bin of each stratum: what was counted, pulled to what the strata have in
        common there, and that to the prior; the last stratum to its prior alone."""
        common = self._pulled(count[:-1].sum(0), exposure[:-1].sum(0), self._prior, PULL)
        rows = [
            self._pulled(c, e, common, STRATUM_PULL) for c, e in zip(count[:-1], exposure[:-1], strict=True)
        ]
        return np.stack([*rows, self._pulled(count[-1], exposure[-1], self._flat, PULL)])

    def _pulled(self, count: Floats, exposure: Floats, prior: Floats, pull: float) -> Floats:
        ratio = (count.sum() + DOUBT) / ((exposure * prior).sum() + DOUBT)
        found: Floats = (count + pull * self._width * ratio * prior) / (exposure + pull * self._width)
        return found

    def _far(self, count: Floats, exposure: Floats) -> float:
        """The age by which SEEN of all will have come; censored absences do not make it shorter."""
        hazard = self._pulled(count, exposure, self._prior, PULL)
        come = 1 - np.exp(-np.cumsum(hazard * self._width))
        last = int(np.argmax(come >= SEEN * come[-1]))
        return _EDGES[last + 1] if last + 1 < BINS else math.inf

    def _tabulate(self, baseline: Floats) -> None:
        """The index at the start of every bin, for every stratum and level: the best stop for one who pays
        for waiting by the second and earns one at the return."""
        levels = np.exp(_LOWEST + _LEVEL_STEP * np.arange(_LEVELS))
        kinds, which = np.unique(baseline, axis=0, return_inverse=True)  # strata without data are alike
        hazard = (kinds[:, None, :] * levels[None, :, None]).reshape(-1, BINS)
        mean = hazard * self._width
        stays = np.exp(-mean)
        waits = np.where(mean > 1e-9, (1 - stays) / hazard, self._width)
        zero, one = np.zeros((len(hazard), 1)), np.ones((len(hazard), 1))
        alive = np.concatenate([one, np.cumprod(stays, 1)], 1)
        spent = np.concatenate([zero, np.cumsum(alive[:, :-1] * waits, 1)], 1)
        index = np.empty((len(hazard), BINS + 1))
        for b in range(BINS):
            gain = alive[:, b : b + 1] - alive[:, b + 1 :]
            cost = np.maximum(spent[:, b + 1 :] - spent[:, b : b + 1], 1e-300)
            index[:, b] = (gain / cost).max(1)
        index[:, :BINS] = np.log(np.maximum(index[:, :BINS], _LEAST))
        index[:, BINS] = index[:, BINS - 1] - _LOG_STEP
        falls = (index[:, None, :] <= index[:, :, None] - FALL) & np.tri(BINS + 1, k=-1, dtype=bool).T
        lower = np.where(falls.any(2), np.append(self.edges, math.inf)[falls.argmax(2)], math.inf)
        shape = len(kinds), _LEVELS, BINS + 1
        indices, lowers = index.reshape(shape).tolist(), lower.reshape(shape).tolist()
        self._index = [indices[kind] for kind in which.ravel()]
        self._lower = [lowers[kind] for kind in which.ravel()]


def _row(level: float) -> int:
    row = int((level - _LOWEST) / _LEVEL_STEP + 0.5)
    return 0 if row < 0 else row if row < _LEVELS else _LEVELS - 1


PRIOR = 0.1
"""Before anything is known: hazard times age, the same at every age, so that the longest away leaves first."""
READS, GONE = 40.0, 600.0
"""Seconds: people read and type that long before they come back, and have mostly gone after that long."""
PULL = 30.0
"""As many places' worth of belief that hazards have the shape which this gives, times a ratio that is learned."""
STRATUM_PULL = 50.0
"""As many places' worth of belief that a stratum's hazard is everyone's, times its own ratio."""
DOUBT = 8.0
"""Uses' worth of belief that a feature's value makes no difference."""
ROUNDS = 3
SEEN = 0.92
"""The share of all that ever come who come before the horizon."""
FALL, LOOK = 0.69, 30.0
"""A clear fall of the index, as a logarithm; and seconds within which there is no need to look again."""
SPAN = 7200.0
"""Seconds of traffic that the window should span."""
