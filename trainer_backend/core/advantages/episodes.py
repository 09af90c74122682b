"""What every estimator takes and gives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer_backend.core.errors import AdvantageError, place


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """One episode as an estimator sees it.

    rollout_id: named in errors.
    group_id: episodes with the same one are siblings: same environment, same start.
    rewards_T: [T] reward of each decision, from `core.rewards.reward_vector`; T >= 1.
    """

    rollout_id: str
    group_id: str
    rewards_T: Sequence[float]


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """The keys of `[algorithm]` that estimators read. gamma: discount per decision, in [0, 1]."""

    gamma: float = 1.0


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator gives.

    per_episode: for each episode, in the order given, its [T] advantages, in float64.
    diagnostics: counts by metric name (`advantages/...`).
    """

    per_episode: list[list[float]]
    diagnostics: dict[str, float] = field(default_factory=dict)


Estimator = Callable[[Sequence[EpisodeRewards], AdvantageConfig], Advantages]


def siblings(episodes: Sequence[EpisodeRewards]) -> Mapping[str, list[int]]:
    """Indices of the episodes of every group, groups in order of first appearance.

    Raises:
        AdvantageError: an episode without a decision, or with a reward that is not finite.
    """
    groups: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        if not episode.rewards_T:
            raise AdvantageError("no decision to give credit to", where=place(episode.rollout_id))
        for t, reward in enumerate(episode.rewards_T):
            if not math.isfinite(reward):
                raise AdvantageError(f"the reward is {reward}", where=place(episode.rollout_id, t + 1))
        groups.setdefault(episode.group_id, []).append(index)
    return groups
