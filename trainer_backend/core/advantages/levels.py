"""Weighted sums of two levels of credit: an advantage of the whole episode and one of the decision."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal, TypeVar

from pydantic import Field

from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorKeys,
    ScoreKeys,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.spread import SCALES, Scale, relative, unscaled
from trainer_backend.core.advantages.state_graph import Columns
from trainer_backend.core.metric import Metric, Row

Number = TypeVar("Number", float, float | None)


class StateKeys(EstimatorKeys):
    """Keys of estimators that compare decisions made in the same state."""

    state_hashing_function: str = "default"
    """gigpo, g2po, graphgpo, gagpo: name of the state key; states with equal keys count as equal
    (docs/configuration.md)"""
    fnorm: Literal["std", "one"] = "std"
    """gigpo, g2po, graphgpo, gagpo: divisor of the differences from a mean; std: their sample standard
    deviation; one: 1"""

    @property
    def scale(self) -> Scale:
        """Return the function that computes the divisor for `fnorm`."""
        return SCALES[self.fnorm]


class LevelKeys(ScoreKeys):
    """Keys of estimators that add a decision's own advantage to the advantage of its episode."""

    episode_baseline: Literal["trajectory", "step"] = "trajectory"
    """gigpo, gigpo_soft, g2po, graphgpo: how often an episode's score counts in its group's mean and std;
    trajectory: once; step: once per decision of the episode"""


class AdditiveKeys(LevelKeys):
    """Keys of estimators in whose sum the episode's advantage has the weight 1."""

    step_advantage_w: float = Field(default=1.0, ge=0)
    """gigpo_additive, gigpo_soft, g2po, graphgpo: weight of the step's advantage"""


class GraphKeys(AdditiveKeys, StateKeys):
    """Job keys of estimators that compare a decision by the graph of the states that its group visited."""


def summed_levels(
    episodes: Sequence[EpisodeRewards],
    keys: LevelKeys,
    of_steps_D: Sequence[float],
    parts_D: Columns,
    met: Mapping[str, float],
    *,
    weights: tuple[float, float],
    scale: Scale = unscaled,
) -> Advantages:
    """Compute A_{i,t} = weights[0] * A_E(i) + weights[1] * A_S(i, t), and the parts of the sum.

        A_E(i) = (R_i - mean_j R_j) / Fnorm,     R_i the score, over all episodes j of the group

    Args:
        of_steps_D: A_S of all decisions, episode after episode.
        parts_D: the parts of A_S, in the same order.
        met: metrics of repeated states, which are added to the diagnostics.
        scale: computes Fnorm from the differences R_i - mean_j R_j.
    """
    groups = siblings(episodes)
    of_episodes = _compare_episodes(episodes, groups, keys.episode_baseline, scale)
    of_steps = by_episode(of_steps_D, episodes)
    own_weight, step_weight = weights
    advantages = [
        [own_weight * own["episode_advantage"] + step_weight * step for step in steps_T]
        for own, steps_T in zip(of_episodes, of_steps, strict=True)
    ]
    # Parts that are the same for all decisions of an episode.
    same_T = [own | {"episode_weight": own_weight, "step_weight": step_weight} for own in of_episodes]
    parts = {
        name: [[own[name]] * len(steps_T) for own, steps_T in zip(same_T, of_steps, strict=True)]
        for name in (same_T[0] if same_T else ())
    }
    of_parts = {name: by_episode(values_D, episodes) for name, values_D in parts_D.items()}
    counts = group_counts(groups, [[own["episode_advantage"]] for own in of_episodes])
    diagnostics = {**met, **_agreement(of_episodes, of_steps), **counts}
    return Advantages(advantages, diagnostics, {**parts, **of_parts, "step_advantage": of_steps})


def by_episode(values_D: Sequence[Number], episodes: Sequence[EpisodeRewards]) -> list[list[Number]]:
    """Split the [D] numbers of all decisions into the [T] numbers of each episode."""
    ends = accumulate(len(episode.rewards_T) for episode in episodes)
    numbers_D = list(values_D)  # so that slices are lists
    return [
        numbers_D[end - len(episode.rewards_T) : end] for end, episode in zip(ends, episodes, strict=True)
    ]


def _compare_episodes(
    episodes: Sequence[EpisodeRewards], groups: Mapping[str, list[int]], baseline: str, scale: Scale
) -> list[dict[str, float]]:
    """Return, for each episode, A_E and its parts by name; `baseline` is the key `episode_baseline`."""
    rows: list[dict[str, float]] = [{}] * len(episodes)
    for members in groups.values():
        scores_G = [episodes[index].score for index in members]
        # With "step", a score counts in mean and std once for every decision of its episode.
        times_G = [len(episodes[index].rewards_T) if baseline == "step" else 1 for index in members]
        counted = [score for score, times in zip(scores_G, times_G, strict=True) for _ in range(times)]
        size = max(episodes[index].score_size for index in members)
        compared = relative(counted, scale, size=size)
        for index, score, end in zip(members, scores_G, accumulate(times_G), strict=True):
            rows[index] = {
                "score": score,
                "score_baseline": compared.baselines[end - 1],
                "score_scale": compared.scale,
                "episode_advantage": compared.advantages[end - 1],
            }
    return rows


METRICS = (
    Row(
        Metric("anchors/episode_advantage_mean", "mean abs(A_E)"),
        Metric("anchors/step_advantage_mean", "mean abs(A_S)"),
        Metric("anchors/step_advantage_zero_frac", "share of decisions with A_S = 0"),
        Metric("anchors/sign_agreement", "share of decisions where A_E and A_S have the same sign, of those "
               "where neither is 0"),
        when="only with estimators that compare states, but not `gagpo`",
    ),
)  # fmt: skip


def _agreement(
    of_episodes: Sequence[Mapping[str, float]], of_steps: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Compute metrics: the sizes of A_E and A_S, and how often their signs agree where neither is 0."""
    sizes = [
        abs(own["episode_advantage"]) * len(row_T) for own, row_T in zip(of_episodes, of_steps, strict=True)
    ]
    products = [
        own["episode_advantage"] * step
        for own, steps_T in zip(of_episodes, of_steps, strict=True)
        for step in steps_T
    ]
    telling = len(products) - products.count(0.0)
    agreeing = len([p for p in products if p > 0.0])
    decisions = max(len(products), 1)
    return {
        "anchors/episode_advantage_mean": math.fsum(sizes) / decisions,
        "anchors/step_advantage_mean": math.fsum(map(abs, chain.from_iterable(of_steps))) / decisions,
        "anchors/step_advantage_zero_frac": sum(row_T.count(0.0) for row_T in of_steps) / decisions,
        "anchors/sign_agreement": agreeing / telling if telling else 1.0,
    }
