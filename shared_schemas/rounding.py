"""Tells true differences of floats from rounding errors. Pure.

0.1 + 0.2 - 0.3 is 5.6e-17 in floats. Divided by a standard deviation that is as small, or reduced to its
sign, such a number becomes a signal of full size. Rounding errors are therefore measured by the `size` of a
sum: the largest number in it, and not what is left after the terms have cancelled.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

# Numbers closer than this, relative to their size, differ by rounding alone.
TOLERANCE = 1e-12


def is_rounding(number: float, *, size: float) -> bool:
    """Whether a sum or difference of numbers of this size may be rounding error alone."""
    return abs(number) <= TOLERANCE * size


def has_spread(values: Sequence[float], *, size: float) -> bool:
    """Whether two values or more differ by more than rounding errors.

    `size` is that of the largest number in the sums that gave the values, at least that of the largest value.
    """
    return len(values) > 1 and not is_rounding(max(values) - min(values), size=size)


def largest(values: Iterable[float]) -> float:
    """Return the size of values that are not sums: the largest magnitude."""
    return max(map(abs, values), default=0.0)


def clear_rounding(number: float, *, size: float) -> float:
    """Return the number, or 0 where it may be rounding error alone."""
    return 0.0 if is_rounding(number, size=size) else number


def add_up(terms: Sequence[float]) -> float:
    """Return the sum of terms, or 0 where they cancel up to rounding."""
    total = sum(terms)
    return clear_rounding(total, size=sum(map(abs, terms))) if isfinite(total) else total
