"""One number for all decisions of an episode, from its score and those of its siblings."""

from collections.abc import Callable, Mapping, Sequence

from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, siblings

# [G] advantages of the [G] scores of a group; all 0 where the group has no spread, so also for one score.
Relative = Callable[[list[float]], list[float]]


def against_siblings(episodes: Sequence[EpisodeRewards], relative_G: Relative) -> Advantages:
    """[T] equal advantages for each episode: `relative_G` of the scores of its group.

    Raises:
        AdvantageError: see `siblings`.
    """
    advantages: list[list[float]] = [[] for _ in episodes]
    flat = 0
    groups = siblings(episodes)
    for members in groups.values():
        values_G = relative_G([episodes[index].score for index in members])
        flat += len(members) > 1 and not any(values_G)
        for index, value in zip(members, values_G, strict=True):
            advantages[index] = [value] * len(episodes[index].rewards_T)
    return Advantages(advantages, group_counts(groups, flat=flat))


def group_counts(groups: Mapping[str, Sequence[int]], *, flat: int) -> dict[str, float]:
    """What every estimator counts of its `siblings`; `flat` groups of two or more have no spread."""
    return {
        "advantages/groups": float(len(groups)),
        "advantages/groups_without_spread": float(flat),
        "advantages/lone_episodes": float(sum(len(members) == 1 for members in groups.values())),
    }
