"""RLOO: compares the score of a whole episode with the mean of its siblings' scores."""

from collections.abc import Sequence

from trainer_backend.core.advantages.derivation import Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorPlug,
    ScoreKeys,
    against_siblings,
)
from trainer_backend.core.advantages.spread import leave_one_out


def rloo(episodes: Sequence[EpisodeRewards], keys: ScoreKeys) -> Advantages:
    """Compute leave-one-out advantages of whole episodes.

        A_{i,t} = R_i - 1/(G-1) * sum_{j != i} R_j      for every decision t of episode i
        R_i     = sum_t r_{i,t}                         (or the outcome, as episode_score says)

    The baseline does not depend on episode i, so the policy gradient is unbiased if denominators are fixed
    and groups are not filtered by outcome. An episode without siblings has no baseline, so its advantage is
    0; metrics count such episodes. gamma is not used, because a score is an undiscounted sum.

    Source: Ahmadian et al., Back to Basics, arXiv:2402.14740, eq. 8; Kool et al., 2019. verl has two
    implementations. For an episode without siblings, one returns its raw score and the other 0, as this code
    does.
    """
    return against_siblings(episodes, leave_one_out)


PLUGS = {
    "rloo": EstimatorPlug(
        rloo,
        ScoreKeys,
        Derivation(("advantage = score - baseline",), (("baseline", "mean of {compared} sibling[s]"),)),
    )
}
