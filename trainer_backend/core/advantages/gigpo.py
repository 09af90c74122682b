"""GiGPO: whole episodes against their siblings, and decisions against others made in the same state."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from copy import copy
from itertools import accumulate, chain
from typing import Any, cast

from pydantic import BaseModel

from shared_schemas.trajectory import ObservationData
from trainer_backend.core.advantages.episodes import (
    AdvantageConfig,
    Advantages,
    EpisodeRewards,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.spread import SCALES, Scale, relative
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError, place

# [D] numbers of all decisions of the batch, one episode after the other, by the name of the part.
Columns = dict[str, list[float]]


def gigpo(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Group-in-group advantages, joined as a convex sum.

        A_{i,t} = omega * A_E(i) + (1 - omega) * A_S(i, t)
        A_E(i)    = (R_i - mean_j R_j) / Fnorm,         R_i = sum_t r_{i,t}, over the siblings j
        A_S(i, t) = (G_{i,t} - mean G) / Fnorm,         over the group's decisions with the same state key

    G is the return-to-go of r + default_step_reward. Decisions are compared inside their group alone: equal
    keys of two groups are two states. One score, one decision in a state, and no spread give 0. Fnorm is the
    sample std ("std") or 1 ("one"). With context_depth K, A_S is the mean of A_S,k for k = 0..K, weighted by
    (k + 1)^alpha, where A_S,k compares decisions whose last k + 1 states are equal, and only those that are
    not 0 count.

    Args:
        episodes: all episodes of the batch, groups in any order, with state_keys_T.
        config: gamma, omega, fnorm, episode_baseline, context_depth, context_alpha are read.

    Returns:
        [T] advantages for each episode; their parts (with context_depth not those of A_S); how often
        states met.

    Raises:
        AdvantageError: see `siblings`; state keys that are not one a decision.
        ValueError: gamma or omega outside [0, 1].

    Source: Feng et al., GiGPO, arXiv:2505.10978, eq. 3 to 7; the convex sum: source 2, Task 2.4; contexts:
    HGPO, arXiv:2602.22817. Neither sum equals the policy gradient in expectation (DESIGN.md 4.7).
    """
    if not 0.0 <= config.omega <= 1.0:
        raise ValueError(f"omega must lie in [0, 1], got {config.omega}")
    return _gigpo(episodes, config, (config.omega, 1.0 - config.omega))


