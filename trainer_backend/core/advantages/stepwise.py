"""Stepwise: the return-to-go of a decision against those of its siblings at the same t."""

import math
from collections.abc import Sequence

from trainer_backend.core.advantages.episodes import (
    AdvantageConfig,
    Advantages,
    EpisodeRewards,
    group_counts,
    siblings,
)
from trainer_backend.core.rewards import discounted_returns


def stepwise(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Leave-one-out advantage of every decision, over the siblings' returns-to-go at the same t.

        A_{i,t} = G_{i,t} - 1/(G-1) * sum_{j != i} G_{j,t},     G_{j,t} = 0 once j has finished

    The baseline is made of other episodes alone and never depends on when episode i stops, so the
    policy gradient is unbiased (gamma 1, fixed denominators, groups not filtered by outcome). An
    episode whose siblings have all finished keeps its return; one without siblings at all has no
    baseline: its advantages are 0 and its decisions are counted.

    Args:
        episodes: all episodes of the batch, groups in any order.
        config: gamma is read.

    Returns:
        [T] advantages for each episode, their parts, and counts.

    Raises:
        AdvantageError: see `siblings`.
        ValueError: gamma is outside [0, 1].

    Source: DESIGN.md 4.6; leave-one-out: Kool et al., Buy 4 REINFORCE Samples, 2019.
    """
    returns = [discounted_returns(episode.rewards_T, config.gamma) for episode in episodes]
    baselines: list[list[float]] = [[] for _ in episodes]
    compared: list[list[float]] = [[] for _ in episodes]
    flat_groups = lone_decisions = 0
    groups = siblings(episodes)
    for members in groups.values():
        returns_GT = [returns[index] for index in members]
        for index, row_T in zip(members, _baselines(returns_GT), strict=True):
            baselines[index] = row_T
            compared[index] = [len(members) - 1.0] * len(row_T)
        if len(members) == 1:
            lone_decisions += len(returns_GT[0])
        else:
            flat_groups += all(row_T == returns_GT[0] for row_T in returns_GT)
    advantages = [
        [own - baseline for own, baseline in zip(own_T, baselines_T, strict=True)]
        for own_T, baselines_T in zip(returns, baselines, strict=True)
    ]
    counts = group_counts(groups, flat=flat_groups) | {"advantages/lone_decisions": float(lone_decisions)}
    return Advantages(advantages, counts, {"return": returns, "baseline": baselines, "compared": compared})


def _baselines(returns_GT: Sequence[Sequence[float]]) -> list[list[float]]:
    """[G][T_i] of [G][T_i]: means of the others; fsum, so that the order of the siblings changes no bit."""
    others = len(returns_GT) - 1
    if others == 0:
        return [list(returns_GT[0])]
    longest = max(len(returns_T) for returns_T in returns_GT)
    total_T = [math.fsum(row_T[t] for row_T in returns_GT if t < len(row_T)) for t in range(longest)]
    return [[(total_T[t] - own) / others for t, own in enumerate(row_T)] for row_T in returns_GT]
