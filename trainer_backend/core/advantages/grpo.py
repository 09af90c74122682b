"""GRPO: the score of a whole episode against those of its siblings."""

import math
from collections.abc import Callable, Sequence

from trainer_backend.core.advantages.episodes import (
    AdvantageConfig,
    Advantages,
    EpisodeRewards,
    siblings,
)

# Scores closer than this, relative to the largest, differ by rounding alone; dividing by their
# std would blow that rounding up to advantages of size 1.
SPREAD_TOLERANCE = 1e-12

Scale = Callable[[list[float]], list[float]]


def grpo(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Group-relative advantage of whole episodes, scaled by the group's spread.

        A_{i,t} = (R_i - mean_j R_j) / std_j R_j      for every decision t of episode i
        R_i     = sum_t r_{i,t}

    The mean runs over all G siblings (i included), the std is the sample std (G - 1). A group without
    spread and an episode without siblings have advantage 0. No epsilon is added to the std, so the
    unit of the rewards does not matter; gamma is not used: a score is a plain sum.

    Args:
        episodes: all episodes of the batch, groups in any order.
        config: not read.

    Returns:
        [T] equal advantages for each episode, and counts.

    Raises:
        AdvantageError: see `siblings`.

    Source: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2; DESIGN.md 4.3, 4.6 (its biases).
    """
    return _group_relative(episodes, _standardised)


def grpo_no_std(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Group-relative advantage of whole episodes, not scaled: A_{i,t} = R_i - mean_j R_j.

    Arguments, result and errors as in `grpo`.

    Source: Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    return _group_relative(episodes, lambda deviations: deviations)


def _group_relative(episodes: Sequence[EpisodeRewards], scale: Scale) -> Advantages:
    advantages: list[list[float]] = [[] for _ in episodes]
    flat_groups = lone = 0
    groups = siblings(episodes)
    for members in groups.values():
        scores_G = [math.fsum(episodes[index].rewards_T) for index in members]
        relative_G = _relative(scores_G, scale)
        lone += len(members) == 1
        flat_groups += len(members) > 1 and not any(relative_G)
        for index, advantage in zip(members, relative_G, strict=True):
            advantages[index] = [advantage] * len(episodes[index].rewards_T)
    diagnostics = {
        "advantages/groups": float(len(groups)),
        "advantages/groups_without_spread": float(flat_groups),
        "advantages/lone_episodes": float(lone),
    }
    return Advantages(advantages, diagnostics)


def _relative(scores_G: list[float], scale: Scale) -> list[float]:
    """[G] deviations from the mean, scaled; 0 where there is no spread."""
    spread = max(scores_G) - min(scores_G)
    if spread <= SPREAD_TOLERANCE * max(abs(score) for score in scores_G):
        return [0.0] * len(scores_G)
    mean = math.fsum(scores_G) / len(scores_G)
    return scale([score - mean for score in scores_G])


def _standardised(deviations_G: list[float]) -> list[float]:
    # hypot, not a sum of squares: squares of tiny rewards underflow to 0.
    std = math.hypot(*deviations_G) / math.sqrt(len(deviations_G) - 1)
    return [deviation / std for deviation in deviations_G]
