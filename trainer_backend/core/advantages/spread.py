"""The shared arithmetic of group-relative estimators: deviations, their divisors, and flat groups."""

import math
from collections.abc import Callable, Sequence

from trainer_backend.core.advantages.episodes import Comparison, EpisodeRewards, siblings

# Scores closer than this, relative to the largest, differ by rounding alone; dividing by their
# std would blow that rounding up to advantages of size 1.
SPREAD_TOLERANCE = 1e-12

# Divisor of the deviations of some values from their mean.
Scale = Callable[[Sequence[float]], float]


def relative(scores: Sequence[float], scale: Scale, *, size: float = 0.0) -> Comparison:
    """Deviations of scores from their mean, scaled; all 0 where there is no spread, so also for one score.

    fsum: the order of the scores changes no bit.

    Args:
        size: of the largest number that the scores are differences of, where it is larger than they are: it
            is what their rounding errors are measured by.
    """
    count = len(scores)
    mean = math.fsum(scores) / max(count, 1)
    if not scores or max(scores) - min(scores) <= SPREAD_TOLERANCE * max(size, *map(abs, scores)):
        return Comparison([0.0] * count, [mean] * count)
    deviations = [score - mean for score in scores]
    divisor = scale(deviations)
    return Comparison([deviation / divisor for deviation in deviations], [mean] * count, divisor)


def unscaled(deviations: Sequence[float]) -> float:
    """Leave the deviations as they are: Fnorm = 1."""
    return 1.0


def standardised(deviations: Sequence[float]) -> float:
    """Their sample std (n - 1); no epsilon, so the unit of the scores does not matter."""
    # hypot, not a sum of squares: squares of tiny rewards underflow to 0.
    return math.hypot(*deviations) / math.sqrt(len(deviations) - 1)


SCALES: dict[str, Scale] = {"std": standardised, "one": unscaled}


def flat_groups(episodes: Sequence[EpisodeRewards], advantages: Sequence[Sequence[float]]) -> list[str]:
    """Return the groups whose advantages, and so gradients, are all 0 for every estimator.

    The advantages are looked at, not the scores: equal scores that were earned at other decisions have
    spread for `stepwise` and none for `grpo`, and a lone episode has no baseline with either. "0" means up
    to rounding, at most SPREAD_TOLERANCE of the largest sum of |r_t| or score in the group: a mean of equal
    floats can miss them by the last bit.

    Args:
        episodes: all episodes of the batch.
        advantages: of each episode, in the same order, by decision or by token.

    Returns:
        Ids of the flat groups, in order of first appearance.

    Raises:
        AdvantageError: see `siblings`.

    Source: dynamic sampling: DAPO, arXiv:2503.14476, section 3.2; what it biases: DESIGN.md 4.6.
    """
    flat = []
    for group_id, members in siblings(episodes).items():
        scale = max(_size(episodes[index]) for index in members)
        largest = max(abs(value) for index in members for value in advantages[index])
        if largest <= SPREAD_TOLERANCE * scale:
            flat.append(group_id)
    return flat


def _size(episode: EpisodeRewards) -> float:
    return max(math.fsum(map(abs, episode.rewards_T)), abs(episode.score))
