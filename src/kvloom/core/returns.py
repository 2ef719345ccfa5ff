"""When will they come back? What the adaptive policy learns of visits, as numbers.

A visit is one use of a run of tokens by one request. It is open until the next request comes back to
it. From the last few thousand visits this model learns the hazard of a return: how likely it is in
the next second, after so long away, for a visit of such features. It knows no entries and no pages.

    hazard(age, features) = baseline of the stratum at that age, times a factor for each feature's value

Ages fall into bins that grow by √2. Visits that have not returned count as watched until now, also when
their pages left long ago: the ghosts of the cache tell of returns that found nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import getitem

import numpy as np
import numpy.typing as npt

__all__ = ["VALUES", "Returns"]

Floats = npt.NDArray[np.float64]

BINS = 32
"""Ages up to 2^15.5 seconds, about 13 hours; what is older counts as that old."""
VALUES = 16
"""Values a feature may take: 0 to 15."""

_LOG_STEP = math.log(2) / 2
_LEVELS, _LOWEST, _LEVEL_STEP = 49, -4.0, 1 / 6
_LEAST = 1e-12


class Returns:
    """See the module. `strata` baselines, `features` factors; the newest `window` visits are remembered.

    | call     | cost                                                              |
    |----------|-------------------------------------------------------------------|
    | start    | O(features); every `every`-th call fits the model: O(window)      |
    | returned | O(1)                                                              |
    | index    | O(1)                                                              |
    """

    def __init__(self, strata: int, features: int, window: int = 4096, every: int = 256) -> None:
        self.strata, self.features = strata, features
        self.window, self.every = window, every
        self.fits = 1
        """How often the model was fitted."""
        self.horizon = 0.0
        """The age by which nearly all returns that were seen had come; 0 while too few were seen."""
        self.edges: Floats = np.concatenate([[0.0], np.exp(_LOG_STEP * np.arange(BINS))])
        self._width = np.diff(self.edges)
        self._middle = np.maximum((self.edges[1:] + self.edges[:-1]) / 2, 1.0)
        self._started = np.zeros(window)
        self._away = np.full(window, np.nan)  # how long until the return; NaN: not yet
        self._stratum = np.zeros(window, np.int8)
        self._values = np.zeros((features, window), np.int8)
        self._seen = 0
        self._recorded = 0
        self._stride = 1
        self._wrapped = 0.0
        self._factors = [[0.0] * VALUES for _ in range(features)]  # logarithms
        self._index: list[list[list[float]]] = []
        self._lower: list[list[list[float]]] = []  # the age from which the index is clearly lower
        self._tabulate(np.tile(PRIOR / self._middle, (strata, 1)))

    # -- what happens ---------------------------------------------------------------------------

    def start(self, stratum: int, values: Sequence[int], now: float) -> int:
        """A visit ends and its absence begins. Returns its number, or -1 for one that is not watched:
        where thousands come in an hour a share of them tells enough."""
        self._seen += 1
        if self._seen % (self.every if self._seen >= 4 * self.every else self.every // 8) == 0:
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
        for feature, value in enumerate(values):
            self._values[feature, place] = value
        self._recorded += 1
        return number

    def returned(self, number: int, away: float) -> None:
        """Visit `number` was come back to after `away` seconds."""
        if number >= 0 and self._recorded - number <= self.window:
            self._away[number % self.window] = away

    def _keep_span(self, now: float) -> None:
        """Watch fewer visits where the window would span less than SPAN seconds, more where much more."""
        if self._recorded:
            if now - self._wrapped < SPAN:
                self._stride *= 2
            elif now - self._wrapped > 4 * SPAN:
                self._stride = max(1, self._stride // 2)
        self._wrapped = now

    # -- what it means --------------------------------------------------------------------------

    def level(self, values: Sequence[int]) -> int:
        """The features of a visit as one number for `index`. It changes when the model is fitted again."""
        level = int((sum(map(getitem, self._factors, values)) - _LOWEST) / _LEVEL_STEP + 0.5)
        return 0 if level < 0 else level if level < _LEVELS else _LEVELS - 1

    def index(self, stratum: int, level: int, age: float) -> float:
        """What keeping the pages of a visit is worth: the logarithm of the most returns per second of
        waiting that any time to wait would bring, for one away for `age` seconds."""
        row = self._index[stratum][level]
        if age < 1.0:
            return row[0]
        place = 1.0 + math.log(age) / _LOG_STEP
        bin_ = int(place)
        if bin_ >= BINS:
            return row[BINS] - (place - BINS) * _LOG_STEP
        return row[bin_] + (row[bin_ + 1] - row[bin_]) * (place - bin_)

    def falls(self, stratum: int, level: int, age: float) -> float:
        """The age at which `index` will be clearly lower than now: twice the age at the latest."""
        first = 0 if age < 1.0 else min(BINS, 1 + int(math.log(age) / _LOG_STEP))
        latest = age + (age if age > LOOK else LOOK)
        lower = self._lower[stratum][level][first]
        return lower if lower < latest else latest

    # -- learning -------------------------------------------------------------------------------

    def fit(self, now: float) -> None:
        """Learn from the visits in the window. O(window times bins)."""
        n = min(self._recorded, self.window)
        if not n:
            return
        order = np.argsort(self._stratum[:n], kind="stable")
        stratum, values = self._stratum[order].astype(np.int64), self._values[:, order].astype(np.int64)
        away = self._away[order]
        back = ~np.isnan(away)
        age = np.where(back, away, np.maximum(now - self._started[order], 0.0))
        watched = (
            age[:, None] - self.edges[:-1]
        )  # in each bin; in place, which is seven times as fast as np.clip
        np.maximum(watched, 0.0, out=watched)
        np.minimum(watched, self._width, out=watched)
        bins = stratum[back] * BINS + np.searchsorted(self.edges[1:-1], age[back], "right")
        count = np.bincount(bins, minlength=self.strata * BINS).reshape(self.strata, BINS).astype(float)
        cuts = np.searchsorted(stratum, np.arange(self.strata + 1)).tolist()
        members = [slice(first, last) for first, last in pairwise(cuts)]
        returns = [np.bincount(v, back, VALUES) for v in values]
        factors = np.zeros((self.features, VALUES))
        weight = np.zeros(n)  # the logarithm of each visit's factors together
        baseline = np.zeros((self.strata, BINS))
        for _ in range(ROUNDS):
            times = np.exp(weight)
            exposure = np.stack([times[at] @ watched[at] for at in members])
            baseline = self._baseline(count, exposure)
            expected = np.concatenate([watched[at] @ baseline[s] for s, at in enumerate(members)])
            for feature, value in enumerate(values):
                weight -= factors[feature][value]
                due = np.bincount(value, expected * np.exp(weight), VALUES)
                factors[feature] = np.log((returns[feature] + DOUBT) / (due + DOUBT))
                weight += factors[feature][value]
        self._factors = factors.tolist()
        self.horizon = float(np.quantile(age[back], SEEN)) if np.count_nonzero(back) >= ENOUGH else 0.0
        self._tabulate(np.maximum(baseline, _LEAST))
        self.fits += 1

    def _baseline(self, count: Floats, exposure: Floats) -> Floats:
        """The hazard in each bin of each stratum: what was counted, pulled to what all strata have there,
        and that to a little less than in the bin before."""
        total, watched = count.sum(0), exposure.sum(0)
        common = np.empty(BINS)
        expected = PRIOR
        for b in range(BINS):
            pull = PULL * self._width[b]
            common[b] = (total[b] + pull * expected / self._middle[b]) / (watched[b] + pull)
            expected = DECLINE * common[b] * self._middle[b]
        due = (exposure * common).sum(1)
        ratio = (count.sum(1) + DOUBT) / (due + DOUBT)
        pull = STRATUM_PULL * self._width
        mixed: Floats = (count + pull * ratio[:, None] * common) / (exposure + pull)
        return mixed

    def _tabulate(self, baseline: Floats) -> None:
        """The index at the start of every bin, for every stratum and level: the best stop for one who pays
        for waiting by the second and earns one at the return."""
        levels = np.exp(_LOWEST + _LEVEL_STEP * np.arange(_LEVELS))
        hazard = (baseline[:, None, :] * levels[None, :, None]).reshape(-1, BINS)
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
        shape = self.strata, _LEVELS, BINS + 1
        self._index = index.reshape(shape).tolist()
        falls = (index[:, None, :] <= index[:, :, None] - FALL) & np.tri(BINS + 1, k=-1, dtype=bool).T
        lower = np.where(falls.any(2), self.edges[falls.argmax(2)], math.inf)
        self._lower = lower.reshape(shape).tolist()


PRIOR = 0.1
"""Before anything is known: hazard times age, the same at every age, so that the longest away leaves first."""
PULL, DECLINE = 5.0, 0.8
"""As many visits' worth of belief that a bin's hazard times age is this share of the bin before's."""
STRATUM_PULL = 50.0
"""As many visits' worth of belief that a stratum's hazard is everyone's, times its own ratio."""
DOUBT = 8.0
"""Returns' worth of belief that a feature's value makes no difference."""
ROUNDS = 3
SEEN, ENOUGH = 0.97, 30
"""The share of returns that came before the horizon, and how many must have been seen."""
FALL, LOOK = 0.69, 30.0
"""A clear fall of the index, as a logarithm; and seconds within which there is no need to look again."""
SPAN = 7200.0
"""Seconds of traffic that the window should span."""
