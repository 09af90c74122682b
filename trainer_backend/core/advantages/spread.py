"""Shared arithmetic of group-relative estimators: deviations, their divisors, and flat groups."""

import math
from collections.abc import Callable, Sequence

from shared_schemas.rounding import has_spread, is_rounding, largest
from trainer_backend.core.advantages.episodes import Comparison, EpisodeRewards, siblings

# Given the deviations of values from their mean, returns the divisor of these deviations.
Scale = Callable[[Sequence[float]], float]


def relative(scores: Sequence[float], scale: Scale, *, size: float) -> Comparison:
    """Compute the scaled deviations of scores from their mean; all are 0 for equal scores or a single one.

    `fsum` makes the result independent of the order. `size` as in `shared_schemas.rounding.has_spread`.
    """
    if not has_spread(scores, size=size):
        return Comparison([0.0] * len(scores), scores)
    mean = math.fsum(scores) / len(scores)
    deviations = [score - mean for score in scores]
    divisor = scale(deviations)
    return Comparison([deviation / divisor for deviation in deviations], [mean] * len(scores), divisor)


def leave_one_out(scores: Sequence[float], *, size: float) -> Comparison:
    """Subtract from each score the mean of the others; all are 0 for equal scores (up to rounding) or one.

    `size` as in `relative`.
    """
    if not has_spread(scores, size=size):
        return Comparison([0.0] * len(scores), scores)
    total = math.fsum(scores)
    baselines = [(total - score) / (len(scores) - 1) for score in scores]
    return Comparison(
        [score - baseline for score, baseline in zip(scores, baselines, strict=True)], baselines
    )


def unscaled(deviations: Sequence[float]) -> float:
    """Return 1: deviations are not scaled."""
    return 1.0


def standardised(deviations: Sequence[float]) -> float:
    """Return the sample std (n - 1), without epsilon, so that the unit of the scores does not matter."""
    # hypot, because squares of tiny rewards underflow to 0.
    return math.hypot(*deviations) / math.sqrt(len(deviations) - 1)


SCALES: dict[str, Scale] = {"std": standardised, "one": unscaled}


def flat_groups(episodes: Sequence[EpisodeRewards], advantages: Sequence[Sequence[float]]) -> list[str]:
    """Return the ids of the groups whose advantages are all 0, in order of first appearance.

    The advantages decide, not the scores: equal scores that were earned at different decisions have spread
    for `stepwise` and none for `grpo`. "0" means up to rounding (`shared_schemas.rounding`), because a mean
    of equal floats can differ from them in the last bit. Rounding is relative to the batch's largest
    advantage, or, if that is larger, to the group's largest score or sum of |r_t|, which counts as at most 1,
    since advantages may be in standard deviations. `advantages` are by decision or by token.

    Source: dynamic sampling: DAPO, arXiv:2503.14476, section 3.2; what it biases: DESIGN.md 4.6.
    """
    flat = []
    of_batch = largest(value for row in advantages for value in row)
    for group_id, members in siblings(episodes).items():
        of_members = [episodes[index] for index in members]
        size = max(max(math.fsum(map(abs, item.rewards_T)), abs(item.score)) for item in of_members)
        of_group = largest(value for index in members for value in advantages[index])
        if is_rounding(of_group, size=max(of_batch, min(size, 1.0))):
            flat.append(group_id)
    return flat
