"""The shared arithmetic of group-relative estimators: deviations, their divisors, and flat groups."""

import math
from collections.abc import Callable, Sequence

from shared_schemas.rounding import has_spread, is_rounding, largest
from trainer_backend.core.advantages.episodes import Comparison, EpisodeRewards, siblings

# Divisor of the deviations of some values from their mean.
Scale = Callable[[Sequence[float]], float]


def relative(scores: Sequence[float], scale: Scale, *, size: float) -> Comparison:
    """Scaled deviations of scores from their mean; all 0 without spread, and so for one score.

    fsum: the order of the scores changes no bit. `size` is that of `shared_schemas.rounding.has_spread`.
    """
    if not has_spread(scores, size=size):
        return Comparison([0.0] * len(scores), scores)
    mean = math.fsum(scores) / len(scores)
    deviations = [score - mean for score in scores]
    divisor = scale(deviations)
    return Comparison([deviation / divisor for deviation in deviations], [mean] * len(scores), divisor)


def leave_one_out(scores: Sequence[float], *, size: float) -> Comparison:
    """Each score minus the mean of the others; 0 where all are equal, up to rounding, and for one.

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
    """Leave the deviations as they are: Fnorm = 1."""
    return 1.0


def standardised(deviations: Sequence[float]) -> float:
    """Their sample std (n - 1); no epsilon, so the unit of the scores does not matter."""
    # hypot, not a sum of squares: squares of tiny rewards underflow to 0.
    return math.hypot(*deviations) / math.sqrt(len(deviations) - 1)


SCALES: dict[str, Scale] = {"std": standardised, "one": unscaled}


def flat_groups(episodes: Sequence[EpisodeRewards], advantages: Sequence[Sequence[float]]) -> list[str]:
    """Return the groups whose advantages, and so gradients, are all 0, in order of first appearance.

    The advantages decide, not the scores: equal scores earned at different decisions have spread for
    `stepwise` and none for `grpo`, and a lone episode has no baseline with either. "0" means up to rounding
    (`shared_schemas.rounding`), since a mean of equal floats can miss them by the last bit. The size is the
    largest advantage of the batch, or the group's largest sum of |r_t| or score, which counts as 1 at most:
    advantages may be in standard deviations, whatever the unit of the rewards. `advantages` are by decision
    or by token.

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
