"""GRPO: the score of a whole episode against those of its siblings."""

from collections.abc import Sequence
from functools import partial

from trainer_backend.core.advantages.episodes import (
    AdvantageConfig,
    Advantages,
    EpisodeRewards,
    against_siblings,
)
from trainer_backend.core.advantages.spread import relative, standardised, unscaled


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
        [T] equal advantages for each episode, their parts, and counts.

    Raises:
        AdvantageError: see `siblings`.

    Source: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2; DESIGN.md 4.3, 4.6 (its biases).
    verl adds 1e-6 to the std, and gives an episode without siblings its raw score.
    """
    return against_siblings(episodes, partial(relative, scale=standardised))


def grpo_no_std(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Group-relative advantage of whole episodes, not scaled: A_{i,t} = R_i - mean_j R_j.

    Arguments, result and errors as in `grpo`. `dr_grpo` on the plug board is this with the paper's constant
    denominator (training.aggregation = "constant"), where the job names no other.

    Source: Liu et al., Understanding R1-Zero-Like Training (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    return against_siblings(episodes, partial(relative, scale=unscaled))
