"""One number for all decisions of an episode, from its score and those of its siblings."""

from collections.abc import Callable, Sequence

from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, siblings

# [G] advantages of the [G] scores of a group; all 0 where the group has no spread, so also for one score.
Relative = Callable[[list[float]], list[float]]


def against_siblings(episodes: Sequence[EpisodeRewards], relative_G: Relative) -> Advantages:
    """[T] equal advantages for each episode: `relative_G` of the scores of its group.

    Raises:
        AdvantageError: see `siblings`.
    """
    advantages: list[list[float]] = [[] for _ in episodes]
    flat = lone = 0
    groups = siblings(episodes)
    for members in groups.values():
        values_G = relative_G([episodes[index].score for index in members])
        lone += len(members) == 1
        flat += len(members) > 1 and not any(values_G)
        for index, value in zip(members, values_G, strict=True):
            advantages[index] = [value] * len(episodes[index].rewards_T)
    return Advantages(advantages, group_counts(len(groups), flat=flat, lone=lone))


def group_counts(groups: int, *, flat: int, lone: int) -> dict[str, float]:
    """The counts that every group-relative estimator reports."""
    return {
        "advantages/groups": float(groups),
        "advantages/groups_without_spread": float(flat),
        "advantages/lone_episodes": float(lone),
    }
