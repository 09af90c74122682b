"""Measures how much the advantages of two estimators agree on the same decisions. Pure."""

import math
from collections.abc import Sequence

from shared_schemas.rounding import has_spread, largest


def correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Pearson's correlation of two sequences, or None if either is constant up to rounding."""
    if not all(has_spread(values, size=largest(values)) for values in (left, right)):
        return None
    first, second = centred(left), centred(right)
    norms = math.hypot(*first) * math.hypot(*second)
    return math.fsum(a * b for a, b in zip(first, second, strict=True)) / norms


def sign_agreement(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return the share of pairs with equal signs. Pairs with a 0 are left out; None if no pair is left."""
    same = [(a > 0) == (b > 0) for a, b in zip(left, right, strict=True) if a and b]
    return sum(same) / len(same) if same else None


def centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean of all values from each value."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
