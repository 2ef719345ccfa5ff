"""The model of the adaptive policy: does it learn the hazards from which the data were generated?"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvloom.core.eviction.reuse_model import BINS, VALUES, ReuseModel

Draw = Callable[[np.random.Generator, int], float | None]


def learned(
    draw: Draw, visits: int = 4000, every: float = 0.5, values: int = 2, window: int = 4096
) -> ReuseModel:
    """Return a model trained on visits half a second apart; `draw(rng, value)` returns when each is reused."""
    rng = np.random.default_rng(7)
    returns = ReuseModel(2, 1, window=window)
    due: list[tuple[float, int, float]] = []
    for i in range(visits):
        now = i * every
        for when, number, away in [d for d in due if d[0] <= now]:
            returns.returned(number, away)
            due.remove((when, number, away))
        value = int(rng.integers(values))
        number = returns.start(0, bytes([value]), 1.0, now)
        away = draw(rng, value)
        if away is not None:
            due.append((now + away, number, away))
    returns.fit(visits * every)
    return returns


def level(returns: ReuseModel, value: int) -> float:
    return returns.factors[0][value]


def test_before_anything_is_seen_the_longest_away_is_worth_least() -> None:
    returns = ReuseModel(2, 3)
    worth = [returns.index(1, 0.0, age) for age in (2, 10, 60, 1000, 40_000, 10**6)]
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == len(worth)
    assert returns.horizon == math.inf


def test_it_finds_a_constant_hazard() -> None:
    returns = learned(lambda rng, value: float(rng.exponential(50.0)))
    for age in (1.0, 10.0, 40.0):
        assert math.exp(returns.index(0, level(returns, 0), age)) == pytest.approx(1 / 50, rel=0.2)


def test_it_finds_which_value_of_a_feature_returns_more_often() -> None:
    shares = (0.1, 0.8)
    returns = learned(
        lambda rng, value: float(rng.exponential(20.0)) if rng.random() < shares[value] else None
    )
    rarely, often = (math.exp(returns.index(0, level(returns, v), 1.0)) for v in (0, 1))
    assert often > 4 * rarely


def test_what_is_about_to_be_wanted_is_worth_more_than_what_was_just_used() -> None:
    returns = learned(lambda rng, value: float(rng.uniform(40.0, 60.0)))
    at = level(returns, 0)
    assert returns.index(0, at, 35.0) > returns.index(0, at, 1.0) + 1.0


def test_the_index_is_low_beyond_the_horizon() -> None:
    returns = learned(lambda rng, value: float(rng.uniform(5.0, 10.0)) if rng.random() < 0.5 else None)
    at = level(returns, 0)
    assert returns.index(0, at, 100.0) < returns.index(0, at, 5.0) - 3.0
    assert 8.0 <= returns.horizon <= 16.0


def test_the_threshold_fills_a_cache_with_the_samples_of_highest_index() -> None:
    """Half of the samples have a feature value whose tokens are nearly always used again."""
    shares = (0.02, 0.9)
    returns = learned(
        lambda rng, value: float(rng.uniform(100.0, 200.0)) if rng.random() < shares[value] else None
    )
    now, age = 2000.0, 60.0
    threshold = returns.threshold(age, now)
    unused = [n for n in range(4000) if np.isnan(returns._away[n])]
    kept = [n for n in unused if returns.index_of(n, now - returns._started[n]) > threshold]
    young = [n for n in unused if now - returns._started[n] < age]
    assert len(kept) == pytest.approx(len(young), abs=2)
    assert np.mean([returns._values[n] for n in young]) < 0.6
    assert np.mean([returns._values[n] for n in kept]) > 0.9


def test_samples_without_reuse_count_after_eviction() -> None:
    all_back = learned(lambda rng, value: 10.0)
    half_back = learned(lambda rng, value: 10.0 if rng.random() < 0.5 else None)
    worth = [math.exp(r.index(0, level(r, 0), 1.0)) for r in (all_back, half_back)]
    assert worth[0] > 1.5 * worth[1]


def test_the_next_look_is_when_the_index_has_fallen_and_never_in_the_past() -> None:
    returns = learned(lambda rng, value: float(rng.exponential(30.0)) if rng.random() < 0.3 else None)
    at = level(returns, 0)
    for age in np.geomspace(0.1, 1e6, 200):
        later = returns.falls(0, at, float(age))
        assert age < later <= age + max(age, 30.0) + 1e-9


def test_a_busy_service_is_watched_in_a_sample_that_spans_hours() -> None:
    returns = ReuseModel(2, 1, window=64, every=10**9)
    numbers = [returns.start(0, b"\0", 1.0, now / 100) for now in range(64 * 40)]
    assert numbers[:64] == list(range(64))
    watched = [n for n in numbers if n >= 0]
    assert watched == list(range(len(watched)))
    assert len(watched) < 64 * 8


def test_returns_of_visits_that_were_forgotten_or_not_watched_are_ignored() -> None:
    returns = ReuseModel(2, 1, window=8)
    for now in range(20):
        returns.start(0, b"\0", 1.0, now * 10_000.0)
    returns.returned(-1, 5.0)
    returns.returned(0, 5.0)
    returns.fit(200_000.0)
    assert np.isfinite(returns.index(0, level(returns, 0), 5.0))


def test_every_value_and_age_has_an_index() -> None:
    returns = learned(lambda rng, value: 3.0 if rng.random() < 0.5 else None, visits=600, values=VALUES)
    for value in range(VALUES):
        for age in (0.0, 0.5, 1.0, *np.geomspace(1.0, 1e9, 4 * BINS)):
            assert np.isfinite(returns.index(0, level(returns, value), float(age)))
