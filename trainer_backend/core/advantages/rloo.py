"""RLOO: the score of a whole episode minus the mean of its siblings' scores."""

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
    """Leave-one-out advantage of whole episodes.

        A_{i,t} = R_i - 1/(G-1) * sum_{j != i} R_j      for every decision t of episode i
        R_i     = sum_t r_{i,t}

    The baseline does not depend on episode i, so the policy gradient is unbiased (fixed denominators, groups
    not filtered by outcome). An episode without siblings has no baseline: its advantage is 0, and it is
    counted. gamma is not used: a score is a plain sum.

    Source: Ahmadian et al., Back to Basics, arXiv:2402.14740, eq. 8; Kool et al., 2019. An episode without
    siblings has its raw score in one of verl's two forms and 0 in the other, as here.
    """
    return against_siblings(episodes, leave_one_out)


PLUGS = {
    "rloo": EstimatorPlug(
        rloo,
        ScoreKeys,
        Derivation(("advantage = score - baseline",), (("baseline", "mean of {compared} sibling[s]"),)),
    )
}
