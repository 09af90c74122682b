"""Distinguishes true differences of floats from rounding errors. Pure.

0.1 + 0.2 - 0.3 is 5.6e-17 in floats. Divided by an equally small standard deviation, or reduced to its sign,
this rounding error becomes a full-size signal. Therefore a total is compared with the `size` of its terms
(about their largest magnitude): a total that is tiny in comparison counts as a rounding error.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

# Relative difference below which numbers count as equal.
TOLERANCE = 1e-12


def is_rounding(number: float, *, size: float) -> bool:
    """Whether `number`, a sum or difference of terms of this size, may be just a rounding error."""
    return abs(number) <= TOLERANCE * size


def has_spread(values: Sequence[float], *, size: float) -> bool:
    """Whether the values differ by more than rounding errors.

    `size` is the largest magnitude among the values and the terms of the sums that produced them.
    """
    return len(values) > 1 and not is_rounding(max(values) - min(values), size=size)


def largest(values: Iterable[float]) -> float:
    """Return the largest magnitude among values. It is their `size` if no value is a sum of larger terms."""
    return max(map(abs, values), default=0.0)


def clear_rounding(number: float, *, size: float) -> float:
    """Return the number, or 0 if it may be a rounding error (`is_rounding`)."""
    return 0.0 if is_rounding(number, size=size) else number


def add_up(terms: Sequence[float]) -> float:
    """Return the sum of terms, or 0 if the sum is so small that it may be a rounding error."""
    total = sum(terms)
    return clear_rounding(total, size=sum(map(abs, terms))) if isfinite(total) else total
