"""The graph of a group's states: a node is a state that decisions were made in, an edge is a decision.

Decisions are numbered through the batch, one episode after the other: [D].
"""

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, chain

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.spread import Scale, relative
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError, place

# [D] numbers of all decisions of the batch, by the name of the part; None where a decision has no such part.
Columns = Mapping[str, Sequence[float | None]]


def anchors(episodes: Sequence[EpisodeRewards], depth: int = 0) -> list[list[int]]:
    """Decisions of a group that share their state and the `depth` states before it."""
    groups: dict[str, dict[object, list[int]]] = {}
    start = 0
    for episode in episodes:
        of_group, keys = groups.setdefault(episode.group_id, {}), episode.state_keys_T
        for t in range(depth, len(keys)):
            state = keys[t] if depth == 0 else tuple(keys[t - depth : t + 1])
            of_group.setdefault(state, []).append(start + t)
        start += len(keys)
    return [decisions for of_group in groups.values() for decisions in of_group.values()]


def relative_at(
    anchors: Sequence[Sequence[int]], values_D: Sequence[float], scale: Scale, sizes_D: Sequence[float] = ()
) -> tuple[list[float], dict[str, list[float]]]:
    """[D] each value against those of the decisions in the same state, and the parts of that.

    A decision alone in its state is its own baseline.

    Args:
        sizes_D: see `relative`; empty: that of the values themselves.
    """
    count = len(values_D)
    advantages_D, baselines_D = [0.0] * count, list(values_D)
    compared_D, scale_D = [0.0] * count, [1.0] * count
    for decisions in anchors:
        if len(decisions) > 1:
            size = sizes_D[decisions[0]] if sizes_D else 0.0
            comparison = relative([values_D[d] for d in decisions], scale, size=size)
            baseline, others, divisor = comparison.baselines[0], len(decisions) - 1.0, comparison.scale
            for d, advantage in zip(decisions, comparison.advantages, strict=True):
                advantages_D[d], baselines_D[d] = advantage, baseline
                compared_D[d], scale_D[d] = others, divisor
    return advantages_D, {"baseline": baselines_D, "compared": compared_D, "scale": scale_D}


def returns_to_go(episodes: Sequence[EpisodeRewards], gamma: float) -> list[float]:
    """[D] discounted returns-to-go."""
    return list(chain.from_iterable(discounted_returns(episode.rewards_T, gamma) for episode in episodes))


def anchor_sizes(anchors: Sequence[Sequence[int]], starts: Set[int]) -> dict[str, float]:
    """How often states met. Siblings share their first state, so later decisions are counted apart.

    Args:
        starts: the first decision of each episode.
    """
    sizes = [len(decisions) for decisions in anchors]
    decisions, alone = sum(sizes), [anchor[0] for anchor in anchors if len(anchor) == 1]
    later = decisions - len(starts)
    alone_later = sum(d not in starts for d in alone)
    return {
        "anchors/groups": float(len(sizes)),
        "anchors/singleton_frac": len(alone) / max(decisions, 1),
        "anchors/mean_size": decisions / max(len(sizes), 1),
        "anchors/max_size": float(max(sizes, default=0)),
        "anchors/met_after_start_frac": 1.0 - alone_later / max(later, 1),
    }


def first_decisions(episodes: Sequence[EpisodeRewards]) -> set[int]:
    """Numbers of the first decisions of all episodes."""
    return {*accumulate((len(episode.rewards_T) for episode in episodes[:-1]), initial=0)}


def refuse_missing_keys(episodes: Sequence[EpisodeRewards], reader: str) -> None:
    """Refuse episodes whose state keys are not one a decision; `reader` is the estimator that needs them."""
    for episode in episodes:
        keys, decisions = len(episode.state_keys_T), len(episode.rewards_T)
        if keys != decisions:
            raise AdvantageError(
                f"{keys} state keys for {decisions} decisions; {reader} compares those made in the same "
                "state",
                where=place(episode.rollout_id),
                hint="the task app sends them when algorithm.state_hashing_function names one",
            )
