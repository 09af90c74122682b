"""Deviations from a mean, and what divides them: the arithmetic that group-relative estimators share."""

import math
from collections.abc import Callable, Sequence

# Scores closer than this, relative to the largest, differ by rounding alone; dividing by their
# std would blow that rounding up to advantages of size 1.
SPREAD_TOLERANCE = 1e-12

Scale = Callable[[list[float]], list[float]]


def relative(scores: Sequence[float], scale: Scale) -> list[float]:
    """Deviations of scores from their mean, scaled; all 0 where there is no spread, so also for one score.

    fsum: the order of the scores changes no bit.
    """
    if not scores:
        return []
    if max(scores) - min(scores) <= SPREAD_TOLERANCE * max(map(abs, scores)):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    return scale([score - mean for score in scores])


def unscaled(deviations: list[float]) -> list[float]:
    """As they are: Fnorm = 1."""
    return deviations


def standardised(deviations: list[float]) -> list[float]:
    """Divided by their sample std (n - 1); no epsilon, so the unit of the scores does not matter."""
    # hypot, not a sum of squares: squares of tiny rewards underflow to 0.
    std = math.hypot(*deviations) / math.sqrt(len(deviations) - 1)
    return [deviation / std for deviation in deviations]


SCALES: dict[str, Scale] = {"std": standardised, "one": unscaled}