def gigpo_additive(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """The paper's sum: A_{i,t} = A_E(i) + w * A_S(i, t), with w = step_advantage_w.

    All else as in `gigpo`, which is omega times this one at w = (1 - omega) / omega.

    Source: Feng et al., GiGPO, arXiv:2505.10978, eq. 8.
    """
    if not 0.0 <= config.step_advantage_w < math.inf:
        raise ValueError(f"step_advantage_w must be finite and at least 0, got {config.step_advantage_w}")
    return _gigpo(episodes, config, (1.0, config.step_advantage_w))


def _gigpo(
    episodes: Sequence[EpisodeRewards], config: AdvantageConfig, weights: tuple[float, float]
) -> Advantages:
    """The weighted sum; `weights` are those of A_E and A_S."""
    groups = siblings(episodes)
    _refuse_missing_keys(episodes)
    scale = SCALES[config.fnorm]
    returns_D = _returns(episodes, config)
    parts_D, flat = _of_episodes(episodes, groups, config.episode_baseline, scale)
    of_steps_D, diagnostics = _of_steps(episodes, returns_D, config, scale)
    parts_D |= of_steps_D
    pairs = list(zip(parts_D["episode_advantage"], parts_D["step_advantage"], strict=True))
    diagnostics |= _agreement(pairs) | group_counts(groups, flat=flat)
    for name, weight in zip(("episode_weight", "step_weight"), weights, strict=True):
        parts_D[name] = [weight] * len(returns_D)
    of_episode, of_step = weights
    combined_D = [of_episode * own + of_step * step for own, step in pairs]
    parts = {name: _by_episode(values_D, episodes) for name, values_D in parts_D.items()}
    return Advantages(_by_episode(combined_D, episodes), diagnostics, parts)


def _returns(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> list[float]:
    """[D] returns-to-go of all decisions of the batch, one episode after the other."""
    extra = config.default_step_reward
    rewards = [
        [reward + extra for reward in episode.rewards_T] if extra else episode.rewards_T
        for episode in episodes
    ]
    return list(chain.from_iterable(discounted_returns(rewards_T, config.gamma) for rewards_T in rewards))


def _by_episode(values_D: Sequence[float], episodes: Sequence[EpisodeRewards]) -> list[list[float]]:
    ends = accumulate(len(episode.rewards_T) for episode in episodes)
    return [
        list(values_D[end - len(episode.rewards_T) : end])
        for end, episode in zip(ends, episodes, strict=True)
    ]


def _of_episodes(
    episodes: Sequence[EpisodeRewards], groups: Mapping[str, list[int]], baseline: str, scale: Scale
) -> tuple[Columns, int]:
    """A_E with its parts, and how many groups of two or more have no spread."""
    rows = [(0.0, 0.0, 0.0, 0.0)] * len(episodes)
    flat = 0
    for members in groups.values():
        scores_G = [episodes[index].score for index in members]
        # Counted by step, a score stands in the mean and the std once for every decision of its episode.
        times_G = [len(episodes[index].rewards_T) if baseline == "step" else 1 for index in members]
        counted = [score for score, times in zip(scores_G, times_G, strict=True) for _ in range(times)]
        compared = relative(counted, scale)
        for index, score, end in zip(members, scores_G, accumulate(times_G), strict=True):
            rows[index] = (score, compared.baselines[0], compared.scale, compared.advantages[end - 1])
        flat += len(members) > 1 and not any(compared.advantages)
    names = ("score", "score_baseline", "score_scale", "episode_advantage")
    return {
        name: [row[k] for row, episode in zip(rows, episodes, strict=True) for _ in episode.rewards_T]
        for k, name in enumerate(names)
    }, flat


def _of_steps(
    episodes: Sequence[EpisodeRewards], returns_D: list[float], config: AdvantageConfig, scale: Scale
) -> tuple[Columns, dict[str, float]]:
    """A_S with its parts, and how often states met (of the current state alone, k = 0)."""
    anchors = _anchors(episodes, 0)
    own = _relative_at(anchors, returns_D, scale)
    if config.context_depth == 0:
        return {"return": returns_D, **own}, _anchor_sizes(anchors)
    depths = [own["step_advantage"]] + [
        _relative_at(_anchors(episodes, depth), returns_D, scale)["step_advantage"]
        for depth in range(1, config.context_depth + 1)
    ]
    weights = [(depth + 1) ** config.context_alpha for depth in range(len(depths))]
    joined = [_weighted_mean(values, weights) for values in zip(*depths, strict=True)]
    return {"step_advantage": joined}, _anchor_sizes(anchors)


def _anchors(episodes: Sequence[EpisodeRewards], depth: int) -> list[list[int]]:
    """Decisions of a group that share their state and the `depth` states before it."""
    anchors: dict[str, dict[object, list[int]]] = {}
    start = 0
    for episode in episodes:
        of_group, keys = anchors.setdefault(episode.group_id, {}), episode.state_keys_T
        for t in range(depth, len(keys)):
            state = keys[t] if depth == 0 else tuple(keys[t - depth : t + 1])
            of_group.setdefault(state, []).append(start + t)
        start += len(keys)
    return [decisions for of_group in anchors.values() for decisions in of_group.values()]


def _relative_at(anchors: Sequence[Sequence[int]], returns_D: list[float], scale: Scale) -> Columns:
    """A_S with its parts; a decision alone in its state is its own baseline."""
    count = len(returns_D)
    advantages_D, baselines_D = [0.0] * count, list(returns_D)
    compared_D, scale_D = [0.0] * count, [1.0] * count
    for decisions in anchors:
        if len(decisions) > 1:
            compared = relative([returns_D[d] for d in decisions], scale)
            for d, advantage, baseline in zip(
                decisions, compared.advantages, compared.baselines, strict=True
            ):
                advantages_D[d], baselines_D[d] = advantage, baseline
                compared_D[d], scale_D[d] = len(decisions) - 1.0, compared.scale
    return {
        "step_advantage": advantages_D, "baseline": baselines_D, "compared": compared_D, "scale": scale_D
    }  # fmt: skip


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Over the values that are not 0; 0 if all are."""
    total = math.fsum(weight for value, weight in zip(values, weights, strict=True) if value)
    weighted = math.fsum(weight * value for value, weight in zip(values, weights, strict=True))
    return weighted / total if total else 0.0


def _anchor_sizes(anchors: Sequence[Sequence[int]]) -> dict[str, float]:
    sizes = [len(decisions) for decisions in anchors]
    decisions = sum(sizes)
    return {
        "anchors/groups": float(len(sizes)),
        "anchors/singleton_frac": sizes.count(1) / max(decisions, 1),
        "anchors/mean_size": decisions / max(len(sizes), 1),
        "anchors/max_size": float(max(sizes, default=0)),
    }


def _agreement(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Metrics: mean sizes of A_E and A_S, and how often their signs agree where neither is 0."""
    products = [of_episode * of_step for of_episode, of_step in pairs]
    agreeing, telling = sum(p > 0 for p in products), sum(p != 0 for p in products)
    decisions = max(len(products), 1)
    return {
        "anchors/episode_advantage_mean": math.fsum(abs(own) for own, _ in pairs) / decisions,
        "anchors/step_advantage_mean": math.fsum(abs(step) for _, step in pairs) / decisions,
        "anchors/step_advantage_zero_frac": sum(step == 0.0 for _, step in pairs) / decisions,
        "anchors/sign_agreement": agreeing / telling if telling else 1.0,
    }


def _refuse_missing_keys(episodes: Sequence[EpisodeRewards]) -> None:
    for episode in episodes:
        keys, decisions = len(episode.state_keys_T), len(episode.rewards_T)
        if keys != decisions:
            raise AdvantageError(
                f"{keys} state keys for {decisions} decisions; gigpo compares those made in the same state",
                where=place(episode.rollout_id),
                hint="the task app sends them when algorithm.state_hashing_function names one",
            )


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
    """`gigpo` for `StepData`, or any objects with its published attributes: the door that source 2 publishes.

    A_E comes from the final scores. G_k sums the steps' base_reward, discounted; default_step_reward stands
    for one that is None, and where all of a rollout are None its final score is added at its last step.

    Args:
        batch_of_step_data_lists: the steps of each rollout, in order. Read are observation_data and, where a
            step has them, base_reward and policy_value_estimate.
        final_scores_for_rollouts: of each rollout.
        omega: share of A_E, in [0, 1]; A_S has the rest.
        gamma: discount per decision, in [0, 1].
        state_hashing_function: of a step's observation_data; equal results are one state, lists and dicts
            too.
        default_step_reward: such as a small cost of time.
        group_keys: of each rollout, equal ones for siblings; None: all are siblings.

    Returns:
        Copies of the steps with `advantage` and `return_to_go`, both float: G_k, or advantage plus value
        where the policy has one. The steps given stay as they were.

    Raises:
        AdvantageError: not one score, or key, a rollout; a step without observation_data, or that takes no
            attribute; a key that cannot be compared; see `siblings`.
        ValueError: omega or gamma outside [0, 1].

    Source: source 2, Task 2.4.
    """
    batch, scores = batch_of_step_data_lists, [float(score) for score in final_scores_for_rollouts]
    keys = [()] * len(batch) if group_keys is None else list(group_keys)
    for what, given in (("final scores", scores), ("group keys", keys)):
        if len(given) != len(batch):
            raise AdvantageError(f"{len(given)} {what} for {len(batch)} rollouts")
    groups, states = _Names(), _Names()
    episodes = []
    for index, (steps, score, key) in enumerate(zip(batch, scores, keys, strict=True)):
        name = f"number {index}"
        state_keys_T = [
            states.of(state_hashing_function(_observation(step, name, t)), place(name, t + 1))
            for t, step in enumerate(steps)
        ]
        rewards_T = _base_rewards(steps, score, float(default_step_reward))
        group = groups.of(key, place(name))
        episodes.append(EpisodeRewards(name, group, rewards_T, state_keys_T, final_score=score))
    advantages = gigpo(episodes, AdvantageConfig(gamma=float(gamma), omega=float(omega))).per_episode
    return [
        _populated(steps, row_T, discounted_returns(episode.rewards_T, float(gamma)), episode.rollout_id)
        for steps, episode, row_T in zip(batch, episodes, advantages, strict=True)
    ]


class _Names:
    """A name for each of some values, equal ones for equal values, whether they can be hashed or not."""

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}

    def of(self, value: Any, where: str) -> str:
        try:
            return self._names.setdefault(_hashable(value), str(len(self._names)))
        except TypeError as error:
            told = f"a {type(value).__name__} cannot be compared as a key: {error}"
            raise AdvantageError(told, where=where, hint="Return a text, a number or a tuple.") from error


def _hashable(value: Any) -> Hashable:
    """Equal for equal values (1, 1.0, True meet); lists, dicts, sets, models, arrays by type and content."""
    kind = type(value).__name__
    if isinstance(value, ObservationData):  # of a conversation its fields have only what is new
        return kind, _hashable(value.model_dump()), _hashable(value.prompt)
    if isinstance(value, BaseModel):
        return kind, _hashable(value.model_dump())
    if isinstance(value, Mapping):
        return kind, frozenset((_hashable(key), _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(map(_hashable, value))
    if isinstance(value, Set):
        return kind, frozenset(map(_hashable, value))
    if hasattr(value, "tolist"):  # numpy's and torch's
        return kind, _hashable(value.tolist())
    hash(value)
    return cast(Hashable, value)


def _observation(step: Any, rollout: str, t: int) -> Any:
    if not hasattr(step, "observation_data"):
        told = f"a {type(step).__name__} has no observation_data"
        raise AdvantageError(told, where=place(rollout, t + 1))
    return step.observation_data


def _populated(
    steps: Sequence[Any], advantages_T: Sequence[float], returns_T: Sequence[float], rollout: str
) -> list[Any]:
    """Copies of a rollout's steps, with advantage and return filled in."""
    return [
        _with(
            step,
            place(rollout, t + 1),
            advantage=advantage,
            return_to_go=return_to_go(step, advantage, discounted),
        )
        for t, (step, advantage, discounted) in enumerate(zip(steps, advantages_T, returns_T, strict=True))
    ]


def _with(step: Any, where: str, **values: float) -> Any:
    """A copy with these attributes; also of a step that is frozen, for the copy is ours."""
    if isinstance(step, BaseModel):
        return step.model_copy(update=values)
    copied = copy(step)
    try:
        for name, value in values.items():
            object.__setattr__(copied, name, value)
    except AttributeError as error:
        told = f"a {type(step).__name__} takes no attribute: {error}"
        hint = "Give it the fields advantage and return_to_go."
        raise AdvantageError(told, where=where, hint=hint) from error
    return copied


def return_to_go(step: Any, advantage: float, discounted: float) -> float:
    """Return a critic's targets: advantage plus value, or the discounted return without a critic."""
    value = getattr(step, "policy_value_estimate", None)
    return discounted if value is None else advantage + float(value)


def _base_rewards(steps: Sequence[Any], final_score: float, default: float) -> list[float]:
    given = [getattr(step, "base_reward", None) for step in steps]
    rewards = [default if reward is None else float(reward) for reward in given]
    if steps and all(reward is None for reward in given):
        rewards[-1] += final_score
    return rewards
