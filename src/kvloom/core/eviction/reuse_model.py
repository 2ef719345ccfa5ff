"""Reuse model: predicts when cached tokens will be used again. The adaptive policy uses the predictions.

The policy samples positions in prompts. A sample lasts from the end of one use to the next use. From the
last few thousand samples, the model learns the hazard, which is the probability of a use per second. The
hazard depends on the age (seconds since the last use), on the stratum of the sample (for example the finish
reason) and on its features.

    hazard(age, features) = baseline of the stratum at that age, times a factor for each feature value

- The baseline has one value per age bin. From 8 seconds on, each bin is a quarter longer than the previous bin, so the
  model can represent session timeouts.
- A sample without a next use so far counts as unused up to the present time.
- Uses after an eviction also count, because ghosts (records of evicted tokens) report them.

The model has no access to entries or pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BINS", "VALUES", "ReuseModel"]

Floats = npt.NDArray[np.float64]
Tables = tuple[list[list[float]], list[list[float]]]

VALUES = 16
"""Number of values that a feature can have: 0 to 15."""
_FINE = 8.0
_LOG_STEP = math.log(1.25)
_EDGES = [0.0, 2.0, 4.0, *(_FINE * 1.25**k for k in range(37))]
BINS = len(_EDGES)
"""Number of age bins. The bins cover 8 · 1.25^36 seconds, about 7 hours. The last bin includes all higher ages."""
_LEVELS, _LOWEST, _LEVEL_STEP = 37, -5.0, 0.25
_LEAST = 1e-12
_SHORTEST = 1e-3  # seconds
_MAX_STRIDE = 1 << 30


class ReuseModel:
    """A survival model: estimates how likely cached tokens of a given age are to be used again. It keeps the newest
    `window` samples. It has one baseline per stratum (`strata`) and one table of factors per feature (`features`). A
    stratum with few samples also uses the samples of other strata. The last stratum is separate: it uses only its own
    samples, and no other stratum uses its samples.

        | call     | cost                                                                     |
        |----------|--------------------------------------------------------------------------|
        | start    | O(features); every `every`-th call, more often at first, starts a fit.   |
        |          | The next calls continue the fit, each for less than about 1 ms           |
        | returned | O(1)                                                                     |
        | index    | O(1)                                                                     |
    """

    def __init__(self, strata: int, features: int, window: int = 8192, every: int = 1024) -> None:
        self.strata, self.features = strata, features
        self.window, self.every = window, every
        self.fits = 1
        """Number of times that the model was fitted."""
        self.horizon = math.inf
        """Age before which nearly all reuses happen. The adaptive policy evicts older entries first, by last use."""
        self.factors = [[0.0] * VALUES for _ in range(features)]
        """Logarithm of the factor of each feature value, set by `fit`."""
        self.edges: Floats = np.array(_EDGES)
        self._width = np.diff(self.edges, append=self.edges[-1] * 1.25)
        self._middle = np.maximum(self.edges + self._width / 2, 1.0)
        self._started = np.zeros(window)
        # Seconds until the reuse, or NaN if there was none yet. A negative value -s is a restored sample: it was
        # observed for s seconds, and not used again in this time.
        self._away = np.full(window, np.nan)
        self._stratum = np.zeros(window, np.int16)
        self._weight = np.zeros(window)
        self._values = bytearray(window * features)
        self._seen = 0
        self._due = every // 16
        self._recorded = 0
        self._stride = 1
        self._wrapped = 0.0
        self._fitting: Iterator[None] | None = None
        self._index: list[list[list[float]]] = []
        self._lower: list[list[list[float]]] = []  # age from which the index is clearly lower
        age = self._middle
        reads, stays = (age / READS) ** 2, 1 / (1 + (age / GONE) ** 2)
        self._flat = PRIOR / age
        self._prior = self._flat * (reads / (1 + reads) * stays + 0.01)
        index, lower = self._tables(self._flat)
        self._index, self._lower = [index] * strata, [lower] * strata

    # -- samples --------------------------------------------------------------------------------

    def start(self, stratum: int, values: bytes, weight: float, now: float) -> int:
        """Start a sample when a use of tokens ends. `stratum` selects its baseline, `values` are its feature values,
        and `weight` is its weight in the fit. Return the number of the sample, or -1 if the sample is skipped. Under
        heavy traffic only some samples are taken."""
        self._seen += 1
        if self._seen >= self._due:
            self._due += min(self.every, max(self.every // 16, self._seen // 16))
            self._fitting = self._fit_in_steps(now)
            if self._recorded < self.every:  # few samples, so the whole fit is short
                self.fit(now)
        if self._fitting is not None and next(self._fitting, self) is self:
            self._fitting = None
        if self._seen % self._stride:
            return -1
        number = self._recorded
        place = number % self.window
        if place == 0:
            self._adjust_stride(now)
        self._started[place] = now
        self._away[place] = np.nan
        self._stratum[place] = stratum
        self._weight[place] = weight
        self._values[place * self.features : (place + 1) * self.features] = values
        self._recorded += 1
        return number

    def returned(self, number: int, away: float) -> None:
        """End sample `number`, because its tokens were used again after `away` seconds."""
        if number >= 0 and self._recorded - number <= self.window:
            self._away[number % self.window] = away

    def _adjust_stride(self, now: float) -> None:
        """Take fewer samples if the samples in the window cover less than SPAN seconds. Take more samples if they cover
        more than four times SPAN."""
        if self._recorded:
            if now - self._wrapped < SPAN:
                self._stride *= 2
            elif now - self._wrapped > 4 * SPAN:
                self._stride = max(1, self._stride // 2)
        self._wrapped = now

    # -- restarts -------------------------------------------------------------------------------

    def save(self, now: float) -> dict[str, Any]:
        """Return the samples, oldest first, as numbers and bytes for `restore`. At most 14 bytes per sample."""
        n = min(self._recorded, self.window)
        order = np.arange(self._recorded - n, self._recorded) % self.window
        away = self._away[order]
        unused = -np.maximum(now - self._started[order], _SHORTEST)
        table = np.frombuffer(self._values, np.uint8).reshape(self.window, self.features)
        return {
            "away": np.where(np.isnan(away), unused, away).astype("<f4").tobytes(),
            "weight": self._weight[order].astype("<f4").tobytes(),
            "stratum": self._stratum[order].astype(np.uint8).tobytes(),
            "values": table[order].tobytes(),
            "stride": self._stride,
            "span": now - self._wrapped,
        }

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Replace all samples by those of `save`, and fit the model. A sample that had no next use when it was saved
        counts as unused up to that time. Raises ValueError for data that `save` cannot have returned."""
        away, weight = (
            np.frombuffer(_bytes(saved, name), "<f4").astype(np.float64) for name in ("away", "weight")
        )
        stratum = np.frombuffer(_bytes(saved, "stratum"), np.uint8)
        values = np.frombuffer(_bytes(saved, "values"), np.uint8)
        n, stride, span = len(away), saved.get("stride"), saved.get("span")
        lengths = len(weight), len(stratum), len(values)
        if not 0 < n <= self.window or lengths != (n, n, n * self.features):
            raise ValueError(f"{n} samples with {lengths} other values do not fit a window of {self.window}")
        if not (np.isfinite(away).all() and np.isfinite(weight).all() and (weight > 0).all()):
            raise ValueError("a sample has a time or a weight that is no number")
        if stratum.max() >= self.strata or values.max() >= VALUES:
            raise ValueError("a sample has an unknown stratum or feature value")
        if type(stride) is not int or not 0 < stride <= _MAX_STRIDE:
            raise ValueError(f"stride is {stride!r}")
        if not isinstance(span, float) or not 0 <= span < math.inf:
            raise ValueError(f"span is {span!r}")
        self._started[:n], self._away[:n], self._stratum[:n], self._weight[:n] = now, away, stratum, weight
        self._values[: n * self.features] = values.tobytes()
        self._recorded, self._stride, self._wrapped = n, stride, now - span
        self._seen = n * stride
        self._due = self._seen + self.every
        self.fit(now)

    # -- index ----------------------------------------------------------------------------------

    def index(self, stratum: int, level: float, age: float) -> float:
        """Return the value of keeping pages of this `age`. The value is the logarithm of a rate: the expected number of
        uses, divided by the seconds for which the pages are kept. The number of seconds is the one with the highest
        rate.

        `stratum` selects the baseline of the hazard. `level` is the sum of the logarithms of the feature factors.
        """
        row = self._index[stratum][_row(level)]
        if age < _FINE:
            return row[0] if age < 2.0 else row[1] if age < 4.0 else row[2]
        place = 3.0 + math.log(age / _FINE) / _LOG_STEP
        bin_ = int(place)
        if bin_ >= BINS:
            return row[BINS] - (place - BINS) * _LOG_STEP
        return row[bin_] + (row[bin_ + 1] - row[bin_]) * (place - bin_)

    def index_of(self, number: int, age: float) -> float:
        """Return the index at `age` of the tokens of sample `number`, or -inf beyond the horizon."""
        if age >= self.horizon:
            return -math.inf
        place = number % self.window
        values = self._values[place * self.features : (place + 1) * self.features]
        return self.index(int(self._stratum[place]), sum(map(getitem, self.factors, values)), age)

    def tokens_of(self, number: int) -> float:
        """Return the number of tokens for which sample `number` stands, or 0 if the model has dropped the sample."""
        if number < 0 or self._recorded - number > self.window:
            return 0.0
        return float(self._weight[number % self.window]) ** 2 * self._stride

    def threshold(self, age: float, now: float) -> float:
        """Compare two caches of equal size. One keeps all tokens used in the last `age` seconds, and the other keeps
        the tokens with the highest index. Return the lowest index in the second cache. Takes O(window · features)
        time."""
        n = min(self._recorded, self.window)
        unused = np.flatnonzero(np.isnan(self._away[:n]))
        if not len(unused):
            return -math.inf
        ages = np.maximum(now - self._started[unused], 0.0)
        values = np.frombuffer(self._values, np.uint8).reshape(self.window, self.features)[unused]
        level = np.take_along_axis(np.array(self.factors), values.T.astype(np.int64), 1).sum(0)
        row = np.clip((level - _LOWEST) / _LEVEL_STEP + 0.5, 0, _LEVELS - 1).astype(np.int64)
        bin_ = np.searchsorted(self.edges, ages, "right") - 1
        into = np.where(ages < _FINE, 0.0, np.log(np.maximum(ages, _FINE) / _FINE) / _LOG_STEP % 1.0)
        tables = np.array(self._index)
        stratum = self._stratum[unused]
        low, high = tables[stratum, row, bin_], tables[stratum, row, bin_ + 1]
        index = np.where(ages < self.horizon, low + (high - low) * into, -math.inf)
        size = self._weight[unused] ** 2
        order = np.argsort(-index)
        kept = np.searchsorted(np.cumsum(size[order]), size[ages < age].sum())
        return float(index[order[min(int(kept), len(order) - 1)]])

    def falls(self, stratum: int, level: float, age: float) -> float:
        """Return the age at which the value of keeping the pages (`index`) will be clearly lower than at `age`. To
        limit the search, the result is at most 2 · `age`, or `age` + LOOK if that is more."""
        if age < _FINE:
            first = 0 if age < 2.0 else 1 if age < 4.0 else 2
        else:
            first = min(BINS, 3 + int(math.log(age / _FINE) / _LOG_STEP))
        latest = age + (age if age > LOOK else LOOK)
        lower = self._lower[stratum][_row(level)][first]
        return lower if age < lower < latest else latest

    # -- learning -------------------------------------------------------------------------------

    def fit(self, now: float) -> None:
        """Fit the model to the samples in the window. Takes O(window · features) time."""
        self._fitting = None
        for _ in self._fit_in_steps(now):
            pass

    def _fit_in_steps(self, now: float) -> Iterator[None]:
        """Fit the model in about a dozen steps. The last step makes the result visible."""
        n = min(self._recorded, self.window)
        if not n:
            return
        away = self._away[:n].copy()
        back = away >= 0
        age = np.where(np.isnan(away), np.maximum(now - self._started[:n], 0.0), np.abs(away))
        bin_ = np.searchsorted(self.edges[1:], age, "right")
        cell = self._stratum[:n] * np.int64(BINS) + bin_
        into = age - self.edges[bin_]
        horizon = self.horizon
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
            yield
            times = size * np.exp(level)
            here = np.bincount(cell, times, cells).reshape(shape)
            beyond = here[:, ::-1].cumsum(1)[:, ::-1] - here
            exposure = beyond * self._width + np.bincount(cell, times * into, cells).reshape(shape)
            if not level.any():
                horizon = self._far(count[:-1].sum(0), exposure[:-1].sum(0))
            baseline = self._baseline(count, exposure)
            before = np.cumsum(baseline * self._width, 1) - baseline * self._width
            expected = size * (before.ravel()[cell] + baseline.ravel()[cell] * into)
            for feature, value in enumerate(values):
                level -= factors[feature][value]
                due = np.bincount(value, expected * np.exp(level), VALUES)
                factors[feature] = np.log((seen[feature] + DOUBT) / (due + DOUBT))
                level += factors[feature][value]
        tables: dict[bytes, Tables] = {}  # strata without data have equal tables
        rows = [(row.tobytes(), row) for row in np.maximum(baseline, _LEAST)]
        for key, row in rows:
            if key not in tables:
                yield
                tables[key] = self._tables(row)
        self.horizon, self.factors = horizon, factors.tolist()
        self._index, self._lower = [tables[key][0] for key, _ in rows], [tables[key][1] for key, _ in rows]
        self.fits += 1

    def _baseline(self, count: Floats, exposure: Floats) -> Floats:
        """Return the hazard of each stratum and age bin. `count` has the number of uses in each bin, and `exposure` the
        seconds that samples spent there without a use. With few samples, the hazard of a stratum is close to the common
        hazard of all strata, and the common hazard is close to the prior. The last stratum uses only its own samples
        and a separate prior."""
        common = self._shrunk(count[:-1].sum(0), exposure[:-1].sum(0), self._prior, PULL)
        rows = [
            self._shrunk(c, e, common, STRATUM_PULL) for c, e in zip(count[:-1], exposure[:-1], strict=True)
        ]
        return np.stack([*rows, self._shrunk(count[-1], exposure[-1], self._flat, PULL)])

    def _shrunk(self, count: Floats, exposure: Floats, prior: Floats, pull: float) -> Floats:
        ratio = (count.sum() + DOUBT) / ((exposure * prior).sum() + DOUBT)
        found: Floats = (count + pull * self._width * ratio * prior) / (exposure + pull * self._width)
        return found

    def _far(self, count: Floats, exposure: Floats) -> float:
        """Return the age, in seconds, at which the fraction SEEN of all expected reuses has happened. Samples without a
        reuse so far do not reduce this age."""
        hazard = self._shrunk(count, exposure, self._prior, PULL)
        come = 1 - np.exp(-np.cumsum(hazard * self._width))
        last = int(np.argmax(come >= SEEN * come[-1]))
        return _EDGES[last + 1] if last + 1 < BINS else math.inf

    def _tables(self, baseline: Floats) -> Tables:
        """Return two tables of a stratum, indexed by level and age bin. The first table has the `index` at the start of
        the bin. The second has the age from which the index is clearly lower.

        The index is the logarithm of the highest rate: the expected number of reuses, divided by the seconds for which
        a page is kept. To find the highest rate, the function tries every later bin as the time at which the page is
        dropped.
        """
        levels = np.exp(_LOWEST + _LEVEL_STEP * np.arange(_LEVELS))
        hazard = baseline[None, :] * levels[:, None]
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
        return index.tolist(), lower.tolist()


