"""What is a difference of floats, and what is their rounding alone. Pure.

0.1 + 0.2 - 0.3 is 5.6e-17 in floats. Divided by a standard deviation that is as small, or asked for its sign,
such a number turns into a signal of full size. Rounding errors are measured by the numbers that went into a
sum, its `size`: what is left of them after they have cancelled says nothing.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

# Numbers closer than this, relative to their size, differ by rounding alone.
TOLERANCE = 1e-12


def is_rounding(number: float, *, size: float) -> bool:
    """Whether a sum or a difference of numbers of that size may be nothing but their rounding errors."""
    return abs(number) <= TOLERANCE * size


def has_spread(values: Sequence[float], *, size: float) -> bool:
    """Whether values differ by more than rounding errors; one value has no spread, nor have none.

    `size` is that of the largest number that the values are sums or differences of: at least that of the
    largest value.
    """
    return len(values) > 1 and not is_rounding(max(values) - min(values), size=size)


def largest(values: Iterable[float]) -> float:
    """Return the size of values that are no sums: the largest of them, without its sign."""
    return max(map(abs, values), default=0.0)


def clear_rounding(number: float, *, size: float) -> float:
    """Return 0 where a number may be nothing but rounding errors, else the number."""
    return 0.0 if is_rounding(number, size=size) else number


def add_up(terms: Sequence[float]) -> float:
    """Return the sum of terms; 0 where they cancel but for their rounding."""
    total = sum(terms)
    return clear_rounding(total, size=sum(map(abs, terms))) if isfinite(total) else total
