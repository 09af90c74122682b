"""GiGPO: compares whole episodes with their siblings, and decisions with others in the same state."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import Any, cast

from pydantic import BaseModel, Field

from shared_schemas.rounding import add_up
from shared_schemas.trajectory import ObservationData
from trainer_backend.core.advantages.derivation import AT_STATE, BY_STATE, two_levels
from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, EstimatorPlug, siblings
from trainer_backend.core.advantages.levels import AdditiveKeys, LevelKeys, StateKeys, summed_levels
from trainer_backend.core.advantages.state_graph import (
    Columns,
    anchor_sizes,
    anchors,
    first_decisions,
    refuse_missing_keys,
    relative_at,
    return_sizes,
    returns_to_go,
)
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError, place


class AnchorKeys(LevelKeys, StateKeys):
    """Keys of `gigpo` and of `gigpo_additive`."""

    default_step_reward: float = 0.0
    """gigpo: constant that is added to each reward when the returns of decisions are computed; a job may set
    it only while step rewards are off"""
    context_depth: int = Field(default=0, ge=0, le=16)
    """gigpo: number K of additional comparisons, as in HGPO; the k-th is made among decisions whose current
    state and k earlier states are equal; 0: only decisions with the same current state are compared"""
    context_alpha: float = Field(default=1.0, ge=0)
    """gigpo: weight (k + 1)^context_alpha of the comparison in which k earlier states are equal"""


class GigpoKeys(AnchorKeys):
    """Keys of `gigpo`, which computes the convex sum."""

    omega: float = Field(default=0.5, ge=0, le=1)
    """gigpo: weight of the episode's advantage; the step's advantage has weight 1 - omega"""


class GigpoAdditiveKeys(AnchorKeys, AdditiveKeys):
    """Keys of `gigpo_additive`, which computes the paper's sum."""


def gigpo(episodes: Sequence[EpisodeRewards], keys: GigpoKeys) -> Advantages:
    """Compute group-in-group advantages: a convex sum of the episode's and the decision's advantage.

        A_{i,t} = omega * A_E(i) + (1 - omega) * A_S(i, t)
        A_E(i)    = (R_i - mean_j R_j) / Fnorm,         R_i the score, over all episodes j of the group
        A_S(i, t) = (G_{i,t} - mean G) / Fnorm,         over the group's decisions with the same state key

    G is the return-to-go of r + default_step_reward. Fnorm is the sample std (fnorm "std") or 1 (fnorm
    "one"). Decisions are compared only within their group: decisions of two groups are never in the same
    state, even if their state keys are equal. A_E is 0 for an episode without siblings, A_S is 0 for the only
    decision in a state, and both are 0 where all compared numbers are equal.

    With context_depth K > 0, A_S is a weighted mean of K + 1 comparisons. The comparison A_S,k, for k = 0..K,
    is made among decisions whose current state and k earlier states are equal. Its weight is
    (k + 1)^context_alpha. The mean leaves out the A_S,k that are 0. With K > 0, A_S has no parts.

    Source: Feng et al., GiGPO, arXiv:2505.10978, eq. 3 to 7; the convex sum: source 2, Task 2.4; contexts:
    HGPO, arXiv:2602.22817. Neither this sum nor that of `gigpo_additive` equals the policy gradient in
    expectation (DESIGN.md 4.7).
    """
    return _gigpo("gigpo", episodes, keys, (keys.omega, 1.0 - keys.omega))


def gigpo_additive(episodes: Sequence[EpisodeRewards], keys: GigpoAdditiveKeys) -> Advantages:
    """Compute the paper's sum: A_{i,t} = A_E(i) + w * A_S(i, t), with w = step_advantage_w.

    A_E and A_S are those of `gigpo`. With w = (1 - omega) / omega, `gigpo` is omega times this sum.

    Source: Feng et al., GiGPO, arXiv:2505.10978, eq. 8.
    """
    return _gigpo("gigpo_additive", episodes, keys, (1.0, keys.step_advantage_w))


def _gigpo(
    name: str, episodes: Sequence[EpisodeRewards], keys: AnchorKeys, weights: tuple[float, float]
) -> Advantages:
    """Compute weights[0] * A_E + weights[1] * A_S."""
    siblings(episodes)  # raises AdvantageError if a reward is not finite
    refuse_missing_keys(episodes, name)
    extra = keys.default_step_reward
    rewarded = [
        replace(episode, rewards_T=[add_up([reward, extra]) for reward in episode.rewards_T])
        if extra
        else episode
        for episode in episodes
    ]
    met = anchors(episodes)
    of_steps_D, parts_D = _compare_steps(rewarded, met, keys)
    sizes = anchor_sizes(met, first_decisions(episodes))
    return summed_levels(episodes, keys, of_steps_D, parts_D, sizes, weights=weights, scale=keys.scale)