def _bytes(saved: Mapping[str, Any], name: str) -> bytes:
    found = saved.get(name)
    if not isinstance(found, bytes) or (len(found) % 4 and name in ("away", "weight")):
        raise ValueError(f"{name} is missing or damaged")
    return found


def _row(level: float) -> int:
    row = int((level - _LOWEST) / _LEVEL_STEP + 0.5)
    return 0 if row < 0 else row if row < _LEVELS else _LEVELS - 1


PRIOR = 0.1
"""Until the first fit, the hazard at an age is PRIOR divided by the age. The least recently used entry is then evicted
first."""
READS, GONE = 40.0, 600.0
"""Times in the prior, in seconds. A user usually reads and types for about READS seconds before the next turn. Most
users have left after GONE seconds."""
PULL = 30.0
"""Weight of the prior, as a number of samples. The prior determines only how the hazard changes with age. The overall
level of the hazard is learned from the samples."""
STRATUM_PULL = 50.0
"""Weight of the common hazard in the hazard of one stratum, as a number of samples. The overall level is learned from
the stratum's samples."""
DOUBT = 8.0
"""Weight of two assumptions, as a number of uses: a feature value has no effect, and the overall level of the hazard is
the level of the prior."""
ROUNDS = 3
SEEN = 0.92
"""Share of all reuses that happen before the horizon."""
FALL, LOOK = 0.69, 30.0
"""A fall of the index by FALL (a logarithm) causes a review of the priority. LOOK is the shortest time between two
reviews, in seconds."""
SPAN = 7200.0
"""Seconds of traffic that the samples should cover."""
