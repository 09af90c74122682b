"""GRPO: compares the score of a whole episode with the scores of its siblings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainer_backend.core.advantages.derivation import BY_A_STD, OF_GROUP, SPREAD, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorPlug,
    ScoreKeys,
    against_siblings,
)
from trainer_backend.core.advantages.spread import relative, standardised, unscaled


def grpo(episodes: Sequence[EpisodeRewards], keys: ScoreKeys) -> Advantages:
    """Compute group-relative advantages of whole episodes, scaled by the group's spread.

        A_{i,t} = (R_i - mean_j R_j) / std_j R_j      for every decision t of episode i
        R_i     = sum_t r_{i,t}                       (or the outcome, as episode_score says)

    Mean and std are taken over the G episodes of the group, including episode i. The std is the sample std,
    with the divisor G - 1. The advantage is 0 in a group whose scores are all equal, and for an episode
    without siblings. No epsilon is added to the std, so the unit of the rewards does not matter. gamma is not
    used, because a score is an undiscounted sum.

    Source: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2; DESIGN.md 4.3, 4.6 (its biases). verl
    adds 1e-6 to the std, and gives an episode without siblings its raw score.
    """
    return against_siblings(episodes, partial(relative, scale=standardised))


def grpo_no_std(episodes: Sequence[EpisodeRewards], keys: ScoreKeys) -> Advantages:
    """Compute group-relative advantages of whole episodes without scaling: A_{i,t} = R_i - mean_j R_j.

    If a job selects it by the name `dr_grpo`, training.aggregation is "constant" by default, as in the paper.

    Source: Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    return against_siblings(episodes, partial(relative, scale=unscaled))


_UNSCALED = EstimatorPlug(
    grpo_no_std,
    ScoreKeys,
    Derivation(("advantage = score - baseline",), (OF_GROUP,)),
    bias="counts an episode in its own baseline: (G - 1) / G",
)
PLUGS = {
    "grpo": EstimatorPlug(
        grpo,
        ScoreKeys,
        Derivation(("advantage = (score - baseline) / scale",), (OF_GROUP, ("scale", SPREAD))),
        divides_by_std=True,
        bias=BY_A_STD,
    ),
    "grpo_no_std": _UNSCALED,
    "dr_grpo": replace(_UNSCALED, values={"training.aggregation": "constant"}),
}
