"""Stepwise: compares a decision's return-to-go with the siblings' mean return-to-go at the same turn t."""

from collections.abc import Sequence

from trainer_backend.core.advantages.derivation import AT_TURN, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorKeys,
    EstimatorPlug,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.spread import leave_one_out
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.rewards import discounted_returns, discounted_sizes

METRICS = (
    Row(
        Metric("advantages/lone_decisions", "decisions of episodes without a sibling"), when="with `stepwise`"
    ),
)


def stepwise(episodes: Sequence[EpisodeRewards], keys: EstimatorKeys) -> Advantages:
    """Subtract from a decision's return-to-go the mean return-to-go of the siblings at the same t.

        A_{i,t} = G_{i,t} - 1/(G-1) * sum_{j != i} G_{j,t},     G_{j,t} = 0 once j has finished

    G_{i,t} is the return-to-go in episode i, and G without indices is the number of episodes in the group.
    The baseline depends only on other episodes, and not on when episode i stops. The policy gradient is
    therefore unbiased if gamma is 1, denominators are fixed, and groups are not filtered by outcome. If all
    siblings have finished, the advantage is the return. An episode without siblings has no baseline: its
    advantages are 0, and metrics count its decisions.

    Source: DESIGN.md 4.6; leave-one-out: Kool et al., Buy 4 REINFORCE Samples, 2019.
    """
    returns = [discounted_returns(episode.rewards_T, keys.gamma) for episode in episodes]
    sizes = [discounted_sizes(episode.rewards_T, keys.gamma) for episode in episodes]
    baselines: list[list[float]] = [[] for _ in episodes]
    advantages: list[list[float]] = [[] for _ in episodes]
    compared: list[list[float]] = [[] for _ in episodes]
    groups = siblings(episodes)
    for members in groups.values():
        for t in range(max(len(returns[index]) for index in members)):
            alive = [index for index in members if t < len(returns[index])]
            # A finished sibling has the return 0, at the end of the list.
            returns_G = [returns[index][t] for index in alive] + [0.0] * (len(members) - len(alive))
            found = leave_one_out(returns_G, size=max(sizes[index][t] for index in alive))
            for index, advantage, baseline in zip(alive, found.advantages, found.baselines, strict=False):
                advantages[index].append(advantage)
                baselines[index].append(baseline)
                compared[index].append(len(members) - 1.0)
    lone = sum(len(returns[members[0]]) for members in groups.values() if len(members) == 1)
    counts = group_counts(groups, advantages) | {"advantages/lone_decisions": float(lone)}
    return Advantages(advantages, counts, {"return": returns, "baseline": baselines, "compared": compared})


PLUGS = {
    "stepwise": EstimatorPlug(
        stepwise, EstimatorKeys, Derivation(("advantage = return - baseline",), (AT_TURN,))
    )
}
