"""Shared arithmetic of group-relative estimators: deviations, their divisors, and flat groups."""

import math
from collections.abc import Callable, Sequence

from shared_schemas.rounding import has_spread, is_rounding, largest
from trainer_backend.core.advantages.episodes import Comparison, EpisodeRewards, siblings

# Computes the divisor of deviations from a mean. The argument is all of these deviations.
Scale = Callable[[Sequence[float]], float]


def relative(scores: Sequence[float], scale: Scale, *, size: float) -> Comparison:
    """Compute the deviation of each score from the mean, divided by what `scale` returns for the deviations.

    All results are 0 if there is only one score, or if the scores are equal up to rounding. `size` is
    explained in `shared_schemas.rounding.has_spread`. The mean does not depend on the order of the scores.
    """
    if not has_spread(scores, size=size):
        return Comparison([0.0] * len(scores), scores)
    mean = math.fsum(scores) / len(scores)
    deviations = [score - mean for score in scores]
    divisor = scale(deviations)
    return Comparison([deviation / divisor for deviation in deviations], [mean] * len(scores), divisor)


def leave_one_out(scores: Sequence[float], *, size: float) -> Comparison:
    """Subtract from each score the mean of the other scores.

    All results are 0 if there is only one score, or if the scores are equal up to rounding. `size` is that of
    `relative`.
    """
    if not has_spread(scores, size=size):
        return Comparison([0.0] * len(scores), scores)
    total = math.fsum(scores)
    baselines = [(total - score) / (len(scores) - 1) for score in scores]
    return Comparison(
        [score - baseline for score, baseline in zip(scores, baselines, strict=True)], baselines
    )


def unscaled(deviations: Sequence[float]) -> float:
    """Return the divisor 1, which leaves deviations as they are."""
    return 1.0


def standardised(deviations: Sequence[float]) -> float:
    """Return the sample standard deviation, with the divisor n - 1.

    No epsilon is added, so the unit of the scores does not matter.
    """
    # hypot, because squares of tiny rewards underflow to 0.
    return math.hypot(*deviations) / math.sqrt(len(deviations) - 1)


SCALES: dict[str, Scale] = {"std": standardised, "one": unscaled}


def flat_groups(episodes: Sequence[EpisodeRewards], advantages: Sequence[Sequence[float]]) -> list[str]:
    """Return the ids of the groups whose advantages are all 0, in order of first appearance.

    Advantages decide, not scores: episodes with equal scores that were earned at different decisions have
    advantages other than 0 with `stepwise`, but not with `grpo`. An advantage counts as 0 if it may be a
    rounding error (`shared_schemas.rounding`), because a mean of equal floats can differ from them in the
    last bit. Rounding errors are judged against the larger of two magnitudes. One is the batch's largest
    advantage. The other is the group's largest score or sum of |r_t|, but at most 1, because an advantage
    that was divided by a std does not grow with the scores. `advantages` has one row per episode, with a
    number per decision or per token.

    Source: skipping flat groups is the dynamic sampling of DAPO, arXiv:2503.14476, section 3.2; for the bias
    that it causes, see DESIGN.md 4.6.
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
