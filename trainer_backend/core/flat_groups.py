"""Groups from which an update has nothing to learn. Pure."""

import math
from collections.abc import Sequence

from trainer_backend.core.advantages.episodes import EpisodeRewards, siblings
from trainer_backend.core.advantages.spread import SPREAD_TOLERANCE


def flat_groups(episodes: Sequence[EpisodeRewards], advantages: Sequence[Sequence[float]]) -> list[str]:
    """Groups whose advantages are all 0: their gradient is, whatever the estimator.

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
