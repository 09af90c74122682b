"""Measures how estimators differ on the same decisions. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.rounding import has_spread, largest


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of one estimator's advantages over all decisions."""

    mean: float
    std: float
    """Of the population, in the unit of the advantages."""
    zero_frac: float
    """Share of decisions whose advantage is 0."""


def measure_spread(advantages: Sequence[float]) -> Spread:
    """Measure the spread of the advantages of at least one decision."""
    count = len(advantages)
    mean = math.fsum(advantages) / count
    std = math.hypot(*centred(advantages)) / math.sqrt(count)
    return Spread(mean, std, list(advantages).count(0.0) / count)


def correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Pearson's correlation; None if either side is constant, up to rounding."""
    if not all(has_spread(values, size=largest(values)) for values in (left, right)):
        return None
    first, second = centred(left), centred(right)
    norms = math.hypot(*first) * math.hypot(*second)
    return math.fsum(a * b for a, b in zip(first, second, strict=True)) / norms


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Spearman's correlation; equal values share their mean rank."""
    return correlation(_ranks(left), _ranks(right))


def sign_agreement(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute the share of equal signs among decisions where neither is 0; None without such decisions."""
    same = [(a > 0) == (b > 0) for a, b in zip(left, right, strict=True) if a and b]
    return sum(same) / len(same) if same else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in range(first, last + 1):
            ranks[order[place]] = (first + last) / 2
        first = last + 1
    return ranks


def centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
