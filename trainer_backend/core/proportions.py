"""Intervals of rates. Pure."""

import math

from trainer_backend.core.statistics import Z_975, Interval


def wilson_interval(successes: int, count: int) -> Interval:
    """A rate with its 95 % Wilson score interval.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    It stays inside [0, 1], and 0 of n or n of n still has a width, where the normal approximation has none.

    Args:
        successes: how many of `count` succeeded.
        count: independent trials, at least 1.

    Raises:
        ValueError: no trials, or successes outside 0 .. count.

    Source: Wilson, JASA 22 (1927), p. 209.
    """
    if count < 1:
        raise ValueError("a rate needs at least one trial")
    if not 0 <= successes <= count:
        raise ValueError(f"successes must lie in 0 .. {count}, got {successes}")
    rate = successes / count
    widening = 1 + Z_975**2 / count
    centre = (rate + Z_975**2 / (2 * count)) / widening
    half = Z_975 / widening * math.sqrt(rate * (1 - rate) / count + Z_975**2 / (4 * count**2))
    return Interval(rate, max(centre - half, 0.0), min(centre + half, 1.0), count)