def _compare_steps(
    episodes: Sequence[EpisodeRewards], met: Sequence[Sequence[int]], keys: AnchorKeys
) -> tuple[list[float], Columns]:
    """Return the [D] advantages A_S of all decisions, and their parts.

    `met` lists the decisions of each state, whatever their earlier states (k = 0).
    """
    scale, returns_D = keys.scale, returns_to_go(episodes, keys.gamma)
    sizes_D = return_sizes(episodes, keys.gamma)
    own_D, parts_D = relative_at(met, returns_D, scale, sizes_D)
    if keys.context_depth == 0:
        return own_D, {"return": returns_D, **parts_D}
    depths = [own_D] + [
        relative_at(anchors(episodes, depth), returns_D, scale, sizes_D)[0]
        for depth in range(1, keys.context_depth + 1)
    ]
    weights = [(depth + 1) ** keys.context_alpha for depth in range(len(depths))]
    return [_mean_of_nonzero(values, weights) for values in zip(*depths, strict=True)], {}


def _mean_of_nonzero(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of the values that are not 0, or 0 if all values are 0."""
    total = math.fsum(weight for value, weight in zip(values, weights, strict=True) if value)
    weighted = math.fsum(weight * value for value, weight in zip(values, weights, strict=True))
    return weighted / total if total else 0.0


def system_apply_gigpo_to_batch_steps(
    batch_of_step_data_lists: list[list[Any]],
    final_scores_for_rollouts: list[float],
    omega: float,
    gamma: float,
    state_hashing_function: Callable[[Any], Any],
    default_step_reward: float = 0.0,
    *,
    group_keys: Sequence[Any] | None = None,
) -> list[list[Any]]:
    """Add `gigpo` advantages to copies of steps, which are `StepData` or objects with its attributes.

    A_E comes from the final scores, A_S from G_k, the discounted sum of base_reward from step k on. If any
    step of a group lacks base_reward, default_step_reward replaces each missing reward, and every sibling's
    final score is added at the sibling's last step, so that the returns of the group are comparable.

    Args:
        batch_of_step_data_lists: the steps of each rollout, in order. Reads observation_data and, if present,
            base_reward and policy_value_estimate.
        final_scores_for_rollouts: the score of each rollout.
        omega: weight of A_E, in [0, 1]; the weight of A_S is 1 - omega.
        gamma: discount per decision, in [0, 1].
        state_hashing_function: maps a step's observation_data to a key, which may be a list or a dict. Steps
            with equal keys are in the same state.
        default_step_reward: reward of a step without base_reward, such as a small cost of time.
        group_keys: one key per rollout, equal for siblings; None: all rollouts are siblings.

    Returns:
        Copies of the steps with the floats `advantage` and `return_to_go`. `return_to_go` is advantage plus
        policy_value_estimate, or G_k for a step without policy_value_estimate.

    Raises:
        AdvantageError: the number of scores or keys differs from the number of rollouts; a step has no
            observation_data, or its attributes cannot be set; a key cannot be compared; see `siblings`.
        ValueError: omega or gamma is outside [0, 1].

    Source: source 2 (docs/sources.md), Task 2.4.
    """
    batch, scores = batch_of_step_data_lists, [float(score) for score in final_scores_for_rollouts]
    keys = [()] * len(batch) if group_keys is None else list(group_keys)
    for what, given in (("final scores", scores), ("group keys", keys)):
        if len(given) != len(batch):
            raise AdvantageError(f"{len(given)} {what} for {len(batch)} rollouts")
    group_names, states = dict[Hashable, str](), dict[Hashable, str]()
    names = [f"number {index}" for index in range(len(batch))]
    groups = [_name(key, group_names, place(name)) for key, name in zip(keys, names, strict=True)]
    rewards = _base_rewards(batch, scores, groups, float(default_step_reward))
    episodes = []
    for name, group, steps, score, rewards_T in zip(names, groups, batch, scores, rewards, strict=True):
        state_keys_T = [
            _name(state_hashing_function(_observation(step, name, t)), states, place(name, t + 1))
            for t, step in enumerate(steps)
        ]
        episodes.append(EpisodeRewards(name, group, rewards_T, state_keys_T, final_score=score))
    advantages = gigpo(episodes, GigpoKeys(gamma=float(gamma), omega=float(omega))).per_episode
    return [
        _fill_in(steps, row_T, discounted_returns(episode.rewards_T, float(gamma)), episode.rollout_id)
        for steps, episode, row_T in zip(batch, episodes, advantages, strict=True)
    ]


def _name(value: Any, names: dict[Hashable, str], where: str) -> str:
    """Return a name for a value. Equal values get equal names, even if they are not hashable."""
    try:
        return names.setdefault(_hashable(value), str(len(names)))
    except TypeError as error:
        message = f"a {type(value).__name__} cannot be compared as a key: {error}"
        raise AdvantageError(message, where=where, hint="Return a text, a number or a tuple.") from error


def _hashable(value: Any) -> Hashable:
    """Convert a value to a hashable key; lists, dicts, sets, models and arrays are keyed by type and content.

    Equal values get equal keys, so 1, 1.0 and True have the same key.
    """
    kind = type(value).__name__
    if isinstance(value, ObservationData):  # its fields contain only a conversation's new messages
        return kind, _hashable(value.model_dump()), _hashable(value.prompt)
    if isinstance(value, BaseModel):
        return kind, _hashable(value.model_dump())
    if isinstance(value, Mapping):
        return kind, frozenset((_hashable(key), _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(map(_hashable, value))
    if isinstance(value, Set):
        return kind, frozenset(map(_hashable, value))
    if hasattr(value, "tolist"):  # arrays of numpy, tensors of torch
        return kind, _hashable(value.tolist())
    hash(value)
    return cast(Hashable, value)


def _observation(step: Any, rollout: str, t: int) -> Any:
    if not hasattr(step, "observation_data"):
        message = f"a {type(step).__name__} has no observation_data"
        raise AdvantageError(message, where=place(rollout, t + 1))
    return step.observation_data


def _fill_in(
    steps: Sequence[Any], advantages_T: Sequence[float], returns_T: Sequence[float], rollout: str
) -> list[Any]:
    """Return copies of a rollout's steps with the attributes `advantage` and `return_to_go`."""
    return [
        _copy_with(
            step,
            place(rollout, t + 1),
            advantage=advantage,
            return_to_go=return_to_go(step, advantage, discounted),
        )
        for t, (step, advantage, discounted) in enumerate(zip(steps, advantages_T, returns_T, strict=True))
    ]


def _copy_with(step: Any, where: str, **values: float) -> Any:
    """Return a copy of a step with `values` set as attributes, even if the step is frozen."""
    if isinstance(step, BaseModel):
        return step.model_copy(update=values)
    copied = copy(step)
    try:
        for name, value in values.items():
            object.__setattr__(copied, name, value)
    except AttributeError as error:
        message = f"a {type(step).__name__} takes no attribute: {error}"
        hint = "Give it the fields advantage and return_to_go."
        raise AdvantageError(message, where=where, hint=hint) from error
    return copied


def return_to_go(step: Any, advantage: float, discounted: float) -> float:
    """Return a critic's target: advantage plus value, or the discounted return if the step has no value."""
    value = getattr(step, "policy_value_estimate", None)
    return discounted if value is None else advantage + float(value)


def _base_rewards(
    batch: Sequence[Sequence[Any]], scores: Sequence[float], groups: Sequence[str], default: float
) -> list[list[float]]:
    """Return the [T] rewards of each rollout, with `default` for each missing reward.

    If any step of a group lacks a reward, each rollout of the group gets its final score in addition to the
    reward of its last step.
    """
    given = [[getattr(step, "base_reward", None) for step in steps] for steps in batch]
    lack = [any(reward is None for reward in row_T) for row_T in given]
    sparse = {group for group, lacks_one in zip(groups, lack, strict=True) if lacks_one}
    rewards = [[default if reward is None else float(reward) for reward in row_T] for row_T in given]
    for group, score, row_T in zip(groups, scores, rewards, strict=True):
        if row_T and group in sparse:
            row_T[-1] = add_up([row_T[-1], score])
    return rewards


_PLUG: EstimatorPlug[Any] = EstimatorPlug(
    gigpo,
    GigpoKeys,
    two_levels(["step_advantage = (return - baseline) / scale"], ("baseline", AT_STATE)),
    needs_state_keys=True,
    divides_by_std=True,
    bias=BY_STATE,
)
PLUGS = {"gigpo": _PLUG, "gigpo_additive": replace(_PLUG, compute=gigpo_additive, keys=GigpoAdditiveKeys)}
