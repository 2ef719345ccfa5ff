"""Covering arrays: few cases that contain every pair of levels of any two factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence

__all__ = ["Case", "Pair", "all_pairs", "pairs_of"]

Case = dict[str, str]
Pair = frozenset[tuple[str, str]]


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """Return every pair of levels in a case."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs(
    factors: Mapping[str, Sequence[str]], excluded: Collection[Pair] = (), seed: int = 0, tries: int = 30
) -> list[Case]:
    """Return cases that together contain every pair of levels, except `excluded` pairs, which no case contains. The
    result depends only on the arguments.

    Each case starts with a pair that is still missing. Of `tries` random completions, the one with the most missing
    pairs is taken.
    """
    rng, names = random.Random(seed), list(factors)
    missing = [
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(factors[a], factors[b])
    ]
    missing = [pair for pair in missing if pair not in set(excluded)]
    cases: list[Case] = []
    while missing:
        left, best, gain = set(missing), None, 0
        for _ in range(tries):
            case = _completed(dict(missing[0]), factors, excluded, rng)
            found = len(pairs_of(case) & left) if case is not None else 0
            if found > gain:
                best, gain = case, found
        if best is None:
            raise ValueError(f"no case contains {sorted(missing[0])} and no excluded pair")
        cases.append({name: best[name] for name in names})
        covered = pairs_of(best)
        missing = [pair for pair in missing if pair not in covered]
    return cases


def _completed(
    case: Case, factors: Mapping[str, Sequence[str]], excluded: Collection[Pair], rng: random.Random
) -> Case | None:
    """Add random levels of all other factors. Return None if every level of a factor is excluded."""
    others = [name for name in factors if name not in case]
    for name in rng.sample(others, len(others)):
        levels = [
            level
            for level in factors[name]
            if not any(frozenset(((name, level), other)) in excluded for other in case.items())
        ]
        if not levels:
            return None
        case[name] = rng.choice(levels)
    return case
